"""Run a function on N real gloo ranks, with a deadline, and leave nothing behind.

    def shard_sum(rank, values):                       # a module-level function: it is pickled by name
        total = torch.tensor(values[rank])
        dist.all_reduce(total)
        return total.item()

    assert run_ranks(shard_sum, 2, [1, 2]) == [3, 3]   # what each rank returned, by rank

Ranks are forked from a server process that has imported torch and nothing else (seconds of import time for each rank
otherwise); those of `run_megatron_ranks`, `run_pretending_ranks` and `run_stock_ranks` from servers that have imported
Megatron, too, the last without this package. Each gets the caller's environment and `sys.path`, one thread, a gloo
process group and a process group of its own in the operating system's sense, which is killed as a whole in the end: a
writer process that a rank forgot does not outlive the call. At the deadline the stack of every rank that still runs is
put into the error.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = [
    "MEGATRON",
    "RankOutcome",
    "RanksFailedError",
    "rank_outcomes",
    "run_megatron_ranks",
    "run_pretending_ranks",
    "run_ranks",
    "run_stock_ranks",
]

_DEFAULT_DEADLINE_S = 120.0
# After a first failure the other ranks usually wait for it in a collective: they get this long to raise an error too.
_DEFAULT_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# The last is imported at the first use of a DTensor.
_PRELOAD = ["torch", "torch.distributed.checkpoint", "torch._dynamo"]

# What servers of other ranks import in addition: Megatron as it is, or behind `pretend_cuda`, and our strategies.
MEGATRON = ("megatron.core.dist_checkpointing", "mcore_ckpt.megatron.strategy")
_STOCK = ("tests.support.pretending_megatron",)
_PRETENDING = (*_STOCK, "mcore_ckpt.megatron.strategy")
_servers: dict[tuple[str, ...], forkserver.ForkServer] = {}
_starting = threading.Lock()


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What became of one rank.

    Attributes:
        rank: its number.
        value: what the function returned, None if it did not return.
        error: the exception it raised; None if it raised none, was killed, or the exception cannot be pickled.
        error_text: traceback, or how the process ended, or its stacks at the deadline; empty if all is well.
        exit_code: as in `multiprocessing.Process.exitcode`; negative for a signal; None for a rank that reported.
        seconds: from the start of the call to the report or the end of the process.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    error_text: str = ""
    exit_code: int | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the function returned."""
        return not self.error_text


class RanksFailedError(AssertionError):
    """At least one rank raised, died, or passed the deadline; `outcomes` holds all ranks, by rank."""

    def __init__(self, what: str, outcomes: list[RankOutcome]) -> None:
        failed = sorted((outcome for outcome in outcomes if not outcome.ok), key=lambda outcome: outcome.seconds)
        parts = [f"{what}: {len(failed)} of {len(outcomes)} ranks failed, first cause first"]
        parts += [f"--- rank {o.rank} after {o.seconds:.1f} s\n{o.error_text.rstrip()}" for o in failed]
        super().__init__("\n".join(parts))
        self.outcomes = outcomes


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline_s: float = _DEFAULT_DEADLINE_S,
    environment: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call `function(rank, *args, **kwargs)` on every rank of a fresh gloo world.

    Args:
        function: a module-level function; its arguments and result must be picklable.
        world_size: number of ranks.
        deadline_s: seconds until the ranks that still run are killed.
        environment: variables to set on top of the caller's.

    Returns:
        What each rank returned, by rank.

    Raises:
        RanksFailedError: a rank raised, died or passed the deadline.
    """
    outcomes = rank_outcomes(function, world_size, *args, deadline_s=deadline_s, environment=environment, **kwargs)
    if not all(outcome.ok for outcome in outcomes):
        raise RanksFailedError(getattr(function, "__qualname__", repr(function)), outcomes)
    return [outcome.value for outcome in outcomes]


run_megatron_ranks = partial(run_ranks, preload=MEGATRON)
run_pretending_ranks = partial(run_ranks, preload=_PRETENDING)
run_stock_ranks = partial(run_ranks, preload=_STOCK)


@contextmanager
def _forked_from(preload: tuple[str, ...]) -> Iterator[None]:
    """Let processes be forked from the server that has imported `preload`; multiprocessing knows of one server only."""
    with _starting:
        if preload not in _servers:
            _servers[preload] = forkserver.ForkServer()
            _servers[preload].set_forkserver_preload([*_PRELOAD, *preload])
        usual = forkserver.connect_to_new_process
        forkserver.connect_to_new_process = _servers[preload].connect_to_new_process
        try:
            yield
        finally:
            forkserver.connect_to_new_process = usual


def rank_outcomes(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    deadline_s: float = _DEFAULT_DEADLINE_S,
    grace_s: float = _DEFAULT_GRACE_S,
    environment: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
    **kwargs: Any,
) -> list[RankOutcome]:
    """As `run_ranks`, for tests of failures: returns every rank's outcome instead of raising.

    Args:
        grace_s: seconds that the other ranks get after the first failure before they are killed.
        preload: modules that the ranks' server imports in addition; each choice has a server of its own.
    """
    from torch.distributed import TCPStore

    # The store lives here, on a port that the system chose, so that no rank's death takes it down.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    variables = {**os.environ, **(environment or {})}
    payload = pickle.dumps((function, args, kwargs))
    with tempfile.TemporaryDirectory(prefix="gloo-ranks-") as stack_dir:
        processes: list[multiprocessing.process.BaseProcess] = []
        connections: list[Connection] = []
        started_s = time.monotonic()
        try:
            for rank in range(world_size):
                mine, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(rank, world_size, store.port, theirs, payload, variables, stack_dir, deadline_s),
                    name=f"rank {rank}",
                )
                with _forked_from(tuple(preload)):
                    process.start()
                theirs.close()
                processes.append(process)
                connections.append(mine)
            return _collect(processes, connections, Path(stack_dir), started_s, deadline_s, grace_s)
        finally:
            for connection in connections:
                connection.close()
            _end(processes)


def _collect(
    processes: list[multiprocessing.process.BaseProcess],
    connections: list[Connection],
    stack_dir: Path,
    started_s: float,
    deadline_s: float,
    grace_s: float,
) -> list[RankOutcome]:
    outcomes: dict[int, RankOutcome] = {}
    until_s = started_s + deadline_s
    while len(outcomes) < len(processes):
        waiting = {connections[rank]: rank for rank in range(len(processes)) if rank not in outcomes}
        remaining_s = until_s - time.monotonic()
        ready = wait(list(waiting), timeout=max(remaining_s, 0)) if remaining_s > 0 else []
        if not ready:
            break
        for connection in ready:
            rank = waiting[connection]  # type: ignore[index]
            outcome = _receive(rank, connections[rank], processes[rank], time.monotonic() - started_s)
            outcomes[rank] = outcome
            if not outcome.ok:
                until_s = min(until_s, time.monotonic() + grace_s)
    passed_s = time.monotonic() - started_s
    stacks = _stacks({rank: p for rank, p in enumerate(processes) if rank not in outcomes}, stack_dir)
    late = (
        f"the deadline is {deadline_s:.0f} s" if passed_s >= deadline_s else f"{grace_s:.0f} s after the first failure"
    )
    for rank, stack in stacks.items():
        text = f"still running after {passed_s:.1f} s ({late}); its stacks:\n{stack}"
        outcomes[rank] = RankOutcome(rank, error_text=text, seconds=passed_s)
        _kill_group(processes[rank])
    for rank, connection in enumerate(connections):
        if rank not in stacks:
            with contextlib.suppress(OSError):
                connection.send(None)  # everyone has reported: the process groups may be taken down now
    return [outcomes[rank] for rank in range(len(processes))]


def _receive(
    rank: int, connection: Connection, process: multiprocessing.process.BaseProcess, seconds: float
) -> RankOutcome:
    try:
        value, error, text = pickle.loads(connection.recv_bytes())
    except (EOFError, OSError):  # also: killed in the middle of its report
        process.join(timeout=5)
        code = process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return RankOutcome(rank, error_text=f"process ended without a report, {how}", exit_code=code, seconds=seconds)
    return RankOutcome(rank, value, error, text, None, seconds)


def _stacks(processes: Mapping[int, multiprocessing.process.BaseProcess], stack_dir: Path) -> dict[int, str]:
    for process in processes.values():
        if process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
    if processes:
        time.sleep(0.5)
    return {rank: (stack_dir / str(rank)).read_text() for rank in processes if (stack_dir / str(rank)).exists()} | {
        rank: "(none: it had not started)" for rank in processes if not (stack_dir / str(rank)).exists()
    }


def _end(processes: list[multiprocessing.process.BaseProcess]) -> None:
    """Give ranks that reported a moment to leave, then kill what is left of every rank's process group."""
    leave_until_s = time.monotonic() + 5
    for process in processes:
        process.join(timeout=max(leave_until_s - time.monotonic(), 0.01))
    for process in processes:
        _kill_group(process)
        process.join(timeout=10)
        process.close()


def _kill_group(process: multiprocessing.process.BaseProcess) -> None:
    """Kill a rank and all that it started; a rank too young to have a group of its own is killed alone."""
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _die_with_parent() -> None:
    """Have the kernel kill this rank when the server that forked it is gone, as it is once the test process is."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    connection: Connection,
    payload: bytes,
    variables: dict[str, str],
    stack_dir: str,
    deadline_s: float,
) -> None:
    os.setsid()
    _die_with_parent()
    stack_file = open(Path(stack_dir) / str(rank), "w")  # noqa: SIM115  (faulthandler writes to it until the end)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(variables)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
    )
    value: Any = None
    error: BaseException | None = None
    text = ""
    try:
        value = _call(rank, world_size, port, payload, deadline_s)
    except BaseException as caught:  # noqa: BLE001  (SystemExit and KeyboardInterrupt are outcomes of a rank, too)
        error, text = caught, traceback.format_exc()
    connection.send_bytes(_report(value, error, text))
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    import torch.distributed as dist

    if text:
        os._exit(1)  # the others may be dead: a process group cannot be taken down in good order
    if dist.is_initialized():
        dist.destroy_process_group()


def _call(rank: int, world_size: int, port: int, payload: bytes, deadline_s: float) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=deadline_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    function, args, kwargs = pickle.loads(payload)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    # A rank whose own connections stand may end, or destroy its group, while others are still connecting to it.
    store.set(f"connected/{rank}", "")
    store.wait([f"connected/{other}" for other in range(world_size)])
    return function(rank, *args, **kwargs)


def _report(value: Any, error: BaseException | None, text: str) -> bytes:
    """The outcome as bytes that the caller can surely read."""
    try:
        report = pickle.dumps((value, error, text))
        pickle.loads(report)  # an exception with a constructor of its own may pickle and then not unpickle
    except Exception as problem:  # noqa: BLE001  (pickling may raise anything)
        if error is None:
            text = f"the rank's result cannot be pickled: {problem!r}"
        report = pickle.dumps((None, None, text))
    return report
