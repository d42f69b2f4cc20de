"""A file system that records and fails (`fuse_memory`), and ranks that save on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fuse_memory import FuseMount, fuse_works, mounted


@pytest.fixture(scope="session")
def fuse(tmp_path_factory: pytest.TempPathFactory) -> None:
    why_not = fuse_works(tmp_path_factory.mktemp("probe"))
    if why_not is not None:
        pytest.skip(why_not)


@pytest.fixture
def mount(fuse: None, tmp_path: Path) -> Iterator[FuseMount]:
    with mounted(tmp_path / "mount") as found:
        yield found
