"""Names of data files: `[prefix]__{rank}_{number}.{id}.distcp`.

The id is that of the save: 16 hexadecimal digits, the first eight bytes of what the integrity footers carry. So no name
is ever used twice, and a file tells by its name which save has made it. Eight random
bytes are enough, since names meet in one directory only: among a million saves into it, two have the same id with a
probability of 3e-8.

Other writers name their files `[prefix]__{rank}_{number}.distcp`. Readers take any name.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

DATA_SUFFIX: Final = ".distcp"
_ID_BYTES: Final = 8
_DATA_FILE: Final = re.compile(
    r"(?P<prefix>.*?)__(?P<rank>\d+)_(?P<number>\d+)(?:\.(?P<id>[0-9a-f]{16}))?\.distcp", re.DOTALL
)


class DataFileName(NamedTuple):
    """What the name of a data file tells."""

    rank: int  # that has written it
    number: int  # of the file among those of that rank and save
    save: str | None  # id of the save; None for files of other writers
    prefix: str  # the separation hint, or empty


def data_file_name(rank: int, number: int, prefix: str = "") -> str:
    """Name of a rank's data file, without the id of a save. `prefix` is the separation hint: readers go by it."""
    return f"{prefix}__{rank}_{number}{DATA_SUFFIX}"


def id_in_names(save_id: bytes) -> str:
    """How the names of its files show a save's id (16 bytes)."""
    return save_id[:_ID_BYTES].hex()


def with_id(name: str, save_id: bytes) -> str:
    """The name that a file has in one save; `name` is from `data_file_name`."""
    return f"{name.removesuffix(DATA_SUFFIX)}.{id_in_names(save_id)}{DATA_SUFFIX}"


@lru_cache(maxsize=4096)
def data_file_of(name: str) -> DataFileName | None:
    """What a name tells; None if it is no data file's."""
    match = _DATA_FILE.fullmatch(name)
    if match is None:
        return None
    return DataFileName(int(match["rank"]), int(match["number"]), match["id"], match["prefix"])
