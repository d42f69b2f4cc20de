"""The manifest: what `.metadata` says of its save, its files and their bytes, and the index in columns.

It stands behind the pickle, where no unpickler looks: the id of the save, length and integrity footer of each data
file, the CRC-32 of each item, of payloads longer than a block the cumulative CRC-32 at the end of each block, so that a
part of a payload can be checked without the rest, and the index as `_index_columns.py` has it. It ends with the CRC-32
of all of `.metadata`. The pickle announces it, in bytes that every unpickler drops, so that a manifest which was cut
off is missed.

`docs/format.md` has every field. Columns of numbers, no object for an item: there may be a million of them.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.format._columns import Columns, column_bytes, text_bytes
from mcore_ckpt.format.file_names import id_in_names
from mcore_ckpt.format.footer import SAVE_ID_BYTES, ManifestFile, newer_error
from mcore_ckpt.storage.base import FileVersion, RangeReader

_VERSION: Final = 2
_MAGIC: Final = b"\x89mckSUMS"
_END: Final = b"\x89mckEND\n"
# SHORT_BINBYTES and POP, behind PROTO: gone when a program unpickles the file and pickles it again, as the manifest is.
_ANNOUNCED: Final = b"C" + bytes((len(_MAGIC),)) + _MAGIC + b"0"
_PROTO_BYTES: Final = 2
_HEAD: Final = struct.Struct("<8sII16sQQQQ")
_SECTIONS: Final = struct.Struct("<QQQQ")
_TRAILER: Final = struct.Struct("<QI8s")
_TRAILER_UNSUMMED: Final = 12  # CRC-32 and magic

# The fingerprints of tensors stand before the manifest, with the same in front and behind.
_SUMS_MAGIC: Final = b"\x89mckSTAT"
_SUMS_HEAD: Final = struct.Struct("<8sIQQ")
_SUMS_END: Final = struct.Struct("<Q8s")
_SUMS_VERSION: Final = 1

_SOME_BYTES: Final = 64 * 1024

NO_FINGERPRINT: Final = -1
"""Of a tensor whose fingerprint is not stored."""

Section = tuple[bytes, int]
"""Columns as they lie in the file, deflated, and their length when inflated."""
_NONE: Final = (b"", 0)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `.metadata` says of its save, its files and their bytes.

    Items are numbered as `storage_data` lists them, from 0.
    """

    save_id: bytes  # 16 bytes
    # Each data file, by name; and the file of the common state, if the save has one (of that, the CRC-32 is of all its
    # bytes). The columns of the index number them in this order.
    files: Mapping[str, ManifestFile]
    # CRC-32 of each item's payload; of the whole item for objects and for what is stored through a transform.
    crcs: array[int]
    # Numbers of the items of which cumulative CRCs are kept, ascending.
    block_items: array[int] = field(default_factory=lambda: array("Q"))
    block_counts: array[int] = field(default_factory=lambda: array("I"))  # how many, for each of those
    # The cumulative CRC-32 of the payload's first 1, 2, 3, ... MiB, up to the last boundary inside it.
    blocks: array[int] = field(default_factory=lambda: array("I"))
    # The index, of the tensors and of the rest; None where the pickle alone says it.
    columns: tuple[Section, Section] | None = field(default=None, compare=False, repr=False)
    # The fingerprint of each tensor, in the order of the index (`array('q')`), or `NO_FINGERPRINT`; None: of none.
    fingerprints: array[int] | None = field(default=None, repr=False)

    def running(self) -> Iterator[tuple[int, array[int]]]:
        """Number of each item that has cumulative CRCs, and those."""
        at = 0
        for number, count in zip(self.block_items, self.block_counts, strict=True):
            yield number, self.blocks[at : at + count]
            at += count


@dataclass(frozen=True, slots=True)
class Identity:
    """Which `.metadata` a file is: no two saves make the same, even of equal content.

    Attributes:
        token: tells it from all others in its directory.
        save: id of the save, as file names show it, from the manifest; None without one.
        version: of the file.
    """

    token: str
    save: str | None
    version: FileVersion | None = field(compare=False)


def identity_of(reader: RangeReader) -> Identity:
    """The identity of a `.metadata`, or of what is to become one, whatever it holds.

    With a manifest the random id of the save and the CRC-32 of all bytes; else some bytes and the file itself.
    """
    size_bytes, version = reader.size_bytes, reader.version
    end = reader.read(max(0, size_bytes - _TRAILER.size), min(size_bytes, _TRAILER.size))
    if end.endswith(_END) and len(end) == _TRAILER.size:
        length, stated, _ = _TRAILER.unpack(end)
        if _HEAD.size <= length <= size_bytes:
            magic, _, _, save_id, *_ = _HEAD.unpack(reader.read(size_bytes - length, _HEAD.size))
            if magic == _MAGIC:
                return Identity(f"{save_id.hex()}{stated:08x}", id_in_names(save_id), version)
    # A manifest is what makes an index of this package. Of another the ends are enough, next to its inode and time.
    some = min(size_bytes, _SOME_BYTES)
    crc = crc32(reader.read(size_bytes - some, some), crc32(reader.read(0, some)))
    stat = "" if version is None else "-".join(f"{part:x}" for part in version)
    return Identity(f"{crc:08x}-{size_bytes:x}-{stat}", None, version)


def with_manifest(content: bytes, manifest: Manifest) -> bytes:
    """`content`, a pickle, which announces its manifest, followed by that."""
    if content[:1] == b"\x80":
        content = b"".join((content[:_PROTO_BYTES], _ANNOUNCED, memoryview(content)[_PROTO_BYTES:]))
    names = [text_bytes(name) for name in manifest.files]
    files = manifest.files.values()
    of_tensors, of_objects = manifest.columns or (_NONE, _NONE)
    body = b"".join(
        (
            _HEAD.pack(
                *(_MAGIC, _VERSION, len(names), manifest.save_id),
                *(len(manifest.crcs), len(manifest.block_items), len(manifest.blocks), sum(map(len, names))),
            ),
            _SECTIONS.pack(len(of_tensors[0]), of_tensors[1], len(of_objects[0]), of_objects[1]),
            column_bytes(array("Q", [file.size_bytes for file in files])),
            column_bytes(array("I", [file.table_crc32 for file in files])),
            b"".join(file.save_id for file in files),
            column_bytes(array("I", map(len, names))),
            *names,
            column_bytes(manifest.crcs),
            column_bytes(manifest.block_items),
            column_bytes(manifest.block_counts),
            column_bytes(manifest.blocks),
            of_tensors[0],
            of_objects[0],
        )
    )
    body += struct.pack("<Q", len(body) + _TRAILER.size)
    content += _fingerprints_section(manifest.fingerprints)
    return b"".join((content, body, struct.pack("<I8s", crc32(body, crc32(content)), _END)))


def _fingerprints_section(fingerprints: array[int] | None) -> bytes:
    if fingerprints is None:
        return b""
    without = array("I", [number for number, value in enumerate(fingerprints) if value == NO_FINGERPRINT])
    values = fingerprints if not without else [max(value, 0) for value in fingerprints]
    section = b"".join(
        (
            _SUMS_HEAD.pack(_SUMS_MAGIC, _SUMS_VERSION, len(fingerprints), len(without)),
            column_bytes(array("I", values)),
            column_bytes(without),
        )
    )
    return section + _SUMS_END.pack(len(section) + _SUMS_END.size, _SUMS_MAGIC)


def _split_fingerprints(data: memoryview, where: str) -> tuple[int, array[int] | None]:
    """Where the pickle ends in what precedes the manifest, and the fingerprints behind it, if any."""
    if data[-len(_SUMS_MAGIC) :].tobytes() != _SUMS_MAGIC:
        return len(data), None
    columns = Columns(data, f"{where}: its fingerprints")
    length, _ = _SUMS_END.unpack(data[-_SUMS_END.size :]) if len(data) >= _SUMS_END.size else (0, b"")
    start = len(data) - length
    if start < 0 or length < _SUMS_HEAD.size + _SUMS_END.size:
        raise columns.wrong(f"they are said to have {length} bytes")
    columns = Columns(data[start : len(data) - _SUMS_END.size], f"{where}: its fingerprints")
    magic, version, count, without_count = _SUMS_HEAD.unpack(columns.bytes(_SUMS_HEAD.size))
    if magic != _SUMS_MAGIC:
        raise columns.wrong("they do not begin where their end says")
    if version != _SUMS_VERSION:
        return start, None  # nothing is missing without them
    fingerprints, without = array("q", columns.column("I", count)), columns.column("I", without_count)
    columns.finish()
    if any(number >= count for number in without):
        raise columns.wrong("one of a tensor that is not there")
    for number in without:
        fingerprints[number] = NO_FINGERPRINT
    return start, fingerprints


def split_metadata(data: bytes, where: str) -> tuple[bytes, Manifest | None]:
    """The pickle in a `.metadata`, and its manifest, whose CRC-32 of the whole has been compared; None if it has none.

    Raises `CorruptCheckpointError` for damage, `NewerFormatError` for a version that is not known.
    """
    if not data.endswith(_END):
        if _MAGIC in data:
            raise _damaged(where, "its manifest is missing, or has no end; the file was truncated or damaged")
        return data, None
    if len(data) < _HEAD.size + _TRAILER.size:
        raise _damaged(where, f"{len(data)} bytes cannot hold a manifest")
    length, stated, _ = _TRAILER.unpack_from(data, len(data) - _TRAILER.size)
    got = crc32(memoryview(data)[: len(data) - _TRAILER_UNSUMMED])
    if got != stated:
        raise _damaged(where, f"it has CRC-32 {got:#010x}, expected {stated:#010x}")
    if not _HEAD.size + _TRAILER.size <= length <= len(data):
        raise _damaged(where, f"its manifest is said to have {length} bytes")
    start = len(data) - length
    manifest = _decode(memoryview(data)[start : len(data) - _TRAILER.size], where)
    start, fingerprints = _split_fingerprints(memoryview(data)[:start], where)
    if fingerprints is not None:
        manifest = replace(manifest, fingerprints=fingerprints)
    if not data.startswith(_ANNOUNCED, _PROTO_BYTES):
        return data[:start], manifest
    return b"".join((data[:_PROTO_BYTES], memoryview(data)[_PROTO_BYTES + len(_ANNOUNCED) : start])), manifest


def _decode(data: memoryview, where: str) -> Manifest:
    columns = Columns(data, f"{where}: its manifest")
    magic, version, file_count, save_id, items, block_items, blocks, name_bytes = _HEAD.unpack(
        columns.bytes(_HEAD.size)
    )
    if magic != _MAGIC:
        raise columns.wrong("it does not begin where its end says")
    if version != _VERSION:
        raise newer_error(where, version, _VERSION)
    packed, unpacked, more_packed, more_unpacked = _SECTIONS.unpack(columns.bytes(_SECTIONS.size))
    sizes, table_crcs = columns.column("Q", file_count), columns.column("I", file_count)
    ids = bytes(columns.bytes(SAVE_ID_BYTES * file_count))
    name_lengths = columns.column("I", file_count)
    if sum(name_lengths) != name_bytes:
        raise columns.wrong("the names of its files have not the length that they should")
    files = {
        name: ManifestFile(size, crc, ids[SAVE_ID_BYTES * n : SAVE_ID_BYTES * (n + 1)])
        for n, (name, size, crc) in enumerate(zip(columns.texts(name_lengths), sizes, table_crcs, strict=True))
    }
    manifest = Manifest(
        save_id,
        files,
        columns.column("I", items),
        columns.column("Q", block_items),
        columns.column("I", block_items),
        columns.column("I", blocks),
        ((bytes(columns.bytes(packed)), unpacked), (bytes(columns.bytes(more_packed)), more_unpacked))
        if packed
        else None,
    )
    columns.finish()
    if len(files) != file_count or sum(manifest.block_counts) != blocks:
        raise columns.wrong("its columns contradict each other")
    if any(number >= items for number in manifest.block_items):
        raise columns.wrong("it holds sums of an item that is not there")
    return manifest


def _damaged(where: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{where}: the file is damaged: {what}. Restore it from another copy, or load an earlier checkpoint."
    )
