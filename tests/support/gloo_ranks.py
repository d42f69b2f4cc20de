"""Run functions on real gloo ranks, with deadlines, and leave nothing behind.

    def shard_sum(rank, values):                       # a module-level function: it is pickled by name
        total = torch.tensor(values[rank])
        dist.all_reduce(total)
        return total.item()

    assert run_ranks(shard_sum, 2, [1, 2]) == [3, 3]   # what each rank returned, by rank

    with standing_ranks(2) as ranks:                   # the same ranks, called again and again, as sweeps do
        outcomes = ranks.call(shard_sum, [1, 2])

Ranks are forked from servers. The first is forked from the test process (`serve_from_here`), or started with torch;
those of `run_megatron_ranks` and `run_stock_ranks` have Megatron behind `pretend_cuda`, too, the latter without this
package. A server that imports more is itself forked from one that has imported less.

Each rank gets the caller's environment and `sys.path`, one thread, a gloo process group, and a process group of its own
in the operating system's sense. That is killed as a whole in the end: a writer process that a rank forgot does not
outlive it. At the deadline the stacks of every rank that still runs are put into the error.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, NoReturn

_DEFAULT_DEADLINE_S: Final = 150.0  # pytest ends a test after 180
# After a first failure the other ranks usually wait for it in a collective: they get this long to raise an error too.
_DEFAULT_GRACE_S: Final = 10.0
_STAY_FOR_S: Final = 7200.0
_PR_SET_PDEATHSIG: Final = 1  # <sys/prctl.h>
# The first use of a DTensor imports torch._dynamo, the module of a test imports pytest.
_TORCH: Final = ["torch", "torch.distributed.checkpoint", "torch._dynamo", "pytest"]

# What servers of other ranks import in addition: Megatron behind `pretend_cuda`, with our strategies or without.
STOCK: Final = (
    "tests.support.pretend_main",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.models.gpt.gpt_layer_specs",
)
MEGATRON: Final = (*STOCK, "mcore_ckpt.megatron.strategy", "mcore_ckpt.megatron.install")
_PLAIN_DCP: Final = ("mcore_ckpt.dcp.writer", "mcore_ckpt.dcp.reader")


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What became of one call on one rank."""

    rank: int
    value: Any = None  # what the function returned
    error: BaseException | None = None  # that it raised, if that can be pickled
    error_text: str = ""  # traceback, or how the process ended, or its stacks at the deadline; empty if all is well
    exit_code: int | None = None  # of a rank that has not reported; negative for a signal
    seconds: float = 0.0
    lost: bool = False  # the rank hung or died

    @property
    def ok(self) -> bool:
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
    preload: Sequence[str] = (),
    **kwargs: Any,
) -> list[Any]:
    """Call `function(rank, *args, **kwargs)`, all of which can be pickled, on every rank of a fresh gloo world; what
    each rank returned. `environment` comes on top of the caller's; `preload`: modules that the ranks' server imports
    in addition. Raises `RanksFailedError`: a rank raised, died or passed the deadline.
    """
    outcomes = rank_outcomes(
        function, world_size, *args, deadline_s=deadline_s, environment=environment, preload=preload, **kwargs
    )
    return _values(function, outcomes)


def _values(function: Callable[..., Any], outcomes: list[RankOutcome]) -> list[Any]:
    if not all(outcome.ok for outcome in outcomes):
        raise RanksFailedError(getattr(function, "__qualname__", repr(function)), outcomes)
    return [outcome.value for outcome in outcomes]


run_megatron_ranks = partial(run_ranks, preload=MEGATRON)
run_stock_ranks = partial(run_ranks, preload=STOCK)


def on_ranks(
    world_size: int, *, preload: Sequence[str] = MEGATRON, **how: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test of what each rank of a fresh world does: a function of `rank`, and of fixtures. `how`: as for
    `run_ranks`.
    """

    def make(work: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(work)
        def test(**fixtures: Any) -> None:
            run_ranks(_do_work_of, world_size, work.__module__, work.__name__, preload=preload, **how, **fixtures)

        _, *others = inspect.signature(work).parameters.values()
        vars(test)["__signature__"] = inspect.Signature(others)  # for pytest
        return test

    return make


def _do_work_of(rank: int, module: str, test: str, **fixtures: Any) -> None:
    getattr(importlib.import_module(module), test).__wrapped__(rank, **fixtures)


def made(directory: Path) -> str:
    """In a rank: the directory, made by rank 0; a string, as a launch passes it."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return str(directory)


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
    """As `run_ranks`, but returns every rank's outcome; others are killed so long after the first failure."""
    with standing_ranks(world_size, environment=environment, preload=preload, collective_s=deadline_s) as ranks:
        return ranks._call(partial(function, *args, **kwargs), range(world_size), deadline_s, grace_s)


class StandingRanks:
    """Made by `standing_ranks`; `ended`: one has hung or died, and all have been killed."""

    def __init__(self, processes: list[BaseProcess], connections: list[Connection], stacks: Path) -> None:
        self.world_size = len(processes)
        self.ended = False
        self._processes = processes
        self._connections = connections
        self._stacks = stacks

    def call(
        self, function: Callable[..., Any], *args: Any, within_s: float = 300.0, only: int | None = None
    ) -> list[RankOutcome]:
        """Call `function(rank, *args)` on every rank at once, or on one; what became of it. A call that raises is an
        outcome, and the ranks stay. Raises `RanksFailedError`: a rank hangs, or has died, and all have been killed.
        """
        called = range(self.world_size) if only is None else range(only, only + 1)
        outcomes = self._call(partial(function, *args), called, within_s, within_s)
        if any(outcome.lost for outcome in outcomes):
            self.ended = True
            for process in self._processes:
                _kill_group(process)
            raise RanksFailedError(function.__qualname__, outcomes)
        return outcomes

    def values(self, function: Callable[..., Any], *args: Any, within_s: float = 300.0) -> list[Any]:
        """What each rank has returned. Raises `RanksFailedError` as `call`, and if one has raised."""
        return _values(function, self.call(function, *args, within_s=within_s))

    def _call(self, function: partial[Any], called: range, deadline_s: float, grace_s: float) -> list[RankOutcome]:
        payload = pickle.dumps(function)
        began_s = time.monotonic()
        for rank in called:
            with contextlib.suppress(OSError):  # it has died, which is what it is found to have done below
                self._connections[rank].send_bytes(payload)
        outcomes: dict[int, RankOutcome] = {}
        until_s = began_s + deadline_s
        while len(outcomes) < len(called):
            waiting = {self._connections[rank]: rank for rank in called if rank not in outcomes}
            remaining_s = until_s - time.monotonic()
            ready = wait(list(waiting), timeout=remaining_s) if remaining_s > 0 else []
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                outcomes[rank] = outcome = self._receive(rank, began_s)
                if not outcome.ok:
                    until_s = min(until_s, time.monotonic() + grace_s)
        passed_s = time.monotonic() - began_s
        why = (
            f"the deadline is {deadline_s:.0f} s"
            if passed_s >= deadline_s
            else f"{grace_s:.0f} s after the first failure"
        )
        for rank, stacks in self._stacks_of([rank for rank in called if rank not in outcomes]).items():
            text = f"still running after {passed_s:.1f} s ({why}); its stacks:\n{stacks}"
            outcomes[rank] = RankOutcome(rank, error_text=text, seconds=passed_s, lost=True)
            _kill_group(self._processes[rank])
        return [outcomes[rank] for rank in called]

    def _receive(self, rank: int, began_s: float) -> RankOutcome:
        try:
            value, error, text = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):  # also: killed in the middle of its report
            process = self._processes[rank]
            process.join(timeout=5)
            code = process.exitcode
            how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            text = f"process ended without a report, {how}"
            return RankOutcome(rank, None, None, text, code, time.monotonic() - began_s, lost=True)
        return RankOutcome(rank, value, error, text, None, time.monotonic() - began_s)

    def _stacks_of(self, ranks: Sequence[int]) -> dict[int, str]:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid or 0, signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)
        files = {rank: self._stacks / str(rank) for rank in ranks}
        return {rank: file.read_text() if file.exists() else "(it had not started)" for rank, file in files.items()}


@contextmanager
def standing_ranks(
    world_size: int,
    *,
    environment: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
    collective_s: float = _STAY_FOR_S,
    is_measured: bool = False,
) -> Iterator[StandingRanks]:
    """Start ranks for the block, whose collectives have so many seconds; other arguments as for `run_ranks`.

    `is_measured`: they collect garbage as a job does, also among what their server has imported. Megatron's optimizer
    collects it at each save, which takes a rank 0.3 s.
    """
    from torch.distributed import TCPStore

    # The store lives here, on a port that the system chose, so that no rank's death takes it down.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {**os.environ, **(environment or {})}
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    with tempfile.TemporaryDirectory(prefix="gloo-ranks-") as stacks:
        try:
            for rank in range(world_size):
                mine, theirs = Pipe()
                connections.append(mine)
                own = theirs, variables, f"{stacks}/{rank}"
                arguments = (rank, world_size, store.port, *own, collective_s, is_measured)
                processes.append(_start(tuple(preload), _rank_main, arguments, f"rank {rank}"))
                theirs.close()
            yield StandingRanks(processes, connections, Path(stacks))
        finally:
            for connection in connections:
                connection.close()  # which every rank takes for the end
            leave_until_s = time.monotonic() + 5
            for process in processes:
                process.join(timeout=max(leave_until_s - time.monotonic(), 0.01))
            for process in processes:
                _kill_group(process)
                process.join(timeout=10)
                process.close()


def _kill_group(process: BaseProcess) -> None:
    """Kill a rank and all that it started; a rank too young to have a group of its own is killed alone."""
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def start_apart(function: Callable[..., object], *args: Any, preload: tuple[str, ...] = _PLAIN_DCP) -> BaseProcess:
    """Call it in a child of a process which has imported the package and has not used it: one that has used an object
    store cannot be forked. It ends with 1 if the function raises.
    """
    return _start(preload, _in_environment, (dict(os.environ), function, args), "apart", daemon=True)


def _in_environment(environment: Mapping[str, str], function: Callable[..., object], args: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
        function(*args)


# --- servers ----------------------------------------------------------------------------------------------------------


class _Server(forkserver.ForkServer):
    """A fork server that is itself forked from another one, and then imports more."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        super().__init__()
        self._more = preload
        self._process: BaseProcess | None = None

    def ensure_running(self, *, as_fork: bool = False) -> None:
        """Start it unless it runs; `as_fork`: of this process itself."""
        if self._process is not None and self._process.is_alive():
            return
        with socket.socket(socket.AF_UNIX) as listener:
            address = f"\0{uuid.uuid4()}"  # in the abstract namespace: nothing to remove
            listener.bind(address)
            listener.listen(128)
            alive_there, alive_here = os.pipe()
            with Connection(alive_there, writable=False) as alive:
                if as_fork:
                    forked = multiprocessing.get_context("fork")
                    self._process = forked.Process(
                        target=_serve_as_fork, args=(listener, alive, alive_here), daemon=True
                    )
                    self._process.start()
                else:
                    parent = STOCK if self._more == MEGATRON else () if self._more else None
                    self._process = _start(parent, _serve, (listener, alive, self._more), "server", daemon=True)
        self._forkserver_address, self._forkserver_alive_fd = address, alive_here


def _serve(listener: socket.socket, alive: Connection, preload: Sequence[str]) -> None:
    forkserver.main(listener.detach(), alive.fileno(), preload)


def _serve_as_fork(listener: socket.socket, alive: Connection, alive_here: int) -> None:
    os.close(alive_here)  # of the process that is served: its end is this one's, too
    _serve(listener, alive, ())


def serve_from_here() -> None:
    """Import torch, and fork the server that all others come from: of a process that needs torch itself, and has not
    imported Megatron or started threads.
    """
    for name in _TORCH:
        importlib.import_module(name)
    _servers[()] = _Server(())
    _servers[()].ensure_running(as_fork=True)


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_TORCH)
_servers: dict[tuple[str, ...], _Server] = {}
_starting = threading.RLock()


def _start(
    preload: tuple[str, ...] | None,
    target: Callable[..., object],
    args: tuple[Any, ...],
    name: str,
    *,
    daemon: bool = False,
) -> BaseProcess:
    """Start a process from the server that has imported torch and `preload`; None: from multiprocessing's own, where
    each child imports the main module of this process, which under pytest costs more than all else.
    """
    process = _context.Process(target=target, args=args, name=name, daemon=daemon)
    with _starting:
        usual = forkserver.connect_to_new_process
        if preload is not None:
            server = _servers.setdefault(preload, _Server(preload))
            server.ensure_running()
            # multiprocessing knows of one server only.
            forkserver.connect_to_new_process = server.connect_to_new_process
        try:
            process.start()
        finally:
            forkserver.connect_to_new_process = usual
    return process


# --- in a rank --------------------------------------------------------------------------------------------------------


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    connection: Connection,
    variables: dict[str, str],
    stacks: str,
    collective_s: float,
    is_measured: bool,
) -> None:
    """Do what is sent, until nobody sends anything any more."""
    os.setsid()
    if not is_measured:
        gc.freeze()
    if sys.platform == "linux":  # killed by the kernel when the server is gone, as it is once the test process is
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)  # noqa: SIM115
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
    met, failed = False, False
    while True:
        try:
            payload = connection.recv_bytes()
        except (EOFError, OSError):
            _leave(failed)
        value: Any = None
        error: BaseException | None = None
        text = ""
        try:
            if not met:
                _meet(rank, world_size, port, collective_s)
                met = True
            function = pickle.loads(payload)
            value = function.func(rank, *function.args, **function.keywords)
        except BaseException as caught:  # noqa: BLE001  (SystemExit and KeyboardInterrupt are outcomes of a rank, too)
            error, text, failed = caught, traceback.format_exc(), True
        connection.send_bytes(_report(value, error, text))
        del value, error


def _meet(rank: int, world_size: int, port: int, collective_s: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=collective_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    # A rank whose own connections stand may end, or destroy its group, while others are still connecting to it.
    store.set(f"connected/{rank}", "")
    store.wait([f"connected/{other}" for other in range(world_size)])


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


def _leave(failed: bool) -> NoReturn:
    import torch.distributed as dist

    sys.stdout.flush()
    sys.stderr.flush()
    if failed:
        os._exit(1)  # the others may be dead: a process group cannot be taken down in good order
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit()
