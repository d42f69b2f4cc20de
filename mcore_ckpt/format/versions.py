"""Versions of an object: what ranks hold that claim to hold a replica of it, though theirs is another.

Stock saves the main one alone, which all of these ranks get at a load. Here the others lie in the record of the main
one: that is a zip archive, and its readers, stock's among them, pass by members that they do not know.

    archive/mcore_ckpt/ranks.json   {"layout": of the job, "ranks": {"1": 0, "3": 1}}: which rank had which version
    archive/mcore_ckpt/0            a version as `torch.save` makes it; stored, not compressed
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Final

from mcore_ckpt.core.errors import CorruptCheckpointError

_FOLDER: Final = "archive/mcore_ckpt/"
_RANKS: Final = f"{_FOLDER}ranks.json"
_MARK: Final = _RANKS.encode()
# What zipfile and json raise for bytes that are damaged, encrypted or nested without end.
_DAMAGE: Final = (
    zipfile.BadZipFile,
    zlib.error,
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
    EOFError,
    OverflowError,
)


def with_versions(content: bytes, layout: str, ranks: Mapping[int, int], versions: Sequence[bytes]) -> bytes:
    """The record of an object, with other versions of it. `ranks`: for each that has one, which; `layout`: of the job,
    under which alone the numbers of ranks mean something.
    """
    told = json.dumps({"layout": layout, "ranks": dict(ranks)}).encode()
    return with_members(content, {_RANKS: told, **{f"{_FOLDER}{n}": version for n, version in enumerate(versions)}})


def with_members(content: bytes, members: Mapping[str, bytes]) -> bytes:
    """The record of an object, with further members, which its readers pass by."""
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
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if name not in archive.namelist():
                return None
            if archive.getinfo(name).file_size > len(content):  # it is packed: what it becomes may be of any size
                raise zipfile.BadZipFile(f"{archive.getinfo(name).file_size} bytes in a record of {len(content)}")
            return archive.read(name)
    except _DAMAGE as error:
        raise CorruptCheckpointError(f"{name} of an object: {error}") from error


def layout_of_versions(content: bytes) -> str | None:
    """Layout of the ranks that had versions of an object; None where its record has the main one alone."""
    found = _told(content)
    return None if found is None else found[0]


def version_of(content: bytes, layout: str, rank: int) -> bytes:
    """The record of a rank's own version; the main one, if it has none, or if the job has another layout. Raises
    `CorruptCheckpointError`.
    """
    found = _told(content)
    number = None if found is None or found[0] != layout else found[1].get(str(rank))
    if number is None:
        return content
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return archive.read(f"{_FOLDER}{int(number)}")
    except _DAMAGE as error:
        raise CorruptCheckpointError(f"version {number!r} of an object: {error}") from error


def _told(content: bytes) -> tuple[str, dict[str, int]] | None:
    if _MARK not in content:
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if _RANKS not in archive.namelist():  # the mark is in an object's own bytes
                return None
            told = json.loads(archive.read(_RANKS))
            return str(told["layout"]), dict(told["ranks"])
    except _DAMAGE as error:
        raise CorruptCheckpointError(f"{_RANKS} of an object: expected versions by rank, got {error!r}") from error
