"""Threads that write finished pieces of files while the caller computes the next ones.

One `PieceQueue` serves all files of a rank, one after the other. Since the threads are idle only when nothing is ready,
the device stays busy across the boundary between two files, and the fsync of one overlaps the filling of the next.

Life of a file: `open_file`, any number of `submit`, `close_file` when all is submitted, and then, on whichever thread
writes the last piece, `finish`. The first error stops everything: what waits is dropped, all files of the queue are
aborted (also those that were finished, since a save is published whole or not at all), and the error is raised from
the caller's next call.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from mcore_ckpt.errors import WriteTimeoutError
from mcore_ckpt.storage.base import RangeWriter
from mcore_ckpt.storage.direct_io import aligned_buffer

__all__ = ["FileInProgress", "PieceQueue", "WindowPool"]

Release = Callable[[memoryview], None]


class WindowPool:
    """Aligned buffers of one size, lent out one at a time and kept between saves, so that a save allocates nothing.

    Args:
        window_bytes: size of each, a multiple of 4096.
        windows: how many. Three keep both ends busy: one is filled, one is written, one is in between.
    """

    def __init__(self, window_bytes: int = 8 * 1024 * 1024, windows: int = 3) -> None:
        if window_bytes <= 0 or window_bytes % mmap.PAGESIZE or windows < 1:
            raise ValueError(f"window_bytes={window_bytes}, windows={windows}: expected whole pages and at least one")
        self.window_bytes = window_bytes
        self.windows = windows
        self._free: deque[memoryview] = deque()
        self._made = 0

    def take(self) -> memoryview | None:
        """A free buffer, made on first use; None when all are lent out. Not for several threads at once."""
        if self._free:
            return self._free.popleft()
        if self._made == self.windows:
            return None
        self._made += 1
        return aligned_buffer(self.window_bytes)

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer that `take` lent; may come from any thread."""
        self._free.append(buffer)


class FileInProgress:
    """One file in a `PieceQueue`, and what it took. Times are summed over threads, in seconds."""

    __slots__ = ("closed", "finished", "fsync", "fsync_s", "pending", "size_bytes", "write_s", "writer")

    def __init__(self, writer: RangeWriter, size_bytes: int, fsync: bool) -> None:
        self.writer = writer
        self.size_bytes = size_bytes
        self.fsync = fsync
        self.write_s = 0.0
        self.fsync_s = 0.0
        self.pending = 0
        self.closed = False
        self.finished = False


class PieceQueue:
    """A context manager: on leaving, all files are written and finished, or the first error is raised.

    Args:
        io_threads: writes in flight at once.
        on_written: called with the number of bytes after each write, on the thread that wrote; a sign of life.
        deadline_s: seconds without any write or fsync ending, while the caller waits for one, after which the device
            counts as stuck; None waits for ever.
    """

    def __init__(
        self,
        io_threads: int = 2,
        on_written: Callable[[int], None] | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self._condition = threading.Condition()
        self._pieces: deque[tuple[FileInProgress, int, memoryview, Release | None]] = deque()
        self._to_finish: deque[FileInProgress] = deque()
        self._files: list[FileInProgress] = []
        self._unfinished = 0
        self._stopping = False
        self._failure: BaseException | None = None
        self._on_written = on_written
        self._deadline_s = deadline_s
        self._threads = [
            threading.Thread(target=self._work, name=f"mcore-ckpt-write-{i}", daemon=True) for i in range(io_threads)
        ]

    def open_file(self, writer: RangeWriter, size_bytes: int, *, fsync: bool = True) -> FileInProgress:
        """Take over `writer`: the queue finishes it at `size_bytes`, or aborts it."""
        file = FileInProgress(writer, size_bytes, fsync)
        with self._condition:
            self._files.append(file)
            self._unfinished += 1
        self._raise_failure()
        return file

    def submit(
        self,
        file: FileInProgress,
        offset: int,
        piece: memoryview,
        release: Release | None = None,
    ) -> None:
        """Have `piece` written at `offset`; `release(piece)` is called when its memory may be used again."""
        with self._condition:
            if self._failure is None:
                file.pending += 1
                self._pieces.append((file, offset, piece, release))
                self._condition.notify()
                return
            if release is not None:
                release(piece)
        self._raise_failure()

    def close_file(self, file: FileInProgress) -> None:
        """All of the file has been submitted: finish it as soon as it is written."""
        with self._condition:
            file.closed = True
            if file.pending == 0 and self._failure is None:
                self._to_finish.append(file)
                self._condition.notify()
        self._raise_failure()

    def take(self, pool: WindowPool) -> memoryview:
        """A free buffer of `pool`, waiting for a write to end if need be."""
        with self._condition:
            while True:
                if self._failure is not None:
                    break
                buffer = pool.take()
                if buffer is not None:
                    return buffer
                self._wait_for_progress()
        self._raise_failure()
        raise AssertionError("unreachable: a failure was set")

    def wait(self) -> None:
        """Return when every closed file is finished. Raises the first error of any thread."""
        with self._condition:
            while self._unfinished and self._failure is None:
                self._wait_for_progress()
        self._raise_failure()

    def _wait_for_progress(self) -> None:
        # Whatever ends notifies; the caller, who submits, is here and does not.
        if not self._condition.wait(self._deadline_s) and self._failure is None:
            names = ", ".join(file.writer.name for file in self._files if not file.finished)
            self._failure = WriteTimeoutError(
                f"{names}: no write has ended for {self._deadline_s} s (write_deadline_s); the device or the network "
                "file system hangs, or the deadline is too short for it"
            )
            self._drop_waiting()

    def abort(self) -> None:
        """Drop what waits, let writes in progress end (unless they are stuck), and remove all files of the queue."""
        with self._condition:
            if self._failure is None:
                self._failure = RuntimeError("the writing was aborted")
            self._drop_waiting()
        self._join()
        for file in self._files:
            file.writer.abort()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _join(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        # Threads that are stuck in the kernel cannot be waited for; they end by themselves if the device comes back.
        timeout_s = 0.1 if isinstance(self._failure, WriteTimeoutError) else None
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_s)

    def _drop_waiting(self) -> None:
        while self._pieces:
            _, _, piece, release = self._pieces.popleft()
            if release is not None:
                release(piece)
        self._to_finish.clear()
        self._condition.notify_all()

    def _work(self) -> None:
        while True:
            with self._condition:
                while not (self._pieces or self._to_finish or self._stopping):
                    self._condition.wait()
                if self._to_finish:
                    file, piece = self._to_finish.popleft(), None
                elif self._pieces:
                    file, offset, piece, release = self._pieces.popleft()
                else:
                    return
            try:
                if piece is None:
                    self._finish(file)
                else:
                    self._write(file, offset, piece)
            except BaseException as error:  # noqa: BLE001  (whatever it is, the caller has to hear of it)
                with self._condition:
                    if self._failure is None:
                        self._failure = error
                    self._drop_waiting()
            if piece is not None:
                with self._condition:
                    if release is not None:
                        release(piece)
                    file.pending -= 1
                    if file.pending == 0 and file.closed and self._failure is None:
                        self._to_finish.append(file)
                    self._condition.notify_all()

    def _write(self, file: FileInProgress, offset: int, piece: memoryview) -> None:
        started = time.perf_counter()
        file.writer.write(offset, piece)
        took_s = time.perf_counter() - started
        with self._condition:
            file.write_s += took_s
        if self._on_written is not None:
            self._on_written(len(piece))

    def _finish(self, file: FileInProgress) -> None:
        started = time.perf_counter()
        file.writer.finish(file.size_bytes, file.fsync)
        file.fsync_s = time.perf_counter() - started
        file.finished = True
        with self._condition:
            self._unfinished -= 1
            self._condition.notify_all()

    def __enter__(self) -> PieceQueue:
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # no more threads to be had
            self._join()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self.wait()
            except BaseException:
                self.abort()
                raise
            self._join()
        else:
            self.abort()
