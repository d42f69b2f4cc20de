"""A checkpoint that is replaced while it is loaded: what is loaded is of one save, on all ranks, or is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_ckpt import LoadError, LoadOptions, SaveError
from mcore_ckpt.megatron.versions import differences
from tests.megatron.trap_ranks import check, installed, state
from tests.support.gloo_ranks import made
from tests.support.gloo_ranks import run_megatron_ranks as run_ranks

pytest.importorskip("megatron.core")

DEADLINE_S = 150


def two_saves(directory: Path, iteration: int = 2) -> tuple[Path, Callable[[], None]]:
    """A checkpoint that tells `iteration`, and a function by which rank 0 puts another save, of 7, in its place."""
    named, other = directory / f"iter_{iteration:07d}", directory / "other"
    for path, fill in ((named, iteration), (other, 7)):
        installed().save(state(fill), made(path))
    dist.barrier()

    def replace() -> None:
        if dist.get_rank() == 0:
            named.rename(directory / "old")
            other.rename(named)

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


def replaced_between(rank: int, directory: Path) -> list[str]:
    """The messages of loads of a checkpoint that is replaced behind the common state, and behind rank 0's load."""
    installed()
    from mcore_ckpt.megatron import serialization, strategy
    from mcore_ckpt.megatron.strategy import TorchDistLoadStrategy

    named, replace = two_saves(directory / "behind the common state")
    load_later = replaced_first(replace, TorchDistLoadStrategy.load)
    messages = [refused(named, (TorchDistLoadStrategy, "load", load_later))]

    named, replace = two_saves(directory / "behind rank 0")
    checked: Any = strategy.check_common
    done = directory / "replaced"

    def replace_behind(*args: Any) -> None:
        checked(*args)  # all has been read by now
        if rank == 0 and not done.exists():
            replace()
            done.touch()

    join: Any = serialization.joined_load

    def join_and_wait(*args: Any) -> Any:
        joint = join(*args)
        until_s = time.monotonic() + DEADLINE_S
        while rank == 1 and not done.exists() and time.monotonic() < until_s:
            time.sleep(0.01)
        return joint

    changed = (strategy, "check_common", replace_behind), (serialization, "joined_load", join_and_wait)
    return [*messages, refused(named, *changed)]


def test_what_is_read_of_two_saves_is_refused_on_all_ranks(tmp_path: Path) -> None:
    if not differences().all_ranks_load:
        pytest.skip("this version of Megatron lets ranks load alone: none of them hears of the others")
    for behind_common, behind_rank in run_ranks(replaced_between, 2, tmp_path, deadline_s=DEADLINE_S):
        assert "was replaced by another save while it was loaded" in behind_common
        assert "the common state was read of save" in behind_common
        assert "rank 0 has read save" in behind_rank
        assert "rank 1 save" in behind_rank


def replaced_under_a_load(rank: int, directory: Path) -> str:
    """With `on_damaged="go_back"`: a checkpoint that is replaced is not damaged, and no older one is loaded."""
    dist_checkpointing = installed()
    from mcore_ckpt.load.reader import CheckpointReader

    run = directory / "run"
    dist_checkpointing.save(state(1), made(run / "iter_0000001"))
    named, replace = two_saves(run)
    return refused(named, (CheckpointReader, "read_items", replaced_first(replace, CheckpointReader.read_items)))


def test_what_is_replaced_under_a_load_is_not_damaged(tmp_path: Path) -> None:
    environment = {"MCORE_CKPT_ON_DAMAGED": "go_back"}
    for message in run_ranks(replaced_under_a_load, 2, tmp_path, deadline_s=DEADLINE_S, environment=environment):
        assert "was replaced by another save while it was loaded" in message


def saved_within(rank: int, directory: str) -> None:
    """A signal handler, or another thread, saves into the directory of a save that has not returned."""
    dist_checkpointing = installed()
    from megatron.core.dist_checkpointing import ShardedObject

    class Inner:
        def __reduce__(self) -> tuple[Any, ...]:
            with pytest.raises(SaveError, match="has not returned yet"):
                dist_checkpointing.save(state(7), directory)
            return dict, ()

    dist_checkpointing.save(state(2) | {"o": ShardedObject("o", Inner(), (1,), (0,))}, made(Path(directory)))
    check(dist_checkpointing.load(state(0), directory), 2)


def test_a_save_within_another_into_its_directory_is_refused(tmp_path: Path) -> None:
    run_ranks(saved_within, 1, str(tmp_path / "saved"), deadline_s=DEADLINE_S)


def looked_at(rank: int, directory: Path) -> tuple[int, list[str]]:
    """How often a load reads `.metadata`, and of which tensors it makes entries, if the common state is an object. It
    holds a class that only the strategy's options allow.
    """
    dist_checkpointing = installed()
    from megatron.core.dist_checkpointing import ShardedObject

    from mcore_ckpt import TorchDistLoadStrategy
    from mcore_ckpt.load import reader
    from mcore_ckpt.megatron import strategy as strategies

    found, read = [], reader.read_index
    with pytest.MonkeyPatch.context() as patched:
        request = strategies.SaveRequest  # (only Megatron-Core 0.19 may save it)
        patched.setattr(strategies, "SaveRequest", lambda **fields: request(**fields | {"has_common_file": False}))
        common = {"common": ShardedObject("common_state", {"iteration": Fraction(3)}, (1,), (0,))}
        dist_checkpointing.save(state(1) | common, made(directory / "c"))
        (directory / "c" / "common.pt").unlink(missing_ok=True)
        patched.setattr(reader, "read_index", lambda *args, **named: found.append(read(*args, **named)) or found[-1])
        strategy = TorchDistLoadStrategy(options=LoadOptions(allowed_classes=("fractions.Fraction",)))
        loaded = dist_checkpointing.load({"object": state(0)["object"]}, str(directory / "c"), strategy)
    assert loaded == {"iteration": 3, "object": {"fill": 1}}
    return len(found), [key for index in found for key in index.tensors._entries or ()]


def test_a_load_decodes_the_index_once_and_no_entry_that_it_does_not_want(tmp_path: Path) -> None:
    assert run_ranks(looked_at, 1, tmp_path, deadline_s=DEADLINE_S) == [(1, [])]
