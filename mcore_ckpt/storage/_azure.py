"""Azure Blob Storage: what obstore does not do there, by requests of this package that obstore signs.

A signed URL (SAS) is for one blob and one method; what else stands in its query, and all headers, are free. So blocks
are sent from where they lie, in any order, each with its MD5, by which the store refuses one that has changed on the
way. The list of blocks makes the blob, unless there is one. After that the store is asked for it: ids and lengths are
compared, since a 201 alone is no proof. Ids carry that of the upload, so they also tell whose blob it is. A block, or
a range that is read, which is late is sent again on another connection; and a blob is deleted by its version.

Without a key that can sign (`AZURE_STORAGE_SAS_TOKEN`, say) obstore does all requests. Blocks of an upload that was
given up are deleted by the store, a week later.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import secrets
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Final
from urllib.parse import quote, urlsplit

import obstore

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.storage._http import Answer, Cut, HttpServer
from mcore_ckpt.storage._late import Hedge
from mcore_ckpt.storage._object_client import Pace, RequestError, Upload, retried, unexpected
from mcore_ckpt.storage._obstore import ObstoreClient, plain_e_tag

_logger = logger_of(__name__)

_VALID_S: Final = 3600.0
# A request may take long, and its host's clock may differ.
_USED_FOR_S: Final = 1800.0
_MOST_URLS: Final = 1000
_COMMITTED: Final = "&comp=blocklist&blocklisttype=committed"
_BUSY: Final = frozenset({"ServerBusy", "OperationTimedOut"})
_CHANGED_ON_THE_WAY: Final = "Md5Mismatch"


class AzureClient(ObstoreClient):
    """One container; see `ObstoreClient`."""

    def __init__(self, bucket: str, options: Mapping[str, Any]) -> None:
        super().__init__("az", bucket, options)
        self.pace = Pace()
        self.hedge = Hedge()
        self._lock = threading.Lock()
        self._urls: dict[tuple[str, str], tuple[str, float]] = {}  # and until when they are used
        self._servers: dict[str, HttpServer] = {}
        self._can_sign = [True]  # shared with the copies that `within` makes

    def signed(self, method: str, key: str) -> str | None:
        """The URL of a request; None if there is no key to sign with."""
        if not self._can_sign[0]:
            return None
        now_s = time.monotonic()
        with self._lock:
            url, until_s = self._urls.get((method, key), ("", 0.0))
        if now_s < until_s:
            return url
        try:
            with self.asked(method, key) as store:
                url = str(obstore.sign(store, method, key, timedelta(seconds=_VALID_S)))
        except OSError as error:
            if error.errno in (errno.ENOTSUP, errno.ETIMEDOUT):  # a forked process; a store that is not reached
                raise
            self._can_sign[0] = False
            _logger.info("%s: obstore does all requests: none can be signed (%s)", self.place, error.strerror or error)
            return None
        with self._lock:
            if len(self._urls) >= _MOST_URLS:
                self._urls.clear()
            self._urls[method, key] = url, now_s + _USED_FOR_S
        return url

    def ask_once(
        self,
        method: str,
        url: str,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        body: memoryview | bytes = b"",
        into: memoryview | None = None,
        cut: Cut | None = None,
    ) -> Answer:
        """One attempt at a request; raises `RequestError`, also for what the store refuses."""
        parts = urlsplit(url)
        base = f"{parts.scheme}://{parts.netloc}"
        with self._lock:
            server = self._servers.get(base) or HttpServer(base)
            self._servers[base] = server
        answer = server.request(method, f"{parts.path}?{parts.query}{query}", headers or {}, body, into, cut)
        if answer.status >= 300:
            raise _refusal(answer)
        return answer

    def repeat(self, what: str, attempt: Callable[[int], Answer]) -> Answer:
        """See `retried`."""
        return retried(what, attempt, self.pace, self.limits)

    def get_into(self, key: str, offset: int, view: memoryview, e_tag: str) -> None:
        url = self.signed("GET", key) if len(view) else None
        if url is None:
            super().get_into(key, offset, view, e_tag)
            return
        headers = {"x-ms-range": f"bytes={offset}-{offset + len(view) - 1}", "if-match": plain_e_tag(e_tag)}

        def attempt(memory: memoryview, cut: Cut) -> Answer:
            return self.ask_once("GET", url, headers=headers, into=memory, cut=cut)

        what = f"GET {self.place}/{key}, bytes [{offset}, {offset + len(view)})"
        self.repeat(what, lambda _: self.hedge.receive(what, attempt, view))

    def delete(self, key: str, e_tag: str | None = None) -> None:
        url = None if e_tag is None else self.signed("DELETE", key)
        if url is None or e_tag is None:
            super().delete(key)
            return
        headers = {"if-match": plain_e_tag(e_tag)}
        try:
            self.repeat(f"DELETE {self.place}/{key}", lambda _: self.ask_once("DELETE", url, headers=headers))
        except OSError as error:
            # The condition does not hold for a blob that is gone, either.
            if error.errno != errno.ENOENT and not (error.errno == errno.EEXIST and self.head(key) is None):
                raise

    def upload(self, key: str, part_bytes: int) -> Upload:
        if self.signed("PUT", key) is None:
            return super().upload(key, part_bytes)
        return _BlockUpload(self, key)


class _BlockUpload(Upload):
    """One upload. Nobody else's blocks have its ids."""

    def __init__(self, client: AzureClient, key: str) -> None:
        self._client = client
        self._key = key
        self._id = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._lengths: dict[int, int] = {}
        self._e_tag = ""  # of what has been made

    def _block(self, number: int) -> str:
        return base64.b64encode(f"{self._id}{number:06d}".encode()).decode()

    def _ask(self, method: str, *more: Any, **options: Any) -> Answer:
        """An attempt at a request for the blob; its URL is signed again now and then."""
        url = self._client.signed(method, self._key)
        if url is None:
            raise RequestError(errno.EACCES, "no request can be signed any more")
        return self._client.ask_once(method, url, *more, **options)

    def part(self, number: int, view: memoryview) -> None:
        client = self._client
        md5 = hashlib.md5(view, usedforsecurity=False).digest()
        headers = {"content-md5": base64.b64encode(md5).decode()}
        query = f"&comp=block&blockid={quote(self._block(number), safe='')}"
        what = f"PUT {client.place}/{self._key}, part {number + 1}"

        def attempt(cut: Cut) -> Answer:
            return self._ask("PUT", query, headers, view, cut=cut)

        client.repeat(what, lambda _: client.hedge.send(what, attempt))
        with self._lock:
            self._lengths[number] = len(view)

    def complete(self, size_bytes: int) -> None:
        client, key = self._client, self._key
        where = f"{client.place}/{key}"
        sent = [(self._block(number), length) for number, length in sorted(self._lengths.items())]
        total_bytes = sum(length for _, length in sent)
        if total_bytes != size_bytes or sorted(self._lengths) != list(range(len(sent))):
            raise OSError(errno.EIO, f"{where}: {total_bytes} bytes in {len(sent)} parts were sent")
        listed = ElementTree.Element("BlockList")
        for block, _ in sent:
            ElementTree.SubElement(listed, "Latest").text = block
        headers = {"if-none-match": "*", "content-type": "application/xml"}
        content = ElementTree.tostring(listed, encoding="utf-8", xml_declaration=True)

        def attempt(unclear: int) -> Answer:
            try:
                return self._ask("PUT", "&comp=blocklist", headers, content)
            except RequestError as error:
                # An attempt whose answer was lost may have made what is there: compared next.
                if unclear and error.errno == errno.EEXIST:
                    answer = self._ask("GET", _COMMITTED)
                    if set(_blocks(answer)) <= set(sent):
                        return answer
                raise

        client.repeat(f"PUT {where}, the list of its parts", attempt)
        answer = client.repeat(f"GET {where}, the list of its parts", lambda _: self._ask("GET", _COMMITTED))
        there = _blocks(answer)
        if set(there) <= set(sent):  # it is this upload's
            self._e_tag = answer.header("etag")
        if there != sent:
            text = f"the store says that it has {_shown(there)}, and {_shown(sent)} were written"
            raise OSError(errno.EREMOTEIO, f"{where}: {text} (request {_request_id(answer)})")

    def abort(self, *, own_parts_only: bool = False) -> None:
        if self._e_tag and not own_parts_only:
            self._client.delete(self._key, self._e_tag)


def _blocks(answer: Answer) -> list[tuple[str, int]]:
    """Ids and lengths of the blocks that a blob is made of."""
    try:
        root = ElementTree.fromstring(answer.body)
        return [(block.findtext("Name") or "", int(block.findtext("Size") or 0)) for block in root.iter("Block")]
    except (ElementTree.ParseError, ValueError) as error:
        raise unexpected(f"an answer that is no list of blocks: {answer.body[:80]!r}", again=True) from error


def _shown(blocks: list[tuple[str, int]]) -> str:
    return f"{sum(length for _, length in blocks)} bytes in {len(blocks)} parts"


def _request_id(answer: Answer) -> str:
    return answer.header("x-ms-request-id") or "without id"


def _refusal(answer: Answer) -> RequestError:
    status, code = answer.status, answer.header("x-ms-error-code")
    text = f"{status} {code} (request {_request_id(answer)})"
    if status in (429, 503) or code in _BUSY:
        return RequestError(errno.EREMOTEIO, text, again=True, unclear=status >= 500, slow_down=True)
    if status >= 500:
        return unexpected(text, again=True, unclear=True)
    if code == _CHANGED_ON_THE_WAY or status == 408:
        return unexpected(text, again=True)
    if status in (401, 403):
        # A URL is valid from the moment when it is signed, by this host's clock, which may be ahead of the store's.
        return RequestError(errno.EACCES, text, again=code == "AuthenticationFailed")
    kinds = {400: errno.EINVAL, 404: errno.ENOENT, 409: errno.EEXIST, 412: errno.EEXIST, 416: errno.ERANGE}
    return RequestError(kinds.get(status, errno.EREMOTEIO), text)
