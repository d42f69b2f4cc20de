"""What an object store is asked for, whichever it is: whole small objects, ranges, uploads in parts, listings.

A client talks to one bucket. Its errors are `OSError`s: their `errno` says of what kind they are, their text names the
request, the bucket and key, the store's request id, how often it was tried and for how long. It never holds a
credential.

    FileNotFoundError   there is no such object
    FileExistsError     the condition of a put does not hold: the object is there, or is another version
    PermissionError     the credentials are missing, wrong, or do not allow it
    TimeoutError        the store has not answered in time, however often it was asked
    OSError(EREMOTEIO)  the store has answered with an error, or not as it should
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.options import rank_of_this_process

_logger = logger_of(__name__)

T = TypeVar("T")
# A store that was given up counts as that for so many times `given_up_s`.
_FORGIVEN: Final = 6
# An attempt that is made at all may take so long.
_LEAST_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a store is waited for, in seconds.

    Attributes:
        connect_s: for a connection.
        idle_s: for the next byte of an answer, or for the store to take the next bytes of a request.
        attempt_s: for one attempt at a request, of 8 MiB at most; longer ones get as much more.
        give_up_s: for a request with all of its attempts.
        first_pause_s: between the first two attempts, at most; each further pause may be twice as long.
        longest_pause_s: between two attempts.
        given_up_s: for all requests together that follow one which was given up.
        late_s: after which a part may count as late, at least.
        late_factor: how much longer than its like a late part has taken.
    """

    connect_s: float = 10.0
    idle_s: float = 30.0
    attempt_s: float = 120.0
    give_up_s: float = 300.0
    given_up_s: float = 10.0
    first_pause_s: float = 0.2
    longest_pause_s: float = 10.0
    late_s: float = 2.0
    late_factor: float = 4.0


# How much of a deadline one request has: the rest is for giving up, on the writer's side and on the coordinator's.
_OF_DEADLINE: Final = 0.75
_patience = Patience()
_waiting: ContextVar[Patience | None] = ContextVar("_waiting", default=None)


def patience() -> Patience:
    """How long stores are waited for, by the request at hand."""
    return _waiting.get() or _patience


def within(deadline_s: float | None) -> Patience:
    """Limits by which no request is waited for longer than that, and there is time for several attempts.

    What follows a request that is given up, to leave the store in order, ends within the deadline, too.
    """
    limits = _patience
    if deadline_s is None:
        return limits
    request_s = _OF_DEADLINE * deadline_s
    return replace(
        limits,
        connect_s=min(limits.connect_s, deadline_s / 4),
        idle_s=min(limits.idle_s, deadline_s / 2),
        attempt_s=min(limits.attempt_s, request_s),
        give_up_s=min(limits.give_up_s, request_s),
        given_up_s=min(limits.given_up_s, deadline_s / 10),
        late_s=min(limits.late_s, deadline_s / 8),
    )


@contextlib.contextmanager
def attempt_of(limits: Patience, most_s: float) -> Iterator[None]:
    """Wait as these limits say within the block, and for nothing longer than `most_s`."""
    token = _waiting.set(
        replace(
            limits,
            connect_s=min(limits.connect_s, most_s),
            idle_s=min(limits.idle_s, most_s),
            attempt_s=min(limits.attempt_s, most_s),
            give_up_s=most_s,
        )
    )
    try:
        yield
    finally:
        _waiting.reset(token)


class ObjectState(NamedTuple):
    """One version of an object.

    Attributes:
        e_tag: tells it from other versions; of the same content it may be the same.
        size_bytes: its length.
        modified_ns: when it was written, on the store's clock, which may tick once a second.
    """

    e_tag: str
    size_bytes: int
    modified_ns: int


ABSENT: Final = ""
Condition = str | None
"""Of a put: `ABSENT` if there is to be no object, the `e_tag` of the version that it replaces, or None."""


class Listing(NamedTuple):
    """What lies directly below a prefix: the sizes of objects by name, and the names of folders: "/" of one whose
    name is empty.

    `is_marked`: an object without a name of its own stands for the folder itself, as consoles of stores make it.
    """

    sizes: dict[str, int]
    folders: set[str]
    is_marked: bool = False


class RequestError(OSError):
    """One attempt at a request has failed.

    Attributes:
        again: another attempt may succeed.
        unclear: the store may have done what it was asked for.
        slow_down: the store asks for fewer requests.
    """

    def __init__(
        self, code: int, text: str, *, again: bool = False, unclear: bool = False, slow_down: bool = False
    ) -> None:
        super().__init__(code, text)
        self.again = again
        self.unclear = unclear
        self.slow_down = slow_down


def may_arrive(error: BaseException) -> bool:
    """Whether a conditional put that has failed so may still be done: it was sent, and no answer rules it out."""
    if not isinstance(error, OSError):
        return True  # interrupted
    if error.errno in (errno.EEXIST, errno.ENOENT):
        return False  # its condition does not hold any more
    if isinstance(error.__cause__, RequestError):
        return error.__cause__.unclear
    return error.__cause__ is not None and error.errno != errno.EACCES


class Pace:
    """How many requests one process has in flight at a store: fewer as soon as it asks for that, then slowly more.

    Halved when the store says that it is asked too much, one more after as many successes as there are in flight (as
    TCP does with what it sends).
    """

    _MOST: Final = 64

    def __init__(self) -> None:
        self.begin()
        _paces.add(self)

    def begin(self) -> None:
        """Nothing is in flight."""
        self._changed = threading.Condition()
        self._limit = float(self._MOST)
        self._in_flight = 0
        self._halved_at_s = 0.0
        self._given_up_at_s: float | None = None  # when a request had waited as long as one may, and none ended since

    def give_up(self) -> None:
        """A request has waited as long as one may."""
        if self._given_up_at_s is None:
            self._given_up_at_s = time.monotonic()

    def answered(self) -> None:
        """A request has ended well."""
        self._given_up_at_s = None

    def longest_s(self, limits: Patience) -> float:
        """How long a request may take: a save that has failed cleans up with many, which share `given_up_s`. When that
        has long passed, the store is asked as at first.
        """
        given_up_at_s = self._given_up_at_s
        if given_up_at_s is None:
            return limits.give_up_s
        passed_s = time.monotonic() - given_up_at_s
        if passed_s > _FORGIVEN * limits.given_up_s:
            self._given_up_at_s = None
            return limits.give_up_s
        return max(limits.given_up_s - passed_s, limits.given_up_s / 10)

    @contextlib.contextmanager
    def request(self, until_s: float) -> Iterator[None]:
        """Wait for a turn, at most until that moment of the monotonic clock."""
        with self._changed:
            while self._in_flight >= max(1, int(self._limit)) and time.monotonic() < until_s:
                self._changed.wait(max(0.01, until_s - time.monotonic()))
            self._in_flight += 1
        try:
            yield
        except RequestError as error:
            with self._changed:
                now_s = time.monotonic()
                if error.slow_down and now_s - self._halved_at_s > 0.1:  # once for all that were in flight together
                    self._limit = max(1.0, min(self._limit, self._in_flight) / 2)
                    self._halved_at_s = now_s
            raise
        else:
            with self._changed:
                self._limit = min(float(self._MOST), self._limit + 1 / self._limit)
        finally:
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()


_paces: weakref.WeakSet[Pace] = weakref.WeakSet()


def _begin_again() -> None:
    """A forked child has none of the threads whose requests were in flight; one of them may have held the lock."""
    for pace in list(_paces):
        pace.begin()


os.register_at_fork(after_in_child=_begin_again)


def retried(what: str, attempt: Callable[[int], T], pace: Pace, limits: Patience | None = None) -> T:
    """Try until it succeeds, fails for good, or has taken too long; pauses grow and differ from process to process.

    Args:
        what: the request, for messages.
        attempt: called with how many attempts have ended unclear so far; raises `RequestError`.
        pace: of the store.
        limits: how long to wait.

    Raises:
        OSError: as the module says.
    """
    limits = limits or _patience
    started_s = time.monotonic()
    until_s = started_s + pace.longest_s(limits)
    attempts = unclear = 0
    told: RequestError | None = None
    while True:
        attempts += 1
        left_s = until_s - time.monotonic()
        try:
            with pace.request(until_s), attempt_of(limits, max(left_s, _LEAST_S)):
                value = attempt(unclear)
            pace.answered()
            return value
        except RequestError as error:
            unclear += error.unclear
            # That the last attempt was cut short says less than why there had to be one.
            if told is None or left_s >= limits.idle_s or error.errno != errno.ETIMEDOUT:
                told = error
            longest_s = min(limits.longest_pause_s, limits.first_pause_s * 2 ** min(attempts - 1, 10))
            pause_s = random.uniform(longest_s / 4, longest_s)
            took_s = time.monotonic() - started_s
            until_s = min(until_s, time.monotonic() + pace.longest_s(limits))  # another request may have given up
            if not error.again or time.monotonic() + pause_s >= until_s:
                if error.again:
                    pace.give_up()
                told.unclear = unclear > 0  # of any attempt: one that was given up may still arrive
                tried = f" ({attempts} attempts in {took_s:.1f} s)" if attempts > 1 else ""
                raise OSError(told.errno, f"{what}: {told.strerror}{tried}") from told
            if attempts > 1 or took_s > limits.late_s:
                who = rank_of_this_process()
                _logger.warning(
                    "%s%s: %s; attempt %d follows after %.1f s", who, what, error.strerror, attempts + 1, took_s
                )
            time.sleep(pause_s)


class Upload(ABC):
    """An object that is written in parts, and is not there before `complete`."""

    @abstractmethod
    def part(self, number: int, view: memoryview) -> None:
        """Send a part: 0, 1, and so on, of equal length but for the last. Several threads may, one each.

        The memory may be reused on return.
        """

    @abstractmethod
    def complete(self, size_bytes: int) -> None:
        """Make the object, of all parts; raises unless the store then says that it has that length and checksum."""

    @abstractmethod
    def abort(self, *, own_parts_only: bool = False) -> None:
        """Forget all parts; delete the object, if this has made it. `own_parts_only`: others may make it by now."""


class ObjectClient(ABC):
    """One bucket. Keys have no slash in front. All methods raise `OSError` as the module says; any thread may call.

    Attributes:
        place: the bucket as messages name it.
        part_bytes: length of the parts of an upload, at least.
        max_parts: of an upload.
    """

    place: str
    part_bytes: int = 8 * 1024 * 1024
    max_parts: int = 10_000

    @abstractmethod
    def within(self, deadline_s: float) -> ObjectClient:
        """The same bucket, where no request is waited for longer than that."""

    @abstractmethod
    def head(self, key: str) -> ObjectState | None:
        """The version that is there; None if there is none."""

    @abstractmethod
    def get(self, key: str, most_bytes: int) -> tuple[ObjectState, bytes]:
        """The version that is there, and its first bytes."""

    def get_end(self, key: str, most_bytes: int) -> tuple[ObjectState, bytes]:
        """The version that is there, and its last bytes."""
        state, content = self.get(key, most_bytes)
        if state.size_bytes <= len(content):
            return state, content
        end = bytearray(min(most_bytes, state.size_bytes))
        self.get_into(key, state.size_bytes - len(end), memoryview(end), state.e_tag)
        return state, bytes(end)

    @abstractmethod
    def get_into(self, key: str, offset: int, view: memoryview, e_tag: str) -> None:
        """Fill a view with bytes of that version; raises `FileExistsError` if it is not there any more."""

    @abstractmethod
    def put(self, key: str, content: bytes, condition: Condition = None) -> str:
        """Make an object, atomically; returns its `e_tag`."""

    @abstractmethod
    def delete(self, key: str, e_tag: str | None = None) -> None:
        """Delete an object, if it is there; with `e_tag` that version only, where the store has such a condition."""

    @abstractmethod
    def list(self, prefix: str) -> Listing:
        """What lies below a prefix that ends in a slash, or is empty."""

    @abstractmethod
    def upload(self, key: str, part_bytes: int) -> Upload:
        """Begin to write an object in parts."""

    def unfinished(self, prefix: str) -> Sequence[str]:
        """Keys, directly below a prefix, of uploads that were begun and neither completed nor aborted."""
        return ()

    def abort_unfinished(self, key: str) -> None:
        """Abort all uploads of a key that `unfinished` names."""
        return

    def honours_conditions(self, key: str) -> bool:
        """Whether the store keeps the conditions of puts, tried on an object that is there; asked once."""
        return True


def unexpected(text: str, *, again: bool = False, unclear: bool = False) -> RequestError:
    """An answer that is not as it should be."""
    return RequestError(errno.EREMOTEIO, text, again=again, unclear=unclear)
