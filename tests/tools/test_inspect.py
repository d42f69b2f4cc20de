"""What inspect says is what was written, down to the byte."""

import html
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.commands.cli import main
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.tools.inspection import describe_items, render_report, summarize_checkpoint
from mcore_ckpt.tools.keys import layout_of_chunks
from tests.support.command import document_of, output_of
from tests.support.model_like import model_tensors, write_model

pytestmark = pytest.mark.quick


def test_summary(checkpoint: Path) -> None:
    summary = summarize_checkpoint(checkpoint)
    model = model_tensors(optimizer=False)
    assert summary.iteration == 7
    assert summary.written_by == "megatron"
    assert (summary.tensors, summary.objects, summary.files, summary.ranks) == (len(model_tensors()), 2, 4, 2)
    assert summary.model_elements == sum(tensor.numel() for tensor in model.values())
    assert summary.model_bytes == sum(tensor.nbytes for tensor in model.values())
    assert summary.optimizer_bytes == sum(t.nbytes for key, t in model_tensors().items() if key.startswith("optimizer"))
    assert summary.optimizer == "fully_reshardable"
    assert summary.layout.tp == 2
    assert summary.trained_layout is not None
    assert summary.arguments == {"tensor_model_parallel_size": 2, "swiglu": True}
    assert {row.group for row in summary.groups} >= {"embedding", "attention", "mlp", "norm", "optimizer exp_avg"}
    shown = output_of("inspect", checkpoint)
    for text in ("iteration", "fully_reshardable", "TP 2", "bfloat16", "attention"):
        assert text in shown


def test_items_are_where_they_are_said_to_be(checkpoint: Path) -> None:
    """The byte ranges, read on their own, are the tensors and objects that the rows name."""
    tensors = model_tensors()
    rows = describe_items(read_index(checkpoint))
    assert len(rows) > len(tensors)
    for row in rows:
        content = (checkpoint / row.file).read_bytes()[row.start : row.stop]
        value = torch.load(io.BytesIO(content), weights_only=True)
        if row.half == "bytes_data":
            assert row.fqn.startswith("rng_state/shard_")
            assert isinstance(value, list)
            continue
        assert row.offsets is not None
        assert row.shape is not None
        box = tuple(slice(start, start + size) for start, size in zip(row.offsets, row.shape, strict=True))
        assert torch.equal(value, tensors[row.fqn][box])
        assert str(value.dtype) == f"torch.{row.dtype}"


def test_a_missing_file_is_shown(tmp_path: Path) -> None:
    write_model(tmp_path / "c")
    (tmp_path / "c" / "__0_0.distcp").unlink()
    assert "problem: __0_0.distcp" in output_of("inspect", tmp_path / "c")
    assert "MISSING" in output_of("inspect", tmp_path / "c", "--files")


def test_plain_dcp(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.randn(4, 4)}, "step": 3}, checkpoint_id=tmp_path / "d", no_dist=True)
    summary = document_of("inspect", tmp_path / "d")
    assert (summary["written_by"], summary["tensors"], summary["objects"], summary["optimizer"]) == ("dcp", 1, 1, None)


def test_arguments_of_any_class_are_shown_and_never_run(tmp_path: Path) -> None:
    write_model(tmp_path / "c")
    state = {"iteration": 3, "args": {"a": _Evil(), "b": torch.float32, "c": torch.zeros(2), "d": (1, 2)}}
    torch.save(state, tmp_path / "c" / "common.pt")
    _Evil.calls = 0
    arguments = summarize_checkpoint(tmp_path / "c").arguments
    assert _Evil.calls == 0
    assert arguments["b"] == "torch.float32"
    assert arguments["c"].startswith("<tensor of shape [2]")
    assert arguments["d"] == [1, 2]
    assert "_run" in arguments["a"]


class _Evil:
    calls = 0

    def __reduce__(self) -> tuple[object, ...]:
        return _run, ("ls",)


def _run(command: str) -> str:
    _Evil.calls += 1
    return command


@pytest.mark.parametrize("stacked", [True, False])
def test_pipeline_stages_show_whether_layers_are_stacked_or_numbered(stacked: bool) -> None:
    """Four layers at TP=2 x PP=2: the first two layers in files of ranks 0 and 1, the others in those of 2 and 3."""

    def halves(layer: int, row: int, rows: int) -> list[StoredChunk]:
        stage = layer // 2
        return [
            StoredChunk((row, 4 * half), (rows, 4), StoredItem(f"__{2 * stage + half}_0.distcp", 0, 64))
            for half in range(2)
        ]

    if stacked:
        key = "decoder.layers.mlp.weight"
        chunks = {key: [chunk for layer in range(4) for chunk in halves(layer, layer, 1)]}
    else:
        chunks = {f"decoder.layers.{layer}.mlp.weight": halves(layer, 0, 4) for layer in range(4)}
    tensors = {key: TensorEntry(key, "float32", (4, 8), tuple(each)) for key, each in chunks.items()}
    assert layout_of_chunks(CheckpointIndex("/somewhere", tensors, {})).pp == 2


# --- the report: one page that needs nothing else, and pictures that a real browser draws

KEY = "decoder.layers.0.mlp.linear_fc1.weight"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def data_of(page: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, object] = json.loads(found.group(1))
    return data


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    write_model(tmp_path / "c")
    assert main(["inspect", str(tmp_path / "c"), "--html", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert not re.search(r"""\b(?:src|href|action|srcset)\s*=|@import|url\(|fetch\(|XMLHttpRequest|import\(""", page)
    assert {match.group(1) for match in re.finditer(r"https?://([^/\"']+)", page)} <= {"www.w3.org"}  # SVG's name
    tensors = {row["key"]: row for row in data_of(page)["tensors"]}  # type: ignore[attr-defined]
    assert tensors.keys() == model_tensors().keys()
    assert len(tensors[KEY]["chunks"]) == 4


def test_its_facts_stand_there_without_a_script(tmp_path: Path) -> None:
    write_model(tmp_path / "a<b>")
    (tmp_path / "a<b>" / "__0_0.distcp").unlink()
    index = read_index(tmp_path / "a<b>")
    page = re.sub("<script.*?</script>", "", render_report(index), flags=re.DOTALL)
    for name, value in summarize_checkpoint(tmp_path / "a<b>").facts():
        assert re.search(f'<th scope="row">{name}</th><td[^>]*>{re.escape(html.escape(value))}</td>', page)
    assert "__0_0.distcp: the index names this file, but it is not there" in page
    assert "<b>" not in page


def test_keys_cannot_become_markup(tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)>"
    write_model(tmp_path / "c", tp=1, tensors={hostile: torch.zeros(2, 2)})
    page = render_report(read_index(tmp_path / "c"))
    assert "<img" not in page
    assert data_of(page)["tensors"][0]["key"] == hostile  # type: ignore[index]


@pytest.mark.slow
def test_a_browser_draws_it(tmp_path: Path) -> None:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    assert browser, f"no browser: install one of {', '.join(BROWSERS)} (Debian: apt-get install chromium)"
    write_model(tmp_path / "c")
    report = tmp_path / "r.html"
    assert main(["inspect", str(tmp_path / "c"), "--html", str(report)]) == 0
    # What a person would do: look for a tensor and click it.
    clicks = (
        "<script>window.addEventListener('load', () => { const box = document.getElementById('search');"
        f" box.value = {json.dumps(KEY)}; box.dispatchEvent(new Event('input'));"
        " document.querySelector('#keys button').click(); document.body.dataset.clicked = 'yes'; });"
        " window.onerror = (message) => { document.body.dataset.error = message; };</script>"
    )
    report.write_text(report.read_text().replace("<title>", clicks + "<title>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    command = [browser, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", report.as_uri()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    page = ended.stdout
    assert 'data-ready="yes"' in page
    assert 'data-clicked="yes"' in page
    assert "data-error" not in page
    picture = re.search(r'<svg[^>]*id="grid-picture".*?</svg>', page, re.DOTALL)
    assert picture
    assert picture.group(0).count('class="chunk"') == 4
    assert re.findall(r"<span[^>]*>(rank \d+)</span>", page) == ["rank 0", "rank 1"]
