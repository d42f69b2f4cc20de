"""What the writer writes, read by a reader that was written from docs/format.md alone (`independent_reader`)."""

import hashlib
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import mcore_ckpt
from mcore_ckpt.format.tensor_pickle import DTYPES
from tests.format import independent_reader as independent
from tests.support.local_files import data_file

pytestmark = pytest.mark.quick

GOLDEN = sorted(path.parent for path in (Path(__file__).parent / "golden").glob("ours-*/.metadata"))


def write(path: Path, state: dict[str, Any], **keywords: Any) -> None:
    dcp.save(state, storage_writer=mcore_ckpt.FileSystemWriterAsync(str(path), **keywords), no_dist=True)


def of_dtype(name: str, count: int, generator: torch.Generator) -> torch.Tensor:
    """Random bits, so NaNs with payloads and both zeros are among them."""
    bits = torch.randint(0, 256, (16 * count,), dtype=torch.uint8, generator=generator)
    return (bits & 1 if name == "bool" else bits).view(getattr(torch, name))


def all_kinds() -> dict[str, torch.Tensor]:
    """Of all dtypes, with pickles of all forms of integers and tuples, and with one, two and more blocks."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1,) * axes for axes in range(9)]
    shapes += [(255,), (256,), (65535,), (65536,), (65536, 1, 1), (2, 300, 0), (0, 70000, 5, 40000, 30000)]
    shapes += [(1, 1, 1, 1, 70000), (1, 1, 1, 1, 300, 300)]  # heads with padding of 0 and of 60 bytes
    state = {str(shape): torch.zeros(shape, dtype=torch.float32) for shape in shapes}
    state |= {f"layers.{i}.weight": torch.full((i % 7 + 1, i % 3), float(i)) for i in range(300)}
    state |= {"größe/\u6743\u91cd": torch.ones(2), "lone \ud800": torch.ones(3), "": torch.ones(1)}
    for n in (524_287, 524_288, 1 << 20, (1 << 20) + 1, 2 << 20, (5 << 20) // 2):
        state[f"large.{n}"] = torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator)
    for name in independent.DTYPES:
        if name.startswith("bits") or not hasattr(torch, name):  # DCP's own planner knows no size of bits*
            continue
        tensor = of_dtype(name, 30, generator)
        state[f"{name}.matrix"] = tensor.reshape(3, -1)
        state[f"{name}.scalar"] = tensor[5].clone()
        state[f"{name}.empty"] = tensor[:0].reshape(3, 0, 7)
    return state


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
class TestOurs:
    def test_tensors(self, tmp_path: Path) -> None:
        assert set(independent.DTYPES) == set(DTYPES)
        state = all_kinds()
        write(tmp_path, state)
        read = independent.read_checkpoint(tmp_path)
        assert read.sealed
        assert set(read.tensors) == set(state)
        for key, tensor in state.items():
            array = read.tensors[key]
            assert array.shape == tuple(tensor.shape), key
            assert array.dtype == independent.DTYPES[str(tensor.dtype).removeprefix("torch.")], key
            assert array.tobytes() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), key
        sums = independent.split_metadata((tmp_path / ".metadata").read_bytes())[1]
        assert sums is not None
        assert sorted(map(len, sums.running.values())) == [1, 1, 2]

    def test_objects(self, tmp_path: Path) -> None:
        plain = {"tuple": ([1, 2.5, None, True, "ä"], {3: -4}), "long": 1 << 70, "text": "x" * 9000}
        others = {"size": torch.Size([2, 3]), "of tensors": (torch.ones(2), 1), "bytes": b"\0\xff" * 5000}
        write(tmp_path, {"t": torch.arange(5), **plain, **others})
        read = independent.read_checkpoint(tmp_path)
        assert read.tensors["t"].tolist() == [0, 1, 2, 3, 4]
        assert {key: pickle.loads(read.objects[key]) for key in plain} == plain
        assert read.objects.keys() == {*plain, *others}

    def test_without_the_seal_of_metadata_the_tables_of_the_files_tell(self, tmp_path: Path) -> None:
        state = {"t": torch.arange(5), "u": torch.arange(5) + 5, "o": "x"}
        write(tmp_path, state, thread_count=1)
        metadata = tmp_path / ".metadata"
        pickled = pickle.dumps(pickle.loads(metadata.read_bytes()))
        metadata.write_bytes(pickled)
        read = independent.read_checkpoint(tmp_path)
        assert not read.sealed
        assert {key: array.tolist() for key, array in read.tensors.items()} == {"t": [*range(5)], "u": [*range(5, 10)]}
        write(tmp_path / "other", {"t": torch.arange(5), "v": torch.arange(5) + 5, "o": "x"}, thread_count=1)
        shutil.copy(data_file(tmp_path / "other"), data_file(tmp_path))
        with pytest.raises(independent.CorruptError, match="the table of"):
            independent.read_checkpoint(tmp_path)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_golden(path: Path) -> None:
    expected = json.loads((path / "expected.json").read_text())
    read = independent.read_checkpoint(path)
    assert sorted(read.objects) == sorted(expected["objects"])
    assert set(read.tensors) == set(expected["tensors"])
    for key, entry in expected["tensors"].items():
        array = read.tensors[key]
        assert list(array.shape) == entry["shape"]
        assert array.dtype == independent.DTYPES[entry["dtype"]]
        assert hashlib.sha256(array.tobytes()).hexdigest() == entry["sha256"], key
