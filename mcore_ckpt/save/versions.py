"""Objects that claim to be replicas (`ShardedObject` with another `replica_id` than 0), compared with what is saved.

Each rank tells a digest of every object in the exchange that a save begins with. Only if two of one key differ, ranks
send what they hold. Of what really differs, the rank that saves the main one keeps each version with it
(`format/versions.py`), and the log names keys and ranks before the checkpoint is published. Or the save is refused.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mcore_ckpt.core.console import counted, logger_of
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.ranks import RankGroup
from mcore_ckpt.format.index import COMMON_STATE_KEY, is_extra_state
from mcore_ckpt.format.versions import with_versions
from mcore_ckpt.state.values import unequal

_logger = logger_of("mcore_ckpt")

_SHOWN = 5
_DIFFERS = b""
# Of each key, by a hash of it, that of the object; `_DIFFERS` if ranks have several.
Digests = Mapping[bytes, bytes]
_Objects = Sequence[tuple[str, Any]]


def digests_of(objects: Iterable[tuple[str, Any]]) -> Digests:
    """Of serialized objects by key; not of the common state, which is compared apart, nor of extra state."""
    found: dict[bytes, bytes] = {}
    for key, content in objects:
        if key != COMMON_STATE_KEY and not is_extra_state(key):
            name, own = _hash_of(key), _hash(content)
            found[name] = _DIFFERS if found.get(name, own) != own else own
    return found


def merged(first: Digests, second: Digests) -> Digests:
    """Of both; what differs is marked."""
    both = {**first, **second}
    return {key: _DIFFERS if first.get(key, own) != own else own for key, own in both.items()}


def differing(digests: Digests) -> frozenset[bytes]:
    """Hashes of the keys of which ranks have several objects."""
    return frozenset(key for key, digest in digests.items() if digest == _DIFFERS)


def _hash_of(key: str) -> bytes:
    return _hash(key.encode("utf-8", "surrogatepass"))


def _hash(content: Any) -> bytes:
    return hashlib.blake2b(content, digest_size=8).digest()


class _Kept(NamedTuple):
    ranks: dict[int, int]  # of each that has another object than the main one, which
    versions: list[bytes]


def keep_versions(
    keys: frozenset[bytes],
    mains: _Objects,
    replicas: _Objects,
    layout: str,
    group: RankGroup,
    what: str,
    *,
    refused: bool,
) -> list[tuple[str, memoryview]]:
    """The main objects of this rank, with the versions that other ranks have of them; all ranks call this. `keys`: of
    what differs (`differing`); `what`: the save, for the log; `refused`: raise `SaveError` on all ranks instead.
    """

    def own() -> tuple[dict[str, bytes], dict[str, bytes]]:
        mine, others = (
            {key: bytes(content) for key, content in some if _hash_of(key) in keys} for some in (mains, replicas)
        )
        return mine, others

    step = "compare objects that are replicas"
    gathered = group.gather(step, own, wrap=SaveError)

    def compare() -> list[dict[str, _Kept]]:
        assert gathered is not None
        kept: list[dict[str, _Kept]] = [{} for _ in gathered]
        saved_by = {key: rank for rank, (mine, _) in enumerate(gathered) for key in mine}
        for rank, (_, others) in enumerate(gathered):
            for key, content in others.items():
                main = saved_by.get(key)
                if main is None or _is_same(gathered[main][0][key], content):
                    continue
                of_key = kept[main].setdefault(key, _Kept({}, []))
                if content not in of_key.versions:
                    of_key.versions.append(content)
                of_key.ranks[rank] = of_key.versions.index(content)
        _tell({key: one for of_rank in kept for key, one in of_rank.items()}, what, refused)
        return kept

    kept = group.scatter(step, compare, wrap=SaveError)
    objects: list[tuple[str, memoryview]] = []

    def add() -> None:
        for key, content in mains:
            ranks, versions = kept.get(key, ({}, []))
            others = {rank: number for rank, number in ranks.items() if rank != group.rank}
            whole = memoryview(with_versions(bytes(content), layout, others, versions)) if others else content
            objects.append((key, whole))

    group.run_merged("keep objects that differ", add, lambda *_: None, lambda _: None, wrap=SaveError)
    return objects


def _is_same(first: bytes, second: bytes) -> bool:
    """Equal objects may be serialized in several ways. (Both are of this job.)"""
    if first == second:
        return True
    try:
        pair = [torch.load(io.BytesIO(content), map_location="cpu", weights_only=False) for content in (first, second)]
        return not any(unequal(*pair, exact=True))
    except Exception:  # noqa: BLE001 (of third-party classes; a save keeps both, and does not fail)
        return False


def _tell(kept: Mapping[str, _Kept], what: str, refused: bool) -> None:
    if not kept:
        return
    named = (f"{key} on ranks {', '.join(map(str, one.ranks))}" for key, one in list(kept.items())[:_SHOWN])
    message = (
        f"{what}: {counted(len(kept), 'object')}, of which ranks hold others than the one that is saved though they "
        f"claim to hold a replica: {'; '.join(named)}{', ...' if len(kept) > _SHOWN else ''}. "
    )
    if refused:
        raise SaveError(f'{message}With compare_replicas="warn" it is kept')
    _logger.warning(
        "%sWhat other ranks hold is kept for loads under this layout; stock gives these ranks the saved one", message
    )
