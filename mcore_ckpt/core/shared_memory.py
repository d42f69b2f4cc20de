"""Memory that processes of one host share without a name, and waiting for each other in it.

A process makes it as a memfd, and tells the others its number and that of the descriptor; they open it through `/proc`.
So nothing is left behind, whatever ends when, and no space of /dev/shm is needed. Which processes are on one host is
told by `host_identity`, not by a guess of the launcher.

That a process which sees a word also sees what was written before the word was set rests on the kernel, on every CPU:
a word is read and set under `flock` of the memory. The kernel takes a lock of its own for each of these calls, so that
all that a process has read or written before it unlocks is done before another has locked. A process that ends unlocks.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import socket
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

_SYS_FUTEX: Final = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL: Final = 2**31 - 1
# Where the kernel has no such call, or it is not known here.
_PERIOD_S: Final = 0.001


def host_identity() -> str:
    """Equal for processes that can share memory: of one boot of one host, in the same namespace, of the same user.

    Unlike that of any other process where this one may not be looked into (it is not "dumpable", or there is no /proc).
    """
    found = [socket.gethostname()]
    try:
        found.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        found.append(str(Path("/proc/self/ns/pid").readlink()))
        user = Path("/proc/self/fd").stat().st_uid
        if user != os.geteuid():
            raise PermissionError
    except OSError:
        found.append(f"alone {os.getpid()} {time.time_ns()}")
    return " ".join([*found, str(os.geteuid())])


class SharedMemory:
    """So many bytes, the first of which are words of 32 bits, for processes to tell each other how far they are."""

    def __init__(self, fd: int, nbytes: int, words: int) -> None:
        self._memory = mmap.mmap(fd, nbytes)
        with contextlib.suppress(OSError, AttributeError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)
        self._words = (ctypes.c_uint32 * words).from_buffer(self._memory)
        self._address = ctypes.addressof(self._words)
        self._one_thread = threading.Lock()  # to `flock`, the threads of a process are one
        self.fd = fd

    @classmethod
    def make(cls, nbytes: int, words: int) -> SharedMemory:
        """New memory, all zeros, of which none is taken before it is used."""
        fd = os.memfd_create("mcore_ckpt_load", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            return cls(fd, nbytes, words)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def of(cls, pid: int, fd: int, words: int) -> SharedMemory:
        """That of another process. Raises `OSError`."""
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(own, os.fstat(own).st_size, words)
        except BaseException:
            os.close(own)
            raise

    def __getitem__(self, word: int) -> int:
        with self._one_thread:
            fcntl.flock(self.fd, fcntl.LOCK_SH)
            try:
                return self._words[word]
            finally:
                fcntl.flock(self.fd, fcntl.LOCK_UN)

    def __setitem__(self, word: int, value: int) -> None:
        """Set a word, and wake up all that wait for that."""
        with self._one_thread:
            fcntl.flock(self.fd, fcntl.LOCK_EX)
            try:
                self._words[word] = value
            finally:
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        _futex(self._address + 4 * word, _FUTEX_WAKE, _ALL, None)

    def count(self, word: int) -> None:
        """Add one to a word that one thread at a time adds to, and that tells nothing of other bytes: for `counted`."""
        self._words[word] += 1

    def counted(self, word: int) -> int:
        """How often there was a `count`, as far as it is known here by now."""
        return self._words[word]

    def wait(self, word: int, seen: int, timeout_s: float) -> None:
        """Wait until a word is no longer what was seen, at most so long; may return early."""
        if self._words[word] == seen:
            _futex(self._address + 4 * word, _FUTEX_WAIT, seen, timeout_s)

    def close(self) -> None:
        """Give it back, when the last view of it is gone, too. Twice is harmless."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:  # of a load that was not begun
        with contextlib.suppress(Exception):
            self.close()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _futex(address: int, operation: int, value: int, timeout_s: float | None) -> None:
    number = _SYS_FUTEX.get(platform.machine())
    if number is None:
        if timeout_s is not None:
            time.sleep(min(timeout_s, _PERIOD_S))
        return
    limit = None if timeout_s is None else ctypes.byref(_Timespec(int(timeout_s), int(timeout_s % 1 * 1e9)))
    _syscall()(number, ctypes.c_void_p(address), operation, ctypes.c_uint32(value), limit, None, 0)


@lru_cache(maxsize=1)
def _syscall() -> Any:
    return ctypes.CDLL(None).syscall
