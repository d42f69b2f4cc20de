"""Python functions in one supervised process that is kept for many of them."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import multiprocessing
import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable
from multiprocessing import connection as mp_connection
from multiprocessing import util as mp_util
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

from mcore_ckpt.core.failures import describe
from mcore_ckpt.core.process import exit_text, exit_with_parent, kernel_can_watch, lower_priority
from mcore_ckpt.core.signals import leave_signals_to_parent
from mcore_ckpt.save.supervised_child import Job, SupervisedChild

_REAP_DEADLINE_S: Final = 1.0
_PRELOAD_PERIOD_S: Final = 0.05
# multiprocessing joins children that are no daemons when it exits; a worker has to be told before that.
_BEFORE_JOINING: Final = 10
_PRELOADED: Final = "preloaded"


class CallWorker:
    """One spawned process that runs pickled functions in order; replaced at the next call if it has died. As Megatron's
    persistent worker it has clean memory and imports the trainer's main module.
    """

    def __init__(self, cpu_priority: int | None = None, io_priority: int | None = None) -> None:
        """Start nothing yet. The process takes this nice value and I/O scheduling class; None keeps this one's."""
        self._priority = (cpu_priority, io_priority)
        self._child: _WorkerChild | None = None

    @property
    def pid(self) -> int | None:
        """The process, None if none runs."""
        return None if self._child is None or self._child.dead else self._child.pid

    def submit(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        preload_fn: Callable[[], Any] | None = None,
        what: str,
    ) -> Job:
        """Dispatch a picklable call; returns at once, or with `preload_fn` when that has run in the worker: it takes
        the snapshot, and makes the second argument.
        """
        call = io.BytesIO()
        _SnapshotPickler(call).dump((fn, args, kwargs, preload_fn))
        if self._child is not None:
            self._child.look()
        if self._child is None or self._child.dead:
            self._child = _WorkerChild(*self._priority)
        job = self._child.submit(call.getvalue(), what)
        while preload_fn is not None and not job.steps and not job.wait(_PRELOAD_PERIOD_S):
            pass
        return job

    def close(self, abort: bool = False) -> None:
        """End the process, after its calls or, if `abort`, at once."""
        child, self._child = self._child, None
        if child is not None:
            child.stop(abort)


class _SnapshotPickler(ForkingPickler):
    """Sends copies of tensors: torch would move the trainer's own to shared memory. Those that lie there were put there
    to be shared, and a device's are for `preload_fn` to copy.
    """

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        if not value.is_cpu or value.layout != torch.strided or value.is_shared():
            return NotImplemented
        copy = value.detach().clone()
        if type(value) is torch.nn.Parameter:
            copy = torch.nn.Parameter(copy, value.requires_grad)
        return torch.multiprocessing.reductions.reduce_tensor(copy)


class _WorkerChild(SupervisedChild):
    """The process of a `CallWorker`."""

    stop_deadline_s = 30.0

    def __init__(self, cpu_priority: int | None, io_priority: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(
            target=_worker_main,
            args=(theirs, os.getpid(), kernel_can_watch(), _cuda_device(), cpu_priority, io_priority),
            name="mcore-ckpt-calls",
        )
        with theirs:
            process.start()
        super().__init__(process, "process {pid}")
        self._numbers = itertools.count(1)
        # This process may exit without having closed the queue; multiprocessing would then wait for the worker.
        self._finalizer = mp_util.Finalize(self, _kill_process, (process,), exitpriority=_BEFORE_JOINING)

    def submit(self, call: bytes, what: str) -> Job:
        number = next(self._numbers)
        job = self._jobs[number] = Job(self, what, number)
        with contextlib.suppress(OSError):  # its death is noticed when the outcome is asked for
            self._connection.send_bytes(pickle.dumps((number, call)))
        return job

    def _receive(self) -> bool:
        while self._connection.poll():
            number, outcome = pickle.loads(self._connection.recv_bytes())
            if outcome != _PRELOADED:
                self._job_ended(number, outcome)
            elif (job := self._jobs.get(number)) is not None:
                job.steps = 1
        return True

    def _news_fd(self) -> int:
        return self._connection.fileno()

    def _ask_to_stop(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send_bytes(b"")

    def _end_text(self) -> str:
        return f"{exit_text(self._exit_code)} before the function had returned"

    def _release(self) -> None:
        self._finalizer.cancel()
        self._connection.close()


def _kill_process(process: BaseProcess) -> None:
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
    leave_signals_to_parent()
    lower_priority(cpu_priority, io_priority)
    exit_with_parent(parent_pid, kernel_watches)
    if cuda_device is not None:
        import torch

        torch.cuda.set_device(cuda_device)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_messages, args=(connection, messages), daemon=True).start()
    while message := messages.get():
        number, call = pickle.loads(message)
        outcome: Any = None
        try:
            _run_call(connection, number, call)
        except BaseException as error:  # noqa: BLE001  (the trainer is told of any error)
            outcome = describe(error)
        connection.send_bytes(pickle.dumps((number, outcome)))
        gc.collect()  # what the call leaves behind may be the tensors of a whole model


def _read_messages(connection: mp_connection.Connection, messages: queue.SimpleQueue[bytes]) -> None:
    """Read ahead of the calls, so that the trainer never waits for a call to end before it can dispatch the next."""
    while True:
        try:
            messages.put(connection.recv_bytes())
        except (EOFError, OSError):
            messages.put(b"")
            return


def _run_call(connection: mp_connection.Connection, number: int, call: bytes) -> None:
    fn, args, kwargs, preload_fn = pickle.loads(call)
    arguments = list(args)
    if preload_fn is not None:
        arguments[1] = preload_fn()
        connection.send_bytes(pickle.dumps((number, _PRELOADED)))
    fn(*arguments, **kwargs)
