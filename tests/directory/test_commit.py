"""Savers in one directory that are stopped, killed or refused: one wins, the others are told, nothing is lost."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import LoadError, SaveError
from mcore_ckpt.directory import commit as commit_module
from mcore_ckpt.directory.commit import (
    CLAIM,
    NOTE,
    Commit,
    Owner,
    discard,
    identity_in_force,
    remove_tensors,
    seems_gone,
)
from mcore_ckpt.directory.in_force import DrainNote
from mcore_ckpt.format.integrity import data_file_of
from mcore_ckpt.format.metadata_read import COMMON_FILE, DRAIN_FILE, METADATA_FILE, read_index
from mcore_ckpt.storage import direct_io
from mcore_ckpt.storage.resolve import LocalStorage
from mcore_ckpt.tools.verify import accept_common_file
from tests.directory import commit_model
from tests.directory.test_publish import file_of, save, sealed
from tests.support.faulty_storage import Faults, FaultyStorage
from tests.support.local_files import names
from tests.support.meanwhile import ahead_of, once
from tests.support.processes import exit_code, fork, in_child


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No save sees the note of another: they begin at the same moment, or one was stopped for long."""
    monkeypatch.setattr(Owner, "process_state", lambda _: "gone")


def save_on(storage: Any, common: bytes) -> str:
    """A complete save; gives up as a job does, if it fails. Returns the name of its data file."""
    storage.ensure()
    target = Commit.begin(storage, common=common)
    name = file_of(target)
    try:
        writer = storage.open_writer(name, 4)
        writer.write(0, memoryview(b"data"))
        writer.finish()
        target.publish(sealed(name, target.save_id))
    except SaveError:
        target.give_up()
        discard(storage, [name])
        raise
    return name


def steps(path: Path) -> int:
    """How many operations a save into this new directory has."""
    path.mkdir()
    faults = Faults()
    save_on(FaultyStorage(LocalStorage(path), faults), b"counted")
    return len(faults.operations)


def check_holds(path: Path, name: str, common: bytes) -> None:
    """The directory holds this checkpoint, complete, and nothing else."""
    assert set(read_index(path).tensors) == {name}
    assert (path / COMMON_FILE).read_bytes() == common
    assert names(path) == {name, METADATA_FILE, COMMON_FILE}


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("exists", [False, True])
def test_a_save_that_is_stopped_at_any_step_harms_no_save_that_comes_meanwhile(exists: bool, tmp_path: Path) -> None:
    """It goes on when the other has been published: then it is told, or it was completed, and replaced."""
    told = 0
    for at in range(steps(tmp_path / "counted")):
        path = tmp_path / str(at)
        path.mkdir()
        if exists:
            save(path, b"before")
        other: list[str] = []
        faults = Faults(at, lambda path=path, other=other: other.append(save_on(LocalStorage(path), b"other")))
        with contextlib.suppress(SaveError):  # its files may be gone before it has written them
            save_on(FaultyStorage(LocalStorage(path), faults), b"stopped")
            told -= 1
        told += 1
        if at > 1:  # (before it makes its note it has not begun)
            assert set(read_index(path).tensors) == set(other), at
            assert (path / COMMON_FILE).read_bytes() == b"other", at
        last = save_on(LocalStorage(path), b"last")
        check_holds(path, last, b"last")
    assert told > 5


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("exists", [False, True])
def test_a_save_that_is_killed_at_any_step_is_completed_or_gone(exists: bool, tmp_path: Path) -> None:
    completed = 0
    for at in range(steps(tmp_path / "counted")):
        path = tmp_path / str(at)
        path.mkdir()
        before = save(path, b"before") if exists else None

        def killed(path: Path = path, at: int = at) -> None:
            save_on(FaultyStorage(LocalStorage(path), Faults(at, lambda: os._exit(9))), b"killed")

        assert exit_code(fork(killed)) == 9
        # What it has claimed the next save completes, before it does anything itself.
        Commit.begin(LocalStorage(path)).give_up()
        held = None if not (path / METADATA_FILE).exists() else set(read_index(path).tensors)
        if held is not None and held != {before}:
            assert (path / COMMON_FILE).read_bytes() == b"killed", at
            assert {path.name for path in path.iterdir()} >= held, at
            completed += 1
        elif exists:
            assert held == {before}
            assert (path / COMMON_FILE).read_bytes() == b"before", at
        last = save_on(LocalStorage(path), b"last")
        check_holds(path, last, b"last")
    assert completed > 2


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("work", ["a removal of keys", "an acceptance of the common state"])
def test_a_tool_that_is_stopped_changes_nothing_of_the_save_after_it(work: str, tmp_path: Path) -> None:
    first = save_on(LocalStorage(tmp_path), b"first")
    (tmp_path / COMMON_FILE).write_bytes(b"changed")
    other: list[str] = []
    late = ahead_of(Commit, "publish", once(lambda: other.append(save_on(LocalStorage(tmp_path), b"other"))))
    with late, pytest.raises(SaveError, match="has lost: another save"):
        remove_tensors(tmp_path, first) if work == "a removal of keys" else accept_common_file(tmp_path)
    check_holds(tmp_path, other[0], b"other")


@pytest.mark.parametrize("way", ["without data", "cut data", "without data of a first tier", "links followed"])
def test_a_copy_of_a_directory_where_a_save_was_killed_is_not_completed(way: str, tmp_path: Path) -> None:
    """Neither loses the checkpoint that is there; each is told what to delete, and saves then."""
    path, copied = tmp_path / "run", tmp_path / "copy"
    path.mkdir()
    first = save_on(LocalStorage(path), b"first")

    def killed() -> None:
        commit_module._publish = lambda *_: os._exit(3)  # type: ignore[assignment]
        save_on(LocalStorage(path), b"killed")

    assert exit_code(fork(killed)) == 3
    shutil.copytree(path, copied, symlinks=way != "links followed")
    (data,) = (copied / name for name in names(path) if name.endswith(".distcp") and name != first)
    if way == "without data of a first tier":
        DrainNote(data_file_of(data.name).save, str(tmp_path / "second")).write(copied)
    if way == "cut data":
        os.truncate(data, 3)
    elif way != "links followed":
        data.unlink()
    with pytest.raises((SaveError, LoadError), match=r"(?i)cop(y|ied).*delete") as told:
        save_on(LocalStorage(copied), b"next")
    assert set(read_index(copied).tensors) == {first}
    assert (copied / COMMON_FILE).read_bytes() == b"first"
    (claim,) = (name for name in names(copied) if name.startswith(CLAIM))
    assert claim in str(told.value)
    for name in names(copied):
        if name.startswith((NOTE, CLAIM, DRAIN_FILE)):
            (copied / name).unlink()
    check_holds(copied, save_on(LocalStorage(copied), b"next"), b"next")
    check_holds(path, save_on(LocalStorage(path), b"next"), b"next")


# --- the note ---------------------------------------------------------------------------------------------------------


def refused(path: Path) -> str:
    with pytest.raises(SaveError) as told:
        Commit.begin(LocalStorage(path))
    assert len([name for name in names(path) if name.startswith(NOTE)]) == 1, "one's own note is gone"
    return str(told.value)


def test_a_second_job_is_refused_at_its_start_and_told_who_is_at_work(tmp_path: Path) -> None:
    commit = Commit.begin(LocalStorage(tmp_path))
    assert "not finalized yet" in refused(tmp_path)
    assert exit_code(fork(lambda: Commit.begin(LocalStorage(tmp_path)))) == 3
    commit.give_up()
    Commit.begin(LocalStorage(tmp_path)).give_up()
    assert names(tmp_path) == set()


def begin_and_be_killed(path: Path) -> None:
    kept: list[Commit] = []
    in_child(lambda: kept.append(Commit.begin(LocalStorage(path))))


def leave_note(content: bytes) -> Callable[[Path], object]:
    return lambda path: (path / (NOTE + "ab" * 8)).write_bytes(content)


LEFT: dict[str, Callable[[Path], object]] = {
    "killed": begin_and_be_killed,
    "its number is another's now": leave_note(replace(Owner.here(), save="ab" * 8, started="1").encode()),
    "its number is nobody's": leave_note(replace(Owner.here(), save="ab" * 8, pid=2**22 - 1).encode()),
    "an empty note": leave_note(b""),
    "a note of no time": leave_note(
        replace(Owner.here(), save="ab" * 8, host="another", place="another", since_s=67768036191676799).encode()
    ),
    "a note of others": leave_note(b'{"pid": "x"}'),
    "a pipe": lambda path: os.mkfifo(path / (NOTE + "ab" * 8)),
}


@pytest.mark.parametrize("leave", LEFT.values(), ids=LEFT)
def test_a_killed_process_is_in_nobodys_way(leave: Callable[[Path], object], tmp_path: Path) -> None:
    leave(tmp_path)
    assert len(names(tmp_path)) == 1
    check_holds(tmp_path, save_on(LocalStorage(tmp_path), b"x"), b"x")


def test_a_process_that_cannot_be_seen_counts_while_its_note_is_young(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    owner = replace(Owner.here(), host="another", place="another")
    storage.create(NOTE + owner.save, owner.encode())
    second_ago_ns = (tmp_path / (NOTE + owner.save)).stat().st_mtime_ns - 10**9
    os.utime(tmp_path / (NOTE + owner.save), ns=(second_ago_ns, second_ago_ns))
    assert f"process {os.getpid()} on host {owner.host}" in refused(tmp_path)
    assert not seems_gone(storage, owner)
    old_ns = (tmp_path / (NOTE + owner.save)).stat().st_mtime_ns - int((commit_module.YOUNG_S + 1) * 1e9)
    os.utime(tmp_path / (NOTE + owner.save), ns=(old_ns, old_ns))
    check_holds(tmp_path, save_on(storage, b"x"), b"x")


@pytest.mark.usefixtures("unseen")
def test_a_save_that_another_has_completed_is_published_whatever_fails_then(tmp_path: Path) -> None:
    class Completed(LocalStorage):
        def claim(self, name: str, owner: str) -> str:
            super().claim(name, owner)
            Commit.begin(LocalStorage(tmp_path)).give_up()
            raise OSError("the answer is lost")

    name = save_on(Completed(tmp_path), b"new")
    assert (set(read_index(tmp_path).tensors), (tmp_path / COMMON_FILE).read_bytes()) == ({name}, b"new")
    check_holds(tmp_path, save_on(LocalStorage(tmp_path), b"later"), b"later")


@pytest.mark.usefixtures("unseen")
def test_a_save_that_begins_while_another_is_published_is_told_of_that_one(tmp_path: Path) -> None:
    others = []

    class Meanwhile(LocalStorage):
        def list(self) -> list[str]:
            if not others:
                others.append(save_on(LocalStorage(tmp_path), b"other"))  # which removes the note of this one
            return super().list()

    with pytest.raises(SaveError, match=r"has lost: another save .* was published just when it began"):
        save_on(Meanwhile(tmp_path), b"lost")
    check_holds(tmp_path, others[0], b"other")


@pytest.mark.parametrize("target", ["../x"])
def test_a_claim_that_names_no_note_is_named(target: str, tmp_path: Path) -> None:
    (tmp_path / f"{CLAIM}none").symlink_to(target)
    with pytest.raises(SaveError, match="expected a save's note"):
        save_on(LocalStorage(tmp_path), b"x")


# --- the model --------------------------------------------------------------------------------------------------------


def test_a_save_begins_on_the_file_behind_one_that_is_gone_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GlusterFS opens what its client remembers as long as another host has it open, and answers ESTALE afterwards."""
    save(tmp_path, b"first")
    expected, real, gone = identity_in_force(LocalStorage(tmp_path)), os.preadv, iter([True])

    def preadv(*arguments: Any) -> int:
        if next(gone, False):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*arguments)

    monkeypatch.setattr(direct_io, "_LOOKS_S", -1.0)
    monkeypatch.setattr(os, "preadv", preadv)
    begun = Commit.begin(LocalStorage(tmp_path))
    assert begun.base == expected
    begun.check()


@pytest.mark.long
@pytest.mark.crash
@pytest.mark.timeout(600)
def test_the_protocol_holds_in_all_interleavings_and_needs_each_of_its_rules() -> None:
    """Crashes and power cuts after each operation of two savers, a reader and one that fails; see `commit_model`."""
    told = subprocess.run(
        [sys.executable, commit_model.__file__, "--deep", "20000"], capture_output=True, text=True, check=True
    ).stdout
    assert "NOT EXPECTED" not in told, told
    assert told.count("holds") > 10
    assert told.count("VIOLATED") > 8


@pytest.mark.usefixtures("unseen")
def test_a_save_that_begins_at_any_step_of_another_never_replaces_what_it_has_not_seen(tmp_path: Path) -> None:
    lost = 0
    for at in range(100):
        path = tmp_path / str(at)
        storage = LocalStorage(path)
        save_on(storage, b"old")
        late: list[Commit] = []
        faults = Faults(at, lambda path=path, late=late: late.append(Commit.begin(LocalStorage(path))))
        name = save_on(FaultyStorage(storage, faults), b"new")
        if not late:
            break
        (target,) = late
        seen, file = target.base, file_of(target)
        (path / file).write_bytes(b"late")
        is_new = seen == commit_module.identity_in_force(storage)
        try:
            target.publish(sealed(file, target.save_id))
        except SaveError:
            lost += 1
            assert set(read_index(path).tensors) == {name}
            assert (path / COMMON_FILE).read_bytes() == b"new"
        else:
            assert is_new, f"step {at}: it has replaced a save that it had not seen"
    assert lost > 5
