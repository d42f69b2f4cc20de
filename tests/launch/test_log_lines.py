"""What a launch of ours prints, with a script that sets up logging as Megatron's does: late."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.launch.pretrain import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import logging
logging.getLogger("mcore_ckpt").warning("before the set-up")
logging.basicConfig()
logging.getLogger("mcore_ckpt").warning("after the set-up")
"""


def test_each_line_comes_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "mcore_ckpt.launch", str(script)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=True)
    for line in ("are in force for megatron-core", "before the set-up", "after the set-up"):
        assert done.stderr.count(line) == 1, done.stderr
