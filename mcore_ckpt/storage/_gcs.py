"""Google Cloud Storage, by its JSON API.

The version of an object is its generation, and every change names the one that it replaces (0: none). What is put in
one request carries a CRC-32C, by which the store refuses a body that has changed on the way.

Parts of an upload are objects of their own, next to the object that is made of them and not in the listings that a
storage gives. Each is sent from where it lies, in any order, again on another connection when it is late. The store
composes at most 32 objects to one: so each 32 parts are composed as soon as they are there, and in the end those. Then
the store is asked what it has, since a 200 alone is no proof. Every object says in its metadata which upload has made
it: an answer that was lost is told from an object of others.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import copy
import errno
import json
import secrets
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Final, NoReturn, Protocol
from urllib.parse import quote, urlencode

from google_crc32c import extend

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.crc import CASTAGNOLI, crc32_combine
from mcore_ckpt.core.threads import together
from mcore_ckpt.storage._http import Answer, Body, Cut, HttpServer
from mcore_ckpt.storage._late import Hedge
from mcore_ckpt.storage._object_client import (
    ABSENT,
    Condition,
    Listing,
    ObjectClient,
    ObjectState,
    Pace,
    Patience,
    RequestError,
    Upload,
    retried,
    unexpected,
    within,
)

_logger = logger_of(__name__)

_FIELDS: Final = "name,generation,size,crc32c,timeCreated,metadata"
_MAKER: Final = "mcore-ckpt-upload"  # key of an object's metadata
_PART: Final = ".mcore_ckpt_part."
_MOST_COMPOSED: Final = 32
_AT_ONCE: Final = 16
_KEYS_AT_ONCE: Final = "1000"
_NO_VERSION: Final = "1"  # a generation that no object has
_TYPE: Final = "application/octet-stream"
# The library sums objects of `bytes` only. Copies of this length stay in the cache of a core.
_COPIED_BYTES: Final = 128 * 1024


class Tokens(Protocol):
    """What a request is authorized by."""

    def __call__(self) -> Mapping[str, str]:
        """Headers of a request."""

    def refused(self, headers: Mapping[str, str]) -> bool:
        """The store does not take these; returns whether to try others."""


@dataclass(slots=True)
class _Learnt:
    """What has been found out about a store: which changes look at the version that they name."""

    asked: bool = False
    creates: bool = True
    replaces: bool = True
    composes: bool = True
    deletes: bool = True
    asking: threading.Lock = field(default_factory=threading.Lock)


class GcsClient(ObjectClient):
    """One bucket.

    Args:
        bucket: its name.
        endpoint: URL of the server.
        tokens: asked at each request; None for requests that are not authorized.
    """

    def __init__(self, bucket: str, endpoint: str, tokens: Tokens | None) -> None:
        self.place = f"gs://{bucket}"
        self._objects = f"/storage/v1/b/{quote(bucket, safe='')}/o"
        self._tokens = tokens
        self._server = HttpServer(endpoint)
        self.pace = Pace()
        self.hedge = Hedge()
        self.limits: Patience | None = None
        self._learnt = _Learnt()

    def within(self, deadline_s: float) -> GcsClient:
        client = copy.copy(self)
        client.limits = within(deadline_s)
        return client

    def __repr__(self) -> str:
        return f"GcsClient({self.place!r})"

    # Requests

    def ask_once(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Body = b"",
        into: memoryview | None = None,
        cut: Cut | None = None,
    ) -> Answer:
        """One attempt at a request; raises `RequestError`, also for what the store refuses."""
        target = f"{path}?{urlencode(query, quote_via=quote, safe='')}" if query else path
        authorized = {} if self._tokens is None else self._tokens()
        answer = self._server.request(method, target, {**(headers or {}), **authorized}, body, into, cut)
        if answer.status >= 300:
            error = _refusal(answer)
            error.again |= answer.status == 401 and self._tokens is not None and self._tokens.refused(authorized)
            raise error
        return answer

    def repeat(self, what: str, attempt: Callable[[int], Answer]) -> Answer:
        """See `retried`."""
        return retried(what, attempt, self.pace, self.limits)

    def _path(self, key: str) -> str:
        return f"{self._objects}/{quote(key, safe='')}"

    def told_once(self, key: str) -> Answer:
        """One attempt to be told of an object."""
        return self.ask_once("GET", self._path(key), {"fields": _FIELDS})

    def made_by(self, key: str, maker: str) -> Answer | None:
        """One attempt to be told of an object, if that maker has made it."""
        try:
            answer = self.told_once(key)
        except RequestError as error:
            if error.errno == errno.ENOENT:
                return None
            error.unclear = True
            raise
        return answer if _resource(answer).maker == maker else None

    def insert_once(
        self, key: str, content: memoryview | bytes, value: int, maker: str, condition: Condition, cut: Cut | None
    ) -> Answer:
        """One attempt to make an object of content with that CRC-32C."""
        query = {"uploadType": "multipart", "name": key, "fields": _FIELDS}
        if condition is not None:
            query["ifGenerationMatch"] = condition or "0"
        told = {"contentType": _TYPE, "crc32c": _encoded(value), "metadata": {_MAKER: maker}}
        boundary = secrets.token_hex(16)
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(told)}\r\n"
            f"--{boundary}\r\nContent-Type: {_TYPE}\r\n\r\n"
        )
        headers = {"content-type": f"multipart/related; boundary={boundary}"}
        body = (head.encode(), content, f"\r\n--{boundary}--\r\n".encode())
        return self.ask_once("POST", f"/upload{self._objects}", query, headers, body, cut=cut)

    def compose_once(
        self, key: str, sources: Sequence[str], maker: str, condition: str, *, keep: bool = False
    ) -> Answer:
        """One attempt to make an object of others, which are deleted then, unless they are to be kept."""
        told: dict[str, Any] = {
            "kind": "storage#composeRequest",
            "sourceObjects": [{"name": source} for source in sources],
            "destination": {"contentType": _TYPE, "metadata": {_MAKER: maker}},
        }
        if not keep:
            told["deleteSourceObjects"] = True
        query = {"ifGenerationMatch": condition or "0", "fields": _FIELDS}
        headers = {"content-type": "application/json"}
        return self.ask_once("POST", f"{self._path(key)}/compose", query, headers, json.dumps(told).encode())

    # Objects

    def head(self, key: str) -> ObjectState | None:
        try:
            answer = self.repeat(f"GET {self.place}/{key}", lambda _: self.told_once(key))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        return _resource(answer).state()

    def get(self, key: str, most_bytes: int) -> tuple[ObjectState, bytes]:
        return self._get(key, f"bytes=0-{most_bytes - 1}", most_bytes)

    def get_end(self, key: str, most_bytes: int) -> tuple[ObjectState, bytes]:
        return self._get(key, f"bytes=-{most_bytes}", most_bytes)

    def _get(self, key: str, bytes_range: str, most_bytes: int) -> tuple[ObjectState, bytes]:
        what = f"GET {self.place}/{key}"
        headers = {"range": bytes_range}
        try:
            answer = self.repeat(what, lambda _: self.ask_once("GET", self._path(key), {"alt": "media"}, headers))
        except OSError as error:
            if error.errno != errno.ERANGE:  # an object without bytes has no first one
                raise
            state = self.head(key)
            if state is None or state.size_bytes:
                raise
            return state, b""
        state = _state_of_content(answer, what)
        if len(answer.body) != min(most_bytes, state.size_bytes):
            raise OSError(errno.EREMOTEIO, f"{what}: {len(answer.body)} bytes came, of {state.size_bytes}")
        return state, answer.body

    def get_into(self, key: str, offset: int, view: memoryview, e_tag: str) -> None:
        if not len(view):
            return
        query = {"alt": "media", "ifGenerationMatch": e_tag}
        headers = {"range": f"bytes={offset}-{offset + len(view) - 1}"}

        def attempt(memory: memoryview, cut: Cut) -> Answer:
            answer = self.ask_once("GET", self._path(key), query, headers, into=memory, cut=cut)
            found = answer.header("x-goog-generation")
            if found not in ("", e_tag):  # a store that does not look at the condition
                raise RequestError(errno.EEXIST, f"generation {e_tag} was asked for, and {found} is there")
            return answer

        what = f"GET {self.place}/{key}, bytes [{offset}, {offset + len(view)})"
        self.repeat(what, lambda _: self.hedge.receive(what, attempt, view))

    def put(self, key: str, content: bytes, condition: Condition = None) -> str:
        keeps = self._learnt.creates if condition == ABSENT else self._learnt.replaces
        if condition is not None and not keeps:
            self._compare("PUT", key, condition)
            condition = None
        value, maker = crc32c(content), secrets.token_hex(8)

        def attempt(unclear: int) -> Answer:
            try:
                return self.insert_once(key, content, value, maker, condition, None)
            except RequestError as error:
                # An attempt whose answer was lost may have made what stands there.
                if unclear and error.errno == errno.EEXIST and (own := self.made_by(key, maker)) is not None:
                    return own
                raise

        return _resource(self.repeat(f"PUT {self.place}/{key}", attempt)).generation

    def _compare(self, method: str, key: str, condition: str) -> None:
        """What a store that ignores conditions cannot do: better than nothing."""
        state = self.head(key)
        if (ABSENT if state is None else state.e_tag) != condition:
            raise FileExistsError(errno.EEXIST, f"{method} {self.place}/{key}: the object is there, or has changed")

    def delete(self, key: str, e_tag: str | None = None) -> None:
        if e_tag is not None and not self._learnt.deletes:
            if self.head(key) is None:
                return
            self._compare("DELETE", key, e_tag)
        query = {} if e_tag is None else {"ifGenerationMatch": e_tag}
        try:
            self.repeat(f"DELETE {self.place}/{key}", lambda _: self.ask_once("DELETE", self._path(key), query))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise

    def honours_conditions(self, key: str) -> bool:
        learnt = self._learnt
        with learnt.asking:
            if not learnt.asked:
                self._ask_for_conditions(key)
        return learnt.creates and learnt.replaces and learnt.composes and learnt.deletes

    def _ask_for_conditions(self, key: str) -> None:
        learnt = self._learnt
        content = self.get(key, 1 << 20)[1]
        maker, what = secrets.token_hex(8), f"POST {self.place}/{key}"
        changes: dict[str, Callable[[], object]] = {
            "of a new object": lambda: self.put(key, content, ABSENT),
            "of a replacement": lambda: self.put(key, content, _NO_VERSION),
            "of a composition": lambda: self.repeat(
                what, lambda _: self.compose_once(key, [key], maker, _NO_VERSION, keep=True)
            ),
            "of a deletion": lambda: self.delete(key, _NO_VERSION),
        }
        ignored = [name for name, change in changes.items() if not _is_refused(change)]
        if "of a deletion" in ignored:
            self.put(key, content)
        learnt.creates, learnt.replaces, learnt.composes, learnt.deletes = (name not in ignored for name in changes)
        learnt.asked = True
        if not ignored:
            _logger.info("%s: looks at the version that a change names", self.place)
        else:
            _logger.warning(
                "%s: the store does not look at the version (ifGenerationMatch) %s. Two jobs that save into one "
                "directory at the same moment may not be kept apart. See that only one job writes there",
                self.place,
                ", ".join(ignored),
            )

    # Listings

    def list(self, prefix: str) -> Listing:
        sizes: dict[str, int] = {}
        folders: set[str] = set()
        is_marked = False
        for page in self._pages({"prefix": prefix, "delimiter": "/"}):
            for entry in page.get("items") or ():
                name = str(entry["name"]).removeprefix(prefix)
                if not name:
                    is_marked = True
                elif not name.startswith(_PART):
                    sizes[name] = int(entry.get("size", 0))
            for each in page.get("prefixes") or ():
                folders.add(str(each).removeprefix(prefix).removesuffix("/") or "/")
        return Listing(sizes, folders, is_marked and bool(prefix))

    def keys(self, prefix: str) -> builtins.list[str]:
        """All that begin so, folders not looked into."""
        pages = self._pages({"prefix": prefix, "delimiter": "/"})
        return [str(entry["name"]) for page in pages for entry in page.get("items") or ()]

    def _pages(self, query: dict[str, str]) -> Iterator[dict[str, Any]]:
        query = {**query, "maxResults": _KEYS_AT_ONCE, "fields": "nextPageToken,prefixes,items(name,size)"}
        while True:
            page = retried(
                f"GET {self.place}/",
                lambda _, query=query: _parsed(self.ask_once("GET", self._objects, query)),  # type: ignore[misc]
                self.pace,
                self.limits,
            )
            yield page
            token = page.get("nextPageToken")
            if not token:
                return
            query = {**query, "pageToken": token}

    # Uploads

    def upload(self, key: str, part_bytes: int) -> Upload:
        return _ComposedUpload(self, key)

    def unfinished(self, prefix: str) -> Sequence[str]:
        return sorted({prefix + _whole(key) for key in self.keys(prefix + _PART)})

    def abort_unfinished(self, key: str) -> None:
        folder, name = _split(key)
        self.delete_all([part for part in self.keys(f"{folder}{_PART}{name}.") if _whole(part) == name])

    def delete_all(self, keys: Sequence[str]) -> None:
        """Delete many objects, several at once."""
        together(_AT_ONCE, *(partial(self.delete, key) for key in keys))

    def may_compose(self, key: str) -> None:
        """Raises if a store that would not look has the object."""
        if not self._learnt.composes:
            self._compare("POST", key, ABSENT)


class _ComposedUpload(Upload):
    """One upload. Nobody else's parts have its id in their names."""

    def __init__(self, client: GcsClient, key: str) -> None:
        self._client = client
        self._key = key
        self._id = secrets.token_hex(8)
        folder, name = _split(key)
        self._parts_prefix = f"{folder}{_PART}{name}.{self._id}."
        self._lock = threading.Lock()
        self._parts: dict[int, tuple[int, int]] = {}  # number: CRC-32C, length
        self._composed: set[int] = set()  # each stands for `_MOST_COMPOSED` parts
        self._may_be_made = False

    def _name(self, number: int, level: int = 0) -> str:
        return f"{self._parts_prefix}{level}-{number:06d}"

    def part(self, number: int, view: memoryview) -> None:
        client, name = self._client, self._name(number)
        value = crc32c(view)
        what = f"PUT {client.place}/{self._key}, part {number + 1}"

        def attempt(cut: Cut) -> Answer:
            try:
                return client.insert_once(name, view, value, self._id, ABSENT, cut)
            except RequestError as error:
                # Another attempt has made it.
                if error.errno == errno.EEXIST and (own := client.made_by(name, self._id)) is not None:
                    return own
                raise

        answer = client.repeat(what, lambda _: client.hedge.send(what, attempt))
        _check(what, _resource(answer), len(view), value)
        group = number // _MOST_COMPOSED
        of_group = range(group * _MOST_COMPOSED, (group + 1) * _MOST_COMPOSED)
        with self._lock:
            self._parts[number] = (value, len(view))
            is_complete = self._parts.keys() >= set(of_group)
        if is_complete:
            self._compose(self._name(group, 1), [self._name(each) for each in of_group])
            with self._lock:
                self._composed.add(group)

    def _compose(self, key: str, sources: Sequence[str]) -> Answer:
        client = self._client

        def attempt(unclear: int) -> Answer:
            try:
                return client.compose_once(key, sources, self._id, ABSENT)
            except RequestError as error:
                # An attempt whose answer was lost may have made it, and have deleted the parts.
                if unclear and error.errno in (errno.EEXIST, errno.ENOENT):
                    own = client.made_by(key, self._id)
                    if own is not None:
                        return own
                raise

        of = "" if key == self._key else f" of {client.place}/{self._key}"
        return client.repeat(f"POST {client.place}/{key}{of}, composed of {len(sources)} parts", attempt)

    def complete(self, size_bytes: int) -> None:
        client, key = self._client, self._key
        where = f"{client.place}/{key}"
        total, total_bytes = 0, 0
        for _, (value, length) in sorted(self._parts.items()):
            total, total_bytes = crc32_combine(total, value, length, CASTAGNOLI), total_bytes + length
        if total_bytes != size_bytes or sorted(self._parts) != list(range(len(self._parts))):
            raise OSError(errno.EIO, f"{where}: {total_bytes} bytes in {len(self._parts)} parts were sent")
        sources = [self._name(group, 1) for group in sorted(self._composed)]
        sources += [self._name(n) for n in sorted(self._parts) if n // _MOST_COMPOSED not in self._composed]
        level = 2
        while len(sources) > _MOST_COMPOSED:
            groups = [sources[at : at + _MOST_COMPOSED] for at in range(0, len(sources), _MOST_COMPOSED)]
            names = [self._name(number, level) for number in range(len(groups))]
            together(_AT_ONCE, *map(partial(partial, self._compose), names, groups))
            sources, level = names, level + 1
        client.may_compose(key)
        self._may_be_made = True
        made = _resource(self._compose(key, sources)).generation
        there = _resource(client.repeat(f"GET {where}", lambda _: client.told_once(key)))
        _check(where, there, size_bytes, total)
        if there.generation != made:
            raise OSError(errno.EREMOTEIO, f"{where}: generation {made} was made, and {there.generation} is there")
        with contextlib.suppress(OSError):  # the next save finds them
            self._sweep()

    def _sweep(self) -> None:
        """What the store has not deleted, and what attempts whose answer was lost have made."""
        self._client.delete_all(self._client.keys(self._parts_prefix))

    def abort(self, *, own_parts_only: bool = False) -> None:
        client, key = self._client, self._key
        self._sweep()
        if self._may_be_made and not own_parts_only:
            what = f"GET {client.place}/{key}"
            own = retried(what, lambda _: client.made_by(key, self._id), client.pace, client.limits)
            if own is not None:
                client.delete(key, _resource(own).generation)


@dataclass(frozen=True, slots=True)
class _Resource:
    """What the store tells of a version of an object. (Of one without bytes Google's own emulator tells no size.)"""

    generation: str
    size_bytes: int
    crc32c: str
    created: str
    maker: str
    request: str

    def state(self) -> ObjectState:
        return ObjectState(self.generation, self.size_bytes, _nanoseconds(self.created))


def _resource(answer: Answer) -> _Resource:
    told = _parsed(answer)
    try:
        metadata = told.get("metadata") or {}
        return _Resource(
            str(told["generation"]),
            int(told.get("size", 0)),
            str(told.get("crc32c", "")),
            str(told.get("timeCreated", "")),
            str(metadata.get(_MAKER, "")),
            _request_id(answer),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise unexpected(f"an answer that names no version: {answer.body[:80]!r}", again=True) from error


def _check(where: str, there: _Resource, size_bytes: int, value: int) -> None:
    if there.size_bytes != size_bytes:
        text = f"the store says that it has {there.size_bytes} bytes, and {size_bytes} were written"
    elif there.crc32c and there.crc32c != _encoded(value):
        text = f"the store says that its CRC-32C is {there.crc32c}, and {_encoded(value)} was written (in base64)"
    else:
        return
    raise OSError(errno.EREMOTEIO, f"{where}: {text} (request {there.request})")


def _state_of_content(answer: Answer, what: str) -> ObjectState:
    """The version that an answer with content speaks of. Not every answer tells its time."""
    length = answer.header("content-range").rpartition("/")[2] or answer.header("content-length")
    generation, modified = answer.header("x-goog-generation"), answer.header("last-modified")
    try:
        if not generation:
            raise ValueError(generation)
        modified_s = parsedate_to_datetime(modified).timestamp() if modified else 0.0
        return ObjectState(generation, int(length), int(modified_s * 1e9))
    except (ValueError, TypeError) as error:
        text = f"{what}: the answer names no version or length (request {_request_id(answer)})"
        raise OSError(errno.EREMOTEIO, text) from error


def _nanoseconds(moment: str) -> int:
    """Of a moment as the store writes it, with any number of digits behind the second."""
    whole, _, fraction = moment.removesuffix("Z").partition(".")
    try:
        at = datetime.strptime(whole, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc)
        return int(at.timestamp()) * 10**9 + int(f"{fraction:0<9.9}")
    except ValueError as error:
        raise unexpected(f"an answer with a time that is none: {moment[:40]!r}") from error


def crc32c(content: memoryview | bytes) -> int:
    """CRC-32C, as the store sums."""
    view, value = memoryview(content), 0
    for at in range(0, len(view), _COPIED_BYTES):
        value = extend(value, bytes(view[at : at + _COPIED_BYTES]))
    return value


def _encoded(value: int) -> str:
    return base64.b64encode(struct.pack(">I", value)).decode()


def _split(key: str) -> tuple[str, str]:
    """The folder of a key, with its slash, and the name in it."""
    folder, slash, name = key.rpartition("/")
    return folder + slash, name


def _whole(key: str) -> str:
    """The name of the object that a part belongs to."""
    return _split(key)[1].removeprefix(_PART).rsplit(".", 2)[0]


def _is_refused(change: Callable[[], object]) -> bool:
    try:
        change()
    except OSError as error:
        if error.errno != errno.EEXIST:
            raise
        return True
    return False


def _parsed(answer: Answer) -> dict[str, Any]:
    try:
        told = json.loads(answer.body)
    except ValueError as error:
        _raise_unexpected(answer, error)
    if not isinstance(told, dict):
        _raise_unexpected(answer, None)
    return told


def _raise_unexpected(answer: Answer, error: ValueError | None) -> NoReturn:
    raise unexpected(f"an answer that is no JSON: {answer.body[:80]!r}", again=True) from error


def _request_id(answer: Answer) -> str:
    return answer.header("x-guploader-uploadid") or "without id"


def _refusal(answer: Answer) -> RequestError:
    status, said, reasons = answer.status, "", set[str]()
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        told = json.loads(answer.body).get("error")
        said = str(told.get("message", ""))
        reasons = {str(each.get("reason", "")) for each in told.get("errors") or ()}
    text = f"{status} {said:.200} (request {_request_id(answer)})"
    if status in (429, 503) or reasons & {"rateLimitExceeded", "userRateLimitExceeded"}:
        # One object may be changed once a second, whatever else is asked: fewer requests would not help.
        slow_down = "object mutation" not in said
        return RequestError(errno.EREMOTEIO, text, again=True, unclear=status >= 500, slow_down=slow_down)
    if status >= 500 and status != 501:
        return unexpected(text, again=True, unclear=True)
    if status in (408, 409) or (status in (400, 412) and "crc32c" in said.lower()):  # a body that was damaged
        return unexpected(text, again=True)
    kinds = {
        304: errno.EEXIST,
        400: errno.EINVAL,
        401: errno.EACCES,
        403: errno.EACCES,
        404: errno.ENOENT,
        412: errno.EEXIST,
        416: errno.ERANGE,
        501: errno.ENOTSUP,
    }
    return RequestError(kinds.get(status, errno.EREMOTEIO), text)
