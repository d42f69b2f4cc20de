"""Who reads in a directory of an object store, for those who would remove it.

A file system has locks for that, which end with their process. Here a process that reads puts a small object, a lease,
next to what it reads, renews it as long as it does, and deletes it at the end. One that is killed leaves it: a lease
that was not renewed for some time counts for nothing. Names of leases are in no listing that a storage gives.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Final

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import CheckpointError
from mcore_ckpt.core.threads import call_at_the_end, start_thread
from mcore_ckpt.storage._object_client import ObjectClient

_logger = logger_of(__name__)

_PREFIX: Final = ".mcore_ckpt_reading."
_RENEWED_EVERY_S: Final = 60.0
# Clocks of hosts and of the store may differ by some of it.
_COUNTS_FOR_S: Final = 600.0
# At the end of the process, and before this process asks who reads.
_JOIN_S: Final = 5.0


def is_reader_lease(name: str) -> bool:
    """Whether an object says that a process reads in its directory."""
    return name.startswith(_PREFIX)


class _Reading:
    """This process reads in a directory, once or several times at once."""

    def __init__(self, client: ObjectClient, prefix: str, url: str) -> None:
        self.times = 0
        self._client = client
        self._prefix = prefix
        self._key = f"{prefix}{_PREFIX}{secrets.token_hex(8)}"
        self._url = url
        self._lock = threading.Lock()
        self._is_put = self._is_renewed = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="mcore-ckpt-reading", daemon=True)

    def begin(self) -> None:
        """On return others see it, or it cannot be told them."""
        with self._lock:
            if not self._is_put:
                self._is_put = True
                self._put()
                self._is_renewed = start_thread(self._thread)

    def end(self) -> None:
        """Have the lease deleted, which the load need not wait for."""
        if self._is_renewed:
            _ending[self._thread] = _where(self._client, self._prefix)
        self._ended.set()

    def _put(self) -> None:
        try:
            self._client.put(self._key, str(os.getpid()).encode())
        except (OSError, CheckpointError) as error:
            _logger.info(
                "%s: that it is being read cannot be noted there (%s): a `prune` meanwhile may remove it",
                self._url,
                getattr(error, "strerror", None) or error,
            )

    def _renew(self) -> None:
        while not self._ended.wait(_RENEWED_EVERY_S):
            self._put()
        with contextlib.suppress(OSError, CheckpointError):  # no credentials any more, at the end of a process
            self._client.delete(self._key)
        _ending.pop(self._thread, None)


# Garbage collection may end a reading, in the middle of these functions, too.
_lock = threading.RLock()
_readings: dict[str, _Reading] = {}
# Threads that delete leases, and of which directory.
_ending: dict[threading.Thread, str] = {}


def _forget() -> None:
    """A forked child does not read what its parent does."""
    global _lock
    _lock = threading.RLock()
    _readings.clear()
    _ending.clear()


def _where(client: ObjectClient, prefix: str) -> str:
    return f"{client.place}/{prefix}"


def wait_for_ends(where: str | None = None) -> None:
    """Until leases of this process that are being deleted are gone; not for long where the store cannot be reached."""
    until_s = time.monotonic() + _JOIN_S
    for thread, of in list(_ending.items()):
        if where in (None, of) and threading.current_thread() is not thread:
            thread.join(max(0.0, until_s - time.monotonic()))


call_at_the_end(wait_for_ends)
os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def reading(client: ObjectClient, prefix: str, url: str) -> Iterator[None]:
    """Within the block `is_read` is true of that prefix, in whatever process asks."""
    with _lock:
        own = _readings.get(url) or _Reading(client, prefix, url)
        _readings[url] = own
        own.times += 1
    try:
        own.begin()
        yield
    finally:
        with _lock:
            own.times -= 1
            is_last = own.times == 0 and _readings.get(url) is own
            if is_last:
                del _readings[url]
        if is_last:
            own.end()


def is_read(client: ObjectClient, prefix: str) -> bool:
    """Whether a lease counts, among the objects below a prefix. Raises `OSError`."""
    wait_for_ends(_where(client, prefix))
    for name in filter(is_reader_lease, client.list(prefix).sizes):
        state = client.head(f"{prefix}{name}")
        if state is not None and time.time() - state.modified_ns / 1e9 < _COUNTS_FOR_S:
            return True
    return False
