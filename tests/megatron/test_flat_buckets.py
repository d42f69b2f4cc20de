"""Flat buckets, the layout in which Megatron saves the state of a distributed optimizer unless told otherwise."""

from __future__ import annotations

import re
import warnings
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt import LoadError
from mcore_ckpt.reshard import _optimizer_layout
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from tests.format import independent_reader as independent
from tests.support.gloo_ranks import made, run_pretending_ranks, run_stock_ranks
from tests.support.kept_log import kept_log
from tests.support.model_like import read_all
from tests.support.models import DENSE, GATED, MOE_SEQUENTIAL, ModelShape, Parallel, build_training
from tests.support.shared_groups import share_groups
from tests.support.state_compare import differing, read_state, write_state

pytest.importorskip("megatron.core.dist_checkpointing", reason="the optimizer is Megatron's")


def prepare() -> Any:
    """Megatron's `dist_checkpointing`, served by this package."""
    warnings.simplefilter("ignore")  # of Megatron and torch about themselves
    share_groups()
    import mcore_ckpt

    mcore_ckpt.install()
    from megatron.core import dist_checkpointing

    return dist_checkpointing


def save_with_leaked_steps(rank: int, directory: Path) -> None:
    dist_checkpointing = prepare()
    stages = Parallel(pipeline=2)  # which have other numbers of parameters
    training = build_training(DENSE, stages, seed=1)
    training.train(2)
    write_state(directory / "before", rank, training.sharded_state_dict())
    state = training.sharded_state_dict(flat_buckets=True)
    for buckets in state["optimizer"]["param_state"][0].values():
        for parameter in (one for bucket in buckets for one in bucket):
            parameter["step"] = 2  # as Megatron-LM without pull request 2874 left it there
    dist_checkpointing.save(state, made(directory / "checkpoint"))
    again = build_training(DENSE, stages, seed=9)
    wanted = again.sharded_state_dict(is_loading=True, flat_buckets=True)
    again.load(dist_checkpointing.load(wanted, directory / "checkpoint"))
    write_state(directory / "after", rank, again.sharded_state_dict())


def test_steps_that_an_older_job_left_in_the_common_state_do_not_end_a_load(tmp_path: Path) -> None:
    run_pretending_ranks(save_with_leaked_steps, 2, tmp_path)
    assert differing(read_state(tmp_path / "before"), read_state(tmp_path / "after")) == []


@dataclass(frozen=True, slots=True)
class Job:
    """A model, the layout that saves it, and the one that resumes it; `buckets`: elements of each gradient bucket."""

    name: str
    shape: ModelShape
    saved: Parallel
    resumed: Parallel
    buckets: int | None = None


JOBS = (
    Job("gated", GATED, Parallel(tensor=2), Parallel(pipeline=2)),
    Job("odd-buckets", ModelShape(hidden=40, dtype="float32"), Parallel(pipeline=2), Parallel(tensor=2), buckets=5000),
    Job("other-buckets", GATED, Parallel(tensor=2), Parallel(tensor=2), buckets=9000),
    Job("data-parallel", ModelShape(dtype="float32"), Parallel(tensor=2), Parallel()),
    Job("one-optimizer", MOE_SEQUENTIAL, Parallel(expert=2), Parallel()),
    Job("two-optimizers", MOE_SEQUENTIAL, Parallel(), Parallel(expert=2)),
)


def save(rank: int, directory: Path, jobs: Sequence[Job]) -> None:
    dist_checkpointing = prepare()
    for job in jobs:
        training = build_training(job.shape, job.saved, seed=1, bucket_elements=job.buckets)
        training.train(2)
        state = training.sharded_state_dict(flat_buckets=True)
        dist_checkpointing.save(state, made(directory / job.name / "checkpoint"))
        write_state(directory / job.name / "saved", rank, training.sharded_state_dict())
        if rank == 1:
            (directory / job.name / "losses").write_text(repr(training.train(2)))
        else:
            training.train(2)


def resume(rank: int, directory: Path, jobs: Sequence[Job]) -> list[list[float]]:
    dist_checkpointing = prepare()
    losses = []
    for job in jobs:
        training = build_training(job.shape, job.resumed, seed=9)
        wanted = training.sharded_state_dict(is_loading=True, flat_buckets=True)
        training.load(dist_checkpointing.load(wanted, directory / job.name / "checkpoint"))
        write_state(directory / job.name / "resumed", rank, training.sharded_state_dict())
        losses.append(training.train(2))
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All jobs, as they were saved."""
    directory = tmp_path_factory.mktemp("jobs")
    run_pretending_ranks(save, 2, directory, JOBS, deadline_s=400)
    return directory


def test_flat_buckets_load_under_any_division_of_the_model(saved: Path) -> None:
    losses = run_pretending_ranks(resume, 2, saved, JOBS, deadline_s=400)
    for job, later in zip(JOBS, losses[1], strict=True):
        before, after = (read_state(saved / job.name / name) for name in ("saved", "resumed"))
        if job.name != "odd-buckets":  # of which Megatron-Core itself gathers shifted ones
            assert differing(before, after) == [], job.name
        if job.name in ("gated", "odd-buckets", "other-buckets"):  # others have other batches
            expected = literal_eval((saved / job.name / "losses").read_text())
            assert later == pytest.approx(expected, rel=2e-5 if job.shape.dtype == "float32" else 1e-3), job.name


def test_a_second_reader_finds_each_parameter_in_the_buckets(saved: Path) -> None:
    for name in ("gated", "two-optimizers", "one-optimizer"):
        checkpoint = independent.read_checkpoint(saved / name / "checkpoint")
        state = read_state(saved / name / "saved")
        keys = set()
        for region in checkpoint.regions:
            box = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))
            for kind in ("param", "exp_avg", "exp_avg_sq"):
                found = checkpoint.tensors[f"{region.bucket}.{kind}"][region.elements]
                keys.add(key := f"optimizer.state.{kind}.{region.parameter}")
                assert (found == state[key][box].numpy()).all(), (name, key)
        assert keys == {key for key in state if key.startswith("optimizer.state.")}


def test_buckets_with_tables_are_resharded_without_a_model(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_optimizer_layout, "parameter_orders", None)
    for name in ("gated", "two-optimizers"):
        reshard_checkpoint(saved / name / "checkpoint", tmp_path / name, optimizer_layout="fully_reshardable")
        assert differing(read_all(tmp_path / name), read_state(saved / name / "saved")) == []


def load_strictly(rank: int, directory: Path, ours: bool, layout: Parallel) -> tuple[list[str], list[str]]:
    """What all ranks find missing or unexpected, and keys of the optimizer's state that are not as they were saved."""
    if ours:
        prepare()
    share_groups()
    from megatron.core import dist_checkpointing

    training = build_training(GATED, layout, seed=9)
    wanted = training.sharded_state_dict(is_loading=True, flat_buckets=True)
    state, missing, unexpected = dist_checkpointing.load(wanted, str(directory / "checkpoint"), strict="return_all")
    training.load(state)
    write_state(directory / f"strictly-{ours}", rank, training.sharded_state_dict())
    return sorted(missing), sorted(unexpected)


@pytest.mark.parametrize("ours", [False, True], ids=["stock", "ours"])
def test_no_key_is_missing_or_unexpected(ours: bool, saved: Path) -> None:
    """Stock loads it as if there were no table."""
    run, layout = (run_pretending_ranks, Parallel(pipeline=2)) if ours else (run_stock_ranks, Parallel(tensor=2))
    directory = saved / "gated"
    assert run(load_strictly, 2, directory, ours, layout, deadline_s=300) == [([], [])] * 2
    assert differing(read_state(directory / "saved"), read_state(directory / f"strictly-{ours}")) == []


# --- what no table, or a wrong one, leads to


def moved(regions: Sequence[Any]) -> list[Any]:
    return [one._replace(offsets=tuple(0 for _ in one.offsets)) for one in regions]  # slices of TP 2 overlap


def renamed(regions: Sequence[Any]) -> list[Any]:
    return [one._replace(key=one.key.replace("final_layernorm", "first_layernorm")) for one in regions]


def encode_changed(encode: Any, change: Any, buckets: Any, regions: Any) -> bytes:
    encoded: bytes = encode(buckets, change(regions))
    return encoded


WRONG = {"moved": moved, "renamed": renamed, "absent": None}


def refuse(rank: int, directory: Path) -> dict[str, tuple[list[str], str, bool]]:
    """Of each table: the warnings of the save, the error of the load, and whether the optimizer is as it was."""
    dist_checkpointing = prepare()
    from mcore_ckpt.megatron import flat_buckets

    found, encode = {}, flat_buckets.encode_parameters
    for name, change in WRONG.items():
        training = build_training(GATED, Parallel(tensor=2), seed=1)
        training.train(1)
        flat_buckets.encode_parameters = encode if change is None else partial(encode_changed, encode, change)
        with kept_log() as warnings_of_save:
            state = training.sharded_state_dict(flat_buckets=True)
            if change is None:  # as with keep_vars=False
                model = {
                    key: replace(one, data=one.data.detach()) if isinstance(one.data, torch.Tensor) else one
                    for key, one in state["model"].items()
                }
                warnings_of_save.clear()
                metadata = state["content_metadata"]
                state["optimizer"] = training.optimizer.sharded_state_dict(model, metadata=metadata)
        flat_buckets.encode_parameters = encode
        path = made(directory / name)
        dist_checkpointing.save(state, path)
        again = build_training(GATED, Parallel(pipeline=2), seed=9)
        wanted = again.sharded_state_dict(is_loading=True, flat_buckets=True)
        before = elements(again)
        with pytest.raises(LoadError) as raised:
            dist_checkpointing.load(wanted, path)
        found[name] = list(warnings_of_save), str(raised.value), torch.equal(before, elements(again))
    return found


def elements(training: Any) -> torch.Tensor:
    (optimizer,) = training.optimizer.chained_optimizers
    masters = [master for group in optimizer.shard_fp32_from_float16_groups for master in group]
    return torch.cat([master.detach().clone() for master in masters])


def test_a_table_that_is_wrong_or_absent_is_refused_on_all_ranks_and_nothing_is_loaded(tmp_path: Path) -> None:
    for found in run_pretending_ranks(refuse, 2, tmp_path, deadline_s=300):
        assert all(is_as_before for *_, is_as_before in found.values()), found
        assert re.search(r"bucket_idx_0 do not make up \S+: element .* expected exactly 1", found["moved"][1]), found
        assert "have no such parameter; it was frozen in the job that saved them, or is new" in found["renamed"][1]
        assert "mcore-ckpt reshard" in found["absent"][1], found
        assert not found["moved"][0]
    (warning,) = found["absent"][0]
    assert "without a table" in warning
    assert "keep_vars" in warning
