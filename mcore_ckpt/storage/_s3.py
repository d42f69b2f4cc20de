"""Amazon's S3, and what speaks its language.

Uploads carry a CRC-32 with every part, and one of the whole object where the store takes it: it then refuses a body
that has changed on the way. After the completion the store is asked what it has, since a 200 alone is no proof.
A part that is late is sent again on another connection; the first to arrive counts.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import copy
import errno
import struct
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import unquote_plus

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.crc import crc32, crc32_combine
from mcore_ckpt.storage._http import Answer, Cut, HttpServer
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
from mcore_ckpt.storage._s3_signing import Credentials, signed

_logger = logger_of(__name__)

_CRC_HEADER: Final = "x-amz-checksum-crc32"
_SLOW_DOWN: Final = frozenset({"SlowDown", "TooManyRequests", "RequestLimitExceeded", "ThrottlingException"})
# Of the client's errors, those that another attempt may repair: a body that was damaged or came too slowly, another
# request for the same key at the same time.
_AGAIN: Final = frozenset(
    {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentChecksumMismatch", "ConditionalRequestConflict"}
)
_DENIED: Final = frozenset({401, 403})
_KEYS_AT_ONCE: Final = "1000"
_NO_VERSION: Final = f'"{"0" * 32}"'  # an ETag that no object has


@dataclass(frozen=True, slots=True)
class S3Place:
    """Where a bucket is.

    Attributes:
        bucket: its name.
        region: where it is.
        endpoint: URL of the server; "" for Amazon's own.
        verify: see `HttpServer`.
    """

    bucket: str
    region: str = "us-east-1"
    endpoint: str = ""
    verify: bool | str = True


@dataclass(slots=True)
class _Learnt:
    """What has been found out about a store: which conditions of puts it keeps."""

    asked: bool = False
    creates: bool = True
    replaces: bool = True
    quotes: bool = True  # a version goes with its quotes, as HTTP has it
    asking: threading.Lock = field(default_factory=threading.Lock)

    def keeps(self, condition: str) -> bool:
        return self.creates if condition == ABSENT else self.replaces

    def named(self, condition: str) -> str:
        return condition if self.quotes else condition.strip('"')


class S3Client(ObjectClient):
    """One bucket.

    Args:
        where: it is.
        credentials: asked at each request.
        place: the bucket as messages name it.
    """

    def __init__(self, where: S3Place, credentials: Callable[[], Credentials], place: str) -> None:
        self.place = place
        self._region = where.region
        self._credentials = credentials
        if where.endpoint:
            self._server = HttpServer(where.endpoint, where.verify)
            self._path = f"/{where.bucket}"
        elif "." in where.bucket:  # which no certificate of Amazon's covers
            self._server = HttpServer(f"https://s3.{where.region}.amazonaws.com", where.verify)
            self._path = f"/{where.bucket}"
        else:
            self._server = HttpServer(f"https://{where.bucket}.s3.{where.region}.amazonaws.com", where.verify)
            self._path = ""
        self.pace = Pace()
        self.hedge = Hedge()
        self.limits: Patience | None = None
        self._learnt = _Learnt()

    def within(self, deadline_s: float) -> S3Client:
        client = copy.copy(self)
        client.limits = within(deadline_s)
        return client

    def __repr__(self) -> str:
        return f"S3Client({self.place!r})"

    # Requests

    def ask_once(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: memoryview | bytes = b"",
        into: memoryview | None = None,
        cut: Cut | None = None,
    ) -> Answer:
        """One attempt at a request; raises `RequestError`, also for what the store refuses."""
        path = f"{self._path}/{key}"
        target, all_headers = signed(
            method, self._server.netloc, path, query or {}, headers or {}, self._credentials(), self._region
        )
        answer = self._server.request(method, target, all_headers, body, into, cut)
        if answer.status >= 300:
            raise _refusal(answer)
        return answer

    def repeat(self, method: str, key: str, attempt: Callable[[int], Answer]) -> Answer:
        """See `retried`."""
        return self.repeat_what(f"{method} {self.place}/{key}", attempt)

    def repeat_what(self, what: str, attempt: Callable[[int], Answer]) -> Answer:
        """See `retried`."""
        return retried(what, attempt, self.pace, self.limits)

    def ask(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Answer:
        """A request that may be sent again."""
        return self.repeat(method, key, lambda _: self.ask_once(method, key, query, headers, body))

    # Objects

    def head(self, key: str) -> ObjectState | None:
        try:
            return _state(self.ask("HEAD", key), key)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    def get(self, key: str, most_bytes: int) -> tuple[ObjectState, bytes]:
        return self._get(key, f"bytes=0-{most_bytes - 1}", most_bytes)

    def get_end(self, key: str, most_bytes: int) -> tuple[ObjectState, bytes]:
        return self._get(key, f"bytes=-{most_bytes}", most_bytes)

    def _get(self, key: str, bytes_range: str, most_bytes: int) -> tuple[ObjectState, bytes]:
        try:
            answer = self.ask("GET", key, headers={"range": bytes_range})
        except OSError as error:
            if error.errno != errno.ERANGE:  # an object without bytes has no first one
                raise
            state = self.head(key)
            if state is None or state.size_bytes:
                raise
            return state, b""
        state = _state(answer, key)
        if len(answer.body) != min(most_bytes, state.size_bytes):
            text = f"{len(answer.body)} bytes came, of {state.size_bytes}"
            raise OSError(errno.EREMOTEIO, f"GET {self.place}/{key}: {text}")
        return state, answer.body

    def get_into(self, key: str, offset: int, view: memoryview, e_tag: str) -> None:
        if not len(view):
            return
        headers = {"range": f"bytes={offset}-{offset + len(view) - 1}", "if-match": e_tag}

        def attempt(memory: memoryview, cut: Cut) -> Answer:
            return self.ask_once("GET", key, headers=headers, into=memory, cut=cut)

        what = f"GET {self.place}/{key}, bytes [{offset}, {offset + len(view)})"
        self.repeat_what(what, lambda _: self.hedge.receive(what, attempt, view))

    def put(self, key: str, content: bytes, condition: Condition = None) -> str:
        headers = {_CRC_HEADER: _encoded(crc32(content))}
        if condition is not None and not self._learnt.keeps(condition):
            self._compare(key, condition)
        elif condition is not None:
            headers |= {"if-none-match": "*"} if condition == ABSENT else {"if-match": self._learnt.named(condition)}

        def attempt(unclear: int) -> Answer:
            try:
                answer = self.ask_once("PUT", key, headers=headers, body=content)
                if not answer.header("etag"):
                    raise unexpected("an answer that names no version (ETag)", again=True, unclear=True)
                return answer
            except RequestError as error:
                # An attempt whose answer was lost may have made what stands there.
                if unclear and error.errno == errno.EEXIST and (own := self._holds(key, content)) is not None:
                    return own
                if error.errno == errno.EEXIST and condition and self._is_misread(key, condition):
                    headers["if-match"] = self._learnt.named(condition)
                    raise unexpected(str(error), again=True) from error
                raise

        return self.repeat("PUT", key, attempt).header("etag")

    def _is_misread(self, key: str, condition: str) -> bool:
        """Whether a version was refused that is there: by radosgw 16, which compares it with its quotes."""
        learnt = self._learnt
        if learnt.quotes:
            with contextlib.suppress(RequestError):
                learnt.quotes = self.ask_once("HEAD", key).header("etag") != condition
                return not learnt.quotes
        return False

    def _holds(self, key: str, content: bytes) -> Answer | None:
        try:
            answer = self.ask_once("HEAD", key)
            if int(answer.header("content-length") or -1) != len(content):
                return None
            found = bytearray(len(content))
            if found:
                answer = self.ask_once("GET", key, into=memoryview(found))
        except RequestError as error:
            if error.errno == errno.ENOENT:
                return None
            error.unclear = True
            raise
        return answer if found == content else None

    def _compare(self, key: str, condition: str) -> None:
        """What a store that ignores conditions cannot do: better than nothing."""
        state = self.head(key)
        if (ABSENT if state is None else state.e_tag) != condition:
            raise FileExistsError(errno.EEXIST, f"PUT {self.place}/{key}: the object is there, or has changed")

    def keeps(self, condition: str) -> bool:
        """Whether the store keeps such a condition, as far as that has been tried."""
        return self._learnt.keeps(condition)

    def honours_conditions(self, key: str) -> bool:
        learnt = self._learnt
        with learnt.asking:
            if not learnt.asked:
                self._ask_for_conditions(key)
        return learnt.creates and learnt.replaces

    def _ask_for_conditions(self, key: str) -> None:
        learnt = self._learnt
        content = self.get(key, 1 << 20)[1]
        ignored = [
            name
            for name, condition in (("If-None-Match", ABSENT), ("If-Match", _NO_VERSION))
            if not self._is_refused(key, content, condition)
        ]
        learnt.creates, learnt.replaces = "If-None-Match" not in ignored, "If-Match" not in ignored
        learnt.asked = True
        if not ignored:
            _logger.info("%s: keeps the conditions of puts", self.place)
        else:
            _logger.warning(
                "%s: the store does not keep this condition of a put: %s. Two jobs that save into one directory at "
                "the same moment may not be kept apart. See that only one job writes there",
                self.place,
                ", ".join(ignored),
            )

    def _is_refused(self, key: str, content: bytes, condition: str) -> bool:
        try:
            self.put(key, content, condition)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTSUP):
                raise
            return error.errno == errno.EEXIST
        return False

    def delete(self, key: str, e_tag: str | None = None) -> None:
        try:
            self.ask("DELETE", key, headers={} if e_tag is None else {"if-match": e_tag})
        except OSError as error:
            if e_tag is not None and error.errno in (errno.EINVAL, errno.ENOTSUP):
                self.delete(key)  # a store that does not know the condition
            elif error.errno != errno.ENOENT:
                raise

    def list(self, prefix: str) -> Listing:
        sizes: dict[str, int] = {}
        folders: set[str] = set()
        is_marked = False
        query = {"list-type": "2", "prefix": prefix, "delimiter": "/", "max-keys": _KEYS_AT_ONCE}
        for page in self._pages(query, "NextContinuationToken", "continuation-token"):
            for entry in _children(page, "Contents"):
                name = _key_text(page, entry, "Key").removeprefix(prefix)
                if name:
                    sizes[name] = int(_text(entry, "Size") or 0)
                else:
                    is_marked = True
            folders.update(
                _key_text(page, entry, "Prefix").removeprefix(prefix).removesuffix("/") or "/"
                for entry in _children(page, "CommonPrefixes")
            )
        return Listing(sizes, folders, is_marked and bool(prefix))

    def _page(self, query: Mapping[str, str]) -> ElementTree.Element:
        """A listing. A key may have characters that XML has not: they come as in a URL."""
        query = {**query, "encoding-type": "url"}
        what = f"GET {self.place}/"
        return retried(what, lambda _: _parsed(self.ask_once("GET", "", query).body), self.pace, self.limits)

    def _pages(self, query: dict[str, str], next_name: str, argument: str) -> Iterator[ElementTree.Element]:
        while True:
            page = self._page(query)
            yield page
            token = _text(page, next_name)
            if _text(page, "IsTruncated") != "true" or not token:
                return
            query = {**query, argument: token}

    # Uploads

    def upload(self, key: str, part_bytes: int) -> Upload:
        return _S3Upload(self, key)

    def unfinished(self, prefix: str) -> Sequence[str]:
        return sorted({key for key, _ in self._uploads(prefix) if "/" not in key[len(prefix) :]})

    def abort_unfinished(self, key: str) -> None:
        for found, upload in self._uploads(key):
            if found == key:
                self.abort_upload(key, upload)

    def _uploads(self, prefix: str) -> Sequence[tuple[str, str]]:
        found: builtins.list[tuple[str, str]] = []
        query = {"uploads": "", "prefix": prefix, "max-uploads": _KEYS_AT_ONCE}
        while True:
            page = self._page(query)
            found += [(_key_text(page, entry, "Key"), _text(entry, "UploadId")) for entry in _children(page, "Upload")]
            key, upload = _key_text(page, page, "NextKeyMarker"), _text(page, "NextUploadIdMarker")
            if _text(page, "IsTruncated") != "true" or not key:
                return found
            query |= {"key-marker": key, "upload-id-marker": upload}

    def abort_upload(self, key: str, upload: str) -> None:
        """Forget an upload and its parts."""
        try:
            self.ask("DELETE", key, {"uploadId": upload})
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise


class _S3Upload(Upload):
    """One upload; the checksums of its parts become that of the object."""

    def __init__(self, client: S3Client, key: str) -> None:
        self._client = client
        self._key = key
        self._lock = threading.Lock()
        self._parts: dict[int, tuple[str, int, int]] = {}  # number: ETag, CRC-32, length
        self._sums_whole = True
        self._may_have_others = False  # made by attempts whose answer was lost
        self._e_tag = ""  # of what has been made
        headers = {"x-amz-checksum-algorithm": "CRC32", "x-amz-checksum-type": "FULL_OBJECT"}
        try:
            answer = self._begun(headers)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            self._sums_whole = False  # a store that does not know of them
            answer = self._begun({})
        self._id = _text(_parsed(answer.body), "UploadId")
        if not self._id:
            raise OSError(errno.EREMOTEIO, f"POST {client.place}/{key}: the answer names no upload")

    def _begun(self, headers: Mapping[str, str]) -> Answer:
        def attempt(unclear: int) -> Answer:
            self._may_have_others = self._may_have_others or unclear > 0
            return self._client.ask_once("POST", self._key, {"uploads": ""}, headers)

        return self._client.repeat("POST", self._key, attempt)

    def part(self, number: int, view: memoryview) -> None:
        client, key = self._client, self._key
        value = crc32(view)
        headers = {_CRC_HEADER: _encoded(value)} if self._sums_whole else {}
        query = {"partNumber": str(number + 1), "uploadId": self._id}
        what = f"PUT {client.place}/{key}, part {number + 1}"

        def attempt(cut: Cut) -> Answer:
            return client.ask_once("PUT", key, query, headers, view, cut=cut)

        answer = client.repeat_what(what, lambda _: client.hedge.send(what, attempt))
        with self._lock:
            self._parts[number] = (answer.header("etag"), value, len(view))

    def complete(self, size_bytes: int) -> None:
        client, key = self._client, self._key
        total, total_bytes = 0, 0
        listed = ElementTree.Element("CompleteMultipartUpload")
        for number, (e_tag, value, length) in sorted(self._parts.items()):
            total, total_bytes = crc32_combine(total, value, length), total_bytes + length
            part = ElementTree.SubElement(listed, "Part")
            ElementTree.SubElement(part, "PartNumber").text = str(number + 1)
            ElementTree.SubElement(part, "ETag").text = e_tag
            if self._sums_whole:
                ElementTree.SubElement(part, "ChecksumCRC32").text = _encoded(value)
        if total_bytes != size_bytes or sorted(self._parts) != list(range(len(self._parts))):
            raise OSError(errno.EIO, f"{client.place}/{key}: {total_bytes} bytes in {len(self._parts)} parts were sent")
        headers = {"content-type": "application/xml"}
        if self._sums_whole:
            headers |= {_CRC_HEADER: _encoded(total), "x-amz-checksum-type": "FULL_OBJECT"}
            headers |= {"x-amz-mp-object-size": str(size_bytes)}
        if client.keeps(ABSENT):
            headers |= {"if-none-match": "*"}

        def attempt(unclear: int) -> Answer:
            try:
                answer = client.ask_once("POST", key, {"uploadId": self._id}, headers, ElementTree.tostring(listed))
                root = _parsed(answer.body)
                if _tag(root) == "Error":  # after a 200: the store had begun to answer before it knew
                    raise _refusal_of(500, root, answer)
                return answer
            except RequestError as error:
                if unclear and error.errno in (
                    errno.ENOENT,
                    errno.EEXIST,
                ):  # an attempt whose answer was lost has completed it
                    return client.ask_once("HEAD", key)
                raise

        answer = client.repeat("POST", key, attempt)
        # The answer to a question names what is there, which another process may have made.
        self._e_tag = _text(_parsed(answer.body), "ETag") if answer.body else ""
        self._compare(size_bytes, total)
        if self._may_have_others:
            with contextlib.suppress(OSError):  # the next save finds them
                client.abort_unfinished(key)

    def _compare(self, size_bytes: int, total: int) -> None:
        client, key = self._client, self._key
        answer = client.ask("HEAD", key, headers={"x-amz-checksum-mode": "ENABLED"})
        state = _state(answer, key)
        stored = answer.header(_CRC_HEADER)
        of_whole = answer.header("x-amz-checksum-type") != "COMPOSITE" and "-" not in stored
        if state.size_bytes != size_bytes:
            text = f"the store says that it has {state.size_bytes} bytes, and {size_bytes} were written"
        elif stored and of_whole and stored != _encoded(total):
            text = f"the store says that its CRC-32 is {stored}, and {_encoded(total)} was written (in base64)"
        else:
            return
        raise OSError(errno.EREMOTEIO, f"{client.place}/{key}: {text} (request {_request_id(answer)})")

    def abort(self, *, own_parts_only: bool = False) -> None:
        self._client.abort_upload(self._key, self._id)
        if own_parts_only:
            return
        if self._may_have_others:
            self._client.abort_unfinished(self._key)
        state = self._client.head(self._key) if self._e_tag else None
        if state is not None and state.e_tag == self._e_tag:
            self._client.delete(self._key, self._e_tag)


def _encoded(value: int) -> str:
    return base64.b64encode(struct.pack(">I", value)).decode()


def _state(answer: Answer, key: str) -> ObjectState:
    """The version that an answer speaks of."""
    length = answer.header("content-range").rpartition("/")[2] or answer.header("content-length")
    try:
        changed = parsedate_to_datetime(answer.header("last-modified")).timestamp()
        return ObjectState(answer.header("etag"), int(length), int(changed * 1e9))
    except (ValueError, TypeError) as error:
        raise OSError(
            errno.EREMOTEIO, f"{key}: the answer names no length or time (request {_request_id(answer)})"
        ) from error


def _request_id(answer: Answer) -> str:
    return answer.header("x-amz-request-id") or answer.header("x-amzn-requestid") or "without id"


def _refusal(answer: Answer) -> RequestError:
    try:
        root = ElementTree.fromstring(answer.body) if answer.body else None
    except ElementTree.ParseError:
        root = None
    return _refusal_of(answer.status, root, answer)


def _refusal_of(status: int, root: ElementTree.Element | None, answer: Answer) -> RequestError:
    code = "" if root is None else _text(root, "Code")
    said = "" if root is None else _text(root, "Message")
    text = f"{status} {code}{': ' if said else ''}{said:.200} (request {_request_id(answer)})"
    if code in _SLOW_DOWN or status in (429, 503):
        return RequestError(errno.EREMOTEIO, text, again=True, unclear=status >= 500, slow_down=True)
    if status >= 500 and status != 501:
        return unexpected(text, again=True, unclear=True)
    if code in _AGAIN or status in (408, 409):
        return unexpected(text, again=True)
    kinds = {
        400: errno.EINVAL,
        404: errno.ENOENT,
        412: errno.EEXIST,
        304: errno.EEXIST,
        416: errno.ERANGE,
        501: errno.ENOTSUP,
    }
    if status in _DENIED:
        return RequestError(errno.EACCES, text)
    return RequestError(kinds.get(status, errno.EREMOTEIO), text)


def _parsed(body: bytes) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(body)
    except ElementTree.ParseError as error:
        raise unexpected(f"an answer that is no XML: {body[:80]!r}", again=True) from error


def _key_text(page: ElementTree.Element, element: ElementTree.Element, name: str) -> str:
    """A key, or the beginning of one, in a listing."""
    text = _text(element, name)
    return unquote_plus(text) if _text(page, "EncodingType") == "url" else text


def _tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _children(element: ElementTree.Element, name: str) -> Iterator[ElementTree.Element]:
    return (child for child in element if _tag(child) == name)


def _text(element: ElementTree.Element, name: str) -> str:
    return next((child.text or "" for child in _children(element, name)), "")
