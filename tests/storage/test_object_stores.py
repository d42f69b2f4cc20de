"""Checkpoints in an object store, on a server: saved, loaded, replaced, pruned; and what goes wrong on the way."""

import contextlib
import os
import pickle
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from mcore_ckpt import LoadError, SaveError, verify_checkpoint
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import CheckpointError
from mcore_ckpt.directory import commit
from mcore_ckpt.directory.commit import Commit
from mcore_ckpt.storage._objects import ObjectClient
from mcore_ckpt.storage.resolve import storage_at
from tests.support.object_server import Fault, ObjectDirectory, Proxy, Request, S3Directory
from tests.support.processes import in_child
from tests.support.stored_saves import loaded, save, start_saving

KINDS = [kind for kind, other in (("s3", "GCS"), ("gcs", "S3")) if f"MCORE_CKPT_TEST_{other}" not in os.environ]

# DCP wraps what a rank raises in an exception that is none.
FAILED = (CheckpointError, CheckpointException)


# Else it is S3, or the store that a variable names.
on_each_kind = pytest.mark.parametrize("object_directory", KINDS, indirect=True)


@pytest.fixture
def proxied_s3(s3_directory: S3Directory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(s3_directory.server) as proxy:
        monkeypatch.setenv(s3_directory.variable, proxy.url)
        yield proxy


def strike(proxy: Proxy, chosen: Callable[[Request], bool], fault: Fault, times: int = 1) -> list[Request]:
    """The next so many of the chosen requests go wrong; returns where they are noted."""
    struck: list[Request] = []
    lock = threading.Lock()

    def rule(request: Request) -> Fault | None:
        with lock:
            if not chosen(request) or len(struck) >= times:
                return None
            struck.append(request)
        return fault

    proxy.rule = rule
    return struck


@on_each_kind
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
    save(f"{object_directory.url}/iter_0000002", 3.0)
    assert main(["list", object_directory.url]) == 0
    assert main(["inspect", url]) == 0
    assert main(["prune", object_directory.url, "--keep-last", "1", "--yes"]) == 0
    assert url not in capsys.readouterr().err
    assert {name.split("/")[0] for name in object_directory.names()} == {"iter_0000002"}


# What goes wrong for a moment


@pytest.mark.parametrize("kind", ["reset", "lost", "truncated"])
def test_what_goes_wrong_for_a_moment_is_repeated(
    kind: Any, proxied: Proxy, object_directory: ObjectDirectory, store_deadline: Callable[..., None]
) -> None:
    """Each request fails once; the checkpoint is saved, whole, and leaves nothing else."""
    store_deadline(10.0)  # fake-gcs-server gives no second answer when an upload has ended
    struck: dict[tuple[str, str, str, int], int] = {}
    lock = threading.Lock()

    def rule(request: Request) -> Fault | None:
        if kind == "truncated" and not request.reads:
            return None
        with lock:
            place = (request.method, request.path, request.query, request.size_bytes)
            count = struck[place] = struck.get(place, 0) + 1
        return Fault(kind) if count == 1 else None

    proxied.rule = rule
    save(object_directory.url, 4.0)
    assert loaded(object_directory.url) == 4.0
    assert sum(count > 1 for count in struck.values()) >= (2 if kind == "truncated" else 6)
    assert [name for name in object_directory.names() if not name.endswith(".distcp")] == [".metadata"]


FAULTS = {
    "the answer was lost": Fault("lost"),
    "the answer was 503, and it was done": Fault("forgotten"),
    "the store asks to slow down": Fault("status", status=503),
    "another request was in the way": Fault("status", status=409),
}


@on_each_kind
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_put_with_a_condition_is_done_once_whatever_becomes_of_its_answer(
    fault: Fault, proxied: Proxy, object_directory: ObjectDirectory, store_deadline: Callable[..., None]
) -> None:
    store_deadline(4.0)
    storage = storage_at(object_directory.url)
    struck = strike(proxied, lambda request: request.makes, fault)
    assert storage.replace_if(".metadata", b"old", None) is not None
    struck += strike(proxied, lambda request: request.makes, fault)
    storage.publish(".metadata", b"new")
    assert struck
    assert object_directory.get(".metadata") == b"new"
    assert storage.replace_if(".metadata", b"other", None) is None


@on_each_kind
def test_what_another_process_has_put_meanwhile_stays(proxied: Proxy, object_directory: ObjectDirectory) -> None:
    put = Fault("reset", then=lambda: object_directory.put("taken", b"of others"))
    assert strike(proxied, lambda request: request.makes, put) == []
    assert storage_at(object_directory.url).replace_if("taken", b"mine", None) is None
    assert object_directory.get("taken") == b"of others"


@pytest.mark.parametrize("name", [".metadata", ".distcp"])
def test_a_put_that_was_answered_and_not_done_leaves_the_checkpoint_before(
    proxied: Proxy, object_directory: ObjectDirectory, name: str
) -> None:
    save(object_directory.url, 1.0, rows=20)
    strike(proxied, lambda request: request.makes and request.key.endswith(name), Fault("pretended"), times=99)
    with pytest.raises(FAILED, match=r"holds this|and holds nothing"):
        save(object_directory.url, 2.0, rows=20)
    proxied.rule = lambda request: None
    assert loaded(object_directory.url, rows=20) == 1.0


def test_a_200_is_no_proof(proxied_s3: Proxy, s3_directory: S3Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that has completed an upload, and lost the end of it, which is a footer."""
    completed: list[str] = []

    def lose_a_part(request: Request) -> Fault | None:
        if request.looks and request.key in completed:
            name = request.key.rpartition("/")[2]
            s3_directory.put(name, s3_directory.get(name)[:-64])
        if request.completes:
            completed.append(request.key)
        return None

    proxied_s3.rule = lose_a_part
    monkeypatch.setattr(commit, "_FILES_APPEAR_WITHIN_S", 1.0)
    with pytest.raises(
        FAILED, match=r"planned with \d+ bytes, and has \d+\. .* has a store lost what it has confirmed"
    ):
        save(s3_directory.url, rows=2000)
    assert ".metadata" not in s3_directory.names()


def test_the_note_of_a_save_goes_last(proxied_s3: Proxy, s3_directory: S3Directory) -> None:
    """Behind it another job may begin, whose files what is late would remove or replace."""
    save(s3_directory.url, 1.0, rows=20)
    removed: list[str] = []

    def take_time(request: Request) -> None:
        if request.method == "DELETE":
            time.sleep(0.0 if "incomplete" in request.key else 0.5)
            removed.append(request.key)

    proxied_s3.rule = take_time
    save(s3_directory.url, 2.0, rows=20)
    assert len(removed) > 1
    assert "incomplete" in removed[-1]


def test_a_part_that_is_changed_on_the_way_is_never_loaded(proxied_s3: Proxy, s3_directory: S3Directory) -> None:
    """moto compares no sum of a part, as S3 does; then the sum that the checkpoint has tells."""
    struck = strike(proxied_s3, lambda request: request.part == 1, Fault("damaged"))

    def save_and_load() -> None:
        save(s3_directory.url, 4.0, rows=1000)
        loaded(s3_directory.url, rows=1000)

    with pytest.raises(FAILED, match=r"CRC|checksum|Digest"):
        save_and_load()
    assert struck


# What lasts


def test_a_store_that_answers_503_to_everything_is_named(
    proxied: Proxy, object_directory: ObjectDirectory, store_deadline: Callable[..., None]
) -> None:
    store_deadline(2.0)
    strike(proxied, lambda request: True, Fault("status"), times=10**6)
    with pytest.raises(FAILED, match="503") as failure:
        save(object_directory.url)
    assert "test-secret" not in str(failure.value)
    with pytest.raises(FAILED, match="503"):
        loaded(object_directory.url)
    assert main(["list", object_directory.url]) == 2
    assert object_directory.names() == []


@pytest.mark.parametrize("stalls", [pytest.param("part", marks=pytest.mark.long), "commit"])
def test_nothing_waits_longer_than_the_deadline(
    stalls: str, proxied_s3: Proxy, s3_directory: S3Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one a request alone may take five minutes, which is longer than a test may."""
    save(s3_directory.url, 1.0)
    ahead = Commit.begin(storage_at(s3_directory.url), common=b"with no deadline of its own")
    stalled: list[Request] = []

    def rule(request: Request) -> Fault | None:
        begins = request.part == 2 if stalls == "part" else request.key.endswith(".metadata")
        if not request.changes or not (stalled or begins):
            return None
        stalled.append(request)
        return Fault("stall", seconds=120)

    proxied_s3.rule = rule
    with pytest.raises(FAILED):
        save(s3_directory.url, 2.0, rows=1000, write_deadline_s=5.0)
    assert stalled
    assert ahead.is_over
    proxied_s3.rule = lambda request: None
    assert loaded(s3_directory.url) == 1.0
    monkeypatch.setenv(s3_directory.variable, s3_directory.server)
    save(s3_directory.url, 3.0)
    assert loaded(s3_directory.url) == 3.0


@on_each_kind
def test_wrong_buckets_and_refusals_are_named_and_final(proxied: Proxy, object_directory: ObjectDirectory) -> None:
    with pytest.raises(LoadError, match=r"://no-such-bucket"):
        storage_at(f"{object_directory.scheme}://no-such-bucket/x").list()
    with pytest.raises(FAILED, match=r"://no-such-bucket/x.*there is no such bucket; make it, or correct its name"):
        save(f"{object_directory.scheme}://no-such-bucket/x", 1.0)
    struck = strike(proxied, lambda request: request.makes, Fault("status", status=403), times=99)
    with pytest.raises(SaveError, match=r"403.*EACCES.*check that this user may write there"):
        storage_at(object_directory.url).publish("file", b"x")
    assert len(struck) == 1


def _unfinished_uploads(s3_directory: S3Directory) -> int:
    with urllib.request.urlopen(f"{s3_directory.server}/{s3_directory.bucket}?uploads") as answer:
        return int(answer.read().count(f"<Key>{s3_directory.prefix}/".encode()))


def test_what_came_too_slowly_is_sent_again(s3_directory: S3Directory, proxied_s3: Proxy) -> None:
    """S3 calls it a 400, which its client does not repeat for a part."""
    too_slow = Fault("status", status=400, code="RequestTimeout")
    for chosen in (lambda request: request.part == 2, lambda request: request.makes and not request.query):
        struck = strike(proxied_s3, chosen, too_slow)
        save(s3_directory.url, 4.0, rows=1000)
        assert struck
        assert loaded(s3_directory.url, rows=1000) == 4.0
    assert _unfinished_uploads(s3_directory) == 0


def test_parts_of_a_save_that_fails_are_removed(
    s3_directory: S3Directory, proxied_s3: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a part that is refused long before the last one is sent."""
    monkeypatch.setattr(ObjectClient, "part_bytes", 1024 * 1024)
    struck = strike(proxied_s3, lambda request: request.part == 2, Fault("status", status=403))
    with pytest.raises(FAILED, match="403"):
        save(s3_directory.url, 4.0, rows=1000)
    assert struck
    assert _unfinished_uploads(s3_directory) == 0


@on_each_kind
def test_no_credential_is_in_what_is_shown_or_sent(object_directory: ObjectDirectory) -> None:
    storage = storage_at(object_directory.url)
    storage.publish("file", b"x")
    client = storage._client  # type: ignore[attr-defined]
    for text in (repr(storage), str(storage.__dict__), repr(client), str(vars(client)), repr(pickle.dumps(storage))):
        assert "test-secret" not in text
        assert "test-key" not in text
    assert pickle.loads(pickle.dumps(storage)).read("file") == b"x"
    with pytest.raises(TypeError, match="holds credentials"):
        pickle.dumps(client)


def test_a_process_that_was_forked_is_refused_before_it_hangs(s3_directory: S3Directory) -> None:
    """obstore's threads are not there; nor does its parent wait for it."""
    storage = storage_at(s3_directory.url)
    storage.publish("file", b"x")

    def read() -> None:
        for of in (storage, storage_at(s3_directory.url)):
            with pytest.raises(LoadError, match=r"was forked from one that uses obstore.*spawn or forkserver"):
                of.read("file")

    in_child(read, deadline_s=30)
    assert storage.read("file") == b"x"


# Crashes, refusals and races: the old checkpoint or the new one, and nothing left over after the next save


def saved_but_for(proxy: Proxy, url: str, how: str, strikes: Callable[[Request, int], bool]) -> list[Request]:
    """A save of 2.0 over 1.0, of which the changing request that is chosen, by its number too, fails, or is the last of
    the process.

    Returns all of its requests that change something.
    """
    save(url, 1.0, rows=20)
    proxy.requests.clear()
    going: list[Any] = []
    ready = threading.Event()

    def kill() -> None:
        ready.wait()
        going[0].kill()
        going[0].join()

    faults = {
        "refused": Fault("status", status=403),
        "killed before": Fault("reset", then=kill),
        "killed after": Fault("lost", then=kill),
    }
    own = f"/{url.rpartition('/')[2]}/"

    def rule(request: Request) -> Fault | None:
        is_own = request.changes and own in f"/{request.key}"
        return faults[how] if is_own and strikes(request, len(proxy.changes()) - 1) else None

    proxy.rule = rule
    if how == "refused":
        with contextlib.suppress(*FAILED):
            save(url, 2.0, rows=600, thread_count=1)
    else:
        going.append(start_saving(url, 2.0, 600, thread_count=1))
        ready.set()
        going[0].join()
    proxy.rule = lambda request: None
    return proxy.changes()


def old_or_new(url: str) -> float:
    try:
        return loaded(url, rows=20)
    except (*FAILED, ValueError):
        return loaded(url)


def found_after(
    proxy: Proxy, directory: ObjectDirectory, name: str, how: str, strikes: Callable[[Request, int], bool]
) -> float:
    """What is loaded after a save that was struck; the next save then leaves nothing else."""
    url = f"{directory.url}/{name}"
    saved_but_for(proxy, url, how, strikes)
    value = old_or_new(url)
    assert verify_checkpoint(url).whole
    save(url, 3.0, rows=20)
    assert loaded(url, rows=20) == 3.0
    left = [each for each in directory.names() if each.startswith(f"{name}/")]
    assert len({each.split(".")[1] for each in left if each.endswith(".distcp")}) == 1, left
    assert [each for each in left if not each.endswith(".distcp")] == [f"{name}/.metadata"]
    return value


@pytest.mark.crash
@pytest.mark.parametrize("how", ["refused", pytest.param("killed before", marks=pytest.mark.long), "killed after"])
def test_a_crash_at_the_commit_leaves_the_old_or_the_new(
    how: str, proxied: Proxy, object_directory: ObjectDirectory
) -> None:
    found = found_after(
        proxied, object_directory, "run", how, lambda request, _: request.makes and request.key.endswith("/.metadata")
    )
    assert found == (2.0 if how == "killed after" else 1.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.crash
@pytest.mark.parametrize("how", ["refused", "killed before", "killed after"])
def test_a_crash_at_any_request_leaves_the_old_or_the_new(
    how: str, proxied: Proxy, object_directory: ObjectDirectory
) -> None:
    requests = saved_but_for(proxied, f"{object_directory.url}/recorded", how, lambda *_: False)
    found = [
        found_after(proxied, object_directory, f"struck-{number}", how, lambda _, at, number=number: at == number)
        for number in range(len(requests))
    ]
    assert len(found) >= 8
    assert found == sorted(found), "once the new one is there, it stays"
    assert set(found) == {1.0, 2.0}


@pytest.mark.parametrize("races", [2, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_of_jobs_that_save_at_once_into_one_directory_one_wins_and_no_mix_is_left(
    races: int, object_directory: ObjectDirectory
) -> None:
    for number in range(races):
        url = f"{object_directory.url}/{number}"
        if number % 2:
            save(url, 1.0, rows=20)
        values = [2.0, 3.0, 4.0]
        saving = [start_saving(url, value, 20) for value in values]
        for each in saving:
            each.join()
        won = [value for value, each in zip(values, saving, strict=True) if each.exitcode == 0]
        assert won
        assert loaded(url, rows=20) in won
        left = [name.partition("/")[2] for name in object_directory.names() if name.startswith(f"{number}/")]
        assert len({name.split(".")[1] for name in left if name.endswith(".distcp")}) == 1, left
        assert [name for name in left if not name.endswith(".distcp")] == [".metadata"]


@pytest.mark.parametrize("next_save", [pytest.param("fails", marks=pytest.mark.long), "is whole"])
@pytest.mark.parametrize("status", [503, 403])  # of further attempts
def test_a_commit_that_was_given_up_arrives_too_late_once_the_next_save_is_published(
    proxied_s3: Proxy, s3_directory: S3Directory, store_deadline: Callable[..., None], next_save: str, status: int
) -> None:
    """What it names is not swept while it could still come into force; what is published meanwhile refuses it."""
    url = f"{s3_directory.url}/iter_0000001"
    save(url, 1.0, rows=2)
    goes_on, arrived, held = threading.Event(), threading.Event(), threading.Event()

    def commit(request: Request) -> Fault | None:
        if not (request.makes and request.key.endswith("/.metadata")):
            return None
        if held.is_set():
            return Fault("status", status=status) if not goes_on.is_set() else None
        held.set()
        goes_on.wait(60.0)
        arrived.set()
        return None

    proxied_s3.rule = commit
    store_deadline(2.0)
    with pytest.raises(FAILED, match="may still come into force"):
        save(url, 2.0, rows=2)
    store_deadline(None)
    assert loaded(url, rows=2) == 1.0
    proxied_s3.rule = lambda request: (
        Fault("status", status=403) if next_save == "fails" and request.key.endswith(".distcp") else None
    )
    with pytest.raises(FAILED, match="403") if next_save == "fails" else contextlib.nullcontext():
        save(url, 3.0, rows=2)
    proxied_s3.rule = commit
    before = loaded(url, rows=2)
    goes_on.set()
    assert arrived.wait(60.0)
    time.sleep(1.0)  # it is done, or refused
    assert (before, loaded(url, rows=2)) == ((1.0, 2.0) if next_save == "fails" else (3.0, 3.0))
    assert verify_checkpoint(url).whole
    save(url, 4.0, rows=2)
    assert loaded(url, rows=2) == 4.0


def test_a_common_state_that_is_late_is_not_put_over_that_of_a_later_save(
    proxied_s3: Proxy, s3_directory: S3Directory
) -> None:
    """Held up after its publish, when it is to be put where it belongs."""
    storage = storage_at(s3_directory.url)

    def another_save(request: Request) -> None:
        if request.method == "PUT" and request.key.endswith("/common.pt"):
            s3_directory.put(".metadata", b"of the other")
            s3_directory.put("common.pt", b"of the other")

    for value in (1.0, 2.0):
        ahead = Commit.begin(storage, common=b"%d" % value)
        if value == 2.0:
            proxied_s3.rule = another_save
        save(s3_directory.url, value, rows=2)
        assert ahead.is_over
    proxied_s3.rule = lambda request: None
    assert s3_directory.get("common.pt") == b"of the other"


def test_a_second_save_is_refused_in_the_same_second(s3_directory: S3Directory) -> None:
    """The store's clock ticks once a second."""
    storage = storage_at(s3_directory.url)
    commit = Commit.begin(storage)
    for _ in range(8):
        with pytest.raises(SaveError, match="not finalized yet"):
            Commit.begin(storage)
    commit.give_up()
