"""A directory of a checkpoint in an object store: a prefix of keys.

An object is there complete or not at all, and durable as soon as it is there. So `sync` has nothing to do, and what a
file system does by links and renames is done by conditional puts here: of all who replace a version, one succeeds.

A data file is one stream of parts. What is written early is kept until what lies before it has been sent; all of it, if
the length is not known. Bytes are copied, since an upload keeps them, and the caller's memory is used again. An object
of one part is put in one request, unless there is one. A larger one is looked for when its upload begins and before it
ends, since uploads have no such condition, and when it is complete; a file whose name is unique by the coordinator.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError
from mcore_ckpt.core.process import run_concurrently
from mcore_ckpt.storage._object_client import ABSENT, Listing, ObjectClient, ObjectState, UndecidedError, Upload
from mcore_ckpt.storage.base import (
    DirectIo,
    FileVersion,
    OutcomeUnknownError,
    RangeReader,
    RangeWriter,
    Storage,
    check_name,
    open_error,
    save_error,
    saving,
)


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
        self._sent_bytes = 0  # from the first byte on
        self._small = bytearray()  # what was sent of an object of one part
        self._upload: Upload | None = None
        self._put_id = secrets.token_hex(8)
        self._ended = False
        self._made = False

    def write(self, offset: int, view: memoryview) -> None:
        view = memoryview(view).cast("B")
        if self._size_bytes is not None:  # what reaches past the end is padding
            view = view[: max(0, self._size_bytes - offset)]
        content = bytes(view)
        with self._lock:
            if self._ended:
                raise save_error(f"writing bytes [{offset}, {offset + len(content)})", self.name, _ended())
            if content:
                self._early[offset] = content
            while self._size_bytes is not None and self._sent_bytes in self._early:
                self._send(self._early.pop(self._sent_bytes), self._size_bytes)

    def _send(self, content: bytes, size_bytes: int) -> None:
        with saving(f"writing bytes [{self._sent_bytes}, {self._sent_bytes + len(content)})", self.name):
            self._sent_bytes += len(content)
            if size_bytes <= self._part_bytes:
                self._small += content
            elif self._upload is not None:
                self._upload.write(content)
            else:
                run_concurrently(2, partial(self._begin, content), self._look_for_others)

    def _begin(self, content: bytes) -> None:
        self._upload = self._client.upload(self._key, self._part_bytes, self._put_id)
        self._upload.write(content)

    def _look_for_others(self) -> None:
        if not self.is_unique and self._client.head(self._key) is not None:
            raise FileExistsError(errno.EEXIST, "the object is there already")

    def finish(self, size_bytes: int) -> None:
        with self._lock:
            if self._ended:
                raise save_error("finishing it", self.name, _ended())
            self._ended = True
            for offset in sorted(self._early):  # where nothing was written, a file has zeros
                content = bytes(offset - self._sent_bytes) + self._early.pop(offset)
                self._send(content[: size_bytes - self._sent_bytes], size_bytes)
            self._send(bytes(size_bytes - self._sent_bytes), size_bytes)
            with saving("finishing it", self.name):
                version = None
                if self._upload is None:
                    version = self._client.put(self._key, bytes(self._small), ABSENT)
                else:
                    self._complete(self._upload)
                self._made = True
                if version is not None or not self.is_unique:
                    self._compare(size_bytes, version)

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
        if made:
            with saving("removing it", self.name):
                self._client.delete(self._key)


def _ended() -> OSError:
    return OSError(errno.EBADF, "it is finished or aborted")


# Of an object that is opened, so much of its end comes with its length: small ones cost one request, and of a data file
# what tells that it is the right one.
_END_BYTES: Final = 64 * 1024
# Of an object that is changed, or given another name; it is held in memory, and put in one request.
_MAX_SMALL_BYTES: Final = 1024**3
_PIECE_BYTES: Final = 8 * 1024**2
_ATTEMPTS: Final = 100
# So often a store is asked what it holds after a put that it has answered.
_LOOKS: Final = 3


class ObjectStorage(Storage):
    """A prefix of keys of one bucket. `url`: of the directory, as the user gave it; `reopen` makes the storage of a
    URL, within a deadline, in another process, too.
    """

    # 10 ms for a request, and 100 MB/s by one connection.
    request_bytes = 1024 * 1024
    # One connection brings 50 to 100 MB/s of a node's 1 GB/s and more; half of its time may be latency.
    writes_at_once = 8
    reads_at_once = 8
    open_ahead = 4
    asks_at_once = 16
    is_store = True
    serves_forks = False

    def __init__(
        self,
        client: ObjectClient,
        prefix: str,
        url: str,
        reopen: Callable[[str, float | None], Storage],
        deadline_s: float | None = None,
    ) -> None:
        self._client = client if deadline_s is None else client.within(deadline_s)
        self.write_bytes = client.part_bytes
        self._deadline_s = deadline_s
        self._prefix = f"{prefix}/" if prefix else ""
        self._url = url
        self._reopen = reopen

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, (self._url, self._deadline_s)  # credentials stay here: another process asks for its own

    def __repr__(self) -> str:
        return f"ObjectStorage({self._url!r})"

    def within(self, deadline_s: float | None) -> Storage:
        return self._reopen(self._url, deadline_s)

    @property
    def location(self) -> str:
        return self._url

    def path(self, name: str) -> str:
        return f"{self._url}/{_check_key(name)}"

    def _key(self, name: str) -> str:
        return self._prefix + _check_key(name)

    @contextlib.contextmanager
    def _saving(self, what: str, name: str) -> Iterator[str]:
        """Yields the key; errors name what was to be done."""
        with saving(what, self.path(name)):
            yield self._key(name)

    @contextlib.contextmanager
    def _loading(self, name: str) -> Iterator[str]:
        key = self._key(name)
        try:
            yield key
        except OSError as error:
            raise _load_error(self.path(name), error) from error

    # Looking and reading

    def list(self) -> list[str]:
        return sorted(self._listed().sizes)

    def sizes(self) -> dict[str, int]:
        return self._known().sizes

    def folders(self) -> Sequence[str]:
        return sorted(self._known().folders)

    def _listed(self) -> Listing:
        try:
            return self._client.list(self._prefix)
        except OSError as error:
            raise LoadError(f"{self._url}: cannot be listed: {error.strerror or error}; {_advice(error)}") from error

    def _known(self) -> Listing:
        found = self._listed()
        if not found.sizes and not found.folders:
            raise CheckpointNotFoundError(f"{self._url}: no such directory (no object has a key that begins so)")
        return found

    def version(self, name: str) -> FileVersion | None:
        with self._loading(name) as key:
            state = self._client.head(key)
        return None if state is None else _version(state)

    def open_reader(self, name: str, *, direct: DirectIo = "auto") -> RangeReader:
        with self._loading(name) as key:
            state, end = self._client.get_end(key, _END_BYTES)
        return _ObjectReader(self._client, key, self.path(name), state, end)

    # Data files

    def open_writer(self, name: str, *, size_bytes: int | None = None, direct: DirectIo = "auto") -> RangeWriter:
        # (an object has its name when it is complete, and no writer replaces one)
        return ObjectWriter(self._client, self._key(name), self.path(name), size_bytes)

    def overwrite(self, name: str, content: bytes) -> bool:
        with self._saving("writing it", name) as key:
            state = self._client.head(key)
            if state is not None:
                self._client.put(key, content, state.version)
        return state is not None

    # Small files

    def publish(self, name: str, content: bytes) -> None:
        with self._saving("publishing it", name) as key:
            self._replace(key, content)

    def replace_if(self, name: str, content: bytes, before: FileVersion | None) -> FileVersion | None:
        with self._saving("publishing it", name) as key:
            condition = ABSENT
            if before is not None:
                there = self._client.head(key)
                if there is None or _version(there).number != before.number:
                    return None
                condition = there.version
            try:
                written = self._client.put(key, content, condition)
            except UndecidedError as error:
                raise self._unknown(name, error) from error
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOENT):
                    raise
                return None
            # What it replaces is removed next, so the answer alone is no proof.
            state = self._seen_after_put(name, key)
            if state is None or (state.version == condition and state.version != written):
                text = "the store has answered that it holds this, and does not; what was there before is still valid"
                raise OSError(errno.EREMOTEIO, text)
            return _version(state._replace(version=written, size_bytes=len(content)))

    def _seen_after_put(self, name: str, key: str) -> ObjectState | None:
        """What lies there after a put that the store has answered."""
        for attempt in range(_LOOKS):
            try:
                return self._client.head(key)
            except OSError as error:
                if attempt + 1 == _LOOKS:
                    raise self._unknown(name, error) from error
        raise AssertionError("unreachable")

    def _unknown(self, name: str, error: OSError) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            f"{self.path(name)}: the store has not said whether it holds this now ({error.strerror}). It may still "
            "come into force: its files stay, until the next save into this directory"
        )

    def _replace(self, key: str, content: bytes) -> None:
        """Put what replaces the version that is there, if any: an attempt that arrives after a later put is refused."""
        before: ObjectState | None = None
        for _ in range(_ATTEMPTS):
            try:
                self._client.put(key, content, ABSENT if before is None else before.version)
                return
            except OSError as error:
                if error.errno != errno.EEXIST and (error.errno != errno.ENOENT or before is None):
                    raise
            before = self._client.head(key)
        raise OSError(errno.EBUSY, "it changes all the time")

    def create(self, name: str, content: bytes) -> None:
        with self._saving("creating the file", name) as key:
            self._client.put(key, content, ABSENT)

    def _content(self, key: str) -> tuple[ObjectState, bytes]:
        """A version, and all of its bytes."""
        state, end = self._client.get_end(key, _END_BYTES)
        if state.size_bytes == len(end):
            return state, end
        if state.size_bytes > _MAX_SMALL_BYTES:
            text = f"has {state.size_bytes} bytes, and is changed up to {_MAX_SMALL_BYTES}; copy the checkpoint into a "
            raise OSError(errno.EFBIG, f"{text}directory (mcore-ckpt copy), and change it there")
        left_bytes = state.size_bytes - len(end)
        content = bytearray(left_bytes) + end
        view = memoryview(content)[:left_bytes]
        for at in range(0, left_bytes, _PIECE_BYTES):
            self._client.get_into(key, at, view[at : at + _PIECE_BYTES], state.version)
        return state, bytes(content)

    def move(self, source: str, name: str) -> None:
        with self._saving(f"renaming it to {name}", source) as key:
            content = self._content(key)[1]
            self._replace(self._key(name), content)
            self._client.delete(key)

    def delete(self, name: str, missing_ok: bool = True) -> None:
        with self._saving("deleting it", name) as key:
            if not missing_ok and self._client.head(key) is None:
                raise FileNotFoundError(errno.ENOENT, "there is no such object")
            self._client.delete(key)

    # The directory, which is there as long as there are keys

    def ensure(self) -> None:
        pass

    def sync(self, *, parents: bool = False) -> None:
        pass

    def remove(self) -> bool:
        found = self._listed()
        return not found.folders and not found.sizes


class _ObjectReader(RangeReader):
    """One version of an object."""

    def __init__(self, client: ObjectClient, key: str, name: str, state: ObjectState, end: bytes) -> None:
        self.name = name
        self.size_bytes = state.size_bytes
        self.version = _version(state)
        self._client = client
        self._key = key
        self._version = state.version
        self._end = end
        self._end_at = state.size_bytes - len(end)

    def read_into(self, offset: int, view: memoryview, arrived: Callable[[memoryview], None] | None = None) -> None:
        view = memoryview(view).cast("B")
        self.check_range(offset, len(view))
        asked_bytes = min(len(view), max(0, self._end_at - offset))
        if asked_bytes < len(view):
            start = offset + asked_bytes - self._end_at
            view[asked_bytes:] = self._end[start : start + len(view) - asked_bytes]
        if asked_bytes:
            try:
                self._client.get_into(self._key, offset, view[:asked_bytes], self._version)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOENT, errno.ERANGE):
                    raise CorruptCheckpointError(
                        f"{self.name}: was replaced or deleted while it was read ({error.strerror}); it had "
                        f"{self.size_bytes} bytes. Load again"
                    ) from error
                raise _load_error(self.name, error, offset, len(view)) from error
        if arrived is not None and len(view):
            arrived(view)

    def close(self) -> None:
        pass


def _check_key(name: str) -> str:
    """As `check_name`; a file system takes names that are no text, and a store does not."""
    try:
        check_name(name).encode()
    except UnicodeEncodeError as error:
        raise CorruptCheckpointError(
            f"file name {name!r}: is not UTF-8, as the keys of object stores are; rename the file"
        ) from error
    return name


def _version(state: ObjectState) -> FileVersion:
    number = int.from_bytes(hashlib.sha256(state.version.encode()).digest()[:7], "little")
    return FileVersion(number, state.size_bytes, state.modified_ns)


def _load_error(path: str, error: OSError, offset: int | None = None, length: int = 0) -> LoadError:
    if error.errno == errno.ENOENT:
        return open_error(path, FileNotFoundError(errno.ENOENT, str(error)))
    what = "cannot be read" if offset is None else f"bytes [{offset}, {offset + length}) cannot be read"
    return LoadError(f"{path}: {what}: {error.strerror or error}; {_advice(error)}")


def _advice(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return "check the credentials, and what they allow"
    return "check the store and the network to it"
