"""A certificate compares what a job is when it resumes with what was saved, and names what differs."""

import itertools
import logging
import random
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mcore_ckpt import (
    FileSystemReader,
    FileSystemWriterAsync,
    LoadError,
    LoadOptions,
    OptionError,
    SaveOptions,
    TorchDistSaveStrategy,
    certify,
)
from mcore_ckpt.megatron import certificate as certificate_module
from mcore_ckpt.megatron.calls import MegatronSave, in_progress
from mcore_ckpt.megatron.serialization import save_common
from tests.support.gloo_ranks import MEGATRON, StandingRanks, on_ranks, run_megatron_ranks, standing_ranks
from tests.support.kept_log import kept_log
from tests.support.models import DENSE, ModelShape, Parallel
from tests.support.resumed_job import Job

SHAPES = {"rows": ((64, 128), 0), "columns": ((64, 128), 1), "optimizer.state.m": ((2, 64, 32), 1)}
CERTIFYING = {"MCORE_CKPT_CERTIFY": "warn"}
WARN, RAISE = LoadOptions(certify="warn"), LoadOptions(certify="raise")


def state(pieces: int) -> dict[str, Any]:
    """All shards of every tensor, in so many pieces, an object and common state."""
    generator = torch.Generator().manual_seed(1)
    found: dict[str, Any] = {}
    for key, (shape, axis) in SHAPES.items():
        whole = torch.randn(shape, generator=generator)
        for number, piece in enumerate(whole.chunk(pieces, axis)):
            found[f"{key} {number}"] = ShardedTensor.from_rank_offsets(key, piece.contiguous(), (axis, number, pieces))
    groups = [{"wd_mult": 0.0, "step": 3, "params": [0]}, {"wd_mult": 1.0, "step": 3, "params": [1]}]
    states = {"numpy": numpy.arange(5), "torch": torch.arange(4), "python": (3, (1, 2), None), "param_groups": groups}
    found["states"] = ShardedObject("states", states, (1,), (0,))
    arguments = Namespace(consumed_train_samples=24, lr=1.0)
    return {**found, "iteration": 3, "opt_param_scheduler": {"num_steps": 24, "max_lr": 1.0}, "args": arguments}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    path.mkdir()
    common = {key: value for key, value in state(2).items() if not hasattr(value, "key")}
    with in_progress(MegatronSave()):
        save_common(common, path)
        TorchDistSaveStrategy(options=SaveOptions()).save(state(2), path)
    return path


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_what_was_saved_is_certified_under_any_layout(
    pieces: int, saved: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "mcore_ckpt")
    certificate = certify(state(pieces), saved, options=RAISE)
    assert (certificate.tensors, certificate.objects, certificate.differing) == (3, 1, 0)
    assert caplog.messages == ["resumed from checkpoint as saved: 3 tensors, 1 objects, 1 rank"]
    held = state(pieces)
    held["states"].data["param_groups"].reverse()  # each rank has an order of its own
    held["args"].lr = 2.0
    assert not certify(held, saved, options=RAISE).differing
    monkeypatch.setattr(certificate_module, "_SAMPLE", 2**40)  # but one at least: which, a new id of a save decides
    sampled = certify(held, saved, options=LoadOptions(certify="sample"))
    assert (sampled.tensors, sampled.objects) == (1, 1)
    assert f"2 tensors (one in {2**40} is)" in str(sampled)
    caplog.clear()
    assert not certify({}, saved, options=LoadOptions(certify="off")).tensors
    assert not caplog.messages


def swap(held: dict[str, Any]) -> None:
    held["columns 0"].data, held["columns 1"].data = held["columns 1"].data, held["columns 0"].data


def bit(held: dict[str, Any]) -> None:
    held["columns 1"].data.view(torch.int32)[7, 3] ^= 1
    held["padding"] = SimpleNamespace(obj=True)  # as next to flat buckets, which are read again


def held_object(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda held: held["states"].data.update({name: value})


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "slices": (swap, r"2 differences in .*tensor columns\[0, 0\] on rank 0: expected \S+, got \S+, and \d+ more"),
    "bit": (bit, r"1 difference in .*: tensor columns\[7, 67\] on rank 0: expected (\S+), got (?!\1)\S+$"),
    "iteration": (lambda held: held.update(iteration=2), r"common state iteration on rank 0: expected 3, got 2$"),
    "numpy": (held_object("numpy", numpy.arange(6)), r"\['numpy'\] on rank 0: expected int64\[5\] .* got int64\[6\]"),
    "groups": (
        held_object("param_groups", [{"wd_mult": 1.0, "step": 2}]),
        r"\['param_groups'\]\[0\]\['step'\] on rank 0: expected 3, got 2; .* 1 parameter group \(that no rank holds: ",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_differs_is_named(name: str, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    fault, said = FAULTS[name]
    held = state(2)
    fault(held)
    with pytest.raises(LoadError, match=r"^resumed from checkpoint NOT as saved: .*"):
        certify(held, saved, options=RAISE)
    certify(held, saved, options=WARN)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.search(said, record.getMessage()), record.getMessage()


def test_what_cannot_be_compared_is_counted(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = state(2)
    held["columns 1"].data = held["columns 1"].data.bfloat16()
    del held["rows 0"], held["states"]
    held["new"] = ShardedTensor.from_rank_offsets("new.weight", torch.zeros(3))
    certify(held, saved, options=WARN, reasons=["--no-load-rng"])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING  # of what the checkpoint lacks
    assert record.getMessage() == (
        "resumed from checkpoint as saved: 1 tensors, 0 objects, 1 rank; not compared: 1 tensor (of another dtype, "
        "shape or class), 1 tensor (that ranks do not hold once and whole: rows), 1 key (not in the checkpoint: "
        "new.weight), 1 object (--no-load-rng)"
    )
    held["columns 0"].data = held["columns 0"].data.to("meta")
    held["optimizer.state.m 0"].data.add_(1)
    buckets = [SimpleNamespace(offset=0, numel_unpadded=100, param_data=None)]
    buckets.append(SimpleNamespace(offset=128, numel_unpadded=8, param_data=None))  # behind a padded one
    optimizer = SimpleNamespace(buffers=[SimpleNamespace(buckets=buckets)])
    shifted = certify(held, saved, optimizer, options=WARN)
    assert (shifted.differing, "1 tensor (of an optimizer of several buckets" in str(shifted)) == (0, True)
    buckets[1].offset = 100
    assert certify(held, saved, optimizer, options=WARN).differing == 1
    held = state(2)
    weight, optimizer = held.pop("rows 1").data, SimpleNamespace()
    optimizer._get_model_and_main_params_data_float16 = lambda: ([weight, weight], [weight.float()])
    assert not certify(held, saved, optimizer, options=WARN).differing
    left = "1 tensor (that ranks do not hold once and whole: rows), 1 weight (Megatron-Core names no plain master of "
    assert f"not compared: {left}" in caplog.messages[-1]
    certify({}, saved, options=WARN)
    assert [one.levelno for one in caplog.records] == [logging.WARNING] * len(caplog.records)
    assert caplog.messages[-1].startswith("resumed from checkpoint with NOTHING compared: 0 tensors, 0 objects, 1 rank")
    left = "args.consumed_train_samples, iteration, opt_param_scheduler)"
    assert f"3 parts (of the common state, that a rank has not: {left}" in caplog.messages[-1]


def test_what_is_held_twice_hides_nothing(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    held = state(2)
    held["rows 2"], held["rows 3"] = held["rows 0"], held["rows 1"]
    del held["columns 0"], held["columns 1"]
    found = certify(held, saved, options=WARN)
    left = "1 tensor (that ranks do not hold once and whole: rows), 1 tensor (not requested: columns)"
    assert (found.tensors, found.objects, ", ".join(found.not_compared)) == (1, 1, left)
    del held["rows 2"], held["rows 3"]
    certify(held, saved, options=WARN)
    assert [one.levelno for one in caplog.records] == [logging.WARNING] * 2  # nothing says why columns were left out
    caplog.clear()
    certify(held, saved, options=WARN, reasons=["--finetune"])
    assert not caplog.records
    held["other"] = ShardedObject("states", 7, (1,), (0,), replica_id=1)
    assert certify(held, saved, options=WARN).differing == 1


def test_a_save_meanwhile_is_no_difference(saved: Path) -> None:
    def held_and_replaced() -> dict[str, Any]:
        held = state(2)
        held["rows 0"].data += 1
        TorchDistSaveStrategy(options=SaveOptions()).save(held, saved)
        return state(2)

    with pytest.raises(LoadError, match="was replaced while it was compared"):
        certify(held_and_replaced, saved, options=WARN)


def test_a_common_state_that_is_lost_is_no_reason_to_compare_none(saved: Path) -> None:
    (saved / "common.pt").unlink()
    with pytest.raises(LoadError, match="common"):
        certify(state(2), saved, options=WARN)


def test_masters_that_an_offloaded_optimizer_has_not_taken_are_named(saved: Path) -> None:
    """What it saves until its first step is what it has loaded, not what it trains with."""
    held = state(2)
    weight = held["rows 0"].data
    loaded = weight.clone()
    inner = SimpleNamespace(param_to_fp32_param={weight: weight.clone()}, state={weight: {"master_param": loaded}})
    assert not certify(held, saved, SimpleNamespace(optimizer=inner), options=RAISE).differing
    loaded[0, 5] += 1
    with pytest.raises(
        LoadError, match=r"1 difference .*: master rows\[element 5\] on rank 0: expected \S+, got \S+\. Do not"
    ):
        certify(held, saved, SimpleNamespace(optimizer=inner), options=RAISE)


def held_rows(*shares: tuple[Any, int, int]) -> dict[str, Any]:
    """Rows of a tensor that are held together, each with its `replica_id`, its first row and its end."""
    whole = torch.arange(32.0).view(8, 4) + 1
    found = {}
    for number, (replica, start, stop) in enumerate(shares):
        shard = ShardedTensor.from_rank_offsets("w", whole.clone(), replica_id=replica)
        shard.data, shard.local_shape, shard.global_offset = whole[start:stop].clone(), (stop - start, 4), (start, 0)
        found[f"w {number}"] = shard
    return found


MAINS = (0, 0, 4), (0, 4, 8)


@pytest.mark.parametrize(
    "shares",
    [MAINS + ((1, 0, 8),) * 3, MAINS + ((1, 0, 4), (1, 4, 8)) * 2, MAINS * 2, (*MAINS, *((1, 2, 6),) * 3)],
    ids=str,
)
def test_each_replica_is_compared(shares: tuple[Any, ...], tmp_path: Path) -> None:
    """Only 0 is special for Megatron: several ranks may have the same other `replica_id`, or parts of a replica."""
    TorchDistSaveStrategy(options=SaveOptions()).save(held_rows(*MAINS), tmp_path)
    assert not certify(held_rows(*shares), tmp_path, options=RAISE).differing
    # One after the other, and all replicas alike, which must not cancel.
    together = tuple(range(2, len(shares))), tuple(range(len(shares))), (len(shares) - 2, len(shares) - 1)
    for wrong in [*((number,) for number in range(len(shares))), *together]:
        held = held_rows(*shares)
        for number in wrong:
            held[f"w {number}"].data[0, 1] = 0
        assert certify(held, tmp_path, options=WARN).differing == len(wrong)


@on_ranks(2)
def test_all_ranks_are_told_which_one_differs(rank: int, tmp_path: Path) -> None:
    path = tmp_path

    def replicas(data_parallel: int = 1) -> dict[str, Any]:
        seeds = ShardedObject("rng_state", [7, 8][:data_parallel], (1,), (0,), replica_id=rank)
        whole = torch.full((8, 8), 1.0)
        names = {key: ShardedTensor.from_rank_offsets(key, whole.clone(), replica_id=(0, 0, rank)) for key in "abc"}
        return {**names, "rng_state": seeds}

    TorchDistSaveStrategy(options=SaveOptions()).save(replicas(data_parallel=2), path)
    if rank == 0:
        torch.save({}, path / "common.pt")
    torch.distributed.barrier()
    wrong = replicas()
    wrong["b"].data[rank, 5] += rank
    said = r"tensor b\[1, 5\] \(replica \(0, 0, 1\)\) on rank 1: expected 1\.0, got 2\.0"
    with kept_log(logging.INFO) as lines:
        assert not certify(replicas(), path, options=RAISE).differing
        with pytest.raises(LoadError, match=said):
            certify(wrong, path, options=RAISE)
        with pytest.raises(OptionError, match="got raise and warn"):
            certify(replicas(), path, options=RAISE if rank else WARN)
        for wrong_path, options in itertools.product(("", path / "none"), (None, WARN)):
            with pytest.raises((LoadError, OptionError), match=r"rank 1 of 2: .*(path is empty|no such directory)"):
                certify(replicas(), wrong_path if rank else path, options=options)
    assert lines == [f"resumed from {path.name} as saved: 3 tensors, 1 objects, 2 ranks"] * (rank == 0)


# --- at the end of `load_checkpoint` ----------------------------------------------------------------------------------


@on_ranks(2, preload=())
def test_a_state_dict_of_dcp_is_certified(rank: int, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    mesh = init_device_mesh("cpu", (2,))

    def state() -> dict[str, Any]:
        weight = distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [Shard(0)])
        norm = distribute_tensor(torch.arange(3.0), mesh, [Replicate()])
        own = {"late": torch.ones(2)} if rank else {}  # as of a stage of a pipeline
        return {"model": {"weight": weight, "norm": norm, **own}, "step": torch.tensor(3.0), "epochs": {"done": 4}}

    dcp.save(state(), storage_writer=FileSystemWriterAsync(path))
    held = state()
    dcp.load(held, storage_reader=FileSystemReader(path))
    said = str(certify(held, path, options=RAISE))
    assert rank or said == "resumed from ckpt as saved: 4 tensors, 1 objects, 2 ranks"
    if rank == 1:
        for key in ("weight", "norm"):
            held["model"][key].to_local()[-1] += 1
        held["step"] += 1
        held["epochs"]["done"] = 5
    differences = [one[:3] for one in certify(held, path, options=WARN).differences]
    tensors = [("tensor", 1, key) for key in ("model.norm", "model.weight", "step")]
    assert rank or sorted(differences) == [("object", 1, "epochs.done"), *tensors]


def resume_with_faults(rank: int, path: Path) -> dict[str, list[str]]:
    job = Job(DENSE, Parallel(), 1, reruns=True)
    job.save(path)
    (own,) = job.training.optimizer.chained_optimizers
    inner = own.optimizer
    masters = [master for group in own.shard_fp32_from_float16_groups for master in group]
    weight = next(iter(job.training.model[0].parameters()))
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker()

    def of_rank(which: int, fault: Callable[[], Any]) -> Callable[[], None]:
        return lambda: None if rank != which else fault()

    faults = {
        "none": of_rank(2, lambda: None),
        "master": of_rank(1, lambda: masters[0].data.add_(0.25)),
        "moment": of_rank(0, lambda: inner.state[masters[0]]["exp_avg"].mul_(0.5)),
        "weight": of_rank(1, lambda: weight.data.view(-1)[5:6].add_(1.0)),
        "step": of_rank(1, lambda: [group.update(step=1) for group in inner.param_groups]),
        "scheduler": of_rank(0, lambda: setattr(job.scheduler, "num_steps", 8)),
        "samples": of_rank(1, lambda: setattr(job.args, "consumed_train_samples", 0)),
        "python": of_rank(1, lambda: random.random()),
        "numpy": of_rank(1, lambda: numpy.random.rand()),
        "torch": of_rank(1, lambda: torch.rand(1)),
        "tracker": of_rank(0, lambda: tracker.states_["model-parallel-rng"].view(-1)[30:31].bitwise_xor_(1)),
        "rerun": of_rank(1, lambda: setattr(job.machine, "suspicious_node", "another")),
        "operations": of_rank(0, lambda: job.module.OPERATIONS.update(done=50)),
        "added": of_rank(1, lambda: tracker.states_.update(own=torch.arange(3))),
    }
    return {name: job.resume(path, fault) for name, fault in faults.items()}


def test_faults_after_a_load_are_named(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000002"
    path.mkdir()
    said, of_others = run_megatron_ranks(resume_with_faults, 2, path, environment=CERTIFYING)
    assert not any(of_others.values())
    assert all(len(lines) == 1 for lines in said.values()), said
    found = {name: line for name, (line,) in said.items()}
    assert found.pop("none").startswith("resumed from iter_0000002 as saved: ")
    named = {
        "master": ("tensor optimizer.", ".param[", "weight decoder.", " on rank 1: ", " of its master, got "),
        "moment": ("tensor optimizer.", ".exp_avg[", " on rank 0: "),
        "weight": ("tensor embedding.word_embeddings.weight[0, 5] (replica", " on rank 1: "),
        "step": ("['param_groups'][0]['step'] on rank 1: expected 2, got 1",),
        "scheduler": ("common state opt_param_scheduler['num_steps'] on rank 0: expected 16, got 8",),
        "samples": ("common state args.consumed_train_samples on rank 1: expected 16, got 0",),
        "python": ("object rng_state/shard_0.0_1.1[0]['random_rng_state'][1][", " on rank 1: "),
        "numpy": ("[0]['np_rng_state'][", " on rank 1: "),
        "torch": ("[0]['torch_rng_state'] on rank 1: ",),
        "tracker": ("['rng_tracker_states']['model-parallel-rng'] on rank 0: ",),
        "rerun": (" rerun_state_machine_state/shard_1_2['suspicious_node'] on rank 1: expected None, got 'another'",),
        "operations": ("common state num_floating_point_operations_so_far on rank 0: expected 100, got 50",),
        "added": ("['rng_tracker_states']['own'] on rank 1: expected nothing, got ",),
    }
    for name, parts in named.items():
        assert found[name].startswith("resumed from iter_0000002 NOT as saved: "), (name, found[name])
        for part in parts:
            assert part in found[name], (name, found[name])


def save_job(rank: int, path: Path, shape: ModelShape, parallel: Parallel) -> None:
    Job(shape, parallel, 1, layout="fully_reshardable").save(path)


def resume_job(rank: int, path: Path, shape: ModelShape, parallel: Parallel, flags: dict[str, Any]) -> list[str]:
    return Job(shape, parallel, 9, layout="fully_reshardable", **flags).resume(path)


TIED = ModelShape(tied=True)  # Megatron-Core pads a bucket of it under PP 2, and tells the three tensors behind shifted


@pytest.fixture(scope="module")
def jobs() -> Iterator[StandingRanks]:
    with standing_ranks(2, preload=MEGATRON, environment=CERTIFYING) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def saved_job(jobs: StandingRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "iter_0000002"
    path.mkdir()
    jobs.values(save_job, path, TIED, Parallel(tensor=2))
    return path


@pytest.mark.parametrize(
    ("ranks", "layout", "flags", "left"),
    [
        (2, Parallel(tensor=2), {}, ""),
        (2, Parallel(pipeline=2), {"no_load_rng": True}, "compared: 3 tensors (of an optimizer of several buckets"),
        (1, Parallel(), {"no_load_rng": True}, "compared: 2 objects (--no-load-rng)"),
        (2, Parallel(pipeline=2), {"finetune": True}, " tensors (--finetune), 2 objects"),
        (2, Parallel(), {"no_load_optim": True, "no_load_rng": True}, " tensors (--no-load-optim, --no-load-rng)"),
        (2, Parallel(), {"is_base": True}, " tensors (the model alone was loaded), 2 objects"),
    ],
    ids=str,
)
def test_clean_resumes_raise_no_alarm(
    ranks: int, layout: Parallel, flags: dict[str, Any], left: str, jobs: StandingRanks, saved_job: Path
) -> None:
    alone = partial(run_megatron_ranks, resume_job, 1, environment=CERTIFYING)
    (line,), *_ = (alone if ranks == 1 else partial(jobs.values, resume_job))(saved_job, TIED, layout, flags)
    assert line.startswith("resumed from iter_0000002 as saved: "), line
    assert left in line
    assert ("not compared" in line) == bool(left), line
