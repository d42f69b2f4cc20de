"""The report: one page that needs nothing else, and pictures that a real browser draws."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from mcore_ckpt.commands.cli import main
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.tools.inspection import render_report
from tests.support.model_like import model_tensors, write_model

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
