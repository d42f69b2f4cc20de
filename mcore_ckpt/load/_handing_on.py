"""One rank's part in a load of several: what it reads for the others, and what it takes of what they have read.

    owner      reads a share of a file into its memory, and sends it to one rank of each other host that wants it
    receiver   has the share in its memory then, as the owner has
    takers     the ranks of a host copy what they want of a share out of the memory of the owner, or the receiver

The memory of a rank is a ring of a few shares (`SharedMemory`). All ranks use shares in the order of the files. Each
tells which shares it needs no more, and then the next ones take their place. A thread uses one share at a time.

No cycle of waits can exist. Before shares up to a number have a place everywhere, all ranks must have released those
up to another, lower number (`_needs`). A thread waits for a share only if its own rank has released that many, and
reads the bytes itself otherwise. Take the rank whose lowest share in use is the lowest of all. Where one of its threads
waits, all ranks have released what that share needs, so the share and all before it have places, each
when the one before it there has been filled, and are on their way.
The thread with the lowest share of a rank may always wait, since a share needs only lower ones.

A rank that waits while no rank of its host has got any bytes for `hand_on_deadline_s` continues alone, with a warning
that names the rank it has waited for: it takes nothing more, hands on nothing more, and reads the rest itself. Shares
that cannot be read are handed on as failed, and raise where they are used. A rank that has ended is noticed.
"""

from __future__ import annotations

import bisect
import os
import pickle
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import numpy as np

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError
from mcore_ckpt.core.failures import describe, same_class
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.core.process import is_running
from mcore_ckpt.core.ranks import RankGroup
from mcore_ckpt.core.shared_memory import SharedMemory, host_identity
from mcore_ckpt.core.threads import Crew
from mcore_ckpt.items.open_files import BUFFER_BYTES, OpenFiles, ReadStats
from mcore_ckpt.load.shares import SHARE_BYTES, Member, Shares
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import ALIGNMENT_BYTES, RangeReader

_logger = logger_of(__name__)

# Words of a rank's memory: the number of the share from which on it may still take, the one from which on it has to
# send, whether it has found the memory of all others of its host, how often it has got bytes, and whether it continues
# alone; then a word for each slot.
_TAKES, _SENDS, _ATTACHED, _PROGRESS, _ALONE, _SLOTS = 0, 1, 2, 3, 4, 16
_WORDS: Final = 4096
_YES, _NO = 1, 2
_NO_MORE: Final = 2**32 - 1
# Why it has failed, as a pickle behind its length. The slots begin where a huge page can.
_REPORT: Final = 4 * _WORDS
_REPORT_BYTES: Final = 64 * 1024
_DATA: Final = 2 * 1024 * 1024
# Shares that all ranks of a host hold together, if each has two: more of them do not stay in the CPU's cache.
_HELD: Final = 16
_LOOK_S: Final = 1.0
# Ranks of a host come here together, unless one of them has failed on the way.
_ARRIVE_S: Final = 10.0
_SLICE_BYTES: Final = 512 * 1024
# Goes ahead of a share: what has become of it, its length, its CRC-32.
_HEAD = struct.Struct("<QQQ")
_TAGS: Final = 2**30
_READ, _FAILED, _NOT_READ = 0, 1, 2

T = TypeVar("T")


class _LateError(LoadError):
    """Another rank does not get on, or continues alone."""


class Ring:
    """A rank's memory, for one load."""

    def __init__(self, options: LoadOptions) -> None:
        self.slots = max(2, min((options.buffer_bytes or BUFFER_BYTES) // SHARE_BYTES, _WORDS - _SLOTS))
        self.crosses = options.cooperative == "on"
        self.memory = SharedMemory.make(_DATA + self.slots * SHARE_BYTES, _WORDS)

    def member(self) -> Member:
        """By what the other ranks find it."""
        return Member(host_identity(), os.getpid(), self.memory.fd, self.slots, self.crosses)


class HandingOn:
    """Takes part in a load; a context manager, within which `reader` serves files, and `in_turn` keeps the order.

    Args:
        shares: what is handed on, the same on all ranks.
        rank: this rank, as `shares` and `group` count.
        ring: of this rank, as its `Member` tells.
        files: from which shares are read, and what is not handed on.
        group: of the ranks, if some are on other hosts.
    """

    def __init__(
        self,
        shares: Shares,
        rank: int,
        ring: Ring,
        files: OpenFiles,
        options: LoadOptions,
        stats: ReadStats,
        group: RankGroup | None,
    ) -> None:
        self._shares = shares
        self._rank = rank
        self._memory = ring.memory
        self._files = files
        self._stats = stats
        self._group = group
        self._io_threads = files.reads_at_once(options)
        self._deadline_s = options.hand_on_deadline_s
        self._lock = threading.Lock()
        self._turns: dict[int, int] = {}  # shares that are in use, or from which on a span in work may use some
        self._begun = 0  # the lowest share that spans to come may use
        self._takes = 0  # the word `_TAKES` of this rank, which only this one sets
        self._of_thread = threading.local()  # `share`: the one that its span uses
        self._alone = False
        self._failure: BaseException | None = None
        self._stopped = False
        self._threads: list[threading.Thread] = []
        self._lost: dict[int, str] = {}  # ranks from which nothing more comes, and why
        self._plan()

    def _plan(self) -> None:
        shares, rank, members = self._shares, self._rank, self._shares.members
        here = members[rank].host
        count = len(shares.starts)
        hosts = {other: member.host for other, member in members.items()}
        numbers = np.arange(count)
        self._takers = shares.ranks_of(here)  # by group
        self._sends_to: dict[int, list[int]] = {}
        for group in range(len(self._takers)):
            own = numbers[shares.groups == group]
            by_host: dict[str, list[int]] = {}
            for other in shares.wanting[group]:
                if hosts[other] != here:
                    by_host.setdefault(hosts[other], []).append(other)
            if by_host:
                for number in own[shares.owners[own] == rank].tolist():
                    self._sends_to[number] = [others[number % len(others)] for others in by_host.values()]
        needs = np.full(count, -1, dtype=np.int64)
        for host in sorted(set(hosts.values())):
            provider, place, slots, before = _places(shares, host)
            needs = np.maximum(needs, before)
            if host == here:
                self._provider, self._place, self._slots = provider, place, slots
        self._needs = np.maximum.accumulate(needs)
        self._provides = np.flatnonzero(self._provider == rank)
        self._ranks_here = sorted(self._slots)
        line = int(shares.stops.max(initial=0)) + ALIGNMENT_BYTES
        self._line = line
        self._ends = shares.numbers * line + shares.stops
        wants = np.array([rank in ranks for ranks in shares.wanting], dtype=bool)
        wanted = numbers[wants[shares.groups]] if count else numbers
        self._of_file: dict[str, tuple[list[int], list[int], list[int]]] = {}
        for number, file in enumerate(shares.files):
            own = wanted[shares.numbers[wanted] == number]
            if len(own):
                self._of_file[file] = own.tolist(), shares.starts[own].tolist(), shares.stops[own].tolist()

    # --------------------------------------------------------------------------------------------------- begin and end

    def __enter__(self) -> HandingOn:
        self._memories = {self._rank: self._memory}
        try:
            if not self._all_are_attached():
                self._of_file.clear()
                return self
            own = self._shares.owners[self._provides] == self._rank
            works = {
                self._read_shares: own.any(),
                self._receive_shares: not own.all(),
                self._send_shares: self._sends_to,
            }
            for work in (work for work, is_any in works.items() if is_any):
                thread = threading.Thread(target=self._serve, args=(work,), name="mcore_ckpt-hand-on", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException as error:
            self._fail(error)
            for slot in range(self._slots.get(self._rank, 0)):
                self._memory[_SLOTS + slot] = _NO_MORE  # which is no turn: the others are told that it has failed
            self._end(interrupted=True)
            raise
        return self

    def _all_are_attached(self) -> bool:
        """Open the memory of the other ranks of this host. False if one of them cannot: then all read for themselves,
        unless other hosts count on them.
        """
        members, failure = self._shares.members, None
        others = [rank for rank in self._ranks_here if rank != self._rank]
        for other in others:
            try:
                self._memories[other] = SharedMemory.of(members[other].pid, members[other].fd, _WORDS)
            except OSError as error:
                failure = LoadError(
                    f"the memory of rank {other} (process {members[other].pid}), which reads for rank {self._rank}, "
                    f"cannot be opened: {error}; it has ended, or may not be looked into: set cooperative='off'"
                )
        self._memory[_ATTACHED] = _YES if failure is None else _NO
        arrive_s = self._deadline_s if self._shares.is_between_hosts else min(self._deadline_s, _ARRIVE_S)
        try:
            found = [
                self._wait(other, _ATTACHED, bool, "has not begun to read", arrive_s)
                for other in self._memories
                if other in others
            ]
        except _LateError as late:
            if self._shares.is_between_hosts:
                raise
            self._continue_alone(late)
            return False
        if failure is None and _NO not in found:
            return True
        if self._shares.is_between_hosts:
            raise failure or LoadError("a rank of this host cannot open the memory of another: set cooperative='off'")
        if failure is not None:
            _logger.warning("each rank of this host reads for itself: %s", failure)
        return False

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._end(interrupted=error is not None and not isinstance(error, Exception))
        if error is None and self._failure is not None:
            raise self._failure

    def _end(self, *, interrupted: bool) -> None:
        self._stopped = self._stopped or interrupted
        self._take_from(_NO_MORE)
        try:
            for thread in self._threads:
                thread.join()
        finally:
            for memory in self._memories.values():
                memory.close()

    # --------------------------------------------------------------------------------------------------------- taking

    def in_order(self, spans: Iterable[T]) -> Iterator[T]:
        """Spans, which have a file, a start and a stop, in the order of the files. Those that take something of what is
        handed on are then to be read `in_work`.
        """
        for span in spans:
            first = self._first_share(span)
            with self._lock:
                self._begun = max(self._begun, first)
                if self.takes_some_of(span):
                    self._turns[first] = self._turns.get(first, 0) + 1
            yield span

    def takes_some_of(self, span: Any) -> bool:
        """Whether a span, or what is read with it up to whole pages, is handed on to this rank, or was to be."""
        _, starts, stops = self._of_file.get(span.file, ([], [], []))
        at = bisect.bisect_right(stops, span.start // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        return at < len(starts) and starts[at] < -(-span.stop // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @contextmanager
    def in_work(self, span: Any) -> Iterator[None]:
        """Within the block this thread reads a span that takes something; what it needs of others, nobody has to keep
        any more after it.
        """
        self._of_thread.share = self._first_share(span)
        yield
        with self._lock:
            self._move_to(None)

    def _move_to(self, share: int | None) -> None:
        """This thread uses another share, or none, and not the one that it has used."""
        before = self._of_thread.share
        self._of_thread.share = share
        if share is not None:
            self._turns[share] = self._turns.get(share, 0) + 1
        if before is not None:
            self._release(before)

    def _first_share(self, span: Any) -> int:
        files, file = self._shares.files, span.file
        number = bisect.bisect_left(files, file)
        known = number < len(files) and files[number] == file
        start = span.start // ALIGNMENT_BYTES * ALIGNMENT_BYTES if known else 0
        return int(np.searchsorted(self._ends, number * self._line + start, "right"))

    def _release(self, share: int) -> None:
        self._turns[share] -= 1
        if not self._turns[share]:
            del self._turns[share]
            self._take_from(min(self._turns, default=self._begun))

    def _take_from(self, share: int) -> None:
        """Tell the others that this rank needs no share before this one any more."""
        if share > self._takes:
            self._memory[_TAKES] = self._takes = share

    @contextmanager
    def reader(self, name: str) -> Iterator[RangeReader]:
        """The reader of a file; shares that are handed on come out of memory."""
        with self._files.reader(name) as reader:
            yield _SharedReader(reader, self, *self._of_file.get(name, ([], [], [])))

    def copy(self, share: int, offset: int, view: memoryview, arrived: Callable[[memoryview], None] | None) -> bool:
        """Copy bytes of a share, when it has come. False if this rank has to read them itself: it has said that it does
        not need the share any more, may not wait for it, or continues alone.
        """
        with self._lock:
            if self._alone:
                self._move_to(None)
                return False
            if share < self._takes:
                return False
            self._move_to(share)
            if self._needs[share] >= self._takes:
                return False
        try:
            source = self._share(share)[offset : offset + len(view)]
        except _LateError as late:
            self._continue_alone(late)
            with self._lock:
                self._move_to(None)
            return False
        for done in range(0, len(view), _SLICE_BYTES):
            part = view[done : done + _SLICE_BYTES]
            direct_io.copy_bytes(part, source[done : done + len(part)])
            if arrived is not None:
                arrived(part)
        self._stats.add(bytes_shared=len(view))
        self.progressed()
        return True

    def progressed(self) -> None:
        """This rank has got bytes."""
        with self._lock:
            self._memory.count(_PROGRESS)

    def _continue_alone(self, late: _LateError) -> None:
        """Take nothing more of others, and hand on nothing more."""
        with self._lock:
            if self._alone:
                return
            self._memory[_ALONE] = _YES  # first: others take a share that is marked for a failure otherwise
            self._alone = True
            self._begun = _NO_MORE
            if not self._turns:
                self._take_from(_NO_MORE)
        _logger.warning("rank %d reads the rest by itself: %s", self._rank, late)

    def _share(self, share: int) -> memoryview:
        provider, place = int(self._provider[share]), int(self._place[share])
        slot, turn = self._slot_of(provider, place)
        what = f"has not handed on {self._named(share)}"
        word = self._wait(provider, _SLOTS + slot, lambda word: word >= turn, what)
        if word != turn and self._memories[provider][_ALONE]:
            raise _LateError(f"rank {provider} hands on nothing more")
        if word != turn:
            raise self._failure_of(provider, share)
        return self._slot(provider, slot, self._length(share))

    def _slot_of(self, rank: int, place: int) -> tuple[int, int]:
        """Where a rank puts the share that has this place among its own; and the word that says that it is there."""
        turn, slot = divmod(place, self._slots[rank])
        return slot, 2 * (turn + 1)

    def _slot(self, rank: int, slot: int, nbytes: int) -> memoryview:
        start = _DATA + slot * SHARE_BYTES
        return self._memories[rank].view[start : start + nbytes]

    def _length(self, share: int) -> int:
        return int(self._shares.stops[share] - self._shares.starts[share])

    def _named(self, share: int) -> str:
        shares = self._shares
        return f"bytes [{shares.starts[share]}, {shares.stops[share]}) of {shares.files[shares.numbers[share]]}"

    def _failure_of(self, provider: int, share: int) -> BaseException:
        if provider == self._rank and self._failure is not None:
            return self._failure
        view = self._memories[provider].view[_REPORT : _REPORT + _REPORT_BYTES]
        nbytes = int.from_bytes(view[:8], "little")
        report = pickle.loads(view[8 : 8 + nbytes]) if nbytes else None
        if report is None:
            return LoadError(f"rank {provider} could not hand on {self._named(share)}")
        if report.message.startswith("rank "):
            return same_class(report, LoadError)(report.message)
        return same_class(report, LoadError)(f"rank {provider}, which reads for others, failed: {report.message}")

    def _wait(
        self, rank: int, word: int, ready: Callable[[int], bool], what: str, deadline_s: float | None = None
    ) -> int:
        """A word of a rank's memory when it is `ready`. Raises `LoadError` if the rank has ended, and `_LateError` if
        it continues alone, or no rank of this host has got any bytes for so long.
        """
        memory = self._memories[rank]
        deadline_s = deadline_s or self._deadline_s
        progress, until_s = -1, 0.0
        while not ready(seen := memory[word]):
            if self._stopped:
                raise LoadError("the load was interrupted")
            if self._alone or (word != _TAKES and memory[_ALONE]):
                raise _LateError(f"rank {rank} hands on nothing more")
            if (now := sum(other.counted(_PROGRESS) for other in list(self._memories.values()))) != progress:
                progress, until_s = now, time.monotonic() + deadline_s
            memory.wait(word, seen, min(_LOOK_S, deadline_s))
            if memory[word] != seen:
                continue
            pid = self._shares.members[rank].pid
            if not is_running(pid):
                raise LoadError(f"rank {rank} (process {pid}) has ended during a load, and {what}")
            if time.monotonic() >= until_s:
                raise _LateError(
                    f"rank {rank} (process {pid}) {what}, and no rank of this host has got any bytes, for "
                    f"{deadline_s:g} s (hand_on_deadline_s): it hangs, "
                    "its storage does not answer, or it has raised an error"
                )
        return seen

    # -------------------------------------------------------------------------------------------------------- serving

    def _serve(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (raised when the load ends)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self._failure is not None:
                return
            try:
                report = pickle.dumps(describe(error))
                if len(report) <= _REPORT_BYTES - 8:
                    view = self._memory.view[_REPORT : _REPORT + _REPORT_BYTES]
                    view[8 : 8 + len(report)] = report
                    view[:8] = len(report).to_bytes(8, "little")
            finally:
                # Last: other threads look at it without the lock, and mark what they read as failed.
                self._failure = error

    def _read_shares(self) -> None:
        own = self._provides[self._shares.owners[self._provides] == self._rank].tolist()
        with Crew(self._io_threads, "mcore_ckpt-read-for-others") as crew:
            for share in own:
                self._make_room(share)
                crew.submit(lambda share=share: self._provide(share, self._read))  # type: ignore[misc]

    def _read(self, share: int, view: memoryview) -> None:
        shares = self._shares
        start, nbytes = int(shares.starts[share]), len(view)
        with self._files.reader(shares.files[shares.numbers[share]]) as reader:
            # Ranges are widened to whole pages, of which the last one may not be there.
            nbytes = min(nbytes, max(reader.size_bytes - start, 0))
            reader.read_into(start, view[:nbytes])
        self._stats.add(bytes_provided=nbytes)
        self.progressed()

    def _receive_shares(self) -> None:
        for share in self._provides[self._shares.owners[self._provides] != self._rank].tolist():
            self._make_room(share)
            self._provide(share, self._receive, always=True)

    def _make_room(self, share: int) -> None:
        """Wait until nobody needs any more what has the share's place."""
        place, slots = int(self._place[share]), self._slots[self._rank]
        if place < slots or self._failure is not None or self._alone:
            return
        before = int(self._provides[place - slots])
        name = self._named(before)
        try:
            # It may still be on its way: a rank that may not wait for it reads those bytes by itself, and goes on.
            self._await_filled(before)
            for taker in self._takers[self._shares.groups[before]]:
                # One that has ended takes nothing, and is missed when all ranks come together.
                if is_running(self._shares.members[taker].pid) or self._memories[taker][_TAKES] > before:
                    self._wait(taker, _TAKES, lambda takes: takes > before, f"has not taken {name}")
            if before in self._sends_to:
                self._wait(self._rank, _SENDS, lambda sends: sends > before, f"has not sent {name}")
        except _LateError as late:
            self._continue_alone(late)
        except LoadError as error:
            self._fail(error)

    def _provide(self, share: int, fill: Callable[[int, memoryview], None], *, always: bool = False) -> None:
        """Fill a share's place, and say so; `always`: also if this rank has failed, since the share is sent."""
        slot, turn = self._slot_of(self._rank, int(self._place[share]))
        if self._stopped:
            self._fail(LoadError("the load was interrupted"))
        failed = self._failure is not None or self._alone  # its place may be in use then
        view = (
            memoryview(bytearray(self._length(share))) if failed else self._slot(self._rank, slot, self._length(share))
        )
        try:
            if always or not failed:
                fill(share, view)
        except BaseException as error:  # noqa: BLE001  (raised where the share is used, and at the end)
            self._fail(error)
        with self._lock:
            # A failed share does not wait for the one before it in its place, whose mark may then come after its own.
            word = turn + int(failed or self._failure is not None or self._alone)
            self._memory[_SLOTS + slot] = max(word, self._memory[_SLOTS + slot])

    def _await_filled(self, share: int, *, always: bool = False) -> int:
        """The word of a share's place in this rank's memory, when it has come. All are marked, so there is no deadline;
        once this rank has failed, or continues alone, no place is used, and only `always` waits.
        """
        slot, turn = self._slot_of(self._rank, int(self._place[share]))
        while (word := self._memory[_SLOTS + slot]) < turn and (always or not (self._failure or self._alone)):
            if self._stopped:
                raise LoadError("the load was interrupted")
            self._memory.wait(_SLOTS + slot, word, _LOOK_S)
        return word

    # --------------------------------------------------------------------------------------------------- between hosts

    def _send_shares(self) -> None:
        lost: dict[int, BaseException] = {}
        for share, receivers in sorted(self._sends_to.items()):
            slot, turn = self._slot_of(self._rank, int(self._place[share]))
            word = self._await_filled(share, always=True)
            if word == turn:
                content = self._slot(self._rank, slot, self._length(share))
                head = _HEAD.pack(_READ, len(content), crc32(content))
            elif self._failure is None:
                content = self._memory.view[:0]
                head = _HEAD.pack(_NOT_READ, 0, crc32(content))
            else:
                length = int.from_bytes(self._memory.view[_REPORT : _REPORT + 8], "little")
                content = self._memory.view[_REPORT + 8 : _REPORT + 8 + length]
                head = _HEAD.pack(_FAILED, len(content), crc32(content))
            for receiver in receivers:
                if receiver in lost:
                    continue
                try:
                    assert self._group is not None
                    tag = 1 + share % _TAGS
                    self._group.send_to(receiver, memoryview(bytearray(head)), tag)
                    if len(content):
                        self._group.send_to(receiver, content, tag)
                except (RuntimeError, ValueError) as error:
                    lost[receiver] = error
            self._memory[_SENDS] = share + 1
        self._memory[_SENDS] = _NO_MORE
        if lost:
            first = min(lost)
            raise LoadError(f"rank {first} does not take what is read for it: {lost[first]}")

    def _receive(self, share: int, view: memoryview) -> None:
        owner = int(self._shares.owners[share])
        head = memoryview(bytearray(_HEAD.size))
        assert self._group is not None
        tag = 1 + share % _TAGS
        if owner in self._lost:
            raise LoadError(self._lost[owner])
        try:
            self._group.receive_from(owner, head, tag)
            failed, nbytes, expected = _HEAD.unpack(head)
            content = memoryview(bytearray(nbytes)) if failed else view[:nbytes]
            if nbytes:
                self._group.receive_from(owner, content, tag)
        except (RuntimeError, ValueError) as error:
            self._lost[owner] = f"rank {owner} has not handed on {self._named(share)}: {error}"
            raise LoadError(self._lost[owner]) from error
        if crc32(content) != expected:
            raise CorruptCheckpointError(
                f"{self._named(share)} came from rank {owner} with other bytes than were sent: check the network"
            )
        if failed == _NOT_READ:
            self._continue_alone(_LateError(f"rank {owner}, of another host, hands on nothing more"))
        elif failed:
            report = pickle.loads(content) if nbytes else None
            message = "" if report is None else report.message
            said = (
                message if message.startswith("rank ") else f"rank {owner}, which reads for others, failed: {message}"
            )
            raise (LoadError if report is None else same_class(report, LoadError))(said)


def _places(shares: Shares, host: str) -> tuple[Any, Any, dict[int, int], Any]:
    """On a host, in whose memory each share is (-1: in none), its place among those of this rank, how many of them each
    rank holds at once, and the share that has to go before, -1 if none.
    """
    numbers = np.arange(len(shares.starts))
    by_group = shares.ranks_of(host)
    ranks = sorted({rank for takers in by_group for rank in takers})
    provider = np.full(len(numbers), -1, dtype=np.int64)
    is_here = np.isin(shares.owners, [rank for rank, member in shares.members.items() if member.host == host])
    for group, takers in enumerate(by_group):
        own = numbers[shares.groups == group]
        if takers:
            provider[own] = np.where(is_here[own], shares.owners[own], np.array(takers)[own % len(takers)])
    most = max(2, _HELD // max(1, len(ranks)))
    slots = {rank: min(most, shares.members[rank].slots) for rank in ranks}
    place, before = np.zeros(len(numbers), dtype=np.int64), np.full(len(numbers), -1, dtype=np.int64)
    for rank, held in slots.items():
        own = np.flatnonzero(provider == rank)
        place[own] = np.arange(len(own))
        before[own[held:]] = own[: len(own) - min(held, len(own))]
    return provider, place, slots, before


class _SharedReader(RangeReader):
    """A file of which some shares come out of memory: `[starts[i], stops[i])` are share `numbers[i]`."""

    def __init__(
        self, reader: RangeReader, shared: HandingOn, numbers: list[int], starts: list[int], stops: list[int]
    ) -> None:
        self.name = reader.name
        self.size_bytes = reader.size_bytes
        self._reader = reader
        self._shared = shared
        self._numbers, self._starts, self._stops = numbers, starts, stops

    def read_into(self, offset: int, view: memoryview, arrived: Callable[[memoryview], None] | None = None) -> None:
        view = view.cast("B")
        self.check_range(offset, len(view))
        done = 0
        while done < len(view):
            position = offset + done
            at = bisect.bisect_right(self._starts, position) - 1
            inside = at >= 0 and position < self._stops[at]
            end = self._stops[at] if inside else self._starts[at + 1] if at + 1 < len(self._starts) else self.size_bytes
            part = view[done : done + end - position]
            if not (inside and self._shared.copy(self._numbers[at], position - self._starts[at], part, arrived)):
                self._reader.read_into(position, part, arrived)
                self._shared.progressed()
            done += len(part)

    def is_cached(self, offset: int, length: int) -> bool:
        at = bisect.bisect_right(self._starts, offset) - 1
        if at >= 0 and offset < self._stops[at]:
            return True
        return self._reader.is_cached(offset, length)

    def close(self) -> None:
        """It belongs to others."""
