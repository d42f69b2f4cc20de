"""Writing an object in parts, straight from the caller's memory.

A write that covers a part exactly is sent from where it lies, by the thread that writes: so as many parts are in flight
as threads write. What covers a part in pieces is put together first. An object of one part is put in one request.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from functools import partial
from typing import Final

from mcore_ckpt.core.threads import together
from mcore_ckpt.storage._durable import save_error
from mcore_ckpt.storage._object_client import ABSENT, ObjectClient, Upload
from mcore_ckpt.storage.base import RangeWriter

# S3 knows no parts below it, but for the last.
_LEAST_PART_BYTES: Final = 5 * 1024 * 1024


class ObjectWriter(RangeWriter):
    """A new object. `finish` is for one thread, after the last `write` has returned.

    Without the object `token`, if one is named, other processes may be making an equal one: `abort` leaves that.
    """

    direct = False

    def __init__(
        self, client: ObjectClient, key: str, name: str, size_bytes: int | None, token: str | None = None
    ) -> None:
        self.name = name
        self._client = client
        self._key = key
        self._size_bytes = size_bytes
        self._token = token
        self._part_bytes = client.part_bytes
        while size_bytes is not None and size_bytes > self._part_bytes * (client.max_parts - 1):
            self._part_bytes *= 2
        self._lock = threading.Lock()
        self._upload: Upload | None = None
        self._waiting: dict[int, _Part] = {}  # of pieces; and the last one, whose end `finish` tells
        self._sending: dict[int, float] = {}  # parts, and since when
        self._ended = False
        self._made = False
        self._e_tag = ""  # of what one put has made

    def write(self, offset: int, view: memoryview) -> None:
        view = memoryview(view).cast("B")
        if self._size_bytes is not None:  # what reaches past the end is padding
            view = view[: max(0, self._size_bytes - offset)]
        part_bytes = self._part_bytes
        while len(view):
            number, start = divmod(offset, part_bytes)
            piece = view[: part_bytes - start]
            self._write_piece(number, start, piece)
            offset, view = offset + len(piece), view[len(piece) :]

    def _length_of(self, number: int) -> int | None:
        """Length of a part; None for what may be the last, as long as nobody knows."""
        if self._size_bytes is not None:
            return min(self._part_bytes, self._size_bytes - number * self._part_bytes)
        return self._part_bytes if any(other > number for other in self._waiting) else None

    def _write_piece(self, number: int, start: int, piece: memoryview) -> None:
        with self._lock:
            if self._ended:
                raise save_error(
                    f"writing {len(piece)} bytes of part {number + 1}",
                    self.name,
                    OSError(errno.EBADF, "it is finished or aborted"),
                )
            if number not in self._waiting and start == 0 and self._length_of(number) == len(piece):
                ready = [(number, piece)]
            else:
                self._waiting.setdefault(number, _Part()).add(start, piece)
                complete = [n for n, part in self._waiting.items() if part.is_complete(self._length_of(n))]
                ready = [(n, memoryview(self._waiting.pop(n).content)) for n in complete]
        for each, content in ready:
            self._send(each, content)

    def in_progress(self) -> str:
        now_s = time.monotonic()
        sending = sorted(self._sending.copy().items())
        return ", ".join(f"part {number + 1} for {now_s - since_s:.1f} s" for number, since_s in sending)

    def _send(self, number: int, content: memoryview) -> None:
        self._sending[number] = time.monotonic()
        try:
            if self._size_bytes is not None and self._size_bytes <= self._part_bytes:
                self._put(bytes(content))
                return
            with self._lock:
                if self._upload is None:
                    self._upload = self._begun()
            self._upload.part(number, content)
        except OSError as error:
            start = number * self._part_bytes
            raise save_error(f"writing bytes [{start}, {start + len(content)})", self.name, error) from error
        finally:
            del self._sending[number]

    def _begun(self) -> Upload:
        """An upload. Not every store looks again, when that is completed, whether there is an object."""
        begun: list[Upload] = []

        def begin() -> None:
            begun.append(self._client.upload(self._key, self._part_bytes))

        try:
            _, there = together(2, begin, partial(self._client.head, self._key))
            if there is not None:
                raise FileExistsError(errno.EEXIST, "the object is there already")
        except BaseException:
            for each in begun:
                with contextlib.suppress(OSError):  # the next save finds it
                    each.abort()
            raise
        return begun[0]

    def finish(self, size_bytes: int, fsync: bool = True) -> None:
        with self._lock:
            if self._ended:
                raise save_error("finishing it", self.name, OSError(errno.EBADF, "it is finished or aborted"))
            self._ended = True
            left, self._waiting = sorted(self._waiting.items()), {}
        try:
            if self._size_bytes is None and self._upload is None and size_bytes <= self._part_bytes:
                self._size_bytes = size_bytes
            for number, part in left:
                length = min(self._part_bytes, size_bytes - number * self._part_bytes)
                if length > 0:
                    self._send(number, memoryview(part.of_length(length)))
            if self._upload is not None:
                self._upload.complete(size_bytes)
            else:
                if not self._made:
                    self._put(b"")
                self._compare(size_bytes)
            self._made = True
        except OSError as error:
            raise save_error("finishing it", self.name, error) from error

    def _put(self, content: bytes) -> None:
        self._e_tag = self._client.put(self._key, content, ABSENT)
        self._made = True

    def _compare(self, size_bytes: int) -> None:
        """Ask for what one put has made: its answer alone is no proof."""
        state = self._client.head(self._key)
        if state is None or state.e_tag != self._e_tag or state.size_bytes != size_bytes:
            got = "nothing" if state is None else f"{state.size_bytes} bytes, ETag {state.e_tag}"
            text = f"the store has answered that it holds {size_bytes} bytes, ETag {self._e_tag}, and holds {got}"
            raise OSError(errno.EREMOTEIO, text)

    def abort(self) -> None:
        with self._lock:
            self._ended = True
            self._waiting.clear()
            upload, self._upload, made, self._made = self._upload, None, self._made, False
        if upload is None and not made:
            return
        try:
            is_own = self._token is None or self._client.head(self._token) is not None
            if upload is not None:
                upload.abort(own_parts_only=not is_own)
            elif made and is_own:
                self._client.delete(self._key, self._e_tag)
        except OSError as error:
            if error.errno != errno.EEXIST:  # another version by now, which this has not made
                raise save_error("removing it", self.name, error) from error


class _Part:
    """A part that is put together of pieces."""

    __slots__ = ("content", "filled_bytes")

    def __init__(self) -> None:
        self.content = bytearray()
        self.filled_bytes = 0

    def add(self, start: int, piece: memoryview) -> None:
        stop = start + len(piece)
        if len(self.content) < stop:
            self.content.extend(bytes(stop - len(self.content)))
        self.content[start:stop] = piece
        self.filled_bytes += len(piece)

    def is_complete(self, length: int | None) -> bool:
        return length is not None and self.filled_bytes >= length

    def of_length(self, length: int) -> bytearray:
        """Cut, or with zeros, as a file has where nothing was written."""
        if len(self.content) < length:
            self.content.extend(bytes(length - len(self.content)))
        return self.content[:length] if len(self.content) > length else self.content
