"""Megatron-Core saves and loads in an object store: by a URL of it, and through NVIDIA's multi-storage client."""

from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.msc_utils import MultiStorageClientFeature

import mcore_ckpt
from mcore_ckpt import SaveOptions, verify_checkpoint
from tests.megatron.test_strategy import load_on_rank, save_on_rank
from tests.support.gloo_ranks import run_megatron_ranks as run_ranks
from tests.support.object_server import S3Directory
from tests.support.states import check_state, sharded_state


def through_client(rank: int, function: Any, *arguments: Any) -> Any:
    """Switch Megatron's multi-storage client on, as `--enable-msc` does."""
    MultiStorageClientFeature.enable()
    assert MultiStorageClientFeature.is_enabled()
    return function(rank, *arguments)


@pytest.mark.parametrize(("saver", "loader"), [(True, False), (False, True)])
def test_what_one_writes_the_other_reads_through_the_client(msc_profile: str, saver: bool, loader: bool) -> None:
    """True: mcore_ckpt; False: Megatron-Core."""
    url = f"{msc_profile}/iter_0000001"
    run_ranks(through_client, 2, save_on_rank, url, 2, 7, saver, {})
    assert verify_checkpoint(url).whole
    run_ranks(through_client, 2, load_on_rank, url, 2, 7, 2, loader)
    run_ranks(through_client, 1, load_on_rank, url, 1, 7, 2, loader)


def save_async(rank: int, run: str, world: int) -> None:
    mcore_ckpt.install()
    # (a forked child cannot reach a store)
    strategy = mcore_ckpt.TorchDistSaveStrategy(options=SaveOptions(writer="fork"))
    queue = mcore_ckpt.AsyncCallsQueue()
    for step in (1, 2, 2):  # the last replaces
        sharded = sharded_state(rank, world, seed=step)
        request = dist_checkpointing.save(
            sharded, f"{run}/iter_{step:07d}", strategy, async_sharded_save=True, validate_access_integrity=False
        )
        queue.schedule_async_request(request)
        sharded["model"]["rows"].data.fill_(-1)  # training goes on
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    dist.barrier()
    for step in (1, 2):
        blank = sharded_state(rank, world, blank=True)
        loaded = dist_checkpointing.load(blank, f"{run}/iter_{step:07d}", mcore_ckpt.TorchDistLoadStrategy())
        check_state(loaded, rank, world, step, world)


def test_async_saves_go_to_the_store_from_the_writer_process(msc_profile: str, s3_directory: S3Directory) -> None:
    run_ranks(through_client, 2, save_async, f"{msc_profile}/run", 2)
    names = s3_directory.names()
    assert {name.split("/")[1] for name in names} == {"iter_0000001", "iter_0000002"}
    for step in (1, 2):
        of_step = [name.split("/")[2] for name in names if f"iter_{step:07d}" in name]
        plain = [name for name in of_step if not name.endswith(".distcp") and name != "common.pt"]  # (0.19 has none)
        assert plain == [".metadata", "metadata.json"]
        assert len({name.split(".")[1] for name in of_step if name.endswith(".distcp")}) == 1
