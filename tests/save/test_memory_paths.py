"""What lies in memory when a save begins is what is written, wherever that memory is; or the save says why not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.save.async_queue import AsyncCallsQueue, AsyncRequest

# --- Megatron's persistent queue, or ours, with the writer of the same name -------------------------------------------


def _request(writer: FileSystemWriterAsync, state: dict[str, Any], planner: dcp.DefaultSavePlanner) -> AsyncRequest:
    planner.set_up_planner(state, is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    (plan,), metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan([plan])
    writer.prepare_write_data(planner.finish_plan(plan), planner)
    save, preload, arguments = writer.get_save_function_and_args()

    def finish() -> None:
        results = writer.retrieve_write_results()
        assert isinstance(results, list)
        writer.finish(metadata, [results])

    return AsyncRequest(save, tuple(arguments), [finish], preload_fn=preload)


@pytest.mark.parametrize("persistent", [False, True])
def test_the_queue_writes_the_tensors_of_the_call_and_leaves_them_alone(persistent: bool, tmp_path: Path) -> None:
    queue = AsyncCallsQueue(persistent=persistent)
    try:
        for shared in (False, True):
            state = {"a": torch.ones(4_000_000), "b": torch.ones(300, 400).t(), "c": torch.ones(0), "o": [1, 2]}
            tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
            for tensor in tensors:
                if shared and tensor.numel():
                    tensor.share_memory_()
            directory = tmp_path / str(shared)
            writer = FileSystemWriterAsync(directory, thread_count=2)
            queue.schedule_async_request(AsyncRequest(time.sleep, (0.5,), []))  # the worker is busy for a moment
            queue.schedule_async_request(_request(writer, state, dcp.DefaultSavePlanner()))
            for tensor in tensors:
                assert tensor.is_shared() is (shared and tensor.numel() > 0), "the trainer's tensor was moved"
                tensor.fill_(7.0)
            assert len(queue.maybe_finalize_async_calls(blocking=True)) == 2
            loaded = {"a": torch.zeros(4_000_000), "b": torch.zeros(400, 300), "c": torch.zeros(0), "o": None}
            dcp.load(loaded, checkpoint_id=directory, no_dist=True)
            assert loaded["o"] == [1, 2]
            for key in ("a", "b"):
                assert torch.equal(loaded[key], torch.ones_like(loaded[key])), f"{key}: a later value was stored"
    finally:
        queue.close(abort=True)


# --- memory that is not there -----------------------------------------------------------------------------------------


def _cut(kind: str) -> torch.Tensor:
    """A tensor whose storage does not reach to its end any more."""
    whole = torch.ones(1 << 20)
    if kind == "offset":
        tensor = whole[1 << 19 :]
        whole.untyped_storage().resize_(tensor.nbytes + 4096)  # as much as it needs, but not where it needs it
    elif kind == "strides":
        tensor = whole.view(1 << 10, 1 << 10)[:, ::64]
        whole.untyped_storage().resize_(tensor.nbytes)
    elif kind == "transposed":
        tensor = whole.view(1 << 10, 1 << 10).t()[5:]
        whole.untyped_storage().resize_(tensor.nbytes)
    else:
        tensor = whole
        whole.untyped_storage().resize_(0)
    return tensor


_KINDS = ["offset", "strides", "transposed", "all"]


@pytest.mark.parametrize("kind", _KINDS)
def test_a_cut_storage_is_named_before_anything_is_written(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.dist_checkpointing")
    from megatron.core.dist_checkpointing import ShardedTensor

    from mcore_ckpt import TorchDistSaveStrategy

    state = {"w": ShardedTensor.from_rank_offsets("model.weight", _cut(kind))}
    tmp_path.joinpath("checkpoint").mkdir()
    ways = [SaveOptions(), SaveOptions(writer="fork")]
    for options in ways:
        with pytest.raises(PlanError, match=r"model\.weight at offset .*given back \(\d+ bytes are left of \d+\)"):
            TorchDistSaveStrategy(options=options).async_save(state, tmp_path / "checkpoint")
    with pytest.raises(PlanError, match=r"model\.weight at offset .*given back"):
        TorchDistSaveStrategy(options=ways[0]).save(state, tmp_path / "checkpoint")
    assert list((tmp_path / "checkpoint").iterdir()) == []
