"""Diff: the same whatever the sharding, and by how much the rest differs."""

import argparse
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_ckpt import ChecksumError, checkpoint_fingerprint, open_checkpoint
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.fingerprints import TensorFingerprint, state_of
from mcore_ckpt.format.index import ObjectEntry, StoredItem
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.format.parameter_table import TABLE_MEMBER
from mcore_ckpt.format.zip_records import with_members
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from mcore_ckpt.tools.diff import DiffReport, TensorDiff, diff_checkpoints, model_and_optimizer
from tests.support.command import document_of, output_of, refusal_of
from tests.support.fsdp_ranks import MESHES, save_divided
from tests.support.gloo_ranks import run_ranks
from tests.support.local_files import flip
from tests.support.model_like import model_tensors, write_model
from tests.support.stored_layouts import flip_item, stock_item

KEY = "decoder.layers.0.mlp.linear_fc1.weight"
OTHER = "decoder.layers.1.self_attention.linear_proj.weight"


def compare(tmp_path: Path, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, TensorDiff]:
    write_model(tmp_path / "a", tp=1, tensors=a)
    write_model(tmp_path / "b", tp=2, tensors=b)
    report = diff_checkpoints(tmp_path / "a", tmp_path / "b")
    return {tensor.fqn: tensor for tensor in report.tensors}


def test_identical_under_different_sharding(tmp_path: Path) -> None:
    write_model(tmp_path / "a", tp=1)
    write_model(tmp_path / "b", tp=4)
    # The objects are one for each rank; everything else is the same.
    assert "identical" in output_of("diff", tmp_path / "a", tmp_path / "b", "--only", "*weight")
    write_model(tmp_path / "c", tp=4)
    assert main(["diff", str(tmp_path / "b"), str(tmp_path / "c")]) == 0


@pytest.mark.parametrize("option", ["rtol=nan", "atol=-1.0", "workers=0"])
def test_a_tolerance_that_is_none_is_refused(tmp_path: Path, option: str) -> None:
    name, _, value = option.partition("=")
    given: dict[str, Any] = {name: float(value) if "tol" in name else int(value)}
    with pytest.raises(OptionError, match=option):
        diff_checkpoints(tmp_path / "a", tmp_path / "b", values=False, **given)


def test_keys_on_one_side_objects_shapes_and_dtypes(tmp_path: Path) -> None:
    tensors = model_tensors()
    other = dict(tensors)
    del other["output_layer.weight"]
    other["extra.weight"] = torch.zeros(2)
    other[KEY] = tensors[KEY].float()
    other[OTHER] = torch.zeros(16, 32)
    write_model(tmp_path / "a", tp=2, tensors=tensors)
    write_model(tmp_path / "b", tp=2, tensors=other)
    report = document_of("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert report["only_in_a"] == ["output_layer.weight"]
    assert report["only_in_b"] == ["extra.weight"]
    found = {row["fqn"]: row for row in report["tensors"]}
    assert report["tensors"][0]["fqn"] == OTHER  # another shape differs most
    assert found[OTHER]["values"] is None
    assert (found[KEY]["dtype_b"], found[KEY]["values"]["differing"], found[KEY]["same"]) == ("float32", 0, False)
    assert (report["objects_differ"], report["objects_same"]) == ([], 2)


def test_an_object_with_a_table_of_parameters_is_that_of_megatron_which_writes_none(tmp_path: Path) -> None:
    tables = {"stock": {}, "ours": {TABLE_MEMBER: b"one"}, "others": {TABLE_MEMBER: b"another"}}
    for name, members in tables.items():
        index = write_model(tmp_path / name)
        (tmp_path / name / "__0_9.distcp").write_bytes(item := with_members(stock_item([[64]]), members))
        index.objects["buckets"] = ObjectEntry("buckets", StoredItem("__0_9.distcp", 0, len(item)))
        (tmp_path / name / ".metadata").write_bytes(encode_metadata(index))
    assert diff_checkpoints(tmp_path / "stock", tmp_path / "ours").identical
    assert diff_checkpoints(tmp_path / "ours", tmp_path / "others").objects_differ == ("buckets",)


def test_values(tmp_path: Path) -> None:
    a = model_tensors()
    b = {key: value.clone() for key, value in a.items()}
    b[KEY][3, 4] += 2.0
    b[OTHER][0, 0] *= 1.5
    found = compare(tmp_path, a, b)
    values = found[KEY].values
    assert values is not None
    difference = (a[KEY].double() - b[KEY].double()).abs()
    assert values.differing == 1
    assert values.max_abs == pytest.approx(float(difference.max()))
    scale = torch.maximum(a[KEY].double().abs(), b[KEY].double().abs())
    assert values.max_rel == pytest.approx(float((difference / scale).max()))
    assert [key for key, tensor in found.items() if not tensor.same] == list(found)[:2]
    assert {*list(found)[:2]} == {KEY, OTHER}
    assert all(tensor.values is not None and tensor.values.identical for key, tensor in found.items() if tensor.same)


def test_nans_and_infinities(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    a = {"x": torch.tensor([nan, nan, inf, inf, 0.0, 1.0]), "y": torch.tensor([nan, 1.0])}
    b = {"x": torch.tensor([nan, 2.0, inf, -inf, -0.0, 1.0]), "y": torch.tensor([nan, 1.0])}
    found = compare(tmp_path, a, b)
    x, y = found["x"].values, found["y"].values
    assert x is not None
    assert y is not None
    assert (x.nans_a, x.nans_b, x.nan_mismatches, x.differing, x.max_abs) == (2, 1, 2, 2, 0.0)
    assert not x.identical
    assert (y.identical, y.nans_a, y.nans_b) == (True, 1, 1)


def test_tolerance_and_keys_only(tmp_path: Path) -> None:
    write_model(tmp_path / "a", tp=1, tensors={"w": torch.ones(4)})
    write_model(tmp_path / "b", tp=1, tensors={"w": torch.ones(4) + 1e-3})
    arguments = ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "-q"]
    assert main(arguments) == 1
    assert main([*arguments, "--atol", "0.01"]) == 0
    assert main([*arguments, "--rtol", "0.0001"]) == 1
    assert main([*arguments, "--keys-only"]) == 0


def test_common_state(tmp_path: Path) -> None:
    for name, iteration in (("a", 10), ("b", 20), ("c", 10)):
        write_model(tmp_path / name, tp=2)
        common = {"iteration": iteration, "args": argparse.Namespace(seed=1), "loss": float("nan")}
        torch.save(common, tmp_path / name / "common.pt")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "c")]) == 0
    assert "common state differs: iteration" in output_of("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--only", "*"]) == 0
    (tmp_path / "b" / "common.pt").unlink()
    assert "common.pt: missing" in refusal_of("diff", tmp_path / "a", tmp_path / "b")


def test_arguments_that_differ_are_named(tmp_path: Path) -> None:
    many = {f"size_{number}": number for number in range(9)}
    saved = {
        "a": {"lr": 0.1, "only_here": 1, "same": 7, **many},
        "b": {"lr": 0.2, "same": 7, **dict.fromkeys(many, -1)},
    }
    for name, arguments in saved.items():
        write_model(tmp_path / name, tp=1, tensors={KEY: torch.ones(4, 4)})
        torch.save({"iteration": 7, "args": argparse.Namespace(**arguments)}, tmp_path / name / "common.pt")
    words = ["diff", str(tmp_path / "a"), str(tmp_path / "b")]
    shown = output_of(*words, code=1)
    assert "common state differs: args: lr 0.1 / 0.2, only_here 1 / (not there), size_0 0 / -1" in shown
    assert "(6 more, --all lists them)" in shown
    assert "same 7" not in shown
    assert "size_8 8 / -1\n" in output_of(*words, "--all", code=1)


def test_optimizers_of_two_layouts_are_not_compared_and_that_is_said(tmp_path: Path) -> None:
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.param"
    for name, key in (("a", bucket), ("b", f"optimizer.state.param.{KEY}")):
        write_model(tmp_path / name, tp=1, tensors={KEY: torch.zeros(4, 4), key: torch.zeros(4, 4)})
    shown = output_of("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert "Not compared: the optimizer's state, which A holds as dp_reshardable (1 keys) and B as fully_" in shown
    assert "only in A: " not in shown


class TestValuesOfTheCommonState:
    """What differs is said, whatever it is; what is the same is the same, however it is stored."""

    @staticmethod
    def report(tmp_path: Path, a: Any, b: Any) -> DiffReport:
        for name, value in (("a", a), ("b", b)):
            write_model(tmp_path / name, tp=1, tensors={KEY: torch.ones(4, 4)})
            torch.save({"value": value, "other": 1}, tmp_path / name / "common.pt")
        return diff_checkpoints(tmp_path / "a", tmp_path / "b")

    @pytest.mark.parametrize(
        ("a", "b"),
        [
            (torch.ones(2), torch.ones(2, dtype=torch.int32)),
            ({1: "A"}, {True: "A"}),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_it_is_said_that_they_differ(self, tmp_path: Path, a: Any, b: Any) -> None:
        report = self.report(tmp_path, a, b)
        assert not report.identical
        assert report.common_differs + report.not_compared == ("value",)

    @pytest.mark.parametrize(
        ("a", "b"),
        [
            (torch.arange(10.0)[2:5], torch.arange(2.0, 5.0)),
            ({"b", "a", "c"}, {"c", "a", "b"}),
            (torch.zeros(1).expand(10**9), torch.zeros(1).expand(10**9)),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_it_is_said_that_they_are_the_same(self, tmp_path: Path, a: Any, b: Any) -> None:
        # (another text, by which the files differ)
        assert self.report(tmp_path, {"it": a, "text": "x"}, {"text": "x", "it": b}).identical

    def test_a_damaged_one_is_no_other_value(self, tmp_path: Path) -> None:
        report = self.report(tmp_path, torch.tensor([65536.0]), torch.tensor([65536.0]))
        assert report.identical
        path = tmp_path / "b" / "common.pt"
        flip(path, path.read_bytes().index(torch.tensor([65536.0]).numpy().tobytes()) + 3)
        assert "common.pt" in refusal_of("diff", report.a, report.b)


# --- fingerprints -----------------------------------------------------------------------------------------------------

GOLDEN = Path(__file__).parents[1] / "format" / "golden"
ROWS = "decoder.layers.1.mlp.linear_fc1.weight"
COLUMNS = "decoder.layers.1.mlp.linear_fc2.weight"


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_whole_tensors_have_the_same_crc32(name: str) -> None:
    found = checkpoint_fingerprint(GOLDEN / name).tensors
    assert found is not None
    index = read_index(GOLDEN / name)
    with open_checkpoint(GOLDEN / name) as checkpoint:
        assert found.keys() == index.tensors.keys()
        for key, (dtype, shape, crc) in found.items():
            raw, original = checkpoint.tensors[key].raw(), index.original_shape(key)
            assert (dtype, shape) == (index.tensors[key].dtype, original or raw.shape)
            if original is not None:  # rows of a grid of flattened cells
                grid = raw.shape[:-1]
                cell = [size // count for size, count in zip(original, grid, strict=True)]
                axes = [axis for n in range(len(grid)) for axis in (n, len(grid) + n)]
                raw = raw.reshape(*grid, *cell).transpose(axes).reshape(original)
            assert crc == zlib.crc32(np.ascontiguousarray(raw)), key


def test_a_changed_element_and_damage(tmp_path: Path) -> None:
    tensors = model_tensors()
    write_model(tmp_path / "a", tp=2, tensors=tensors)
    write_model(tmp_path / "b", tp=1, tensors=tensors)
    stored = checkpoint_fingerprint(tmp_path / "a")
    assert stored == checkpoint_fingerprint(tmp_path / "b")
    model, optimizer = model_and_optimizer(stored)
    totals = {"total": stored.total, "model": model.total, "optimizer": optimizer.total}
    assert document_of("verify", tmp_path / "a", "--state")["state"] == {**totals, "not_as_saved": []}
    assert checkpoint_fingerprint(tmp_path / "a", only="*fc1*").tensors.keys() < tensors.keys()  # type: ignore[union-attr]
    changed = {**tensors, ROWS: tensors[ROWS].clone()}
    changed[ROWS].view(-1)[5] += 1
    write_model(tmp_path / "c", tp=1, tensors=changed)
    report = diff_checkpoints(tmp_path / "a", tmp_path / "c", state=True)
    assert [tensor.fqn for tensor in report.tensors if not tensor.same] == [ROWS]
    assert "other bits (" in output_of("diff", tmp_path / "a", tmp_path / "c", "--state", code=1)

    flip_item(read_index(tmp_path / "a"), COLUMNS)
    with pytest.raises(ChecksumError, match=COLUMNS):
        checkpoint_fingerprint(tmp_path / "a")
    assert "the state has no fingerprint: other things are wrong" in output_of(
        "verify", tmp_path / "a", "--state", code=1
    )
    assert torch.equal(tensors[COLUMNS], model_tensors()[COLUMNS])


def test_a_comparison_of_stored_fingerprints_says_that_it_has_read_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "columns", tp=2)
    reshard_checkpoint(tmp_path / "columns", tmp_path / "a", tp=1, pp=1)
    assert read_index(tmp_path / "a").fingerprints.keys() == model_tensors().keys()
    shutil.copytree(tmp_path / "a", tmp_path / "damaged")
    flip_item(read_index(tmp_path / "damaged"), COLUMNS)
    said = "; fingerprints compared as they are stored, without reading that data (mcore-ckpt verify does)"
    assert said in output_of("diff", tmp_path / "a", tmp_path / "damaged", "--state")
    assert main(["verify", str(tmp_path / "damaged")]) == 1


# Rows that no number of ranks divides, and fewer rows than ranks.
_SHAPES = {"mlp.up_proj.weight": (10, 6), "mlp.down_proj.weight": (6, 10), "norm.weight": (6,), "gate.weight": (3, 4)}


def _model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in _SHAPES.items()}
    return {key: torch.randn(shape, generator=generator) for key, shape in {**shapes, "head.weight": (13, 6)}.items()}


def test_fsdp2_has_the_fingerprint_of_the_undivided_model(tmp_path: Path) -> None:
    tensors = _model()
    stored = {f"model.{key}": zlib.crc32(tensor.numpy()) for key, tensor in tensors.items()}
    of_tensors = {f"model.{key}": tuple(tensor.shape) for key, tensor in tensors.items()}
    alone = state_of({key: TensorFingerprint("float32", shape, stored[key]) for key, shape in of_tensors.items()})
    run_ranks(save_divided, 4, tmp_path, tensors)
    for name in MESHES:
        for side in ("ours", "stock"):
            assert checkpoint_fingerprint(tmp_path / f"{name}-{side}").total == alone.total
        ours, stock = tmp_path / f"{name}-ours", tmp_path / f"{name}-stock"
        assert read_index(ours).fingerprints == stored
        assert read_index(stock).fingerprints == {}
        assert main(["verify", str(ours), "--state"]) == 0
        for other in (stock, tmp_path / "fsdp-ours"):
            assert main(["diff", str(ours), str(other), "--state"]) == 0
