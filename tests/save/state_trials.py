"""Faults that no checksum of a file shows, in jobs of four ranks: is each named, and is nothing named without one?

    python -m tests.save.state_trials --trials 1000 --seed 1        # `make test-state`

Each trial saves a state of a model and its optimizer twice, under a parallel layout that it draws, and loads it under
another one. One of these happens on the way:

    flip      a bit changes in one rank's memory, after the trainer has taken a fingerprint and before the save
    loaded    a bit changes in one rank's memory after its tensors have been read
    swapped   two ranks, or two shards of one, have each other's bytes after they have been read
    replica   a bit differs in a replica that is not saved
    none

It is named if the tensor is, and no other; a trial without a fault in which anything is named is a false alarm.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.support.gloo_ranks import run_megatron_ranks

FAULTS = ("flip", "loaded", "swapped", "replica", "none")
WORLD = 4
_SHAPES = {"qkv": (24, 8), "proj": (8, 16), "norm": (10,), "experts": (4, 6, 8), "embedding": (16, 6)}
# Of more than a mebibyte on each rank: a load fills it in place, and sums it there.
_LARGE = (2304, 512)
_DIVIDED = {"qkv": 0, "proj": 1, "experts": 0, "embedding": 0, "large": 1}  # the axis that tensor-parallel ranks divide


class Layout(NamedTuple):
    """How many ranks divide tensors, and how many hold the same."""

    tensor: int
    data: int

    def place(self, rank: int) -> tuple[int, int]:
        return rank % self.tensor, rank // self.tensor


LAYOUTS = [Layout(1, 4), Layout(2, 2), Layout(4, 1)]


def whole_state(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {f"decoder.{name}.weight": shape for name, shape in _SHAPES.items()}
    state = {key: torch.randn(shape, generator=generator).bfloat16() for key, shape in weights.items()}
    for kind, (key, shape) in itertools.product(("fp32_param", "exp_avg", "exp_avg_sq"), weights.items()):
        state[f"optimizer.state.{kind}.{key}"] = torch.randn(shape, generator=generator)
    large = torch.arange(math.prod(_LARGE), dtype=torch.int32).remainder_(251).add_(seed).view(_LARGE)
    state["decoder.large.weight"] = large.bfloat16()
    state["optimizer.state.exp_avg.decoder.large.weight"] = large.float()
    return state


def _boxes(key: str, shape: tuple[int, ...], layout: Layout, rank: int) -> Iterator[tuple[Any, Any, Any]]:
    """Offsets, sizes and replica number of what a rank holds of a tensor."""
    tensor, data = layout.place(rank)
    name = key.split(".")[-2]
    offsets, sizes = [0] * len(shape), list(shape)
    axis = _DIVIDED.get(name)
    replicas = [0, 0 if axis is not None else tensor, data]
    if axis is not None:
        sizes[axis] = shape[axis] // layout.tensor
        offsets[axis] = tensor * sizes[axis]
    if key.startswith("optimizer."):  # each data-parallel rank keeps a part, of what none divides half of two ranks
        other = len(shape) - 1 if axis == 0 else 0
        if sizes[other] % layout.data == 0:
            sizes[other] //= layout.data
            offsets[other] += data * sizes[other]
            replicas[2] = 0
    yield tuple(offsets), tuple(sizes), tuple(replicas)
    if name == "embedding" and not key.startswith("optimizer."):  # tied: the output layer holds it, too
        yield tuple(offsets), tuple(sizes), (1, *replicas[1:])


def sharded(whole: dict[str, torch.Tensor], layout: Layout, rank: int, *, empty: bool = False) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    found = {}
    for key, value in whole.items():
        for number, (offsets, sizes, replicas) in enumerate(_boxes(key, tuple(value.shape), layout, rank)):
            part = value[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))].clone()
            data = torch.zeros_like(part) if empty else part
            counts = tuple(n // m for n, m in zip(value.shape, sizes, strict=True))
            made = ShardedTensor(key, data, data.dtype, sizes, tuple(value.shape), offsets, counts, replica_id=replicas)
            found[f"{key}/{number}"] = made
    return found


def _flip(data: torch.Tensor, chance: random.Random) -> None:
    raw = data.reshape(-1).view(torch.uint8)
    at = chance.randrange(len(raw))
    raw[at] = int(raw[at]) ^ (1 << chance.randrange(8))


def _is_main(shard: Any) -> bool:
    return not any(shard.replica_id)


class _Trial:
    """One trial on one rank; all ranks draw the same numbers."""

    def __init__(self, rank: int, number: int, seed: int, directory: Path, saver: Any) -> None:
        self.rank, self.directory, self.saver = rank, directory, saver
        self.chance = random.Random(f"{seed} {number}")
        self.fault = FAULTS[number % len(FAULTS)]
        self.layout, self.other = self.chance.choice(LAYOUTS), self.chance.choice(LAYOUTS)
        while self.fault == "replica" and self.layout.data == 1:
            self.layout = self.chance.choice(LAYOUTS)
        self.number = number

    def _holders(self, layout: Layout, *, main: bool) -> list[tuple[int, str]]:
        """Ranks and names of the shards that are saved, or of those that are not."""
        every = ((rank, sharded(whole_state(0), layout, rank)) for rank in range(WORLD))
        return [(rank, name) for rank, held in every for name, shard in held.items() if _is_main(shard) == main]

    def _save(self, state: dict[str, Any], iteration: int) -> tuple[Path, list[str]]:
        path = self.directory / f"iter_{iteration:07d}"
        if self.rank == 0:
            path.mkdir()
        dist.barrier()
        with _heard() as lines:
            self.saver.save(state, path)
        return path, [line for line in lines if "slices differ" in line]

    def run(self) -> tuple[str, str, list[str]]:
        """The fault, the key of the tensor, and all that was said."""
        from mcore_ckpt import checkpoint_fingerprint, fingerprint

        before, whole = whole_state(2 * self.number), whole_state(2 * self.number + 1)
        said = self._save(sharded(before, self.layout, self.rank), 100)[1]
        key = ""
        state = sharded(whole, self.layout, self.rank)
        taken = fingerprint(state, names=True)
        if self.fault in ("flip", "replica"):
            rank, name = self.chance.choice(self._holders(self.layout, main=self.fault == "flip"))
            key = name.partition("/")[0]
            if rank == self.rank:
                _flip(state[name].data, self.chance)
        path, lines = self._save(state, 200)
        said += lines
        if self.rank == 0:
            said += [f"differs: {one}" for one in taken.differing(checkpoint_fingerprint(path))]
        key, lines = self._load(path, whole, key)
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(path)
            shutil.rmtree(path.with_name("iter_0000100"))
        return self.fault, key, said + lines

    def _load(self, path: Path, whole: dict[str, torch.Tensor], key: str) -> tuple[str, list[str]]:
        from mcore_ckpt import LoadError, LoadOptions, TorchDistLoadStrategy
        from mcore_ckpt.megatron._proof import prove_load

        options = LoadOptions(prove="always")
        if self.fault in ("loaded", "swapped"):
            rank, name = self.chance.choice(self._holders(self.other, main=True))
            key = name.partition("/")[0]

        def load(state: Any, directory: Path) -> Any:
            loaded = TorchDistLoadStrategy(options=options).load(state, directory)
            if self.fault == "loaded" and rank == self.rank:
                _flip(loaded[name], self.chance)
            if self.fault == "swapped":
                self._swap(loaded, name)
            return loaded

        try:
            prove_load(load, options, sharded(whole, self.other, self.rank, empty=True), path)
        except LoadError as error:
            return key, [f"load: {error}".splitlines()[0]]
        return key, []

    def _swap(self, loaded: dict[str, torch.Tensor], name: str) -> None:
        """Each rank gets what the next one has of the tensor; one that has all of it, its rows in turn."""
        mine = loaded[name]
        parts: list[Any] = [None] * WORLD
        dist.all_gather_object(parts, mine.clone())
        found = parts[(self.rank + 1) % WORLD]
        mine.copy_(mine.roll(1, 0) if found.equal(mine) or found.shape != mine.shape else found)


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What this package logs as warnings meanwhile."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcore_ckpt").addHandler(handler)
    yield lines
    logging.getLogger("mcore_ckpt").removeHandler(handler)


def _trials(rank: int, numbers: range, seed: int, directory: Path) -> list[tuple[str, str, list[str]]]:
    from mcore_ckpt import SaveOptions, TorchDistSaveStrategy

    logging.getLogger("mcore_ckpt").propagate = False
    options = SaveOptions(compare_replicas="always")
    found = []
    for number in numbers:
        saver = TorchDistSaveStrategy(options=options)
        found.append(_Trial(rank, number, seed, directory, saver).run())
    return found


def verdict(fault: str, key: str, said: list[str]) -> str:
    """Whether the fault was named, and nothing else."""
    if fault == "none":
        return "false alarm" if said else "nothing said"
    if any(_names(line, one) for one in whole_state(0) if one != key for line in said):
        return "other named"
    expected = {"flip": "differs: ", "replica": "slices differ"}.get(fault, "load: ")
    return "named" if any(_names(line, key) and expected in line for line in said) else "missed"


def _names(line: str, key: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", line) is not None


def run(trials: int, seed: int, directory: Path, *, at_once: int = 50) -> tuple[Counter[tuple[str, str]], list[str]]:
    """How often what became of which fault, and what was not as it should be."""
    tally: Counter[tuple[str, str]] = Counter()
    unexpected = []
    for first in range(0, trials, at_once):
        numbers = range(first, min(first + at_once, trials))
        by_rank = run_megatron_ranks(_trials, WORLD, numbers, seed, directory, deadline_s=3600)
        for number, (fault, key, said) in zip(numbers, by_rank[0], strict=True):
            found = verdict(fault, key, said)
            tally[fault, found] += 1
            if found not in ("named", "nothing said"):
                unexpected.append(f"trial {number}, {fault} of {key}: {found}: {said}")
    return tally, unexpected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mcore-ckpt-state-") as directory:
        tally, unexpected = run(arguments.trials, arguments.seed, Path(directory))
    for (fault, found), count in sorted(tally.items()):
        print(f"{fault:10} {found:14} {count}")
    print("\n".join(unexpected))
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
