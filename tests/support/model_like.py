"""A checkpoint with keys, shapes and chunk grids of a small Megatron model, written item by item with torch.save."""

import io
import os
import signal
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.metadata_read import encode_config
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.reshard import reshard
from tests.support.gloo_ranks import start_apart
from tests.support.meanwhile import behind

LAYERS = 2
HIDDEN, FFN, VOCABULARY = 16, 32, 48


def model_tensors(seed: int = 0, *, optimizer: bool = True) -> dict[str, torch.Tensor]:
    """Weights of a gated model, and its Adam state."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    model = {"embedding.word_embeddings.weight": make(VOCABULARY, HIDDEN).bfloat16()}
    for layer in range(LAYERS):
        prefix = f"decoder.layers.{layer}"
        model |= {
            f"{prefix}.self_attention.linear_qkv.weight": make(3 * HIDDEN, HIDDEN).bfloat16(),
            f"{prefix}.self_attention.linear_qkv.bias": make(3 * HIDDEN).bfloat16(),
            f"{prefix}.self_attention.linear_proj.weight": make(HIDDEN, HIDDEN).bfloat16(),
            f"{prefix}.mlp.linear_fc1.layer_norm_weight": make(HIDDEN).bfloat16(),
            f"{prefix}.mlp.linear_fc1.weight": make(2 * FFN, HIDDEN).bfloat16(),
            f"{prefix}.mlp.linear_fc2.weight": make(HIDDEN, FFN).bfloat16(),
        }
    model |= {
        "decoder.final_layernorm.weight": make(HIDDEN).bfloat16(),
        "output_layer.weight": make(VOCABULARY, HIDDEN).bfloat16(),
    }
    states = {}
    if optimizer:
        for key, value in model.items():
            for state in ("param", "exp_avg", "exp_avg_sq"):
                states[f"optimizer.state.{state}.{key}"] = make(*value.shape)
    return {**model, **states}


_COLUMN = ("linear_qkv.weight", "linear_qkv.bias", "word_embeddings.weight", "output_layer.weight")
_ROW = ("linear_proj.weight", "linear_fc2.weight")


def _boxes(key: str, shape: tuple[int, ...], tp: int) -> list[tuple[Box, int]]:
    """Chunks and their tensor-parallel ranks, as Megatron stores them."""
    if key.endswith("linear_fc1.weight"):
        step = shape[0] // (2 * tp)
        return [(Box((n * step, 0), (step, shape[1])), n % tp) for n in range(2 * tp)]
    if key.endswith(_COLUMN):
        step = shape[0] // tp
        return [(Box((n * step, *(0,) * (len(shape) - 1)), (step, *shape[1:])), n) for n in range(tp)]
    if key.endswith(_ROW):
        step = shape[1] // tp
        return [(Box((0, n * step), (shape[0], step)), n) for n in range(tp)]
    return [(Box((0,) * len(shape), shape), 0)]


def write_model(
    directory: Path,
    tp: int = 2,
    *,
    tensors: dict[str, torch.Tensor] | None = None,
    arguments: dict[str, Any] | None = None,
    iteration: int = 7,
) -> CheckpointIndex:
    """Write the checkpoint in stock items, two files for each of `tp` ranks, objects first."""
    tensors = model_tensors() if tensors is None else tensors
    directory.mkdir(parents=True)
    contents: dict[str, bytearray] = {f"__{rank}_{n}.distcp": bytearray() for rank in range(tp) for n in range(2)}

    def store(file: str, value: Any) -> StoredItem:
        stream = io.BytesIO()
        torch.save(value, stream)
        offset = len(contents[file])
        contents[file] += stream.getvalue()
        return StoredItem(file, offset, stream.tell())

    objects = {}
    for rank in range(tp):
        key = f"rng_state/shard_0.{rank}_1.{tp}"
        objects[key] = ObjectEntry(key, store(f"__{rank}_0.distcp", [{"rank": rank}]))
    entries = {}
    count = 0
    for key, tensor in tensors.items():
        chunks = []
        for box, rank in _boxes(key, tuple(tensor.shape), tp):
            count += 1
            slices = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.sizes, strict=True))
            item = store(f"__{rank}_{count % 2}.distcp", tensor[slices].clone())
            chunks.append(StoredChunk(box.offsets, box.sizes, item))
        entries[key] = TensorEntry(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(chunks))
    for file, content in contents.items():
        (directory / file).write_bytes(content)
    index = CheckpointIndex(str(directory), entries, objects)
    (directory / ".metadata").write_bytes(encode_metadata(index))
    (directory / "metadata.json").write_bytes(encode_config())
    common = Namespace(**(arguments or {"tensor_model_parallel_size": tp, "swiglu": True}))
    torch.save({"iteration": iteration, "args": common}, directory / "common.pt")
    return index


def read_all(directory: Path, reader_class: Any = dcp.FileSystemReader) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, read by torch.distributed.checkpoint alone, or with another reader."""
    reader = reader_class(directory)
    metadata = reader.read_metadata()
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        other = found[key]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), key
        assert torch.equal(other.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), key


def reshard_killed(source: Path, target: Path | str) -> None:
    """Reshard to TP 2 in a process that is killed when all is written but `.metadata`."""
    process = start_apart(_reshard_and_die, source, target)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _reshard_and_die(source: Path, target: Path | str) -> None:
    with behind(reshard, "_carry_sidecars", lambda *_: os.kill(os.getpid(), signal.SIGKILL)):
        reshard.reshard_checkpoint(source, target, tp=2, pp=1)
