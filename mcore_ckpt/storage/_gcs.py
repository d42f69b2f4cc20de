"""Google Cloud Storage, by Google's client (google-cloud-storage).

A version is a generation. An upload is one that can be resumed: one stream, whose chunks are repeated, and whose
CRC-32C the store compares when it ends. Sessions that never end are removed by the store after a week.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import google.auth
import requests
from google.api_core import exceptions
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
from google.cloud.storage.retry import DEFAULT_RETRY

from mcore_ckpt.core.errors import OptionError
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

_PUT_ID: Final = "mcore_ckpt_put"
# Bytes of an upload that are sent when the ones before have been answered.
_CHUNK_BYTES: Final = 32 * 1024 * 1024
_SCOPE: Final = "https://www.googleapis.com/auth/devstorage.read_write"


class GcsClient(ObjectClient):
    """One bucket. `client`: Google's. An endpoint without encryption gets no token, which would be everybody's."""

    max_parts = 2**31

    def __init__(self, bucket: str, endpoint: str, client: Any = None, timeouts: Timeouts = Timeouts()) -> None:  # noqa: B008
        self.place = f"gs://{bucket}"
        self.timeouts = timeouts
        self._endpoint = endpoint
        self._client = client or storage.Client(
            project="none", credentials=_credentials(self.place, endpoint), client_options={"api_endpoint": endpoint}
        )
        self._bucket = self._client.bucket(bucket)
        self._retry = DEFAULT_RETRY.with_timeout(timeouts.retries_s)
        # As `requests` has it: for a connection, and for the next bytes of an answer.
        self._waits: dict[str, Any] = {"timeout": (timeouts.connect_s, timeouts.attempt_s)}

    def within(self, deadline_s: float) -> ObjectClient:
        return GcsClient(self._bucket.name, self._endpoint, self._client, self.timeouts.within(deadline_s))

    @contextmanager
    def asked(self, what: str, key: str) -> Iterator[None]:
        """Errors of Google's client leave as those of a client here."""
        where = f"{what} {self.place}/{key}"
        try:
            yield
        except (exceptions.GoogleAPICallError, InvalidResponse) as error:
            code = error.code if isinstance(error, exceptions.GoogleAPICallError) else error.response.status_code
            if code == 404:
                raise FileNotFoundError(errno.ENOENT, f"{where}: there is no such object") from None
            if code == 412:
                raise FileExistsError(errno.EEXIST, f"{where}: the object is there, or has changed") from None
            if code in (401, 403):
                raise PermissionError(errno.EACCES, f"{where}: {_said(error)}") from None
            if code == 416:
                raise OSError(errno.ERANGE, f"{where}: the object ends before") from None
            kind = PassingError if code is None or code in (408, 409, 429) or code >= 500 else OSError
            raise kind(errno.EREMOTEIO, f"{where}: {_said(error)}") from None
        except GoogleAuthError as error:
            # (its text may show what a server of tokens has answered)
            kind = PassingError if error.retryable else PermissionError
            raise kind(errno.EACCES, f"{where}: no token can be had ({type(error).__name__})") from None
        except (exceptions.RetryError, DataCorruption, requests.RequestException, OSError) as error:
            raise PassingError(errno.EREMOTEIO, f"{where}: {_said(error)}") from None

    def head(self, key: str) -> ObjectState | None:
        with self.asked("HEAD", key):
            blob = self._bucket.get_blob(key, retry=self._retry, **self._waits)
        if blob is None:
            return None
        metadata = blob.metadata or {}
        modified_ns = int(blob.updated.timestamp() * 1e9)
        return ObjectState(str(blob.generation), int(blob.size), modified_ns, metadata.get(_PUT_ID, ""))

    def get_range(self, key: str, start: int, stop: int, version: str) -> bytes:
        try:
            with self.asked(f"bytes [{start}, {stop}) of", key):
                content: bytes = self._bucket.blob(key).download_as_bytes(
                    start=start,
                    end=stop - 1,
                    raw_download=True,
                    if_generation_match=int(version),
                    checksum=None,  # there is one of whole objects only
                    retry=self._retry,
                    **self._waits,
                )
                return content
        except FileNotFoundError as error:
            raise FileExistsError(errno.EEXIST, f"{error.strerror}, or another version of it") from None

    def put_once(self, key: str, content: bytes, condition: Condition, put_id: str) -> str:
        blob = self._bucket.blob(key)
        blob.metadata = {_PUT_ID: put_id}
        expected = None if condition is None else 0 if condition == ABSENT else int(condition)
        try:
            with self.asked("PUT", key):
                blob.upload_from_string(
                    content, if_generation_match=expected, checksum="crc32c", retry=None, **self._waits
                )
        except FileNotFoundError:
            if expected:  # what was to be replaced is gone
                raise FileExistsError(errno.EEXIST, f"PUT {self.place}/{key}: the object is gone") from None
            raise
        return str(blob.generation)

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError), self.asked("DELETE", key):
            self._bucket.blob(key).delete(retry=self._retry, **self._waits)

    def list(self, prefix: str) -> Listing:
        with self.asked("LIST", prefix):
            found = self._client.list_blobs(
                self._bucket, prefix=prefix, delimiter="/", retry=self._retry, **self._waits
            )
            sizes = {blob.name[len(prefix) :]: int(blob.size) for blob in found}
        sizes.pop("", None)  # an object that stands for the folder, as consoles make it
        return Listing(sizes, {each[len(prefix) :].strip("/") or "/" for each in found.prefixes})

    def upload(self, key: str, part_bytes: int, put_id: str) -> Upload:
        blob = self._bucket.blob(key)
        blob.metadata = {_PUT_ID: put_id}
        stream = blob.open(
            "wb",
            chunk_size=_CHUNK_BYTES,
            ignore_flush=True,
            if_generation_match=0,
            checksum="crc32c",
            retry=self._retry,
            **self._waits,
        )
        return Upload(self.asked, key, stream)


def _credentials(place: str, endpoint: str) -> Any:
    if not endpoint.startswith("https:"):
        return AnonymousCredentials()
    try:
        return google.auth.default(scopes=[_SCOPE])[0]
    except DefaultCredentialsError as error:
        raise OptionError(
            f"{place}: no credentials for Google Cloud Storage were found ({type(error).__name__}): set "
            "GOOGLE_APPLICATION_CREDENTIALS, or log in by `gcloud auth application-default login`"
        ) from None


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]
