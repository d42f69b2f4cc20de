"""What real launches do beside saving and loading, one trap for each thing that a replacement can get wrong.

All run on two gloo ranks, in one world.
"""

import contextlib
import inspect
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import validation
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

import mcore_ckpt
from mcore_ckpt import SaveError, TorchDistSaveStrategy
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER
from mcore_ckpt.megatron.install import has_nvrx, served_queue
from mcore_ckpt.megatron.versions import megatron_version
from mcore_ckpt.save.transaction import SaveTransaction
from mcore_ckpt.save.writer_process import shared_writer
from mcore_ckpt.storage.resolve import LocalStorage
from tests.megatron.trap_ranks import check, installed, names, state
from tests.support.gloo_ranks import MEGATRON, made, run_megatron_ranks, standing_ranks
from tests.support.meanwhile import ahead_of

DEADLINE_S = 150

pytestmark = pytest.mark.long


def a_config_that_cannot_be_written_is_heard_of_on_every_rank(rank: int, directory: Path) -> None:
    """Rank 0 alone writes `metadata.json`, while the others wait for it in a barrier of Megatron's."""
    dist_checkpointing = installed()

    def fail(_: Any, name: str, *args: Any, **how: Any) -> None:
        if name == "metadata.json":
            raise SaveError("No space left on device (as the test wants it)")

    with ahead_of(LocalStorage, "publish", fail):
        with pytest.raises(SaveError, match=r"(?s)metadata\.json.*rank 0.*No space left"):
            dist_checkpointing.save(state(1), made(directory / "in line"))
        queue = AsyncCallsQueue()
        called: list[str] = []
        request = dist_checkpointing.save(state(1), made(directory / "beside"), async_sharded_save=True)
        request.add_finalize_fn(lambda: called.append("tracker"))
        queue.schedule_async_request(request)
        with pytest.raises(SaveError, match=r"(?s)metadata\.json.*rank 0.*No space left"):
            queue.maybe_finalize_async_calls(blocking=True)
    assert called == []
    dist_checkpointing.save(state(2), str(directory / "beside"))
    check(dist_checkpointing.load(state(0), str(directory / "beside")), 2)


def stale_companions_do_not_survive(rank: int, directory: Path) -> None:
    """An older checkpoint's `common.pt` and `integrity.json` are not those of the checkpoint that replaced it."""
    dist_checkpointing = installed()
    target = made(directory)
    dist_checkpointing.save(state(1), target)
    if rank == 0:
        torch.save({"common": {"iteration": -1}}, directory / "common.pt")
        (directory / "integrity.json").write_text("{}")
    dist.barrier()
    if megatron_version() >= (0, 19):
        # What .metadata names belongs to the checkpoint; the file is a remnant.
        assert dist_checkpointing.load_common_state_dict(target)["common"] == {"iteration": 1}
    dist_checkpointing.save(state(2), target)
    assert "integrity.json" not in names(target)
    assert ("common.pt" in names(target)) == (megatron_version() < (0, 19))
    assert dist_checkpointing.load_common_state_dict(target)["common"] == {"iteration": 2}
    check(dist_checkpointing.load(state(0), target), 2)
    if rank == 0 and megatron_version() >= (0, 17):
        (directory / INCOMPLETE_MARKER).touch()
        validation.save_integrity_manifest(target)
        listed = json.loads((directory / "integrity.json").read_text())["files"]
        assert ".metadata" in listed
        assert INCOMPLETE_MARKER not in listed, "it goes, and a later load would miss it"


def queues_made_before_install_are_served(rank: int, directory: Path) -> None:
    """Training code makes its queue when it is imported."""
    warnings.simplefilter("ignore")
    old = AsyncCallsQueue()
    stock = AsyncCallsQueue.schedule_async_request
    dist_checkpointing = installed()
    target = made(directory)
    for fill, queue in ((1, old), (2, AsyncCallsQueue(persistent=True))):
        request = dist_checkpointing.save(state(fill), target, async_sharded_save=True)
        index = queue.schedule_async_request(request)
        assert isinstance(served_queue(queue), mcore_ckpt.AsyncCallsQueue)
        with pytest.raises(SaveError, match="not finalized"):
            mcore_ckpt.uninstall()
        assert queue.maybe_finalize_async_calls(blocking=True) == [index]
        check(dist_checkpointing.load(state(0), target), fill)
        queue.close()
    mcore_ckpt.uninstall()
    assert AsyncCallsQueue.schedule_async_request is stock


def abort_and_restart(rank: int, directory: Path) -> None:
    """In-process restart: the queue is aborted, the process group goes, another comes, and saving goes on."""
    dist_checkpointing = installed()
    target = made(directory)
    dist_checkpointing.save(state(1), target)
    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(dist_checkpointing.save(state(2), target, async_sharded_save=True))
    queue.close(abort=True)
    if filesystem_async._results_queue is not None:  # as the launch resets it
        filesystem_async._results_queue._manager.shutdown()
    store = dist.distributed_c10d._get_default_store()
    size = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    again = dist.PrefixStore("restarted", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=size)
    check(dist_checkpointing.load(state(0), target), 1)
    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(dist_checkpointing.save(state(3), target, async_sharded_save=True))
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    check(dist_checkpointing.load(state(0), target), 3)


def the_wrapper_shares_out_and_each_way_to_exchange_loads(rank: int, directory: Path) -> None:
    dist_checkpointing = installed()
    target = made(directory)
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), None, True)
    for fill in (1, 2):
        dist_checkpointing.save(state(fill), target, strategy)
    request = dist_checkpointing.save(state(3), target, strategy, async_sharded_save=True)
    request.execute_sync()
    for algorithm in ("broadcast", "gather_rounds", "gather_object"):
        loading = FullyParallelLoadStrategyWrapper(
            get_default_load_sharded_strategy(target), None, exchange_algo=algorithm
        )
        check(dist_checkpointing.load(state(0), target, loading), 3)
    written_by = {name.split("_")[2] for name in names(target) if name.startswith("__")}
    assert written_by == {"0", "1"}, "the replica was not shared out"


def what_the_launch_sets_and_reads(rank: int, directory: Path) -> None:
    """The attributes, arguments and functions that training code of 0.12 to 0.19 uses beside save and load."""
    dist_checkpointing = installed()
    newer = {"cpu_shm_mode": True} if megatron_version() >= (0, 18) else {}
    strategy = strategies.TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=3, **newer)
    strategy.use_cached_ckpt_structure = True
    strategy.cached_global_metadata = None
    strategy.thread_count = 1
    strategy.separation_hint = None
    context = {"save_strategy": strategy}
    for fill in (1, 2, 3):
        target = made(directory / f"iter_{fill:07d}")
        request = dist_checkpointing.save(state(fill), target, context["save_strategy"], async_sharded_save=True)
        request.execute_sync()
        assert strategy.validated_cache_reuse == (fill > 1)

    options = {} if megatron_version() < (0, 17) else {"cache_metadata": True}
    if megatron_version() >= (0, 19):
        options.update(stream_ckpt_dequant=True, checkpoint_name=target)
    loading = strategies.TorchDistLoadShardedStrategy(**options)
    assert loading.stream_ckpt_dequant
    check(dist_checkpointing.load(state(0), target, loading), 3)
    resumed = strategies.TorchDistSaveShardedStrategy("torch_dist", 1)
    resumed.use_cached_ckpt_structure = True
    resumed.cached_global_metadata = loading.cached_global_metadata
    elsewhere = made(directory / "second")
    dist_checkpointing.save(state(4), elsewhere, resumed)
    check(dist_checkpointing.load(state(0), elsewhere), 4)

    if megatron_version() < (0, 17):
        return
    for third in ("mcore", "nvrx"):  # neither needs nvidia-resiliency-ext
        third_target = made(directory / third)
        request = dist_checkpointing.save(state(5), third_target, async_sharded_save=True, async_strategy=third)
        queue_class = strategies.get_async_strategy(third, "AsyncCallsQueue")[1]
        results_queue = strategies.get_async_strategy(third)[1]["get_write_results_queue"]
        # Launches refuse to start where signatures lack these names: that of 0.18 the first, that of 0.19 both.
        for function in (queue_class.__init__, queue_class.warmup_persistent_caller):
            assert "cpu_shm_mode" in inspect.signature(function).parameters
        assert "mp_mode" in inspect.signature(results_queue).parameters
        queue_class.warmup_persistent_caller(rank, cpu_priority=10, io_priority=None)
        results_queue(mp_mode="fork")
        queue = queue_class(persistent=True)
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True, no_dist=False)
        queue.close()
        check(dist_checkpointing.load(state(0), third_target), 5)
        strategies.get_async_strategy(third, "CachedMetadataFileSystemReader")[1].clear_metadata_cache()
    async_utils.AsyncCallsQueue.warmup_persistent_caller(rank, mp_mode="spawn")


def other_formats_are_left_to_nvrx(rank: int, directory: Path) -> None:
    """Where it is missing, an asynchronous save of `torch_dcp` or `fsdp_dtensor` says so."""
    installed()
    if megatron_version() < (0, 17) or has_nvrx():
        return
    with pytest.raises(SaveError, match="another format than torch_dist needs nvidia-resiliency-ext"):
        strategies.get_async_strategy("nvrx", "save_state_dict_async_plan")[1]({}, None)


TRAPS = [
    queues_made_before_install_are_served,  # first: it begins without install()
    a_config_that_cannot_be_written_is_heard_of_on_every_rank,
    stale_companions_do_not_survive,
    the_wrapper_shares_out_and_each_way_to_exchange_loads,
    what_the_launch_sets_and_reads,
    other_formats_are_left_to_nvrx,
    abort_and_restart,  # last: it replaces the process group
]


def test_traps(tmp_path: Path) -> None:
    with standing_ranks(2, preload=MEGATRON) as ranks:
        for trap in TRAPS:
            ranks.values(trap, tmp_path / trap.__name__, within_s=DEADLINE_S)


# --- async saves of ours in Megatron's own queue ----------------------------------------------------------------------


def _in_a_stock_queue(rank: int, base: Path, persistent: bool) -> dict[str, list[Any]]:
    from tests.support import pretend_main

    sys.modules["__main__"] = pretend_main
    queue = async_utils.AsyncCallsQueue(persistent)
    assert "mcore_ckpt" not in type(queue).schedule_async_request.__module__, "it is not Megatron's own"
    log: dict[str, list[Any]] = {"finalized": [], "refused": []}
    try:
        for step, writer in enumerate(("persistent", "fork")):
            strategy = TorchDistSaveStrategy(options=SaveOptions(writer=writer))  # type: ignore[arg-type]
            saved = state(step)
            path = made(base / str(step))
            request = dist_checkpointing.save(saved, path, strategy, async_sharded_save=True)
            assert isinstance(request.async_fn, SaveTransaction)
            request.add_finalize_fn(lambda step=step: log["finalized"].append(step))
            queue.schedule_async_request(request)
            saved["shard"].data.fill_(-1.0)  # training goes on
            while queue.get_num_unfinalized_calls():
                queue.maybe_finalize_async_calls(blocking=False)
                time.sleep(0.01)
        # A writer that dies: supervision is not promised here, but what is not whole must not be published.
        path = made(base / "99")
        strategy = TorchDistSaveStrategy(options=SaveOptions())
        if rank == 1:
            shared_writer().warm_up()
            os.kill(shared_writer().pid or 0, signal.SIGSTOP)
        dist.barrier()
        request = dist_checkpointing.save(state(99), path, strategy, async_sharded_save=True)
        request.add_finalize_fn(lambda: log["finalized"].append(99))
        if rank == 1:
            os.kill(shared_writer().pid or 0, signal.SIGKILL)
        queue.schedule_async_request(request)
        try:
            queue.maybe_finalize_async_calls(blocking=True)
        except Exception as error:  # noqa: BLE001  (looked at by the test)
            log["refused"].append(str(error))
    finally:
        with contextlib.suppress(Exception):
            queue.close()
    for step in (0, 1):
        check(dist_checkpointing.load(state(-1), str(base / str(step))), step)
    return log


@pytest.mark.parametrize("persistent", [False, True], ids=["forked caller", "persistent caller"])
def test_a_stock_queue_runs_our_requests(persistent: bool, tmp_path: Path) -> None:
    for log in run_megatron_ranks(_in_a_stock_queue, 2, tmp_path, persistent, deadline_s=200):
        assert log["finalized"] == [0, 1]
        (refused,) = log["refused"]
        assert "rank 1 of 2" in refused
        assert "SIGKILL" in refused
    assert not (tmp_path / "99" / ".metadata").exists()
    assert not (tmp_path / "99" / "metadata.json").exists()
