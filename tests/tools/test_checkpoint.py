"""`open_checkpoint` and `mcore-ckpt cat`: slices are what torch would give, and only what they need is read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import mcore_ckpt
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import ChecksumError
from mcore_ckpt.tools.checkpoint import open_checkpoint
from mcore_ckpt.tools.payloads import StoredPayloads
from tests.support.command import document_of, refusal_of
from tests.support.local_files import flip
from tests.support.meanwhile import ahead_of
from tests.support.model_like import model_tensors, write_model
from tests.support.stored_layouts import StoredTensor, tilings, write_checkpoint

pytestmark = pytest.mark.quick

KEY = "decoder.layers.0.mlp.linear_fc1.weight"


def test_a_checkpoint_is_a_mapping(checkpoint: Path) -> None:
    with mcore_ckpt.open_checkpoint(checkpoint) as ckpt:
        tensors = model_tensors()
        assert set(ckpt.tensors) == set(tensors)
        assert set(ckpt) == set(tensors) | set(ckpt.objects)
        assert len(ckpt) == len(tensors) + 2
        for key, tensor in tensors.items():
            lazy = ckpt[key]
            assert (lazy.shape, lazy.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            assert torch.equal(lazy.torch(), tensor)
        assert ckpt["rng_state/shard_0.1_1.2"] == [{"rank": 1}]
        assert ckpt.common_state()["iteration"] == 7
        assert [row.file for row in ckpt.files] == [f"__{r}_{n}.distcp" for r in range(2) for n in range(2)]
        assert ckpt.summary.tensors == len(tensors)


@pytest.mark.parametrize(
    "index",
    [np.s_[0:4, :], np.s_[...], np.s_[-1, 2:], np.s_[1:60:7, ::3], np.s_[:, 15:3], np.s_[20, 4], np.s_[30:34, ...]],
    ids=str,
)
def test_slices(checkpoint: Path, index: Any) -> None:
    tensor = model_tensors()[KEY]
    with mcore_ckpt.open_checkpoint(checkpoint) as ckpt:
        found = ckpt[KEY][index]
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor[index])
        assert np.array_equal(ckpt[KEY].numpy(index), tensor[index].float().numpy())
        assert np.array_equal(ckpt[KEY].raw(index), tensor.view(torch.int16).numpy().view(np.uint16)[index])
        assert isinstance(ckpt[KEY].numpy(index), np.ndarray)


def test_what_is_no_slice(checkpoint: Path) -> None:
    with mcore_ckpt.open_checkpoint(checkpoint) as ckpt:
        for index in (np.s_[0, 0, 0], np.s_[64], np.s_[..., ...], np.s_[[1, 2]], np.s_[::-1], np.s_[None], np.s_[True]):
            with pytest.raises(IndexError, match=KEY):
                ckpt[KEY][index]


@given(data=st.data(), shape=st.lists(st.integers(1, 6), max_size=3).map(tuple))
def test_any_box_of_any_tiling(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, shape: tuple[int, ...]
) -> None:
    directory = tmp_path_factory.mktemp("box")
    tensor = torch.randn(shape, dtype=torch.float64)
    write_checkpoint(directory / "c", {"t": StoredTensor(tensor, data.draw(tilings(shape)))})
    index = tuple(slice(data.draw(st.integers(0, size)), data.draw(st.integers(0, size))) for size in shape)
    with mcore_ckpt.open_checkpoint(directory / "c") as ckpt:
        assert torch.equal(ckpt["t"][index], tensor[index])


def test_a_slice_reads_what_it_needs(tmp_path: Path) -> None:
    tensor = torch.randn(2048, 2048)
    write_model(tmp_path / "c", tp=1, tensors={"w": tensor})
    read: list[int] = []
    counting = ahead_of(StoredPayloads, "read_into", lambda *given: read.append(len(given[-1])))
    with counting, mcore_ckpt.open_checkpoint(tmp_path / "c") as ckpt:
        lazy = ckpt["w"]
        assert not read
        assert torch.equal(lazy[100:104, :], tensor[100:104])
        assert sum(read) == 4 * 2048 * 4


def test_dtypes_without_numpy(tmp_path: Path) -> None:
    values = torch.tensor([[1.0, -2.5], [0.0, 448.0]])
    dtypes = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.bool, torch.complex64]
    tensors = {f"t.{dtype}": values.to(dtype) for dtype in dtypes}
    write_checkpoint(tmp_path / "c", {key: StoredTensor(t, [Box((0, 0), (2, 2))]) for key, t in tensors.items()})
    with mcore_ckpt.open_checkpoint(tmp_path / "c") as ckpt:
        for key, tensor in tensors.items():
            assert ckpt[key].torch().dtype == tensor.dtype
            expected = tensor.float() if tensor.dtype.itemsize < 4 and tensor.dtype.is_floating_point else tensor
            assert np.array_equal(np.asarray(ckpt[key]), expected.numpy())


class TestCat:
    def test_head_slice_and_stats(self, checkpoint: Path) -> None:
        tensor = model_tensors()[KEY].float()
        shown = document_of("cat", checkpoint, KEY, "--stats", "--slice", "0:2, :3")
        assert np.array(shown["values"]) == pytest.approx(tensor[0:2, :3].numpy(), rel=1e-6)
        assert shown["stats"]["elements"] == 6
        assert shown["stats"]["maximum"] == pytest.approx(float(tensor[0:2, :3].max()))
        stats = document_of("cat", checkpoint, KEY, "--stats")["stats"]
        assert stats["elements"] == tensor.numel()
        assert stats["minimum"] == pytest.approx(float(tensor.min()))
        assert stats["mean"] == pytest.approx(float(tensor.double().mean()), rel=1e-6)
        assert stats["std"] == pytest.approx(float(tensor.double().std(unbiased=False)), rel=1e-6)
        assert stats["norm"] == pytest.approx(float(tensor.double().norm()), rel=1e-6)

    def test_the_spread_of_large_numbers(self, tmp_path: Path) -> None:
        """Of token ids, say: their squares leave a double no digits for it."""
        numbers = 2**62 + torch.arange(700_000)
        dcp.save({"ids": numbers}, checkpoint_id=tmp_path, no_dist=True)
        stats = document_of("cat", tmp_path, "ids", "--stats")["stats"]
        assert stats["std"] == pytest.approx(700_000 / 12**0.5, rel=1e-6)

    @pytest.mark.parametrize(
        ("dtype", "values", "derived"),
        [(torch.int64, [-(2**53) - 1, 2**53 + 1], 0), (torch.float64, [1e308, 1e308, -1.0], None)],
        ids=str,
    )
    def test_large_values_are_exact_or_not_told(
        self, dtype: torch.dtype, values: list[float], derived: float | None, tmp_path: Path, capfd: Any
    ) -> None:
        write_model(tmp_path / "c", tp=1, tensors={"t": torch.tensor(values, dtype=dtype)})
        assert main(["cat", str(tmp_path / "c"), "t", "--stats", "--json"]) == 0
        told = capfd.readouterr()
        stats = json.loads(told.out)["stats"]
        assert (stats["minimum"], stats["maximum"], stats["mean"]) == (min(values), max(values), derived)
        assert (stats["std"] is None) == (derived is None)
        assert told.err == ""

    def test_nans_and_infinities(self, tmp_path: Path) -> None:
        write_model(tmp_path / "c", tp=1, tensors={"t": torch.tensor([1.0, float("nan"), float("inf"), 0.0])})
        shown = document_of("cat", tmp_path / "c", "t", "--stats")
        assert (shown["stats"]["nans"], shown["stats"]["infinities"], shown["stats"]["zeros"]) == (1, 1, 1)
        assert shown["values"] == [1.0, "nan", "inf", 0.0]

    def test_a_slice_may_end_with_a_comma_and_begin_with_a_minus(self, checkpoint: Path) -> None:
        for written in ("--slice=-1,-1", "--slice=0:4:2,", "--slice=[..., ::2]"):
            assert main(["cat", str(checkpoint), KEY, written]) == 0

    def test_an_object_and_a_part_of_a_key(self, checkpoint: Path) -> None:
        assert document_of("cat", checkpoint, "shard_0.1")["value"] == [{"rank": 1}]

    @pytest.mark.parametrize(
        "arguments", [["nothing"], *([KEY, "--slice", each] for each in ("99", "::0", "::-1", "-", "0,,1"))]
    )
    def test_what_cannot_be_shown(self, checkpoint: Path, arguments: list[str]) -> None:
        assert refusal_of("cat", checkpoint, *arguments).count("\n") == 1


def test_a_chunk_that_is_read_as_a_whole_is_held_against_its_checksum(tmp_path: Path) -> None:
    """Bytes that are wrong do not pass for a tensor: not whole, not as two chunks, and not in a torch file."""
    tensor = torch.arange(64.0).reshape(8, 8)
    columns = [Box((0, 0), (8, 4)), Box((0, 4), (8, 4))]
    for name, boxes in (("one", [Box((0, 0), (8, 8))]), ("two", columns)):
        index = write_checkpoint(tmp_path / name, {"w": StoredTensor(tensor, boxes)})
        item = index.tensors["w"].chunks[-1].item
        path = tmp_path / name / item.file
        flip(path, path.read_bytes().index(tensor[7, -4:].numpy().tobytes()))
        with open_checkpoint(tmp_path / name) as checkpoint, pytest.raises(ChecksumError, match="w at"):
            checkpoint["w"].torch()
        assert main(["export", str(tmp_path / name), str(tmp_path / "e"), "--to", "torch"]) == 2
        assert not (tmp_path / "e").exists()
