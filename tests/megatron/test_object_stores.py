"""Megatron-Core saves and loads in an object store: by a URL of it, and through NVIDIA's multi-storage client."""

from __future__ import annotations

import os
import re
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt import SaveError, SaveOptions, verify_checkpoint
from tests.megatron.test_strategy import check, load_on_rank, megatron, save_on_rank, state
from tests.support.gloo_ranks import run_ranks
from tests.support.object_server import Fault, Proxy, Request, S3Directory


def through_client(rank: int, function: Any, *arguments: Any) -> Any:
    """Switch Megatron's multi-storage client on, as `--enable-msc` does."""
    megatron()
    from megatron.core.msc_utils import MultiStorageClientFeature

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
    import mcore_ckpt

    dist_checkpointing = megatron()
    mcore_ckpt.install()
    # (a forked child cannot reach a store)
    strategy = mcore_ckpt.TorchDistSaveStrategy(options=SaveOptions(writer="fork"))
    queue = mcore_ckpt.AsyncCallsQueue()
    for step in (1, 2, 2):  # the last replaces
        sharded = state(rank, world, seed=step)
        request = dist_checkpointing.save(
            sharded, f"{run}/iter_{step:07d}", strategy, async_sharded_save=True, validate_access_integrity=False
        )
        queue.schedule_async_request(request)
        sharded["model"]["rows"].data.fill_(-1)  # training goes on
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    dist.barrier()
    for step in (1, 2):
        blank = state(rank, world, blank=True)
        loaded = dist_checkpointing.load(blank, f"{run}/iter_{step:07d}", mcore_ckpt.TorchDistLoadStrategy())
        check(loaded, rank, world, step, world)


def test_async_saves_go_to_the_store_from_the_writer_process(msc_profile: str, s3_directory: S3Directory) -> None:
    run_ranks(through_client, 2, save_async, f"{msc_profile}/run", 2)
    names = s3_directory.names()
    assert {name.split("/")[1] for name in names} == {"iter_0000001", "iter_0000002"}
    for step in (1, 2):
        of_step = [name.split("/")[2] for name in names if f"iter_{step:07d}" in name]
        plain = [name for name in of_step if not name.endswith(".distcp") and name != "common.pt"]  # (0.19 has none)
        assert plain == [".metadata", "metadata.json"]
        assert len({name.split(".")[1] for name in of_step if name.endswith(".distcp")}) == 1


_DEADLINE_S = 4.0


def save_where_a_part_stalls(rank: int, url: str) -> tuple[int, float, str]:
    """How often training asked while a part hung, seconds from then to the end of the save, and what that says."""
    import mcore_ckpt

    dist_checkpointing = megatron()
    hangs, hung_at_s = threading.Event(), [0.0]

    def rule(request: Request) -> Fault | None:
        if "partNumber=2" not in request.query:
            return None
        if not hangs.is_set():
            hung_at_s[0] = time.monotonic()
            hangs.set()
        return Fault("stall", seconds=300)

    with Proxy(os.environ["AWS_ENDPOINT_URL"], rule) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        weight = torch.ones(5_000_000)
        sharded = {"weight": dist_checkpointing.ShardedTensor.from_rank_offsets("weight", weight, replica_id=0)}
        options = SaveOptions(write_deadline_s=_DEADLINE_S)
        queue = mcore_ckpt.AsyncCallsQueue()
        # Not by Megatron's `save`, which takes a URL only where its client of object stores is installed.
        request = mcore_ckpt.TorchDistSaveStrategy(options=options).async_save(sharded, url)
        queue.schedule_async_request(request)
        assert hangs.wait(60.0)
        steps = 0
        try:
            while not queue.maybe_finalize_async_calls(blocking=False):
                weight.add_(1.0)
                steps += 1
                time.sleep(0.02)
        except SaveError as error:
            return steps, time.monotonic() - hung_at_s[0], str(error)
        finally:
            queue.close()
    raise AssertionError("the save was published")


def test_training_goes_on_while_a_part_stalls_and_the_save_ends_within_its_deadline(s3_directory: S3Directory) -> None:
    url = f"{s3_directory.url}/iter_0000001"
    ((steps, took_s, said),) = run_ranks(save_where_a_part_stalls, 1, url)
    assert steps >= 10
    assert took_s < 5 * _DEADLINE_S
    assert re.search(r"byte \d+ and on|PUT s3://", said)
    assert "iter_0000001/__0_" in said
    assert not [name for name in s3_directory.names() if name.endswith(".metadata")]
