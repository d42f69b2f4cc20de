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
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.format import index_pickle
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.integrity import Manifest, ManifestFile, split_metadata, with_manifest
from mcore_ckpt.format.metadata_read import parse_index
from mcore_ckpt.format.metadata_write import MetadataEncoder
from mcore_ckpt.load.checks import pickle_differs
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.format.test_metadata import indexes

pytestmark = pytest.mark.quick

SAVE_ID = bytes(range(16))


def sealed(index: CheckpointIndex) -> bytes:
    items = [chunk.item for entry in index.tensors.values() for chunk in entry.chunks]
    items += [entry.item for entry in index.objects.values()]
    seal = Manifest(
        SAVE_ID,
        {item.file: ManifestFile(2**62, 5, SAVE_ID) for item in items},
        array("I", range(len(items))),
        *((array("Q", [1]), array("I", [2]), array("I", [7, 8])) if len(items) > 1 else ()),
    )
    encoder = MetadataEncoder(index)
    return encoder.encode(index.objects, storage_meta=index.storage_meta, manifest=seal)


def read(data: bytes) -> CheckpointIndex:
    """By the columns alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_pickle, "unpickle_index", None)
        return parse_index(data, "a")


def unpickled(data: bytes) -> CheckpointIndex:
    """By the pickle, with what else the manifest says."""
    pickled, seal = split_metadata(data, "a")
    assert seal is not None
    return parse_index(with_manifest(pickled, replace(seal, columns=None)), "a")


def sayable(index: CheckpointIndex, has_paths: bool) -> CheckpointIndex:
    """The index without what columns cannot say."""
    paths = {key: tuple(key.split(".")) for key in (*index.tensors, *index.objects)}
    note: dict[str, Any] = {"nd_reformulated_orig_global_shape": (6, 10)}
    notes = dict(zip(index.tensors, (note, {}), strict=False))
    return replace(index, planner_data=(has_paths and paths) or None, mcore_data=notes)


@given(indexes(), st.booleans())
def test_columns_say_what_the_pickle_says(index: CheckpointIndex, has_paths: bool) -> None:
    data = sealed(sayable(index, has_paths))
    found = read(data)
    assert found == unpickled(data)
    assert found.planner_data == sayable(index, has_paths).planner_data
    assert (list(found.tensors), list(found.objects)) == (list(index.tensors), list(index.objects))


@given(indexes())
def test_what_columns_cannot_say_is_in_the_pickle(index: CheckpointIndex) -> None:
    data = sealed(index)
    assert parse_index(data, "a") == unpickled(data)
    assert parse_index(data, "a").planner_data == index.planner_data


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
    chunk = StoredChunk((0, 0), (4, 3), StoredItem("__0_0.distcp", 0, 700, 0))
    stored = {"o": ObjectEntry("o", StoredItem("__0_0.distcp", 9000, 7, 9))}
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
def test_columns_that_cannot_be_are_refused(name: str) -> None:
    data = sealed(one_tensor())
    read(data)
    with pytest.raises(CorruptCheckpointError):
        parse_index(with_sections(data, HOSTILE[name]), "a")


@pytest.mark.parametrize("unpacked_bytes", [10, 2**50])
def test_sections_are_not_inflated_beyond_what_they_say(unpacked_bytes: int) -> None:
    pickled, seal = split_metadata(sealed(one_tensor()), "a")
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
