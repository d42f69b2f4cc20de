"""Real Megatron models: saved by stock Megatron-Core, resharded here, loaded by stock again at the target layout.

Model and optimizer come back bit for bit, and every shard that Megatron wants on a rank is one chunk in a file of it.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mcore_ckpt.commands.cli import main
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.tools.inspection import summarize_checkpoint
from mcore_ckpt.tools.keys import data_file_rank
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.megatron.interop_ranks import Job, LoadedState, assert_loaded, load_all, save_all
from tests.support.gloo_ranks import run_megatron_ranks, run_stock_ranks
from tests.support.model_like import assert_same, read_all
from tests.support.models import DENSE, GATED, MOE_SEQUENTIAL, ModelShape, Parallel

pytestmark = pytest.mark.timeout(900)  # the processes have their own, shorter deadline
DEADLINE_S = 400


@dataclass(frozen=True)
class Case:
    name: str
    shape: ModelShape
    saved: Parallel
    loaded: Parallel
    world: int  # ranks that load
    flat_buckets: bool = False  # the optimizer's state is saved as those that saved divide it


BOTH = Parallel(pipeline=2, expert=2)
# World that saves -> cases. Megatron's local layers allow no tensor parallelism with experts.
CASES = {
    4: [
        Case("dense", DENSE, Parallel(tensor=4), Parallel(tensor=2, pipeline=2), 4),
        Case("gated-flat", GATED, Parallel(tensor=2), Parallel(tensor=4), 4, flat_buckets=True),
        Case("gated-to-one", GATED, Parallel(tensor=4), Parallel(), 1),
        Case("layer-wise", replace(GATED, layer_wise=True), Parallel(tensor=2), Parallel(tensor=2, pipeline=2), 4),
        Case("layer-wise-moe", replace(MOE_SEQUENTIAL, layer_wise=True), Parallel(expert=2), BOTH, 4),
        Case("moe", MOE_SEQUENTIAL, BOTH, Parallel(expert=4), 4),
    ],
    2: [Case("gated", GATED, Parallel(tensor=2), Parallel(pipeline=2), 2, flat_buckets=True)],
    1: [Case("one-to-gated", GATED, Parallel(), Parallel(tensor=2, pipeline=2), 4)],
}


@pytest.mark.long
@pytest.mark.parametrize("chosen", ["gated", pytest.param("", id="others")])
def test_stock_megatron_loads_what_was_resharded(tmp_path: Path, chosen: str) -> None:
    cases = {case.name: case for found in CASES.values() for case in found}
    cases = {name: case for name, case in cases.items() if (name == chosen) is bool(chosen)}
    saved = {
        name: Job(name, case.shape, case.saved, tmp_path / name, case.flat_buckets) for name, case in cases.items()
    }
    for job in saved.values():
        job.directory.mkdir()
    for world, found in CASES.items():
        jobs = [saved[case.name] for case in found if case.name in cases]
        if jobs:
            run_stock_ranks(save_all, world, jobs, False, deadline_s=DEADLINE_S)

    resharded: dict[str, Job] = {}
    for name, case in cases.items():
        target = tmp_path / f"{name}-resharded"
        target.mkdir()
        resharded[name] = replace(saved[name], layout=case.loaded, directory=target)
        sizes = [f"--tp={case.loaded.tensor}", f"--pp={case.loaded.pipeline}", f"--ep={case.loaded.expert}", "--etp=1"]
        sizes = sizes if case.shape.experts else sizes[:2]
        sizes += ["--optimizer-layout=fully_reshardable"] if case.flat_buckets else []
        assert main(["reshard", str(saved[name].checkpoint), str(resharded[name].checkpoint), *sizes, "-q"]) == 0
        (target / "reference").symlink_to(saved[name].reference)
        assert verify_checkpoint(resharded[name].checkpoint).whole
        if not case.flat_buckets:
            assert_same(read_all(resharded[name].checkpoint), read_all(saved[name].checkpoint))

    if "layer-wise" in cases:  # it declares flat buckets, and has none
        assert summarize_checkpoint(saved["layer-wise"].checkpoint).optimizer == "fully_reshardable"
        by_ours = run_megatron_ranks(load_all, 4, [resharded["layer-wise"]], True, deadline_s=DEADLINE_S)
        assert_loaded(resharded["layer-wise"], [rank["layer-wise"] for rank in by_ours], "mcore_ckpt")

    for world in sorted({case.world for case in cases.values()}):
        jobs = [resharded[name] for name, case in cases.items() if case.world == world]
        loaded = run_stock_ranks(load_all, world, jobs, False, deadline_s=DEADLINE_S)
        for job in jobs:
            states = [rank[job.name] for rank in loaded]
            assert_loaded(job, states, "megatron")
            elsewhere = _not_in_own_files(job, states)
            # Which data parallel rank has a parameter's state is that optimizer's choice.
            if job.name == "layer-wise-moe":
                elsewhere = [line for line in elsewhere if ".optimizer.state." not in line]
            assert elsewhere == [], job.name


def _not_in_own_files(job: Job, states: list[LoadedState]) -> list[str]:
    """The shards that are not one chunk in a file of the rank that holds their main replica."""
    index = read_index(job.checkpoint)
    wrong = []
    for rank, state in enumerate(states):
        assert state.own
        for key, offsets, sizes in state.own:
            chunks = {(chunk.offsets, chunk.sizes): chunk.item.file for chunk in index.tensors[key].chunks}
            file = chunks.get((offsets, sizes))
            if file is None or data_file_rank(file) != rank:
                wrong.append(f"{key} {offsets} {sizes}: {file or sorted(chunks)}")
    return wrong
