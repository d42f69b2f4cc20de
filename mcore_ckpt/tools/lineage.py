"""At which save of a run did a tensor or an object leave its lineage? No data of tensors is read.

What a save holds of one parameter (weight, FP32 master, moments) changes from save to save, or all of it is frozen; so
do the shards of one object, as each rank's random state. Fingerprints and checksums in the indexes say what stands
still while the rest changes, or after it has changed before.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

from mcore_ckpt.core.errors import CheckpointNotFoundError, LoadError
from mcore_ckpt.directory.iterations import directories_of_run, look_at
from mcore_ckpt.format.index import CheckpointIndex, is_extra_state, is_flat_bucket
from mcore_ckpt.format.metadata_read import METADATA_FILE
from mcore_ckpt.format.versions import layout_of_versions
from mcore_ckpt.load.checks import global_shape
from mcore_ckpt.tools.keys import model_key, read_object

# A weight of fewer elements in 16 bits may round to the same again, as those of norms do.
_TELLING_ELEMENTS: Final = 1024
_STANDS_STILL: Final = "stands still while others of its kind change"
_STOPS: Final = "stands still, and did change before"
_LEFT_OUT: Final = "of a checkpoint that is not complete: left out"
_VERSIONS: Final = "ranks that claim to hold replicas hold other objects"


@dataclass(frozen=True, slots=True)
class Departure:
    """What a save has otherwise than the one before it, for the first time.

    Attributes:
        checkpoint: name of the save's directory.
        key: of the tensor or object.
        what: in words.
    """

    checkpoint: str
    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.checkpoint}: {self.key}: {self.what}"


@dataclass(frozen=True, slots=True)
class LineageReport:
    """Attributes:
    path: of the run.
    checkpoints: names of those that were compared, each with the next.
    departures: in the order of saves.
    unknown: tensors of them without a fingerprint, and objects without a checksum, as stock saves them.
    """

    path: str
    checkpoints: tuple[str, ...]
    departures: tuple[Departure, ...]
    unknown: int


class _Held(NamedTuple):
    form: str
    crc: int | None
    family: str
    is_telling: bool


def lineage_of_run(run: str | os.PathLike[str]) -> LineageReport:
    """Compare each complete checkpoint of a run with the next one.

    Raises:
        CheckpointNotFoundError: there are no two complete ones.
        LoadError: the run cannot be listed.
    """
    looked = [look_at(directory) for directory in directories_of_run(run)]
    indexes = [(one.name, index) for one, index in looked if one.whole and one.iteration is not None and index]
    if len(indexes) < 2:
        raise CheckpointNotFoundError(f"{run}: a lineage takes two complete checkpoints of a run, found {len(indexes)}")
    states = [(name, _held(index)) for name, index in indexes]
    order = {one.name: number for number, (one, _) in enumerate(looked)}
    left_out = [one.name for one, _ in looked if not one.whole and not one.locked]
    found = {
        (name, ""): Departure(name, METADATA_FILE, _LEFT_OUT) for name in left_out
    }  # the first of each key and kind
    changed = set[str]()
    for (_, before), (name, after) in pairwise(states):
        for key, what in _departures(before, after, changed):
            found.setdefault((key, what), Departure(name, key, what))
    for name, index in indexes:
        for key, entry in index.objects.items():
            if is_extra_state(key):
                continue
            try:
                content = read_object(index, entry)
            except LoadError as error:  # each of them is named
                found[name, key] = Departure(name, key, f"cannot be read: {error}")
                continue
            if layout_of_versions(content) is not None:
                found.setdefault((key, _VERSIONS), Departure(name, key, _VERSIONS))
    unknown = sum(one.crc is None for _, state in states for one in state.values())
    departures = sorted(found.values(), key=lambda one: order[one.checkpoint])
    return LineageReport(str(run), tuple(name for name, _ in indexes), tuple(departures), unknown)


def _held(index: CheckpointIndex) -> dict[str, _Held]:
    found = {
        key: _Held("an object", entry.item.crc32, key.rpartition("/")[0], True) for key, entry in index.objects.items()
    }
    for key, entry in index.tensors.items():
        shape = global_shape(index, entry)
        family = key.rpartition(".")[0] if is_flat_bucket(key) else model_key(key)
        is_telling = entry.dtype == "float32" or math.prod(shape) >= _TELLING_ELEMENTS
        found[key] = _Held(f"{entry.dtype} {list(shape)}", index.fingerprints.get(key), family, is_telling)
    return found


def _departures(before: dict[str, _Held], after: dict[str, _Held], changed: set[str]) -> list[tuple[str, str]]:
    """Keys, and what is otherwise; `changed`: those that have changed before, to which those of this pair are added."""
    found = [(key, "disappears") for key in before if key not in after]
    families: defaultdict[str, set[bool]] = defaultdict(set)
    pairs = []
    for key, held in after.items():
        former = before.get(key)
        if former is None:
            found.append((key, "appears"))
        elif former.form != held.form:
            found.append((key, f"was {former.form}, is {held.form}"))
        elif former.crc is not None and held.crc is not None:
            families[held.family].add(former.crc != held.crc)
            pairs.append((key, held, former.crc != held.crc))
    is_trained = bool(changed) or any(has_changed for *_, has_changed in pairs)  # else it is one state, saved twice
    for key, held, has_changed in pairs:
        if has_changed:
            changed.add(key)
        elif is_trained and held.is_telling and True in families[held.family]:
            found.append((key, _STANDS_STILL))
        elif is_trained and held.is_telling and key in changed:
            found.append((key, _STOPS))
    return found
