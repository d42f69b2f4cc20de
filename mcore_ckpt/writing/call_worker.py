"""Python functions in one supervised process that is kept for many of them."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing import connection as mp_connection
from multiprocessing import process as mp_process
from multiprocessing import util as mp_util
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from mcore_ckpt.core.failures import describe
from mcore_ckpt.core.process import Sentinel, exit_with_parent, kernel_can_watch, lower_priority, wait_readable
from mcore_ckpt.writing.call_process import Call
from mcore_ckpt.writing.job_handle import JobHandle, JobWatch

__all__ = ["CallWorker"]

_REAP_DEADLINE_S: Final = 1.0
_STOP_DEADLINE_S: Final = 30.0
_PRELOAD_PERIOD_S: Final = 0.05
_PRELOADED, _RETURNED, _RAISED = range(3)
# multiprocessing joins children that are no daemons when it exits; a worker has to be told before that.
_BEFORE_JOINING: Final = 10


class _WorkerCall(Call):
    """A function that a worker runs."""

    def __init__(self, worker: _Worker, name: str) -> None:
        super().__init__(name)
        self.preloaded = False
        self._worker = worker

    def poll(self) -> bool:
        if not self.done:
            self._worker.receive()
        return self.done

    def _wait_for_news(self, timeout_s: float) -> None:
        self._worker.wait_for_news(timeout_s)

    def abort(self) -> bool:
        if not self.poll():
            self._worker.kill()
        return self.poll()

    def watch(self) -> JobWatch:
        return JobWatch(self._worker.pid)


class CallWorker:
    """One spawned process that runs functions in order; replaced at the next call if it has died.

    It is spawned like Megatron's persistent worker (clean memory, imports the trainer's main module), since the
    functions and their arguments arrive pickled.
    """

    def __init__(self, cpu_priority: int | None = None, io_priority: int | None = None) -> None:
        """Start nothing yet.

        Args:
            cpu_priority: nice value of the process; None keeps this one's.
            io_priority: its I/O scheduling class; None keeps this one's.
        """
        self._priority = (cpu_priority, io_priority)
        self._worker: _Worker | None = None

    @property
    def pid(self) -> int | None:
        """The process, None if none runs."""
        return None if self._worker is None or self._worker.dead else self._worker.pid

    def submit(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        preload_fn: Callable[[], Any] | None = None,
        name: str,
    ) -> JobHandle:
        """Hand over a call; returns at once, or with `preload_fn` when that has run in the worker.

        Args:
            fn: picklable, as all that follows.
            args: for `fn`; the second is replaced by what `preload_fn` returns.
            kwargs: for `fn`.
            preload_fn: takes the snapshot: what it has read may be changed afterwards.
            name: the call in words, for messages.

        Raises:
            Exception: whatever pickling raises.
        """
        message = bytes(ForkingPickler.dumps((fn, args, kwargs, preload_fn)))
        if self._worker is not None:
            self._worker.receive()
        if self._worker is None or self._worker.dead:
            self._worker = _Worker(*self._priority)
        call = self._worker.submit(message, name)
        while preload_fn is not None and not call.preloaded and not call.wait(_PRELOAD_PERIOD_S):
            pass
        return call

    def close(self, abort: bool = False) -> None:
        """End the process, after its calls or, if `abort`, at once."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop(abort)


class _Worker:
    """The process of a `CallWorker`, from its start to its end."""

    def __init__(self, cpu_priority: int | None, io_priority: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._owner_pid = os.getpid()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_worker_main,
            args=(theirs, self._owner_pid, kernel_can_watch(), _cuda_device(), cpu_priority, io_priority),
            name="mcore-ckpt-calls",
        )
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.dead = False
        self._sentinel = Sentinel(self.pid)
        self._calls: deque[_WorkerCall] = deque()
        # This process may exit without having closed the queue; multiprocessing would then wait for the worker.
        self._finalizer = mp_util.Finalize(self, _kill_process, (self._process,), exitpriority=_BEFORE_JOINING)

    def submit(self, message: bytes, name: str) -> _WorkerCall:
        call = _WorkerCall(self, name)
        self._calls.append(call)
        with contextlib.suppress(OSError):  # its death is noticed by whoever asks for the outcome
            self._connection.send_bytes(message)
        return call

    def receive(self) -> None:
        if self.dead or os.getpid() != self._owner_pid:
            return
        ended = not self._process.is_alive()
        with contextlib.suppress(EOFError, OSError):
            while self._connection.poll():
                what, content = pickle.loads(self._connection.recv_bytes())
                if what == _PRELOADED:
                    self._calls[0].preloaded = True
                    continue
                call = self._calls.popleft()
                if what == _RETURNED:
                    call.done = True
                else:
                    call.fail(self.pid, content)
        if ended:
            self.dead = True
            code = self._process.exitcode
            for call in self._calls:
                call.died(self.pid, code)
            self._calls.clear()
            self._release()

    def wait_for_news(self, timeout_s: float) -> None:
        if not self.dead:
            wait_readable([self._connection.fileno()], timeout_s, self._sentinel)

    def kill(self) -> None:
        if not self.dead and os.getpid() == self._owner_pid:
            self._process.kill()
            self._process.join(_REAP_DEADLINE_S)
            self.receive()

    def stop(self, abort: bool) -> None:
        if self.dead or os.getpid() != self._owner_pid:
            return
        if not abort:
            for call in list(self._calls):
                call.wait()
            with contextlib.suppress(OSError):
                self._connection.send_bytes(b"")
            self._process.join(_STOP_DEADLINE_S)
        self.kill()

    def _release(self) -> None:
        self._finalizer.cancel()
        self._connection.close()
        self._sentinel.close()
        self._process.close()


def _kill_process(process: mp_process.BaseProcess) -> None:
    with contextlib.suppress(ValueError):  # closed
        process.kill()
        process.join(_REAP_DEADLINE_S)


def _cuda_device() -> int | None:
    """The trainer's CUDA device if it uses CUDA; asking never initializes it, nor imports torch."""
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None


def _worker_main(
    connection: mp_connection.Connection,
    parent_pid: int,
    kernel_watches: bool,
    cuda_device: int | None,
    cpu_priority: int | None,
    io_priority: int | None,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lower_priority(cpu_priority, io_priority)
    exit_with_parent(parent_pid, kernel_watches)
    if cuda_device is not None:
        import torch

        torch.cuda.set_device(cuda_device)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_messages, args=(connection, messages), daemon=True).start()
    while message := messages.get():
        try:
            _run_call(connection, message)
            outcome: tuple[int, Any] = (_RETURNED, None)
        except BaseException as error:  # noqa: BLE001  (whatever it is, the trainer has to hear of it)
            outcome = (_RAISED, describe(error))
        connection.send_bytes(pickle.dumps(outcome))
        gc.collect()  # what the call leaves behind may be the tensors of a whole model


def _read_messages(connection: mp_connection.Connection, messages: queue.SimpleQueue[bytes]) -> None:
    """Read ahead of the calls, so that the trainer never waits for a call to end before it can hand over the next."""
    while True:
        try:
            messages.put(connection.recv_bytes())
        except (EOFError, OSError):
            messages.put(b"")
            return


def _run_call(connection: mp_connection.Connection, message: bytes) -> None:
    fn, args, kwargs, preload_fn = pickle.loads(message)
    arguments = list(args)
    if preload_fn is not None:
        arguments[1] = preload_fn()
        connection.send_bytes(pickle.dumps((_PRELOADED, None)))
    fn(*arguments, **kwargs)
