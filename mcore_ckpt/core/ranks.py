"""Collectives of a save or a load: small, on the host, and carrying every rank's error to every rank.

Everything travels as bytes over gloo, never over a device (gathering plans with NCCL costs gigabytes of device memory).
A step that may fail on one rank runs inside `RankGroup.run`: every rank reaches the exchange that follows, and if any
rank failed then all raise the same exception.

Each exchange says what it is. Where ranks meet in different ones, or with settings that all must have alike, all raise;
but not where only the coordinator speaks in one of them (`run_on_coordinator`, `scatter`): that ends by time-out.

An exchange is a binomial tree up to the coordinator, in which values are merged on the way, and the same tree down. So
it takes twice the logarithm of the number of ranks in time; gloo's own collectives are rings. Each rank knows for whom
it waits. If it waits in vain, it leaves word for whom in the store through which the ranks have met, and so leads from
rank to rank to the one without such a word.
"""

from __future__ import annotations

import hashlib
import operator
import pickle
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from mcore_ckpt.core.errors import (
    TRACEBACK,
    CheckpointError,
    FailureReport,
    OptionError,
    describe,
    remote_cause,
    same_class,
)


@contextmanager
def without_modes() -> Iterator[None]:
    """Within the block no mode of this thread is on: a default device, fake tensors, a counter of operations."""
    modes: list[Any] = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]  # type: ignore[no-untyped-call]  # noqa: SLF001
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)  # type: ignore[no-untyped-call]


T = TypeVar("T")
U = TypeVar("U")

# One message carries a payload of up to this many bytes; a larger one takes a second message of exact size.
_SLOT_BYTES = 1024
_HEADER = struct.Struct("<QQI")  # outcome of the step, length of the payload, and which exchange this is
_INLINE_BYTES = _SLOT_BYTES - _HEADER.size
# What is larger goes straight to the coordinator: half way up the tree a rank would hold it for half of the others.
_MERGED_BYTES = 4096
_OK, _FAILED, _FAILED_EVERYWHERE = range(3)
_NAMED_RANKS = 16
# An attribute rather than a list of such errors: it survives an error's conversion into another class.
_REACHED = "_reached_every_rank"
_INTERRUPTED = "_rank_was_interrupted"
# In the store: for which rank another one has waited in vain.
_WAITED = "mcore_ckpt/waited_for/"
# Ranks come to an exchange one after the other, and so do the ends of their patience.
_LEAVES_WORD_S = 2.5
# So long the store of the process group is waited for as a whole, when contact with a rank is lost.
_STORE_ANSWERS_S: Final = 12.0


class RankGroup:
    """The ranks that save or load together: `rank` is this one's number, `size` how many, and `is_coordinator` says
    whether this is the one rank that plans and publishes for all. A group of one never communicates.
    """

    __slots__ = ("_alike", "_group", "_reach", "has_lost_contact", "is_coordinator", "rank", "size")

    def __init__(self, group: dist.ProcessGroup | None, **alike: str) -> None:
        """Wrap a gloo group; None is a world of one, for which `torch.distributed` need not be initialized. `alike`:
        settings, by name; each exchange carries them, and all ranks raise `OptionError` where they differ.
        """
        self._group = group
        self._alike = tuple(alike.items())
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.is_coordinator = self.rank == 0
        self.has_lost_contact = False  # of which the error tells later: when it is known to whom
        # In the tree this rank's parent is so far before it, and its children are half, a quarter, ... behind it.
        self._reach = 1
        while self._reach < self.size and self.rank % (2 * self._reach) == 0:
            self._reach *= 2

    def run(self, what: str, fn: Callable[[], T], *, wrap: type[CheckpointError], name: str | None = None) -> list[T]:
        """Call `fn` on every rank and give every rank the values of all, by rank.

        If `fn` failed on some rank, all raise the class and message of the first one: `wrap` for what is not of our
        tree. `what`: the step in words; `name`: what ranks must come to alike, where `what` differs between them.
        """
        parts = self.run_merged(
            what, lambda: {self.rank: pickle.dumps(fn())}, operator.or_, lambda merged: merged, wrap=wrap, name=name
        )
        return [pickle.loads(parts[rank]) for rank in range(self.size)]

    def run_merged(
        self,
        what: str,
        fn: Callable[[], T],
        merge: Callable[[T, T], T],
        conclude: Callable[[T], U],
        *,
        wrap: type[CheckpointError],
        name: str | None = None,
    ) -> U:
        """Call `fn` on every rank, merge the values on their way, and give every rank what the coordinator makes of it.

        `conclude` is called on the coordinator, if `fn` failed on no rank; else as `run`.
        """
        value, error = _attempt(fn)
        with self._contact(what, wrap, error):
            tag = (what if name is None else name, self._alike)
            merged, failed = self._up(tag, value, error, merge)
            if self.is_coordinator and not failed:
                concluded, error = _attempt(partial(conclude, merged))
                return self._down(tag, what, wrap, concluded, error)
            return self._down(tag, what, wrap, None, error, failed)

    def each(self, what: str, fn: Callable[[], T], *, wrap: type[CheckpointError]) -> T:
        """Call `fn` on every rank, and give each rank its own value. Raises as `run`."""
        own: list[T] = []
        self.run_merged(what, lambda: own.append(fn()), lambda *_: None, lambda _: None, wrap=wrap)
        return own[0]

    def gather(self, what: str, fn: Callable[[], T], *, wrap: type[CheckpointError]) -> list[T] | None:
        """As `run`, but only the coordinator gets the values (others None), and only it needs memory for them."""
        gathered = self.gather_parts(what, lambda: [pickle.dumps(fn())], wrap=wrap)
        return None if gathered is None else [pickle.loads(part) for (part,) in gathered]

    def gather_parts(
        self, what: str, fn: Callable[[], Sequence[bytes]], *, wrap: type[CheckpointError]
    ) -> list[list[bytes]] | None:
        """As `gather`, of byte strings; a long one that several ranks have is sent once, and is one object there."""
        parts, error = _attempt(lambda: list(fn()))
        is_long = [len(part) > _MERGED_BYTES and not self.is_coordinator for part in parts or ()]
        told = [_Long.of(part) if long else part for part, long in zip(parts or (), is_long, strict=True)]
        # For each long part: (first rank that holds it, its index in that rank's list).
        first = {part: (self.rank, n) for n, part in reversed(list(enumerate(told))) if isinstance(part, _Long)}
        with self._contact(what, wrap, error):
            tag = (what, self._alike)
            merged, failed = self._up(tag, None if error else ({self.rank: told}, first), error, _both_told)
            by_rank, first = merged if merged is not None else ({}, first)
            senders = self._down(tag, what, wrap, frozenset(first.values()), error, failed)
            mine = [part for n, part in enumerate(parts or ()) if (self.rank, n) in senders]
            if mine:
                self._send_bytes(0, b"".join(mine))
            if not self.is_coordinator:
                return None
            received = self._receive_long(first) if first else {}
        return [
            [received[part] if isinstance(part, _Long) else part for part in by_rank[rank]] for rank in range(self.size)
        ]

    def run_on_coordinator(self, what: str, fn: Callable[[], T], *, wrap: type[CheckpointError]) -> T:
        """Call `fn` on the coordinator alone and give every rank its value, or its exception as `run` does."""
        value, error = _attempt(fn) if self.is_coordinator else (None, None)
        with self._contact(what, wrap, error):
            return self._down((what, self._alike), what, wrap, value, error)

    def scatter(self, what: str, fn: Callable[[], Sequence[T]], *, wrap: type[CheckpointError]) -> T:
        """Call `fn` on the coordinator alone; each rank gets the value of its number, or the exception as in `run`."""
        values, error = _attempt(fn) if self.is_coordinator else (None, None)
        with self._contact(what, wrap, error):
            self._down((what, self._alike), what, wrap, None, error)
            return self._apart(list(values or ()))

    def maximum(self, what: str, values: Sequence[int], *, wrap: type[CheckpointError]) -> list[int]:
        """Element-wise maximum over the ranks; every rank passes as many values. `what` as of `run`."""

        return self.run_merged(what, lambda: values, lambda one, two: list(map(max, one, two)), list, wrap=wrap)

    def any(self, what: str, flag: bool, *, wrap: type[CheckpointError]) -> bool:
        """Whether the flag is set on any rank; `what` as of `run`."""
        return self.run_merged(what, lambda: flag, operator.or_, bool, wrap=wrap)

    def tell_failure(self, what: str, error: BaseException, *, wrap: type[CheckpointError]) -> None:
        """Tell the other ranks, in the exchange of values that they come to next, that this one has failed before."""
        with suppress(BaseException), self._contact(what, wrap, error):  # (the caller raises what has failed)
            _, failed = self._up(None, None, error, lambda first, _: first)
            self._down(None, what, wrap, None, error, failed)
        setattr(error, _REACHED, True)

    # --- one exchange -------------------------------------------------------------------------------------------------

    def _up(
        self, tag: _Tag | None, value: Any, error: BaseException | None, merge: Callable[[Any, Any], Any]
    ) -> tuple[Any, _Failed]:
        """To the coordinator: the values of all ranks that have one, merged, and which ranks failed. Those who have
        come to another exchange have. (No tag: this rank has failed before, whichever exchange the others come to.)
        """
        failed: _Failed = {} if error is None else {self.rank: _failure(error)}
        step = 1
        while step < self._reach:
            if self.rank + step < self.size:
                their_tag, theirs, others = pickle.loads(self._receive(self.rank + step)[1])
                differs = None if tag is None or their_tag is None else _difference(their_tag, tag, self.rank)
                if differs is not None:
                    theirs = None
                    others = {self.rank + step: _failure(differs), **others}
                tag = their_tag if tag is None else tag
                failed = {**failed, **others}
                first = min(failed, default=0)  # whose report alone travels
                failed = {n: each if n == first else replace(each, report=None) for n, each in failed.items()}
                value = theirs if value is None else value if theirs is None else merge(value, theirs)
            step *= 2
        if not self.is_coordinator:
            self._send(self.rank - self._reach, pickle.dumps((tag, value, failed)))
        return value, failed

    def _down(
        self,
        tag: _Tag | None,
        what: str,
        wrap: type[CheckpointError],
        value: T | None,
        error: BaseException | None,
        failed: _Failed | None = None,
    ) -> T:
        """The coordinator's value on all ranks, down the tree of `_up`; or the exception, if a rank has failed."""
        if self.is_coordinator and error is not None and not failed:
            failed = {0: _failure(error)}
        outcome = _OK
        if failed and self.is_coordinator:
            everywhere = len(failed) == self.size and all(failure.everywhere for failure in failed.values())
            outcome = _FAILED_EVERYWHERE if everywhere else _FAILED
        answer = pickle.dumps(failed if outcome else value) if self.is_coordinator else b""
        number = their_number = 0 if tag is None else zlib.crc32(tag[0].encode())
        if not self.is_coordinator:
            outcome, answer, their_number = self._receive(self.rank - self._reach)
        step = self._reach
        while (step := step // 2) > 0:
            if self.rank + step < self.size:
                self._send(self.rank + step, answer, outcome, their_number)
        if outcome == _FAILED_EVERYWHERE and error is not None:
            raise error  # every rank has this one already, from a step inside this step
        if outcome:
            self._raise(what, wrap, pickle.loads(answer), error)
        if tag is not None and number != their_number:
            raise wrap(
                f"could not {what}: rank {self.rank} of {self.size} has come to this, and the first rank to something "
                "else: all ranks must make the same calls in the same order"
            )
        return value if self.is_coordinator else pickle.loads(answer)  # type: ignore[return-value]

    def _apart(self, values: list[T]) -> T:
        """The coordinator's values, to each rank its own: down the tree of `_up`, with those of ranks further down."""
        step = self._reach
        if not self.is_coordinator:
            values = pickle.loads(self._receive(self.rank - step)[1])
        while (step := step // 2) > 0:
            if step < len(values):
                self._send(self.rank + step, pickle.dumps(values[step:]))
                values = values[:step]
        return values[0]

    def _raise(self, what: str, wrap: type[CheckpointError], failed: _Failed, error: BaseException | None) -> NoReturn:
        if error is not None and not isinstance(error, Exception):
            setattr(error, _REACHED, True)
            raise error
        first = min(failed)
        report = failed[first].report
        assert report is not None
        if self.size == 1:
            if isinstance(error, CheckpointError):
                raise error
            raise wrap(f"could not {what}: {report.message}") from error
        named = ", ".join(map(str, sorted(failed)[:_NAMED_RANKS])) + (", ..." if len(failed) > _NAMED_RANKS else "")
        others = f" ({len(failed)} ranks failed: {named})" if len(failed) > 1 else ""
        raised = same_class(report, wrap)(
            f"could not {what}: rank {first} of {self.size}{others}: {report.message}"
            f"{TRACEBACK}{first} ---\n{report.traceback_text}"
        )
        setattr(raised, _REACHED, True)
        setattr(raised, _INTERRUPTED, any(failure.interrupted for failure in failed.values()))
        raise raised from (error or remote_cause(report))

    @contextmanager
    def _contact(self, what: str, wrap: type[CheckpointError], failure: BaseException | None) -> Iterator[None]:
        """Say in our own words that another rank is gone; gloo only knows addresses. `failure`: of this rank before."""
        try:
            with without_modes():
                yield
        except (RuntimeError, ValueError) as error:
            if self.size == 1 or isinstance(error, CheckpointError):
                raise
            if self.has_lost_contact and failure is not None:
                raise failure from failure.__cause__  # which says so
            self.has_lost_contact = True
            raise wrap(
                f"could not {what}: rank {self.rank} of {self.size} has lost contact with another rank: "
                f"{_who_is_missing(error)} ({error}); see the other ranks' output for the first cause"
                + (f". Before that this rank had failed: {failure}" if failure is not None else "")
            ) from error

    @contextmanager
    def _talking_to(self, rank: int, trouble: str) -> Iterator[None]:
        """Raise `_LostContactError` for what gloo raises."""
        try:
            yield
        except RuntimeError as error:
            raise _LostContactError(self._global_rank(rank), f"{trouble} rank {rank}: {error}") from error

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _send(self, rank: int, payload: bytes, outcome: int = _OK, number: int = 0) -> None:
        inline = payload[:_INLINE_BYTES]
        self._send_bytes(rank, (_HEADER.pack(outcome, len(payload), number) + inline).ljust(_SLOT_BYTES, b"\0"))
        if len(payload) > _INLINE_BYTES:
            self._send_bytes(rank, payload)

    def _receive(self, rank: int) -> tuple[int, bytes, int]:
        """Outcome, payload and number of the exchange."""
        slot = self._receive_bytes(rank, _SLOT_BYTES)
        outcome, length, number = _HEADER.unpack_from(slot)
        inline = slot[_HEADER.size : _HEADER.size + length]
        return outcome, inline if length <= _INLINE_BYTES else self._receive_bytes(rank, length), number

    def _send_bytes(self, rank: int, payload: bytes | bytearray) -> None:
        tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        with self._talking_to(rank, "nothing can be sent to"):
            dist.send(tensor, dst=self._global_rank(rank), group=self._group)

    def _receive_bytes(self, rank: int, length: int) -> bytes:
        buffer = torch.empty(length, dtype=torch.uint8, device="cpu")
        with self._talking_to(rank, "nothing has come from"):
            dist.recv(buffer, src=self._global_rank(rank), group=self._group)
        return buffer.numpy().tobytes()

    def _receive_long(self, first: Mapping[_Long, tuple[int, int]]) -> dict[_Long, bytes]:
        """What ranks send straight to the coordinator: all of one rank's in one message."""
        of_rank: dict[int, list[_Long]] = {}
        for part in sorted(first, key=first.__getitem__):
            of_rank.setdefault(first[part][0], []).append(part)
        buffers = {
            rank: torch.empty(sum(part.length for part in parts), dtype=torch.uint8, device="cpu")
            for rank, parts in of_rank.items()
        }
        pending = {
            rank: dist.irecv(buffer, src=self._global_rank(rank), group=self._group) for rank, buffer in buffers.items()
        }
        for rank, work in pending.items():
            assert work is not None
            with self._talking_to(rank, "nothing has come from"):
                work.wait()
        received: dict[_Long, bytes] = {}
        for rank, parts in of_rank.items():
            content = buffers.pop(rank).numpy()
            for part in parts:
                received[part], content = content[: part.length].tobytes(), content[part.length :]
        return received

    def _global_rank(self, rank: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, rank)


def reached_every_rank(error: BaseException) -> bool:
    """Whether this exception was raised by `RankGroup.run` and its kin, so that every rank has it already."""
    return bool(getattr(error, _REACHED, False))


def was_interrupted(error: BaseException) -> bool:
    """Whether a rank has raised because it was told to end (Ctrl-C, an exit): this one, or another, as `run` tells."""
    return not isinstance(error, Exception) or bool(getattr(error, _INTERRUPTED, False))


def own_rank() -> int:
    """This rank's number in the job; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def coordination_group(process_group: dist.ProcessGroup | None = None, **alike: str) -> RankGroup:
    """The group over which the ranks of `process_group` (None: all) coordinate. Every rank of it must make the first
    call. `alike` as of `RankGroup`.

    A group that gloo serves on the host is used as it is. Of any other, a gloo group of the same ranks is made once.
    Such groups are forgotten when the default group has been destroyed, as a restart inside the process does. Raises
    `OptionError` if this rank is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return RankGroup(None)
    world = dist.group.WORLD
    assert world is not None
    wanted = process_group if process_group is not None else world
    if dist.get_rank(wanted) < 0:
        raise OptionError(
            f"rank {dist.get_rank()} is not in the process group that was passed; only its members may save or load"
        )
    if "cpu:gloo" in str(dist.get_backend_config(wanted)).split(","):
        return RankGroup(wanted, **alike)
    return RankGroup(_gloo_group_like(wanted, world), **alike)


class _LostContactError(RuntimeError):
    """Gloo has failed, or waited in vain, for the rank `other` of the default group."""

    def __init__(self, other: int, text: str) -> None:
        super().__init__(text)
        self.other = other


def _who_is_missing(error: Exception) -> str:
    """Leave word for which rank this one has waited in vain, and follow the others' word to one that has left none."""
    if not isinstance(error, _LostContactError):
        return "which one is not known"
    found: list[str] = []
    # The store may hang with the rank that is lost: no call to it has a limit that all kinds of stores keep.
    asking = threading.Thread(target=lambda: found.append(_follow_words(error.other)), daemon=True)
    asking.start()
    asking.join(_STORE_ANSWERS_S)
    return found[0] if found else f"rank {error.other}, or another: the store through which the ranks have met hangs"


def _follow_words(other: int) -> str:
    rank = dist.get_rank()
    through = ""
    followed = {rank}
    try:
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  (no public function tells)
        store.set(f"{_WAITED}{rank}", str(other))
        while other not in followed:
            followed.add(other)
            try:
                store.wait([f"{_WAITED}{other}"], timedelta(seconds=_LEAVES_WORD_S))
            except dist.DistStoreError:
                return f"rank {other}{through} has ended, hangs, or is in another call"
            through = f", for which rank {other} has waited,"
            other = int(store.get(f"{_WAITED}{other}"))
        return "these wait for each other: ranks " + ", ".join(map(str, sorted(followed)))
    except (RuntimeError, ValueError) as failure:  # the store has ended, too, or the process group is being taken down
        return f"rank {other}, or another: the store through which the ranks have met fails ({failure})"


# References are weak: a destroyed group must be free to go, and the registry of torch.distributed keeps live ones.
_gloo_groups: dict[int, tuple[weakref.ref[Any], weakref.ref[Any], weakref.ref[Any]]] = {}


def _gloo_group_like(wanted: dist.ProcessGroup, world: dist.ProcessGroup) -> dist.ProcessGroup:
    for key, (of_world, of_group, _) in list(_gloo_groups.items()):
        if of_world() is not world or of_group() is None:
            del _gloo_groups[key]
    known = _gloo_groups.get(id(wanted))
    group: dist.ProcessGroup | None = known[2]() if known else None
    if group is None:
        if wanted is world:
            group = dist.new_group(backend="gloo")
        else:
            # Only the members come here, so only they may be needed to make the group.
            ranks = dist.get_process_group_ranks(wanted)
            group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        _gloo_groups[id(wanted)] = (weakref.ref(world), weakref.ref(wanted), weakref.ref(group))
    assert group is not None
    return group


# What an exchange is, and the settings that it carries.
_Tag = tuple[str, tuple[tuple[str, str], ...]]


def _difference(theirs: _Tag, own: _Tag, rank: int) -> Exception | None:
    """Why another rank and this one, `rank`, do not meet in one exchange: the other's error; None if they do."""
    settings = dict(own[1])
    for name, value in theirs[1]:
        if settings.get(name, value) != value:
            return OptionError(
                f"{name} is {value!r} there, and {settings[name]!r} on rank {rank}: set MCORE_CKPT_{name.upper()} "
                "alike on all hosts, or nowhere"
            )
    if theirs[0] == own[0]:
        return None
    return RuntimeError(
        f"this rank has come to another exchange ({theirs[0]}) than rank {rank} ({own[0]}): all ranks must make the "
        "same calls in the same order"
    )


@dataclass(frozen=True, slots=True)
class _Failure:
    """A rank's failure: the report of it, unless a rank before it failed, too; whether every rank has raised it."""

    report: FailureReport | None
    everywhere: bool
    interrupted: bool = False


_Failed = dict[int, _Failure]


class _Long(NamedTuple):
    """A part that is not sent up the tree, by what it holds: ranks that have the same one say the same."""

    digest: bytes
    length: int

    @classmethod
    def of(cls, part: bytes) -> _Long:
        return cls(hashlib.blake2b(part, digest_size=16).digest(), len(part))


_Told = tuple[dict[int, list["bytes | _Long"]], dict[_Long, tuple[int, int]]]


def _both_told(one: _Told, other: _Told) -> _Told:
    first = {**one[1], **other[1]}
    for part in one[1].keys() & other[1].keys():
        first[part] = min(one[1][part], other[1][part])
    return {**one[0], **other[0]}, first


def _failure(error: BaseException) -> _Failure:
    report = describe(error)
    return _Failure(report, reached_every_rank(error), report.interrupted)


def _attempt(fn: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """The value of `fn`, which can be pickled, or what it raised."""
    try:
        value = fn()
        pickle.dumps(value)
        return value, None
    except BaseException as error:  # noqa: BLE001  (also on Ctrl-C the others must not wait for us; raised again)
        return None, error
