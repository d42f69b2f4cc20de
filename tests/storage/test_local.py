"""What is particular to local files: O_DIRECT, the page cache, errors of the system, and what is left behind."""

import errno
import fcntl
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from mcore_ckpt.core.errors import CheckpointNotFoundError, LoadError, SaveError
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.base import DirectIo
from mcore_ckpt.storage.resolve import LocalStorage
from tests.support.local_files import MIB, aligned, cached_pages, drop_cached, has_direct_io, open_fds, random_bytes
from tests.support.meanwhile import ahead_of, behind

pytestmark = pytest.mark.quick


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def test_direct_writes_leave_nothing_in_the_page_cache(local: LocalStorage, tmp_path: Path) -> None:
    if not has_direct_io(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    writer = local.open_writer("file", 4 * MIB)
    assert writer.direct
    writer.write(0, aligned(random_bytes(4 * MIB)))
    writer.finish()
    assert cached_pages(tmp_path / "file") == 0


def test_a_header_that_was_read_does_not_send_the_data_behind_it_through_the_page_cache(
    local: LocalStorage, tmp_path: Path
) -> None:
    """The kernel reads ahead, and what it has read would make the next data look cached, to the end of the file."""
    if not has_direct_io(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    path, content = tmp_path / "file", random_bytes(8 * MIB)
    path.write_bytes(content)
    drop_cached(path)
    with local.open_reader("file") as reader:
        for at in range(0, 64 * 1024, 1024):
            reader.read(at, 1024)
        assert b"".join(bytes(reader.read(at, MIB)) for at in range(0, len(content), MIB)) == content
    assert cached_pages(path) < MIB // 4096


def test_whole_pages_come_straight_into_aligned_memory(
    local: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, content, view = tmp_path / "file", random_bytes(MIB), aligned(bytes(MIB))
    path.write_bytes(content)
    drop_cached(path)
    monkeypatch.setattr(direct_io, "copy_bytes", mock.Mock(side_effect=AssertionError("a copy")))
    with local.open_reader("file") as reader:
        reader.read_into(0, view)
    assert view == content


def test_abort_does_not_close_the_file_under_a_write_that_hangs(local: LocalStorage, tmp_path: Path) -> None:
    """The descriptor's number would go to another file, and the write would go on there."""
    writing, released = threading.Event(), threading.Event()
    before = open_fds()

    def hang(*_: object) -> None:
        writing.set()
        assert released.wait(30)

    writer = local.open_writer("file", 4096)
    thread = threading.Thread(target=writer.write, args=(0, aligned(b"x" * 4096)))
    with ahead_of(os, "pwrite", hang):
        thread.start()
        assert writing.wait(30)
        writer.abort()
        assert list(tmp_path.iterdir()) == []
        assert open_fds() != before
        with pytest.raises(SaveError, match="finished or aborted"):
            writer.write(0, aligned(b"y" * 4096))
        released.set()
        thread.join()
    assert open_fds() == before


def fail(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("direct", ["auto", "off"])
def test_write_errors_name_file_range_and_errno(
    monkeypatch: pytest.MonkeyPatch, local: LocalStorage, tmp_path: Path, direct: DirectIo
) -> None:
    writer = local.open_writer("file", 8192, direct=direct)
    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(SaveError, match=rf"{tmp_path}/file: writing bytes \[4096, 8192\).*EIO") as caught:
        writer.write(4096, aligned(b"x" * 4096))
    assert isinstance(caught.value.__cause__, OSError)
    writer.abort()


def test_a_failing_fsync_is_an_error_and_closes_the_file(local: LocalStorage, tmp_path: Path) -> None:
    before = open_fds()
    writer = local.open_writer("file", 4096)
    writer.write(0, aligned(b"x" * 4096))
    failing = mock.patch.object(os, "fsync", fail)
    with failing, pytest.raises(SaveError, match=r"file: finishing the file at 4096 bytes failed.*EIO"):
        writer.finish()
    assert open_fds() == before
    writer.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["fsync", "replace", "pwrite"])
def test_a_failed_publish_keeps_the_old_content(local: LocalStorage, tmp_path: Path, step: str) -> None:
    local.publish(".metadata", b"old")
    before = open_fds()
    with mock.patch.object(os, step, fail), pytest.raises(SaveError, match=r"\.metadata: publishing it failed"):
        local.publish(".metadata", b"new")
    assert [path.name for path in tmp_path.iterdir()] == [".metadata"]
    assert (tmp_path / ".metadata").read_bytes() == b"old"
    assert open_fds() == before


def test_two_that_publish_under_one_name_take_nothing_from_each_other(local: LocalStorage, tmp_path: Path) -> None:
    local.publish("note", b"old")
    others = [b"second", b"first"]
    with behind(os, "fsync", lambda _: local.publish("note", others.pop()) if others else None):
        local.publish("note", b"last")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"note": b"last"}


def test_a_file_in_the_way_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SaveError, match=r"file/sub: making the directory failed.*ENOTDIR"):
        LocalStorage(tmp_path / "file" / "sub").ensure()
    with pytest.raises(CheckpointNotFoundError):
        LocalStorage(tmp_path / "file").read("x")


# What a file system that hosts share answers when another host has just replaced or removed a file.


@pytest.fixture
def shared(local: LocalStorage, tmp_path: Path) -> LocalStorage:
    (tmp_path / "file").write_bytes(b"content")
    local.claim("link", "note")
    return local


def held_and_seen(storage: LocalStorage) -> bool:
    with storage.in_use("file"):
        return storage.is_in_use("file")


LOOKS: dict[str, Callable[[LocalStorage], object]] = {
    "read": lambda storage: storage.read("file"),
    "version": lambda storage: storage.version("file"),
    "list": lambda storage: storage.list(),
    "claimed": lambda storage: storage.claimed("link"),
    "in use": held_and_seen,
}


def answers(monkeypatch: pytest.MonkeyPatch, call: str, code: int, times: int = 10**6) -> None:
    """So many times that call of the system fails."""
    real, left = getattr(os, call), iter(range(times))

    def function(*arguments: Any, **named: Any) -> Any:
        if next(left, None) is not None:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **named)

    monkeypatch.setattr(os, call, function)


@pytest.mark.parametrize("call", ["open", "stat", "getxattr", "preadv", "scandir", "readlink"])
@pytest.mark.parametrize("look", LOOKS)
def test_a_look_that_is_answered_estale_is_repeated(
    look: str, call: str, shared: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = LOOKS[look](shared)
    answers(monkeypatch, call, errno.ESTALE, times=3)
    assert LOOKS[look](shared) == expected


def test_what_a_client_remembers_of_a_name_is_not_taken_for_what_is_there(
    shared: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it lists the directory, the client takes the name for the old file, of which the server knows nothing."""
    (tmp_path / "old").write_bytes(b"old")
    expected, old = [LOOKS[look](shared) for look in ("read", "version")], (tmp_path / "old").stat()
    real_open, real_list, remembered = os.open, os.listdir, [str(tmp_path / "file")]

    def open_remembered(path: Any, *arguments: Any, **named: Any) -> int:
        return real_open(tmp_path / "old" if os.fspath(path) in remembered else path, *arguments, **named)

    def ask_server(fd: int, _: str) -> bytes:
        raise OSError(errno.ENOENT if os.path.samestat(os.fstat(fd), old) else errno.ENODATA, "")

    def list_again(path: Any) -> list[str]:
        remembered.clear()
        return real_list(path)

    for name, function in {"open": open_remembered, "getxattr": ask_server, "listdir": list_again}.items():
        monkeypatch.setattr(os, name, function)
    for look, before in zip(("read", "version"), expected, strict=True):
        remembered.append(str(tmp_path / "file"))
        assert LOOKS[look](shared) == before


def test_a_wrong_name_that_listings_keep_alive_is_left_alone_for_a_while(
    shared: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of two bricks of GlusterFS takes it from each listing; without one it asks for it after two seconds."""
    clock = [0.0, 0.0]
    monkeypatch.setattr(direct_io.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(direct_io.time, "sleep", lambda pause_s: clock.__setitem__(0, clock[0] + pause_s))
    monkeypatch.setattr(os, "listdir", lambda path: clock.__setitem__(1, clock[0]))

    def look() -> int:
        if clock[0] - clock[1] < 2.0:
            raise OSError(errno.ESTALE, "")
        return 1

    assert direct_io.look_again(shared.path("file"), look) == 1
    assert clock[0] < 5.0


@pytest.mark.parametrize("code", [errno.ESTALE, errno.ENOENT])
def test_no_close_of_what_was_only_read_fails(code: int, shared: LocalStorage) -> None:
    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    with behind(os, "close", fail):
        assert LOOKS["read"](shared) == b"content"
        assert LOOKS["version"](shared) is not None
        assert LOOKS["in use"](shared) is True
        shared.sync()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.ESTALE, "another host has replaced or removed it"),
        (errno.ENOTCONN, "the client of this mount has ended"),
        (errno.ECONNABORTED, "the client of this mount has ended"),
    ],
)
def test_what_stays_stale_or_has_no_client_is_said_to_be_so(
    code: int, says: str, shared: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_io, "_LOOKS_S", 0.1)
    for call, look in {"scandir": "list", "preadv": "read", "open": "version"}.items():
        with monkeypatch.context() as failing:
            answers(failing, call, code)
            with pytest.raises(LoadError, match=f"{says}.* read again"):
                LOOKS[look](shared)
    answers(monkeypatch, "replace", code)
    with pytest.raises(SaveError, match=f"{says}.* save again"):
        shared.publish("file", b"new")
    answers(monkeypatch, "open", errno.ESTALE)
    assert shared.is_in_use("file")  # what cannot be told is not removed


def test_a_lock_that_another_process_has_for_a_moment_is_taken_then(
    shared: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "file").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(direct_io.time, "sleep", lambda _: fcntl.flock(other, fcntl.LOCK_UN))
        assert held_and_seen(shared)


@pytest.mark.parametrize(("code", "is_said"), [(errno.ENOLCK, True), (errno.EOPNOTSUPP, False)])
def test_a_load_without_a_lock_says_so_where_there_are_locks(
    code: int, is_said: bool, shared: LocalStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(code, os.strerror(code))))
    with caplog.at_level(logging.WARNING, "mcore_ckpt"), shared.in_use("file"):
        assert ("a `prune` may remove it" in caplog.text) is is_said


def test_a_claim_whose_old_link_is_only_remembered_is_made(
    local: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, "symlink", errno.EEXIST, times=1)
    assert local.claim("link", "note") == local.claimed("link") == "note"
