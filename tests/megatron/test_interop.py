"""Checkpoints of ours and of stock Megatron-Core, read by the other side, under another parallel layout.

Real Megatron models with a real distributed optimizer: dense, gated MLP, and mixture of experts with one module for
each expert or for all. Stock processes never import this package.
"""

import pickletools
from dataclasses import replace
from pathlib import Path

import pytest

from tests.megatron.interop_ranks import Job, assert_loaded, load_all, save_all
from tests.support.gloo_ranks import run_megatron_ranks, run_stock_ranks
from tests.support.models import DENSE, GATED, MOE_GROUPED, MOE_SEQUENTIAL, ModelShape, Parallel

# World size -> model -> the layout that saves and the one that loads. Megatron's local layers allow no tensor
# parallelism with experts, and its optimizer no change between expert parallelism and none.
LAYOUTS: dict[int, dict[str, tuple[ModelShape, Parallel, Parallel]]] = {
    2: {
        "dense": (DENSE, Parallel(tensor=2), Parallel(pipeline=2)),
        "moe": (MOE_SEQUENTIAL, Parallel(expert=2), Parallel(expert=2)),
    },
    4: {
        "gated": (GATED, Parallel(tensor=2, pipeline=2), Parallel(tensor=4)),
        "moe-grouped": (MOE_GROUPED, Parallel(expert=4), Parallel(pipeline=2, expert=2)),
    },
}
DEADLINE_S = 400

pytestmark = pytest.mark.timeout(900)  # the processes have their own, shorter deadline


# Two ranks and one model are what `make test` has time for.
@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, ["dense"]),
        pytest.param(2, ["moe"], marks=pytest.mark.long),
        pytest.param(4, ["gated", "moe-grouped"], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_each_side_reads_what_the_other_has_saved(size: int, names: list[str], tmp_path: Path) -> None:
    def jobs(writer: str) -> list[Job]:
        models = {name: LAYOUTS[size][name] for name in names}
        made = [Job(name, shape, saved, tmp_path / writer / name) for name, (shape, saved, _) in models.items()]
        for job in made:
            job.directory.mkdir(parents=True)
        return made

    def other_layout(saved: list[Job]) -> list[Job]:
        return [replace(job, layout=LAYOUTS[size][job.name][2]) for job in saved]

    by_ours, by_stock = jobs("ours"), jobs("stock")
    for ran in run_megatron_ranks(save_all, size, by_ours, True, asynchronous=True, deadline_s=DEADLINE_S):
        assert set(ran.values()) == {("mcore_ckpt.TorchDistSaveStrategy.async_save",)}
    for ran in run_stock_ranks(save_all, size, by_stock, False, deadline_s=DEADLINE_S):
        for methods in ran.values():
            assert methods
            assert all(method.startswith("megatron.TorchDistSaveShardedStrategy.") for method in methods)
    by_rank = run_stock_ranks(load_all, size, other_layout(by_ours), False, deadline_s=DEADLINE_S)
    for job in by_ours:
        assert_loaded(job, [rank[job.name] for rank in by_rank], "megatron")
    by_rank = run_megatron_ranks(load_all, size, other_layout(by_stock), True, deadline_s=DEADLINE_S)
    for job in by_stock:
        assert_loaded(job, [rank[job.name] for rank in by_rank], "mcore_ckpt")
    for job in by_ours:  # and no pickle names a class of this package, or of another than torch
        modules = {name.split(".")[0] for name in _pickled_modules((job.checkpoint / ".metadata").read_bytes())}
        assert modules <= {"torch", "collections", "builtins"}, modules


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
