"""The parts of a benchmark: what is measured, by which adapters, in turns."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.groups import Group, Interpreter, WorkFailedError
from benchmarks.machine import costs_of_memory
from benchmarks.state import State

__all__ = ["PARTS", "Contender", "Run", "Samples"]

# figure -> label -> one value for each round
Samples = dict[str, dict[str, list[float]]]

_WRITERS = ("mcore_ckpt", "megatron", "torch_checkpointing", "dcp")
_BUFFERS_BYTES = 256_000_000  # what ranks take on top of their state and the page cache
_FIFTH = "decoder.layers.1"  # layers 1 and 10 to 19 of 59


class Contender(NamedTuple):
    """Who takes turns."""

    label: str  # in tables
    adapter: str  # name in `benchmarks.adapters`
    interpreter: Interpreter
    reads: str = ""  # label of the one whose checkpoints it loads; its own if that is empty
    own: bool = False  # this package, or what measures the machine; a failure ends the run
    role: str = ""  # in the results, if it is not that of the adapter


@dataclass
class Run:
    """A run of some parts."""

    contenders: Sequence[Contender]  # the first of this package is what others are compared with
    base: Path  # where checkpoints are written
    size_bytes: int  # of the dense state
    rounds: int  # measured ones of this package and of the raw device
    baseline_rounds: int  # of all others, which take part in the first of them
    slow_s: float  # what takes longer is measured once
    failed: dict[str, dict[str, str]] = field(default_factory=dict)  # part -> label -> why it has no figures there
    _part: str = ""

    def part(self, name: str) -> dict[str, Samples]:
        """Measure a part; samples by work."""
        self._part = name
        return PARTS[name](self)

    def chosen(self, *adapters: str) -> list[Contender]:
        """Those with one of these adapters."""
        return [contender for contender in self.contenders if contender.adapter in adapters]

    def path(self, work: str, label: str) -> Path:
        """Where a contender's checkpoint lies."""
        return self.base / work / re.sub(r"[^\w.]+", "-", label)

    @contextmanager
    def groups(
        self, contenders: Sequence[Contender], world: int, *, asynchronous: bool = False
    ) -> Iterator[dict[Contender, Group]]:
        """Ranks for each, for the block."""
        with ExitStack() as stack:
            groups = {}
            for contender in contenders:
                with self._failures(contender):
                    group = Group(contender.interpreter, contender.adapter, world, asynchronous=asynchronous)
                    stack.callback(group.close)
                    groups[contender] = group
            yield groups

    def turns(
        self,
        groups: Mapping[Contender, Group],
        work: Callable[[Contender, Group, int], Mapping[str, float]],
        *,
        warm_up: bool = False,
    ) -> Samples:
        """Let the groups take turns; `work` is one turn of one of them, and gives its figures. `warm_up`: begin with a
        round that is not measured.
        """
        samples: Samples = {}
        left = list(groups)
        for turn in range(0 if warm_up else 1, self.rounds + 1):
            shift = turn % max(1, len(left))
            for contender in [*left[shift:], *left[:shift]]:
                os.sync()
                with self._failures(contender) as failed:
                    figures = work(contender, groups[contender], turn)
                if failed:
                    left.remove(contender)
                    continue
                if turn:
                    _note(samples, contender.label, figures)
                    slow = max(value for figure, value in figures.items() if figure.endswith(" s")) > self.slow_s
                    if slow or turn == (self.rounds if contender.own else self.baseline_rounds):
                        left.remove(contender)
            sys.stderr.write(f"{self._part}: round {turn} of {self.rounds}\n")
        return samples

    @contextmanager
    def _failures(self, contender: Contender) -> Iterator[list[str]]:
        """A baseline that fails is left out of the part, by name; this package's failure ends the run."""
        texts: list[str] = []
        try:
            yield texts
        except WorkFailedError as problem:
            if contender.own:
                raise
            texts.append(str(problem))
            sys.stderr.write(f"{self._part}: {contender.label} failed: {problem}\n")
            self.failed.setdefault(self._part, {})[contender.label] = str(problem).strip().splitlines()[-1][:300]


def _note(samples: Samples, label: str, figures: Mapping[str, float]) -> None:
    for figure, value in figures.items():
        samples.setdefault(figure, {}).setdefault(label, []).append(value)


def _save(run: Run, work: str, contenders: Sequence[Contender], state: State, world: int) -> None:
    """One checkpoint of each, for loads."""
    for contender in contenders:
        with run.groups([contender], world) as groups:
            for group in groups.values():
                group.call("save", run.path(work, contender.label), state)


def _loads(
    run: Run, work: str, state: State, world: int, bound: str = "bare", then: Sequence[str] = ("second",)
) -> Samples:
    """Loads of what `_save` has left, by all who have one; by lower bounds and the raw device out of this package's."""
    contenders = run.chosen("raw", bound, *_WRITERS)

    def turn(one: Contender, group: Group, _: int) -> dict[str, float]:
        # What a second load finds in the page cache depends on how the first one read: no lower bound.
        others = [name for name in then if name != "second" or one.adapter != bound]
        figures: dict[str, float] = group.call(
            "load", run.path(work, one.reads or one.label), state, others, run.slow_s
        )
        return figures

    with run.groups([one for one in contenders if run.path(work, one.reads or one.label).exists()], world) as groups:
        return run.turns(groups, turn)


def _dense(run: Run) -> dict[str, Samples]:
    state = State("dense", run.size_bytes)
    with run.groups(run.chosen("raw", *_WRITERS), 2) as groups:
        saves = run.turns(
            groups,
            lambda one, group, _: _save_figures(group.call("save", run.path("dense", one.label), state)),
            warm_up=True,
        )
    return {"dense": saves | _loads(run, "dense", state, 2, then=("second", "warm"))}


def _save_figures(cost: Mapping[str, float]) -> dict[str, float]:
    return {f"save {name}" if name in ("s", "cpu s") else name: value for name, value in cost.items()}


def _reshard(run: Run) -> dict[str, Samples]:
    state = State("dense", run.size_bytes)
    _save(run, "reshard", run.chosen(*_WRITERS), state, 4)
    loads = {
        "4 to 2": _loads(run, "reshard", state, 2),
        "4 to 1": _loads(run, "reshard", state, 1),
        "a fifth": _loads(run, "reshard", state._replace(prefix=_FIFTH), 1),
    }
    rows = State("rows", run.size_bytes)
    _save(run, "slices", run.chosen(*_WRITERS), rows, 4)
    return loads | {"slices": _loads(run, "slices", rows, 8)}


def _small(run: Run) -> dict[str, Samples]:
    state = State("small", run.size_bytes)
    saving = run.chosen("raw", *_WRITERS, "replanned", "megatron constant")
    with run.groups(saving, 2) as groups:
        saves = run.turns(
            groups,
            lambda one, group, _: _save_figures(group.call("save", run.path("small", one.label), state)),
            warm_up=True,
        )
    return {"small": saves | _loads(run, "small", state, 2, "bare loop", ("second", "warm"))}


def _first(run: Run) -> dict[str, Samples]:
    """The first save, load and asynchronous save of processes that have done nothing before."""
    state, rounds = State("dense", run.size_bytes), max(1, run.rounds // 2)
    samples: Samples = {}
    contenders = run.chosen("raw", *_WRITERS, "nvrx")
    for turn in range(rounds):
        for one in [*contenders[turn:], *contenders[:turn]]:
            path = run.path("first", one.label)
            if one.adapter != "nvrx":  # it saves and loads as Megatron-Core does
                with run.groups([one], 2) as groups:
                    for group in groups.values():
                        cost = group.call("save", path, state, True)
                        _note(samples, one.label, {"save s": cost["s"], "save cpu s": cost["cpu s"]})
                        _note(samples, one.label, {"save peak extra MB": cost["peak extra MB"]})
            if one.adapter not in ("nvrx", "raw"):
                with run.groups([one], 2) as groups:
                    for group in groups.values():
                        cost = group.call("load", path, state, (), run.slow_s)
                        cold = {f"load {figure}": cost[figure] for figure in ("cold s", "cold cpu s")}
                        _note(samples, one.label, cold)
            if one.adapter != "raw":
                _first_async(run, samples, one, state)
            if one is run.chosen("mcore_ckpt")[0]:
                _first_async(run, samples, one, state, warm_up=True)
        sys.stderr.write(f"first: round {turn + 1} of {rounds}\n")
    return {"first": samples}


def _first_async(run: Run, samples: Samples, one: Contender, state: State, *, warm_up: bool = False) -> None:
    """The first asynchronous save of fresh ranks, next to the median of three that follow."""
    with run.groups([one], 2, asynchronous=True) as groups:
        for group in groups.values():
            if warm_up:
                group.call("warm_up", state)
            path = run.path("first", one.label)
            first_s, *later_s = (group.call("async_save", path, state, step)["blocking s"] for step in range(4))
            figures = {"async blocking s": first_s, "async first / later": first_s / median(later_s)}
            _note(samples, f"{one.label}, warm_up()" if warm_up else one.label, figures)


def _asynchronous(run: Run) -> dict[str, Samples]:
    """One interpreter after the other: each contender keeps its state and its copies of it in memory."""
    results: dict[str, Samples] = {}
    for kind, more in (("dense", ("nvrx",)), ("small", ("replanned", "megatron constant", "nvrx constant"))):
        contenders = run.chosen(*_WRITERS, *more)
        samples = results.setdefault(f"async {kind}", {})
        for python in dict.fromkeys(one.interpreter.versions["python"] for one in contenders):
            batch = [one for one in contenders if one.interpreter.versions["python"] == python]
            with run.groups(batch, 2, asynchronous=True) as groups:
                work = partial(_save_while_training, run, State(kind, run.size_bytes))
                for figure, by_label in run.turns(groups, work, warm_up=True).items():
                    samples.setdefault(figure, {}).update(by_label)
    return results


def _save_while_training(run: Run, state: State, one: Contender, group: Group, step: int) -> dict[str, float]:
    """An asynchronous save, and whether it holds the state at the call, whatever was written to tensors after it."""
    path = run.path("async", one.label)
    figures: dict[str, float] = group.call("async_save", path, state, step)
    if step == 0 and not one.own:
        return figures
    isolated = group.call("verify", path, state, step)
    if one.own and not isolated:
        raise AssertionError(f"{one.label} has saved what was written to the tensors after the call")
    return figures | {"isolated": float(isolated)}


def _phases(run: Run) -> dict[str, Samples]:
    results: dict[str, Samples] = {}
    (contender, *_) = run.chosen("mcore_ckpt")
    for kind in ("dense", "small"):
        samples = results.setdefault(f"phases {kind}", {})
        with run.groups([contender], 2, asynchronous=True) as groups:
            for turn in range(run.rounds + 1):
                for group in groups.values():
                    costs = group.call("phases", run.base / "phases", State(kind, run.size_bytes))
                    for label, figures in costs.items() if turn else ():
                        _note(samples, label, figures)
    return results


def _scarce(run: Run) -> dict[str, Samples]:
    """Cold loads of ranks whose control group has no room for the page cache of what they read."""
    state = State("dense", run.size_bytes)
    contenders = run.chosen("mcore_ckpt", "megatron")
    _save(run, "scarce", contenders, state, 2)
    with run.groups(contenders, 2) as groups, ExitStack() as stack:
        for number, group in enumerate(groups.values()):
            try:
                limit = stack.enter_context(_cgroup(f"mcore_ckpt_bench_{os.getpid()}_{number}"))
            except OSError as problem:
                run.failed["scarce"] = {"all": f"this machine lets no control group be made: {problem}"}
                return {"scarce": {}}
            group.call("enter_cgroup", str(limit.parent / "cgroup.procs"))
            limit.write_text(str(int(1.2 * run.size_bytes) + _BUFFERS_BYTES))
            stack.callback(group.call, "enter_cgroup", str(limit.parent.parent / "cgroup.procs"))
        loads = run.turns(
            groups,
            lambda one, group, _: group.call("load", run.path("scarce", one.label), state, (), run.slow_s),
        )
        return {"scarce": loads}


def _certificate(run: Run) -> dict[str, Samples]:
    """Loads that end with a certificate next to loads that do not."""
    results: dict[str, Samples] = {}
    contenders = [run.chosen("mcore_ckpt")[0], *run.chosen("certified", "certified whole")]
    for kind in ("dense", "small"):
        work, state = f"certificate {kind}", State(kind, run.size_bytes)
        _save(run, work, contenders[:1], state, 2)
        path = run.path(work, contenders[0].label)
        with run.groups(contenders, 2) as groups:
            load = partial(_load_of, path, state, run.slow_s)
            results[work] = run.turns(groups, load)
    return results


def _load_of(path: Path, state: State, slow_s: float, _: Contender, group: Group, __: int) -> dict[str, float]:
    figures: dict[str, float] = group.call("load", path, state, ("warm",), slow_s)
    return figures


@contextmanager
def _cgroup(name: str) -> Iterator[Path]:
    """A control group below this process's; the file that sets its limit of memory. Raises `OSError`."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    folder, limit = (
        (Path("/sys/fs/cgroup/memory" + own["memory"]), "memory.limit_in_bytes")
        if "memory" in own
        else (Path("/sys/fs/cgroup" + own.get("", "/")), "memory.max")
    )
    (folder / name).mkdir()
    try:
        (folder / name / limit).stat()
        yield folder / name / limit
    finally:
        (folder / name).rmdir()


def _machine(run: Run) -> dict[str, Samples]:
    return {"machine": {figure: {"": values} for figure, values in costs_of_memory(run.base, run.rounds).items()}}


PARTS: dict[str, Callable[[Run], dict[str, Samples]]] = {
    "machine": _machine,
    "dense": _dense,
    "reshard": _reshard,
    "small": _small,
    "first": _first,
    "async": _asynchronous,
    "phases": _phases,
    "scarce": _scarce,
    "certificate": _certificate,
}
