"""Export and import: what others read is what was stored, and comes back the same."""

import json
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.small_run import write_llama
from mcore_ckpt import models
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import (
    ChecksumError,
    CorruptCheckpointError,
    LoadError,
    OptionError,
    UnsafePickleError,
)
from mcore_ckpt.format.index import StoredChunk, TensorEntry
from mcore_ckpt.format.metadata_read import HF_INDEX, read_index
from mcore_ckpt.models.conversions import export_checkpoint, import_checkpoint, merge_checkpoints
from mcore_ckpt.reshard import conversion
from mcore_ckpt.reshard.options import parse_rename_rules
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from mcore_ckpt.reshard.view import DerivedPayloads
from mcore_ckpt.reshard.weight_files import safetensors_header
from mcore_ckpt.tools.payloads import StoredPayloads
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.support.command import output_of
from tests.support.local_files import contents, flip
from tests.support.meanwhile import ahead_of, behind, interrupted_at
from tests.support.model_like import assert_same, model_tensors, read_all, write_model
from tests.support.stored_layouts import flip_item

Capture = pytest.CaptureFixture[str]


def read_by_definition(path: Path) -> dict[str, torch.Tensor]:
    """safetensors as the format's own page describes it, in a dozen lines."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "I64": torch.int64}
    tensors, covered = {}, 0
    for name, fields in header.items():
        start, stop = fields["data_offsets"]
        assert start == covered  # no holes
        covered = stop
        data = np.frombuffer(content[8 + length + start : 8 + length + stop], np.uint8).copy()
        tensors[name] = torch.from_numpy(data).view(dtypes[fields["dtype"]]).reshape(fields["shape"])
    assert 8 + length + covered == len(content)
    return tensors


def test_safetensors_as_hugging_face_names_them(checkpoint: Path, tmp_path: Path) -> None:
    report = export_checkpoint(checkpoint, tmp_path / "one")
    assert report.files == ("model.safetensors",)
    assert len(report.left_out) == 2
    assert_same(read_by_definition(tmp_path / "one" / "model.safetensors"), model_tensors())
    export_checkpoint(checkpoint, tmp_path / "e", max_shard_bytes=20_000)
    document = json.loads((tmp_path / "e" / "model.safetensors.index.json").read_bytes())
    files = sorted(path.name for path in (tmp_path / "e").glob("*.safetensors"))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 2
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        found = read_by_definition(tmp_path / "e" / file)
        assert sum(tensor.nbytes for tensor in found.values()) <= 20_000
        assert {document["weight_map"][name] for name in found} == {file}
        tensors |= found
    assert_same(tensors, model_tensors())
    assert document["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e", "one"]


def test_torch_reads_what_is_written_for_it(checkpoint: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    export_checkpoint(checkpoint, tmp_path / "s", to="torch", max_shard_bytes=20_000)
    weights = json.loads((tmp_path / "s" / "pytorch_model.bin.index.json").read_bytes())["weight_map"]
    tensors: dict[str, Any] = {}
    for file in set(weights.values()):
        tensors |= torch.load(tmp_path / "s" / file, weights_only=True)
    assert_same(tensors, model_tensors())
    export_checkpoint(checkpoint, tmp_path / "e", to="dcp")
    assert sorted(path.name for path in (tmp_path / "e").iterdir()) == [".metadata", "__0_0.distcp"]
    dcp_to_torch_save(tmp_path / "e", tmp_path / "flat.pt")
    assert_same(torch.load(tmp_path / "flat.pt", weights_only=True), model_tensors())


@pytest.mark.parametrize(("to", "layout"), [("safetensors", (4, 2)), ("torch", (1, 1)), ("dcp", (4, 2))], ids=str)
def test_there_and_back(checkpoint: Path, tmp_path: Path, to: Any, layout: tuple[int, int]) -> None:
    export_checkpoint(checkpoint, tmp_path / "e", to=to)
    report = import_checkpoint(tmp_path / "e", tmp_path / "i", tp=layout[0], pp=layout[1])
    assert report.format == to
    assert_same(read_all(tmp_path / "i"), model_tensors())
    assert verify_checkpoint(tmp_path / "i").whole
    assert json.loads((tmp_path / "i" / "metadata.json").read_bytes())["sharded_backend"] == "torch_dist"
    assert torch.load(tmp_path / "i" / "common.pt", weights_only=True) == {}
    chunks = read_index(tmp_path / "i").tensors["decoder.layers.0.self_attention.linear_qkv.weight"].chunks
    assert len(chunks) == layout[0]


def test_rename_only_drop_and_dtype(checkpoint: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text(
        "# to another library's names\n^decoder\\.layers\\.(\\d+)\\.  model.layers.\\1.\noutput_layer  -\n"
    )
    arguments = ["--rename", str(rules), "--drop-optimizer", "--dtype", "fp32"]
    assert main(["export", str(checkpoint), str(tmp_path / "e"), *arguments, "-q"]) == 0
    found = read_by_definition(tmp_path / "e" / "model.safetensors")
    expected = {
        key.replace("decoder.layers.", "model.layers."): value.float()
        for key, value in model_tensors(optimizer=False).items()
        if "output_layer" not in key
    }
    assert_same(found, expected)
    back = tmp_path / "back"
    back.write_text("^model\\.layers\\.(\\d+)\\.  decoder.layers.\\1.\n")
    words = ["import", str(tmp_path / "e"), str(tmp_path / "i"), "--rename", str(back), "--dtype", "bf16", "--tp", "2"]
    assert main(words) == 0
    wanted = {key: value for key, value in model_tensors(optimizer=False).items() if "output_layer" not in key}
    assert_same(read_all(tmp_path / "i"), wanted)


def test_an_import_that_cannot_be_divided_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    export_checkpoint(checkpoint, tmp_path / "e")
    refused(tmp_path / "e", OptionError, r"cannot be divided as TP 5.*linear_proj\.weight \(axis of 16\)", tp=5)
    assert import_checkpoint(tmp_path / "e", tmp_path / "i", tp=5, allow_whole=True).target_layout.startswith("TP 5")


def refused(source: Path, error: type[Exception], match: str, **options: Any) -> None:
    """An import that ends in this error, and leaves nothing."""
    with pytest.raises(error, match=match):
        import_checkpoint(source, source.with_name("refused"), **options)
    assert not source.with_name("refused").exists()


class TestRefusals:
    def test_names_that_collide(self, checkpoint: Path, tmp_path: Path) -> None:
        rules = parse_rename_rules(r"layers\.\d+ layers.0", "r")
        with pytest.raises(OptionError, match="would both be called"):
            export_checkpoint(checkpoint, tmp_path / "e", to="safetensors", rename=tuple(rules))
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("line", ["one", "a b c", "( x"])
    def test_rename_rules_that_are_none(self, line: str) -> None:
        with pytest.raises(OptionError, match="r, line 1"):
            parse_rename_rules(line, "r")


def fields(dtype: str, shape: list[Any], offsets: list[int]) -> str:
    """The header of a file with one tensor."""
    return json.dumps({"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}})


def safetensors_file(entries: dict[str, tuple[int, int]] | str | bytes, data_bytes: int) -> bytes:
    """A file of F32 tensors at byte ranges of the data; or with that very header; or of these bytes."""
    if isinstance(entries, bytes):
        return entries
    if not isinstance(entries, str):
        entries = json.dumps(
            {
                key: {"dtype": "F32", "shape": [(stop - start) // 4], "data_offsets": [start, stop]}
                for key, (start, stop) in entries.items()
            }
        )
    header = entries.encode()
    return struct.pack("<Q", len(header)) + header + bytes(data_bytes)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("never",)


def _circle() -> dict[str, Any]:
    circle: dict[str, Any] = {"w": torch.ones(2)}
    circle["again"] = circle
    return circle


class TestNothingIsLost:
    """Every key of what is imported arrives or is named; what cannot be told apart is refused."""

    @pytest.mark.parametrize(
        ("content", "error", "says"),
        [
            ({"a": {"b": torch.zeros(2)}, "a.b": torch.ones(2)}, CorruptCheckpointError, "would both be called"),
            ({1: torch.zeros(2), "1": torch.ones(2)}, CorruptCheckpointError, "would both be called"),
            ({"w": torch.ones(2, 2).to_sparse()}, CorruptCheckpointError, r"x\.pt"),
            ({"w": torch.ones(1).expand(2**40)}, CorruptCheckpointError, r"x\.pt"),
            (_circle(), CorruptCheckpointError, "nested"),
            ({"t": torch.zeros(2), "evil": _Evil()}, UnsafePickleError, "evil"),
        ],
        ids=["dict first", "number", "sparse", "expanded", "circle", "code"],
    )
    def test_torch_files_that_hold_more_or_less_than_tensors(
        self, tmp_path: Path, content: Any, error: type[Exception], says: str
    ) -> None:
        torch.save(content, tmp_path / "x.pt")
        refused(tmp_path / "x.pt", error, says)

    def test_a_torch_file_with_nested_dicts_and_other_values(self, tmp_path: Path) -> None:
        tensors = {"a": {"b": torch.randn(3, 5).t(), "c": {"d": torch.arange(4)}}, "step": 3}
        torch.save({**tensors, "opt": {"groups": [torch.zeros(2)]}}, tmp_path / "x.pt")
        report = import_checkpoint(tmp_path / "x.pt", tmp_path / "t")
        assert (report.tensors, report.left_out) == (2, ("step", "opt.groups"))
        expected = {"a.b": tensors["a"]["b"].contiguous(), "a.c.d": tensors["a"]["c"]["d"]}  # type: ignore[index]
        assert_same(read_all(tmp_path / "t"), expected)

    def test_objects_of_a_checkpoint_are_named(self, checkpoint: Path, tmp_path: Path) -> None:
        objects = tuple(read_index(checkpoint).objects)
        assert import_checkpoint(checkpoint, tmp_path / "d").left_out == objects
        assert export_checkpoint(checkpoint, tmp_path / "e").left_out == objects

    @pytest.mark.parametrize(
        ("entries", "data_bytes", "says"),
        [
            ({"a": (0, 8), "b": (4, 12)}, 12, "it overlaps a"),
            ({"a": (0, 8), "b": (12, 20)}, 20, "bytes before it belong to no tensor"),
            ({"a": (0, 8)}, 12, "tensors are missing from its header"),
            (fields("F32", [4], [0, 12]), 16, "expected 16 bytes"),
            (fields("F32", [-4], [0, 16]), 16, "non-negative"),
            (fields("F33", [4], [0, 16]), 16, "dtype 'F33' is not known"),
            (struct.pack("<Q", 2**62) + b"{}", 0, "a header of 4611686018427387904 bytes in a file of 10"),
            (struct.pack("<Q", 5) + b"\xff\xff\xff\xff\xff", 0, "not JSON"),
            ('{"a": {"dtype": "F32"}, "a": {"dtype": "F32"}}', 4, "'a' is in it twice"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_safetensors_that_do_not_add_up(self, tmp_path: Path, entries: Any, data_bytes: int, says: str) -> None:
        (tmp_path / "x.safetensors").write_bytes(safetensors_file(entries, data_bytes))
        refused(tmp_path / "x.safetensors", CorruptCheckpointError, says)

    @pytest.mark.parametrize(
        ("mapped", "says"),
        [
            ({"a": "x.safetensors", "gone": "x.safetensors"}, "gone is not in x.safetensors, but in no file"),
            ({"a": "../x.safetensors"}, "expected the name of a file next to it"),
            ({}, "expected a `weight_map`"),
        ],
        ids=["no file", "above", "empty"],
    )
    def test_an_index_that_the_files_do_not_bear_out(self, tmp_path: Path, mapped: dict[str, Any], says: str) -> None:
        source = tmp_path / "s"
        (source / "sub").mkdir(parents=True)
        (source / "x.safetensors").write_bytes(safetensors_file({"a": (0, 4)}, 4))
        (source / "y.safetensors").write_bytes(safetensors_file({"b": (0, 4)}, 4))
        (source / "sub" / "x.safetensors").write_bytes(safetensors_file({"a": (0, 4)}, 4))
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": mapped}))
        refused(source, CorruptCheckpointError, says)

    @pytest.mark.parametrize("name", ["shard-00001-model-00001-of-00001", "renamed"])
    def test_slices_of_tensors_are_no_tensors(self, tmp_path: Path, name: str) -> None:
        """As DCP's HuggingFaceStorageWriter(save_distributed=True) leaves them, on a node of several."""
        offsets = {"a": {"saved_offsets": [0, 0]}, "b": {"saved_offsets": [3 if name == "renamed" else 0, 0]}}
        metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
        header, _ = safetensors_header([("a", "float32", (4, 4)), ("b", "float32", (3, 1))], metadata)
        file = tmp_path / "s" / f"{name}.safetensors"
        file.parent.mkdir()
        file.write_bytes(header + bytes(76))
        for source in (file, file.parent):
            refused(source, OptionError, "slices of tensors .DCP_SHARDING_INFO., .*consolidate_safetensors_files")

    def test_parts_of_a_set_are_refused(self, tmp_path: Path) -> None:
        zero3, first = tmp_path / "zero3", tmp_path / "first"
        zero3.mkdir()
        first.mkdir()
        for rank in range(2):
            module = {"w": torch.empty(0), "_extra_state": torch.empty(0, dtype=torch.uint8)}
            torch.save({"module": module}, zero3 / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        refused(zero3, CorruptCheckpointError, r"1 tensors have no elements, the first module\.w: DeepSpeed's ZeRO-3")
        (zero3 / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
        refused(zero3, CorruptCheckpointError, "the first module.w: DeepSpeed's ZeRO-3")
        import_checkpoint(zero3, tmp_path / "rest", rename=parse_rename_rules("module.w -", "r"))
        (first / "x-00001-of-00002.safetensors").write_bytes(safetensors_file({"a": (0, 4)}, 4))
        refused(first, CorruptCheckpointError, "of 00002 files not all are there")

    @pytest.mark.parametrize("elements", [100, 50], ids=["in a tensor", "next to the part that is one"])
    def test_a_damaged_torch_file(self, tmp_path: Path, elements: int) -> None:
        """torch.load compares no checksum of what it maps."""
        torch.save({"w": torch.full((100,), 7, dtype=torch.uint8)[:elements]}, tmp_path / "x.pt")
        content = (tmp_path / "x.pt").read_bytes()
        (tmp_path / "x.pt").write_bytes(content.replace(b"\7" * 100, b"\7" * 99 + b"\6"))
        refused(tmp_path / "x.pt", ChecksumError, r"x\.pt")


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_an_interrupted_export_is_resumed_by_the_same_command(checkpoint: Path, tmp_path: Path, to: Any) -> None:
    """What was written and has come to harm is not published: it is written again."""
    options = {"to": to, "max_shard_bytes": 20_000}
    with interrupted_at(StoredPayloads, "check_rest"):
        export_checkpoint(checkpoint, tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()
    first, second, *_ = sorted((tmp_path / "t.partial").iterdir())
    flip(first, first.stat().st_size // 2)
    second.unlink()
    assert export_checkpoint(checkpoint, tmp_path / "t", **options).resumed
    export_checkpoint(checkpoint, tmp_path / "alone", **options)
    assert contents(tmp_path / "t") == contents(tmp_path / "alone")
    assert not (tmp_path / "t.partial").exists()


def test_what_an_interrupted_conversion_has_read_of_a_damaged_source_is_compared(tmp_path: Path) -> None:
    """Elements that are converted have other checksums; those of the source are compared when all is written."""
    flip_item(write_model(tmp_path / "s"), "output_layer.weight")
    for convert in (export_checkpoint, partial(reshard_checkpoint, tp=1, only="*.weight")):
        with interrupted_at(DerivedPayloads, "check_rest"):
            convert(tmp_path / "s", tmp_path / "t", dtype="fp32")
        with pytest.raises(ChecksumError, match=r"output_layer\.weight"):
            convert(tmp_path / "s", tmp_path / "t", dtype="fp32")
        assert not (tmp_path / "t").exists()


def test_a_pattern_may_be_longer_than_the_name_of_a_file(checkpoint: Path, tmp_path: Path) -> None:
    reshard_checkpoint(checkpoint, tmp_path / "t", tp=1, only="*" * 300)
    assert read_index(tmp_path / "t").tensors.keys() == read_index(checkpoint).tensors.keys()


def test_an_import_does_not_go_on_with_a_table_or_config_that_was_changed(tmp_path: Path) -> None:
    write_llama(tmp_path / "s")
    own, table = tmp_path / "mine.toml", (Path(models.__file__).parent / "families" / "llama.toml").read_text()
    own.write_text(table)
    convert = partial(import_checkpoint, tmp_path / "s", tmp_path / "t", kind="hf", arch=str(own))
    with interrupted_at(DerivedPayloads, "check_rest"):
        convert()
    own.write_text(f"{table}\n# corrected\n")
    with pytest.raises(OptionError, match=r"another --arch.*--restart"):
        convert()
    own.write_text(table)
    (tmp_path / "s" / "config.json").touch()
    with pytest.raises(OptionError, match=r"another source .*--restart"):
        convert()


class TestChecksumsOfSafetensors:
    @pytest.fixture(params=[{}, {"max_shard_bytes": 20_000}], ids=["one file", "several"])
    def weights(self, request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Path:
        export_checkpoint(checkpoint, tmp_path / "e", **request.param)
        return tmp_path / "e"

    def test_each_tensor_has_its_own_and_others_read_the_files(self, weights: Path) -> None:
        sums = json.loads((weights / HF_INDEX).read_bytes())["metadata"]["crc32"]["tensors"]
        found = {key: value for file in weights.glob("*.safetensors") for key, value in load_file(file).items()}
        assert_same(found, model_tensors())
        expected = {key: zlib.crc32(value.reshape(-1).view(torch.uint8).numpy()) for key, value in found.items()}
        assert {key: int(value, 16) for key, value in sums.items()} == expected
        assert f"valid: {len(sums)} items, {len(sums)} checksums" in output_of("verify", weights, "-q")

    @pytest.mark.parametrize("where", ["data", "header", "index"])
    def test_a_flipped_byte_is_damage_for_verify_and_an_import(self, weights: Path, where: str) -> None:
        file, index = sorted(weights.glob("*.safetensors"))[-1], weights / HF_INDEX
        key = list(read_by_definition(file))[-1]
        if where == "index":
            document = json.loads(index.read_bytes())
            document["metadata"]["crc32"]["tensors"][key] = "00000000"
            index.write_text(json.dumps(document))
        else:  # a shape of the header is another, or an element
            flip(file, -1 if where == "data" else file.read_bytes().index(b"shape") + 8)
        said = output_of("verify", weights, "-q", code=1)
        assert "DAMAGED, 1 problem" in said
        assert file.name in said
        assert where == "header" or key in said
        refused(weights, ChecksumError, file.name)

    def test_files_of_others_have_none(self, weights: Path) -> None:
        (weights / HF_INDEX).unlink()
        assert "no checksums are stored there" in output_of("verify", weights, "-q")
        half = weights.with_name("half")
        half.mkdir()
        shutil.copy(min(weights.glob("*.safetensors")), half / "model-00001-of-00002.safetensors")
        assert "of 00002 files not all are there" in output_of("verify", half, "-q", code=1)
        file = min(weights.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1])
        assert f"{file.name}: " in output_of("verify", weights, "-q", code=1)

    def test_what_the_index_names_has_to_be_there(self, weights: Path) -> None:
        file = min(weights.glob("*.safetensors"))
        file.unlink()
        assert f"{file.name}: " in output_of("verify", weights, "-q", code=1)
        assert main(["verify", str(weights), "--state"]) == 2


class TestSourceThatIsReplaced:
    """A save of somebody else replaces the checkpoint while it is read: what is made is of one save, or nothing is."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        write_model(tmp_path / "source")
        torch.save({"iteration": 1}, tmp_path / "source" / "common.pt")
        return tmp_path / "source"

    @staticmethod
    def replace(source: Path) -> None:
        """As stock does, under the same names."""
        shutil.rmtree(source.parent / "later", ignore_errors=True)
        write_model(source.parent / "later", tensors=model_tensors(seed=9))
        torch.save({"iteration": 2}, source.parent / "later" / "common.pt")
        shutil.copytree(source.parent / "later", source, dirs_exist_ok=True)

    @pytest.mark.parametrize(
        ("when", "make"),
        [
            ("between two tensors", export_checkpoint),
            ("while its files are looked for", export_checkpoint),
            ("while its files are looked for", lambda source, target: merge_checkpoints([source], target)),
            ("while its files are looked for", partial(reshard_checkpoint, tp=1, pp=1)),
            ("when the tensors are verified", import_checkpoint),
            ("when the tensors are verified", partial(reshard_checkpoint, tp=1, pp=1)),
        ],
    )
    def test_nothing_is_made_of_two_saves(self, when: str, make: Callable[..., object], tmp_path: Path) -> None:
        source = tmp_path / "source"
        write_model(source)
        torch.save({"iteration": 1}, source / "common.pt")

        def replace(*_: Any, **__: Any) -> None:
            """As stock does, under the same names."""
            shutil.rmtree(tmp_path / "later", ignore_errors=True)
            write_model(tmp_path / "later", tensors=model_tensors(seed=9))
            torch.save({"iteration": 2}, tmp_path / "later" / "common.pt")
            shutil.copytree(tmp_path / "later", source, dirs_exist_ok=True)

        def replace_and_rename(_: conversion.SourceFiles) -> None:
            replace()
            for file in source.glob("*.distcp"):
                file.rename(file.with_name(f"later{file.name}"))  # as after a save whose files have names of their own

        def replace_at_the_last(_: StoredPayloads, entry: TensorEntry, chunk: StoredChunk) -> None:
            if entry.fqn == "output_layer.weight" and chunk is entry.chunks[0]:
                replace()

        meanwhile = {
            "between two tensors": ahead_of(StoredPayloads, "locate", replace_at_the_last),
            "while its files are looked for": ahead_of(conversion.SourceFiles, "_look", replace_and_rename),
            "when the tensors are verified": behind(conversion, "check_all", replace),
        }
        with meanwhile[when], pytest.raises(LoadError, match="replaced the checkpoint"):
            make(source, tmp_path / "t")
        assert not (tmp_path / "t").exists()


# --- memory

MEMORY_BYTES = 384 * 1024**2
_RUN = """
import sys
from mcore_ckpt.commands.cli import main
code = main(sys.argv[1:])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""


def peak_bytes(*words: str) -> int:
    """The most memory that a command has had, in a process of its own."""
    given = [sys.executable, "-c", _RUN, *words, "--memory", f"{MEMORY_BYTES}", "--quiet"]
    done = subprocess.run(given, check=True, stdout=subprocess.PIPE, text=True)
    return int(done.stdout.split()[-2]) * 1024


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for Hugging Face that is larger than the memory, of tensors that are small."""
    place, layers, hidden = tmp_path_factory.mktemp("large"), 18, 1024
    square, wide, norm = (hidden, hidden), (3 * hidden, hidden), (hidden,)
    shapes = {"embed_tokens.weight": square, "norm.weight": norm}
    for n in range(layers):
        shapes |= {f"layers.{n}.self_attn.{name}_proj.weight": square for name in "qkvo"}
        shapes |= {f"layers.{n}.mlp.{name}_proj.weight": wide for name in ("gate", "up")}
        shapes |= {f"layers.{n}.mlp.down_proj.weight": wide[::-1]}
        shapes |= {f"layers.{n}.{name}_layernorm.weight": norm for name in ("input", "post_attention")}
    tensors = {f"model.{key}": torch.zeros(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert sum(tensor.nbytes for tensor in tensors.values()) > MEMORY_BYTES
    save_file(tensors, place / "model.safetensors")
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "vocab_size": hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 32}
    (place / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": 1e-6, **sizes, **heads}))
    return place


@pytest.mark.long
def test_no_conversion_holds_a_model(large: Path, tmp_path: Path) -> None:
    """As much as `--memory` says, from a process's first byte to its last."""
    made = str(tmp_path / "made")
    commands = {
        "import": ("import", str(large), made, "--from", "hf", "--tp", "2"),
        "export": ("export", made, str(tmp_path / "export"), "--to", "hf"),
        "reshard": ("reshard", made, str(tmp_path / "reshard"), "--tp", "1", "--pp", "2"),
        "another model": ("reshard", made, str(tmp_path / "hybrid"), "--convert-model", "gpt-to-hybrid"),
        "merge": ("merge", str(tmp_path / "merge"), made, made, made),
    }
    for name, words in commands.items():
        peak = peak_bytes(*words)
        assert peak <= MEMORY_BYTES, f"{name}: {peak / 1024**2:.0f} MiB"
        if name != "import":
            shutil.rmtree(words[2] if name != "merge" else words[1])
