"""Zip archives that nobody vouches for: where each record lies, in checked arithmetic, and if it is what was written.

Every offset and length is compared with the size of the item before it is used, directory and local headers have to
agree, and nothing is allocated that the item is not large enough to contain. Only what `torch.save` can write is
understood: one disk, no comment, records stored as they are, neither compressed nor encrypted.

An archive may have further members, which its readers, stock's among them, pass by. Above all versions of an object:
what ranks hold that claim to hold a replica of it, though theirs is another. Stock saves the main one alone, which all
of these ranks get at a load.

    archive/mcore_ckpt/ranks.json   {"layout": of the job, "ranks": {"1": 0, "3": 1}}: which rank had which version
    archive/mcore_ckpt/0            a version as `torch.save` makes it; stored, not compressed
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import ChecksumError, CorruptCheckpointError, LoadError

# The fixed parts of an archive, signature first; names and extra fields follow local headers and entries.
LOCAL_HEADER: Final = struct.Struct("<4sHHHHHIIIHH")
DESCRIPTOR: Final = struct.Struct("<4sIII")
DESCRIPTOR64: Final = struct.Struct("<4sIQQ")
DIRECTORY_ENTRY: Final = struct.Struct("<4sHHHHHHIIIHHHHHII")
END64: Final = struct.Struct("<4sQHHIIQQQQ")
END64_LOCATOR: Final = struct.Struct("<4sIQI")
END: Final = struct.Struct("<4sHHHHIIH")

ReadFunction = Callable[[int, int], bytes]


class NotRangeable(LoadError):  # noqa: N818  (not an error of the checkpoint: the caller takes another way)
    """The item is sound as far as seen, but its bytes are not the tensor's: it has to be decoded completely."""


class ZipRecord(NamedTuple):
    """One entry of a zip's directory."""

    name: str  # with the archive's folder, for example `archive/data/0`
    header_offset: int  # start of its local header, in bytes from the item's first
    stored_bytes: int  # size in the archive
    crc32: int  # of the content; 0 if the writer did not compute any
    flags: int  # general purpose bits; bit 3 is a data descriptor after the record


# Local header of the payload and everything before it, and directory with end records, in items of one tensor: about
# 300 and 400 bytes in ours, 700 and 600 in those of torch 2.13.
_EDGE_BYTES = 1024
_SMALL_ITEM_BYTES = 4 * _EDGE_BYTES  # read at once

# A record of a few bytes takes about 70 in the directory: enough for a state dict of a million tensors.
_MAX_DIRECTORY_BYTES = 128 * 1024 * 1024


class ItemBytes:
    """Bytes of one item by offset; both ends (`head`, `tail`: a kilobyte at least) are read at once and kept."""

    __slots__ = ("_read", "_tail_at", "head", "item_bytes", "tail", "where")

    def __init__(self, read: ReadFunction, item_bytes: int, where: str) -> None:
        self._read, self.item_bytes, self.where = read, item_bytes, where
        if item_bytes <= 0:
            raise CorruptCheckpointError(f"{where}: the item has {item_bytes} bytes, expected a zip archive")
        self.head = b""
        self._tail_at = item_bytes
        if item_bytes <= _SMALL_ITEM_BYTES:
            self.head = self.tail = self.get(0, item_bytes)
            self._tail_at = 0
        else:
            self.head = self.get(0, _EDGE_BYTES)
            self.tail = self.get(item_bytes - _EDGE_BYTES, _EDGE_BYTES)
            self._tail_at = item_bytes - _EDGE_BYTES

    def get(self, offset: int, length: int) -> bytes:
        """Bytes `[offset, offset + length)` of the item; `CorruptCheckpointError` if it does not have them."""
        stop = offset + length
        if offset < 0 or length < 0 or stop > self.item_bytes:
            raise self.corrupt(
                f"something should lie at bytes [{offset}, {stop})", f"the item ends at {self.item_bytes}"
            )
        if stop <= len(self.head):
            return self.head[offset:stop]
        if offset >= self._tail_at:
            return self.tail[offset - self._tail_at : stop - self._tail_at]
        got = self._read(offset, length)
        if len(got) != length:
            raise self.corrupt(f"expected {length} bytes at {offset}", f"got {len(got)}")
        return got

    def corrupt(self, expected: str, got: str) -> CorruptCheckpointError:
        """The error to raise for a contradiction in this item."""
        return CorruptCheckpointError(
            f"{self.where}: not a sound tensor or object item: {expected}, {got}. The file is damaged or its index "
            "belongs to another one; load another checkpoint, or run `mcore-ckpt verify` to see how far the damage goes"
        )


class Archive:
    """The records of an archive of `torch.save`; raises `CorruptCheckpointError` if its directory cannot be right.
    `has_checksums`: False where torch wrote zeros instead (`torch.serialization.set_crc32_options(False)`).
    """

    def __init__(self, item: ItemBytes) -> None:
        self.item = item
        self.records = _read_directory(item)
        own = (record for name, record in self.records.items() if "/mcore_ckpt/" not in name)  # (`with_members`)
        self.has_checksums = any(record.crc32 for record in own)
        self._folder = next(iter(self.records)).partition("/")[0]

    def find(self, name: str) -> ZipRecord | None:
        """The record of that name in the archive's folder."""
        return self.records.get(f"{self._folder}/{name}")

    def record(self, name: str) -> ZipRecord:
        """The record of that name in the archive's folder; raises `CorruptCheckpointError`."""
        found = self.find(name)
        if found is None:
            shown = ", ".join(map(repr, list(self.records)[:8]))
            raise self.item.corrupt(f"expected a record {self._folder:.40}/{name:.100}", f"got {shown:.400}")
        return found

    def start(self, record: ZipRecord) -> int:
        """Where a record's content begins, in bytes from the item's first; raises `CorruptCheckpointError` unless local
        header and descriptor say what the directory says.
        """
        item = self.item
        name = record.name.encode()
        content_at = record.header_offset + 30 + len(name)
        fixed = item.get(record.header_offset, 30 + len(name))
        signature, _, flags, method, _, _, crc, stored, size, name_bytes, extra_bytes = LOCAL_HEADER.unpack_from(fixed)
        expected = b"PK\x03\x04", record.flags, 0, len(name), name
        if (signature, flags, method, name_bytes, fixed[30:]) != expected:
            where = f"expected the header of {record.name} at byte {record.header_offset}"
            raise item.corrupt(where, f"got {fixed[:12]!r}...")
        start: int = content_at + extra_bytes
        stop = start + record.stored_bytes
        if stop > item.item_bytes:
            raise item.corrupt(f"{record.name} should end at byte {stop}", f"the item ends at {item.item_bytes}")
        summary = record.crc32, record.stored_bytes, record.stored_bytes
        if flags & _HAS_DESCRIPTOR:
            got = item.get(stop, min(DESCRIPTOR64.size, item.item_bytes - stop))
            if record.stored_bytes <= _MAX_32 and got[:16] == DESCRIPTOR.pack(b"PK\x07\x08", *summary):
                return start
            if got == DESCRIPTOR64.pack(b"PK\x07\x08", *summary):
                return start
            raise item.corrupt(f"expected CRC-32 and size of {record.name} at byte {stop} again", repr(got))
        if crc != record.crc32 or any(value not in (_MAX_32, record.stored_bytes) for value in (stored, size)):
            raise item.corrupt(
                f"expected CRC-32 {record.crc32:#010x} and {record.stored_bytes} bytes in the header of {record.name}",
                f"got {crc:#010x} and {stored}",
            )
        return start

    def content(self, record: ZipRecord) -> bytes:
        """A record's content; raises `ChecksumError` if it has another CRC-32 than the directory says."""
        start = self.start(record)
        content = self.item.get(start, record.stored_bytes)
        got = crc32(content)
        if (self.has_checksums or record.crc32) and got != record.crc32:
            raise ChecksumError(
                f"{self.item.where}: record {record.name:.100}, bytes [{start}, {start + len(content)}) of the archive "
                f"has CRC-32 {got:#010x}, expected {record.crc32:#010x}: damaged after it was written; load another "
                "copy or an earlier checkpoint"
            )
        return content


_MAX_16, _MAX_32 = 0xFFFF, 0xFFFFFFFF
_ENCRYPTED, _HAS_DESCRIPTOR = 0x0001, 0x0008
_LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # how torch.save began before it wrote zip archives
_ZIP64_EXTRA = 0x0001


def _read_directory(item: ItemBytes) -> dict[str, ZipRecord]:
    """All records of the archive, by name."""
    directory_at, directory_bytes, count = _find_directory(item)
    directory = item.get(directory_at, directory_bytes)
    records: dict[str, ZipRecord] = {}
    position = 0
    for _ in range(count):
        name_at = position + 46
        if name_at > directory_bytes:
            raise item.corrupt(
                f"{count} entries in a directory of {directory_bytes} bytes", f"it ends after {position}"
            )
        (signature, _, _, flags, method, _, _, crc, stored, size, name_bytes, extra_bytes, comment_bytes, disk, _, _,
         header_at) = DIRECTORY_ENTRY.unpack_from(directory, position)  # fmt: skip
        extra_at = name_at + name_bytes
        position = extra_at + extra_bytes + comment_bytes
        if signature != b"PK\x01\x02" or disk or position > directory_bytes:
            raise item.corrupt(
                f"expected a directory entry at byte {directory_at + name_at - 46}", f"got {signature!r}"
            )
        if stored == _MAX_32 or size == _MAX_32 or header_at == _MAX_32:
            extra = directory[extra_at : extra_at + extra_bytes]
            size, stored, header_at = _wide_values(item, extra, size, stored, header_at)
        if method or flags & _ENCRYPTED:
            raise item.corrupt(
                "expected records as torch.save writes them",
                f"{directory[name_at:extra_at]!r:.100} is compressed or encrypted (if on purpose: load it with torch "
                "and save it again)",
            )
        if size != stored or header_at + 30 + name_bytes + stored > directory_at:
            raise item.corrupt(
                f"record of {stored} bytes ({size} unpacked) with its header at byte {header_at}",
                f"there are {directory_at} bytes before the directory",
            )
        try:
            name = directory[name_at:extra_at].decode()
        except UnicodeDecodeError:
            raise item.corrupt("expected record names in UTF-8", repr(directory[name_at:extra_at])) from None
        records[name] = ZipRecord(name, header_at, stored, crc, flags)
    if position != directory_bytes or len(records) != count:
        raise item.corrupt(
            f"{count} records of different names in {directory_bytes} bytes",
            f"got {len(records)} in {position} bytes",
        )
    return records


def _find_directory(item: ItemBytes) -> tuple[int, int, int]:
    """Offset, bytes and number of entries of the directory, from the end records."""
    tail = item.tail
    if item.head.startswith(_LEGACY_MAGIC):
        raise CorruptCheckpointError(
            f"{item.where}: is in torch's format from before zip archives; load it with torch and save it again"
        )
    if len(tail) < 22 or tail[-22:-18] != b"PK\x05\x06":
        # A comment would hide the end record; torch writes none, so this is a truncated item or none at all.
        raise item.corrupt("expected the end record of a zip archive in the last 22 bytes", f"got {tail[-22:]!r}")
    _, disk, first_disk, count_here, count, directory_bytes, directory_at, comment_bytes = END.unpack_from(
        tail, len(tail) - 22
    )
    end_at = item.item_bytes - 22
    if len(tail) >= 98 and tail[-42:-38] == b"PK\x06\x07":
        _, locator_disk, end64_at, disks = END64_LOCATOR.unpack_from(tail, len(tail) - 42)
        signature, record_bytes, _, _, disk64, first_disk64, count_here64, count64, bytes64, at64 = END64.unpack_from(
            tail, len(tail) - 98
        )
        end_at -= 76
        narrow_agrees = (
            (count in (_MAX_16, count64) or count == count64 & _MAX_16)
            and directory_bytes in (_MAX_32, bytes64)
            and directory_at in (_MAX_32, at64)
        )
        if (signature, record_bytes, end64_at) != (b"PK\x06\x06", 44, end_at) or not narrow_agrees or disks > 1:
            raise item.corrupt(f"expected a zip64 end record at byte {end_at}", f"got {signature!r} for {end64_at}")
        disk, first_disk = disk | disk64 | locator_disk, first_disk | first_disk64
        count_here, count, directory_bytes, directory_at = count_here64, count64, bytes64, at64
    if comment_bytes or disk or first_disk or count_here != count:
        raise item.corrupt("expected a zip archive in one piece, without a comment", "its end record says otherwise")
    if directory_at + directory_bytes != end_at or directory_bytes < 46 * count:
        raise item.corrupt(
            f"a directory of {count} entries and {directory_bytes} bytes at byte {directory_at}",
            f"it would have to end at byte {end_at}",
        )
    if directory_bytes > _MAX_DIRECTORY_BYTES or count == 0:
        raise item.corrupt(
            f"expected a directory of 1 to {_MAX_DIRECTORY_BYTES} bytes", f"got {count} entries in {directory_bytes}"
        )
    return directory_at, directory_bytes, count


def _wide_values(item: ItemBytes, extra: bytes, *narrow: int) -> list[int]:
    """The values whose 32-bit fields are full, from the zip64 extra field; the others as they are."""
    wanted = narrow.count(_MAX_32)
    position = 0
    while position + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, position)
        position += 4
        if position + length > len(extra):
            break
        if tag == _ZIP64_EXTRA:
            if length < 8 * wanted:
                break
            wide = iter(struct.unpack_from(f"<{wanted}Q", extra, position))
            return [next(wide) if value == _MAX_32 else value for value in narrow]
        position += length
    raise item.corrupt(f"expected {wanted} zip64 values in a record's extra field", repr(extra[:64]))


# ----------------------------------------------------------------------------------------------------- further members

_FOLDER: Final = "archive/mcore_ckpt/"
_RANKS: Final = f"{_FOLDER}ranks.json"


def archive_of(content: bytes | memoryview, where: str) -> Archive:
    """The archive that these bytes are."""
    return Archive(ItemBytes(lambda offset, length: bytes(content[offset : offset + length]), len(content), where))


def with_members(content: bytes, members: Mapping[str, bytes]) -> bytes:
    """The record of an object, with further members, which its readers pass by."""
    import zipfile  # (which readers do without)

    stream = io.BytesIO(content)
    with zipfile.ZipFile(stream, "a") as archive:
        for name, member in members.items():
            # (without a ZipInfo each would have the time of this clock, which may be before what a zip archive can say)
            archive.writestr(zipfile.ZipInfo(name), member)
    return stream.getvalue()


def member_of(content: bytes, name: str) -> bytes | None:
    """A member of the record of an object; None without it. Raises `CorruptCheckpointError`."""
    if name.encode() not in content:
        return None
    archive = archive_of(content, f"{name} of an object")
    record = archive.records.get(name)
    return None if record is None else archive.content(record)  # None: the name is in an object's own bytes


def with_versions(content: bytes, layout: str, ranks: Mapping[int, int], versions: Sequence[bytes]) -> bytes:
    """An object's record with other versions; `ranks`: which each has, under this `layout` of the job alone."""
    told = json.dumps({"layout": layout, "ranks": dict(ranks)}).encode()
    return with_members(content, {_RANKS: told, **{f"{_FOLDER}{n}": version for n, version in enumerate(versions)}})


def layout_of_versions(content: bytes) -> str | None:
    """Layout of the ranks that had versions of an object; None where its record has the main one alone."""
    found = _versions(content)
    return None if found is None else found[0]


def version_of(content: bytes, layout: str, rank: int) -> bytes:
    """A rank's own version of a record, or the main one. Raises `CorruptCheckpointError`."""
    found = _versions(content)
    if found is None or found[0] != layout or (number := found[1].get(str(rank))) is None:
        return content
    version = member_of(content, f"{_FOLDER}{number}") if type(number) is int else None
    if version is None:
        raise CorruptCheckpointError(f"{_RANKS} of an object: rank {rank} has a version that is not in its record")
    return version


def _versions(content: bytes) -> tuple[str, dict[str, int]] | None:
    """Layout of the job, and number of the version of each rank that has one."""
    told = member_of(content, _RANKS)
    try:
        fields = None if told is None else json.loads(told)
        return None if fields is None else (str(fields["layout"]), dict(fields["ranks"]))
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{_RANKS} of an object: expected versions by rank, got {error!r}") from error
