"""What a load takes from the page cache and what it leaves there, by `LoadOptions.page_cache`; what it takes of the
host's memory, beyond its destinations, as the operating system counts it.
"""

import gc
import shutil
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import ChecksumError
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.load import ranges
from mcore_ckpt.load.requests import ReadRequest
from mcore_ckpt.storage.direct_io import LocalReader
from tests.support.gloo_ranks import run_ranks
from tests.support.local_files import cached_pages, device_bytes, drop_cached, has_direct_io
from tests.support.meanwhile import ahead_of
from tests.support.stored_layouts import flip_item, part, whole, write_checkpoint

MIB = 1024 * 1024
SIDE = 4096


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


def load_box(directory: Path, options: LoadOptions, box: Box) -> None:
    found = torch.zeros(box.sizes)
    FileSystemReader(directory, options=options).read_items([ReadRequest("large", found, *box)])
    assert found.equal(part(state()["large"], box))


load_columns = partial(load_box, box=Box((0, 300), (1500, 100)))
load_half = partial(load_box, box=Box((750, 0), (750, 1000)))


def load_a_fourth_of_each_row(directory: Path, options: LoadOptions) -> None:
    load_box(directory, options, Box((0, 250 * torch.distributed.get_rank()), (1500, 250)))


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


def test_one_thread_reads_a_stream_through_a_reader_of_its_own(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads ahead by reader, and fills the page cache slowly where one jumps about."""
    monkeypatch.setattr(ranges, "WINDOW_BYTES", 262_144)
    monkeypatch.setattr(ranges, "STREAM_BYTES", 1_600_000)
    reads: dict[tuple[LocalReader, int], list[int]] = {}

    def note(reader: LocalReader, offset: int, *_: Any) -> None:
        reads.setdefault((reader, threading.get_ident()), []).append(offset)

    with ahead_of(LocalReader, "read_into", note):
        load_all(saved, LoadOptions(page_cache="on"))
    large = {key: pairwise(offsets) for key, offsets in reads.items() if len(offsets) > 2}
    assert len({reader for reader, _ in large}) == len(large)
    assert sum(not 0 < then - first <= 262_144 for pairs in large.values() for first, then in pairs) <= 4, reads


def refuse_damage(rank: int, directory: Path) -> None:
    with pytest.raises(ChecksumError):
        load_a_fourth_of_each_row(directory, LoadOptions())


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="ranks load alone, which it has no argument for")
@pytest.mark.parametrize("is_cached", [False, True])
def test_each_rank_finds_damage_in_rows_whoever_has_read_them(is_cached: bool, saved: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(saved, tmp_path / "c"))
    flip_item(read_index(directory), "large")
    if not is_cached:
        for file in directory.glob("*.distcp"):
            drop_cached(file)
    run_ranks(refuse_damage, 4, directory)


def destinations(kind: str) -> list[tuple[torch.Tensor, Box]]:
    everything = Box((0, 0), (SIDE, SIDE))
    if kind == "another dtype":
        return [(torch.ones(SIDE, SIDE, dtype=torch.bfloat16), everything)]
    if kind == "transposed":
        return [(torch.ones(SIDE, SIDE).t(), everything)]
    if kind == "half of every row":
        return [(torch.ones(SIDE, SIDE // 2), Box((0, 0), (SIDE, SIDE // 2)))]
    return [(torch.ones(SIDE, SIDE), everything)]


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name} in /proc/self/status")


def peak_bytes_of_load(rank: int, path: str, kind: str) -> int:
    wanted = destinations(kind)
    reader = FileSystemReader(path)
    # What torch and the interpreter set up on first use is not what is measured.
    small = torch.ones(2, 2, dtype=wanted[0][0].dtype)
    reader.read_items([ReadRequest("small", small, (0, 0), (2, 2))])
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status_bytes("VmRSS")
    reader.read_items([ReadRequest("large", tensor, *box) for tensor, box in wanted])
    return status_bytes("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts memory as Linux does")
@pytest.mark.parametrize("kind", ["in place", "another dtype", "transposed", "half of every row"])
def test_a_load_takes_its_buffers_and_no_more(kind: str, tmp_path: Path) -> None:
    """Four buffers, which are 32 MiB, and what four threads and the allocator take besides: 38 to 41 MiB seen."""
    tensors = {"large": whole(torch.zeros(SIDE, SIDE)), "small": whole(torch.zeros(2, 2))}
    write_checkpoint(tmp_path, tensors, padding=[3])
    (taken,) = run_ranks(peak_bytes_of_load, 1, str(tmp_path), kind)
    assert taken <= 48 * MIB
