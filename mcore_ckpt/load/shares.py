"""Which bytes several ranks of a load want, and which rank reads each of them for the others. Pure; columns of numbers.

Each rank says which ranges of which files it is going to read (`WantedRanges`). What several ranks want is cut into
shares, and each share gets an owner among the ranks that want it, so that all hosts, and the ranks of each, read about
as many bytes (`share_out`). The rest every rank reads for itself.

Shares are numbered in the order of the files. Every rank uses them in this order, so a few of them in memory do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from mcore_ckpt.storage.base import ALIGNMENT_BYTES

# One read of the owner, and one message to another host.
SHARE_BYTES: Final = 4 * 1024 * 1024

# What is shorter costs less to read several times than to hand on.
_LEAST_BYTES: Final = 64 * 1024

# By default fewer ranks of a host read by themselves: two at a fast disk were no slower so, eight twice as slow.
_LEAST_RANKS: Final = 4

# Of a range that several ranks want in part, all of them together want so much: the rows between those of one.
_DENSE: Final = 0.8

_Key = TypeVar("_Key")

_Ints = np.ndarray[Any, np.dtype[np.int64]]


class Member(NamedTuple):
    """A rank that takes part."""

    host: str  # what tells its host from others
    pid: int
    fd: int  # of its memory, in its process
    slots: int  # shares that its memory holds
    crosses: bool  # `cooperative="on"`: it takes from other hosts, and sends to them, too


class WantedRanges(NamedTuple):
    """What a rank is going to read, in order; int64 each, as bytes, so that those of two ranks can be compared."""

    files: tuple[str, ...]
    numbers: bytes  # of the file
    starts: bytes  # `[start, stop)` in the file
    stops: bytes  # `[start, stop)` in the file
    needed: bytes  # how many of these bytes are really wanted
    source: str = ""  # where the files lie, and of which save they are: files of two sources have nothing in common

    @classmethod
    def of(cls, ranges: Iterable[tuple[str, int, int, int]], gap_bytes: int = 0, source: str = "") -> WantedRanges:
        """Of `(file, start, stop, needed bytes)`, in whole pages. What overlaps becomes one range, and what has no
        larger gap between it, which is read, too.
        """
        found = sorted(ranges)
        if not found:
            return cls((), b"", b"", b"", b"", source)
        files = sorted({row[0] for row in found})
        number_of = {file: number for number, file in enumerate(files)}
        numbers, starts, stops, needed = np.array([(number_of[file], *rest) for file, *rest in found], dtype=np.int64).T
        starts, stops = starts // ALIGNMENT_BYTES * ALIGNMENT_BYTES, -(-stops // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        # Files one behind the other in one line, so that one running maximum finds where a range ends.
        line = numbers * (int(stops.max()) + gap_bytes + ALIGNMENT_BYTES)
        reach = np.maximum.accumulate(line + stops)
        begins = np.append(0, np.flatnonzero((line + starts)[1:] > reach[:-1] + gap_bytes) + 1)
        ends = np.append(begins[1:], len(numbers)) - 1
        columns = numbers[begins], starts[begins], (reach - line)[ends], np.add.reduceat(needed, begins)
        of_file, first, last, wanted = (column.astype(np.int64).tobytes() for column in columns)
        return cls(tuple(files), of_file, first, last, wanted, source)

    def columns(self) -> tuple[_Ints, _Ints, _Ints, _Ints]:
        """Numbers of the files, starts, stops, needed bytes."""
        numbers, starts, stops, needed = (np.frombuffer(column, dtype=np.int64) for column in self[1:5])
        return numbers, starts, stops, needed


class Shares(NamedTuple):
    """What is handed on: shares in columns of n int64, in the order of the files."""

    members: dict[int, Member]  # the ranks that take part, by rank
    files: list[str]
    numbers: _Ints  # of the file
    starts: _Ints  # `[start, stop)` in the file
    stops: _Ints  # `[start, stop)` in the file
    owners: _Ints  # rank that reads it
    groups: _Ints  # which of `wanting`
    wanting: list[list[int]]  # ranks that want a share

    @property
    def taking_part(self) -> set[int]:
        """The ranks that read for others, or have others read for them."""
        return {rank for ranks in self.wanting for rank in ranks}

    @property
    def is_between_hosts(self) -> bool:
        """Some of it goes to other hosts."""
        return any(len({self.members[rank].host for rank in ranks}) > 1 for ranks in self.wanting)

    def ranks_of(self, host: str) -> list[list[int]]:
        """Of each group the ranks on a host."""
        return [[rank for rank in ranks if self.members[rank].host == host] for ranks in self.wanting]


Offers = dict[WantedRanges, dict[int, Member]]
"""What ranks are going to read, and where they are; said once of those that read the same."""


def merged(first: Offers, second: Offers) -> Offers:
    """What ranks want, of two sets of ranks; said once where it is the same."""
    for wanted, ranks in second.items():
        first.setdefault(wanted, {}).update(ranks)
    return first


def shares_of(offers: Offers, *, one_group: bool = True) -> dict[tuple[str, str], Shares]:
    """Who reads what for whom, by source and host; where these are left out, each rank reads for itself. `one_group`:
    the ranks can send to each other.
    """
    by_source: dict[str, Offers] = {}
    for wanted, ranks in offers.items():
        by_source.setdefault(wanted.source, {})[wanted] = ranks
    return {
        (source, host): shares
        for source, own in by_source.items()
        for host, shares in _shares_by_host(own, one_group).items()
    }


def _shares_by_host(offers: Offers, one_group: bool) -> dict[str, Shares]:
    members = {rank: member for ranks in offers.values() for rank, member in ranks.items()}
    hosts = {member.host for member in members.values()}
    crosses = one_group and all(member.crosses for member in members.values())
    found: dict[str, Shares] = {}
    for together in [hosts] if crosses else [{host} for host in sorted(hosts)]:
        own: Offers = {}
        for wanted, ranks in offers.items():
            if there := {rank: member for rank, member in ranks.items() if member.host in together}:
                own[wanted] = there
        is_on = any(member.crosses for ranks in own.values() for member in ranks.values())
        if sum(map(len, own.values())) > 1 and (shares := share_out(own, 2 if is_on else _LEAST_RANKS)).wanting:
            found |= dict.fromkeys(together, shares)
    return found


def share_out(wanted: Mapping[WantedRanges, Mapping[int, Member]], least_ranks: int = 2) -> Shares:
    """Who reads what for whom, of what at least so many ranks want."""
    members = {rank: member for ranks in wanted.values() for rank, member in ranks.items()}
    files = sorted({file for ranges in wanted for file in ranges.files})
    number_of = {file: number for number, file in enumerate(files)}
    each: list[tuple[_Ints, _Ints, _Ints, _Ints, list[int]]] = []
    for ranges, ranks in sorted(wanted.items(), key=lambda pair: min(pair[1])):
        own, starts, stops, needed = ranges.columns()
        table = np.array([number_of[file] for file in ranges.files], dtype=np.int64)
        each.append((table[own], starts, stops, needed, sorted(ranks)))
    numbers, starts, stops, signatures, groups = _wanted_by_several(each, least_ranks)
    cut = _cut_up(numbers, starts, stops, signatures)
    lengths = cut[2] - cut[1]
    owners = _owners(lengths, cut[3], groups, members)
    return Shares(members, files, *cut[:3], owners, cut[3], groups)


def _wanted_by_several(
    each: Sequence[tuple[_Ints, _Ints, _Ints, _Ints, list[int]]], least_ranks: int
) -> tuple[_Ints, _Ints, _Ints, _Ints, list[list[int]]]:
    """Ranges that so many ranks want, as file, start, stop and number of the group of these ranks; and the groups."""
    span = max((int(stops.max(initial=0)) for _, _, stops, _, _ in each), default=0) + 1
    # All files in one line: a position is a single number.
    firsts = [numbers * span + starts for numbers, starts, _, _, _ in each]
    lasts = [numbers * span + stops for numbers, _, stops, _, _ in each]
    cuts = np.unique(np.concatenate([*firsts, *lasts, np.zeros(0, dtype=np.int64)]))
    count, density = np.zeros(len(cuts) + 1), np.zeros(len(cuts) + 1)
    signature = np.zeros(len(cuts) + 1, dtype=np.uint64)
    marks = np.random.default_rng(20260101).integers(1, 2**63, size=len(each), dtype=np.uint64)
    at = [
        (np.searchsorted(cuts, first), np.searchsorted(cuts, last)) for first, last in zip(firsts, lasts, strict=True)
    ]
    for (begin, end), mark, (_, starts, stops, needed, ranks) in zip(at, marks, each, strict=True):
        dense = np.minimum(1.0, needed / np.maximum(stops - starts, 1)) * len(ranks)
        count[begin] += len(ranks)  # no two ranges of one rank begin, or end, at one place
        count[end] -= len(ranks)
        density[begin] += dense
        density[end] -= dense
        signature[begin] += mark
        signature[end] -= mark
    count, density = np.cumsum(count)[: len(cuts) - 1], np.cumsum(density)[: len(cuts) - 1]
    signature = np.cumsum(signature)[: len(cuts) - 1]
    lengths = np.diff(cuts)
    shared = np.flatnonzero((count > least_ranks - 0.5) & (density >= _DENSE) & (lengths >= _LEAST_BYTES))
    kinds, example, groups = np.unique(signature[shared], return_index=True, return_inverse=True)
    wanting = []
    for position in cuts[shared[example]] if len(kinds) else ():
        ranks_there = [
            ranks
            for first, last, (*_, ranks) in zip(firsts, lasts, each, strict=True)
            if (nearest := np.searchsorted(first, position, "right") - 1) >= 0 and last[nearest] > position
        ]
        wanting.append(sorted(rank for ranks in ranks_there for rank in ranks))
    begin, end = cuts[shared], cuts[shared + 1]
    numbers = begin // span
    return numbers, begin - numbers * span, end - numbers * span, groups.reshape(-1).astype(np.int64), wanting


def _cut_up(numbers: _Ints, starts: _Ints, stops: _Ints, groups: _Ints) -> tuple[_Ints, _Ints, _Ints, _Ints]:
    """The same, cut at multiples of `SHARE_BYTES` of the file."""
    firsts = starts // SHARE_BYTES
    counts = (stops - 1) // SHARE_BYTES - firsts + 1
    source = np.repeat(np.arange(len(starts)), counts)
    inside = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = np.maximum((firsts[source] + inside) * SHARE_BYTES, starts[source])
    end = np.minimum((firsts[source] + inside + 1) * SHARE_BYTES, stops[source])
    return numbers[source], begin, end, groups[source]


def _owners(lengths: _Ints, groups: _Ints, wanting: Sequence[Sequence[int]], members: Mapping[int, Member]) -> _Ints:
    """Bytes are levelled out over the hosts, then over the ranks of each; groups with least choice come first."""
    by_host: dict[str, float] = dict.fromkeys((member.host for member in members.values()), 0.0)
    by_rank: dict[int, float] = dict.fromkeys(members, 0.0)
    owners = np.zeros(len(lengths), dtype=np.int64)
    for group in sorted(range(len(wanting)), key=lambda group: len(wanting[group])):
        own = np.flatnonzero(groups == group)
        nbytes = float(lengths[own].sum())
        on_host: dict[str, list[int]] = {}
        for rank in wanting[group]:
            on_host.setdefault(members[rank].host, []).append(rank)
        quotas: dict[int, float] = {}
        for host, of_host in _levelled(nbytes, {host: by_host[host] for host in on_host}).items():
            by_host[host] += of_host
            quotas |= _levelled(of_host, {rank: by_rank[rank] for rank in on_host[host]})
        for rank, quota in quotas.items():
            by_rank[rank] += quota
        owners[own] = _dealt(len(own), quotas)
    return owners


def _levelled(amount: float, loads: Mapping[_Key, float]) -> dict[_Key, float]:
    """An amount spread so that the loads become as equal as they can."""
    lowest = np.sort(np.fromiter(loads.values(), dtype=float))
    counts = np.arange(1, len(lowest) + 1)
    levels = (amount + np.cumsum(lowest)) / counts
    # The level is that of as many of the lowest loads as lie below it.
    level = levels[np.flatnonzero(levels >= lowest)[-1]] if amount else lowest[0]
    return {key: max(0.0, float(level) - load) for key, load in loads.items()}


def _dealt(count: int, quotas: Mapping[int, float]) -> _Ints:
    """So many shares to ranks in proportion to their quotas; those of one rank are spread evenly."""
    ranks, parts = np.array(list(quotas), dtype=np.int64), np.fromiter(quotas.values(), dtype=float)
    ends = np.rint(np.cumsum(parts) / max(float(parts.sum()), 1e-9) * count).astype(np.int64)
    counts = np.diff(ends, prepend=0)
    dealt = np.repeat(ranks, counts)
    turns = np.arange(count) - np.repeat(ends - counts, counts) + 0.5
    return dealt[np.argsort(turns / np.repeat(counts, counts), kind="stable")]
