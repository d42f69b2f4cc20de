"""Verify names what is wrong, with file and offset, and nothing else; another copy can mend it."""

import enum
import io
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.load.requests import ReadRequest
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from mcore_ckpt.tools import verify
from mcore_ckpt.tools.checkpoint import open_checkpoint
from mcore_ckpt.tools.verify import repair_checkpoint, verify_checkpoint
from tests.support.command import document_of, output_of, refusal_of
from tests.support.local_files import flip
from tests.support.model_like import assert_same, model_tensors, read_all, write_model

KEY = "decoder.layers.1.mlp.linear_fc1.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_model(tmp_path / "ckpt")
    return tmp_path / "ckpt"


def item_of(directory: Path, key: str = KEY, chunk: int = 1) -> StoredItem:
    return read_index(directory).tensors[key].chunks[chunk].item


def rewrite(directory: Path, index: CheckpointIndex) -> None:
    (directory / ".metadata").write_bytes(encode_metadata(index))


def test_a_whole_checkpoint(checkpoint: Path) -> None:
    report = verify_checkpoint(checkpoint)
    assert report.whole
    index = read_index(checkpoint)
    common = 1
    assert report.items == sum(len(entry.chunks) for entry in index.tensors.values()) + len(index.objects) + common
    assert report.records >= 4 * report.items  # stock items of torch 2.13 have six or seven records
    assert report.unchecked == 0
    assert "valid" in output_of("verify", checkpoint)


@pytest.mark.parametrize("workers", [0, -3])
def test_nothing_is_called_whole_that_nobody_reads(checkpoint: Path, workers: int) -> None:
    with pytest.raises(OptionError, match=f"workers={workers}"):
        verify_checkpoint(checkpoint, workers=workers)
    assert f"workers={workers}" in refusal_of("verify", checkpoint, f"--workers={workers}")


class Phase(enum.Enum):
    """An enum of a training script."""

    LAST = 1


class Custom:
    """A class of a training script."""


def test_classes_that_loads_refuse_are_told_by_the_save_and_by_verify(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"{__name__}.Custom"
    for iteration in (1, 2):
        state = {"w": torch.ones(3), "extra": {"kind": Custom}, "more": [Custom()]}
        dcp.save(state, storage_writer=FileSystemWriterAsync(tmp_path / str(iteration)), no_dist=True)
    (told,) = [text for text in caplog.messages if name in text]
    assert told.startswith(("extra", "more"))
    report = verify_checkpoint(tmp_path / "1")
    assert report.whole
    assert list(report.refused) == [name]
    assert f"loads need MCORE_CKPT_ALLOWED_CLASSES={name}: it holds {name} in " in output_of("verify", tmp_path / "1")
    monkeypatch.setenv("MCORE_CKPT_ALLOWED_CLASSES", name)
    assert "loads need" not in output_of("verify", tmp_path / "1")


def test_each_value_of_a_key_is_looked_at_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Values of other classes, the archives of which have one length: padding makes it so."""
    values = ["warmup", 1, np.array([1, "a"], dtype=object), 2, Phase.LAST, 3, np.array(["b", 2], dtype=object)]
    told = []
    for value in values:
        caplog.clear()
        dcp.save({"phase": value}, storage_writer=FileSystemWriterAsync(tmp_path), no_dist=True)
        told.append([text for text in caplog.messages if text.startswith("phase: holds")])
    assert [len(messages) for messages in told] == [0, 0, 1, 0, 1, 0, 0]
    assert "phase: holds what loads do not read (expected a dtype" in told[2][0]
    assert f"phase: holds {__name__}.Phase" in told[4][0]
    assert "MCORE_CKPT_ALLOWED_CLASSES=*: it holds what loads do not read in phase" in output_of("verify", tmp_path)


def test_every_byte_of_an_item_counts(tmp_path: Path) -> None:
    """A flipped bit is found, or lies where the format has room (padding, dates, versions) and changes nothing."""
    tensors = {"w": torch.randn(8, 8)}
    write_model(tmp_path / "c", tp=1, tensors=tensors)
    item = item_of(tmp_path / "c", "w", 0)
    path = tmp_path / "c" / item.file
    original = path.read_bytes()
    missed = 0
    for at in range(0, item.length, 11):
        flip(path, item.offset + at)
        if verify_checkpoint(tmp_path / "c", workers=1).whole:
            missed += 1
            assert_same(read_all(tmp_path / "c"), tensors)
        path.write_bytes(original)
    assert missed < item.length / 11 / 3


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_quantized_tensors_are_verified_and_copied_by_their_checksums(tmp_path: Path) -> None:
    stored, run = torch.quantize_per_tensor(torch.randn(500), 0.1, 0, torch.qint8), tmp_path / "run"
    for name, tensor in (("iter_0000001", stored), ("iter_0000002", torch.ones(3))):
        dcp.save({"x": tensor}, storage_writer=dcp.FileSystemWriter(run / name), no_dist=True)
    output_of("verify", run, "--all")
    output_of("copy", run / "iter_0000001", tmp_path / "copy")
    loaded = {"x": torch.quantize_per_tensor(torch.zeros(500), 0.1, 0, torch.qint8)}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path / "copy"), no_dist=True)
    assert torch.equal(loaded["x"].int_repr(), stored.int_repr())
    item = item_of(run / "iter_0000001", "x", 0)
    flip(run / "iter_0000001" / item.file, item.offset + item.length // 2)
    found = document_of("verify", run, "--all", code=1)
    assert [one["whole"] for one in found.values()] == [False, True]


def test_a_damaged_payload_is_named_with_its_place(checkpoint: Path) -> None:
    item = item_of(checkpoint)
    flip(checkpoint / item.file, item.offset + item.length // 2)
    (problem,) = document_of("verify", checkpoint, code=1)["problems"]
    assert (problem["kind"], problem["fqn"], problem["file"]) == ("checksum", KEY, item.file)
    assert (problem["offset"], problem["length"]) == (item.offset, item.length)
    shown = output_of("verify", checkpoint, code=1)
    assert "DAMAGED, 1 problem:" in shown
    assert item.file in shown


def test_a_damaged_index_is_damage_and_no_index_is_an_error(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = (checkpoint / ".metadata").read_bytes()
    (checkpoint / ".metadata").write_bytes(content[: len(content) // 2])
    assert main(["verify", str(checkpoint)]) == 1
    shutil.copytree(checkpoint, tmp_path / "copy")
    (tmp_path / "copy" / ".metadata").write_bytes(content)
    assert main(["repair", str(checkpoint), "--from", str(tmp_path / "copy")]) == 0
    assert f"removed: {checkpoint}/.metadata: not a readable" in caplog.text
    (checkpoint / ".metadata").unlink()
    assert refusal_of("verify", checkpoint).count("\n") == 1
    assert main(["repair", str(checkpoint), "--from", str(tmp_path / "copy")]) == 0
    assert main(["repair", str(tmp_path / "gone"), "--from", str(tmp_path / "copy")]) == 2


def moved(chunk: StoredChunk, by: int) -> StoredChunk:
    item = chunk.item
    return StoredChunk(chunk.offsets, chunk.sizes, StoredItem(item.file, item.offset + by, item.length))


CHUNKS: dict[str, Callable[[CheckpointIndex, tuple[StoredChunk, ...]], list[StoredChunk]]] = {
    "element [0, 0]": lambda index, chunks: [*chunks[1:]],  # one is missing
    "lies in 2 chunks": lambda index, chunks: [*chunks, StoredChunk((0, 0), chunks[1].sizes, chunks[1].item)],
    "overlaps": lambda index, chunks: [moved(chunks[0], -8), *chunks[1:]],
    # The bytes are sound, but they are another tensor's.
    "the index says": lambda index, chunks: [
        StoredChunk(chunks[0].offsets, chunks[0].sizes, index.tensors["output_layer.weight"].chunks[0].item),
        *chunks[1:],
    ],
}


@pytest.mark.parametrize("said", CHUNKS)
def test_an_index_whose_chunks_cannot_be(checkpoint: Path, said: str) -> None:
    index = read_index(checkpoint)
    entry = index.tensors[KEY]
    index.tensors[KEY] = entry._replace(chunks=tuple(CHUNKS[said](index, entry.chunks)))
    rewrite(checkpoint, index)
    assert any(said in problem.message for problem in verify_checkpoint(checkpoint).problems)


def test_missing_shards_and_files(checkpoint: Path) -> None:
    index = read_index(checkpoint)
    del index.objects["rng_state/shard_0.1_1.2"]
    rewrite(checkpoint, index)
    (problem,) = verify_checkpoint(checkpoint).problems
    assert "1 of the 2 shards" in problem.message
    (checkpoint / "__0_1.distcp").unlink()
    report = verify_checkpoint(checkpoint)
    assert {problem.file for problem in report.problems} == {None, "__0_1.distcp"}


class TestRepair:
    @pytest.fixture
    def copy(self, checkpoint: Path) -> Path:
        return Path(shutil.copytree(checkpoint, checkpoint.parent / "copy"))

    @pytest.fixture
    def resharded(self, checkpoint: Path) -> Path:
        reshard_checkpoint(checkpoint, checkpoint.parent / "resharded", tp=1, pp=1)
        return checkpoint.parent / "resharded"

    @pytest.mark.parametrize(
        ("source", "damage"),
        [
            *(("copy", damage) for damage in ("payload", "file", "index", "common state", "config")),
            *(("copy", damage) for damage in ("no config", "no index")),
            *(("later", damage) for damage in ("payload", "index", "no index")),
            ("resharded", "index"),
        ],
    )
    def test_a_dry_run_tells_what_a_repair_does(
        self, checkpoint: Path, copy: Path, resharded: Path, tmp_path: Path, source: str, damage: str
    ) -> None:
        write_model(tmp_path / "later", tensors=model_tensors(seed=9))
        other = {"copy": copy, "resharded": resharded, "later": tmp_path / "later"}[source]
        item = item_of(checkpoint)
        if damage == "payload":
            flip(checkpoint / item.file, item.offset + item.length // 2)
        elif damage in ("file", "no config", "no index"):
            names = {"file": "__0_1.distcp", "no config": "metadata.json", "no index": ".metadata"}
            (checkpoint / names[damage]).unlink()
        else:
            name = {"index": ".metadata", "common state": "common.pt", "config": "metadata.json"}[damage]
            (checkpoint / name).write_bytes(b"nothing" * (damage != "config"))
        files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
        report = verify_checkpoint(checkpoint, lost_index=True)
        if (source, damage) in (("later", "no index"), ("resharded", "index")):
            for dry_run in (True, False):
                with pytest.raises(CorruptCheckpointError, match="does not describe the files"):
                    repair_checkpoint(report, other, dry_run=dry_run)
            assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == files
            return
        dry = repair_checkpoint(report, other, dry_run=True)
        assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == files
        assert dry.problems == report.problems
        assert dry.repaired == ()
        done = repair_checkpoint(report, other)
        assert dry.would_repair == done.repaired
        assert done.would_repair == ()
        assert (not dry.unmatched) == done.whole == (not done.unmatched)
        # An index of the same layout describes these files, too; stock Megatron's says of no file whose it is.
        assert done.whole == (source == "copy" or damage == "index")
        left = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
        if source == "copy":
            assert left == {path.name: path.read_bytes() for path in copy.iterdir()}
        elif not done.whole:
            assert left == files


def _repeated(count: int) -> bytes:
    stream = io.BytesIO()
    torch.save(torch.ones(1).expand(count), stream)
    return stream.getvalue()


def test_elements_that_are_not_there(tmp_path: Path) -> None:
    """Verify, loads, slices and copies are of one opinion, and none takes the memory that the elements would."""
    shape, item = (2**40,), _repeated(2**40)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "__0_0.distcp").write_bytes(item)
    chunk = StoredChunk((0,), shape, StoredItem("__0_0.distcp", 0, len(item)))
    entry = TensorEntry("w", "float32", shape, (chunk,))
    rewrite(tmp_path / "c", CheckpointIndex(str(tmp_path / "c"), {"w": entry}, {}))
    report = verify_checkpoint(tmp_path / "c")
    assert [(problem.kind, problem.fqn) for problem in report.problems] == [("item", "w")]
    request = ReadRequest("w", torch.empty(2), (0,), (2,), shape)
    for use in (
        lambda: open_checkpoint(tmp_path / "c")["w"][0:2],
        lambda: FileSystemReader(tmp_path / "c").read_items([request]),
        lambda: reshard_checkpoint(tmp_path / "c", tmp_path / "t", tp=1, pp=1),
    ):
        with pytest.raises(CorruptCheckpointError, match="w at"):
            use()


class TestCommonState:
    def test_its_checksums_are_compared(self, checkpoint: Path) -> None:
        path = checkpoint / "common.pt"
        flip(path, path.stat().st_size // 3)
        (problem,) = verify_checkpoint(checkpoint).problems
        assert (problem.kind, problem.file) in (("checksum", "common.pt"), ("item", "common.pt"))
        path.write_bytes(path.read_bytes()[:200])
        (problem,) = verify_checkpoint(checkpoint).problems
        assert (problem.kind, problem.file) == ("item", "common.pt")

    def test_megatron_cannot_load_without_it(self, checkpoint: Path, tmp_path: Path) -> None:
        (checkpoint / "common.pt").unlink()
        (problem,) = verify_checkpoint(checkpoint).problems
        assert (problem.kind, problem.file) == ("file", "common.pt")
        write_model(tmp_path / "copy")
        assert repair_checkpoint(verify_checkpoint(checkpoint), tmp_path / "copy").whole

    def test_without_both_of_megatrons_files_it_is_incomplete_and_a_copy_has_them(
        self, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = tmp_path / "run"
        damaged = Path(shutil.copytree(checkpoint, run / "iter_0000007"))
        for name in ("common.pt", "metadata.json"):
            (damaged / name).unlink()
        assert main(["list", str(run)]) == 1
        assert main(["copy", str(damaged), str(tmp_path / "second")]) == 2
        assert main(["reshard", str(damaged), str(tmp_path / "tp1"), "--tp", "1", "--pp", "1"]) == 2
        assert not (tmp_path / "second").exists()
        assert not (tmp_path / "tp1").exists()
        assert {problem.file for problem in verify_checkpoint(damaged).problems} == {"common.pt", "metadata.json"}
        assert main(["inspect", str(damaged)]) == 0
        shown = capsys.readouterr()
        assert "INCOMPLETE" in shown.out
        assert "written by  Megatron-Core" in shown.out
        assert "problem: " in shown.out
        assert shown.err.count("common.pt: missing") == 2
        assert main(["repair", str(damaged), "--from", str(checkpoint)]) == 0
        assert {path.name for path in damaged.iterdir()} == {path.name for path in checkpoint.iterdir()}

    def test_plain_dcp_has_neither_file(self, tmp_path: Path) -> None:
        dcp.save({"w": torch.ones(3), "step/shard_0_1": 3}, checkpoint_id=tmp_path / "iter_0000001", no_dist=True)
        assert verify_checkpoint(tmp_path / "iter_0000001").whole
        assert main(["list", str(tmp_path)]) == 0


def write_optimizer(path: Path, weight: torch.Tensor, main: torch.Tensor, key: str = "optimizer.state.param.w") -> Path:
    dcp.save({"w": weight, key: main, "optimizer.state.exp_avg.w": main}, checkpoint_id=path)
    return path


def test_an_optimizers_weights_round_to_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_WINDOW_BYTES", 28)
    main_weight = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(2))
    main_weight[0, 1, 2] = torch.nan
    weight = main_weight.bfloat16()
    good = write_optimizer(tmp_path / "good", weight, main_weight)
    assert "compared with 1 tensor of the model" in output_of("verify", good, "--check-optimizer")
    weight[1, 2, 3:] += 0.5
    bad = write_optimizer(tmp_path / "bad", weight, main_weight, "chained_1.optimizer.state.fp32_param.w")
    assert main(["verify", str(bad), "-q"]) == 0
    assert "--no-load-optim" in output_of("verify", bad, "--check-optimizer", code=1)
    (problem,) = verify_checkpoint(bad, optimizer=True).problems
    assert (problem.kind, problem.fqn) == ("optimizer", "chained_1.optimizer.state.fp32_param.w")
    assert ": 2 of 30 elements do not round to the model's; the first at [1, 2, 3]" in problem.message


def test_where_the_optimizer_has_no_weights_of_its_own_it_is_said(tmp_path: Path) -> None:
    path = write_optimizer(tmp_path / "c", torch.ones(3), torch.ones(3), "optimizer.state.master.w")
    assert "was not compared with the model: it stores no weights in float32" in output_of(
        "verify", path, "--check-optimizer"
    )
