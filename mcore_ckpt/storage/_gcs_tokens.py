"""Bearer tokens for Google's store, by its application default credentials: asked at each request, renewed in time.

google-auth finds the credentials and knows how each kind is renewed. Its requests go through this package's HTTP, which
has a time limit for everything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

import google.auth
from google.auth import exceptions
from google.auth.transport import Request, Response

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.storage._http import Answer, HttpServer
from mcore_ckpt.storage._object_client import RequestError, attempt_of, patience

_SCOPES: Final = ("https://www.googleapis.com/auth/devstorage.read_write",)
# A token that is refused is replaced, unless it is younger: then the next one would be refused as well.
_YOUNG_S: Final = 30.0


class GoogleTokens:
    """Headers by which requests are authorized; see `_gcs.Tokens`.

    Raises:
        OptionError: (by a call) there are no credentials.
        RequestError: (by a call) who gives out tokens has failed; it may succeed later.
    """

    def __init__(self) -> None:
        self.begin()
        _tokens.add(self)

    def begin(self) -> None:
        """Find credentials at the next call: a process that was forked has its own."""
        self._lock = threading.Lock()
        self._credentials: Any = None
        self._renewed_s = 0.0

    def __repr__(self) -> str:
        return "GoogleTokens()"

    def __call__(self) -> Mapping[str, str]:
        headers: dict[str, str] = {}
        with self._locked():
            try:
                if self._credentials is None:
                    self._credentials, _ = google.auth.default(scopes=_SCOPES)
                if not self._credentials.valid:
                    self._credentials.refresh(_OwnRequest())
                    self._renewed_s = time.monotonic()
                self._credentials.apply(headers)
            except exceptions.DefaultCredentialsError as error:
                # Its text may show what stands in a file.
                raise OptionError(
                    "no credentials for Google Cloud Storage were found "
                    f"({type(error).__name__}, raised by google-auth): run `gcloud auth "
                    "application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS "
                    "to a file of credentials, or run where the instance has a service account"
                ) from None
            except Exception as error:  # noqa: BLE001 (google-auth's, and those of what it asks)
                # Their text may show what a process or a service has answered, credentials among it.
                text = f"a token cannot be had: {type(error).__name__}, raised by google-auth"
                raise RequestError(errno.EACCES, text, again=True) from None
        return headers

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Another request may be waiting for a token: not longer than this one may take."""
        most_s = patience().give_up_s
        if not self._lock.acquire(timeout=most_s):
            raise RequestError(errno.ETIMEDOUT, f"no token within {most_s:.2g} s", again=True)
        try:
            yield
        finally:
            self._lock.release()

    def refused(self, headers: Mapping[str, str]) -> bool:
        with self._locked():
            now: dict[str, str] = {}
            if self._credentials is None or not self._credentials.valid:
                return True
            self._credentials.apply(now)
            if now != headers:
                return True
            if time.monotonic() - self._renewed_s < _YOUNG_S:
                return False
            self._credentials.token = None
            return True


_tokens: weakref.WeakSet[GoogleTokens] = weakref.WeakSet()


def _begin_again() -> None:
    for each in list(_tokens):
        each.begin()


os.register_at_fork(after_in_child=_begin_again)


class _OwnResponse(Response):  # type: ignore[misc]
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    @property
    def status(self) -> int:
        return self._answer.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._answer.headers  # type: ignore[return-value]

    @property
    def data(self) -> bytes:
        return self._answer.body


class _OwnRequest(Request):  # type: ignore[misc]
    """What google-auth asks for one token by, in several requests if need be."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + min(patience().idle_s, patience().give_up_s)

    def __call__(
        self,
        url: str,
        method: str = "GET",
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
        **_: Any,
    ) -> _OwnResponse:
        parts = urlsplit(url)
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        content = body.encode() if isinstance(body, str) else body or b""
        server, left_s = HttpServer(f"{parts.scheme}://{parts.netloc}"), self._until_s - time.monotonic()
        if left_s <= 0:
            raise exceptions.TransportError("no answer in time")
        try:
            with attempt_of(patience(), left_s):
                return _OwnResponse(server.request(method, target, headers or {}, content))
        except RequestError as error:
            raise exceptions.TransportError(error.strerror) from None
