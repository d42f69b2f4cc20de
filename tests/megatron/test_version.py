"""The matrix runs these tests once for each version; here is what makes sure that it is the version it says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WANTED = os.environ.get("MCORE_CKPT_TEST_MEGATRON")


@pytest.mark.skipif(WANTED is None, reason="only where a version is asked for, as scripts/test_matrix.sh does")
def test_the_version_asked_for_is_the_one_imported() -> None:
    code = "from megatron.core import package_info; print(package_info.__version__)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=170)
    assert ended.stdout.strip() == WANTED
