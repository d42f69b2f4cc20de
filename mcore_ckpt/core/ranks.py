"""Collectives of a save or a load: small, on the host, and carrying every rank's error to every rank.

Everything travels as bytes over gloo, never over a device (gathering plans with NCCL costs gigabytes of device memory).
A step that may fail on one rank runs inside `RankGroup.run`: whatever happens, every rank reaches the exchange that
follows, and if any rank failed then all raise the same exception. No rank is left waiting in a later collective for a
rank that has given up.
"""

from __future__ import annotations

import pickle
import secrets
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from mcore_ckpt.core._reachability import announce, who_is_missing
from mcore_ckpt.core.errors import CheckpointError, OptionError
from mcore_ckpt.core.failures import FailureReport, describe, remote_cause, same_class
from mcore_ckpt.core.signals import interrupts_wait

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

# One exchange carries a payload of up to this many bytes; a larger one takes a second exchange of exact size.
_SLOT_BYTES = 1024
_HEADER = struct.Struct("<QQ")  # outcome of the step, length of the payload
_INLINE_BYTES = _SLOT_BYTES - _HEADER.size
_OK, _FAILED, _FAILED_EVERYWHERE = range(3)
_NAMED_RANKS = 16
# An attribute rather than a list of such errors: it survives an error's conversion into another class.
_REACHED = "_reached_every_rank"
_INTERRUPTED = "_rank_was_interrupted"


class RankGroup:
    """The ranks that save or load together: `rank` is this one's number, `size` how many; a group of one never
    communicates.
    """

    __slots__ = ("_group", "rank", "size")

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Wrap a gloo group; None is a world of one, for which `torch.distributed` need not be initialized."""
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @property
    def is_coordinator(self) -> bool:
        """Whether this is the one rank that plans and publishes for all."""
        return self.rank == 0

    def run(self, what: str, fn: Callable[[], T], *, wrap: type[CheckpointError] = CheckpointError) -> list[T]:
        """Call `fn` on every rank and give every rank the values of all.

        One exchange if every value pickles into a kilobyte, two otherwise.

        Args:
            what: the step in words, for the message: "write the data files".
            fn: this rank's part.
            wrap: class of the exception if the one that `fn` raised is not of our tree.

        Returns:
            The values by rank.

        Raises:
            CheckpointError: `fn` failed on some rank. The same class and message on every rank: that of the first
                failing rank if it was of our tree, else `wrap`. On a rank that failed, its own exception is the cause.
        """
        payload, error = self._attempt(fn)
        with self._contact(what, wrap):
            slots = self._all_gather_slots(payload, error)
            self._raise_first(what, wrap, slots, error)
            return [pickle.loads(part) for part in self._all_gather_rest(payload, slots)]

    def run_gather(
        self, what: str, fn: Callable[[], T], *, wrap: type[CheckpointError] = CheckpointError
    ) -> list[T] | None:
        """As `run`, but only the coordinator gets the values (others None), and only it needs memory for them."""
        payload, error = self._attempt(fn)
        with self._contact(what, wrap):
            slots = self._all_gather_slots(payload, error)
            self._raise_first(what, wrap, slots, error)
            parts = self._gather_rest(payload, slots)
            return None if parts is None else [pickle.loads(part) for part in parts]

    def run_on_coordinator(self, what: str, fn: Callable[[], T], *, wrap: type[CheckpointError] = CheckpointError) -> T:
        """Call `fn` on the coordinator alone and give every rank its value, or its exception as `run` does."""
        payload, error = self._attempt(fn) if self.is_coordinator else (b"", None)
        with self._contact(what, wrap):
            outcome, length, inline = self._broadcast_slot(payload, error)
            value = pickle.loads(self._broadcast_rest(payload if self.is_coordinator else inline, length))
            if outcome != _OK:
                self._raise(what, wrap, {0: value}, error)
            return value  # type: ignore[no-any-return]

    def all_gather(self, value: T) -> list[T]:
        """Give every rank the values of all, by rank."""
        return self.run("exchange values", lambda: value)

    def gather(self, value: T) -> list[T] | None:
        """Give the coordinator the values of all, by rank; None elsewhere."""
        return self.run_gather("collect values", lambda: value)

    def broadcast(self, value: T) -> T:
        """Give every rank the coordinator's value."""
        return self.run_on_coordinator("distribute a value", lambda: value)

    def maximum(self, values: Sequence[int], *, wrap: type[CheckpointError] = CheckpointError) -> list[int]:
        """Element-wise maximum over the ranks; every rank passes as many values."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        with self._contact("compare notes", wrap):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        result: list[int] = tensor.tolist()
        return result

    def run_xor(
        self, what: str, fn: Callable[[], Sequence[int]], count: int, *, wrap: type[CheckpointError] = CheckpointError
    ) -> list[int]:
        """Call `fn` on every rank, and give every rank the element-wise XOR of the `count` integers below 2^63 that
        the ranks return: one reduction of that size. Raises as `run`, after a second exchange.
        """
        values: Sequence[int] = (0,) * count
        failure: BaseException | None = None
        try:
            values = fn()
        except BaseException as error:  # noqa: BLE001  (as in `_attempt`)
            failure = error
        # Failures of two ranks must not cancel out.
        tensor = torch.tensor([*values, 0 if failure is None else 1 + secrets.randbits(62)], device="cpu")
        if self.size > 1:
            with self._contact(what, wrap):
                dist.all_reduce(tensor, op=dist.ReduceOp.BXOR, group=self._group)
        *result, failed = tensor.tolist()
        if failed:

            def raise_failure() -> None:
                if failure is not None:
                    raise failure

            self.run(what, raise_failure, wrap=wrap)
        return result

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.maximum([int(flag)])[0])

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.maximum([0])

    # --- one step -----------------------------------------------------------------------------------------------------

    def _attempt(self, fn: Callable[[], Any]) -> tuple[bytes, BaseException | None]:
        """The pickled value of `fn`, or the pickled report of its failure and the failure."""
        try:
            return pickle.dumps(fn(), protocol=pickle.HIGHEST_PROTOCOL), None
        except BaseException as error:  # noqa: BLE001  (also on Ctrl-C the others must not wait for us; raised again)
            return pickle.dumps(describe(error)), error

    def _raise_first(
        self,
        what: str,
        wrap: type[CheckpointError],
        slots: list[tuple[int, int, bytes]],
        error: BaseException | None,
    ) -> None:
        outcomes = [outcome for outcome, _, _ in slots]
        if not any(outcomes):
            return
        if error is not None and all(outcome == _FAILED_EVERYWHERE for outcome in outcomes):
            raise error  # every rank has this one already, from a step inside this step
        payload = pickle.dumps(describe(error)) if error is not None else b""
        parts = self._all_gather_rest(payload, self._all_gather_slots(payload, None))
        self._raise(what, wrap, {rank: pickle.loads(part) for rank, part in enumerate(parts) if part}, error)

    def _raise(
        self,
        what: str,
        wrap: type[CheckpointError],
        reports: dict[int, FailureReport],
        error: BaseException | None,
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            setattr(error, _REACHED, True)
            raise error
        first, report = min(reports.items())
        if self.size == 1:
            if isinstance(error, CheckpointError):
                raise error
            raise wrap(f"could not {what}: {report.message}") from error
        failed = ", ".join(map(str, sorted(reports)[:_NAMED_RANKS])) + (", ..." if len(reports) > _NAMED_RANKS else "")
        others = f" ({len(reports)} ranks failed: {failed})" if len(reports) > 1 else ""
        raised = same_class(report, wrap)(
            f"could not {what}: rank {first} of {self.size}{others}: {report.message}\n"
            f"--- on rank {first} ---\n{report.traceback_text}"
        )
        setattr(raised, _REACHED, True)
        setattr(raised, _INTERRUPTED, any(report.interrupted for report in reports.values()))
        raise raised from (error or remote_cause(report))

    @contextmanager
    def _contact(self, what: str, wrap: type[CheckpointError]) -> Iterator[None]:
        """Say in our own words that another rank is gone; gloo only knows addresses."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if self.size == 1 or isinstance(error, CheckpointError):
                raise
            missing = self._missing()
            raise wrap(
                f"could not {what}: rank {self.rank} of {self.size} has lost contact with another rank"
                + (f": {missing}" if missing else ", which has ended, or hangs, or is in another call")
                + f" ({error}); see the other ranks' output for the first cause"
            ) from error

    def _missing(self) -> str:
        """Which other ranks cannot be reached, in words; empty if nothing can be said."""
        try:
            others = [rank for rank in map(self._global_rank, range(self.size)) if rank != dist.get_rank()]
            return who_is_missing(_store(), others)
        except (RuntimeError, ValueError):  # the process group is being taken down
            return ""

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _all_gather_slots(self, payload: bytes, error: BaseException | None) -> list[tuple[int, int, bytes]]:
        """Outcome, payload length and payload, as far as it fits into a slot, of every rank."""
        slot = _slot(payload, error)
        if self.size == 1:
            return [_open_slot(slot)]
        gathered = torch.empty((self.size, _SLOT_BYTES), dtype=torch.uint8, device="cpu")
        dist.all_gather(list(gathered.unbind(0)), torch.frombuffer(slot, dtype=torch.uint8), group=self._group)
        return [_open_slot(row.numpy().tobytes()) for row in gathered.unbind(0)]

    def _all_gather_rest(self, payload: bytes, slots: list[tuple[int, int, bytes]]) -> list[bytes]:
        longest = max(length for _, length, _ in slots)
        if self.size == 1:
            return [payload]
        if longest <= _INLINE_BYTES:
            return [inline for _, _, inline in slots]
        mine = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        if payload:
            mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        gathered = torch.empty((self.size, longest), dtype=torch.uint8, device="cpu")
        dist.all_gather(list(gathered.unbind(0)), mine, group=self._group)
        return [gathered[rank, :length].numpy().tobytes() for rank, (_, length, _) in enumerate(slots)]

    def _gather_rest(self, payload: bytes, slots: list[tuple[int, int, bytes]]) -> list[bytes] | None:
        """Long payloads go to the coordinator one by one in their exact size: the ranks' plans differ in length."""
        if self.size == 1:
            return [payload]
        if not self.is_coordinator:
            if len(payload) > _INLINE_BYTES:
                tensor = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
                dist.send(tensor, dst=self._global_rank(0), group=self._group)
            return None
        parts: list[bytes] = []
        pending: list[tuple[int, torch.Tensor, Any]] = []
        for rank, (_, length, inline) in enumerate(slots):
            parts.append(payload if rank == self.rank else inline)
            if rank != self.rank and length > _INLINE_BYTES:
                buffer = torch.empty(length, dtype=torch.uint8, device="cpu")
                pending.append((rank, buffer, dist.irecv(buffer, src=self._global_rank(rank), group=self._group)))
        for rank, buffer, work in pending:
            work.wait()
            parts[rank] = buffer.numpy().tobytes()
        return parts

    def _broadcast_slot(self, payload: bytes, error: BaseException | None) -> tuple[int, int, bytes]:
        slot = _slot(payload, error)
        if self.size > 1:
            dist.broadcast(torch.frombuffer(slot, dtype=torch.uint8), src=self._global_rank(0), group=self._group)
        return _open_slot(slot)

    def _broadcast_rest(self, payload: bytes, length: int) -> bytes:
        if self.size == 1 or length <= _INLINE_BYTES:
            return payload
        buffer = bytearray(payload) if self.is_coordinator else bytearray(length)
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), src=self._global_rank(0), group=self._group)
        return bytes(buffer)

    def _global_rank(self, rank: int) -> int:
        assert self._group is not None
        return dist.get_global_rank(self._group, rank)


def reached_every_rank(error: BaseException) -> bool:
    """Whether this exception was raised by `RankGroup.run` and its kin, so that every rank has it already."""
    return bool(getattr(error, _REACHED, False))


def was_interrupted(error: BaseException) -> bool:
    """Whether a rank has raised because it was told to end (Ctrl-C, an exit): this one, or another, as `run` tells."""
    return not isinstance(error, Exception) or bool(getattr(error, _INTERRUPTED, False))


def interrupts_wait_for_others() -> AbstractContextManager[None]:
    """`interrupts_wait` where there are other ranks, which would otherwise wait for one that a Ctrl-C takes away."""
    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    return nullcontext() if alone else interrupts_wait()


def coordination_group(process_group: dist.ProcessGroup | None = None) -> RankGroup:
    """The group over which the ranks of `process_group` (None: all) coordinate. Every rank of it must make the first
    call.

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
    _announce_once(world)
    if "cpu:gloo" in str(dist.get_backend_config(wanted)).split(","):
        return RankGroup(wanted)
    return RankGroup(_gloo_group_like(wanted, world))


_announced: weakref.ref[Any] | None = None


def _announce_once(world: dist.ProcessGroup) -> None:
    """Leave for the others where this process is reached, once in the life of the default group."""
    global _announced
    if (_announced is None or _announced() is not world) and dist.get_world_size() > 1:
        announce(_store(), dist.get_rank())
        _announced = weakref.ref(world)


def _store() -> Any:
    """Through which the job has met. (No public function tells.)"""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001


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


def _slot(payload: bytes, error: BaseException | None) -> bytearray:
    outcome = _OK if error is None else _FAILED_EVERYWHERE if reached_every_rank(error) else _FAILED
    slot = bytearray(_SLOT_BYTES)
    _HEADER.pack_into(slot, 0, outcome, len(payload))
    inline = payload[:_INLINE_BYTES]
    slot[_HEADER.size : _HEADER.size + len(inline)] = inline
    return slot


def _open_slot(slot: bytes | bytearray) -> tuple[int, int, bytes]:
    outcome, length = _HEADER.unpack_from(slot)
    return outcome, length, bytes(slot[_HEADER.size : _HEADER.size + min(length, _INLINE_BYTES)])
