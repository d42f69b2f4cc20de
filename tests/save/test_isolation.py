"""What lands on disk is the state at the call, whatever training does afterwards: on the first save as on the twelfth.

Every element depends on its place and on the step, so that bytes of another step show (stale ones, of a plan or a
stage that is kept from save to save) as well as bytes of two steps in one tensor (torn ones).
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from mcore_ckpt import AsyncCallsQueue, FileSystemReader, FileSystemWriterAsync, SaveOptions
from tests.support.gloo_ranks import on_ranks

_ROWS, _COLUMNS = 400, 300  # more than the smallest budget together


class _Training:
    """A state whose tensors share memory in every way, and which changes in place."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.weight = torch.zeros(_ROWS, _COLUMNS)
        self.half = torch.zeros(999, dtype=torch.bfloat16)
        self.scalar = torch.zeros((), dtype=torch.int64)
        self.object: dict[str, Any] = {"step": 0, "history": [], "tensor": torch.zeros(3)}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            "weight": self.weight,
            "tied": self.weight,
            "column view": self.weight[:, 7:9],
            "transposed": self.weight.t(),
            "row view": self.weight[5],
            "half": self.half,
            "scalar": self.scalar.view(1),
        }

    def advance(self, step: int) -> None:
        torch.add(torch.arange(_ROWS * _COLUMNS).view(_ROWS, _COLUMNS), 7 * step + self.rank, out=self.weight)
        self.half.copy_(torch.arange(999) % 13 + step)
        self.scalar.fill_(step)
        self.object["step"] = step
        self.object["history"].append(step)
        self.object["tensor"].fill_(step)

    def check(self, loaded: dict[str, torch.Tensor], loaded_object: dict[str, Any], step: int) -> None:
        expected = _Training(self.rank)
        expected.advance(step)
        for key, value in expected.tensors().items():
            assert torch.equal(loaded[key], value), f"{key} at step {step}: bytes of another moment"
        assert loaded_object["step"] == step
        assert loaded_object["history"] == list(range(step + 1))
        assert torch.equal(loaded_object["tensor"], torch.full((3,), float(step)))


def _megatron_saves(rank: int, base: Path, saves: int, options: SaveOptions) -> None:
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    from mcore_ckpt import TorchDistLoadStrategy, TorchDistSaveStrategy
    from mcore_ckpt.save.writer_process import shared_writer

    def sharded(tensors: dict[str, torch.Tensor], value: Any) -> dict[str, Any]:
        shards = {key: ShardedTensor.from_rank_offsets(key, tensor, (0, rank, 2)) for key, tensor in tensors.items()}
        return {**shards, "object": ShardedObject("object", value, (2,), (rank,))}

    training, queue = _Training(rank), AsyncCallsQueue()
    strategy = TorchDistSaveStrategy(options=options)
    strategy.warm_up(sharded(training.tensors(), None))
    writer_pid = shared_writer().pid
    for step in range(saves):
        training.advance(step)
        path = base / str(step)
        path.mkdir(parents=True, exist_ok=True)
        state = sharded(training.tensors(), training.object)
        if step == 2:
            strategy.save(state, path)
        else:
            queue.schedule_async_request(strategy.async_save(state, path))
        assert strategy.validated_cache_reuse == (step > 0), "plans are kept from save to save"
        before = training.object
        training.object = {**before, "history": list(before["history"]), "tensor": before["tensor"].clone()}
        training.advance(-100)
        before.clear()
        training.object["history"].pop()
        queue.maybe_finalize_async_calls(blocking=True)
        blank = sharded({key: torch.full_like(value, -1) for key, value in training.tensors().items()}, None)
        loaded = TorchDistLoadStrategy().load(blank, path)
        training.check(loaded, loaded["object"], step)
    assert shared_writer().pid == writer_pid, "the writer was not kept"
    queue.close()


@on_ranks(2)
def test_saves_of_megatrons_shards(rank: int, tmp_path: Path) -> None:
    _megatron_saves(rank, tmp_path / "persistent", 12, SaveOptions())
    _megatron_saves(rank, tmp_path / "fork", 5, SaveOptions(writer="fork"))
    _megatron_saves(rank, tmp_path / "little memory", 5, SaveOptions(staging_budget_bytes=1 << 20))


@on_ranks(2)
def test_saves_of_plain_dcp(rank: int, tmp_path: Path) -> None:
    training = _Training(rank)
    writer = FileSystemWriterAsync(tmp_path / "0")

    def keyed(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {f"rank{rank}.{key}": tensor for key, tensor in tensors.items()}

    for step in range(8):
        training.advance(step)
        path = tmp_path / str(step)
        state = {**keyed(training.tensors()), f"rank{rank}.object": training.object}
        saving: Any = dcp.async_save(state, checkpoint_id=path, storage_writer=writer)
        training.advance(-100)
        training.object["history"].pop()
        saving.result()
        blank = keyed({key: torch.full_like(value, -1) for key, value in training.tensors().items()})
        wanted = {
            **blank,
            f"rank{rank}.object": {"step": None, "history": [None] * (step + 1), "tensor": torch.ones(3)},
        }
        dist.barrier()
        dcp.load(wanted, storage_reader=FileSystemReader(path))
        loaded = {key.removeprefix(f"rank{rank}."): value for key, value in wanted.items()}
        training.check(loaded, loaded["object"], step)
