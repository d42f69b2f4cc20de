"""Files that reads share are closed by their last user."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt.load.files import OpenFiles
from mcore_ckpt.storage.resolve import LocalStorage


def test_a_file_in_use_is_closed_by_its_last_user(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    files = OpenFiles(LocalStorage(tmp_path), "auto", None)
    with files.reader("a") as reader:
        with files.reader("a") as again:
            assert again is reader
            files.close()
        assert reader.read(0, 10) == bytes(10)
    with pytest.raises(ValueError, match="closed"):
        reader.read(0, 10)
