"""Checkpoints in an object store, on a server: saved, loaded, replaced, pruned; and what goes wrong on the way."""

from __future__ import annotations

import contextlib
import errno
import http.client
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mcore_ckpt import (
    FileSystemReader,
    FileSystemWriterAsync,
    LoadError,
    LoadOptions,
    SaveError,
    SaveOptions,
    verify_checkpoint,
)
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import CheckpointError, CheckpointExistsError
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.directory.target import write_common
from mcore_ckpt.load.read_requests import ReadRequest
from mcore_ckpt.storage import _object_client, _object_readers
from mcore_ckpt.storage._http import HttpServer
from mcore_ckpt.storage._object_client import Patience, RequestError
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.target.directory import target_folder
from tests.support.forked import in_child
from tests.support.gcs_server import ObjectDirectory
from tests.support.local_files import MIB, random_bytes
from tests.support.object_server import Fault, Proxy, Request, needs

KINDS = [kind for kind, other in (("s3", "GCS"), ("gcs", "S3")) if f"MCORE_CKPT_TEST_{other}" not in os.environ]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# DCP wraps what a rank raises in an exception that is none.
FAILED = (CheckpointError, CheckpointException)


def state(value: float = 1.0, rows: int = 600) -> dict[str, Any]:
    return {"weight": torch.full((rows, 5000), value), "step": torch.tensor(int(value)), "told": {"value": value}}


def save(url: str | Path, value: float = 1.0, rows: int = 600, **options: Any) -> None:
    writer = FileSystemWriterAsync(url, options=SaveOptions(progress=False, **options))
    dcp.save(state(value, rows), storage_writer=writer, no_dist=True)


def loaded(url: str | Path, rows: int = 600) -> float:
    """The value that all of a checkpoint has."""
    found = state(0.0, rows)
    dcp.load(found, storage_reader=FileSystemReader(url), no_dist=True)
    _object_readers.wait_for_ends()
    value = float(found["told"]["value"])
    assert torch.equal(found["weight"], torch.full((rows, 5000), value))
    assert int(found["step"]) == int(value)
    return value


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def be(**seconds: float) -> None:
        monkeypatch.setattr(_object_client, "_patience", Patience(**seconds))

    return be


@pytest.fixture(params=KINDS)
def object_directory(request: pytest.FixtureRequest) -> Any:
    """A prefix in a store, of each kind."""
    return request.getfixturevalue(f"{request.param}_directory")


@pytest.fixture
def proxied(object_directory: ObjectDirectory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The store, by way of a proxy."""
    with Proxy(object_directory.server) as proxy:
        monkeypatch.setenv(object_directory.variable, proxy.url)
        yield proxy


def test_a_checkpoint_is_saved_replaced_loaded_and_looked_at(
    object_directory: ObjectDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{object_directory.url}/iter_0000001"
    for value in (1.0, 2.0):
        save(url, value)
        assert loaded(url) == value
        assert verify_checkpoint(url).whole
    files = [name for name in object_directory.names() if name.endswith(".distcp")]
    index = object_directory.names()[0]
    assert index == "iter_0000001/.metadata"
    saves = {name.split(".")[1] for name in files}
    assert len(saves) == 1, "the replaced save's files are gone"
    assert object_directory.names() == [index, *files]
    assert object_directory.uploads() == []
    save(f"{object_directory.url}/iter_0000002", 3.0)
    assert main(["list", object_directory.url]) == 0
    assert main(["inspect", url]) == 0
    assert main(["prune", object_directory.url, "--keep-last", "1", "--yes"]) == 0
    assert url not in capsys.readouterr().err
    assert {name.split("/")[0] for name in object_directory.names()} == {"iter_0000002"}


def test_large_files_go_in_parts_and_come_back_whole(proxied: Proxy, object_directory: ObjectDirectory) -> None:
    save(object_directory.url, 5.0, rows=2000, thread_count=1)  # 40 MB
    parts = [request for request in proxied.requests if request.part]
    assert len(parts) >= 4
    assert 8 * MIB <= max(part.size_bytes for part in parts) < 8 * MIB + 1000
    assert loaded(object_directory.url, rows=2000) == 5.0


def test_a_store_gets_more_requests_at_once_than_a_disk(proxied: Proxy, object_directory: ObjectDirectory) -> None:
    """Each takes two seconds: those that come within one were sent together."""
    came_s: dict[bool, list[float]] = {True: [], False: []}
    read = 0

    def rule(request: Request) -> Fault | None:
        nonlocal read
        is_read = request.reads and request.key.endswith(".distcp")
        read += is_read
        if request.part or (is_read and read > 1):  # a file is opened by one request
            came_s[is_read].append(time.monotonic())
            return Fault("late", seconds=2.0)
        return None

    proxied.rule = rule
    save(object_directory.url, 5.0, rows=2000, thread_count=1)  # 40 MB, five parts
    assert loaded(object_directory.url, rows=2000) == 5.0
    for is_read, times_s in came_s.items():
        assert max(sum(first_s <= at_s < first_s + 1.0 for at_s in times_s) for first_s in times_s) >= 5, is_read


def test_few_answers_are_waited_for_one_after_the_other(proxied: Proxy, object_directory: ObjectDirectory) -> None:
    """Each takes 0.3 seconds: what comes within half of that was sent together."""
    save(f"{object_directory.url}/first")  # the store is asked what it can do
    rounds: list[tuple[float, list[Request]]] = []
    lock = threading.Lock()

    def rule(request: Request) -> Fault:
        with lock:
            now_s = time.monotonic()
            if not rounds or now_s >= rounds[-1][0] + 0.15:
                rounds.append((now_s, []))
            rounds[-1][1].append(request)
        return Fault("late", seconds=0.3)

    proxied.rule = rule
    save(f"{object_directory.url}/second", rows=6)
    writes = [number for number, (_, sent) in enumerate(rounds) if any("distcp" in each.key for each in sent)]
    assert writes[0] <= 3, "requests before the first data file is begun"
    assert len(rounds) <= 15, "and one of the heartbeat"
    rounds.clear()
    assert loaded(f"{object_directory.url}/second", rows=6) == 1.0
    assert len(rounds) <= 5, "index; object; file and tensor; that nothing is read any more, which is not waited for"


def test_an_object_is_read_in_ranges_of_what_is_wanted(proxied: Proxy, object_directory: ObjectDirectory) -> None:
    save(object_directory.url, 5.0, rows=2000)
    proxied.requests.clear()
    with storage_at(object_directory.url).open_reader(
        next(name for name in storage_at(object_directory.url).list() if name.endswith(".distcp"))
    ) as reader:
        reader.read(5 * MIB, 1000)
    assert [request.reads for request in proxied.requests if not request.lists] == [True, True]


def test_columns_of_a_matrix_are_read_with_their_gaps_where_a_request_costs_more(
    proxied: Proxy, object_directory: ObjectDirectory
) -> None:
    """Rows of 160 KB, of which the half is requested: a disk is asked row by row, a store for a window at a time."""
    matrix = torch.arange(100 * 40_000, dtype=torch.float32).reshape(100, 40_000)
    dcp.save({"weight": matrix}, storage_writer=FileSystemWriterAsync(object_directory.url), no_dist=True)
    reader = FileSystemReader(object_directory.url, options=LoadOptions(verify_slices="off"))
    half = torch.zeros(100, 20_000)
    proxied.requests.clear()
    reader.read_items([ReadRequest("weight", half, (0, 20_000), (100, 20_000))])
    assert torch.equal(half, matrix[:, 20_000:])
    assert len(proxied.requests) < 10


# What a store answers is no proof


@pytest.mark.parametrize(
    ("what", "kind"), [(".metadata", "pretended"), (".metadata", "status"), (".distcp", "pretended")]
)
def test_a_put_that_was_answered_and_not_done_leaves_the_checkpoint_before(
    proxied: Proxy, object_directory: ObjectDirectory, patient: Callable[..., None], what: str, kind: Any
) -> None:
    patient(give_up_s=1.0, first_pause_s=0.05)
    save(object_directory.url, 1.0, rows=20)
    proxied.rule = lambda request: Fault(kind, status=200) if request.makes and request.key.endswith(what) else None
    with pytest.raises(FAILED, match=r"holds it|holds this|names no version|and holds nothing"):
        save(object_directory.url, 2.0, rows=20)
    proxied.rule = lambda request: None
    assert loaded(object_directory.url, rows=20) == 1.0


def test_a_large_object_whose_answer_was_lost_is_found_made(proxied: Proxy, object_directory: ObjectDirectory) -> None:
    content = bytes(65 * MIB)  # more than an answer may have that is held in memory
    lost: list[int] = []

    def rule(request: Request) -> Fault | None:
        if request.makes and not lost:
            lost.append(request.number)
            return Fault("lost")
        return None

    proxied.rule = rule
    storage = storage_at(object_directory.url)
    storage.create("large", content)
    assert storage.size("large") == len(content)


# What goes wrong for a moment


@pytest.mark.parametrize("kind", ["status", "reset", "lost", "truncated"])
def test_what_goes_wrong_for_a_moment_is_repeated(
    kind: Any, proxied: Proxy, object_directory: ObjectDirectory, patient: Callable[..., None]
) -> None:
    """Every second request of each kind fails once; the checkpoint is saved, whole, and leaves nothing else."""
    patient(first_pause_s=0.01)
    struck: dict[tuple[str, str, str], int] = {}
    lock = threading.Lock()

    def rule(request: Request) -> Fault | None:
        if kind == "truncated" and not request.reads:
            return None
        with lock:
            place = (request.method, request.path, request.query)
            count = struck[place] = struck.get(place, 0) + 1
        return Fault(kind) if count == 1 else None

    proxied.rule = rule
    save(object_directory.url, 4.0, rows=1000)
    assert loaded(object_directory.url, rows=1000) == 4.0
    assert sum(count > 1 for count in struck.values()) >= (2 if kind == "truncated" else 8)
    names = object_directory.names()
    assert [name for name in names if not name.endswith(".distcp")] == [".metadata"]
    assert object_directory.uploads() == []


@needs("checksums")
def test_a_part_that_is_changed_on_the_way_is_noticed(
    proxied: Proxy, object_directory: ObjectDirectory, patient: Callable[..., None]
) -> None:
    """moto compares no checksum of a part, as some look-alikes of S3 do not: that of the object tells. Google's store
    does.
    """
    patient(first_pause_s=0.01, give_up_s=3.0)
    proxied.rule = lambda request: Fault("damaged") if request.part == 2 else None
    with pytest.raises(
        FAILED, match=r"the store says that its CRC-32 is .*, and .* was written|part 2: 4.*(Digest|CRC32C|crc32c)"
    ):
        save(object_directory.url, 4.0, rows=1000)
    assert object_directory.names() == [".mcore_ckpt_incomplete"]


def test_a_store_that_answers_503_to_everything_is_named(
    proxied: Proxy, object_directory: ObjectDirectory, patient: Callable[..., None]
) -> None:
    patient(first_pause_s=0.01, give_up_s=0.5)
    proxied.rule = lambda request: Fault("status")
    with pytest.raises(FAILED, match=r"503 Injected503.*attempts in") as failure:
        save(object_directory.url)
    assert "test-secret" not in str(failure.value)
    for look in (lambda: loaded(object_directory.url), lambda: verify_checkpoint(object_directory.url)):
        with pytest.raises(FAILED, match=r"503 .*attempts in"):
            look()
    assert main(["list", object_directory.url]) == 2
    assert object_directory.names() == []


def test_a_part_that_is_late_is_sent_again_and_the_first_counts(
    proxied: Proxy,
    object_directory: ObjectDirectory,
    patient: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log names rank, object, part and seconds."""
    patient(late_s=0.3, late_factor=3.0, idle_s=60.0)
    monkeypatch.setenv("RANK", "7")
    seen: list[Request] = []

    def rule(request: Request) -> Fault | None:
        if request.part != 3:
            return None
        seen.append(request)
        return Fault("stall", seconds=60) if len(seen) == 1 else None

    proxied.rule = rule
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        save(object_directory.url, 6.0, rows=2000, thread_count=1, io_threads=1)
    assert len(seen) == 2
    assert time.monotonic() - started < 30, "the first attempt was waited for"
    named = rf"rank 7: PUT {re.escape(object_directory.url)}/__0_0\.\w+\.distcp, part 3: late \(\d+\.\d s\)"
    assert re.search(named, caplog.text)
    assert loaded(object_directory.url, rows=2000) == 6.0


def test_a_range_that_is_late_is_asked_for_again(
    proxied: Proxy, object_directory: ObjectDirectory, patient: Callable[..., None]
) -> None:
    patient(late_s=0.3, late_factor=3.0, idle_s=60.0)
    content = random_bytes(MIB)
    object_directory.put("file", content)
    stalled: list[Request] = []

    def rule(request: Request) -> Fault | None:
        if request.reads and not stalled:
            stalled.append(request)
            return Fault("stall", seconds=60)
        return None

    with storage_at(object_directory.url).open_reader("file") as reader:
        reader.read(200_000, 100_000)  # tells what is usual
        proxied.rule = rule
        started = time.monotonic()
        assert reader.read(100_000, 500_000) == content[100_000:600_000]
    assert stalled
    assert time.monotonic() - started < 30


def test_a_store_that_is_slow_with_everything_gets_few_requests_twice(
    proxied: Proxy, object_directory: ObjectDirectory, patient: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    patient(late_s=0.1, late_factor=1.0)
    save(object_directory.url, 1.0, rows=2000)  # (what requests take usually)
    caplog.clear()
    proxied.rule = lambda request: Fault("late", seconds=2.0) if request.part else None
    save(object_directory.url, 2.0, rows=2000)
    assert sum("it is sent again" in record.getMessage() for record in caplog.records) <= 3
    assert loaded(object_directory.url, rows=2000) == 2.0


def test_a_store_that_stalls_for_ever_ends_the_save_with_the_part_named(
    proxied: Proxy, object_directory: ObjectDirectory, patient: Callable[..., None]
) -> None:
    patient(idle_s=2.0, give_up_s=5.0, first_pause_s=0.01, late_s=10.0)
    save(object_directory.url, 1.0)

    proxied.rule = lambda request: Fault("stall", seconds=30) if request.part == 2 else None
    started = time.monotonic()
    with pytest.raises(FAILED, match=r"\.distcp, part 2: no answer within \S+ s \(\d+ attempts"):
        save(object_directory.url, 2.0, rows=2000, io_threads=2)
    assert time.monotonic() - started < 25
    proxied.rule = lambda request: None
    assert loaded(object_directory.url) == 1.0
    assert object_directory.uploads() == []
    assert len(object_directory.names()) == 3


def test_a_deadline_names_the_part_that_is_waited_for(
    proxied: Proxy, object_directory: ObjectDirectory, patient: Callable[..., None]
) -> None:
    patient(idle_s=5.0, given_up_s=1.0)
    proxied.rule = lambda request: Fault("stall", seconds=30) if request.part == 2 else None
    with pytest.raises(FAILED, match=r", part 2: no answer within|\(part 2 for \d\.\d s\): no write has ended"):
        save(object_directory.url, rows=2000, write_deadline_s=6.0, io_threads=1, thread_count=1)
    assert ".metadata" not in object_directory.names()


def test_a_store_that_was_given_up_is_waited_for_less(
    proxied: Proxy, object_directory: ObjectDirectory, patient: Callable[..., None]
) -> None:
    """Otherwise a save that has failed would wait for each request by which it cleans up."""
    patient(give_up_s=3.0, given_up_s=0.3, first_pause_s=0.05, longest_pause_s=0.05)
    proxied.rule = lambda request: Fault("status")
    storage = storage_at(object_directory.url)
    counts = []
    for _ in range(3):
        proxied.requests.clear()
        with pytest.raises(LoadError):
            storage.list()
        counts.append(len(proxied.requests))
    assert counts[0] > 3 * max(counts[1:])
    proxied.rule = lambda request: None
    patient()
    assert storage.list() == []


@pytest.mark.parametrize("stalls", ["part", "commit", "all"])
def test_nothing_waits_longer_than_the_deadline(
    stalls: str, proxied: Proxy, object_directory: ObjectDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(object_directory.url, 1.0)

    def rule(request: Request) -> Fault | None:
        if not stalled:
            begins = {"part": request.part == 2, "commit": request.key.endswith(".publish")}
            if not begins.get(stalls, True) or not request.changes:
                return None
        stalled.append(request)
        return Fault("stall", seconds=120)

    stalled: list[Request] = []
    proxied.rule = rule
    started = time.monotonic()
    with pytest.raises(FAILED):
        save(object_directory.url, 2.0, rows=2000, write_deadline_s=6.0)
    assert stalled
    assert time.monotonic() - started < 30, "without a deadline a request alone may take 300 s"
    proxied.rule = lambda request: None
    assert loaded(object_directory.url) == 1.0
    monkeypatch.setenv(object_directory.variable, object_directory.server)
    save(object_directory.url, 3.0)
    assert object_directory.uploads() == []
    assert len(object_directory.names()) == 3


def test_a_200_is_no_proof(proxied: Proxy, object_directory: ObjectDirectory, patient: Callable[..., None]) -> None:
    """A store that has completed an upload, and lost a part of it."""
    patient(first_pause_s=0.01)

    def lose_a_part(request: Request) -> Fault | None:
        if request.looks and request.key in completed:
            name = request.key.rpartition("/")[2]
            content = object_directory.get(name)
            object_directory.put(name, content[: -8 * MIB])
        if request.completes:
            completed.append(request.key)
        return None

    completed: list[str] = []
    proxied.rule = lose_a_part
    with pytest.raises(FAILED, match=r"the store says that it has \d+ bytes, and \d+ were written"):
        save(object_directory.url, rows=2000)
    assert ".metadata" not in object_directory.names()


@needs("conditional-deletions")
def test_what_has_replaced_an_object_at_that_moment_is_left_alone(
    proxied: Proxy, object_directory: ObjectDirectory
) -> None:
    """Between the question whose it is, and its removal."""
    writer = storage_at(object_directory.url).open_writer("file", size_bytes=20 * MIB)
    writer.write(0, memoryview(random_bytes(20 * MIB)))
    writer.finish(20 * MIB)

    def replace(request: Request) -> Fault | None:
        if request.deletes:
            object_directory.put("file", b"of others")
        return None

    proxied.rule = replace
    writer.abort()
    assert proxied.changes()[-1].deletes
    assert object_directory.get("file") == b"of others"


def test_no_credential_is_in_what_is_shown_or_sent(object_directory: ObjectDirectory) -> None:
    import pickle

    storage = storage_at(object_directory.url)
    storage.publish("file", b"x")
    shown = [repr(storage), str(storage.__dict__), repr(storage._client), str(vars(storage._client))]  # type: ignore[attr-defined]
    for text in (*shown, pickle.dumps(storage).decode("latin1")):
        assert "test-secret" not in text
        assert "test-key" not in text
    assert pickle.loads(pickle.dumps(storage)).read("file") == b"x"


def test_wrong_credentials_and_buckets_are_named(
    object_directory: ObjectDirectory, proxied: Proxy, patient: Callable[..., None]
) -> None:
    with pytest.raises(LoadError, match=r"://no-such-bucket.*404 .*request"):
        storage_at(f"{object_directory.scheme}://no-such-bucket/x").list()
    proxied.rule = lambda request: Fault("status", status=403) if request.makes else None
    with pytest.raises(SaveError, match=r"403 Injected403.*EACCES.*check that this user may write there"):
        storage_at(object_directory.url).publish("file", b"x")
    assert len([request for request in proxied.requests if request.makes]) == 1, "a refusal is final"


# Crashes, refusals and races: the old checkpoint or the new one, and nothing left over after the next save


@pytest.mark.parametrize("trickles", ["the headers", "the body"])
def test_an_answer_that_never_stops_coming_is_ended(trickles: str, patient: Callable[..., None]) -> None:
    """A byte comes every 10 ms, so the server is never idle; all of it would take more than an hour."""
    sent_bytes: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with listening.accept()[0] as connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\n")
                if trickles == "the body":
                    connection.sendall(b"Content-Length: 400000\r\n\r\n")
                for number in range(400_000):
                    connection.sendall(b"x")
                    sent_bytes.append(number)
                    time.sleep(0.01)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        server = HttpServer(f"http://127.0.0.1:{listening.getsockname()[1]}")
        patient(attempt_s=0.3)
        with pytest.raises(RequestError, match="too slow") as caught:
            server.request("GET", "/", {})
        thread.join()
    assert caught.value.errno == errno.ETIMEDOUT
    assert caught.value.again
    assert caught.value.unclear
    assert 0 < len(sent_bytes) < 400_000


def test_a_store_that_takes_the_bytes_slowly_and_steadily_is_waited_for(
    patient: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 KiB every 30 ms: so 1 MiB takes longer than nothing may be taken for."""
    size = 3 * MIB
    connect = http.client.HTTPConnection.connect

    def connect_with_a_small_buffer(self: http.client.HTTPConnection) -> None:
        connect(self)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", connect_with_a_small_buffer)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        listening.bind(("127.0.0.1", 0))
        listening.listen()

        def take() -> None:
            with listening.accept()[0] as connection, contextlib.suppress(OSError):
                taken_bytes = 0
                while taken_bytes < size:
                    taken_bytes += len(connection.recv(64 * 1024))
                    time.sleep(0.03)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        server = HttpServer(f"http://127.0.0.1:{listening.getsockname()[1]}")
        patient(idle_s=0.4)
        began_s = time.monotonic()
        assert server.request("PUT", "/", {}, random_bytes(size)).status == 200
        assert time.monotonic() - began_s > 3 * 0.4, "it was not slow"
        thread.join()


def test_a_key_that_xml_cannot_hold_and_an_answer_that_is_none_disturb_nothing(
    proxied: Proxy, object_directory: ObjectDirectory, patient: Callable[..., None]
) -> None:
    """S3 allows control characters in keys; others' objects may lie in the directory."""
    patient(first_pause_s=0.01)
    save(object_directory.url, rows=2)
    struck: list[Request] = []

    def no_xml_once(request: Request) -> Fault | None:
        if not request.lists or struck:
            return None
        struck.append(request)
        return Fault("pretended")

    for key in ("note%08s.txt", "line%0Dfeed", "a%20b%2Bc", "100%25"):
        object_directory.put(key, b"of somebody else")
    proxied.rule = no_xml_once
    save(object_directory.url, 2.0, rows=2)
    assert struck
    assert loaded(object_directory.url, rows=2) == 2.0
    assert verify_checkpoint(object_directory.url).whole
    assert {"note\x08s.txt", "line\rfeed", "a b+c", "100%"} < set(storage_at(object_directory.url).list())


def strike(proxy: Proxy, url: str, how: str, number: int | None) -> list[Request]:
    """A save of 2.0 over 1.0, of which the changing request `number` fails, or is the last of the process.

    Returns all of its requests that change something.
    """
    save(url, 1.0)
    proxy.requests.clear()
    child: list[int] = []
    ready = threading.Event()

    def kill() -> None:
        ready.wait()
        os.kill(child[0], signal.SIGKILL)
        os.waitpid(child[0], 0)

    fault = {
        "refused": Fault("status", status=403),
        "killed before": Fault("reset", then=kill),
        "killed after": Fault("lost", then=kill),
    }[how]

    def rule(request: Request) -> Fault | None:
        return fault if request.changes and number is not None and len(proxy.changes()) == number + 1 else None

    proxy.rule = rule
    try:
        if how == "refused":
            with contextlib.suppress(*FAILED):
                save(url, 2.0, rows=1000, io_threads=1, thread_count=1)
            return proxy.changes()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                save(url, 2.0, rows=1000, io_threads=1, thread_count=1)
            os._exit(0)
        child.append(pid)
        ready.set()
        with contextlib.suppress(ChildProcessError):  # (the proxy has waited for it)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            # A save that takes longer renews its lock more often: this one may have had fewer requests.
            struck = number is not None and len(proxy.changes()) > number
            assert code == (-signal.SIGKILL if struck else 0)
        return proxy.changes()
    finally:
        proxy.rule = lambda request: None


def old_or_new(url: str) -> float:
    try:
        return loaded(url)
    except (*FAILED, ValueError):
        return loaded(url, rows=1000)


def sweep(proxy: Proxy, directory: ObjectDirectory, how: str, chosen: Callable[[Request], bool]) -> list[float]:
    """Strike at each of the chosen requests; returns what was found after each."""
    requests = strike(proxy, f"{directory.url}/recorded", how, None)
    found = []
    for number, request in enumerate(requests):
        if not chosen(request):
            continue
        url = f"{directory.url}/{how.replace(' ', '-')}-{number}"
        strike(proxy, url, how, number)
        value = old_or_new(url)
        assert value in (1.0, 2.0), request
        assert verify_checkpoint(url).whole
        found.append(value)
        save(url, 3.0)
        assert loaded(url) == 3.0
        name = url.rpartition("/")[2]
        # The lease of a reader that is not collected yet, or was killed, is no part of a save: it ends by itself.
        left = [each for each in directory.names() if each.startswith(f"{name}/") and "_reading." not in each]
        saves = {each.split(".")[1] for each in left if each.endswith(".distcp")}
        assert len(saves) == 1, (request, left)
        assert [each for each in left if not each.endswith(".distcp")] == [f"{name}/.metadata"], request
        assert [each for each in directory.uploads() if each.startswith(f"{name}/")] == [], request
    return found


COMMIT = (".publish", "/.metadata")
HOWS = ["refused", "killed before", "killed after"]


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.parametrize("how", HOWS)
def test_a_crash_at_the_commit_leaves_the_old_or_the_new(
    how: str, proxied: Proxy, object_directory: ObjectDirectory
) -> None:
    found = sweep(
        proxied,
        object_directory,
        how,
        lambda request: request.makes and request.key.endswith((".publish", "/.metadata")),
    )
    # The token is made empty, the store may be tried by it, it is written, and then `.metadata`.
    assert len(found) >= 3
    assert found[:-1] == [1.0] * (len(found) - 1)
    assert found[-1] == (2.0 if how == "killed after" else 1.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.crash
@pytest.mark.parametrize("how", HOWS)
def test_a_crash_at_any_request_leaves_the_old_or_the_new(
    how: str, proxied: Proxy, object_directory: ObjectDirectory
) -> None:
    found = sweep(proxied, object_directory, how, lambda request: True)
    assert len(found) >= 18
    assert found == sorted(found), "once the new one is there, it stays"
    assert set(found) == {1.0, 2.0}


def test_what_a_token_says_is_published_by_the_save_that_takes_over(
    proxied: Proxy, object_directory: ObjectDirectory
) -> None:
    """Killed between the token and `.metadata`: then the next save completes it, and replaces it."""
    storage = storage_at(object_directory.url)
    storage.publish(".metadata", b"old")
    storage.create("token", b"")
    proxied.rule = lambda request: (
        Fault("status", status=403) if request.makes and request.key.endswith("/.metadata") else None
    )
    written: list[bytes] = []
    closing = storage._client.put  # type: ignore[attr-defined]

    def no_second_thought(key: str, content: bytes, condition: Any = None) -> str:
        if content == b"closed":
            raise OSError(errno.EREMOTEIO, "the process is gone by now")
        written.append(content)
        return closing(key, content, condition)

    storage._client.put = no_second_thought  # type: ignore[attr-defined]
    try:
        with pytest.raises(SaveError, match="403"):
            storage.publish(".metadata", b"new", through="token")
    finally:
        del storage._client.put  # type: ignore[attr-defined]
    proxied.rule = lambda request: None
    assert object_directory.get(".metadata") == b"old"
    other = storage_at(object_directory.url)
    other.revoke("token")
    assert object_directory.get(".metadata") == b"new"
    other.publish(".metadata", b"newer")
    with pytest.raises(SaveError):
        storage.publish(".metadata", b"new", through="token")
    assert object_directory.get(".metadata") == b"newer"


def held_up(proxy: Proxy, directory: ObjectDirectory) -> tuple[threading.Event, threading.Event]:
    """The next put of `.metadata` arrives when the first event is set, and sets the second; those after it are refused
    until then.
    """
    goes_on, arrived, held = threading.Event(), threading.Event(), threading.Event()

    def rule(request: Request) -> Fault | None:
        if not (request.makes and request.key.endswith("/.metadata")):
            return None
        if held.is_set():
            return Fault("status", status=503) if not goes_on.is_set() else None
        held.set()
        goes_on.wait(60.0)
        arrived.set()
        return None

    proxy.rule = rule
    return goes_on, arrived


@pytest.mark.parametrize("next_save", ["fails", "is whole"])
def test_a_commit_that_was_given_up_arrives_too_late_once_the_next_save_has_begun(
    proxied: Proxy, object_directory: ObjectDirectory, patient: Callable[..., None], next_save: str
) -> None:
    """What it names is not swept while it could still come into force."""
    url = f"{object_directory.url}/iter_0000001"
    save(url, 1.0, rows=2)
    patient(give_up_s=1.5, idle_s=0.5, first_pause_s=0.05)
    goes_on, arrived = held_up(proxied, object_directory)
    with pytest.raises(FAILED, match="may still come into force"):
        save(url, 2.0, rows=2)
    patient()
    assert loaded(url, rows=2) == 1.0
    commit = proxied.rule
    proxied.rule = lambda request: (
        Fault("status", status=403) if next_save == "fails" and request.key.endswith(".distcp") else None
    )
    if next_save == "fails":
        with pytest.raises(FAILED, match="403"):
            save(url, 3.0, rows=2)
    else:
        save(url, 3.0, rows=2)
    proxied.rule = commit
    before = loaded(url, rows=2)
    goes_on.set()
    assert arrived.wait(60.0)
    time.sleep(1.0)  # it is refused
    assert loaded(url, rows=2) == before == (2.0 if next_save == "fails" else 3.0)
    assert verify_checkpoint(url).whole
    save(url, 4.0, rows=2)
    assert loaded(url, rows=2) == 4.0
    left = [name for name in object_directory.names() if "_reading." not in name]
    assert [name for name in left if not name.endswith(".distcp")] == ["iter_0000001/.metadata"]
    assert len({name.split(".")[1] for name in left if name.endswith(".distcp")}) == 1


def test_whether_a_token_may_yet_be_written_is_decided(
    proxied: Proxy, object_directory: ObjectDirectory, patient: Callable[..., None]
) -> None:
    """The put by which it was to say what is published arrives when the save counts as failed."""
    storage = storage_at(object_directory.url)
    storage.publish(".metadata", b"old")
    storage.create("token", b"")
    held, goes_on, refuses = threading.Event(), threading.Event(), threading.Event()
    answered: list[int] = []

    def rule(request: Request) -> Fault | None:
        if not (request.makes and request.key.endswith("/token")):
            return None
        if not held.is_set():
            held.set()
            goes_on.wait(60.0)
            return None
        return Fault("status", status=503) if refuses.is_set() else None

    passed = proxied.pass_on

    def pass_on(handler: Any, body: bytes) -> Any:
        is_held = goes_on.is_set()
        answer = passed(handler, body)
        if is_held:
            answered.append(answer[0])
        return answer

    proxied.pass_on = pass_on  # type: ignore[method-assign]
    proxied.rule = rule
    refuses.set()
    patient(give_up_s=1.5, idle_s=0.5, first_pause_s=0.05)
    with pytest.raises(SaveError):
        storage.publish(".metadata", b"new", through="token")
    assert held.is_set()
    assert storage.may_yet_publish("token"), "the store does not say"
    refuses.clear()
    patient()
    assert not storage.may_yet_publish("token")
    with pytest.raises(SaveError, match="token is gone"):
        storage.publish(".metadata", b"new", through="token")
    goes_on.set()
    until_s = time.monotonic() + 60.0
    while not answered:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert answered == [412]
    storage.revoke("token")
    assert object_directory.get(".metadata") == b"old"


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_common_state_that_is_late_is_not_put_over_that_of_a_later_save(
    proxied: Proxy, object_directory: ObjectDirectory, taken_over: bool
) -> None:
    """Held up after its publish, between reading what waits and putting it where it belongs."""
    storage = storage_at(object_directory.url)
    for value in (1.0, 2.0):
        if value == 2.0 and taken_over:
            proxied.rule = lambda request: (
                object_directory.put("common.pt", b"of the other")
                if request.reads and request.key.endswith(".pending")
                else None
            )
        write_common(storage, b"%d" % value)
        save(object_directory.url, value, rows=2)
    proxied.rule = lambda request: None
    assert object_directory.get("common.pt") == (b"of the other" if taken_over else b"2")


CHANGES: dict[str, tuple[Callable[[Any, bytes], object], Callable[[Request], bool]]] = {
    "publish": (lambda storage, content: storage.publish("tracker.txt", content), lambda request: request.makes),
    "move": (
        lambda storage, content: (storage.create("pending", content), storage.move("pending", "tracker.txt")),
        lambda request: request.makes and request.key.endswith("tracker.txt"),
    ),
    "delete": (lambda storage, content: storage.delete("tracker.txt"), lambda request: request.deletes),
    "delete_own": (
        lambda storage, content: storage.delete_own("tracker.txt", lambda found: found == b"1"),
        lambda request: request.deletes,
    ),
}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, marks=[needs("conditional-deletions")] if change.startswith("delete") else [])
        for change in CHANGES
    ],
)
def test_an_attempt_that_arrives_after_a_later_change_does_nothing(
    proxied: Proxy, object_directory: ObjectDirectory, patient: Callable[..., None], change: str
) -> None:
    """Its answer has not come in time, another attempt has done it, and others have gone on from there."""
    patient(idle_s=0.5, first_pause_s=0.05)
    do, strikes = CHANGES[change]
    storage = storage_at(object_directory.url)
    storage.publish("tracker.txt", b"1")
    held, goes_on = threading.Event(), threading.Event()
    answered: list[int] = []

    def rule(request: Request) -> Fault | None:
        if held.is_set() or not strikes(request):
            return None
        held.set()
        goes_on.wait(60.0)
        return None

    passed = proxied.pass_on

    def pass_on(handler: Any, body: bytes) -> Any:
        is_held = held.is_set() and goes_on.is_set()
        answer = passed(handler, body)
        if is_held:
            answered.append(answer[0])
        return answer

    proxied.pass_on = pass_on  # type: ignore[method-assign]
    proxied.rule = rule
    do(storage, b"2")
    assert held.is_set()
    assert storage.exists("tracker.txt") == (not change.startswith("delete"))
    storage.publish("tracker.txt", b"3")
    goes_on.set()
    until_s = time.monotonic() + 60.0
    while not answered:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert answered == [412]
    assert object_directory.get("tracker.txt") == b"3"


def test_files_of_a_target_stay_if_it_may_still_be_complete(
    proxied: Proxy, object_directory: ObjectDirectory, patient: Callable[..., None]
) -> None:
    """As a reshard or an import makes one."""
    patient(give_up_s=1.0, idle_s=0.4, first_pause_s=0.05)
    directory = checkpoint_path(f"{object_directory.url}/target")
    storage = storage_at(directory)
    goes_on, arrived = held_up(proxied, object_directory)

    def make() -> None:
        with target_folder(directory, "") as made:
            made.note(["__0_0.distcp"])
            storage.publish("__0_0.distcp", b"data")
            made.publish(".metadata", b"index")

    with pytest.raises(SaveError, match="may still come into force"):
        make()
    assert storage.read("__0_0.distcp") == b"data"
    patient()
    # The next run completes it, and what arrives then is refused.
    commit, proxied.rule = proxied.rule, lambda request: None
    with pytest.raises(CheckpointExistsError):
        make()
    proxied.rule = commit
    goes_on.set()
    assert arrived.wait(60.0)
    assert storage.read(".metadata") == b"index"
    assert storage.read("__0_0.distcp") == b"data"


def test_uploads_of_a_save_that_is_gone_are_aborted_by_prune(object_directory: ObjectDirectory) -> None:
    for iteration in (1, 2):
        save(f"{object_directory.url}/iter_{iteration:07d}", float(iteration))
    upload = storage_at(f"{object_directory.url}/iter_0000001").open_writer(
        "__0_9.00112233aabbccdd.distcp", size_bytes=20 * MIB
    )
    upload.write(0, memoryview(bytes(8 * MIB)))
    assert object_directory.uploads() == ["iter_0000001/__0_9.00112233aabbccdd.distcp"]
    assert main(["prune", object_directory.url, "--keep-last", "1", "--yes"]) == 0
    assert object_directory.uploads() == []
    assert {name.split("/")[0] for name in object_directory.names()} == {"iter_0000002"}


def race(url: str, values: list[float]) -> list[int]:
    """Saves of these values at once, each in a process of its own; returns their exit codes."""
    pids = []
    for value in values:
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                save(url, value, rows=20)
                code = 0
            os._exit(code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@pytest.mark.parametrize("races", [4, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_of_jobs_that_save_at_once_into_one_directory_one_wins_and_no_mix_is_left(
    races: int, object_directory: ObjectDirectory
) -> None:
    for number in range(races):
        url = f"{object_directory.url}/{number}"
        if number % 2:
            save(url, 1.0, rows=20)
        values = [2.0, 3.0, 4.0]
        codes = race(url, values)
        won = [value for value, code in zip(values, codes, strict=True) if code == 0]
        assert won
        assert loaded(url, rows=20) in won
        left = [name.partition("/")[2] for name in object_directory.names() if name.startswith(f"{number}/")]
        assert len({name.split(".")[1] for name in left if name.endswith(".distcp")}) == 1, left
        assert [name for name in left if not name.endswith(".distcp")] == [".metadata"]


@pytest.mark.parametrize("object_directory", [kind for kind in KINDS if kind == "s3"], indirect=True)
@pytest.mark.parametrize("ignored", [("If-None-Match", "If-Match"), ("If-Match",)])
@needs("unsigned-requests")  # the proxy takes away a header that is signed
def test_a_store_that_ignores_conditions_is_named_once_and_serves_one_job(
    proxied: Proxy, object_directory: ObjectDirectory, caplog: pytest.LogCaptureFixture, ignored: tuple[str, ...]
) -> None:
    proxied.ignored_conditions = frozenset(name.lower() for name in ignored)
    with caplog.at_level(logging.WARNING):
        for value in (1.0, 2.0):
            save(object_directory.url, value)
            assert loaded(object_directory.url) == value
    assert caplog.text.count(f"does not keep this condition of a put: {', '.join(ignored)}.") == 1
    storage = storage_at(object_directory.url)
    storage.create("token", b"")
    before = len(proxied.requests)
    storage.publish("published", b"x", through="token")
    held_up = [request for request in proxied.requests[before:] if request.looks]
    assert len(held_up) > 3  # what a condition would say is asked for instead
    storage.create("lease", b"x")
    assert storage.lock("taken", "lease")
    assert not storage.lock("taken", "lease")


def test_a_forked_process_waits_for_no_request_of_its_parent() -> None:
    pace = _object_client.Pace()
    error = RequestError(errno.EREMOTEIO, "503 SlowDown", again=True, slow_down=True)
    for _ in range(8):
        with contextlib.suppress(RequestError), pace.request(time.monotonic() + 60):
            pace._halved_at_s = 0.0
            raise error
    in_flight = pace.request(time.monotonic() + 60)
    in_flight.__enter__()

    def ask() -> None:
        for _ in range(3):
            with pace.request(time.monotonic() + 60):
                pass

    in_child(ask, deadline_s=30)


def test_a_store_that_asks_to_slow_down_is_asked_less_at_once() -> None:
    pace = _object_client.Pace()
    soon = time.monotonic() + 60
    requests = [pace.request(soon) for _ in range(9)]
    for request in requests[:8]:
        request.__enter__()
    error = RequestError(errno.EREMOTEIO, "503 SlowDown", again=True, slow_down=True)
    assert not requests[0].__exit__(RequestError, error, None)
    for request in requests[1:4]:
        request.__exit__(None, None, None)
    entered = threading.Event()
    waiting = threading.Thread(target=lambda: (requests[8].__enter__(), entered.set()))
    waiting.start()
    assert not entered.wait(0.3), "half of eight are in flight"
    requests[4].__exit__(None, None, None)
    assert entered.wait(10)
    waiting.join()
