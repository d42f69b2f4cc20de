"""A directory of a checkpoint in an object store, a prefix of keys; and the client of the store, whichever it is.

An object is there complete or not at all, and durable as soon as it is there. So `sync` has nothing to do, and what a
file system does by links and renames is done by conditional puts here: of all who replace a version, one succeeds.

A data file is one stream of parts. What is written early is kept until what lies before it has been sent. Bytes are
copied, since an upload keeps them, and the caller's memory is used again. An object of one part is put in one request,
unless there is one. A larger one is looked for when its upload begins and before it ends, since uploads have no such
condition, and when it is complete; a file whose name is unique by the coordinator.

**The client** (`ObjectClient`) talks to one bucket, by a library that repeats what fails for a moment. Its errors are
`OSError`s whose text names the request, the bucket and the key; it never holds a credential.

    FileNotFoundError   there is no such object
    FileExistsError     the condition of a put does not hold: the object is there, or is another version
    PermissionError     the credentials are missing, wrong, or do not allow it
    UndecidedError      a conditional put was given up, and may still be done
    OSError(EREMOTEIO)  the store has answered with an error, or has not answered in time; there is no such bucket
    OSError(ETIMEDOUT)  what was sent came too slowly; sent again, it may arrive

A conditional put whose answer was lost may have made the object; the next attempt is then refused by what the first has
made. So each put has an id, which is an attribute of the object. After a refusal the store is asked whose object is
there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, LoadError, SaveError
from mcore_ckpt.core.process import run_concurrently
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

T = TypeVar("T")

# So long the end of an upload that is given up is waited for.
_REMOVED_WITHIN_S: Final = 2.0
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0
# How much of a deadline one request has: the rest is for giving up, on the writer's side and on the coordinator's.
_ATTEMPT_OF_DEADLINE: Final = 0.3
_RETRIES_OF_DEADLINE: Final = 0.4
_ENDED: Final = OSError(errno.EBADF, "it is finished or aborted")


class Timeouts(NamedTuple):
    """How long a store is waited for, in seconds."""

    connect_s: float = 10.0
    attempt_s: float = 120.0  # for one attempt at a request
    retries_s: float = 180.0  # from the first attempt to the moment after which no other is made

    def within(self, deadline_s: float) -> Timeouts:
        """Limits by which no request takes longer than that, and there is time for several attempts."""
        return Timeouts(
            min(self.connect_s, deadline_s / 4),
            min(self.attempt_s, deadline_s * _ATTEMPT_OF_DEADLINE),
            min(self.retries_s, deadline_s * _RETRIES_OF_DEADLINE),
        )


class ObjectState(NamedTuple):
    """One version of an object."""

    version: str  # tells it from other versions; of the same content it may be the same
    size_bytes: int
    modified_ns: int  # on the store's clock, which may tick once a second
    put_id: str = ""  # of the put that has made it; empty if another program has


ABSENT: Final = ""
Condition = str | None
"""Of a put: `ABSENT` if there is to be no object, the `version` that it replaces, or None."""


class Listing(NamedTuple):
    """What lies directly below a prefix: sizes of objects, and folders ("/": one whose name is empty)."""

    sizes: dict[str, int]
    folders: set[str]


class PassingError(OSError):
    """An attempt has failed that may succeed when it is repeated; the store may have done what it was asked for."""


class UndecidedError(OSError):
    """A conditional put was given up. It may still arrive."""


class Upload:
    """An object that one thread at a time sends, by a library's `stream`; `asked` tells errors of the library."""

    def __init__(self, asked: Callable[[str, str], AbstractContextManager[None]], key: str, stream: Any) -> None:
        self.asked = asked
        self.key = key
        self.stream = stream

    def write(self, content: bytes) -> None:
        """Send what comes next. It is kept until it is sent, which may be later."""
        with self.asked("PUT", f"{self.key}, a part of it"):
            self.stream.write(content)

    def complete(self) -> None:
        """Make the object."""
        with self.asked("PUT", self.key):
            self.stream.close()

    def abandon(self) -> None:
        """Never make it, and have the store remove its parts; that is not waited for long."""
        remover = threading.Thread(target=self._remove, daemon=True)
        with suppress(RuntimeError):  # at the interpreter's end
            remover.start()
            remover.join(_REMOVED_WITHIN_S)

    def _remove(self) -> None:
        error = OSError(errno.ECANCELED, "the upload was abandoned")
        with suppress(OSError), self.asked("DELETE", self.key):
            self.stream.__exit__(OSError, error, None)


class ObjectClient(ABC):
    """One bucket. Keys have no slash in front. All methods raise `OSError` as the module says; any thread may call."""

    place: str  # the bucket as messages name it
    timeouts: Timeouts
    part_bytes: int = 8 * 1024 * 1024  # of the parts of an upload, at least
    max_parts: int = 10_000

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.place}: a client holds credentials; another process makes its own")

    @abstractmethod
    def within(self, deadline_s: float) -> ObjectClient:
        """This bucket, where no request is waited for longer than `deadline_s`."""

    @abstractmethod
    def head(self, key: str) -> ObjectState | None:
        """The version that is there; None if there is none."""

    def get_end(self, key: str, most_bytes: int) -> tuple[ObjectState, bytes]:
        """The version that is there, and its last bytes. Its `put_id` may be left out."""
        state = self.head(key)
        if state is None:
            raise FileNotFoundError(errno.ENOENT, f"GET {self.place}/{key}: there is no such object")
        start = max(0, state.size_bytes - most_bytes)
        return state, self.get(key, start, state.size_bytes, state.version)

    def get(self, key: str, start: int, stop: int, version: str) -> bytes:
        """Bytes `[start, stop)` of that version; raises `FileExistsError` if it is not there any more."""
        content = self.get_range(key, start, stop, version) if start < stop else b""
        if len(content) != stop - start:
            raise OSError(errno.ERANGE, f"GET {self.place}/{key}: {len(content)} of {stop - start} bytes came")
        return content

    @abstractmethod
    def get_range(self, key: str, start: int, stop: int, version: str) -> bytes:
        """As `get`, of a range that is not empty; the store may send less."""

    @abstractmethod
    def put_once(self, key: str, content: bytes, condition: Condition, put_id: str) -> str:
        """One attempt at `put`; raises `PassingError` if another may succeed."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object, if it is there."""

    @abstractmethod
    def list(self, prefix: str) -> Listing:
        """What lies below a prefix that ends in a slash, or is empty."""

    @abstractmethod
    def upload(self, key: str, part_bytes: int, put_id: str) -> Upload:
        """Begin to write an object in parts, which has that id then."""

    def repeated(self, attempt: Callable[[], T]) -> T:
        """Repeat a read of which the answer was cut off, as long as attempts may be repeated."""
        pauses = self._pauses(time.monotonic())
        while True:
            try:
                return attempt()
            except PassingError:
                if not next(pauses):
                    raise

    def _pauses(self, began_s: float) -> Iterator[bool]:
        """Waits before each further attempt; False when there is no time for one."""
        until_s, pause_s = began_s + self.timeouts.retries_s, min(_FIRST_PAUSE_S, self.timeouts.retries_s / 10)
        while time.monotonic() + pause_s <= until_s:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            yield True
        yield False

    def put(self, key: str, content: bytes, condition: Condition = None) -> str:
        """Make an object, atomically; returns its `version`."""
        unanswered = deque[OSError]()
        try:
            return self._put(key, content, condition, unanswered)
        except FileExistsError:  # what is on its way is refused, too
            raise
        except FileNotFoundError:
            if condition:  # what was to be replaced is gone
                raise
            text = f"PUT {self.place}/{key}: there is no such bucket; make it, or correct its name"
            raise OSError(errno.EREMOTEIO, text) from None
        except OSError as error:
            if condition is None or not unanswered:
                raise
            text = f"{error.strerror}; whether it was done, the store has not said"
            raise UndecidedError(errno.EREMOTEIO, text) from error

    def _put(self, key: str, content: bytes, condition: Condition, unanswered: deque[OSError]) -> str:
        """As `put`. `unanswered` gets the errors of attempts that may still be done."""
        put_id, pauses = secrets.token_hex(8), self._pauses(time.monotonic())
        while True:
            try:
                return self.put_once(key, content, condition, put_id)
            except FileExistsError as refusal:
                there = self.head(key)
                if there is not None and there.put_id == put_id:
                    return there.version
                # A store refuses also what it is asked for twice at once: then the condition still holds.
                if (ABSENT if there is None else there.version) != condition:
                    raise
                unanswered.append(refusal)
            except PassingError as error:
                unanswered.append(error)
            if not next(pauses):
                raise OSError(errno.EREMOTEIO, unanswered[-1].strerror) from unanswered[-1]


# --- the directory ----------------------------------------------------------------------------------------------------


class ObjectWriter(RangeWriter):
    """A new object. `finish` is for one thread, after the last `write` has returned."""

    direct = False

    def __init__(self, client: ObjectClient, key: str, name: str, size_bytes: int) -> None:
        self.name = name
        self._client = client
        self._key = key
        self._size_bytes = size_bytes
        self._part_bytes = client.part_bytes
        while size_bytes > self._part_bytes * (client.max_parts - 1):
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
        content = bytes(memoryview(view).cast("B")[: max(0, self._size_bytes - offset)])  # behind the end: padding
        with self._lock:
            if self._ended:
                raise save_error(f"writing bytes [{offset}, {offset + len(content)})", self.name, _ENDED)
            if content:
                self._early[offset] = content
            while self._sent_bytes in self._early:
                self._send(self._early.pop(self._sent_bytes))

    def _send(self, content: bytes) -> None:
        with saving(f"writing bytes [{self._sent_bytes}, {self._sent_bytes + len(content)})", self.name):
            self._sent_bytes += len(content)
            if self._size_bytes <= self._part_bytes:
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

    def finish(self) -> None:
        size_bytes = self._size_bytes
        with self._lock:
            if self._ended:
                raise save_error("finishing it", self.name, _ENDED)
            self._ended = True
            for offset in sorted(self._early):  # where nothing was written, a file has zeros
                self._send(bytes(offset - self._sent_bytes) + self._early.pop(offset))
            self._send(bytes(size_bytes - self._sent_bytes))
            with saving("finishing it", self.name):
                version = None
                if self._upload is None:
                    version = self._client.put(self._key, bytes(self._small), ABSENT)
                else:
                    self._complete(self._upload)
                self._made = True
                if version is None and self.is_unique:
                    return
                state = self._client.head(self._key)  # an answer alone is no proof
                if state is None or state.size_bytes != size_bytes or version not in (None, state.version):
                    got = "nothing" if state is None else f"{state.size_bytes} bytes, version {state.version}"
                    said = f"{size_bytes} bytes, version {version}"
                    raise OSError(errno.EREMOTEIO, f"the store has answered that it holds {said}, and holds {got}")

    def _complete(self, upload: Upload) -> None:
        self._look_for_others()
        try:
            upload.complete()
        except OSError:
            there = self._client.head(self._key)
            if there is None or there.put_id != self._put_id:  # else an attempt has made it whose answer was lost
                raise

    def abort(self) -> None:
        self._ended = True  # (without the lock, which a write that hangs may hold)
        upload, self._upload, made, self._made = self._upload, None, self._made, False
        if upload is not None and not made:
            upload.abandon()
        if made:
            with saving("removing it", self.name):
                self._client.delete(self._key)


# So much of an object's end comes with its length at an open: small ones cost one request, and a data file shows by it
# that it is the right one.
_END_BYTES: Final = 64 * 1024
# The longest object that is given another name: it is held in memory, and put in one request.
_MAX_SMALL_BYTES: Final = 1024**3
_ATTEMPTS: Final = 100


class ObjectStorage(Storage):
    """A prefix of keys of one bucket. `reopen` makes the storage of a URL, in another process, too."""

    # 10 ms for a request, and 100 MB/s by one connection.
    request_bytes = 1024 * 1024
    # One connection brings 50 to 100 MB/s of a node's 1 GB/s and more; half of its time may be latency.
    writes_at_once = 8
    reads_at_once = 8
    open_ahead = 4
    asks_at_once = 16
    is_store = True

    def __init__(
        self,
        client: ObjectClient,
        prefix: str,
        url: str,
        reopen: Callable[[str, float | None], Storage],
        deadline_s: float | None,
    ) -> None:
        self._client = client if deadline_s is None else client.within(deadline_s)
        self.write_bytes = client.part_bytes
        self._deadline_s = deadline_s
        self._prefix = f"{prefix}/" if prefix else ""
        self._url = url
        self._reopen = reopen

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, (self._url, self._deadline_s)  # credentials stay here: another process asks for its own

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

    def open_writer(self, name: str, size_bytes: int, *, direct: DirectIo = "auto") -> RangeWriter:
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
            try:  # what it replaces is removed next, so the answer alone is no proof
                state = self._client.head(key)
            except OSError as error:
                raise self._unknown(name, error) from error
            if state is None or (state.version == condition and state.version != written):
                text = "the store has answered that it holds this, and does not; what was there before is still valid"
                raise OSError(errno.EREMOTEIO, text)
            return _version(state._replace(version=written, size_bytes=len(content)))

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

    def move(self, source: str, name: str) -> None:
        with self._saving(f"renaming it to {name}", source) as key:
            reader = _ObjectReader(self._client, key, self.path(source), *self._client.get_end(key, _END_BYTES))
            try:
                content = reader.read_all(_MAX_SMALL_BYTES)
            except LoadError as error:
                raise SaveError(f"{self.path(source)}: cannot be renamed to {name}: {error}") from error
            self._replace(self._key(name), content)
            self._client.delete(key)

    def delete(self, name: str, missing_ok: bool = True) -> None:
        with self._saving("deleting it", name) as key:
            if not missing_ok and self._client.head(key) is None:
                raise FileNotFoundError(errno.ENOENT, "there is no such object")
            self._client.delete(key)

    # The directory, which is there as long as there are keys

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

    def read_into(self, offset: int, view: memoryview, arrived: Callable[[memoryview], None] | None = None) -> None:
        view = memoryview(view).cast("B")
        self.check_range(offset, len(view))
        end_at = self.size_bytes - len(self._end)
        asked_bytes = min(len(view), max(0, end_at - offset))
        if asked_bytes < len(view):
            start = offset + asked_bytes - end_at
            view[asked_bytes:] = self._end[start : start + len(view) - asked_bytes]
        if asked_bytes:
            try:
                view[:asked_bytes] = self._client.get(self._key, offset, offset + asked_bytes, self._version)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOENT, errno.ERANGE):
                    raise CorruptCheckpointError(
                        f"{self.name}: was replaced or deleted while it was read ({error.strerror}); it had "
                        f"{self.size_bytes} bytes. Load again"
                    ) from error
                raise _load_error(self.name, error, offset, len(view)) from error
        if arrived is not None and len(view):
            arrived(view)


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
