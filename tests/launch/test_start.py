"""The start of a launch of ours, with a script that sets up logging as Megatron's does: late."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import mcore_ckpt
from tests.launch.pretrain import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import logging
logging.getLogger("mcore_ckpt").warning("before the set-up")
logging.basicConfig()
logging.getLogger("mcore_ckpt").warning("after the set-up")
"""


def _launched(folder: Path, **options: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", **options}
    command = [sys.executable, "-m", "mcore_ckpt.launch", str(script)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)


def test_each_line_comes_once(tmp_path: Path) -> None:
    done = _launched(tmp_path)
    assert done.returncode == 0, done.stderr
    for line in ("are in force for megatron-core", "before the set-up", "after the set-up"):
        assert done.stderr.count(line) == 1, done.stderr


def test_an_option_that_cannot_be_is_refused_before_the_script(tmp_path: Path) -> None:
    done = _launched(tmp_path, MCORE_CKPT_WRITER="carrier-pigeon")
    assert done.returncode == 2
    assert "MCORE_CKPT_WRITER='carrier-pigeon': expected one of 'persistent', 'fork'" in done.stderr
    assert "set-up" not in done.stderr
    assert "Traceback" not in done.stderr


def test_install_refuses_options_of_loads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCORE_CKPT_PAGE_CACHE", "off")
    with pytest.raises(mcore_ckpt.OptionError, match="MCORE_CKPT_PAGE_CACHE='off'"):
        mcore_ckpt.install()
