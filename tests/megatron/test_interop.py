"""Checkpoints of ours and of stock Megatron-Core, read by the other side, under another parallel layout.

Real Megatron models with a real distributed optimizer: dense, gated MLP, and mixture of experts with one module for
each expert or for all. Each world size is one set of processes that handles all four; stock processes never import this
package.
"""

from __future__ import annotations

import json
import pickletools
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt import FileSystemReader
from tests.megatron.interop_ranks import STEPS, Job, LoadedState, load_all, save_all
from tests.support.gloo_ranks import run_pretending_ranks, run_stock_ranks
from tests.support.models import DENSE, GATED, MOE_GROUPED, MOE_SEQUENTIAL, Parallel
from tests.support.state_compare import Reference

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = {"dense": DENSE, "gated": GATED, "moe": MOE_SEQUENTIAL, "moe-grouped": MOE_GROUPED}
# World size -> model -> the layout that saves and the one that loads. Megatron's local layers allow no tensor
# parallelism with experts, and its optimizer no change between expert parallelism and none.
LAYOUTS: dict[int, dict[str, tuple[Parallel, Parallel]]] = {
    1: {name: (Parallel(), Parallel()) for name in SHAPES},
    2: {
        "dense": (Parallel(tensor=2), Parallel(pipeline=2)),
        "gated": (Parallel(), Parallel(tensor=2)),
        "moe": (Parallel(expert=2), Parallel(expert=2)),
        "moe-grouped": (Parallel(pipeline=2), Parallel()),
    },
    4: {
        "dense": (Parallel(tensor=2, pipeline=2), Parallel(tensor=4)),
        "gated": (Parallel(tensor=4), Parallel(tensor=2)),
        "moe": (Parallel(pipeline=2, expert=2), Parallel(expert=4)),
        "moe-grouped": (Parallel(expert=4), Parallel(pipeline=2, expert=2)),
    },
}
# Two ranks are what `make test` has time for.
_MARKS = {world: [] if world == 2 else [pytest.mark.long] for world in LAYOUTS}
SIZES = [pytest.param(world, marks=_MARKS[world]) for world in LAYOUTS]
CASES = [pytest.param(world, name, marks=_MARKS[world]) for world in LAYOUTS for name in SHAPES]
DEADLINE_S = 400

pytestmark = pytest.mark.timeout(900)  # a fixture's processes have their own, shorter deadline


@dataclass(frozen=True)
class World:
    """All that the processes of one world size did."""

    saved_by_ours: dict[str, Job]
    saved_by_stock: dict[str, Job]
    ours_ran: list[dict[str, tuple[str, ...]]]
    stock_ran: list[dict[str, tuple[str, ...]]]
    stock_loaded_ours: list[dict[str, LoadedState]]
    ours_loaded_stock: list[dict[str, LoadedState]]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, World]:
    return {}


@pytest.fixture
def world(worlds: dict[int, World], size: int, tmp_path_factory: pytest.TempPathFactory) -> World:
    if size not in worlds:
        worlds[size] = _run(size, tmp_path_factory.mktemp(f"world{size}"))
    return worlds[size]


def _run(size: int, directory: Path) -> World:
    def jobs(writer: str) -> list[Job]:
        made = [Job(name, shape, LAYOUTS[size][name][0], directory / writer / name) for name, shape in SHAPES.items()]
        for job in made:
            job.directory.mkdir(parents=True)
        return made

    def other_layout(saved: list[Job]) -> list[Job]:
        return [replace(job, layout=LAYOUTS[size][job.name][1]) for job in saved]

    by_ours, by_stock = jobs("ours"), jobs("stock")
    # Synchronous on one rank, asynchronous on more: both ways of writing meet both ways of reading.
    ours_ran = run_pretending_ranks(save_all, size, by_ours, True, asynchronous=size > 1, deadline_s=DEADLINE_S)
    stock_ran = run_stock_ranks(save_all, size, by_stock, False, deadline_s=DEADLINE_S)
    return World(
        {job.name: job for job in by_ours},
        {job.name: job for job in by_stock},
        ours_ran,
        stock_ran,
        run_stock_ranks(load_all, size, other_layout(by_ours), False, deadline_s=DEADLINE_S),
        run_pretending_ranks(load_all, size, other_layout(by_stock), True, deadline_s=DEADLINE_S),
    )


@pytest.mark.parametrize(("size", "name"), CASES)
class TestInterop:
    def test_ours_is_read_by_stock(self, world: World, size: int, name: str) -> None:
        method = "save" if size == 1 else "async_save"
        assert {ran[name] for ran in world.ours_ran} == {(f"mcore_ckpt.TorchDistSaveStrategy.{method}",)}
        _check(world.saved_by_ours[name], [rank[name] for rank in world.stock_loaded_ours], "megatron")

    def test_stock_is_read_by_ours(self, world: World, size: int, name: str) -> None:
        for ran in world.stock_ran:
            assert ran[name]
            assert all(method.startswith("megatron.TorchDistSaveShardedStrategy.") for method in ran[name])
        _check(world.saved_by_stock[name], [rank[name] for rank in world.ours_loaded_stock], "mcore_ckpt")

    def test_ours_is_read_by_plain_dcp(self, world: World, size: int, name: str) -> None:
        job = world.saved_by_ours[name]
        _check_dcp(job, dcp.FileSystemReader(job.checkpoint))


@pytest.mark.parametrize("size", SIZES)
def test_ours_is_read_where_this_package_does_not_exist(world: World, size: int) -> None:
    """An interpreter with torch, but without this package, reads it; its pickles name classes of torch only."""
    jobs = list(world.saved_by_ours.values())
    # -S keeps the editable installation out: without `site` nobody reads .pth files.
    command = [sys.executable, "-I", "-S", "-c", ALONE, sysconfig.get_paths()["purelib"]]
    ended = subprocess.run(
        [*command, *(str(job.checkpoint) for job in jobs)], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [STEPS] * len(jobs)
    for job in jobs:
        reference = Reference.read(job.reference)
        verdict = reference.verdict([reference.compare_tensors(torch.load(job.checkpoint.with_suffix(".loaded")))])
        assert verdict.identical, str(verdict)
        modules = {name.split(".")[0] for name in _pickled_modules((job.checkpoint / ".metadata").read_bytes())}
        assert modules <= {"torch", "collections", "builtins"}, modules


@pytest.mark.parametrize("name", SHAPES)
def test_plain_dcp_is_read_by_ours(worlds: dict[int, World], name: str, tmp_path: Path) -> None:
    if not worlds:
        worlds[1] = _run(1, tmp_path)
    job = next(iter(worlds.values())).saved_by_ours[name]
    reference = Reference.read(job.reference)
    dcp.save(dict(reference.tensors), checkpoint_id=tmp_path / "dcp", no_dist=True)
    _check_dcp(replace(job, directory=tmp_path), FileSystemReader(tmp_path / "dcp"), reference)


def _check(job: Job, loaded: list[LoadedState], package: str) -> None:
    """Every byte of model and optimizer is as it was saved, and the named package's strategy did it on every rank."""
    reference = Reference.read(job.reference)
    for state in loaded:
        assert state.strategies
        assert all(ran.startswith(f"{package}.") for ran in state.strategies), state.strategies
        assert state.iteration == STEPS
    # The fresh model differs from the saved one in most tensors, so that an identical verdict means something.
    assert len(reference.verdict(state.before for state in loaded).differing) > len(reference.tensors) / 2
    verdict = reference.verdict(state.after for state in loaded)
    assert verdict.identical, str(verdict)
    assert verdict.compared_bytes == reference.total_bytes


def _check_dcp(job: Job, reader: Any, reference: Reference | None = None) -> None:
    reference = reference or Reference.read(job.reference)
    tensors = {fqn: torch.ones_like(tensor) for fqn, tensor in reference.tensors.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    verdict = reference.verdict([reference.compare_tensors(tensors)])
    assert verdict.identical, str(verdict)


ALONE = """
import importlib.util, io, json, sys, warnings
warnings.simplefilter("ignore")
packages, *checkpoints = sys.argv[1:]
sys.path.append(packages)
assert importlib.util.find_spec("mcore_ckpt") is None, "this package can be imported"
import torch
import torch.distributed.checkpoint as dcp
iterations = []
for checkpoint in checkpoints:
    reader = dcp.FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    state = {k: torch.ones(v.size, dtype=v.properties.dtype) for k, v in stored.items() if hasattr(v, "size")}
    common = [k for k in stored if k.startswith("common_state/")]
    state.update({k: io.BytesIO() for k in common})
    dcp.load(state, storage_reader=reader, no_dist=True)
    iterations.append((state.pop(common[0])[0] if common else torch.load(checkpoint + "/common.pt"))["iteration"])
    torch.save(state, checkpoint + ".loaded")
print(json.dumps(iterations))
"""


def _pickled_modules(content: bytes) -> set[str]:
    """Modules of the classes that a pickle names."""
    strings: list[str] = []
    modules = set()
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("GLOBAL", "INST"):
            modules.add(str(argument).split()[0])
        elif opcode.name == "STACK_GLOBAL":
            modules.add(strings[-2])
        elif isinstance(argument, str):
            strings.append(argument)
    return modules
