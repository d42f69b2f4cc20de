"""Processes that run one command together, on one host or several; a command alone is a team of one, without torch.

The launcher says who they are: `torchrun` and Kubernetes by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, `srun` by
SLURM_PROCID and its kin. They meet over gloo (`core.ranks`). All of them plan the same work; each does its `share`,
gives its part of the result to all (`run`), and raises the first error of any. The first rank alone does what cannot be
divided (`first`), prints, and publishes.

What takes long is done on a thread, while the main one exchanges with the others, each half second, whether all still
work and how far they are. So a rank that ends or fails stops all of them soon. `Progress` draws it as a bar of `rich`.
"""

from __future__ import annotations

import operator
import os
import re
import sys
import threading
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from mcore_ckpt.core.console import is_terminal
from mcore_ckpt.core.errors import CheckpointError, LoadError, OptionError, SaveError
from mcore_ckpt.core.process import Outcome

if TYPE_CHECKING:
    from mcore_ckpt.core.ranks import RankGroup

S = TypeVar("S")
T = TypeVar("T")
P = TypeVar("P", bound="Progress")

# So much later the others may start; and come to an exchange, before which the first rank may do something by itself.
_WAITS_SILENTLY_S: Final = 20.0
_MEETS_WITHIN: Final = timedelta(minutes=10)
_COMES_WITHIN: Final = timedelta(minutes=30)
_TELLS_EACH_S: Final = 0.5
_STOPS_WITHIN_S: Final = 60.0
# A bar comes when a person has waited so long, and moves that often.
_BAR_PERIOD_S: Final = 0.1
_PATIENCE_S: Final = 1.0  # with a terminal that nobody reads
_ENDS_BY: Final = SaveError  # of what is no error of our tree, as that contact is lost: what is done of a target stays


class _StoppedError(Exception):
    """Another rank has ended or failed, of which the next exchange tells."""


class Counter:
    """Bytes that this rank has done, for any thread; and that all have, as far as they have told."""

    def __init__(self) -> None:
        self.own_bytes = self.all_bytes = 0
        self.is_stopped = False
        self.group: RankGroup | None = None  # over which the others tell
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        """`nbytes` more are done. Raises if another rank has ended or failed."""
        if self.is_stopped or (self.group is not None and self.group.has_lost_contact):
            raise _StoppedError
        with self._lock:
            self.own_bytes += nbytes


class Team:
    """`rank` is this process's number, `size` how many there are. Exchanges are for the main thread; all ranks come to
    the same ones in the same order. Of an error the exchange names the rank, and all raise it.
    """

    def __init__(self, group: RankGroup | None = None) -> None:
        self.rank, self.size = (0, 1) if group is None else (group.rank, group.size)
        self._group = group

    def run(self, what: str, fn: Callable[[], T]) -> list[T]:
        """Call `fn` on every rank and give every rank the values of all, by rank. `what`: the step in words."""
        if self._group is None:
            return [fn()]
        own = Outcome.of(fn)
        # After an exchange in which contact was lost the others may still wait in that one: to end tells them.
        if own.error is not None and self._group.has_lost_contact:
            raise own.error
        return self._group.run(what, own.value, wrap=_ENDS_BY)

    def end(self, what: str, fn: Callable[[], T]) -> T:
        """As `run`, but each rank gets its own value, and the first keeps it if another rank ends without a word."""
        if self._group is not None and self._group.has_lost_contact:  # the others wait where it was, until this ends
            return fn()
        own: list[T] = []
        try:
            self.run(what, lambda: own.append(fn()))
        except _ENDS_BY:
            if self.rank or not own or self._group is None or not self._group.has_lost_contact:
                raise
        return own[0]

    def work(self, what: str, fn: Callable[[], T], counter: Counter | None = None) -> list[T]:
        """As `run`, of what takes long, without an exchange. `counter`: ends `fn` when another rank has failed."""
        if self._group is None:
            return [fn()]
        counter = counter or Counter()
        counter.group = self._group
        outcomes: list[Outcome[T]] = []
        thread = threading.Thread(target=lambda: outcomes.append(Outcome.of(fn)), name="mcore_ckpt-share", daemon=True)

        def state() -> list[int]:
            return [not outcomes, any(outcome.error is not None for outcome in outcomes), counter.own_bytes]

        def sums(one: list[int], other: list[int]) -> list[int]:
            return [*map(operator.add, one, other)]

        def value() -> T:
            if isinstance(outcomes[0].error, _StoppedError):
                return None  # type: ignore[return-value]  # the rank that has failed raises for all
            return outcomes[0].value()

        thread.start()
        try:
            all_at_work: list[int] = [1]
            while all_at_work[0]:
                thread.join(_TELLS_EACH_S)
                all_at_work = self._group.run_merged(what, state, sums, list, wrap=_ENDS_BY, name=f"work on: {what}")
                counter.is_stopped |= all_at_work[1] > 0
                counter.all_bytes = all_at_work[2]
        except BaseException:
            counter.is_stopped = True
            thread.join(_STOPS_WITHIN_S)
            raise
        return self.run(what, value)

    def first(self, what: str, fn: Callable[[], T]) -> T:
        """Call `fn` on the first rank, where it is a command alone, and give every rank its value."""
        value: T = self.work(what, fn if self.rank == 0 else lambda: None)[0]  # type: ignore[assignment]
        return value

    def divide(
        self,
        what: str,
        items: Sequence[S],
        size: Callable[[S], int],
        fn: Callable[[Sequence[S]], T],
        counter: Counter | None = None,
    ) -> list[T]:
        """As `work`, where `fn` gets what is this rank's of items that all ranks have in the same order: a range, by
        bytes. Raises `LoadError` where they do not have the same, so that nothing is left out.
        """
        if self.size > 1:
            self.same(what, zlib.crc32(array("q", map(size, items)).tobytes()))
        return self.work(what, partial(fn, share(items, size, self.rank, self.size)), counter)

    def same(self, what: str, value: object) -> None:
        """Raise `LoadError` unless all ranks have this value."""
        found = self.run(what, lambda: value)
        other = next((rank for rank, each in enumerate(found) if each != found[0]), None)
        if other is not None:
            raise LoadError(
                f"could not {what}: rank 0 and rank {other} of {self.size} do not see the same files: another program "
                "has changed them meanwhile, or this is not the same directory on all hosts"
            )


def share(items: Sequence[S], size: Callable[[S], int], rank: int, ranks: int) -> Sequence[S]:
    """The range of items that a rank gets, so that all get about as many bytes."""
    if ranks == 1:
        return items
    total, done, own = max(1, sum(map(size, items))), 0, []
    for item in items:
        nbytes = size(item)
        if min(ranks - 1, (2 * done + nbytes) * ranks // (2 * total)) == rank:
            own.append(item)
        done += nbytes
    return own


ALONE: Final = Team()
_team: ContextVar[Team] = ContextVar("_team", default=ALONE)


def current_team() -> Team:
    """The team that runs this command; `ALONE` in any other program, and on any thread but a command's main one."""
    return _team.get()


class Progress:
    """A bar over a known number of bytes, those of all ranks of a command; a context manager. `advance` may be called
    from any thread.

    `shown`: None shows the bar if standard error is a terminal, on the first rank; False never does.
    """

    def __init__(self, what: str, total_bytes: int, *, shown: bool | None = None) -> None:
        self.counter = Counter()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._what = what
        self._total_bytes = total_bytes
        self._shown = (is_terminal(sys.stderr) if shown is None else shown) and current_team().rank == 0

    def advance(self, nbytes: int) -> None:
        """`nbytes` more are done, by this rank. Raises where another one has failed."""
        self.counter.add(nbytes)

    def __enter__(self: P) -> P:
        if self._shown:
            self._ended.clear()
            self._thread = threading.Thread(target=self._draw, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._ended.set()
            self._thread.join(_PATIENCE_S)
            self._thread = None

    def _draw(self) -> None:
        if not self._ended.wait(_BAR_PERIOD_S):
            with suppress(Exception):  # of a stream that is closed, say
                self._draw_bar()

    def _draw_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        sizes = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        columns, console = (TextColumn("{task.description}"), *sizes), Console(stderr=True)
        # What the job prints meanwhile must not wait for the terminal of the bar: its streams stay its own.
        bar = Bar(
            *columns, console=console, transient=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        with bar:
            task = bar.add_task(self._what, total=self._total_bytes)
            while not self._ended.wait(_BAR_PERIOD_S):
                bar.update(task, completed=max(self.counter.own_bytes, self.counter.all_bytes), refresh=True)


@contextmanager
def team_of_launcher() -> Iterator[Team]:
    """Within the block the processes that a launcher has started are the team. `CheckpointError`: they do not meet."""
    loaded = sys.modules.get("torch.distributed")
    in_a_job = loaded is not None and loaded.is_available() and loaded.is_initialized()
    rank, size = (0, 1) if in_a_job else _place()
    if size == 1:
        yield ALONE
        return
    try:
        import torch.distributed as dist

        from mcore_ckpt.core.ranks import RankGroup
    except ImportError as error:
        raise OptionError(f"a command of {size} processes needs torch, which cannot be imported: {error}") from error
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    how = "start all of them; `env -u WORLD_SIZE -u SLURM_STEP_ID mcore-ckpt ...` runs alone, from within a job, too"
    waits = f"mcore-ckpt: rank {rank} of {size} waits for the others at {where}: {how}"
    timer = threading.Timer(_WAITS_SILENTLY_S, print, (waits,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        while True:
            store, _, _ = next(iter(dist.rendezvous("env://", rank, size, timeout=_MEETS_WITHIN)))
            # The store of torchrun's agent outlives a command: each rank counts which one this is.
            store = dist.PrefixStore(f"mcore_ckpt/{store.add(f'mcore_ckpt/begun by {rank}', 1)}", store)
            with suppress(dist.DistNetworkError):  # that of a script's command before, whose first rank was to end
                if rank == 0:
                    store.set("first", "")
                store.wait(["first"], _MEETS_WITHIN)
                break
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_MEETS_WITHIN)
        group = RankGroup(dist.new_group(backend="gloo", timeout=_COMES_WITHIN))
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"rank {rank} of {size} has not met the others at {where}: {error}; {how}") from error
    finally:
        timer.cancel()
    team = Team(group)
    token = _team.set(team)
    try:
        yield team
    finally:
        _team.reset(token)
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _place() -> tuple[int, int]:
    """Rank and number of the processes that a launcher has started; sets what torch needs to know where `srun` did."""
    known = os.environ
    # A batch script has the numbers of its first task, and is none: it runs in no step.
    tasks = known.get("SLURM_NTASKS", "1") if "SLURM_STEP_ID" in known else "1"
    names = ("RANK", "WORLD_SIZE") if "WORLD_SIZE" in known or tasks == "1" else ("SLURM_PROCID", "SLURM_NTASKS")
    rank, size = known.get(names[0], ""), known.get(names[1], "1")
    if size == "1":
        if tasks != "1" and "TORCHELASTIC_RUN_ID" not in known:
            raise OptionError(
                f"WORLD_SIZE=1, but SLURM_NTASKS={tasks}: unset WORLD_SIZE; or SLURM_STEP_ID, to be alone"
            )
        return 0, 1
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise OptionError(
            f"{names[0]}={rank}, {names[1]}={size}: expected the number of a process, below how many there are; unset "
            f"{names[1]} to run the command alone"
        )
    if names[0] != "RANK":
        step = f"{known.get('SLURM_JOB_ID')}.{known.get('SLURM_STEP_ID')}"
        hosts = known.get("SLURM_STEP_NODELIST") or known.get("SLURM_JOB_NODELIST", "")
        # Slurm shortens a list of hosts: `node[03-07,9],other`.
        known.setdefault("MASTER_ADDR", re.sub(r"\[([^],-]+)[^]]*\]", r"\1", hosts, count=1).partition(",")[0])
        known.setdefault("MASTER_PORT", str(20000 + zlib.crc32(step.encode()) % 10000))
    if not known.get("MASTER_ADDR") or not known.get("MASTER_PORT"):
        raise OptionError(
            f"{names[1]}={size}, without MASTER_ADDR or MASTER_PORT: set them to the host of rank 0 and a free port "
            f"there, or unset {names[1]} to run the command alone"
        )
    return int(rank), int(size)
