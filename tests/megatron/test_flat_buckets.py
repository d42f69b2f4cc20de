"""Flat buckets, the layout in which Megatron saves the state of a distributed optimizer unless told otherwise."""

import pickle
import re
import warnings
from ast import literal_eval
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch.testing._internal.two_tensor import TwoTensor

import mcore_ckpt
from mcore_ckpt import (
    LoadError,
    LoadOptions,
    MissingKeyError,
    OptionError,
    PlanError,
    TorchDistLoadStrategy,
    certify,
)
from mcore_ckpt.format.parameter_table import TABLE_HOLDER, TABLE_MEMBER, ParameterTable, Region
from mcore_ckpt.megatron.flat_buckets import _in_one_memory, _leaves
from mcore_ckpt.megatron.other_division import FLAT_BUCKETS, SHARDING_TYPE, _parameter_groups, with_own_ranges
from mcore_ckpt.reshard import rewriting
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from tests.format import independent_reader as independent
from tests.support.gloo_ranks import made, on_ranks, run_megatron_ranks, run_stock_ranks
from tests.support.kept_log import kept_log
from tests.support.model_like import read_all
from tests.support.models import GATED, MOE_SEQUENTIAL, ModelShape, Parallel, build_training
from tests.support.shared_groups import share_groups
from tests.support.state_compare import differing, read_state, write_state
from tests.support.stock import LISTS_TENSORS
from tests.support.stored_layouts import UncheckedTable


def prepare() -> Any:
    """Megatron's `dist_checkpointing`, served by this package."""
    warnings.simplefilter("ignore")  # of Megatron and torch about themselves
    share_groups()
    mcore_ckpt.install()
    return dist_checkpointing


@dataclass(frozen=True, slots=True)
class Job:
    """A model, the layout that saves it, and the one that resumes it; `buckets`: elements of each gradient bucket."""

    name: str
    shape: ModelShape
    saved: Parallel
    resumed: Parallel
    buckets: int | None = None

    @property
    def has_same_batches(self) -> bool:
        """Whether the resumed job's losses can be those of the one that was saved."""
        return self.name in ("gated", "odd-buckets", "other-buckets")


JOBS = (
    Job("gated", GATED, Parallel(tensor=2), Parallel(pipeline=2)),
    Job("odd-buckets", ModelShape(hidden=40, dtype="float32"), Parallel(pipeline=2), Parallel(tensor=2), buckets=5000),
    Job("other-buckets", GATED, Parallel(tensor=2), Parallel(tensor=2), buckets=9000),
    Job("data-parallel", ModelShape(dtype="float32", tied=True), Parallel(tensor=2), Parallel()),
    Job("one-optimizer", MOE_SEQUENTIAL, Parallel(expert=2), Parallel()),
    Job("two-optimizers", MOE_SEQUENTIAL, Parallel(), Parallel(expert=2)),
)


def random_states(rank: int, layout: Parallel) -> Any:
    """As Megatron-LM divides them: by data-parallel rank only if experts are divided."""
    if layout.expert > 1:
        return ShardedObject("rng_state", [rank], (1, 1, 2), (0, 0, rank), replica_id=0)
    return ShardedObject("rng_state", [0], (1, 1), (0, 0), replica_id=rank)


def save(rank: int, directory: Path, jobs: Sequence[Job]) -> None:
    dist_checkpointing = prepare()
    for job in jobs:
        training = build_training(job.shape, job.saved, seed=1, bucket_elements=job.buckets)
        training.train(2)
        state = training.sharded_state_dict(flat_buckets=True)
        if job.saved.expert != job.resumed.expert:
            state["rng_state"] = random_states(rank, job.saved)
        dist_checkpointing.save(state, made(directory / job.name / "checkpoint"))
        write_state(directory / job.name / "saved", rank, training.sharded_state_dict())
        if job.has_same_batches:
            later = training.train(2)
            if rank == 1:
                (directory / job.name / "losses").write_text(repr(later))


def resume(rank: int, directory: Path, jobs: Sequence[Job]) -> tuple[list[list[float]], list[str]]:
    """The losses of each job as it goes on, and what certificates say of it, and of one moment that is another."""
    dist_checkpointing = prepare()
    losses, certified = [], []
    for job in jobs:
        training = build_training(job.shape, job.resumed, seed=9)
        wanted = training.sharded_state_dict(is_loading=True, flat_buckets=True)
        path, others = directory / job.name / "checkpoint", job.saved.expert != job.resumed.expert
        if others:  # which are stored for another division of the ranks
            with pytest.raises(LoadError, match="cannot follow: add --no-load-rng"):
                dist_checkpointing.load({**wanted, "rng_state": random_states(rank, job.resumed)}, path)
        strictness = "raise_unexpected" if others else "raise_all"
        training.load(dist_checkpointing.load(wanted, path, strict=strictness))
        write_state(directory / job.name / "resumed", rank, training.sharded_state_dict())
        if job.name == "gated":
            state = partial(training.sharded_state_dict, flat_buckets=True)
            certified.append(str(certify(state, path, training.optimizer, options=LoadOptions(certify="raise"))))
            moment = moments(training)[0]
            moment.neg_()
            certified.append(str(certify(state(), path, options=LoadOptions(certify="warn"))))
            moment.neg_()
        losses.append(training.train(2) if job.has_same_batches else [])
    return losses, certified


def moments(training: Any) -> list[torch.Tensor]:
    return [state["exp_avg"] for one in training.optimizer.chained_optimizers for state in one.optimizer.state.values()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("jobs")
    run_megatron_ranks(save, 2, directory, JOBS)
    return directory


def test_flat_buckets_load_under_any_division_of_the_model(saved: Path) -> None:
    _, (losses, (clean, faulty)) = run_megatron_ranks(resume, 2, saved, JOBS)
    assert re.search(r"as saved: \d+ tensors, \d+ objects, 2 ranks$", clean), clean
    assert re.search(r"NOT as saved: 2 differences in .* tensor optimizer\.state\.exp_avg\.\S+\[", faulty), faulty
    for job, later in zip(JOBS, losses, strict=True):
        before, after = (read_state(saved / job.name / name) for name in ("saved", "resumed"))
        if job.name != "odd-buckets":  # of which Megatron-Core itself gathers shifted ones
            assert differing(before, after) == [], job.name
        if job.has_same_batches:
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
    monkeypatch.setattr(rewriting, "parameter_orders", None)
    for name in ("gated", "two-optimizers"):
        reshard_checkpoint(saved / name / "checkpoint", tmp_path / name, optimizer_layout="fully_reshardable")
        assert differing(read_all(tmp_path / name), read_state(saved / name / "saved")) == []


@on_ranks(2)
def test_of_gathered_state_each_rank_reads_its_own_range(rank: int, tmp_path: Path) -> None:
    dist_checkpointing = prepare()
    saving = build_training(GATED, Parallel(tensor=2), seed=1)
    saving.train(1)
    dist_checkpointing.save(saving.sharded_state_dict(), made(tmp_path / "checkpoint"))
    write_state(tmp_path / "saved", rank, saving.sharded_state_dict())
    training = build_training(GATED, Parallel(), seed=9)
    wanted, strategy = training.sharded_state_dict(is_loading=True), TorchDistLoadStrategy()
    training.load(dist_checkpointing.load(wanted, tmp_path / "checkpoint", strategy))
    write_state(tmp_path / "loaded", rank, training.sharded_state_dict())
    assert strategy.reader is not None
    weights = sum(one.nbytes for one in training.model[0].parameters())
    own = weights + sum(3 * moment.nbytes for moment in moments(training))
    if rank == 0:  # (objects; and not what the other rank has, which would be as much as its own)
        assert 0 <= strategy.reader.stats.bytes_needed - own < (own - weights) / 10
    torch.distributed.barrier()
    assert differing(read_state(tmp_path / "saved"), read_state(tmp_path / "loaded")) == []


FROZEN = replace(GATED, frozen=(1,))


@on_ranks(2)
def test_layers_that_were_frozen_matter_only_where_they_are_trained(rank: int, tmp_path: Path) -> None:
    """Megatron stacks the layers of a model under one key."""
    directory = tmp_path / "saved"
    dist_checkpointing = prepare()
    training = build_training(FROZEN, Parallel(tensor=2), seed=1)
    training.train(2)
    dist_checkpointing.save(training.sharded_state_dict(flat_buckets=True), made(directory))
    expected = training.train(2)
    thawed = build_training(GATED, Parallel(pipeline=2), seed=9)
    said = r"do not have all of its elements at .*it was frozen in the job that saved them"
    with pytest.raises(MissingKeyError, match=said):
        dist_checkpointing.load(thawed.sharded_state_dict(is_loading=True, flat_buckets=True), directory)
    again = build_training(FROZEN, Parallel(pipeline=2), seed=9)
    again.load(dist_checkpointing.load(again.sharded_state_dict(is_loading=True, flat_buckets=True), directory))
    resumed = again.train(2)
    if rank == 1:  # the last stage
        assert resumed == pytest.approx(expected, rel=1e-3)
        with pytest.raises(OptionError, match="since some were frozen"):
            reshard_checkpoint(directory, tmp_path / "made", optimizer_layout="fully_reshardable")
        assert not (tmp_path / "made").exists()


def load_changed(rank: int, directory: Path) -> None:
    """In 32 bits; and where one stage's state dict does not have the parameter itself, at the save or the load."""
    dist_checkpointing = prepare()
    exact = build_training(replace(GATED, dtype="float32"), Parallel(pipeline=2), seed=9)
    wanted = exact.sharded_state_dict(is_loading=True, flat_buckets=True)
    exact.load(dist_checkpointing.load(wanted, directory / "gated" / "checkpoint"))
    write_state(directory / "exact", rank, exact.sharded_state_dict())

    def unnamed(training: Any, *, is_loading: bool) -> Any:
        state = training.sharded_state_dict(is_loading=is_loading, flat_buckets=True)
        model = dict(state["model"])
        for key in {"output_layer.weight"} & model.keys():
            model[key] = replace(model[key], data=model[key].data.detach())
        metadata = state["content_metadata"]
        return {**state, "optimizer": training.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)}

    for name, saves, loads in (("unnamed", True, False), ("unnamed-later", False, True)):
        training, again = (build_training(GATED, Parallel(pipeline=2), seed=seed) for seed in (1, 9))
        training.train(1)
        state = training.sharded_state_dict(flat_buckets=True)
        dist_checkpointing.save(unnamed(training, is_loading=False) if saves else state, made(directory / name))
        write_state(directory / f"{name}-saved", rank, training.sharded_state_dict())
        wanted = again.sharded_state_dict(is_loading=True, flat_buckets=True)
        wanted = unnamed(again, is_loading=True) if loads else wanted
        again.load(dist_checkpointing.load(wanted, directory / name))
        write_state(directory / f"{name}-loaded", rank, again.sharded_state_dict())


def test_masters_of_a_job_in_32_bits_are_those_saved_and_what_has_no_table_loads_under_its_own_layout(
    saved: Path,
) -> None:
    run_megatron_ranks(load_changed, 2, saved)
    masters = {key: value for key, value in read_state(saved / "gated" / "saved").items() if ".state.param." in key}
    assert masters
    exact = read_state(saved / "exact")
    assert all(torch.equal(value, exact[key]) for key, value in masters.items())
    for name in ("unnamed", "unnamed-later"):
        assert differing(*(read_state(saved / f"{name}-{when}") for when in ("saved", "loaded"))) == []


def load_strictly(rank: int, directory: Path) -> tuple[set[str], set[str]]:
    """What stock finds missing or unexpected."""
    share_groups()
    training = build_training(GATED, Parallel(tensor=2), seed=9)
    wanted = training.sharded_state_dict(is_loading=True, flat_buckets=True)
    state, missing, unexpected = dist_checkpointing.load(wanted, str(directory / "checkpoint"), strict="return_all")
    training.load(state)
    write_state(directory / "by-stock", rank, training.sharded_state_dict())
    return missing, unexpected


@pytest.mark.skipif(not LISTS_TENSORS, reason="stock cannot list tensors")
def test_stock_loads_as_if_there_were_no_table(saved: Path) -> None:
    directory = saved / "gated"
    assert run_stock_ranks(load_strictly, 2, directory) == [(set(), set())] * 2
    assert differing(read_state(directory / "saved"), read_state(directory / "by-stock")) == []


# --- what no table, or a wrong one, leads to


def of_regions(change: Callable[[list[Region]], list[Region]]) -> Callable[[ParameterTable], bytes]:
    return lambda table: UncheckedTable(buckets_of(table), change(list(table.regions()))).encoded()


def buckets_of(table: ParameterTable) -> list[tuple[str, int]]:
    return list(zip(table.buckets, table.sizes, strict=True))


def renamed(regions: list[Region]) -> list[Region]:
    return [one._replace(key=one.key.replace("final_layernorm", "first_layernorm")) for one in regions]


def of_another_save(table: ParameterTable) -> bytes:
    return UncheckedTable([(name, elems + 64) for name, elems in buckets_of(table)], list(table.regions())).encoded()


WRONG: dict[str, tuple[Callable[[ParameterTable], bytes] | None, str]] = {
    "a gap": (of_regions(lambda regions: regions[:2] + regions[3:]), "elements of no parameter lie before"),
    "at zero in each layer": (
        of_regions(
            lambda regions: [one._replace(offsets=(one.offsets[0], *[0] * (len(one.offsets) - 1))) for one in regions]
        ),
        r"bucket_idx_0 do not make up \S+: element .* expected exactly 1",  # of slices of TP 2
    ),
    "renamed": (of_regions(renamed), "have no such parameter; it was frozen in the job that saved them, or is new"),
    "another save": (of_another_save, "elements of optimizer.* of which .* are stored"),
    "cut": (lambda table: table_bytes(table)[:-8], "is damaged"),
    "absent": (None, "save it again so under that layout. Or .* reshard .* --optimizer-layout fully_reshardable"),
}


def table_bytes(table: ParameterTable) -> bytes:
    return UncheckedTable(buckets_of(table), list(table.regions())).encoded()


@on_ranks(2)
def test_a_table_that_is_wrong_or_absent_is_refused_on_all_ranks_and_nothing_is_loaded(
    rank: int, tmp_path: Path
) -> None:
    dist_checkpointing = prepare()
    training = build_training(GATED, Parallel(tensor=2), seed=1)
    training.train(1)  # (the optimizer has states then)
    state = training.sharded_state_dict(flat_buckets=True)
    holder = state["optimizer"]["param_state"][TABLE_HOLDER]
    written = holder.record_members[TABLE_MEMBER]
    sent = pickle.loads(pickle.dumps(holder))  # as local checkpoints send their state dicts to other ranks
    assert sent.data == holder.data
    assert sent.job_buckets is None, "the optimizer goes along"
    for name, (change, _) in WRONG.items():
        members = {} if change is None else {TABLE_MEMBER: change(ParameterTable(written, "as it was written"))}
        holder.record_members = members
        dist_checkpointing.save(state, made(tmp_path / name))
    again = build_training(GATED, Parallel(pipeline=2), seed=9)
    wanted, before = again.sharded_state_dict(is_loading=True, flat_buckets=True), elements(again)
    for name, (_, said) in WRONG.items():
        with pytest.raises(LoadError, match=said) as raised:
            dist_checkpointing.load(wanted, tmp_path / name)
        assert torch.equal(before, elements(again)), name
        assert "dp_group_idx_" in str(raised.value) or name == "renamed", name


def elements(training: Any) -> torch.Tensor:
    optimizers = training.optimizer.chained_optimizers
    masters = [one for each in optimizers for group in each.shard_fp32_from_float16_groups for one in group]
    return torch.cat([one.detach().float().flatten() for one in (*masters, *training.model[0].parameters())])


@on_ranks(2)
def test_a_model_without_its_parameters_is_saved_without_a_table_and_said_so_once(rank: int, tmp_path: Path) -> None:
    dist_checkpointing = prepare()
    training = build_training(GATED, Parallel(), seed=1)
    model = {
        key: replace(one, data=one.data.detach()) if isinstance(one.data, torch.Tensor) else one
        for key, one in training.model[0].module.sharded_state_dict().items()
    }
    with kept_log() as said:
        for number in range(2):
            optimizer = training.optimizer.sharded_state_dict(model, metadata={SHARDING_TYPE: FLAT_BUCKETS})
            dist_checkpointing.save({"model": model, "optimizer": optimizer}, made(tmp_path / str(number)))
    assert [bool(re.search("without a table .* keep_vars=False", line)) for line in said] == [True] * (rank == 0)


def copied(_key: str, data: torch.Tensor, *_: Any) -> Any:
    return [
        ShardedTensor.from_rank_offsets(name, half.clone()) for name, half in zip("ab", data.chunk(2, 1), strict=True)
    ]


def reordered(_key: str, data: torch.Tensor, *_: Any) -> Any:
    return [ShardedTensor.from_rank_offsets("a", data[torch.tensor([0, 2, 1])])]


def test_slices_that_a_factory_copies_are_found_by_their_elements() -> None:
    parameter = torch.rand(3, 8)
    factory = partial(ShardedTensorFactory, "both", parameter, merge_fn=None)
    for leaf, built in zip(_leaves(factory(copied), (3, 8)), copied("", parameter), strict=True):
        (slice_, first, strides), name = leaf, leaf[0].key
        assert name == built.key
        assert torch.equal(torch.as_strided(parameter, slice_.local_shape, strides, first), built.data)
    with pytest.raises(PlanError, match="its factory changes elements, or their order"):
        _leaves(factory(reordered), (3, 8))


def group(decays: float, is_expert: bool) -> dict[str, Any]:
    return {"wd_mult": decays, "lr_mult": 1.0, "is_expert_parallel": is_expert, "is_decoupled_lr": False, "step": 3}


def test_parameter_groups_follow_experts_that_are_divided_otherwise() -> None:
    plain, norms, experts = group(1.0, False), group(0.0, False), group(1.0, True)
    undivided, divided = [plain, norms], [[plain, norms], [experts]]
    to_two = partial(_parameter_groups, [{"optimizer": {"param_groups": undivided}}], others=[plain, norms, experts])
    assert [to_two(wanted) for wanted in divided] == divided
    stored = [{"optimizer": {"param_groups": groups}} for groups in divided]
    assert _parameter_groups(stored, undivided, undivided) == undivided
    # What only another pipeline stage wants has its place, which is the same on all ranks.
    assert _parameter_groups(stored[:1], [norms], [norms]) == undivided


def test_chained_optimizers_without_flat_buckets_are_asked_for_as_they_are() -> None:
    """As a layer-wise optimizer in a chain with a distributed one."""
    job = SimpleNamespace(own_ranges=dict)
    layer_wise = {"optimizer": {"param_groups": []}, "state": "of all matrices"}
    distributed = {"optimizer": {"param_groups": []}, "param_state": {TABLE_HOLDER: SimpleNamespace(job_buckets=job)}}
    asked = with_own_ranges({"model": {}, "optimizer": {0: layer_wise, 1: distributed}})["optimizer"]
    assert asked[0] is layer_wise
    assert asked[1]["param_state_sharding_type"] == "fully_reshardable"


def test_weights_without_storage_are_in_no_memory_with_their_masters() -> None:
    """As Transformer Engine's 8-bit weights."""
    weight = torch.Tensor._make_wrapper_subclass(TwoTensor, (2, 2), dtype=torch.bfloat16)
    assert not _in_one_memory(torch.ones(2, 2), weight)
    exact = torch.nn.Parameter(torch.ones(2, 2))
    assert _in_one_memory(exact.detach().view(-1), exact)
