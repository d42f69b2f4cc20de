"""What a load leaves in the page cache, and when it does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.load import fetch
from mcore_ckpt.load.fetch import keeps_cached
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.storage._local import LocalStorage
from tests.support.local_files import cached_pages, drop_cached, has_direct_io

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_GB = 10**9


@pytest.mark.parametrize(
    ("ranks", "needed_gb", "free_gb", "kept", "kept_if_cheap"),
    [
        (1, 10, 100, False, True),  # nobody else: for the next load, if that costs nothing
        (1, 4, 100, False, False),  # parts
        (1, 10, 39, False, False),  # not small beside the memory that is free
        (2, 5, 100, False, True),  # each another half
        (2, 10, 100, False, True),  # the disk is faster twice than the page cache once, if that has small pages
        (4, 10, 100, True, True),  # all of them all of it
        (4, 10, 21, True, True),
        (8, 1.25, 100, False, True),
        (8, 0.5, 100, False, False),
        (8, 5.1, 100, True, True),
        (8, 10, 19, False, False),  # no memory for it
    ],
)
def test_what_is_likely_to_be_wanted_again_is_kept_where_there_is_memory(
    ranks: int, needed_gb: float, free_gb: int, kept: bool, kept_if_cheap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(fetch, "free_host_bytes", lambda: free_gb * _GB)
    needed, stored = int(needed_gb * _GB), 10 * _GB + 4096
    for cheap, expected in ((False, kept), (True, kept_if_cheap)):
        assert keeps_cached(LoadOptions(), needed, stored, lambda: cheap) == expected  # noqa: B023
        assert keeps_cached(LoadOptions(page_cache="on"), needed, stored, lambda: cheap)  # noqa: B023
        assert not keeps_cached(LoadOptions(page_cache="off"), needed, stored, lambda: cheap)  # noqa: B023


@pytest.mark.parametrize(
    ("page_cache", "ranks", "cheap", "kept"),
    [
        ("on", 1, False, True),
        ("off", 2, True, False),
        ("auto", 1, False, False),
        ("auto", 1, True, True),
        ("auto", 4, False, True),
    ],
)
def test_a_load_leaves_in_the_page_cache_what_it_should(
    page_cache: str, ranks: int, cheap: bool, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_direct_io(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    monkeypatch.setenv("MCORE_CKPT_PAGE_CACHE", page_cache)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(fetch, "free_host_bytes", lambda: _GB)
    monkeypatch.setattr(LocalStorage, "keeps_cheaply", lambda _: cheap)
    expected = {"large": torch.randn(1500, 1000), **{f"small.{n}": torch.randn(40, 100) for n in range(60)}}
    dcp.save(expected, storage_writer=FileSystemWriterAsync(tmp_path), no_dist=True)
    files = list(tmp_path.glob("*.distcp"))
    for file in files:
        drop_cached(file)
    pages = sum(file.stat().st_size for file in files) // 4096
    for turn in range(2):  # cold, and as the first has left it
        loaded = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
        dcp.load(loaded, storage_reader=FileSystemReader(tmp_path), no_dist=True)
        assert all(loaded[key].equal(tensor) for key, tensor in expected.items())
        cached = sum(map(cached_pages, files))
        assert cached > 0.9 * pages if kept else cached < 0.5 * pages, (turn, cached, pages)
