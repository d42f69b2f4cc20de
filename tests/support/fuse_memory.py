"""A file system for tests, in memory, served through /dev/fuse by a process of its own; needs Linux and root.

It does what other file systems do only now and then. After each operation that changes something it keeps what would be
there if the processes were killed at that moment (`"crash"`), and what if the power went: only what was synced
(`"synced"`: contents and names), or all names, with contents only where they were synced (`"names"`), or what was
synced and, of each directory, the last change of a name (`"last"`: names need not become durable in order). It can
answer with an error at a chosen operation, write less than it is given, refuse O_DIRECT, and let its listings lag
behind.

The kernel's protocol is spoken here directly (linux/fuse.h, version 7.31), so that no library is needed.
"""

import ctypes
import errno
import os
import select
import signal
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal

Variant = Literal["crash", "synced", "names", "last"]

_HEADER: Final = struct.Struct("<IIQQIIII")
_REPLY: Final = struct.Struct("<IiQ")
_ATTRIBUTES: Final = struct.Struct("<QQQQQQIIIIIIIIII")
_MAX_WRITE: Final = 1024 * 1024
_O_DIRECT: Final = os.O_DIRECT
_MNT_DETACH: Final = 2
_OPERATIONS: Final = {
    1: "lookup", 2: "forget", 3: "getattr", 4: "setattr", 5: "readlink", 6: "symlink", 9: "mkdir",
    10: "unlink", 11: "rmdir", 12: "rename", 14: "open", 15: "read", 16: "write", 17: "statfs",
    18: "release", 20: "fsync", 25: "flush", 26: "init", 27: "opendir", 28: "readdir", 29: "releasedir",
    30: "fsyncdir", 34: "access", 35: "create", 36: "interrupt", 42: "batch_forget", 43: "fallocate",
}  # fmt: skip
_CHANGES: Final = frozenset(
    {"setattr", "symlink", "mkdir", "unlink", "rmdir", "rename", "write", "fsync", "fsyncdir",
     "create", "fallocate"}
)  # fmt: skip
_UNANSWERED: Final = frozenset({"forget", "interrupt", "batch_forget"})


@dataclass(frozen=True)
class Misbehaviour:
    """What the file system does that others do not."""

    error_at: int | None = None  # number of the change, from 0, that is answered with an error
    code: int = errno.EIO
    sticky: bool = False  # all later changes, too, except that files can be deleted and closed
    short_writes: bool = False  # each write of more than a page takes a part only
    no_direct: bool = False  # writes with O_DIRECT are refused, as if their alignment were wrong
    lag_s: float = 0.0  # listings show what was there so many seconds ago


@dataclass
class _Node:
    number: int
    mode: int
    data: bytearray = field(default_factory=bytearray)
    entries: dict[str, int] = field(default_factory=dict)
    synced: bytes = b""
    synced_entries: dict[str, int] = field(default_factory=dict)
    last: dict[str, int | None] = field(default_factory=dict)  # names that have changed last, if that is not synced
    history: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    mtime_ns: int = field(default_factory=time.time_ns)
    frozen: bytes | None = None

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    def content(self) -> bytes:
        if self.frozen is None:
            self.frozen = bytes(self.data)
        return self.frozen

    def changed(self) -> None:
        self.mtime_ns = time.time_ns()
        self.frozen = None


Tree = dict[str, bytes | str | None]  # path -> content; where a symbolic link leads to; None for a directory


class _Server:
    def __init__(self, fd: int, behaviour: Misbehaviour) -> None:
        self._fd = fd
        self.behaviour = behaviour
        self._nodes = {1: _Node(1, stat.S_IFDIR | 0o755)}
        self._next = 2
        self.changes: list[str] = []
        self.snapshots: list[dict[Variant, Tree]] = []
        self.keep_snapshots = False

    # -- the loop

    def serve(self, control: Connection) -> None:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        poller.register(control.fileno(), select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll()}
            if control.fileno() in ready:
                try:
                    method, arguments = control.recv()
                except EOFError:
                    return
                control.send(getattr(self, f"do_{method}")(*arguments))
            if self._fd in ready:
                try:
                    request = os.read(self._fd, _MAX_WRITE + 65536)
                except OSError as error:
                    if error.errno == errno.ENODEV:
                        return  # unmounted
                    if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                        continue
                    raise
                self._answer(request)

    def _answer(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = _HEADER.unpack_from(request)
        operation = _OPERATIONS.get(opcode, "unknown")
        if operation in _UNANSWERED:
            return
        body = request[_HEADER.size :]
        payload, code = b"", 0
        try:
            if operation == "unknown":
                raise OSError(errno.ENOSYS, "")
            if operation in _CHANGES:
                self._strike(operation)
            payload = getattr(self, f"_{operation}")(node, body)
            if operation in _CHANGES and self.keep_snapshots:
                self.snapshots.append(self._snapshot())
        except OSError as error:
            code = error.errno or errno.EIO
        reply = _REPLY.pack(_REPLY.size + len(payload) * (code == 0), -code, unique) + (b"" if code else payload)
        try:
            os.write(self._fd, reply)
        except OSError as error:
            if error.errno != errno.ENOENT:  # (the request was interrupted)
                raise

    def _strike(self, operation: str) -> None:
        number = len(self.changes)
        self.changes.append(operation)
        at = self.behaviour.error_at
        later = self.behaviour.sticky and at is not None and number > at and operation != "unlink"
        if number == at or later:
            raise OSError(self.behaviour.code, os.strerror(self.behaviour.code))

    # -- control

    def do_behave(self, behaviour: Misbehaviour) -> None:
        self.behaviour = behaviour
        self.changes = []

    def do_record(self) -> None:
        self.changes, self.snapshots, self.keep_snapshots = [], [self._snapshot()], True

    def do_changes(self) -> list[str]:
        return self.changes

    def do_snapshots(self) -> list[dict[Variant, Tree]]:
        self.keep_snapshots = False
        return self.snapshots

    # -- what would be there

    def _snapshot(self) -> dict[Variant, Tree]:
        trees: dict[Variant, Tree] = {"crash": {}, "synced": {}, "names": {}, "last": {}}
        for variant, tree in trees.items():
            self._walk(self._nodes[1], "", tree, variant)
        return trees

    def _walk(self, directory: _Node, path: str, tree: Tree, variant: Variant) -> None:
        entries: dict[str, int | None] = {**directory.entries}
        if variant in ("synced", "last"):
            entries = {**directory.synced_entries, **(directory.last if variant == "last" else {})}
        for name, number in entries.items():
            if number is None:
                continue
            node = self._nodes[number]
            if node.is_directory:
                tree[path + name] = None
                self._walk(node, f"{path}{name}/", tree, variant)
            elif stat.S_ISLNK(node.mode):
                tree[path + name] = node.data.decode()
            else:
                tree[path + name] = node.content() if variant == "crash" else node.synced

    # -- nodes

    def _make(self, mode: int, parent: int, name: str) -> _Node:
        directory = self._nodes[parent]
        if name in directory.entries:
            raise OSError(errno.EEXIST, "")
        node = _Node(self._next, mode)
        self._next += 1
        self._nodes[node.number] = node
        self._enter(directory, name, node.number)
        return node

    def _enter(self, directory: _Node, name: str, number: int | None) -> None:
        directory.history.append((time.monotonic(), dict(directory.entries)))
        del directory.history[:-200]
        if number is None:
            del directory.entries[name]
        else:
            directory.entries[name] = number
        directory.last = {name: number}
        directory.changed()

    def _found(self, parent: int, name: str) -> _Node:
        number = self._nodes[parent].entries.get(name)
        if number is None:
            raise OSError(errno.ENOENT, "")
        return self._nodes[number]

    def _attributes(self, node: _Node) -> bytes:
        seconds, nanoseconds = divmod(node.mtime_ns, 10**9)
        size = len(node.data)
        times = (seconds, seconds, seconds, nanoseconds, nanoseconds, nanoseconds)
        return _ATTRIBUTES.pack(node.number, size, -(-size // 512), *times, node.mode, 1, 0, 0, 0, 4096, 0)

    def _entry(self, node: _Node) -> bytes:
        return struct.pack("<QQQQII", node.number, 0, 0, 0, 0, 0) + self._attributes(node)

    # -- operations

    def _init(self, _: int, body: bytes) -> bytes:
        big_writes, max_pages = 1 << 5, 1 << 22
        flags = struct.unpack_from("<I", body, 12)[0] & (big_writes | max_pages)
        return struct.pack("<IIIIHHIIHHI28x", 7, 31, 131072, flags, 16, 12, _MAX_WRITE, 1, _MAX_WRITE // 4096, 0, 0)

    def _lookup(self, parent: int, body: bytes) -> bytes:
        return self._entry(self._found(parent, _name(body)))

    def _getattr(self, number: int, _: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(self._nodes[number])

    def _setattr(self, number: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        mtime, nanoseconds = struct.unpack_from("<Q", body, 40)[0], struct.unpack_from("<I", body, 60)[0]
        node = self._nodes[number]
        if valid & 1:
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(struct.unpack_from("<I", body, 68)[0])
        if valid & 8:
            del node.data[size:]
            node.data.extend(bytes(size - len(node.data)))
            node.changed()
        if valid & 256:
            node.mtime_ns = time.time_ns()
        elif valid & 32:
            node.mtime_ns = mtime * 10**9 + nanoseconds
        return self._getattr(number, b"")

    def _mkdir(self, parent: int, body: bytes) -> bytes:
        mode = struct.unpack_from("<I", body)[0]
        return self._entry(self._make(stat.S_IFDIR | stat.S_IMODE(mode), parent, _name(body[8:])))

    def _symlink(self, parent: int, body: bytes) -> bytes:
        name, target = body.split(b"\0")[:2]
        node = self._make(stat.S_IFLNK | 0o777, parent, name.decode())
        node.data.extend(target)
        return self._entry(node)

    def _readlink(self, number: int, _: bytes) -> bytes:
        return bytes(self._nodes[number].data)

    def _create(self, parent: int, body: bytes) -> bytes:
        _, mode = struct.unpack_from("<II", body)
        node = self._make(stat.S_IFREG | stat.S_IMODE(mode), parent, _name(body[16:]))
        return self._entry(node) + struct.pack("<QII", 0, 0, 0)

    def _unlink(self, parent: int, body: bytes) -> bytes:
        self._found(parent, _name(body))
        self._enter(self._nodes[parent], _name(body), None)
        return b""

    def _rmdir(self, parent: int, body: bytes) -> bytes:
        if self._found(parent, _name(body)).entries:
            raise OSError(errno.ENOTEMPTY, "")
        self._enter(self._nodes[parent], _name(body), None)
        return b""

    def _rename(self, parent: int, body: bytes) -> bytes:
        destination = struct.unpack_from("<Q", body)[0]
        old, new = (name.decode() for name in body[8:].split(b"\0")[:2])
        node = self._found(parent, old)
        replaced = self._nodes[destination].entries.get(new)
        if replaced is not None:
            there = self._nodes[replaced]
            if there.entries:
                raise OSError(errno.ENOTEMPTY, "")
            if replaced == node.number:
                return b""
        self._enter(self._nodes[destination], new, node.number)
        self._enter(self._nodes[parent], old, None)
        if parent == destination:
            self._nodes[parent].last = {new: node.number, old: None}
        return b""

    def _open(self, number: int, body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0)

    _opendir = _open

    def _read(self, number: int, body: bytes) -> bytes:
        offset, size = struct.unpack_from("<QI", body, 8)
        return bytes(self._nodes[number].data[offset : offset + size])

    def _write(self, number: int, body: bytes) -> bytes:
        offset, size = struct.unpack_from("<QI", body, 8)
        flags = struct.unpack_from("<I", body, 32)[0]
        if flags & _O_DIRECT and self.behaviour.no_direct:
            raise OSError(errno.EINVAL, "")
        data = body[40 : 40 + size]
        if self.behaviour.short_writes:
            data = data[: max(4096, size // 2 // 4096 * 4096)]  # (with O_DIRECT, it is whole blocks)
        node = self._nodes[number]
        node.data.extend(bytes(max(0, offset - len(node.data))))
        node.data[offset : offset + len(data)] = data
        node.changed()
        return struct.pack("<II", len(data), 0)

    def _fallocate(self, number: int, body: bytes) -> bytes:
        _, offset, length, mode = struct.unpack_from("<QQQI", body)
        if mode == 0:
            node = self._nodes[number]
            node.data.extend(bytes(max(0, offset + length - len(node.data))))
            node.changed()
        return b""

    def _fsync(self, number: int, _: bytes) -> bytes:
        self._nodes[number].synced = self._nodes[number].content()
        return b""

    def _fsyncdir(self, number: int, _: bytes) -> bytes:
        self._nodes[number].synced_entries, self._nodes[number].last = dict(self._nodes[number].entries), {}
        return b""

    def _readdir(self, number: int, body: bytes) -> bytes:
        offset, size = struct.unpack_from("<QI", body, 8)
        directory = self._nodes[number]
        seen = directory.entries
        if self.behaviour.lag_s:
            # The state that the first change since then has ended.
            since_s = time.monotonic() - self.behaviour.lag_s
            seen = next((entries for at_s, entries in directory.history if at_s > since_s), seen)
        listing = b""
        for position, (name, entry) in enumerate([(".", number), ("..", 1), *sorted(seen.items())]):
            node = self._nodes.get(entry)
            kind = stat.S_IFMT(node.mode) >> 12 if node is not None else 0
            encoded = name.encode()
            row = struct.pack("<QQII", entry, position + 1, len(encoded), kind) + encoded
            row += bytes(-len(row) % 8)
            if position >= offset:
                if len(listing) + len(row) > size:
                    break
                listing += row
        return listing

    def _statfs(self, _: int, __: bytes) -> bytes:
        return struct.pack("<QQQQQIIII24x", 2**20, 2**19, 2**19, 2**20, 2**19, 4096, 255, 4096, 0)

    def _nothing(self, _: int, __: bytes) -> bytes:
        return b""

    _release = _releasedir = _flush = _access = _nothing


def _name(body: bytes) -> str:
    return body.partition(b"\0")[0].decode()


class FuseMount:
    """A mounted file system of this kind."""

    def __init__(self, path: Path, control: Connection) -> None:
        self.path = path
        self._control = control

    def _call(self, method: str, *arguments: Any) -> Any:
        self._control.send((method, arguments))
        return self._control.recv()

    def behave(self, behaviour: Misbehaviour) -> None:
        """From now on; changes are counted anew."""
        self._call("behave", behaviour)

    def record(self) -> None:
        """Keep what there would be after each change from now on; changes are counted anew."""
        self._call("record")

    def changes(self) -> list[str]:
        """The changes since they were counted anew, by name."""
        found: list[str] = self._call("changes")
        return found

    def snapshots(self) -> list[dict[Variant, Tree]]:
        """What there would be at each moment, the first before the first change; ends the recording."""
        found: list[dict[Variant, Tree]] = self._call("snapshots")
        return found


def write_tree(tree: Tree, path: Path) -> None:
    """Put a snapshot on a real file system."""
    path.mkdir(parents=True)
    for name in sorted(tree):
        content = tree[name]
        if content is None:
            (path / name).mkdir(parents=True, exist_ok=True)
        elif isinstance(content, str):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).symlink_to(content)
        else:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)


_libc: Final = ctypes.CDLL(None, use_errno=True)


def _mount(fd: int, path: Path) -> None:
    options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    if _libc.mount(b"tests", str(path).encode(), b"fuse.mcore_ckpt_tests", 0, options.encode()) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))


@contextmanager
def mounted(path: Path, behaviour: Misbehaviour | None = None) -> Iterator[FuseMount]:
    """Mount a new, empty file system at `path` (which is made) for the block, or raise `OSError`."""
    path.mkdir(parents=True, exist_ok=True)
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    here, there = (Connection(end.detach()) for end in socket.socketpair())
    try:
        _mount(fd, path)
    except BaseException:
        os.close(fd)
        here.close()
        there.close()
        raise
    server = os.fork()
    if server == 0:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            here.close()
            _Server(fd, behaviour or Misbehaviour()).serve(there)
        finally:
            os._exit(0)
    os.close(fd)
    there.close()
    try:
        yield FuseMount(path, here)
    finally:
        _libc.umount2(str(path).encode(), _MNT_DETACH)
        here.close()
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)


def fuse_works(scratch: Path) -> str | None:
    """None if such a file system can be mounted here, else why not."""
    try:
        with mounted(scratch / "fuse-probe") as mount:
            (mount.path / "probe").write_bytes(b"x" * 10000)
            if (mount.path / "probe").read_bytes() != b"x" * 10000:
                return "what was written through FUSE was not read back"
    except OSError as error:
        return f"no FUSE here: {error}"
    return None
