"""What is looked at while a save replaces it: what is said is true of one of the two checkpoints, or it is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.tools import diff, inspection, verify
from mcore_ckpt.tools.diff import diff_checkpoints
from mcore_ckpt.tools.inspection import summarize_checkpoint
from mcore_ckpt.tools.verify import verify_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(path: Path, value: float) -> Path:
    dcp.save({"w": torch.full((1000,), value)}, storage_writer=FileSystemWriterAsync(path), no_dist=True)
    return path


def replace_after_reading(monkeypatch: pytest.MonkeyPatch, module: Any, path: Path, times: int) -> None:
    """The next `times` that the module reads an index, a save replaces the checkpoint right after."""
    original, saves = module.read_index, iter(range(times))

    def read_index(*arguments: Any, **options: Any) -> Any:
        index = original(*arguments, **options)
        if (number := next(saves, None)) is not None:
            save(path, 2.0 + number)
        return index

    monkeypatch.setattr(module, "read_index", read_index)


def test_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "c", 1.0)
    with monkeypatch.context() as patched:
        replace_after_reading(patched, verify, path, 1)
        with pytest.raises(LoadError, match="has replaced the checkpoint"):
            verify_checkpoint(path)
    assert verify_checkpoint(path).whole


def test_inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "c", 1.0)
    with monkeypatch.context() as patched:
        replace_after_reading(patched, inspection, path, 1)
        with pytest.raises(LoadError, match="has replaced the checkpoint"):
            summarize_checkpoint(path)
    assert summarize_checkpoint(path).problems == ()


def test_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = save(tmp_path / "a", 1.0), save(tmp_path / "b", 1.0)
    with monkeypatch.context() as patched:
        replace_after_reading(patched, diff, a, 1)
        with pytest.raises(LoadError, match="replaced the checkpoint"):
            diff_checkpoints(a, b)
    assert main(["diff", str(a), str(b), "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["identical"]
