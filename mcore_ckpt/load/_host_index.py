"""The index of a checkpoint, decoded by one process of a host and handed to the others of that host.

The first process to ask binds an abstract Unix socket named after the checkpoint's directory and the version of its
`.metadata`, and decodes. The others connect and wait. They get the index in columns, in a memfd that is sent through
the socket. No name stays behind, whatever ends when. The ranks agree on nothing: each has opened the file.

Where anything is in the way (no such sockets, another user's process behind the name, a process that dies or stops, a
damaged `.metadata`), each process decodes for itself, and raises what it finds. The decoding process is trusted as far
as the user's own processes are: others are refused (`SO_PEERCRED`).
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import pickle
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from mcore_ckpt.core.process import collector_paused, is_running
from mcore_ckpt.core.shared_memory import host_identity
from mcore_ckpt.core.version import __version__
from mcore_ckpt.format.index import CheckpointIndex, PackedTensors
from mcore_ckpt.storage.base import FileVersion

# Below, decoding takes less than a few milliseconds.
_WORTH_BYTES: Final = 512 * 1024
# How long the index is handed on after it was decoded: ranks of a load ask within seconds.
_SERVED_S: Final = 60.0
# A process that decodes for longer is not waited for.
_DEADLINE_S: Final = 120.0
_PERIOD_S: Final = 1.0
_CREDENTIALS: Final = struct.Struct("3i")
_WAITING: Final = 1024


def index_of_host(
    directory: Path, version: FileVersion | None, decode: Callable[[], CheckpointIndex]
) -> CheckpointIndex:
    """What `decode` returns, of that version of the `.metadata` in `directory`; or what another process of this host
    got from it. Raises as `decode`.
    """
    name = _name(directory, version)
    listener = None if name is None else _bound(name)
    if name is None:
        return decode()
    if listener is None:
        found = _received(name)
        return decode() if found is None else replace(found, path=str(directory)).with_fingerprints(found.fingerprints)
    try:
        index = decode()
        with contextlib.suppress(RuntimeError):  # the interpreter ends
            threading.Thread(target=_serve, args=(listener, index), name="mcore_ckpt index", daemon=True).start()
            listener = None
        return index
    finally:
        if listener is not None:
            _stop(listener)


def _name(directory: Path, version: FileVersion | None) -> bytes | None:
    """That of the socket; None: the index is not worth it, or cannot be shared."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None
    if version is None or version.size_bytes < _WORTH_BYTES:
        return None
    what = (host_identity(), __version__, sys.version, os.fspath(directory.absolute()), tuple(version))
    return b"\0mcore_ckpt index " + hashlib.sha256(repr(what).encode()).hexdigest().encode()


def _bound(name: bytes) -> socket.socket | None:
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name)
        listener.listen(_WAITING)
    except OSError:
        if listener is not None:
            listener.close()
        return None
    return listener


def _stop(listener: socket.socket) -> None:
    """Send away all that wait, also where a forked process still has the socket."""
    with contextlib.suppress(OSError):
        listener.setblocking(False)
        while True:
            waiting, _ = listener.accept()
            waiting.close()
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _serve(listener: socket.socket, index: CheckpointIndex) -> None:
    fd = None
    until = time.monotonic() + _SERVED_S
    try:
        while (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            waiting, _ = listener.accept()
            with waiting:
                if fd is None:
                    fd = _written(index)
                if fd is None:
                    return
                with contextlib.suppress(OSError):  # it is gone
                    socket.send_fds(waiting, [b"."], [fd])
    except Exception:  # noqa: BLE001  (time is up, or no memory: the others decode for themselves)
        return
    finally:
        if fd is not None:
            os.close(fd)
        _stop(listener)


def _written(index: CheckpointIndex) -> int | None:
    """A memfd with the index; None if that cannot be said in columns."""
    if not isinstance(index.tensors, PackedTensors):
        packed = PackedTensors.of(index.tensors, with_sums=index.manifest is not None)
        if packed is None:
            return None
        index = replace(index, tensors=packed).with_fingerprints(index.fingerprints)
    with collector_paused():
        content = pickle.dumps(index, 5)
    fd = os.memfd_create("mcore_ckpt_index", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _received(name: bytes) -> CheckpointIndex | None:
    """What the process behind the name sends; None if it sends nothing."""
    until = time.monotonic() + _DEADLINE_S
    fds: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(_PERIOD_S)
            asking.connect(name)
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, user, _ = _CREDENTIALS.unpack(credentials)
            if user != os.geteuid():
                return None
            while not fds:
                try:
                    told, fds, _, _ = socket.recv_fds(asking, 1, 1)
                except TimeoutError:
                    if time.monotonic() > until or not is_running(pid):
                        return None
                else:
                    if not told:
                        return None
        with mmap.mmap(fds[0], 0, access=mmap.ACCESS_READ) as content, collector_paused():
            found = pickle.loads(content)
        return found if isinstance(found, CheckpointIndex) else None
    except (OSError, ValueError):
        return None
    finally:
        for fd in fds:
            os.close(fd)
