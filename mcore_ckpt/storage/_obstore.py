"""A store in this process's memory, by obstore (Rust's object_store), and Azure's in part.

obstore retries and waits by itself, as `Patience` says. It sends what is uploaded from copies, in order. It hangs in a
forked child, as its threads are not there: such a child is refused.
"""

from __future__ import annotations

import copy
import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import obstore
from obstore import exceptions
from obstore.store import AzureStore, MemoryStore

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.storage._object_client import (
    ABSENT,
    Condition,
    Listing,
    ObjectClient,
    ObjectState,
    Patience,
    Upload,
    within,
)

_IN_FLIGHT: Final = 8
# Between the two by which a version is known: to some stores the one counts, to some the other.
_AND: Final = "\0"
# A signature may be part of a URL, or a password.
_QUERY: Final = re.compile(r"\?\S+|(?<=://)[^/\s]*@")
# Of obstore's messages about what it is configured by.
_REFUSED: Final = {
    "Access Key": "AZURE_STORAGE_ACCOUNT_KEY",
    "SAS": "AZURE_STORAGE_SAS_TOKEN",
    "url": "AZURE_STORAGE_ENDPOINT",
    "Account": "AZURE_STORAGE_ACCOUNT_NAME",
}


class ObstoreClient(ObjectClient):
    """One bucket, container, or name in memory.

    Args:
        scheme: `"az"` or `"memory"`; endpoint and credentials come from the environment.
        bucket: its name.
        options: of a profile; `endpoint_url` counts.
    """

    def __init__(self, scheme: str, bucket: str, options: Mapping[str, Any]) -> None:
        self.place = f"{scheme}://{bucket}"
        self._pid = os.getpid()
        self._kind = scheme, bucket, options.get("endpoint_url")
        self.limits = within(None)
        self.store = _store(*self._kind, self.limits)

    def within(self, deadline_s: float) -> ObstoreClient:
        client = copy.copy(self)
        client.limits = within(deadline_s)
        if self._kind[0] != "memory":
            client.store = _store(*self._kind, client.limits)
        return client

    def __repr__(self) -> str:
        return f"ObstoreClient({self.place!r})"

    @contextmanager
    def asked(self, what: str, key: str) -> Iterator[Any]:
        """Yields the store; its errors leave as this package's clients raise them."""
        where = f"{what} {self.place}/{key}"
        if self._pid != os.getpid():
            text = f'{where}: cannot be reached from a forked process; use writer="persistent"'
            raise OSError(errno.ENOTSUP, text)
        try:
            yield self.store
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, f"{where}: there is no such object") from error
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, exceptions.NotModifiedError) as error:
            raise FileExistsError(errno.EEXIST, f"{where}: the object is there, or has changed") from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise PermissionError(errno.EACCES, f"{where}: {_said(error)}") from error
        except exceptions.BaseError as error:
            said = _said(error)
            code = errno.ETIMEDOUT if "timed out" in said or "timeout" in said else errno.EREMOTEIO
            raise OSError(code, f"{where}: {said}") from error

    def head(self, key: str) -> ObjectState | None:
        try:
            with self.asked("HEAD", key) as store:
                return _state(obstore.head(store, key))
        except FileNotFoundError:
            return None

    def get(self, key: str, most_bytes: int) -> tuple[ObjectState, bytes]:
        return self._get(key, lambda size_bytes: (0, min(most_bytes, size_bytes)))

    def get_end(self, key: str, most_bytes: int) -> tuple[ObjectState, bytes]:
        # (Azure's store knows no range that counts from the end)
        return self._get(key, lambda size_bytes: (max(0, size_bytes - most_bytes), size_bytes))

    def _get(self, key: str, of_size: Callable[[int], tuple[int, int]]) -> tuple[ObjectState, bytes]:
        with self.asked("GET", key) as store:
            state = _state(obstore.head(store, key))
            if not state.size_bytes:
                return state, b""
            options: Any = {"range": of_size(state.size_bytes), "if_match": plain_e_tag(state.e_tag)}
            return state, bytes(obstore.get(store, key, options=options).bytes())

    def get_into(self, key: str, offset: int, view: memoryview, e_tag: str) -> None:
        if not len(view):
            return
        with self.asked("GET", key) as store:
            options: Any = {"range": (offset, offset + len(view)), "if_match": plain_e_tag(e_tag)}
            content = memoryview(obstore.get(store, key, options=options).bytes())
        if len(content) != len(view):
            raise OSError(errno.ERANGE, f"GET {self.place}/{key}: {len(content)} of {len(view)} bytes came")
        view[:] = content

    def put(self, key: str, content: bytes, condition: Condition = None) -> str:
        mode: Any = "overwrite"
        if condition == ABSENT:
            mode = "create"
        elif condition is not None:
            e_tag, _, version = condition.partition(_AND)
            mode = {"e_tag": e_tag, **({"version": version} if version else {})}
        with self.asked("PUT", key) as store:
            return _version(obstore.put(store, key, content, mode=mode, use_multipart=False))

    def delete(self, key: str, e_tag: str | None = None) -> None:
        try:
            with self.asked("DELETE", key) as store:
                obstore.delete(store, key)
        except FileNotFoundError:
            pass

    def list(self, prefix: str) -> Listing:
        with self.asked("LIST", prefix) as store:
            found = obstore.list_with_delimiter(store, prefix or None)
        sizes = {str(each["path"])[len(prefix) :]: int(each["size"]) for each in found["objects"]}
        return Listing(sizes, {str(each)[len(prefix) :].strip("/") for each in found["common_prefixes"]})

    def upload(self, key: str, part_bytes: int) -> Upload:
        return _StreamedUpload(self, key, part_bytes)


def _store(scheme: str, bucket: str, endpoint: str | None, limits: Patience) -> Any:
    common: dict[str, Any] = {
        "client_options": {
            "connect_timeout": timedelta(seconds=limits.connect_s),
            "read_timeout": timedelta(seconds=limits.idle_s),
            "timeout": timedelta(seconds=limits.attempt_s),
            "allow_http": True,
        },
        "retry_config": {
            "max_retries": 30,
            "retry_timeout": timedelta(seconds=limits.give_up_s),
            "backoff": {
                "init_backoff": timedelta(seconds=limits.first_pause_s),
                "max_backoff": timedelta(seconds=limits.longest_pause_s),
                "base": 2,
            },
        },
    }
    if scheme == "az":
        try:
            return AzureStore(bucket, **({"endpoint": endpoint} if endpoint else {}), **common)
        except exceptions.BaseError as error:
            said = str(error)  # which may show what is not to be shown
            named = [name for part, name in _REFUSED.items() if part in said]
            raise OptionError(
                f"az://{bucket}: {', '.join(named) or 'a variable AZURE_...'} is not as obstore expects it"
                " (it is not shown here); copy it again, from the portal or the tool that has made it"
            ) from None
    return MemoryStore()


class _StreamedUpload(Upload):
    """Parts handed to obstore in order, by a thread that it pulls them through."""

    def __init__(self, client: ObstoreClient, key: str, part_bytes: int) -> None:
        self._client = client
        self._key = key
        self._part_bytes = part_bytes
        self._changed = threading.Condition()
        self._next: bytes | None = None
        self._taken = 0  # parts
        self._ended = False
        self._aborted = False
        self._is_made = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._send, name="mcore-ckpt-upload", daemon=True)
        self._thread.start()

    def _send(self) -> None:
        try:
            with self._client.asked("PUT", self._key) as store:
                obstore.put(store, self._key, self._parts(), chunk_size=self._part_bytes, max_concurrency=_IN_FLIGHT)
            with self._changed:
                self._is_made = True
                self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 (raised by who waits)
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _parts(self) -> Iterator[bytes]:
        while True:
            with self._changed:
                while self._next is None and not self._ended:
                    self._changed.wait()
                if self._aborted:
                    raise RuntimeError("the upload was aborted")
                if self._next is None:
                    return
                part, self._next = self._next, None
                self._taken += 1
                self._changed.notify_all()
            yield part

    def _wait(self, until: Callable[[], bool]) -> None:
        most_s = self._client.limits.give_up_s
        until_s = time.monotonic() + most_s
        while not until() and self._error is None:
            if self._aborted:
                raise OSError(errno.ECANCELED, f"PUT {self._client.place}/{self._key}: the upload was aborted")
            if not self._changed.wait(max(0.0, until_s - time.monotonic())) and time.monotonic() >= until_s:
                text = f"PUT {self._client.place}/{self._key}: no part was taken within {most_s:g} s"
                raise TimeoutError(errno.ETIMEDOUT, text)
        if self._error is not None:
            if isinstance(self._error, OSError):
                raise self._error
            raise OSError(errno.EREMOTEIO, f"PUT {self._client.place}/{self._key}: {self._error}") from self._error

    def part(self, number: int, view: memoryview) -> None:
        with self._changed:
            self._wait(lambda: self._taken == number and self._next is None)
            self._next = bytes(view)
            self._changed.notify_all()
            self._wait(lambda: self._taken > number)

    def complete(self, size_bytes: int) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        with self._changed:
            self._wait(lambda: self._is_made)
        state = self._client.head(self._key)
        if state is None or state.size_bytes != size_bytes:
            got = "nothing" if state is None else f"{state.size_bytes} bytes"
            text = f"the store says that it has {got}, and {size_bytes} were written"
            raise OSError(errno.EREMOTEIO, f"{self._client.place}/{self._key}: {text}")

    def abort(self, *, own_parts_only: bool = False) -> None:
        with self._changed:
            self._ended = self._aborted = True
            self._changed.notify_all()
        if self._is_made and not own_parts_only:
            self._client.delete(self._key)


def plain_e_tag(e_tag: str) -> str:
    """A version as the store names it."""
    return e_tag.split(_AND)[0]


def _version(meta: Mapping[str, Any]) -> str:
    return f"{meta.get('e_tag') or ''}{_AND}{meta.get('version') or ''}"


def _state(meta: Mapping[str, Any]) -> ObjectState:
    return ObjectState(_version(meta), int(meta["size"]), int(meta["last_modified"].timestamp() * 1e9))


def _said(error: BaseException) -> str:
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return _QUERY.sub("", text)[:500]
