"""A tensor stored in another dtype than its destination's: converted to the bits that `copy_` makes, or refused."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode

import mcore_ckpt
from mcore_ckpt import open_checkpoint
from mcore_ckpt.core.errors import DtypeMismatchError
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.dcp.reader import FileSystemReader, MCoreLoadPlanner
from mcore_ckpt.dcp.writer import FileSystemWriterAsync, MCoreSavePlanner
from mcore_ckpt.load.reader import read_shards
from mcore_ckpt.load.requests import ReadRequest
from tests.support.kept_log import kept_log
from tests.support.stored_saves import shard

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values")

REFUSE = LoadOptions(on_dtype_mismatch="raise")
SHAPES = {"small": (40, 50), "large": (700, 1000), "scalar": ()}
PAIRS = {
    torch.bfloat16: torch.float32,
    torch.float32: torch.bfloat16,
    torch.float16: torch.float8_e4m3fn,
    torch.float64: torch.int32,
    torch.complex64: torch.float32,
    torch.bool: torch.float32,
}


def state(*dtypes: torch.dtype) -> dict[str, torch.Tensor]:
    """A tensor of each dtype and shape under `DTYPE.SHAPE`, and one that needs no conversion."""
    generator = torch.Generator().manual_seed(5)
    wide = {name: torch.randn(shape, generator=generator, dtype=torch.float64) * 100 for name, shape in SHAPES.items()}
    found = {f"{dtype}.{name}": tensor.to(dtype) for dtype in dtypes for name, tensor in wide.items()}
    return {**found, "same": torch.ones(3, dtype=torch.int8)}


def save(directory: Path, *dtypes: torch.dtype) -> None:
    dcp.save(state(*dtypes), storage_writer=FileSystemWriterAsync(directory), no_dist=True)


def empty(shape: torch.Size, dtype: torch.dtype, strided: bool) -> torch.Tensor:
    if not strided:
        return torch.zeros(shape, dtype=dtype)
    return torch.zeros(shape[::-1], dtype=dtype).permute(tuple(range(len(shape)))[::-1])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def by_requests(reader: FileSystemReader, into: dict[str, torch.Tensor]) -> None:
    reader.read_items([ReadRequest(key, t, (0,) * t.dim(), tuple(t.shape)) for key, t in into.items()])


def by_shards(reader: FileSystemReader, into: dict[str, torch.Tensor]) -> None:
    """As Megatron's strategy, which reads small tensors by the column."""
    shards = [shard(key, tensor, tuple(tensor.shape), (0,) * tensor.dim()) for key, tensor in into.items()]
    for each in shards:
        each.allow_shape_mismatch = each.key.endswith("small")
    read_shards(reader, shards)


def by_dcp(reader: FileSystemReader, into: dict[str, torch.Tensor]) -> None:
    dcp.load(into, storage_reader=reader, no_dist=True)


def by_planner(reader: FileSystemReader, into: dict[str, torch.Tensor]) -> None:
    planner = mcore_ckpt.MCoreLoadPlanner(options=reader.options)
    dcp.load(into, storage_reader=reader, planner=planner, no_dist=True)


WAYS = [by_requests, by_shards, by_dcp, by_planner]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strided", [False, True])
def test_what_arrives_is_what_copy_makes(
    strided: bool, way: Callable[[FileSystemReader, dict[str, torch.Tensor]], None], tmp_path: Path
) -> None:
    save(tmp_path, *PAIRS)
    saved = state(*PAIRS)
    wanted = {f"{stored}.{name}": dtype for stored, dtype in PAIRS.items() for name in SHAPES}
    into = {key: empty(tensor.shape, wanted.get(key, torch.int8), strided) for key, tensor in saved.items()}
    with kept_log() as said:
        way(FileSystemReader(tmp_path), into)
    (text,) = said
    for part in (f"{3 * len(PAIRS)} tensors", "3 from bfloat16 to float32 (torch.bfloat16.", str(tmp_path)):
        assert part in text
    for key, tensor in saved.items():
        expected = torch.empty(tensor.shape, dtype=into[key].dtype).copy_(tensor)
        assert bits(into[key]).equal(bits(expected)), key


@pytest.mark.parametrize("way", WAYS)
def test_raise_refuses_and_names_the_key(
    way: Callable[[FileSystemReader, dict[str, torch.Tensor]], None], tmp_path: Path
) -> None:
    save(tmp_path, torch.bfloat16)
    for key, tensor in state(torch.bfloat16).items():
        reader = FileSystemReader(tmp_path, options=REFUSE)
        into = {key: torch.zeros(tensor.shape)}
        message = f"{key}.*{str(tensor.dtype)[6:]}.*float32.*on_dtype_mismatch"
        with pytest.raises((DtypeMismatchError, dcp.CheckpointException), match=message):
            way(reader, into)
        assert reader.stats.reads == 0
        assert not into[key].any()
        same = {key: torch.zeros_like(tensor)}
        way(reader, same)
        assert same[key].equal(tensor)


# --- within a default device, and torch's modes -----------------------------------------------------------------------


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default device": default_device,
    "device": lambda: torch.device("meta"),
    "no such device": lambda: torch.device("cuda:7"),
    "fake tensors": FakeTensorMode,
}
TENSORS = {"small": torch.arange(12.0).view(3, 4), "long": torch.arange(2.0**20)}


def state_of(tensors: dict[str, torch.Tensor], lr: float) -> dict[str, Any]:
    return {**tensors, "options": {"lr": lr, "moment": torch.full((3,), lr)}}


@pytest.mark.parametrize("mode", MODES)
def test_a_save_and_a_load_by_dcp_within_a_mode(tmp_path: Path, mode: str) -> None:
    state = state_of(TENSORS, 0.5)
    blank = state_of({key: torch.zeros_like(value) for key, value in TENSORS.items()}, 0.0)
    blank["options"]["moment"] = blank["options"]["moment"].t()
    with MODES[mode]():
        dcp.save(state, storage_writer=FileSystemWriterAsync(tmp_path), planner=MCoreSavePlanner(), no_dist=True)
        dcp.load(blank, storage_reader=FileSystemReader(tmp_path), planner=MCoreLoadPlanner(), no_dist=True)
        part = open_checkpoint(tmp_path)["small"][1:]
    assert all(blank[key].equal(value) for key, value in TENSORS.items())
    assert blank["options"]["lr"] == 0.5
    assert blank["options"]["moment"].tolist() == [0.5] * 3
    assert part.equal(TENSORS["small"][1:])
