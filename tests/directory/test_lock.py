"""Whose a directory is: of all who lock it one has it, whoever is gone is taken over from, and nobody else."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.directory import lock as lock_module
from mcore_ckpt.directory.lock import DirectoryLock, Owner, holders
from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER, METADATA_FILE
from mcore_ckpt.storage import _durable
from mcore_ckpt.storage._local import LocalStorage
from tests.support.forked import exit_code, fork
from tests.support.local_files import names

pytestmark = pytest.mark.timeout(120)


@contextmanager
def holder(path: Path, *, host: str | None = None, beats: bool = True, boot: str | None = None) -> Iterator[int]:
    """A process that holds the directory until the block ends; perhaps on another host, perhaps without a heartbeat."""
    read_end, write_end = os.pipe()

    def hold() -> None:
        if host is not None:
            lock_module.platform = SimpleNamespace(node=lambda: host)  # type: ignore[assignment]
        if boot is not None:
            real = lock_module._first_line
            lock_module._first_line = lambda file: boot if file.endswith("boot_id") else real(file)
        if not beats:
            lock_module.BEAT_S = 3600.0  # type: ignore[misc]
        kept = DirectoryLock.take(LocalStorage(path))
        if not beats:  # the lease promises more than comes
            set_lease(path, kept.owner, beat_s=0.05)
        os.write(write_end, b".")
        threading.Event().wait()

    child = fork(hold)
    try:
        os.read(read_end, 1)
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
        os.close(read_end)
        os.close(write_end)


def set_lease(path: Path, owner: Owner, **values: Any) -> None:
    """Change what the lease says, which is what the marker says: they are one file."""
    lease = path / f"{INCOMPLETE_MARKER}.{owner.save_id}"
    lease.write_text(json.dumps({**json.loads(lease.read_text()), **values}))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats every 50 ms, and a lease of half a second."""
    monkeypatch.setattr(lock_module, "BEAT_S", 0.05)
    monkeypatch.setattr(lock_module, "LEASE_S", 0.5)


# --- one of many ------------------------------------------------------------------------------------------------------


def races(paths: list[Path], contenders: int) -> list[list[int]]:
    """Let processes lock each directory at the same moment; their exit codes: 0 has had it, 3 was refused."""
    gate_read, gate_write = os.pipe()

    def contend(path: Path) -> None:
        os.close(gate_write)
        os.read(gate_read, 1)
        enter_and_leave(path, DirectoryLock.take(LocalStorage(path)))

    children = [[fork(partial(contend, path)) for _ in range(contenders)] for path in paths]
    os.close(gate_read)
    os.close(gate_write)  # they all read the end at once
    return [sorted(exit_code(child) for child in of_path) for of_path in children]


def enter_and_leave(path: Path, lock: DirectoryLock) -> None:
    """What fails if two are inside at once."""
    inside_file = os.open(path / "inside", os.O_CREAT | os.O_EXCL)
    time.sleep(0.2)
    os.close(inside_file)
    lock.check()
    os.unlink(path / "inside")


def refuse_links(*_: object) -> None:
    raise OSError(errno.EOPNOTSUPP, "no hard links here")


@pytest.mark.parametrize(
    ("left_by", "links"),
    [
        ("no process", True),
        ("no process", False),
        ("a killed process", True),
        ("a killed process of another host", True),
    ],
)
def test_of_processes_that_lock_at_once_one_has_the_directory(
    tmp_path: Path, left_by: str, links: bool, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refuse_links)
    # The contenders mostly wait, for the one inside or for a lease to end: five directories at a time.
    for number in range(0, 20 if links else 10, 5):
        paths = [tmp_path / str(number + each) for each in range(5)]
        for path in paths:
            path.mkdir()
            if left_by != "no process":
                with holder(path, host="another" if "another" in left_by else None):
                    pass  # killed with the block
        for path, codes in zip(paths, races(paths, 4), strict=True):
            # (a contender that comes late, on a busy machine, finds a holder that has ended)
            assert 0 in codes, f"round {path.name}: {codes}"
            assert set(codes) <= {0, 3}, f"round {path.name}: {codes}"
    if not links:
        with holder(tmp_path / "0"):
            pass
        DirectoryLock.take(LocalStorage(tmp_path / "0")).release()
        assert names(tmp_path / "0") == set()


def test_a_link_whose_answer_was_lost_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS sends a request again when no answer comes, and may be told that the name is taken: by itself."""
    real = os.link

    def link_twice(source: str, name: str) -> None:
        real(source, name)
        real(source, name)

    monkeypatch.setattr(os, "link", link_twice)
    lock = DirectoryLock.take(LocalStorage(tmp_path))
    lock.check()
    lock.release()
    assert names(tmp_path) == set()


# --- who is refused ---------------------------------------------------------------------------------------------------


def test_a_live_process_is_named_and_not_disturbed(tmp_path: Path) -> None:
    with holder(tmp_path) as child:
        before = names(tmp_path)
        with pytest.raises(SaveError, match=rf"process {child} on host .*, since 20\d\d-.* which is running"):
            DirectoryLock.take(LocalStorage(tmp_path))
        assert names(tmp_path) == before


def test_a_stopped_process_is_not_gone(tmp_path: Path, quick: None) -> None:
    with holder(tmp_path) as child:
        os.kill(child, signal.SIGSTOP)
        time.sleep(1.0)  # two leases
        with pytest.raises(SaveError, match=f"process {child} on host"):
            DirectoryLock.take(LocalStorage(tmp_path))


def test_a_process_on_another_host_that_renews_its_claim_is_not_gone(tmp_path: Path, quick: None) -> None:
    renewed = pytest.raises(SaveError, match=r"on host another-host, .* which renews its lease")
    with holder(tmp_path, host="another-host"), renewed:
        DirectoryLock.take(LocalStorage(tmp_path))


def test_a_lease_is_renewed_again_whatever_has_prevented_it(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals: list[str] = []
    real = LocalStorage.renew

    def renew(storage: LocalStorage, name: str) -> bool:
        renewals.append(name)
        if len(renewals) == 1:
            raise RuntimeError("what gives out the credentials has failed")
        return real(storage, name)

    monkeypatch.setattr(LocalStorage, "renew", renew)
    lock = DirectoryLock.take(LocalStorage(tmp_path))
    until_s = time.monotonic() + 30
    while len(renewals) < 3 and time.monotonic() < until_s:
        time.sleep(0.01)
    assert len(renewals) >= 3
    lock.check()
    lock.release()


def test_two_saves_of_one_process(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    first = DirectoryLock.take(storage)
    with pytest.raises(SaveError, match="not finalized yet"):
        DirectoryLock.take(LocalStorage(tmp_path / "." / ""))
    first.check()
    first.release()
    DirectoryLock.take(storage).release()
    assert names(tmp_path) == set()


# --- who is taken over from -------------------------------------------------------------------------------------------


def test_a_killed_process_is_taken_over_from_at_once(tmp_path: Path) -> None:
    with holder(tmp_path):
        pass
    began_s = time.monotonic()
    lock = DirectoryLock.take(LocalStorage(tmp_path))
    assert time.monotonic() - began_s < 2.0
    assert len(lock.after) == 1
    lock.release()
    assert names(tmp_path) == set()


def test_another_process_of_the_same_id_is_not_the_holder(tmp_path: Path) -> None:
    with holder(tmp_path):
        (owner,) = holders(LocalStorage(tmp_path))
        set_lease(tmp_path, owner, started="1")  # as if the holder had been started before this process was
        DirectoryLock.take(LocalStorage(tmp_path)).release()


@pytest.mark.parametrize("where", [{"host": "another-host"}, {"boot": "of-yesterday"}])
def test_a_process_that_cannot_be_seen_is_gone_when_its_lease_is(
    tmp_path: Path, quick: None, where: dict[str, str]
) -> None:
    with holder(tmp_path, beats=False, **where):
        began_s = time.monotonic()
        lock = DirectoryLock.take(LocalStorage(tmp_path))
        took_s = time.monotonic() - began_s
        assert took_s > 0.1, "its heartbeat was not waited for"
        assert took_s < 20
        lock.release()


def test_an_old_heartbeat_is_still_watched(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time may be another host's clock: a holder whose clock is an hour behind lives all the same."""
    monkeypatch.setattr(lock_module, "LEASE_S", 30.0)  # a holder that waits for a core for so long is no case of this
    with holder(tmp_path, host="another-host"):
        (owner,) = holders(LocalStorage(tmp_path))
        real = LocalStorage.version

        class Behind(LocalStorage):
            def version(self, name: str) -> Any:
                found = real(self, name)
                if found is not None and owner.save_id in name:
                    found = found._replace(modified_ns=found.modified_ns - 3600 * 10**9)
                return found

        with pytest.raises(SaveError, match="which renews its lease"):
            DirectoryLock.take(Behind(tmp_path))


def test_who_dies_while_taking_over_is_taken_over_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Struck at each step of a takeover, and the one after it, too."""
    storage = LocalStorage(tmp_path)

    def take_and_die_at(step: int) -> int:
        def work() -> None:
            steps = 0

            def counted(real: Callable[..., Any]) -> Callable[..., Any]:
                def call(*arguments: Any, **keywords: Any) -> Any:
                    nonlocal steps
                    if steps == step:
                        os._exit(17)
                    steps += 1
                    return real(*arguments, **keywords)

                return call

            for name in ("create", "lock", "publish", "delete"):
                setattr(LocalStorage, name, counted(getattr(LocalStorage, name)))
            DirectoryLock.take(storage)

        return exit_code(fork(work))

    step = 0
    codes = []
    while 0 not in codes:
        codes = [take_and_die_at(step), take_and_die_at(step)]
        assert set(codes) <= {17, 0}
        with holder(tmp_path), pytest.raises(SaveError, match="another save holds"):  # a third finds its way
            DirectoryLock.take(storage)
        step += 1
        assert step < 40
    assert step > 8
    last = DirectoryLock.take(storage)
    last.sweep(storage.list())
    last.release()
    assert names(tmp_path) == set()


def test_who_is_taken_over_from_while_taking_over_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held up just before its lease becomes the marker; then another has the directory, and goes on to have it."""
    storage = LocalStorage(tmp_path)
    with holder(tmp_path):
        pass
    others: list[DirectoryLock] = []
    publish_really = LocalStorage.publish

    def publish_late(storage: LocalStorage, name: str, content: bytes, *, through: str | None = None) -> None:
        if name == INCOMPLETE_MARKER:
            monkeypatch.setattr(LocalStorage, "publish", publish_really)
            others.append(DirectoryLock.take(storage))
        publish_really(storage, name, content, through=through)

    monkeypatch.setattr(LocalStorage, "publish", publish_late)
    with pytest.raises(SaveError, match="while this process was held up"):
        DirectoryLock.take(storage)
    (other,) = others
    with pytest.raises(SaveError, match="is not finalized yet"):
        DirectoryLock.take(storage)
    other.check()
    other.release()
    assert names(tmp_path) == set()


def test_a_holder_thought_to_be_gone_cannot_publish(tmp_path: Path, quick: None) -> None:
    """Stopped for longer than its lease, taken over from on another host, and then going on."""
    go_read, go_write = os.pipe()

    def stopped() -> None:
        lock_module.platform = SimpleNamespace(node=lambda: "another-host")  # type: ignore[assignment]
        storage = LocalStorage(tmp_path)
        mine = DirectoryLock.take(storage)
        os.write(go_write, b".")
        os.kill(os.getpid(), signal.SIGSTOP)
        mine.publish(METADATA_FILE, b"of the one that was gone")

    child = fork(stopped)
    os.read(go_read, 1)
    storage = LocalStorage(tmp_path)
    mine = DirectoryLock.take(storage)  # waits for the lease
    os.kill(child, signal.SIGCONT)
    assert exit_code(child) == 3
    assert METADATA_FILE not in names(tmp_path)
    mine.publish(METADATA_FILE, b"of the one that lives")
    mine.release()
    assert (tmp_path / METADATA_FILE).read_bytes() == b"of the one that lives"
    assert names(tmp_path) == {METADATA_FILE}


@pytest.mark.parametrize("content", [b"", b"{", b'{"first_file": 3, "replaces": []}', b"[" * 10000, b'{"save_id": 7}'])
def test_a_marker_that_names_nobody_is_of_nobody(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock_module, "_UNREADABLE_S", 0.1)
    (tmp_path / INCOMPLETE_MARKER).write_bytes(content)
    lock = DirectoryLock.take(LocalStorage(tmp_path))
    lock.check()
    lock.release()
    assert names(tmp_path) == set()


@pytest.mark.parametrize("pid", ["1.5", "NaN", "Infinity", "-1", "0", "true"])
def test_a_lease_without_a_process_id_is_of_nobody(tmp_path: Path, pid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "_UNREADABLE_S", 0.1)
    content = Owner.here().encode().replace(f'"pid": {os.getpid()}'.encode(), f'"pid": {pid}'.encode())
    (tmp_path / INCOMPLETE_MARKER).write_bytes(content)
    DirectoryLock.take(LocalStorage(tmp_path)).release()
    assert names(tmp_path) == set()


@pytest.mark.parametrize("since_s", [float("nan"), float("inf"), -1e308, 10**400])
def test_an_owner_is_shown_whatever_time_its_lease_says(since_s: float) -> None:
    owner = Owner.decode(replace(Owner.here(), since_s=since_s).encode())
    assert str(owner) == f"process {os.getpid()} on host {owner.host}, since an unknown time"


# --- how a lock ends -------------------------------------------------------------------------------------------------


def test_a_claim_that_is_forgotten_is_let_go(tmp_path: Path) -> None:
    """By other processes, too, as soon as the thread has noticed."""
    lock = DirectoryLock.take(LocalStorage(tmp_path))
    del lock
    gc.collect()
    until_s = time.monotonic() + 10
    while len(names(tmp_path)) > 1 and time.monotonic() < until_s:
        time.sleep(0.01)
    assert names(tmp_path) == {INCOMPLETE_MARKER}
    assert exit_code(fork(lambda: DirectoryLock.take(LocalStorage(tmp_path)))) == 0


def test_the_heartbeat_goes_on_while_the_process_computes(tmp_path: Path, quick: None) -> None:
    lock = DirectoryLock.take(LocalStorage(tmp_path))
    lease = f"{INCOMPLETE_MARKER}.{lock.owner.save_id}"
    until_s = time.monotonic() + 120.0  # a disk that is busy elsewhere has held one up for 20 s
    seen = set()
    while len(seen) < 5 and time.monotonic() < until_s:
        sum(range(20_000))
        seen.add((tmp_path / lease).stat().st_mtime_ns)
    lock.release()
    assert len(seen) >= 5


def test_a_process_that_holds_a_claim_ends_when_it_wants_to(tmp_path: Path) -> None:
    program = (
        "import sys; from mcore_ckpt.directory.lock import DirectoryLock\n"
        "from mcore_ckpt.storage.resolve import storage_at\n"
        "kept = DirectoryLock.take(storage_at(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    DirectoryLock.take(LocalStorage(tmp_path)).release()


def test_what_dead_contenders_left_is_swept_and_what_living_ones_have_is_not(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    living, dead = Owner.here(), Owner.here()
    for owner in (living, dead):
        storage.create(f"{INCOMPLETE_MARKER}.{owner.save_id}", owner.encode())
        storage.create(f"{INCOMPLETE_MARKER}.{owner.save_id}.publish", b"")
    set_lease(tmp_path, living, pid=os.getppid(), started=lock_module._start_of(os.getppid()))
    lock = DirectoryLock.take(storage)
    lock.sweep(storage.list())
    lock.release()
    assert names(tmp_path) == {f"{INCOMPLETE_MARKER}.{living.save_id}{end}" for end in ("", ".publish")}


def test_a_lease_of_another_host_is_swept_when_nobody_has_renewed_it_for_an_hour(tmp_path: Path) -> None:
    """A process there that was killed before it had the directory, or just as it released it; or it is stopped."""
    storage = LocalStorage(tmp_path)
    old, new = Owner.here(), Owner.here()
    for owner in (old, new):
        storage.create(f"{INCOMPLETE_MARKER}.{owner.save_id}", owner.encode())
        storage.create(f"{INCOMPLETE_MARKER}.{owner.save_id}.publish", b"")
        set_lease(tmp_path, owner, host="another")
    for age_s, left in ((3500, {old, new}), (3700, {new})):
        os.utime(tmp_path / f"{INCOMPLETE_MARKER}.{old.save_id}", (time.time() - age_s,) * 2)
        with DirectoryLock.take(storage) as lock:
            lock.sweep(storage.list())
        expected = {f"{INCOMPLETE_MARKER}.{each.save_id}{end}" for each in left for end in ("", ".publish")}
        assert names(tmp_path) == expected
    with pytest.raises(SaveError):
        storage.publish(METADATA_FILE, b"", through=f"{INCOMPLETE_MARKER}.{old.save_id}.publish")


def test_a_lease_that_is_being_written_is_not_swept(tmp_path: Path) -> None:
    """Of a save that is about to lock the directory: it would find its own lease gone."""
    storage = LocalStorage(tmp_path)
    half = f"{INCOMPLETE_MARKER}.{16 * 'a'}"
    storage.create(half, b"")
    with DirectoryLock.take(storage) as lock:
        lock.sweep(storage.list())
        assert half in storage.list()
        os.utime(tmp_path / half, (time.time() - 60,) * 2)
        lock.sweep(storage.list())
        assert half not in storage.list()


def test_a_failed_claim_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(_durable, "link", refuse)
    with pytest.raises(SaveError, match="EIO"):
        DirectoryLock.take(LocalStorage(tmp_path))
    assert names(tmp_path) == set()


def test_a_claim_for_which_no_thread_is_to_be_had_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            DirectoryLock.take(LocalStorage(tmp_path))
    assert list(tmp_path.iterdir()) == []
