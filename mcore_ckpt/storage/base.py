"""What every storage back-end promises.

A `Storage` is one directory of a checkpoint, or whatever a back-end has instead. Names in it are relative, separated
by `/`, and checked by `check_name`, since many of them come from a `.metadata` file that nobody vouches for.

Data files are written through a `RangeWriter`: at any offset, from several threads, under a name that no file has or
had, and not durable before `finish`. Small files that make other files valid (`.metadata` above all) go through
`publish`: complete, atomically and durably, or not at all. The two make a commit protocol: finish the data files,
`sync`, `publish`. Nothing here asks for an append, or for the rename of a large file.

Errors of the operating system leave as `SaveError` (writes) or `LoadError` (reads) that name file, byte range and
errno, with the `OSError` as cause. A file that ends early is a `CorruptCheckpointError`. A file that is not there is a
`CheckpointNotFoundError`, also where a method below says that it raises `LoadError`.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple

from mcore_ckpt.core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    LoadError,
    SaveError,
)
from mcore_ckpt.core.options import is_path_text

DirectIo = Literal["auto", "off", "keep"]

# Logical blocks are 512 or 4096 bytes on every disk in use, and pages are 4096 on x86-64: 4096 suits O_DIRECT on all.
ALIGNMENT_BYTES: Final = 4096
_PIECE_BYTES: Final = 8 * 1024 * 1024


def align_up(position: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """The first multiple of `alignment` that is not below `position`."""
    return -(-position // alignment) * alignment


def check_name(name: str) -> str:
    """Return `name` if it stays inside the directory that it is relative to; else raise `CorruptCheckpointError`."""
    if not is_path_text(name) or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise CorruptCheckpointError(
            f"file name {name!r}: expected a relative path inside the checkpoint, without empty, '.' or '..' parts, "
            "and of characters that file names have"
        )
    return name


def shown(error: OSError) -> str:
    """An error of the system, as messages show it."""
    return f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no errno')})"


class OutcomeUnknownError(SaveError):
    """A store has not said what has become of a put: what was put may still arrive."""


def save_error(what: str, path: str, error: OSError) -> SaveError:
    """What a failed write is told as."""
    return SaveError(f"{path}: {what} failed: {shown(error)}; {advice(error.errno, 'save')}")


@contextmanager
def saving(what: str, path: str) -> Iterator[None]:
    """Errors of the system within leave as `SaveError`."""
    try:
        yield
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise save_error(what, path, error) from error


def advice(code: int | None, what: Literal["save", "read"] = "read") -> str:
    """What to do about an error of the system, ahead of trying again."""
    if code in (errno.ENOSPC, errno.EDQUOT):
        return f"free space (or raise the quota) and {what} again"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"check that this user may {'write' if what == 'save' else what} there"
    if code == errno.EEXIST:
        return "files are never overwritten: save under another name, or delete it first"
    if code == errno.ENOTDIR:
        return "a file is where a directory has to be: name another path"
    if code == errno.EISDIR:
        return f"a directory is where a file has to be: remove it, then {what} again"
    if code in (errno.EREMOTEIO, errno.ETIMEDOUT):
        return f"check the store and the network to it, then {what} again"
    if code == errno.ESTALE:
        return f"another host has replaced or removed it: {what} again"
    if code in (errno.ENOTCONN, errno.ECONNABORTED):  # the second to what was under way
        return f"the client of this mount has ended: mount it again, then {what} again"
    return f"check the device and its file system (dmesg), then {what} again"


def open_error(path: str, error: OSError) -> LoadError:
    """What a file is told as that cannot be opened."""
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return CheckpointNotFoundError(
            f"{path}: no such file; the path is wrong, or the checkpoint is incomplete or was deleted meanwhile"
        )
    return LoadError(f"{path}: cannot be opened: {shown(error)}; {advice(error.errno)}")


class FileVersion(NamedTuple):
    """Which file a name stands for, and in what state."""

    number: int  # of the file (its inode); another file has another one
    size_bytes: int
    modified_ns: int  # when it was changed last, on the file system's clock


class RangeReader(ABC):
    """One open file, read at any offset by any number of threads.

    A back-end implements `read_into`, and `close` if it holds something open. `is_cached` and `scatter` are for files
    that the memory of this host may hold already; elsewhere their defaults are true.
    """

    name: str  # as an error message should show it (for a local file, its path)
    size_bytes: int  # when it was opened
    version: FileVersion | None = None  # what `Storage.version` said of it then; None for what is no file of a storage
    may_lag: bool = False  # for a moment `size_bytes` may be that of the file before it, by another host's name

    @abstractmethod
    def read_into(self, offset: int, view: memoryview, arrived: Callable[[memoryview], None] | None = None) -> None:
        """Fill all of `view` (writable bytes) with the file's bytes from `offset` on. `arrived` is called with each
        slice of it, in order, as soon as its bytes lie there: what looks at them then finds them in the CPU's cache.
        """

    def read(self, offset: int, length: int) -> bytes:
        """Exactly the bytes `[offset, offset + length)`."""
        self.check_range(offset, length)  # before anything is allocated: the length may come from a hostile file
        buffer = bytearray(length)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_all(self, most_bytes: int | None = None) -> bytes:
        """All of the file, which has no reason to be longer than `most_bytes`; else `CorruptCheckpointError`."""
        if most_bytes is not None and self.size_bytes > most_bytes:
            raise CorruptCheckpointError(
                f"{self.name}: expected at most {most_bytes} bytes, the file has {self.size_bytes}"
            )
        return self.read(0, self.size_bytes)

    def pieces(self) -> Iterator[bytes]:
        """All of the file, from front to back."""
        for at in range(0, self.size_bytes, _PIECE_BYTES):
            yield self.read(at, min(_PIECE_BYTES, self.size_bytes - at))

    def is_cached(self, offset: int, length: int) -> bool:
        """Whether this host's memory most likely holds bytes `[offset, offset + length)`: short reads cost no more."""
        return False

    def scatter(self, offset: int, vectors: int, count: int, nbytes: int) -> bool:
        """Read bytes `[offset, offset + nbytes)`, which `is_cached`, into `count` (at most 1,024) places of memory at
        once, whose addresses and lengths (uint64, `struct iovec`) lie at the address `vectors`. False if it cannot be
        done so; places may have been written. `read_into` then tells why.
        """
        return False

    def check_range(self, offset: int, length: int) -> None:
        """Raise `CorruptCheckpointError` unless `[offset, offset + length)` lies inside the file."""
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise CorruptCheckpointError(
                f"{self.name}: bytes [{offset}, {offset + length}) wanted, but the file has {self.size_bytes} bytes; "
                "it was truncated, or the metadata does not belong to it"
            )

    def close(self) -> None:  # noqa: B027  (there may be nothing to release)
        """Release the file. Twice is harmless."""

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RangeWriter(ABC):
    """One new file, written at any offset by any number of threads, and not to be read before `finish`."""

    name: str  # as an error message should show it (for a local file, its path)
    direct: bool  # aligned writes use O_DIRECT
    is_unique: bool = False  # set by a caller whose names are used once, and who asks for the length after `finish`

    @abstractmethod
    def write(self, offset: int, view: memoryview) -> None:
        """Write all of `view` at `offset`; the memory may be reused on return. Fast if offset, length and address are
        multiples of `ALIGNMENT_BYTES`: the last write may well reach past the file's length, to which `finish` cuts it.
        """

    @abstractmethod
    def finish(self) -> None:
        """Give the file its length, make it durable and close it, also on `SaveError`; `abort` then removes it."""

    @abstractmethod
    def abort(self) -> None:
        """Close and remove the file, finished or not, without a wait for writes. Twice is harmless; raises nothing."""


class Storage(ABC):
    """One directory of files. All names are relative to it."""

    request_bytes: int = 0  # a shorter gap between two ranges costs less than one more read, if more than a disk's
    write_bytes: int = 0  # writes of this length are sent as they are, others are put together first; 0: any
    writes_at_once: int = 2  # how many keep it busy, of one process
    reads_at_once: int = 4
    open_ahead: int = 0  # files that are opened ahead of the one that is read; 0 where opening one takes no request
    asks_at_once: int = 1  # requests for small things sent at once; 1 where an answer comes sooner than a thread starts
    is_store: bool = False  # of objects: nothing is renamed or claimed, and a put may have a condition

    @property
    @abstractmethod
    def location(self) -> str:
        """Where the directory is; the same for all storages of this directory in this process."""

    def __str__(self) -> str:
        """The directory as messages name it."""
        return self.location

    @abstractmethod
    def path(self, name: str) -> str:
        """A file as messages name it."""

    # Looking and reading

    @abstractmethod
    def list(self) -> list[str]:
        """Names of the files in the directory itself, sorted; empty when there is none. Raises `LoadError`. A network
        file system may list what is gone, and leave out what is new: by its name a file is asked for itself.
        """

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """As `list`, with the length of each file in bytes. Raises `LoadError`."""

    @abstractmethod
    def folders(self) -> Sequence[str]:
        """Names of the directories in this one, links to some among them. Raises `LoadError`."""

    def is_directory(self) -> bool:
        """Whether there is such a directory; in a store, as long as it holds something. Raises `LoadError`."""
        try:
            self.folders()
        except CheckpointNotFoundError:
            return False
        return True

    def links(self) -> dict[str, str]:
        """Where each link in the directory leads to in the end (`location`), by its name. Raises `LoadError`."""
        return {}

    @abstractmethod
    def version(self, name: str) -> FileVersion | None:
        """What tells a file from another of its name, asked of the file itself; None: no file. Raises `LoadError`."""

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name. Raises `LoadError`."""
        return self.version(name) is not None

    def size(self, name: str) -> int:
        """Length of a file in bytes. Raises `LoadError`."""
        with self.open_reader(name, direct="off") as reader:
            return reader.size_bytes

    @abstractmethod
    def open_reader(self, name: str, *, direct: DirectIo = "auto") -> RangeReader:
        """Open a regular file for reading. Raises `LoadError`. `direct`: O_DIRECT for what is not in the page cache
        (`"auto"`), where the file system has it, or for nothing (`"off"`); `"keep"`: it is read through the page cache,
        and stays there.
        """

    def read(self, name: str, most_bytes: int | None = None) -> bytes:
        """All of a file; raises as `open_reader` and `RangeReader.read_all`."""
        with self.open_reader(name) as reader:
            return reader.read_all(most_bytes)

    @contextmanager
    def in_use(self, name: str) -> Iterator[None]:
        """Within the block `is_in_use` is true of that file, on whatever host asks, where the back-end can tell."""
        yield

    def is_in_use(self, name: str) -> bool:
        """Whether some process is known to be within `in_use` of a file; False where that cannot be told."""
        with self.readers_of(name) as are_there:
            return are_there()

    @contextmanager
    def readers_of(self, name: str) -> Iterator[Callable[[], bool]]:
        """Within the block, a function that tells whether a process is `in_use` of the file that has this name now."""
        yield lambda: False

    def keep_owner(self, names: Iterable[str], like: str) -> None:  # noqa: B027  (in a store there is none)
        """Give files the mode of another, and its owner where this user may. Raises `SaveError`."""

    # Data files

    @abstractmethod
    def open_writer(self, name: str, size_bytes: int, *, direct: DirectIo = "auto") -> RangeWriter:
        """Create a file of that length, and missing directories on the way to it; never touches one that exists (an
        object store tells when it is written or finished). `direct` as in `open_reader`. Raises `SaveError`.
        """

    @abstractmethod
    def overwrite(self, name: str, content: bytes) -> bool:
        """Replace a file's content in place, durably; False if there is no regular file. Raises `SaveError`."""

    # Small files

    @abstractmethod
    def publish(self, name: str, content: bytes) -> None:
        """Make `name` hold `content`, atomically and durably: all of the old or all of the new content, whenever the
        machine stops, and the old on `SaveError`. Missing directories on the way to it are made.
        """

    def claim(self, name: str, owner: str) -> str:
        """Make `name` stand for the name `owner`, unless it stands for one already: of all who try at once, on whatever
        host, one succeeds. Returns what it stands for. Not where it `is_store`. Raises `SaveError`.
        """
        raise NotImplementedError

    def claimed(self, name: str) -> str | None:
        """What `claim` has made `name` stand for; None: nothing. Raises `LoadError`."""
        return None

    def replace_if(self, name: str, content: bytes, before: FileVersion | None) -> FileVersion | None:
        """As `publish`, if the file still is that version, by its `number`; None: if there is none. Only where it
        `is_store`. Returns the new version; None if there is another file, which stays. On `OutcomeUnknownError` it may
        still happen; on another `SaveError` it has not happened, and will not.
        """
        raise NotImplementedError

    @abstractmethod
    def create(self, name: str, content: bytes) -> None:
        """Make a small new file. Its content is durable on return; its name is after `sync`. Raises `SaveError`."""

    @abstractmethod
    def move(self, source: str, name: str) -> None:
        """Make `name` hold what the small file `source` holds, atomically; durable after `sync`. Else `SaveError`."""

    @abstractmethod
    def delete(self, name: str, missing_ok: bool = True) -> None:
        """Remove a file. Raises `SaveError`."""

    # The directory

    # (In a store there is none, and what is put is durable.)

    def ensure(self) -> None:  # noqa: B027
        """Make the directory, and those above it, durably, if there is none. Raises `SaveError`."""

    def sync(self, *, parents: bool = False) -> None:  # noqa: B027
        """Make names durable that were created, moved or deleted here; `parents`: the directory's own, too."""

    @abstractmethod
    def remove(self) -> bool:
        """Remove the directory, durably; False if something is in it, or it is gone already. Raises `SaveError`."""
