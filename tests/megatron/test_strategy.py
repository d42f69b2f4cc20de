"""Megatron's save and load through our strategies on real ranks: layouts, snapshots, failures, bad input."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

import mcore_ckpt
from mcore_ckpt import SaveOptions, TorchDistLoadStrategy, TorchDistSaveStrategy
from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.format import metadata_read
from mcore_ckpt.megatron.versions import differences
from tests.megatron.trap_ranks import counted
from tests.support.gloo_ranks import made, on_ranks
from tests.support.gloo_ranks import run_megatron_ranks as run_ranks
from tests.support.local_files import data_file
from tests.support.states import check_state, sharded_state


def save_on_rank(rank: int, path: Path, world: int, seed: int, ours: bool, options: dict[str, Any]) -> None:
    strategy = (
        TorchDistSaveStrategy(options=SaveOptions(**options)) if ours else TorchDistSaveShardedStrategy("torch_dist", 1)
    )
    dist_checkpointing.save(sharded_state(rank, world, seed), str(path), strategy)


def load_on_rank(rank: int, path: Path, world: int, seed: int, saved_world: int, ours: bool) -> None:
    blank = sharded_state(rank, world, blank=True)
    if world != saved_world:  # one object and one row of the stack for each saving rank: not to be resharded
        del blank["objects"], blank["model"]["stacked"]
    strategy = TorchDistLoadStrategy() if ours else TorchDistLoadShardedStrategy()
    check_state(dist_checkpointing.load(blank, str(path), strategy), rank, world, seed, saved_world)


def test_what_is_written_is_read_under_any_layout(tmp_path: Path) -> None:
    run_ranks(save_on_rank, 2, tmp_path, 2, 7, True, {})
    for world in (2, 4):
        run_ranks(load_on_rank, world, tmp_path, world, 7, 2, True)


@on_ranks(2)
def test_bad_input_is_named_on_every_rank(rank: int, tmp_path: Path) -> None:
    """The same mistakes on rank 0 only: every rank hears of them."""
    sharded = dist_checkpointing.ShardedTensor.from_rank_offsets

    def good() -> dict[str, Any]:
        return {
            "a": sharded("a", torch.ones(4, 4), replica_id=rank),
            "b": sharded("b", torch.ones(4), replica_id=rank),
            "o": ShardedObject("o", 1, (1,), (0,), replica_id=rank),
        }

    path = str(tmp_path)
    dist_checkpointing.save(good(), path, TorchDistSaveStrategy())
    wrong: list[tuple[type[Exception], str, Any]] = [
        (mcore_ckpt.ShapeMismatchError, r"(?=.*\[4, 4\]).*\[4, 5\]", sharded("a", torch.ones(4, 5), replica_id=rank)),
        (mcore_ckpt.DtypeMismatchError, "bfloat16", sharded("a", torch.ones(4, 4).bfloat16(), replica_id=rank)),
        (mcore_ckpt.MissingKeyError, "aa", sharded("aa", torch.ones(4, 4), replica_id=rank)),
        (mcore_ckpt.KindMismatchError, "object", sharded("o/shard_0_1", torch.ones(1), replica_id=rank)),
    ]
    strict = TorchDistLoadStrategy(options=mcore_ckpt.LoadOptions(on_dtype_mismatch="raise"))
    for expected, said, leaf in wrong:
        wanted = good()
        # From 0.18 on a load may be of some ranks only, so that each hears of its own errors alone.
        if rank == 0 or not differences().all_ranks_load:
            wanted["a"] = leaf
        with pytest.raises(CheckpointingException, match=f"(?s){said}") as caught:
            dist_checkpointing.load(wanted, path, strict, validate_access_integrity=False)
        assert isinstance(caught.value, expected)
    dist.barrier()
    victim = data_file(tmp_path)
    if rank == 0:
        os.truncate(victim, victim.stat().st_size - 200)
    dist.barrier()
    with pytest.raises(CheckpointingException, match="__0_1") as caught:
        dist_checkpointing.load(good(), path, TorchDistLoadStrategy(), validate_access_integrity=False)
    assert isinstance(caught.value, mcore_ckpt.CorruptCheckpointError)


@on_ranks(1)
def test_metadata_queries_and_removal(rank: int, tmp_path: Path) -> None:
    strategy = TorchDistSaveStrategy(separation_hint="ema")
    sharded = dist_checkpointing.ShardedTensor.from_rank_offsets
    state = {"a": sharded("a", torch.ones(4, 4)), "e": sharded("ema.x", torch.ones(3))}
    dist_checkpointing.save(state, str(tmp_path), strategy)
    loader = TorchDistLoadStrategy()
    tensors = loader.load_tensors_metadata(tmp_path)
    assert tensors["a"].global_shape == (4, 4)
    assert tensors["a"].data is None
    common = {"common_state/shard_0_1"} if differences().common_state_is_an_object else set()
    assert set(loader.load_sharded_metadata(tmp_path)) == {"a", "ema.x", *common}
    assert any(name.startswith("ema__0_") for name in os.listdir(tmp_path))
    loader.remove_sharded_tensors(str(tmp_path), "ema")
    assert not any(name.startswith("ema") for name in os.listdir(tmp_path))
    assert set(loader.load_sharded_metadata(tmp_path)) == {"a", *common}
    loaded = dist_checkpointing.load({"a": sharded("a", torch.zeros(4, 4))}, str(tmp_path))  # by stock
    assert torch.equal(loaded["a"], torch.ones(4, 4))


def large(blank: bool) -> dict[str, Any]:
    """What every rank wants all of: two large tensors, and many small ones."""
    sharded = ShardedTensor.from_rank_offsets
    rank = dist.get_rank()
    values = {f"large{i}": torch.arange(3_000_000.0) + i for i in range(2)}
    values |= {f"small{i}": torch.arange(100.0) + i for i in range(200)}
    return {
        key: sharded(key, torch.zeros_like(value) if blank else value, replica_id=rank) for key, value in values.items()
    }


@on_ranks(3)
def test_what_all_ranks_want_is_read_once_behind_the_fully_parallel_wrapper(rank: int, tmp_path: Path) -> None:
    dist_checkpointing.save(large(False), made(tmp_path), TorchDistSaveStrategy())
    strategy = TorchDistLoadStrategy()
    loaded = dist_checkpointing.load(large(True), str(tmp_path), FullyParallelLoadStrategyWrapper(strategy))
    assert all(torch.equal(loaded[key], leaf.data) for key, leaf in large(False).items())
    assert strategy.reader is not None
    read_bytes = torch.tensor(strategy.reader.stats.bytes_read)
    dist.all_reduce(read_bytes)
    assert read_bytes < 1.02 * sum(leaf.data.nbytes for leaf in large(True).values())


@on_ranks(1)
def test_a_load_with_an_optimizer_decodes_the_index_once(rank: int, tmp_path: Path) -> None:
    mcore_ckpt.install()
    sharded = ShardedTensor.from_rank_offsets
    state = {"optimizer": {"step": sharded("optimizer.step", torch.ones(4))}, "iteration": 3}
    dist_checkpointing.save(state, str(tmp_path))
    with counted(metadata_read, "parse_index") as decoded:
        dist_checkpointing.load(state, str(tmp_path))
    assert len(decoded) == 1


# --- flat buckets under another layout

_BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0."


@on_ranks(1)
def test_a_load_of_other_buckets_names_the_conversion_or_why_states_are_missing(rank: int, tmp_path: Path) -> None:
    def state(elements: int, *names: str) -> dict[str, ShardedTensor]:
        return {name: ShardedTensor.from_rank_offsets(_BUCKET + name, torch.ones(elements)) for name in names}

    run = tmp_path / "run"
    path = made(run / "iter_0000030")
    dist_checkpointing.save(state(64, "param"), path, TorchDistSaveStrategy())
    converted = f"{run}-fully_reshardable"
    command = f"mcore-ckpt reshard {path} {converted}/iter_0000030 --optimizer-layout fully_reshardable"
    with pytest.raises(LoadError) as larger:
        dist_checkpointing.load(state(128, "param", "exp_avg"), path, TorchDistLoadStrategy())
    assert str(larger.value).endswith(
        f"Or convert it, for any layout: {command}; then --load {converted} --ckpt-step 30"
    )
    with pytest.raises(LoadError, match="had taken no step of its optimizer") as stepped:
        dist_checkpointing.load(state(64, "param", "exp_avg"), path, TorchDistLoadStrategy())
    assert "reshard" not in str(stepped.value)
