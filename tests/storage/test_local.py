"""What is particular to local files: O_DIRECT, the page cache, errors of the system, and what is left behind."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from unittest import mock

import pytest

from mcore_ckpt.core.errors import CheckpointNotFoundError, SaveError
from mcore_ckpt.storage.base import DirectIo
from mcore_ckpt.storage.resolve import LocalStorage
from tests.support.local_files import MIB, aligned, cached_pages, has_direct_io, open_fds, random_bytes


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def test_direct_writes_leave_nothing_in_the_page_cache(local: LocalStorage, tmp_path: Path) -> None:
    if not has_direct_io(tmp_path):
        pytest.skip("this file system has no O_DIRECT")
    writer = local.open_writer("file", size_bytes=4 * MIB)
    assert writer.direct
    writer.write(0, aligned(random_bytes(4 * MIB)))
    writer.finish(4 * MIB)
    assert cached_pages(tmp_path / "file") == 0


def test_abort_does_not_close_the_file_under_a_write_that_hangs(
    monkeypatch: pytest.MonkeyPatch, local: LocalStorage, tmp_path: Path
) -> None:
    """The descriptor's number would go to another file, and the write would go on there."""
    writing, released = threading.Event(), threading.Event()
    before = open_fds()
    real_pwrite = os.pwrite

    def hang(fd: int, view: memoryview, offset: int) -> int:
        writing.set()
        assert released.wait(30)
        return real_pwrite(fd, view, offset)

    writer = local.open_writer("file")
    monkeypatch.setattr(os, "pwrite", hang)
    thread = threading.Thread(target=writer.write, args=(0, aligned(b"x" * 4096)))
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
    writer = local.open_writer("file", direct=direct)
    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(SaveError, match=rf"{tmp_path}/file: writing bytes \[4096, 8192\).*EIO") as caught:
        writer.write(4096, aligned(b"x" * 4096))
    assert isinstance(caught.value.__cause__, OSError)
    writer.abort()


def test_a_failing_fsync_is_an_error_and_closes_the_file(local: LocalStorage, tmp_path: Path) -> None:
    before = open_fds()
    writer = local.open_writer("file")
    writer.write(0, aligned(b"x" * 4096))
    failing = mock.patch.object(os, "fsync", fail)
    with failing, pytest.raises(SaveError, match=r"file: finishing the file at 4096 bytes failed.*EIO"):
        writer.finish(4096)
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


def test_two_that_publish_under_one_name_take_nothing_from_each_other(
    local: LocalStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.publish("note", b"old")
    real_fsync, others = os.fsync, [b"second", b"first"]

    def fsync(fd: int) -> None:
        real_fsync(fd)
        if others:
            local.publish("note", others.pop())

    monkeypatch.setattr(os, "fsync", fsync)
    local.publish("note", b"last")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"note": b"last"}


def test_a_file_in_the_way_of_the_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SaveError, match=r"file/sub: making the directory failed.*ENOTDIR"):
        LocalStorage(tmp_path / "file" / "sub").ensure()
    with pytest.raises(CheckpointNotFoundError):
        LocalStorage(tmp_path / "file").read("x")
