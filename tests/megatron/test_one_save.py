"""A checkpoint that is replaced while it is loaded: what is loaded is of one save, on all ranks, or is refused."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject

from mcore_ckpt import LoadError, LoadOptions, SaveError, TorchDistLoadStrategy
from mcore_ckpt.load import reader
from mcore_ckpt.load.reader import CheckpointReader
from mcore_ckpt.megatron import serialization
from mcore_ckpt.megatron import strategy as strategies
from mcore_ckpt.megatron.versions import differences
from tests.megatron.trap_ranks import check, installed, state
from tests.support.gloo_ranks import made, on_ranks
from tests.support.processes import until


def two_saves(directory: Path) -> tuple[Path, Callable[[], None]]:
    """A checkpoint that tells 2, and a function by which rank 0 puts another save, of 7, in its place."""
    named, other = directory / "iter_0000002", directory / "other"
    for path, fill in ((named, 2), (other, 7)):
        installed().save(state(fill), made(path))
    dist.barrier()

    def replace() -> None:
        installed().load_common_state_dict(str(other))  # a look at another checkpoint, which changes nothing
        if dist.get_rank() == 0:
            named.rename(directory / "old")
            named.symlink_to(other)

    return named, replace


def replaced_first(replace: Callable[[], None], method: Any) -> Any:
    """The same method, ahead of which the checkpoint is replaced."""

    def call(self: Any, *args: Any) -> Any:
        dist.barrier()
        replace()
        dist.barrier()
        return method(self, *args)

    return call


def refused(named: Path, *changed: tuple[Any, str, Any]) -> str:
    """The message of a load during which these attributes are others. Behind it the second save loads."""
    with pytest.MonkeyPatch.context() as patched:
        for owner, name, value in changed:
            patched.setattr(owner, name, value)
        with pytest.raises(LoadError) as raised:
            installed().load(state(0), str(named), validate_access_integrity=False)
    check(installed().load(state(0), str(named)), 7)
    return str(raised.value)


@pytest.mark.skipif(
    not differences().all_ranks_load, reason="this version lets ranks load alone: none of them hears of the others"
)
@on_ranks(2)
def test_what_is_read_of_two_saves_is_refused_on_all_ranks(rank: int, tmp_path: Path) -> None:
    """The checkpoint is replaced behind the common state, and behind rank 0's load."""
    installed()
    named, replace = two_saves(tmp_path / "behind the common state")
    load_later = replaced_first(replace, TorchDistLoadStrategy.load)
    behind_common = refused(named, (TorchDistLoadStrategy, "load", load_later))
    assert "was replaced by another save while it was loaded" in behind_common
    assert "the common state was read of save" in behind_common

    named, replace = two_saves(tmp_path / "behind rank 0")
    checked: Any = strategies.check_common
    done = tmp_path / "replaced"

    def replace_behind(*args: Any) -> None:
        checked(*args)  # all has been read by now
        if rank == 0 and not done.exists():
            replace()
            done.touch()

    join: Any = serialization.joined_load

    def join_and_wait(*args: Any) -> Any:
        joint = join(*args)
        until(lambda: rank == 0 or done.exists())
        return joint

    changed = (strategies, "check_common", replace_behind), (serialization, "joined_load", join_and_wait)
    behind_rank = refused(named, *changed)
    assert "rank 0 has read save" in behind_rank
    assert "rank 1 save" in behind_rank


@on_ranks(2, environment={"MCORE_CKPT_ON_DAMAGED": "go_back"})
def test_what_is_replaced_under_a_load_is_not_damaged(rank: int, tmp_path: Path) -> None:
    """With `on_damaged="go_back"`: a checkpoint that is replaced is not damaged, and no older one is loaded."""
    dist_checkpointing = installed()
    run = tmp_path / "run"
    dist_checkpointing.save(state(1), made(run / "iter_0000001"))
    named, replace = two_saves(run)
    said = refused(named, (CheckpointReader, "read_items", replaced_first(replace, CheckpointReader.read_items)))
    assert "was replaced by another save while it was loaded" in said


@on_ranks(2)
def test_a_strategy_that_loads_from_two_saves_is_refused(rank: int, tmp_path: Path) -> None:
    """A stale copy, or a base under an adapter: of either, a job would go on with half a state."""
    dist_checkpointing = installed()
    named, another = (made(tmp_path / name) for name in ("named", "another"))
    dist_checkpointing.save(state(1), another)
    dist_checkpointing.save(state(2), named)

    class Reads(TorchDistLoadStrategy):
        def load(self, wanted: Any, path: Any, *args: Any, **others: Any) -> Any:
            found = super().load({"shard": wanted.pop("shard")}, another, *args, **others)
            return {**super().load(wanted, path, *args, **others), **found}

    with pytest.raises(LoadError, match=f"{another}: .* that loads from {named}: one load is of one save"):
        dist_checkpointing.load(state(0), named, Reads())


@on_ranks(1)
def test_a_save_within_another_into_its_directory_is_refused(rank: int, tmp_path: Path) -> None:
    """A signal handler saves into the directory of a save that has not returned."""
    dist_checkpointing = installed()

    class Inner:
        def __reduce__(self) -> tuple[Any, ...]:
            with pytest.raises(SaveError, match="has not returned yet"):
                dist_checkpointing.save(state(7), str(tmp_path))
            return dict, ()

    dist_checkpointing.save(state(2) | {"o": ShardedObject("o", Inner(), (1,), (0,))}, str(tmp_path))
    check(dist_checkpointing.load(state(0), str(tmp_path)), 2)


@on_ranks(1)
def test_a_load_decodes_the_index_once_and_no_entry_that_it_does_not_want(rank: int, tmp_path: Path) -> None:
    """Also if the common state is an object. It holds a class that only the strategy's options allow."""
    dist_checkpointing = installed()
    found, read = [], reader.read_index_and_version
    with pytest.MonkeyPatch.context() as patched:
        request = strategies.SaveRequest  # (only Megatron-Core 0.19 may save it)
        patched.setattr(strategies, "SaveRequest", lambda **fields: request(**fields | {"has_common_file": False}))
        common = {"common": ShardedObject("common_state", {"iteration": Fraction(3)}, (1,), (0,))}
        dist_checkpointing.save(state(1) | common, str(tmp_path))
        (tmp_path / "common.pt").unlink(missing_ok=True)
        noted = lambda *args, **named: found.append(read(*args, **named)) or found[-1]  # noqa: E731
        patched.setattr(reader, "read_index_and_version", noted)
        strategy = TorchDistLoadStrategy(options=LoadOptions(allowed_classes=("fractions.Fraction",)))
        loaded = dist_checkpointing.load({"object": state(0)["object"]}, str(tmp_path), strategy)
    assert loaded == {"iteration": 3, "object": {"fill": 1}}
    ((index, _),) = found
    assert not index.tensors._entries
