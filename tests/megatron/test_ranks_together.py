"""What keeps one rank from a save or a load is heard of on all, at once, and none waits for one that does not come."""

import itertools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from mcore_ckpt import CorruptCheckpointError, OptionError, SaveError, SaveOptions
from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER
from mcore_ckpt.megatron import serialization
from mcore_ckpt.megatron.strategy import TorchDistSaveStrategy
from mcore_ckpt.megatron.versions import differences
from tests.megatron.trap_ranks import check, installed, state
from tests.support.gloo_ranks import made, on_ranks

RANKS = 3


def wrapped(**options: Any) -> Any:
    """A strategy behind Megatron's fully parallel wrapper over the group that this rank is in."""
    own = next(
        made for made in [(ranks, dist.new_group(ranks)) for ranks in ([0, 2], [1, 3])] if dist.get_rank() in made[0]
    )[1]
    return FullyParallelSaveStrategyWrapper(TorchDistSaveStrategy(options=SaveOptions.from_environment(**options)), own)


@on_ranks(4)
def test_what_one_rank_raises_before_the_first_exchange_all_raise(rank: int, tmp_path: Path) -> None:
    """A rank fails before the first exchange of a save, which behind a wrapper is one of its group from 0.19 on: in the
    common state each in turn, in a factory, or since there is no directory. The next save works.
    """
    dist_checkpointing = installed()
    name = made(tmp_path / "iter_0000001")
    strategy = wrapped()

    def fails(words: str, saved: dict[str, Any], directory: str = name, **how: Any) -> None:
        with pytest.raises((SaveError, KeyError, MemoryError, OSError), match=words):
            dist_checkpointing.save(saved, directory, how.pop("strategy", None), **how)
        dist.barrier()
        assert os.listdir(name) == []

    for failing in range(dist.get_world_size()):

        def no_common_state(common: Any, failing: int = failing) -> Any:
            if rank == failing:
                raise KeyError("args")
            return common

        for used in (strategy, None) if failing == 1 else (strategy,):
            fails("KeyError|args", state(1), strategy=used, preprocess_common_before_consistancy_check=no_common_state)

    def built(key: str, tensor: torch.Tensor, *_: Any) -> Any:
        return ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank)

    build = mock.Mock(side_effect=MemoryError("no memory on this rank")) if rank == 1 else built
    factory = ShardedTensorFactory("made", torch.ones(2), build, lambda found: found)
    fails("rank 1.*MemoryError|no memory on this rank", {**state(1), "made": factory})
    fails("rank 0.*iter_0000009|No such file", state(1), str(tmp_path / "iter_0000009"))
    with pytest.raises(OptionError, match="validate_access_integrity"):
        dist_checkpointing.save(state(1), name, validate_access_integrity=rank != 1)
    for used in (None, strategy):
        dist_checkpointing.save(state(1), name, used)
        check(dist_checkpointing.load(state(0), name), 1)


class _Holding(TorchDistSaveStrategy):
    """A user's, which saves by one of this package that it holds."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._held, self.options = TorchDistSaveStrategy(options=SaveOptions(**options)), None

    def save(self, *args: Any, **kwargs: Any) -> None:
        self._held.save(*args, **kwargs)


@on_ranks(4)
def test_options_that_differ_between_or_within_groups_are_an_error_on_all_ranks(rank: int, tmp_path: Path) -> None:
    """Some have another value of an option after a save in which all had the same, and after one with that value."""
    dist_checkpointing = installed()
    name, between = made(tmp_path / "iter_0000001"), made(tmp_path / "iter_0000002")
    dist_checkpointing.save(state(1), name, wrapped())
    before = sorted(os.listdir(name))
    dist_checkpointing.save(state(2), between, wrapped(compare_replicas="warn"))
    for others, made_by in (([0], wrapped), ([1], wrapped), ([1, 3], wrapped), ([1], _Holding)):
        strategy = made_by(compare_replicas="warn" if rank in others else "off")
        with pytest.raises(OptionError, match="MCORE_CKPT_COMPARE_REPLICAS alike on all hosts"):
            dist_checkpointing.save(state(2), name, strategy)
    dist.barrier()
    assert sorted(os.listdir(name)) == before
    dist_checkpointing.save(state(3), name, wrapped())
    check(dist_checkpointing.load(state(0), name), 3)


@on_ranks(RANKS)
def test_ranks_at_different_iterations_save_nothing(rank: int, tmp_path: Path) -> None:
    """Rank 1 is one iteration ahead."""
    dist_checkpointing = installed()
    names = [made(tmp_path / f"iter_000000{iteration}") for iteration in (1, 2)]
    with pytest.raises(SaveError, match="iter_0000001, iter_0000002: they are at different iterations"):
        dist_checkpointing.save(state(1), names[1 if rank == 1 else 0])
    dist.barrier()
    # Where there is no checkpoint, a marker says that what lies there is none.
    assert {path.name for name in names for path in Path(name).iterdir()} <= {INCOMPLETE_MARKER}


# --- loads: where they go back, all do

DIFFERENT = {"ON_DAMAGED": "go_back", "CERTIFY": "raise"}


@on_ranks(RANKS)
def test_options_that_differ_are_an_error_on_all_ranks(rank: int, tmp_path: Path) -> None:
    """Rank 1 has another value of each option in turn."""
    dist_checkpointing = installed()
    name = str(tmp_path / "iter_0000001")
    dist_checkpointing.save(state(1), made(Path(name)))
    for option, value in DIFFERENT.items():
        with pytest.MonkeyPatch.context() as patched:
            if rank == 1:
                patched.setenv(f"MCORE_CKPT_{option}", value)
            with pytest.raises(OptionError, match=f"MCORE_CKPT_{option} alike on all hosts"):
                dist_checkpointing.load(state(0), name)
    check(dist_checkpointing.load(state(0), name), 1)


FAILING: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({}, {}),
    ({"ON_DAMAGED": "go_back"}, {}),
    ({}, {"strict": "raise_all"}),
    ({}, {"strict": "ignore_all"}),
]


@on_ranks(RANKS)
def test_what_fails_on_one_rank_ahead_of_the_tensors_is_told_to_all(rank: int, tmp_path: Path) -> None:
    """One rank in turn cannot read the common state, or asks for what the checkpoint lacks, where Megatron gathers what
    all ask for.
    """
    dist_checkpointing = installed()
    for iteration in (1, 2):
        dist_checkpointing.save(state(iteration), made(tmp_path / f"iter_000000{iteration}"))
    name = str(tmp_path / "iter_0000002")
    load_common: Any = serialization.load_common

    def cannot_read(*args: Any) -> Any:
        if "iter_0000002" in str(args[0]):
            raise CorruptCheckpointError("common state of iter_0000002: not here")
        return load_common(*args)

    for fails, (options, how) in itertools.product(range(2), FAILING):
        with pytest.MonkeyPatch.context() as patched:
            for option, value in options.items():
                patched.setenv(f"MCORE_CKPT_{option}", value)
            if rank == fails:
                patched.setattr(serialization, "load_common", cannot_read)
            if "ON_DAMAGED" in options:
                check(dist_checkpointing.load(state(0), name), 1)
                continue
            with pytest.raises(CorruptCheckpointError, match="not here"):
                dist_checkpointing.load(state(0), name, **how)
    for odd, (strict, checks) in itertools.product(range(2), (("raise_unexpected", True), ("raise_all", False))):
        wanted = state(0)
        if rank == odd:
            wanted["new"] = ShardedTensor.from_rank_offsets("new", torch.ones(4))
        with pytest.raises(Exception, match="Unexpected keys"):
            dist_checkpointing.load(wanted, name, strict=strict, validate_access_integrity=checks)
    for strict in ("raise_all", "ignore_all"):
        check(dist_checkpointing.load(state(0), name, strict=strict), 2)


@pytest.mark.skipif(differences().all_ranks_load, reason="this megatron-core lets no rank load alone")
@on_ranks(RANKS)
def test_a_rank_that_loads_alone_waits_for_none(rank: int, tmp_path: Path) -> None:
    dist_checkpointing = installed()
    name = str(tmp_path / "iter_0000001")
    dist_checkpointing.save(state(1), made(Path(name)))
    if rank == 1:
        check(dist_checkpointing.load(state(0), name, validate_access_integrity=False), 1)
