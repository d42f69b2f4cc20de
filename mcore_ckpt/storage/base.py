"""What every storage back-end promises.

A `Storage` is one directory of a checkpoint, or whatever a back-end has instead. Names in it are relative, separated
by `/`, and checked by `check_name`, since many of them come from a `.metadata` file that nobody vouches for.

Bytes go in by two doors. Data files are written through a `RangeWriter`: at any offset, from several threads, under a
name that no file has or had, and not durable before `finish`. Small files that make other files valid (`.metadata`
above all) go through `publish`: complete, atomically and durably, or not at all. The two make a commit protocol: finish
the data files, `sync`, `publish`.

What a back-end needs is little: ranged reads, writing a new file, creating a small file unless there is one, replacing
and copying small files atomically, listing, deleting. A local one has links, renames and fsync for that; an object
store has conditional puts and copies on the server. Nothing here asks for a link, for an append, or for the rename of a
large file.

Errors of the operating system leave as `SaveError` (writes) or `LoadError` (reads) that name file, byte range and
errno, with the `OSError` as cause. A file that ends early is a `CorruptCheckpointError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple, TypeVar

from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, SaveError

T = TypeVar("T")
DirectIo = Literal["auto", "off", "keep"]

# Logical blocks are 512 or 4096 bytes on every disk in use, and pages are 4096 on x86-64: 4096 suits O_DIRECT on all.
ALIGNMENT_BYTES: Final = 4096


def align_up(position: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """The first multiple of `alignment` that is not below `position`."""
    return -(-position // alignment) * alignment


def check_name(name: str) -> str:
    """Return `name` if it stays inside the directory that it is relative to.

    Raises:
        CorruptCheckpointError: for an empty or absolute name, a NUL, or a part that is empty, `.` or `..`.
    """
    if not name or "\0" in name:
        raise CorruptCheckpointError(f"file name {name!r}: expected a relative path inside the checkpoint")
    for part in name.split("/"):
        if part in ("", ".", ".."):
            raise CorruptCheckpointError(
                f"file name {name!r}: expected a relative path inside the checkpoint, without empty, '.' or '..' parts"
            )
    return name


class OutcomeUnknownError(SaveError):
    """A store has not said what has become of a put: what was put may still arrive."""


class FileVersion(NamedTuple):
    """Which file a name stands for, and in what state.

    Attributes:
        number: of the file (its inode); another file has another one.
        size_bytes: its length.
        modified_ns: when it was changed last, in nanoseconds on the file system's clock.
    """

    number: int
    size_bytes: int
    modified_ns: int


class RangeReader(ABC):
    """One open file, read at any offset by any number of threads.

    A back-end implements `read_into` and `close`. `is_cached`, `scatter` and `mapped` are for files that the memory of
    this host may hold already; elsewhere their defaults are true.

    Attributes:
        name: the file, as an error message should show it (for a local file, its path).
        size_bytes: its length when it was opened.
        version: what `Storage.version` said of it then; None for what is no file of a storage.
    """

    name: str
    size_bytes: int
    version: FileVersion | None = None

    @abstractmethod
    def read_into(self, offset: int, view: memoryview, arrived: Callable[[memoryview], None] | None = None) -> None:
        """Fill all of `view` (writable bytes) with the file's bytes from `offset` on.

        Args:
            offset: in the file, in bytes.
            view: memory to fill.
            arrived: called with each slice of `view`, from the first to the last, as soon as its bytes lie there: what
                looks at them then finds them in the CPU's cache.

        Raises:
            CorruptCheckpointError: if the file ends before the view is full.
            LoadError: if the device or file system fails.
        """

    def read(self, offset: int, length: int) -> bytes:
        """Exactly the bytes `[offset, offset + length)`; raises as `read_into` does."""
        self.check_range(offset, length)  # before anything is allocated: the length may come from a hostile file
        buffer = bytearray(length)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def is_cached(self, offset: int, length: int) -> bool:
        """Whether this host's memory most likely holds bytes `[offset, offset + length)`: short reads cost no more."""
        return False

    def scatter(self, offset: int, vectors: int, count: int, nbytes: int) -> bool:
        """Read bytes `[offset, offset + nbytes)`, which `is_cached`, into many places of memory at once.

        Args:
            offset: in the file, in bytes.
            vectors: address of `count` pairs of uint64, address and length of each place (`struct iovec`).
            count: at most 1,024.
            nbytes: of all places together.

        Returns:
            False if it cannot be done so; places may have been written. `read_into` then tells why.
        """
        return False

    @contextmanager
    def mapped(self, offset: int, length: int) -> Iterator[int]:
        """Memory that holds bytes `[offset, offset + length)` already, so that they need not be read to be copied.

        Yields:
            The address of that memory, readable within the `with` block only; 0 if there is none, or it cannot be told.
        """
        yield 0

    def check_range(self, offset: int, length: int) -> None:
        """Raise `CorruptCheckpointError` unless `[offset, offset + length)` lies inside the file."""
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise CorruptCheckpointError(
                f"{self.name}: bytes [{offset}, {offset + length}) wanted, but the file has {self.size_bytes} bytes; "
                "it was truncated, or the metadata does not belong to it"
            )

    @abstractmethod
    def close(self) -> None:
        """Release the file. Twice is harmless."""

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RangeWriter(ABC):
    """One new file, written at any offset by any number of threads, and not to be read before `finish`.

    Attributes:
        name: the file, as an error message should show it (for a local file, its path).
        direct: whether aligned writes use O_DIRECT.
    """

    name: str
    direct: bool

    @abstractmethod
    def write(self, offset: int, view: memoryview) -> None:
        """Write all of `view` at `offset`.

        Fast where offset, length and the address of the memory are multiples of `ALIGNMENT_BYTES` (so the last write
        may well reach past the end, which `finish` cuts off); correct in any case. The memory may be reused on return.

        Raises:
            SaveError: naming file, byte range and errno.
        """

    def in_progress(self) -> str:
        """What of the file is on its way, and since when, for the message of a deadline; empty if that is not known."""
        return ""

    @abstractmethod
    def finish(self, size_bytes: int) -> None:
        """Cut the file to `size_bytes`, make it durable and close it.

        Raises:
            SaveError: naming file and errno. The file is closed all the same; `abort` then removes it.
        """

    @abstractmethod
    def abort(self) -> None:
        """Close and remove the file, finished or not. Twice is harmless; raises nothing for a file that is gone.

        Does not wait for a `write` that hangs, nor closes the file under it.
        """


class Storage(ABC):
    """One directory of files. All names are relative to it.

    Attributes:
        request_bytes: what is delivered in the time that one more read costs, where that is more than a disk's; a
            shorter gap between two ranges is read, too.
        write_bytes: length of the writes that are sent as they are, from where a file begins; others are put together
            first. 0: any.
        writes_at_once: how many keep it busy, of one process.
        reads_at_once: the same.
        open_ahead: files that are opened ahead of the one that is read; 0 where opening one takes no request.
        asks_at_once: requests for a name or a small file that are sent before the first is answered, where none depends
            on another; 1 where an answer comes sooner than a thread starts.
        serves_forks: a forked child of a process that uses it can use it, too.
    """

    request_bytes: int = 0
    write_bytes: int = 0
    writes_at_once: int = 2
    reads_at_once: int = 4
    open_ahead: int = 0
    asks_at_once: int = 1
    serves_forks: bool = True

    def within(self, deadline_s: float | None) -> Storage:
        """The same directory, where no request is waited for longer than that; None: as long as the back-end does."""
        return self

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
        """Names of the files in the directory itself, sorted; empty when there is no such directory.

        A network file system may list what is gone, and leave out what is new: ask for a file by its name before
        anything is deleted for being missing here.

        Raises:
            LoadError: a directory is there and cannot be listed.
        """

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """As `list`, with the length of each file in bytes.

        Raises:
            CheckpointNotFoundError: there is no such directory.
            LoadError: it cannot be listed.
        """

    @abstractmethod
    def folders(self) -> Sequence[str]:
        """Names of the directories in this one, links to some among them; raises as `sizes`."""

    def holds(self, other: Storage) -> bool:
        """Whether another directory lies inside this one, whatever they are called."""
        return False

    def is_directory(self) -> bool:
        """Whether there is such a directory, even an empty one; in an object store one is there as long as it holds
        something. Raises `LoadError`.
        """
        try:
            self.folders()
        except CheckpointNotFoundError:
            return False
        return True

    def links(self) -> dict[str, str]:
        """Where each link in the directory leads to in the end (`location`), by its name; raises as `sizes`."""
        return {}

    @abstractmethod
    def version(self, name: str) -> FileVersion | None:
        """What tells a file from another of the same name, asked of the file itself, not of a listing; None: no file.

        Raises:
            LoadError: if it cannot be asked.
        """

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name; raises as `version`."""
        return self.version(name) is not None

    def size(self, name: str) -> int:
        """Length of a file in bytes. Raises as `open_reader` does."""
        with self.open_reader(name, direct="off") as reader:
            return reader.size_bytes

    @abstractmethod
    def open_reader(self, name: str, *, direct: DirectIo = "auto") -> RangeReader:
        """Open a file for reading.

        Args:
            name: of the file.
            direct: O_DIRECT for what is not in the page cache (`"auto"`), as far as the file system has it, or for
                nothing (`"off"`). `"keep"` is as `"auto"`, but what is not in the page cache is read through it, and
                stays there.

        Raises:
            CheckpointNotFoundError: if there is no such file.
            CorruptCheckpointError: if it is no regular file inside the directory.
            LoadError: if it cannot be opened.
        """

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """Exactly the bytes `[offset, offset + length)` of a file, by default to its end.

        Raises:
            CheckpointNotFoundError: if there is no such file.
            CorruptCheckpointError: if the file ends early.
            LoadError: if it cannot be read.
        """
        with self.open_reader(name) as reader:
            return reader.read(offset, reader.size_bytes - offset if length is None else length)

    def open_descriptor(self, name: str) -> int | None:
        """A descriptor of a file, for the kernel to copy from, which the caller closes; None if there can be none.

        Raises:
            CorruptCheckpointError: it is no regular file.
            OSError: it cannot be opened.
        """
        return None

    @contextmanager
    def in_use(self, name: str) -> Iterator[None]:
        """Within the block `is_in_use` is true of that file, on whatever host asks, where the back-end can tell."""
        yield

    def is_in_use(self, name: str) -> bool:
        """Whether some process is known to be within `in_use` of a file; False where that cannot be told."""
        return False

    # Data files

    @abstractmethod
    def open_writer(self, name: str, *, size_bytes: int | None = None, direct: DirectIo = "auto") -> RangeWriter:
        """Create a file for writing; never touches one that exists.

        Args:
            name: of the new file; missing directories on the way to it are made.
            size_bytes: what it is going to hold, so that the space can be reserved at once.
            direct: O_DIRECT if possible (`"auto"`), or never (`"off"`).

        Raises:
            SaveError: if the file exists (an object store tells when it is written or finished), cannot be
                made, or its space cannot be reserved.
        """

    @abstractmethod
    def overwrite(self, name: str, offset: int, content: bytes, *, is_end: bool = False) -> bool:
        """Change bytes of a file in place, durably; for repairing one.

        Args:
            name: of the file.
            offset: of the first byte.
            content: what is to stand there.
            is_end: cut the file behind it.

        Returns:
            False if there is no regular file of that name.

        Raises:
            SaveError: it cannot be written.
        """

    # Small files

    @abstractmethod
    def publish(self, name: str, content: bytes) -> None:
        """Make `name` hold `content`, replacing what it held, atomically and durably.

        Whenever the machine stops, the name holds all of the old or all of the new content.

        Args:
            name: of the file; missing directories on the way to it are made.
            content: what it is to hold.

        Raises:
            SaveError: the old content, if any, is still there.
        """

    def claim(self, name: str, owner: str) -> str:
        """Make `name` stand for the name `owner`, unless it stands for one already: of all who try at once, on whatever
        host, one succeeds. Only where `made_by` says `renamed`.

        Returns:
            What it stands for.

        Raises:
            SaveError: it cannot be made.
        """
        raise NotImplementedError

    def claimed(self, name: str) -> str | None:
        """What `claim` has made `name` stand for; None: nothing. Raises `LoadError`."""
        return None

    def replace_if(self, name: str, content: bytes, before: FileVersion | None) -> FileVersion | None:
        """As `publish`, if the file still is that version, by its `number`; None: if there is none. Only where
        `made_by` says `in_place`.

        Returns:
            The new version; None if there is another file, which is left as it is.

        Raises:
            OutcomeUnknownError: it may still happen.
            SaveError: it has not happened, and will not.
        """
        raise NotImplementedError

    @abstractmethod
    def create(self, name: str, content: bytes) -> None:
        """Make a small new file. Its content is durable on return; its name is after `sync`.

        Raises:
            SaveError: it exists, or cannot be made.
        """

    @abstractmethod
    def move(self, source: str, name: str) -> None:
        """Make `name` hold what the small file `source` holds, atomically, and delete that; durable after `sync`.

        Raises:
            SaveError: the old content, if any, is still there.
        """

    @abstractmethod
    def move_new(self, source: str, name: str) -> bool:
        """As `move`, of a file of any size, unless there is a file of that name already; durable on return.

        Returns:
            False if the name is taken; `source` is still there then.

        Raises:
            SaveError: the name cannot be given.
        """

    @abstractmethod
    def delete(self, name: str, missing_ok: bool = True) -> None:
        """Remove a file. Raises `SaveError`."""

    # The directory

    @abstractmethod
    def made_by(self, *, renamed: T, in_place: T) -> T:
        """Of two ways to make a directory of many files, in which nothing unfinished is ever taken for the directory,
        the one that goes here.

        Args:
            renamed: the files are written in another directory of the same file system, in several attempts if need be,
                and that gets this one's name.
            in_place: the files are written where they stay, under the lock of the directory; each appears when it is
                complete, and one without which the others count for nothing is put last.
        """

    def may_be_written(self) -> bool:
        """Whether a checkpoint could be saved here, as far as that can be told without trying."""
        return True

    @abstractmethod
    def ensure(self) -> None:
        """Make the directory, and those above it, durably, if there is none. Raises `SaveError`."""

    @abstractmethod
    def sync(self, *, parents: bool = False) -> None:
        """Make all names durable that were created, moved or deleted here. Raises `SaveError`.

        Args:
            parents: the directory's own name, too, and those above it.
        """

    @abstractmethod
    def remove(self) -> bool:
        """Remove the directory, durably; False if something is in it, or it is gone already. Raises `SaveError`."""
