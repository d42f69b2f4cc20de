"""Real Megatron models: saved by stock Megatron-Core, resharded here, loaded by stock again at the target layout.

Model and optimizer come back bit for bit, and every shard that Megatron wants on a rank is one chunk in a file of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mcore_ckpt.commands.cli import main
from mcore_ckpt.tools.inspection import summarize_checkpoint
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.megatron.interop_ranks import STEPS, Job, load_all, save_all
from tests.support.gloo_ranks import run_pretending_ranks, run_stock_ranks
from tests.support.megatron_checkpoints import load_and_locate
from tests.support.model_like import assert_same, read_all
from tests.support.models import DENSE, GATED, MOE_SEQUENTIAL, ModelShape, Parallel
from tests.support.state_compare import Reference

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


# World that saves -> cases. Megatron's local layers allow no tensor parallelism with experts.
CASES = {
    4: [
        Case("dense", DENSE, Parallel(tensor=4), Parallel(tensor=2, pipeline=2), 4),
        Case("gated", GATED, Parallel(tensor=2), Parallel(tensor=4), 4, flat_buckets=True),
        Case("gated-to-one", GATED, Parallel(tensor=4), Parallel(), 1),
        Case("layer-wise", replace(GATED, layer_wise=True), Parallel(tensor=2), Parallel(tensor=2, pipeline=2), 4),
        Case(
            "layer-wise-moe",
            replace(MOE_SEQUENTIAL, layer_wise=True),
            Parallel(expert=2),
            Parallel(pipeline=2, expert=2),
            4,
        ),
        Case("moe", MOE_SEQUENTIAL, Parallel(pipeline=2, expert=2), Parallel(expert=4), 4),
    ],
    1: [
        Case("one-to-gated", GATED, Parallel(), Parallel(tensor=2, pipeline=2), 4),
    ],
}


@pytest.mark.parametrize("chosen", ["gated", pytest.param("", marks=pytest.mark.long, id="others")])
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
        by_ours = run_pretending_ranks(load_all, 4, [resharded["layer-wise"]], True, deadline_s=DEADLINE_S)
        reference = Reference.read(resharded["layer-wise"].reference)
        assert reference.verdict(rank["layer-wise"].after for rank in by_ours).identical

    for world in sorted({case.world for case in cases.values()}):
        jobs = [resharded[name] for name, case in cases.items() if case.world == world]
        loaded = run_stock_ranks(load_and_locate, world, jobs, deadline_s=DEADLINE_S)
        for job in jobs:
            reference = Reference.read(job.reference)
            states = [rank[job.name][0] for rank in loaded]
            assert all(state.iteration == STEPS for state in states)
            # The fresh model differs in most tensors, so that an identical verdict means something.
            assert len(reference.verdict(state.before for state in states).differing) > len(reference.tensors) / 2
            verdict = reference.verdict(state.after for state in states)
            assert verdict.identical, f"{job.name}: {verdict}"
            elsewhere = [line for rank in loaded for line in rank[job.name][1]]
            if (
                job.name == "layer-wise-moe"
            ):  # which data parallel rank has a parameter's state is the optimizer's choice
                elsewhere = [line for line in elsewhere if ".optimizer.state." not in line]
            assert elsewhere == [], job.name
