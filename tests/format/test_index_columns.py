"""The index in columns, behind the pickle: says the same as that, is checked like that, and is what is read."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.format import metadata_read
from mcore_ckpt.format.index import (
    CheckpointIndex,
    ObjectEntry,
    StoredChunk,
    StoredItem,
    TensorEntry,
)
from mcore_ckpt.format.integrity import Manifest, ManifestFile, split_metadata, with_manifest
from mcore_ckpt.format.metadata_read import parse_index, pickle_differs
from mcore_ckpt.format.metadata_write import MetadataEncoder
from mcore_ckpt.tools.verify import verify_checkpoint

SAVE_ID = bytes(range(16))
META = {"checkpoint_id": "/run", "save_id": SAVE_ID.hex(), "load_id": None, "modules": ["m"]}


def sample(tensors: int = 300, objects: int = 20) -> CheckpointIndex:
    """What a save holds: many shapes, tensors of several chunks, offsets beyond 32 bits."""
    entries, at, number = {}, 0, 0

    def item() -> StoredItem:
        nonlocal at, number
        length = 700 + number % 3 * 2**33
        at, number = at + length, number + 1
        return StoredItem(f"__{number % 2}_0.distcp", at - length, length, (), number)

    for n in range(tensors):
        rows, columns = 2 * (n % 7), n % 40 if n < tensors // 2 else 3
        shapes = {0: (), 1: (columns,), 2: (rows, columns), 3: (2**40, 2, n)}
        shape = shapes[n % 4]
        chunks = [StoredChunk((0,) * len(shape), shape, item())]
        if n % 4 == 2 and rows > 2:
            half = (rows // 2, columns)
            chunks = [StoredChunk((start, 0), half, item()) for start in (0, rows // 2)]
        key, dtype = f"layer.{n}" + "x" * (n % 90), ("float32", "bfloat16")[n % 2]
        entries[key] = TensorEntry(key, dtype, shape, tuple(chunks), n % 5 == 0)
    found = {f"object.{n}/shard_0_1": ObjectEntry(f"object.{n}/shard_0_1", item()) for n in range(objects)}
    return CheckpointIndex("a", entries, found, storage_meta=META, version="1.0.0")


def sealed(index: CheckpointIndex, plans: list[Any] | None = None, files: int = 2) -> bytes:
    items = [chunk.item for entry in index.tensors.values() for chunk in entry.chunks]
    items += [entry.item for entry in index.objects.values()]
    seal = Manifest(
        SAVE_ID,
        {f"__{n}_0.distcp": ManifestFile(2**62, 5, SAVE_ID) for n in range(files)},
        array("I", [item.crc32 for item in items]),
        *((array("Q", [1]), array("I", [2]), array("I", [7, 8])) if len(items) > 1 else ()),
    )
    return MetadataEncoder(index).encode(index.objects, storage_meta=META, local_plans=plans, manifest=seal)


def columns_of(data: bytes) -> Manifest:
    _, seal = split_metadata(data, "a")
    assert seal is not None
    return seal


def read(data: bytes, monkeypatch: pytest.MonkeyPatch) -> CheckpointIndex:
    """By the columns alone."""
    with monkeypatch.context() as patch:
        patch.setattr(metadata_read, "unpickle_index", None)
        return parse_index(data, "a")


def unpickled(data: bytes) -> CheckpointIndex:
    """By the pickle, with what else the manifest says."""
    pickled, seal = split_metadata(data, "a")
    assert seal is not None
    return parse_index(with_manifest(pickled, replace(seal, columns=None)), "a")


@pytest.mark.parametrize("counts", [(300, 20), (0, 3), (3, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("plans", [None, [{"a plan": [1, 2]}]])
def test_columns_say_what_the_pickle_says(
    counts: tuple[int, int], plans: list[Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = sample(*counts)
    data = sealed(index, plans)
    found = read(data, monkeypatch)
    assert found == unpickled(data)
    assert list(found.tensors.items()) == list(index.tensors.items())
    assert list(found.objects.items()) == list(index.objects.items())
    assert (found.storage_meta, found.version, found.has_local_plans) == (META, "1.0.0", plans is not None)


@pytest.mark.parametrize("key", ["\u0414", "a\nb", "", "k" * 300, "\udc80", "\x94", "k" * 2_000_000])
def test_unusual_keys(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {}
    for n, name in enumerate(("before", key, "behind")):
        item = StoredItem("__0_0.distcp", 700 * n, 700, (), n)
        entries[name] = TensorEntry(name, "float32", (2,), (StoredChunk((0,), (2,), item),))
    stored = {f"o{key}": ObjectEntry(f"o{key}", StoredItem("__1_0.distcp", 2800, 700, (), 9))}
    data = sealed(CheckpointIndex("a", entries, stored))
    assert read(data, monkeypatch).tensors == entries
    assert read(data, monkeypatch) == unpickled(data)


def test_what_planners_left_is_in_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    index = sample(5, 2)
    keys = [*index.tensors, *index.objects]
    paths = {key: tuple(key.split(".")) for key in keys}
    first, key = keys[0], keys[-1]
    paths[first] = ("layer", 0)  # an element of a list
    for planner_data in (paths, {**paths, key: (key,)}):
        noted: dict[str, Any] = {keys[1]: {"nd_reformulated_orig_global_shape": (6, 10)}, keys[2]: {}}
        data = sealed(replace(index, planner_data=planner_data, mcore_data=noted))
        found = read(data, monkeypatch)
        assert found.planner_data == planner_data
        assert found.mcore_data == noted
        assert found == unpickled(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: replace(index, planner_data={"other": ("other",)}),
        lambda index: replace(index, planner_data=["a list"]),
        lambda index: replace(index, planner_data=dict.fromkeys([*index.tensors, *index.objects], ("another path",))),
        lambda index: replace(index, mcore_data={next(iter(index.tensors)): {"a note": 1}}),
        lambda index: replace(
            index,
            objects={
                key: ObjectEntry(key, entry.item._replace(transforms=("zstd",))) for key, entry in index.objects.items()
            },
        ),
    ],
    ids=["other keys", "no dict", "other paths", "other notes", "transforms"],
)
def test_what_columns_cannot_say_is_in_the_pickle_alone(change: Callable[[CheckpointIndex], CheckpointIndex]) -> None:
    index = change(sample(5, 2))
    data = sealed(index)
    assert columns_of(data).columns is None
    found = parse_index(data, "a")
    assert (found.tensors, found.objects) == (index.tensors, index.objects)
    assert (found.planner_data, found.mcore_data) == (index.planner_data, index.mcore_data)


# --------------------------------------------------------------------------------------------------------- not trusted


def with_sections(data: bytes, change: Callable[[bytearray, bytearray], Any]) -> bytes:
    """`data` with its two sections changed as they are when inflated, and all lengths and checksums made good."""
    pickled, seal = split_metadata(data, "a")
    assert seal is not None
    assert seal.columns is not None
    sections = [bytearray(zlib.decompress(packed)) for packed, _ in seal.columns]
    change(*sections)
    first, second = ((zlib.compress(section), len(section)) for section in sections)
    return with_manifest(pickled, replace(seal, columns=(first, second)))


def one_tensor() -> CheckpointIndex:
    """In columns, behind 40 bytes: of its kind 8, of its key and form 8, of its chunk 20, its form, the names."""
    chunk = StoredChunk((0, 0), (4, 3), StoredItem("__0_0.distcp", 0, 700, (), 0))
    stored = {"o": ObjectEntry("o", StoredItem("__0_0.distcp", 9000, 7, (), 9))}
    return CheckpointIndex("a", {"w": TensorEntry("w", "float32", (4, 3), (chunk,))}, stored)


def number(at: int, value: int, code: str = "<Q", section: int = 0) -> Callable[[bytearray, bytearray], Any]:
    return lambda *sections: struct.pack_into(code, sections[section], at, value)


FORM = 40 + 8 + 8 + 20  # of one tensor of one chunk, where its form begins
HOSTILE = {
    "tensors that are not there": number(0, 2**40),
    "chunks that are not there": number(16, 2**62),
    "forms that are not there": number(24, 2**50),
    "key longer than all": number(48, 2**31, "<I"),
    "no such form": number(52, 1, "<I"),
    "no such file": number(56, 7, "<I"),
    "end beyond 2**63": lambda first, _: struct.pack_into("<QQ", first, 60, 1, 2**63 - 1),
    "no such kind": number(FORM, 1),
    "axes without end": number(FORM + 8, 2**62),
    "shape beyond 2**63": number(FORM + 24, 2**64 - 1),
    "chunk outside": number(FORM + 40, 2),
    "bytes behind the end": lambda first, _: first.extend(b"\0"),
    "unknown dtype": lambda first, _: first.__setitem__(slice(-8, -1), b"float33"),
    "name that is no text": lambda first, _: first.__setitem__(-1, 0xFF),
    "object of no file": number(28, 9, "<I", 1),
    "an object called as a tensor": lambda _, more: more.__setitem__(48, ord("w")),
    "details nested without end": lambda _, more: (
        struct.pack_into("<Q", more, 16, 10**5),
        more.__setitem__(slice(49, None), b"[" * 10**5),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_columns_that_cannot_be_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = sealed(one_tensor(), files=1)
    read(data, monkeypatch)
    with pytest.raises(CorruptCheckpointError):
        parse_index(with_sections(data, HOSTILE[name]), "a")


@pytest.mark.parametrize("unpacked_bytes", [10, 2**50])
def test_sections_are_not_inflated_beyond_what_they_say(unpacked_bytes: int) -> None:
    pickled, seal = split_metadata(sealed(sample(3, 1)), "a")
    assert seal is not None
    assert seal.columns is not None
    bomb = zlib.compress(bytes(50 * 1024 * 1024), 9)
    for columns in (((bomb, unpacked_bytes), seal.columns[1]), (seal.columns[0], (bomb, unpacked_bytes))):
        with pytest.raises(CorruptCheckpointError, match="inflated"):
            parse_index(with_manifest(pickled, replace(seal, columns=columns)), "a")


# ------------------------------------------------------------------------------------------------- columns and pickle


def test_verify_names_what_columns_and_pickle_say_differently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = Path(__file__).parent / "golden" / "ours-0.1.0"
    for file in golden.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    data = (tmp_path / ".metadata").read_bytes()
    assert pickle_differs(tmp_path) is None
    assert verify_checkpoint(tmp_path).whole

    def rename(section: bytearray, _: bytearray) -> None:
        at = section.index(b"mask")
        section[at : at + 4] = b"mark"

    (tmp_path / ".metadata").write_bytes(with_sections(data, rename))
    assert "tensor 'mark': its columns say TensorEntry" in (pickle_differs(tmp_path) or "")
    assert main(["verify", str(tmp_path)]) == 1
    assert "tensor 'mark': its columns say" in capsys.readouterr().out
