"""This package's own requests to Azure's store, on a server that does as it is told; Azurite: `make test-stores`."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

pytest.importorskip("obstore", reason="which signs the requests")

from mcore_ckpt.storage import _object_client
from mcore_ckpt.storage._azure import AzureClient
from mcore_ckpt.storage._object_client import Patience
from tests.support.local_files import random_bytes

PART = 1000


class Azure:
    """One blob and its blocks; `rule` is asked before each request, and may answer it."""

    def __init__(self) -> None:
        self.blocks: dict[str, bytes] = {}
        self.blob: list[tuple[str, bytes]] | None = None
        self.requests: list[str] = []
        self.rule: Callable[[str], tuple[int, str] | None] = lambda what: None
        azure = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                what = f"{self.command} {query.get('comp', ['blob'])[0]}"
                azure.requests.append(what)
                status, code, content = 403, "AuthorizationFailure", b""
                if "sig" in query:
                    told = azure.rule(what)
                    status, code, content = (*told, b"") if told else azure.do(what, query, self.headers, body)
                self.send_response(status)
                self.send_header("x-ms-error-code", code)
                self.send_header("ETag", '"1"')
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_DELETE = answer  # noqa: N815 (the base class's names)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a request that was cut off

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def do(self, what: str, query: dict[str, list[str]], headers: Any, body: bytes) -> tuple[int, str, bytes]:
        if what == "PUT block":
            if base64.b64encode(hashlib.md5(body).digest()).decode() != headers["content-md5"]:
                return 400, "Md5Mismatch", b""
            self.blocks[query["blockid"][0]] = body
            return 201, "", b""
        if what == "PUT blocklist":
            if self.blob is not None and headers["if-none-match"] == "*":
                return 409, "BlobAlreadyExists", b""
            names = re.findall("<Latest>(.*?)</Latest>", body.decode())
            self.blob = [(name, self.blocks[name]) for name in names]
            return 201, "", b""
        if self.blob is None:
            return 404, "BlobNotFound", b""
        if what == "GET blocklist":
            rows = "".join(f"<Block><Name>{name}</Name><Size>{len(of)}</Size></Block>" for name, of in self.blob)
            return 200, "", f"<BlockList><CommittedBlocks>{rows}</CommittedBlocks></BlockList>".encode()
        if headers["if-match"] != '"1"':
            return 412, "ConditionNotMet", b""
        if what == "DELETE blob":
            self.blob = None
            return 202, "", b""
        first, last = map(int, headers["x-ms-range"].removeprefix("bytes=").split("-"))
        return 206, "", self.content[first : last + 1]

    @property
    def content(self) -> bytes:
        return b"".join(content for _, content in self.blob or ())


@pytest.fixture
def azure() -> Iterator[Azure]:
    azure = Azure()
    yield azure
    azure.server.shutdown()
    azure.server.server_close()


@pytest.fixture
def client(azure: Azure, monkeypatch: pytest.MonkeyPatch) -> AzureClient:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"key").decode())
    monkeypatch.setattr(_object_client, "_patience", Patience(first_pause_s=0.01, late_s=0.2))
    return AzureClient("container", {"endpoint_url": f"http://127.0.0.1:{azure.server.server_address[1]}"})


def once(what: str, status: int, code: str, before: Callable[[], None] = lambda: None) -> Any:
    """A rule: the first of these requests is answered so."""
    left = [what]

    def rule(asked: str) -> tuple[int, str] | None:
        if asked not in left:
            return None
        left.remove(asked)
        before()
        return status, code

    return rule


def put(client: AzureClient, content: bytes) -> Any:
    upload = client.upload("key", PART)
    for number in reversed(range(-(-len(content) // PART))):
        upload.part(number, memoryview(content)[number * PART : (number + 1) * PART])
    upload.complete(len(content))
    return upload


@pytest.mark.parametrize(
    ("what", "status", "code"),
    [
        ("PUT block", 400, "Md5Mismatch"),
        ("PUT block", 503, "ServerBusy"),
        ("PUT block", 403, "AuthenticationFailed"),
        ("PUT blocklist", 500, "InternalError"),
        ("GET blocklist", 500, "InternalError"),
    ],
)
def test_what_goes_wrong_for_a_moment_is_repeated(
    azure: Azure, client: AzureClient, what: str, status: int, code: str
) -> None:
    azure.rule = once(what, status, code)
    content = random_bytes(5 * PART + 7)
    put(client, content)
    assert azure.content == content
    assert azure.requests.count(what) == 1 + (6 if what == "PUT block" else 1)


def test_a_list_of_parts_whose_answer_was_lost_is_found_made(azure: Azure, client: AzureClient) -> None:
    def make() -> None:
        azure.blob = sorted(azure.blocks.items(), key=lambda block: base64.b64decode(block[0]))

    azure.rule = once("PUT blocklist", 500, "InternalError", before=make)
    content = random_bytes(3 * PART)
    put(client, content).abort()
    assert azure.requests[-1] == "DELETE blob"
    assert azure.blob is None


def test_a_blob_of_others_is_neither_replaced_nor_removed(azure: Azure, client: AzureClient) -> None:
    azure.blob = [("theirs", b"of others")]
    upload = client.upload("key", PART)
    upload.part(0, memoryview(bytes(PART)))
    with pytest.raises(FileExistsError, match=r"az://container/key.* 409 BlobAlreadyExists"):
        upload.complete(PART)
    upload.abort()
    assert azure.content == b"of others"


def test_a_201_is_no_proof(azure: Azure, client: AzureClient) -> None:
    azure.rule = lambda what: azure.blob.pop() and None if what == "GET blocklist" and azure.blob else None
    upload = client.upload("key", PART)
    for number in range(3):
        upload.part(number, memoryview(bytes(PART)))
    with pytest.raises(OSError, match="has 2000 bytes in 2 parts, and 3000 bytes in 3 parts were written"):
        upload.complete(3 * PART)
    upload.abort()
    assert azure.blob is None, "it was this upload's"


def test_what_is_late_is_sent_or_asked_for_again(
    azure: Azure, client: AzureClient, caplog: pytest.LogCaptureFixture
) -> None:
    content = random_bytes(4 * PART)
    put(client, content)
    for what, ask in (("PUT block", "part 1"), ("GET blob", "bytes \\[0, 1000\\)")):
        azure.rule = once(what, 500, "", before=lambda: time.sleep(3.0))
        began_s = time.monotonic()
        if what == "GET blob":
            found = bytearray(PART)
            for _ in range(2):  # the first tells what is usual
                client.get_into("key", 0, memoryview(found), '"1"')
            assert found == content[:PART]
        else:
            client.upload("other", PART).part(0, memoryview(bytes(PART)))
        assert time.monotonic() - began_s < 3.0
        assert re.search(f"{ask}: late", caplog.text)


def test_another_version_is_neither_read_nor_deleted(azure: Azure, client: AzureClient) -> None:
    put(client, bytes(PART))
    with pytest.raises(FileExistsError):
        client.get_into("key", 0, memoryview(bytearray(3)), '"2"')
    assert azure.content == bytes(PART)


def test_no_signature_is_in_what_is_shown(
    azure: Azure, client: AzureClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has the URL of a request can send it again."""
    caplog.set_level("DEBUG")
    upload = client.upload("key", PART)
    said = []
    for rule in (once("PUT block", 403, "AuthorizationFailure"), lambda what: (500, "InternalError")):
        azure.rule = rule
        client.limits = Patience(first_pause_s=0.01, give_up_s=0.5, given_up_s=0.5)
        with pytest.raises(OSError, match="part 1") as caught:
            upload.part(0, memoryview(bytes(PART)))
        said.append(f"{caught.value} {caught.value.__cause__} {client!r}")
    azure.server.shutdown()
    azure.server.server_close()
    with pytest.raises(OSError, match="part 1") as caught:
        upload.part(0, memoryview(bytes(PART)))
    said.append(f"{caught.value} {caught.value.__cause__}")
    assert "attempt" in caplog.text
    assert not [text for text in (*said, caplog.text) if "sig=" in text or "se=2" in text]


def test_without_a_key_to_sign_with_obstore_does_it(azure: Azure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2023-11-03&sp=rw&sr=c&sig=abc")
    client = AzureClient("container", {"endpoint_url": f"http://127.0.0.1:{azure.server.server_address[1]}"})
    assert client.signed("PUT", "key") is None
    upload = client.upload("key", PART)
    assert type(upload).__name__ == "_StreamedUpload"
    upload.abort()
