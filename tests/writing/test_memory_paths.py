"""What lies in memory when a save begins is what is written, wherever that memory is; or the save says why not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.layout.dense_tensors import check_memory
from mcore_ckpt.save.async_queue import AsyncCallsQueue, AsyncRequest
from tests.support.tensor_specs import source_of

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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_queue_writes_the_tensors_of_the_call_and_leaves_them_alone(
    persistent: bool, shared: bool, tmp_path: Path
) -> None:
    state = {"a": torch.ones(4_000_000), "b": torch.ones(300, 400).t(), "c": torch.ones(0), "o": [1, 2]}
    for value in state.values():
        if shared and isinstance(value, torch.Tensor) and value.numel():
            value.share_memory_()
    writer = FileSystemWriterAsync(tmp_path / "checkpoint", thread_count=2)
    queue = AsyncCallsQueue(persistent=persistent)
    try:
        queue.schedule_async_request(AsyncRequest(time.sleep, (0.5,), []))  # the worker is busy for a moment
        queue.schedule_async_request(_request(writer, state, dcp.DefaultSavePlanner()))
        for value in state.values():
            if isinstance(value, torch.Tensor):
                assert value.is_shared() is (shared and value.numel() > 0), "the trainer's tensor was moved"
                value.fill_(7.0)
        assert queue.maybe_finalize_async_calls(blocking=True) == [0, 1]
    finally:
        queue.close(abort=True)
    loaded = {"a": torch.zeros(4_000_000), "b": torch.zeros(400, 300), "c": torch.zeros(0), "o": None}
    dcp.load(loaded, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert loaded["o"] == [1, 2]
    for key in ("a", "b"):
        assert torch.equal(loaded[key], torch.ones_like(loaded[key])), f"{key}: a later value was stored"


def _store(tensors: list[torch.Tensor], path: str) -> None:
    time.sleep(0.5)
    torch.save([tensor.detach().clone() for tensor in tensors], path)


def test_functions_of_others_get_the_tensors_of_the_call_from_a_persistent_worker_too(tmp_path: Path) -> None:
    tensors = [torch.ones(1000), torch.nn.Parameter(torch.ones(5)), torch.ones(10, 10)[:, 3]]
    queue = AsyncCallsQueue(persistent=True)
    try:
        queue.schedule_async_request(AsyncRequest(_store, (tensors, str(tmp_path / "x.pt")), []))
        with torch.no_grad():
            for tensor in tensors:
                assert not tensor.is_shared(), "the trainer's tensor was moved"
                tensor.fill_(7.0)
        assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    finally:
        queue.close(abort=True)
    for tensor in torch.load(tmp_path / "x.pt"):
        assert torch.equal(tensor, torch.ones_like(tensor))


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
    ways = [SaveOptions(progress=False), SaveOptions(writer="fork", progress=False)]
    for options in ways:
        with pytest.raises(PlanError, match=r"model\.weight at offset .*given back \(\d+ bytes are left of \d+\)"):
            TorchDistSaveStrategy(options=options).async_save(state, tmp_path / "checkpoint")
    with pytest.raises(PlanError, match=r"model\.weight at offset .*given back"):
        TorchDistSaveStrategy(options=ways[0]).save(state, tmp_path / "checkpoint")
    assert list((tmp_path / "checkpoint").iterdir()) == []


def test_views_that_overlap_and_empty_tensors_need_no_more_memory_than_they_have() -> None:
    for tensor in (torch.ones(1).expand(1000), torch.ones(4, 1).expand(4, 9), torch.ones(0, 5), torch.ones(())):
        check_memory(tensor, lambda: "model.weight")


_DCP_SAVES = """
    import sys
    import torch
    import torch.distributed.checkpoint as dcp
    from mcore_ckpt import FileSystemWriterAsync
    whole = torch.ones(1 << 20)
    tensor = whole[1 << 19 :]
    whole.untyped_storage().resize_(tensor.nbytes + 4096)
    state = {"model": {"weight": tensor}}
    writer = FileSystemWriterAsync(sys.argv[1])
    try:
        if sys.argv[2] == "save":
            dcp.save(state, storage_writer=writer, no_dist=True)
        else:
            writer.stage(state)
    except BaseException as error:  # DCP's own is no Exception
        print("".join(map(str, [error, getattr(error, "failures", "")])))
"""


@pytest.mark.parametrize("how", ["save", "buffer"])
def test_plain_dcp_names_a_cut_storage_too(how: str, tmp_path: Path) -> None:
    code = textwrap.dedent(_DCP_SAVES)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "x"), how],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "model.weight" in done.stdout
    assert "given back" in done.stdout


# --- threads that a forked child does not have ------------------------------------------------------------------------

_FORKED_KERNEL = """
    import torch
    from mcore_ckpt.writing.forked_call import fork_call
    assert torch.get_num_threads() == 2
    tensor = torch.arange(3_000_000, dtype=torch.float32).view(100, 200, 150).permute(2, 0, 1)[:, :, ::2]
    total = float(tensor.contiguous().sum())  # now there is a second thread, in this process
    child = fork_call(lambda: float(tensor.contiguous().sum()), what="a function of others")
    assert child.wait(15), "it waits for a thread that is not there"
    assert child.result() == total
"""


def test_a_forked_child_does_not_wait_for_threads_that_only_the_trainer_has() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_FORKED_KERNEL)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert done.returncode == 0, done.stderr


# --- copies that are still under way ----------------------------------------------------------------------------------


def test_pinned_memory_is_read_when_copies_into_it_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda index: index != 1, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    source_of(torch.ones(3))
    assert waited == [], "nothing of the trainer's is waited for without need"
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    source_of(torch.ones(3))
    assert waited == [0, 2]
