"""The fingerprints that a save stores: those of the tensors, however they are divided, and whoever writes."""

import itertools
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt import ChecksumError, checkpoint_fingerprint, reshard_checkpoint
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.megatron.strategy import TorchDistSaveStrategy
from mcore_ckpt.save.async_queue import AsyncCallsQueue
from tests.support.command import document_of

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

from megatron.core.dist_checkpointing import ShardedTensor

WHOLE = ("one", "scalar", "empty")
DIVIDED = {"rows": (4, 6), "columns": (300, 8), "inner": (3, 4, 8), "long": (2048, 800), "layers": (3, 256, 2048)}


def whole_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "one": torch.randn(7, 5, generator=generator),
        "rows": torch.randn(12, 6, generator=generator).bfloat16(),
        "columns": torch.randn(300, 32, generator=generator),
        "inner": torch.randn(3, 8, 16, generator=generator).half(),
        "long": torch.randn(2048, 2400, generator=generator),  # more than one window
        "layers": torch.randn(3, 512, 2048, generator=generator),  # stacked, in runs of more than a block
        "flat": torch.randn(10, 12, generator=generator),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 4),
    }


def shard(
    key: str, whole: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...], flat: slice | None = None
) -> Any:
    data = whole[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))].clone()
    pieces = tuple(n // m if m else 1 for n, m in zip(whole.shape, sizes, strict=True))
    made = ShardedTensor(key, data, data.dtype, sizes, tuple(whole.shape), offsets, pieces)
    if flat is not None:  # as Megatron-Core 0.12 to 0.14 makes them; this one takes them no more
        made.data, made.flattened_range = data.reshape(-1)[flat].clone(), flat
    return made


def divided(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """One rank's state that holds all slices of each tensor."""
    state: dict[str, Any] = {
        key: shard(key, tensors[key], (0,) * tensors[key].ndim, tensors[key].shape) for key in WHOLE
    }
    for key, sizes in DIVIDED.items():
        starts = [range(0, n, m) for n, m in zip(tensors[key].shape, sizes, strict=True)]
        state[key] = [shard(key, tensors[key], offsets, sizes) for offsets in itertools.product(*starts)]
    state["flat"] = [
        shard("flat", tensors["flat"], (0, column), (10, 6), slice(*bounds))
        for column in (0, 6)
        for bounds in ((0, 13), (13, 60))
    ]
    return state


def stored(path: Path) -> dict[str, int]:
    return dict(read_index(path).fingerprints)


def crcs(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    return {key: zlib.crc32(one.contiguous().reshape(-1).view(torch.uint8).numpy()) for key, one in tensors.items()}


@pytest.mark.parametrize("options", [None, {}, {"writer": "fork"}, {"staging_budget_bytes": 1 << 20}], ids=str)
def test_a_save_stores_them(options: dict[str, Any] | None, tmp_path: Path) -> None:
    is_async = options is not None
    tensors = whole_tensors()
    saver = TorchDistSaveStrategy(options=SaveOptions(thread_count=1, **(options or {})))
    for number in range(2):  # planned, and as planned
        path = tmp_path / str(number)
        path.mkdir()
        if is_async:
            queue = AsyncCallsQueue()
            queue.schedule_async_request(saver.async_save(divided(tensors), path))
            queue.maybe_finalize_async_calls(blocking=True)
            queue.close()
        else:
            saver.save(divided(tensors), path)
        assert stored(path) == crcs(tensors)
        tensors["long"][3, 1000] += 1


def test_what_is_not_as_it_was_saved_is_named(tmp_path: Path) -> None:
    saved, target = tmp_path / "saved", tmp_path / "target"
    saved.mkdir()
    TorchDistSaveStrategy(options=SaveOptions()).save(divided(whole_tensors()), saved)
    index = read_index(saved)
    known = {**index.fingerprints, "columns": 1, "rows": 2}
    (saved / ".metadata").write_bytes(encode_metadata(replace(index).with_fingerprints(known)))
    assert main(["verify", str(saved)]) == 0
    assert document_of("verify", saved, "--state", code=1)["state"]["not_as_saved"] == ["rows", "columns"]
    with pytest.raises(ChecksumError, match="rows: what was written has the fingerprint"):
        reshard_checkpoint(saved, target, tp=1, pp=1)
    assert checkpoint_fingerprint(saved).tensors["columns"].crc32 == 1  # type: ignore[index]
