"""Writing an object as one stream of parts, from writes in any order.

Writers come in order, or nearly so. What comes early is kept until what lies before it has been sent. Bytes are copied,
since an upload keeps them until they are sent, and the caller's memory is used again. An object of one part is put in
one request, unless there is one; a larger one is looked for when its upload begins and before it ends, since uploads
have no such condition.
"""

from __future__ import annotations

import errno
import secrets
import threading
import time
from functools import partial

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.threads import together
from mcore_ckpt.storage._durable import save_error
from mcore_ckpt.storage._object_client import ABSENT, ObjectClient, Upload
from mcore_ckpt.storage.base import RangeWriter


class ObjectWriter(RangeWriter):
    """A new object. `finish` is for one thread, after the last `write` has returned."""

    direct = False

    def __init__(self, client: ObjectClient, key: str, name: str, size_bytes: int | None) -> None:
        self.name = name
        self._client = client
        self._key = key
        self._size_bytes = size_bytes
        self._part_bytes = client.part_bytes
        while size_bytes is not None and size_bytes > self._part_bytes * (client.max_parts - 1):
            self._part_bytes *= 2
        self._lock = threading.Lock()
        self._early: dict[int, bytes] = {}  # by their offset
        self._taken_bytes = 0  # from the first byte on
        self._last = b""  # of what was taken; where the end is not known, it may be cut
        self._first_part = bytearray()
        self._upload: Upload | None = None
        self._put_id = secrets.token_hex(8)
        self._sending: tuple[int, float] | None = None  # from which byte on, and since when
        self._ended = False
        self._made = False

    def write(self, offset: int, view: memoryview) -> None:
        view = memoryview(view).cast("B")
        if self._size_bytes is not None:  # what reaches past the end is padding
            view = view[: max(0, self._size_bytes - offset)]
        content = bytes(view)
        with self._lock:
            if self._ended:
                raise self._error(f"writing bytes [{offset}, {offset + len(content)})", _ended())
            if content:
                self._early[offset] = content
            while self._taken_bytes in self._early:
                self._take(self._early.pop(self._taken_bytes))

    def _take(self, content: bytes) -> None:
        """Send what was taken before, whose end is known now."""
        self._send(self._taken_bytes - len(self._last), self._last)
        self._taken_bytes += len(content)
        self._last = content

    def _send(self, offset: int, content: bytes) -> None:
        self._sending = offset, time.monotonic()
        try:
            if self._upload is None and len(self._first_part) + len(content) <= self._part_bytes:
                self._first_part += content
                return
            if self._upload is None:
                self._upload = self._begun()
                self._upload.write(bytes(self._first_part))
                self._first_part.clear()
            self._upload.write(content)
        except OSError as error:
            raise self._error(f"writing bytes [{offset}, {offset + len(content)})", error) from error
        finally:
            self._sending = None

    def _begun(self) -> Upload:
        upload, _ = together(
            2, partial(self._client.upload, self._key, self._part_bytes, self._put_id), self._look_for_others
        )
        return upload

    def _look_for_others(self) -> None:
        if self._client.head(self._key) is not None:
            raise FileExistsError(errno.EEXIST, "the object is there already")

    def in_progress(self) -> str:
        sending = self._sending
        return "" if sending is None else f"byte {sending[0]} and on for {time.monotonic() - sending[1]:.1f} s"

    def finish(self, size_bytes: int) -> None:
        with self._lock:
            if self._ended:
                raise self._error("finishing it", _ended())
            self._ended = True
            for offset in sorted(self._early):
                self._take(bytes(offset - self._taken_bytes))  # zeros, as a file has where nothing was written
                self._take(self._early.pop(offset))
            before_bytes = self._taken_bytes - len(self._last)
            last = self._last[: size_bytes - before_bytes]
            self._send(before_bytes, last + bytes(size_bytes - before_bytes - len(last)))
            try:
                version = None
                if self._upload is None:
                    version = self._client.put(self._key, bytes(self._first_part), ABSENT)
                else:
                    self._complete(self._upload)
                self._made = True
                self._compare(size_bytes, version)
            except OSError as error:
                raise self._error("finishing it", error) from error

    def _complete(self, upload: Upload) -> None:
        self._look_for_others()
        try:
            upload.complete()
        except OSError:
            there = self._client.head(self._key)
            if there is None or there.put_id != self._put_id:  # else an attempt has made it whose answer was lost
                raise

    def _compare(self, size_bytes: int, version: str | None) -> None:
        """Ask for what was made: an answer alone is no proof."""
        state = self._client.head(self._key)
        if state is None or state.size_bytes != size_bytes or version not in (None, state.version):
            got = "nothing" if state is None else f"{state.size_bytes} bytes, version {state.version}"
            text = f"the store has answered that it holds {size_bytes} bytes, version {version}, and holds {got}"
            raise OSError(errno.EREMOTEIO, text)

    def abort(self) -> None:
        self._ended = True  # (without the lock, which a write that hangs may hold)
        upload, self._upload, made, self._made = self._upload, None, self._made, False
        if upload is not None and not made:
            upload.abandon()
        try:
            if made:
                self._client.delete(self._key)
        except OSError as error:
            raise self._error("removing it", error) from error

    def _error(self, what: str, error: OSError) -> SaveError:
        return save_error(what, self.name, error)


def _ended() -> OSError:
    return OSError(errno.EBADF, "it is finished or aborted")
