"""What a load takes from the page cache and what it leaves there, by `LoadOptions.page_cache`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.core.errors import ChecksumError
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.load.requests import ReadRequest
from tests.support.gloo_ranks import run_ranks
from tests.support.local_files import cached_pages, device_bytes, drop_cached, flip, has_direct_io


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("page_cache") / "c"
    dcp.save(state(), storage_writer=FileSystemWriterAsync(directory), no_dist=True)
    if not has_direct_io(directory):
        pytest.skip("this file system has no O_DIRECT")
    return directory


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"large": torch.randn(1500, 1000), **{f"small.{n}": torch.randn(40, 100) for n in range(60)}}


def load_all(directory: Path, options: LoadOptions) -> None:
    expected = state()
    loaded = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    dcp.load(loaded, storage_reader=FileSystemReader(directory, options=options), no_dist=True)
    assert all(loaded[key].equal(tensor) for key, tensor in expected.items())


def load_columns(directory: Path, options: LoadOptions) -> None:
    part = torch.zeros(1500, 100)
    FileSystemReader(directory, options=options).read_items([ReadRequest("large", part, (0, 300), (1500, 100))])
    assert part.equal(state()["large"][:, 300:400])


@pytest.mark.parametrize("load", [load_all, load_columns])
@pytest.mark.parametrize("page_cache", ["auto", "on"])
def test_a_load_reads_from_and_leaves_in_the_page_cache_what_the_option_says(
    page_cache: str, load: object, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(load)
    monkeypatch.setenv("MCORE_CKPT_PAGE_CACHE", page_cache)
    options = LoadOptions.from_environment()
    files = list(saved.glob("*.distcp"))
    pages = sum(file.stat().st_size for file in files) // 4096
    for file in files:
        drop_cached(file)
    for _ in range(2):  # also a load right after the first
        load(saved, options)
        cached = sum(map(cached_pages, files))
        assert cached > 0.7 * pages if page_cache == "on" else cached < 0.05 * pages, (cached, pages)
    for file in files:
        file.read_bytes()
    before = device_bytes()
    load(saved, options)
    read = device_bytes() - before
    assert read < 0.05 * pages * 4096, (read, pages)


def load_half(directory: Path, options: LoadOptions) -> None:
    part = torch.zeros(750, 1000)
    FileSystemReader(directory, options=options).read_items([ReadRequest("large", part, (750, 0), (750, 1000))])
    assert part.equal(state()["large"][750:])


def load_a_fourth_of_each_row(directory: Path, options: LoadOptions) -> None:
    part, first = torch.zeros(1500, 250), 250 * torch.distributed.get_rank()
    FileSystemReader(directory, options=options).read_items([ReadRequest("large", part, (0, first), (1500, 250))])
    assert part.equal(state()["large"][:, first : first + 250])


def load_as_one_of(rank: int, ranks_here: str, load: Callable[[Path, LoadOptions], None], directory: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOCAL_WORLD_SIZE", ranks_here)
        load(directory, LoadOptions())


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="ranks load alone, which it has no argument for")
@pytest.mark.parametrize(
    ("load", "ranks_here", "is_shared"),
    [(load_all, "1", False), (load_half, "2", False), (load_half, "4", True), (load_a_fourth_of_each_row, "4", True)],
)
def test_what_ranks_of_a_host_request_alike_stays_in_the_page_cache_for_the_others(
    load: Callable[[Path, LoadOptions], None], ranks_here: str, is_shared: bool, saved: Path
) -> None:
    """Of four ranks that load half of a tensor each, two load the same half; a fourth of each row is read with the rest
    of it, which is what the other ranks load.
    """
    files = list(saved.glob("*.distcp"))
    for file in files:
        drop_cached(file)
    run_ranks(load_as_one_of, 4, ranks_here, load, saved)
    cached, pages = sum(map(cached_pages, files)), state()["large"].nbytes // 4096
    assert cached > 0.4 * pages if is_shared else cached < 0.05 * pages, (cached, pages)


def refuse_damage(rank: int, directory: Path) -> None:
    with pytest.raises(ChecksumError):
        load_a_fourth_of_each_row(directory, LoadOptions())


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="ranks load alone, which it has no argument for")
@pytest.mark.parametrize("is_cached", [False, True])
def test_each_rank_finds_damage_in_rows_whoever_has_read_them(is_cached: bool, saved: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(saved, tmp_path / "c"))
    (chunk,) = read_index(directory).tensors["large"].chunks
    flip(directory / chunk.item.file, chunk.item.offset + chunk.item.length // 2)
    if not is_cached:
        drop_cached(directory / chunk.item.file)
    run_ranks(refuse_damage, 4, directory)
