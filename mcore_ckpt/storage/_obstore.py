"""S3 and Azure Blob Storage, by obstore (Rust's object_store), which signs, repeats and waits as `Timeouts` says.

S3 gets a CRC-64 of each part and compares it. The body is not part of the signature: that sum is, and TLS protects
both.

obstore's threads are not there in a forked child, where a call would wait for ever, and its parent after it: such a
child is refused before the call. Texts of obstore's errors, and its stores, may hold secrets: they are taken out.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import obstore
from obstore import exceptions

from mcore_ckpt.storage._objects import (
    ABSENT,
    Condition,
    Listing,
    ObjectClient,
    ObjectState,
    PassingError,
    Timeouts,
    Upload,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

# Parts of one upload at once: one connection brings 50 to 100 MB/s of a node's 1 GB/s and more.
_PARTS_AT_ONCE: Final = 8
_PUT_ID: Final = "mcoreckptput"  # Azure takes identifiers alone
# A signature may be part of a URL, or a password.
_QUERY: Final = re.compile(r"\?\S+|(?<=://)[^/\s]*@")
_REFUSED: Final = re.compile(r"status code: 4(?!08|09|25|29)\d\d")
_NO_RANGE: Final = re.compile(r"non-partial response|status code: 416")
# The process whose threads obstore has; none before the first client.
_of_process: int | None = None


class ObstoreClient(ObjectClient):
    """One bucket or container. `make` makes a store of obstore's, and the same again for other time-outs; `hide` takes
    secrets out of what is shown; `has_suffixes`: the store knows ranges that count from an object's end.
    """

    def __init__(
        self,
        place: str,
        make: Callable[..., Any],
        hide: Callable[[str], str],
        *,
        has_suffixes: bool,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 (it never changes)
    ) -> None:
        global _of_process
        _of_process = _of_process or os.getpid()
        self.place = place
        self.timeouts = timeouts
        self._has_suffixes = has_suffixes
        self._make = make
        self._hide = hide
        self._store = make(**_common(timeouts, retries=30))
        # What is repeated below `ObjectClient.put`, where it can be told what has become of an attempt.
        self._store_once = make(**_common(timeouts, retries=0))
        self._within: dict[float, ObstoreClient] = {}

    def within(self, deadline_s: float) -> ObjectClient:
        if deadline_s not in self._within:
            timeouts, has_suffixes = self.timeouts.within(deadline_s), self._has_suffixes
            client = ObstoreClient(self.place, self._make, self._hide, has_suffixes=has_suffixes, timeouts=timeouts)
            self._within[deadline_s] = client
        return self._within[deadline_s]

    @contextmanager
    def asked(self, what: str, key: str) -> Iterator[None]:
        """Errors of obstore leave as those of a client."""
        where = f"{what} {self.place}/{key}"
        if _of_process != os.getpid():
            raise OSError(
                errno.ENOTSUP,
                f"{where}: this process was forked from one that uses obstore, whose threads it lacks; start it by "
                "spawn or forkserver",
            )
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, f"{where}: there is no such object") from None
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError, exceptions.NotModifiedError):
            raise FileExistsError(errno.EEXIST, f"{where}: the object is there, or has changed") from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
            raise PermissionError(errno.EACCES, f"{where}: {self._said(error)}") from None
        except exceptions.InvalidPathError as error:
            text = f"{where}: {self._said(error)}; rename or delete that object, which no checkpoint has"
            raise OSError(errno.EINVAL, text) from None
        except (exceptions.BaseError, OSError) as error:  # (of an upload's stream: OSError without errno)
            text = f"{where}: {self._said(error)}"
            if "RequestTimeout" in str(error):  # which S3 calls a 400
                raise PassingError(errno.ETIMEDOUT, text) from None
            kind = OSError if _REFUSED.search(str(error)) else PassingError
            raise kind(errno.EREMOTEIO, text) from None

    def _said(self, error: BaseException) -> str:
        text = " ".join(str(error).partition("\n\nDebug source")[0].split())
        return self._hide(_QUERY.sub("", text))[:500]

    def head(self, key: str) -> ObjectState | None:
        try:
            with self.asked("HEAD", key):
                found = obstore.get(self._store, key, options={"head": True})
                return _state(found.meta, found.attributes)
        except FileNotFoundError:
            return None

    def get_end(self, key: str, most_bytes: int) -> tuple[ObjectState, bytes]:
        found = self.repeated(partial(self._get_end_once, key, most_bytes)) if self._has_suffixes else None
        return found or super().get_end(key, most_bytes)

    def _get_end_once(self, key: str, most_bytes: int) -> tuple[ObjectState, bytes] | None:
        with self.asked("GET", key):
            try:
                found = obstore.get(self._store, key, options={"range": {"suffix": most_bytes}})
                return _state(found.meta), bytes(found.bytes())
            except exceptions.BaseError as error:
                if not _NO_RANGE.search(str(error)):  # of an object without bytes there is none
                    raise
        return None

    def get_range(self, key: str, start: int, stop: int, version: str) -> Any:
        return self.repeated(partial(self._get_once, key, (start, stop), version))

    def _get_once(self, key: str, wanted: tuple[int, int], version: str) -> memoryview:
        with self.asked(f"bytes [{wanted[0]}, {wanted[1]}) of", key):
            return memoryview(obstore.get(self._store, key, options={"range": wanted, "if_match": version}).bytes())

    def put_once(self, key: str, content: bytes, condition: Condition, put_id: str) -> str:
        mode: Any = "overwrite"
        if condition is not None:
            mode = "create" if condition == ABSENT else {"e_tag": condition}
        with self.asked("PUT", key):
            made = obstore.put(
                self._store_once, key, content, mode=mode, use_multipart=False, attributes={_PUT_ID: put_id}
            )
        return str(made["e_tag"])

    def delete(self, key: str) -> None:
        with suppress(FileNotFoundError), self.asked("DELETE", key):
            obstore.delete(self._store, key)

    def list(self, prefix: str) -> Listing:
        with self.asked("LIST", prefix):
            found = obstore.list_with_delimiter(self._store, prefix or None)
        sizes = {str(each["path"])[len(prefix) :]: int(each["size"]) for each in found["objects"]}
        sizes.pop("", None)  # an object that stands for the folder, as consoles make it
        return Listing(sizes, {str(each)[len(prefix) :].strip("/") for each in found["common_prefixes"]})

    def upload(self, key: str, part_bytes: int, put_id: str) -> Upload:
        with self.asked("PUT", key):
            stream = obstore.open_writer(
                self._store,
                key,
                buffer_size=part_bytes,
                max_concurrency=_PARTS_AT_ONCE,
                attributes={_PUT_ID: put_id},
            )
        return Upload(self.asked, key, stream)


def _common(timeouts: Timeouts, retries: int) -> dict[str, Any]:
    return {
        "client_options": {
            "connect_timeout": timedelta(seconds=timeouts.connect_s),
            "timeout": timedelta(seconds=timeouts.attempt_s),
        },
        "retry_config": {"max_retries": retries, "retry_timeout": timedelta(seconds=timeouts.retries_s)},
    }


def hiding(secrets: Sequence[str]) -> Callable[[str], str]:
    """Takes these out of a text; a function, since the attributes of an object are shown here and there."""
    hidden = [secret for secret in secrets if secret]

    def hide(text: str) -> str:
        for secret in hidden:
            text = text.replace(secret, "...")
        return text

    return hide


def _state(meta: Mapping[str, Any], attributes: Mapping[str, str] | None = None) -> ObjectState:
    modified_ns = int(meta["last_modified"].timestamp() * 1e9)
    return ObjectState(str(meta["e_tag"]), int(meta["size"]), modified_ns, (attributes or {}).get(_PUT_ID, ""))
