"""What an object store is asked for, whichever it is: small objects, ranges, uploads in parts, listings.

A client talks to one bucket, by a library that repeats what fails for a moment. Its errors are `OSError`s whose text
names the request, the bucket and the key; it never holds a credential.

    FileNotFoundError   there is no such object
    FileExistsError     the condition of a put does not hold: the object is there, or is another version
    PermissionError     the credentials are missing, wrong, or do not allow it
    UndecidedError      a conditional put was given up, and may still be done
    OSError(EREMOTEIO)  the store has answered with an error, or has not answered in time; there is no such bucket
    OSError(ETIMEDOUT)  what was sent came too slowly; sent again, it may arrive

**Puts with a condition.** An attempt whose answer was lost may have made the object; the next attempt is then refused
by what the first has made. So each put has an id, which is an attribute of the object. After a refusal the store is
asked whose object is there.
"""

from __future__ import annotations

import errno
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

T = TypeVar("T")

# So long the end of an upload that is given up is waited for.
_REMOVED_WITHIN_S: Final = 2.0
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 10.0
# How much of a deadline one request has: the rest is for giving up, on the writer's side and on the coordinator's.
_ATTEMPT_OF_DEADLINE: Final = 0.3
_RETRIES_OF_DEADLINE: Final = 0.4


class Timeouts(NamedTuple):
    """How long a store is waited for, in seconds."""

    connect_s: float = 10.0
    attempt_s: float = 120.0  # for one attempt at a request
    retries_s: float = 180.0  # from the first attempt to the moment after which no other is made

    def within(self, deadline_s: float) -> Timeouts:
        """Limits by which no request takes longer than that, and there is time for several attempts."""
        return Timeouts(
            min(self.connect_s, deadline_s / 4),
            min(self.attempt_s, deadline_s * _ATTEMPT_OF_DEADLINE),
            min(self.retries_s, deadline_s * _RETRIES_OF_DEADLINE),
        )


class ObjectState(NamedTuple):
    """One version of an object."""

    version: str  # tells it from other versions; of the same content it may be the same
    size_bytes: int
    modified_ns: int  # on the store's clock, which may tick once a second
    put_id: str = ""  # of the put that has made it; empty if another program has


ABSENT: Final = ""
Condition = str | None
"""Of a put: `ABSENT` if there is to be no object, the `version` that it replaces, or None."""


class Listing(NamedTuple):
    """What lies directly below a prefix: the sizes of objects by name, and the names of folders: "/" of one whose
    name is empty.
    """

    sizes: dict[str, int]
    folders: set[str]


class PassingError(OSError):
    """An attempt has failed that may succeed when it is repeated; the store may have done what it was asked for."""


class UndecidedError(OSError):
    """A conditional put was given up. It may still arrive."""


class Upload:
    """An object that is sent from its first byte to its last, by one thread at a time; not there before `complete`.

    `stream`: what a library has for it. `asked`: the client's, which tells errors of the library.
    """

    def __init__(self, asked: Callable[[str, str], AbstractContextManager[None]], key: str, stream: Any) -> None:
        self.asked = asked
        self.key = key
        self.stream = stream

    def write(self, content: bytes) -> None:
        """Send what comes next. It is kept until it is sent, which may be later."""
        with self.asked("PUT", f"{self.key}, a part of it"):
            self.stream.write(content)

    def complete(self) -> None:
        """Make the object."""
        with self.asked("PUT", self.key):
            self.stream.close()

    def abandon(self) -> None:
        """Never make it, and have the store remove its parts, when what is on its way has been answered: that is not
        waited for long. If this process ends before, they stay until a rule of the bucket removes them.
        """
        remover = threading.Thread(target=self._remove, daemon=True)
        with suppress(RuntimeError):  # at the interpreter's end
            remover.start()
            remover.join(_REMOVED_WITHIN_S)

    def _remove(self) -> None:
        error = OSError(errno.ECANCELED, "the upload was abandoned")
        with suppress(OSError), self.asked("DELETE", self.key):
            self.stream.__exit__(OSError, error, None)


class ObjectClient(ABC):
    """One bucket. Keys have no slash in front. All methods raise `OSError` as the module says; any thread may call."""

    place: str  # the bucket as messages name it
    timeouts: Timeouts
    part_bytes: int = 8 * 1024 * 1024  # of the parts of an upload, at least
    max_parts: int = 10_000

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self.place}: a client holds credentials; another process makes its own")

    @abstractmethod
    def within(self, deadline_s: float) -> ObjectClient:
        """The same bucket, where no request is waited for longer than that."""

    @abstractmethod
    def head(self, key: str) -> ObjectState | None:
        """The version that is there; None if there is none."""

    @abstractmethod
    def get_end(self, key: str, most_bytes: int) -> tuple[ObjectState, bytes]:
        """The version that is there, and its last bytes. Its `put_id` may be left out."""

    @abstractmethod
    def get_into(self, key: str, offset: int, view: memoryview, version: str) -> None:
        """Fill a view with bytes of that version; raises `FileExistsError` if it is not there any more."""

    @abstractmethod
    def put_once(self, key: str, content: bytes, condition: Condition, put_id: str) -> str:
        """One attempt at `put`; raises `PassingError` if another may succeed."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete an object, if it is there."""

    @abstractmethod
    def list(self, prefix: str) -> Listing:
        """What lies below a prefix that ends in a slash, or is empty."""

    @abstractmethod
    def upload(self, key: str, part_bytes: int, put_id: str) -> Upload:
        """Begin to write an object in parts, which has that id then."""

    def repeated(self, attempt: Callable[[], T]) -> T:
        """Repeat a read of which the answer was cut off, as long as attempts may be repeated."""
        pauses = self._pauses(time.monotonic())
        while True:
            try:
                return attempt()
            except PassingError:
                if not next(pauses):
                    raise

    def _pauses(self, began_s: float) -> Iterator[bool]:
        """Waits before each further attempt; False when there is no time for one."""
        until_s, pause_s = began_s + self.timeouts.retries_s, min(_FIRST_PAUSE_S, self.timeouts.retries_s / 10)
        while time.monotonic() + pause_s <= until_s:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            yield True
        yield False

    def put(self, key: str, content: bytes, condition: Condition = None) -> str:
        """Make an object, atomically; returns its `version`."""
        unanswered = deque[OSError]()
        try:
            return self._put(key, content, condition, unanswered)
        except FileExistsError:  # what is on its way is refused, too
            raise
        except FileNotFoundError:
            if condition:  # what was to be replaced is gone
                raise
            text = f"PUT {self.place}/{key}: there is no such bucket; make it, or correct its name"
            raise OSError(errno.EREMOTEIO, text) from None
        except OSError as error:
            if condition is None or not unanswered:
                raise
            text = f"{error.strerror}; whether it was done, the store has not said"
            raise UndecidedError(errno.EREMOTEIO, text) from error

    def _put(self, key: str, content: bytes, condition: Condition, unanswered: deque[OSError]) -> str:
        """As `put`. `unanswered` gets the errors of attempts that may still be done."""
        put_id, pauses = secrets.token_hex(8), self._pauses(time.monotonic())
        while True:
            try:
                return self.put_once(key, content, condition, put_id)
            except FileExistsError as refusal:
                there = self.head(key)
                if there is not None and there.put_id == put_id:
                    return there.version
                # A store refuses also what it is asked for twice at once: then the condition still holds.
                if (ABSENT if there is None else there.version) != condition:
                    raise
                unanswered.append(refusal)
            except PassingError as error:
                unanswered.append(error)
            if not next(pauses):
                raise OSError(errno.EREMOTEIO, unanswered[-1].strerror) from unanswered[-1]
