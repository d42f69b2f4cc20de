"""Data files and `.metadata` of one save belong together: whatever is swapped, mixed or stale is refused by all."""

import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import ChecksumError, CorruptCheckpointError, LoadError
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.dcp.reader import FileSystemReader
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.format.item import locate_tensor, locate_tensor_in
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.load import ranges
from mcore_ckpt.load.requests import ReadRequest
from mcore_ckpt.tools.checkpoint import open_checkpoint
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.support.local_files import data_file, drop_cached, flip, has_direct_io

pytestmark = pytest.mark.quick

SHAPE = (600, 1000)  # 2.4 MB: more than two blocks


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(SHAPE, generator=generator) for key in ("a", "b")}


def save(directory: Path, seed: int) -> Path:
    """Two tensors of one form, each in a file of its own, and an object."""
    state = {**tensors(seed), "note": {"seed": seed}}
    writer = FileSystemWriterAsync(directory, options=SaveOptions(thread_count=2))
    dcp.save(state, storage_writer=writer, no_dist=True)
    index = read_index(directory)
    files = [chunk.item.file for key in "ab" for chunk in index.tensors[key].chunks]
    assert sorted(files) == sorted(file.name for file in (data_file(directory), data_file(directory, 0, 1)))
    return directory


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("saves")
    return save(directory / "a", 1), save(directory / "b", 2)


@pytest.fixture
def a(saves: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saves[0], tmp_path / "a"))


@pytest.fixture
def b(saves: tuple[Path, Path]) -> Path:
    return saves[1]


def swap(a: Path, b: Path) -> None:
    first, second = data_file(a), data_file(a, 0, 1)
    content = first.read_bytes()
    shutil.copy(second, first)
    second.write_bytes(content)


def take_metadata(a: Path, b: Path) -> None:
    shutil.copy(b / ".metadata", a / ".metadata")
    for number in (0, 1):
        data_file(a, 0, number).rename(a / data_file(b, 0, number).name)


def take_files(*numbers: int) -> Callable[[Path, Path], None]:
    def take(a: Path, b: Path) -> None:
        for number in numbers:
            shutil.copy(data_file(b, 0, number), data_file(a, 0, number))

    return take


def unseal_and_swap(a: Path, b: Path) -> None:
    unseal(a, b)
    swap(a, b)


def unseal_and_point_elsewhere(a: Path, b: Path) -> None:
    metadata = pickle.loads((a / ".metadata").read_bytes())
    places = {key.fqn: key for key in metadata.storage_data}
    one, other = metadata.storage_data[places["a"]], metadata.storage_data[places["b"]]
    metadata.storage_data[places["a"]], metadata.storage_data[places["b"]] = other, one
    (a / ".metadata").write_bytes(pickle.dumps(metadata))


def changed(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    """Of a data file, whose footer has 64 bytes."""

    def write(a: Path, b: Path) -> None:
        data_file(a).write_bytes(change(data_file(a).read_bytes()))

    return write


# What is done, and what a reader says of it.
ATTACKS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "swapped": (swap, "files of two ranks were swapped or renamed"),
    "other data": (take_files(0, 1), "distcp"),
    "other metadata": (take_metadata, "distcp"),
    "one other file": (take_files(1), "data files and .metadata of two saves were mixed"),
    "cut": (changed(lambda content: content[:-1]), "distcp"),
    "longer": (changed(lambda content: content + bytes(64)), "distcp"),
    "longer ahead of the footer": (
        changed(lambda content: content[:-64] + bytes(64) + content[-64:]),
        "truncated or extended",
    ),
    "without the footer": (changed(lambda content: content[:-64] + bytes(64)), "distcp"),
}


def by_reader(directory: Path) -> dict[str, torch.Tensor]:
    found = {key: torch.zeros(SHAPE) for key in "ab"}
    FileSystemReader(directory).read_items([ReadRequest(key, found[key], (0, 0), SHAPE) for key in "ab"])
    return found


def by_slices(directory: Path) -> dict[str, torch.Tensor]:
    found = {key: torch.zeros(10, 1000) for key in "ab"}
    FileSystemReader(directory).read_items([ReadRequest(key, found[key], (7, 0), (10, 1000)) for key in "ab"])
    return {key: torch.cat([whole[:7], found[key], whole[17:]]) for key, whole in tensors(1).items()}


def by_dcp(directory: Path) -> dict[str, torch.Tensor]:
    state = {**{key: torch.zeros(SHAPE) for key in "ab"}, "note": {"seed": 0}}
    dcp.load(state, storage_reader=FileSystemReader(directory), no_dist=True)
    return {key: state[key] for key in "ab"}


def by_open_checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(directory)
    return {key: torch.as_tensor(checkpoint[key][:]) for key in "ab"}


LOADS = [by_reader, by_slices, by_dcp, by_open_checkpoint]


def unseal(a: Path, b: Path) -> None:
    (a / ".metadata").write_bytes(pickle.dumps(pickle.loads((a / ".metadata").read_bytes())))


@pytest.mark.parametrize("rewrite", [None, unseal], ids=["as saved", "rewritten by stock"])
def test_what_belongs_together_loads(a: Path, b: Path, rewrite: Callable[[Path, Path], None] | None) -> None:
    if rewrite is not None:
        rewrite(a, b)
        assert read_index(a).manifest is None
    for load in LOADS:
        for key, tensor in load(a).items():
            assert torch.equal(tensor, tensors(1)[key])
    assert verify_checkpoint(a).whole


@pytest.mark.parametrize("name", ATTACKS)
def test_what_does_not_belong_together_is_refused_and_named(a: Path, b: Path, name: str) -> None:
    attack, says = ATTACKS[name]
    attack(a, b)
    for load in LOADS:
        with pytest.raises((CorruptCheckpointError, dcp.CheckpointException), match=f"(?s)(?=.*distcp).*{says}"):
            load(a)
    assert not verify_checkpoint(a).whole


@pytest.mark.parametrize("attack", [unseal_and_swap, unseal_and_point_elsewhere])
def test_verify_compares_what_files_say_with_an_index_that_stock_has_rewritten(
    a: Path, b: Path, attack: Callable[[Path, Path], None]
) -> None:
    attack(a, b)
    assert any("for .metadata, and" in problem.message for problem in verify_checkpoint(a).problems)


@pytest.mark.parametrize("end_bytes", [None, 2000], ids=["half of it", "all but its end"])
def test_a_part_of_a_file_of_another_save_is_refused(a: Path, b: Path, end_bytes: int | None) -> None:
    """The end of the file is this save's, the items are those of the save before: a write that was lost."""
    for number in (0, 1):
        file = data_file(a, 0, number)
        mine, theirs = file.read_bytes(), data_file(b, 0, number).read_bytes()
        kept = len(mine) // 2 if end_bytes is None else end_bytes
        file.write_bytes(theirs[: len(mine) - kept] + mine[-kept:])
    with pytest.raises(LoadError):
        by_reader(a)
    assert not verify_checkpoint(a).whole


def test_a_manifest_that_was_cut_off_is_missed(a: Path) -> None:
    content = (a / ".metadata").read_bytes()
    (a / ".metadata").write_bytes(content[: content.rindex(b"\x89mckSUMS")])
    pickle.loads((a / ".metadata").read_bytes())  # complete as a pickle
    with pytest.raises(CorruptCheckpointError, match="its manifest is missing"):
        by_reader(a)
    (problem,) = verify_checkpoint(a).problems
    assert "its manifest is missing" in problem.message


# --- small items: read by the thousand, each compared with its sum ----------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64)
SHAPES = ((), (7,), (3, 50), (2, 1, 600), (40, 40))


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    found = {}
    for n in range(120):
        bits = torch.randint(0, 2, (*SHAPES[n % 5], 8), dtype=torch.uint8)
        dtype = DTYPES[n % 4 if n % 7 else 4]
        found[f"layer.{n}"] = bits[..., : dtype.itemsize].contiguous().view(dtype)[..., 0].clone()
    found["layer.60.large"] = torch.randn(700, 1000)  # beyond what is read with its neighbours
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "c"
    dcp.save(
        state(), storage_writer=FileSystemWriterAsync(directory, options=SaveOptions(thread_count=2)), no_dist=True
    )
    return directory


def blank(expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(tensor) for key, tensor in expected.items()}


def load(directory: Path, into: dict[str, torch.Tensor]) -> None:
    reader = FileSystemReader(directory)
    shapes = {key: tuple(tensor.shape) for key, tensor in into.items()}
    reader.read_items(ReadRequest(key, into[key], (0,) * len(shape), shape, shape) for key, shape in shapes.items())
    assert reader.stats.bytes_needed == sum(tensor.nbytes for tensor in into.values())
    assert reader.stats.records_checked == len(into)


@pytest.mark.parametrize("window_bytes", [64 * 1024, 8 * 1024 * 1024])
def test_they_arrive(saved: Path, window_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "WINDOW_BYTES", window_bytes)
    expected = state()
    into = blank(expected)
    load(saved, into)
    for key, tensor in expected.items():
        assert into[key].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), key


def test_what_is_damaged_is_found_and_named(saved: Path, tmp_path: Path) -> None:
    index = read_index(saved)
    chance = random.Random(1)
    directory = Path(shutil.copytree(saved, tmp_path / "c"))
    for key in chance.sample(sorted(index.tensors.keys() - {"layer.60.large"}), 12):
        (chunk,) = index.tensors[key].chunks
        path = directory / chunk.item.file
        sound = path.read_bytes()
        item = sound[chunk.item.offset : chunk.item.offset + chunk.item.length]
        located = locate_tensor_in(memoryview(item), key)
        flip(path, chunk.item.offset + located.payload_offset + chance.randrange(located.payload_bytes))
        with pytest.raises(ChecksumError, match=key):
            load(directory, blank(state()))
        path.write_bytes(sound)


# --- a part of a record -----------------------------------------------------------------------------------------------

LARGE = torch.arange(3 * 1024 * 1000, dtype=torch.int32).view(3072, 1000)  # 12.3 MB
SMALL = torch.arange(60_000, dtype=torch.int32).view(300, 200)  # 240 KB


@pytest.fixture(scope="module")
def slices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("slices") / "c"
    dcp.save({"large": LARGE, "small": SMALL}, storage_writer=FileSystemWriterAsync(directory), no_dist=True)
    return directory


@pytest.fixture
def of_slices(slices: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(slices, tmp_path / "c"))


def flip_element(directory: Path, key: str, elem: int) -> None:
    """Change one bit of an element as it is stored."""
    (chunk,) = read_index(directory).tensors[key].chunks
    path, item = directory / chunk.item.file, chunk.item
    content = bytearray(path.read_bytes())
    located = locate_tensor(lambda at, n: bytes(content[item.offset + at : item.offset + at + n]), item.length, key)
    content[item.offset + located.payload_offset + 4 * elem] ^= 4
    path.write_bytes(content)


def load_part(directory: Path, part: "Part", *, strided: bool) -> torch.Tensor:
    rows, columns = part.box.sizes
    out = torch.zeros(columns, rows, dtype=torch.int32).T if strided else torch.zeros(rows, columns, dtype=torch.int32)
    FileSystemReader(directory).read_items([ReadRequest(part.key, out, *part.box)])
    return out


class Part(NamedTuple):
    key: str
    box: Box
    element: int
    is_cached: bool = True


PARTS = [
    Part("large", Box((0, 0), (1536, 1000)), 5),  # half of the rows: straight to where they belong
    Part("large", Box((1000, 0), (1072, 1000)), 1_500_000),
    Part("large", Box((1000, 0), (3, 1000)), 1_001_000),  # a few rows
    Part("large", Box((3071, 990), (1, 10)), 3_071_999),  # a piece of the last one
    Part("large", Box((0, 100), (3072, 300)), 1_536_110, is_cached=False),  # all of it is read for the columns
    Part("small", Box((0, 0), (150, 200)), 100),
    Part("small", Box((0, 50), (300, 50)), 30_060),  # columns of what is read whole anyway
    Part("small", Box((7, 7), (1, 1)), 1407),
]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("part", PARTS)
def test_a_flipped_bit_inside_a_slice_is_noticed(of_slices: Path, part: Part, strided: bool) -> None:
    whole = LARGE if part.key == "large" else SMALL
    (a, b), (rows, columns) = part.box.offsets, part.box.sizes
    wanted = whole[a : a + rows, b : b + columns]
    assert torch.equal(load_part(of_slices, part, strided=strided), wanted)
    flip_element(of_slices, part.key, part.element)
    if not part.is_cached:
        if not has_direct_io(of_slices):
            pytest.skip("this file system has no O_DIRECT")
        for file in of_slices.glob("*.distcp"):
            drop_cached(file)
    with pytest.raises(ChecksumError, match=r"the bytes \[\d+, \d+\) of __0_\d\S*\.distcp have CRC-32"):
        load_part(of_slices, part, strided=strided)
    with open_checkpoint(of_slices) as opened, pytest.raises(ChecksumError, match="of its elements have CRC-32"):
        opened[part.key][a : a + rows, b : b + columns]
