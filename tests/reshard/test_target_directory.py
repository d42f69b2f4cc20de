"""The temporary directory of a target: whose folder is whose, what is resumed, what is removed, what appears."""

import errno
import fcntl
import os
import time
from array import array
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from mcore_ckpt.core.errors import CheckpointError, CheckpointExistsError, LoadError, OptionError, SaveError
from mcore_ckpt.image.layout import WrittenFile
from mcore_ckpt.reshard.target_directory import FileJournal, begun_work, refuse_target, target_folder

WORK = "the fingerprint of some work"
WRITTEN = WrittenFile(
    "half", 10, 0, array("I"), array("I", [7]), array("I", [0]), array("I", [1]), array("I", [9]), ((0, 5),)
)


def left_by(target: Path, work: str, *, is_begun: bool = True) -> Path:
    """What a run that was killed has left."""
    folder = target.with_name(f"{target.name}.partial")
    folder.mkdir()
    (folder / "half").write_bytes(b"half of it")
    with closing(FileJournal(folder.with_name(f"{folder.name}.journal"))) as journal:
        journal.begin(work)
        if is_begun:
            journal.record([WRITTEN], [("key", 0, 8)])
    return folder


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def make(target: Path, work: str = WORK, *, restart: bool = False) -> list[str]:
    """Make a target; returns what was in its folder at first."""
    with target_folder(target, work, restart=restart) as made:
        found = names(made.folder)
        assert bool(found) is bool(made.journal.written)
        (made.folder / "all").write_bytes(b"all of it")
    assert "all" in names(target)
    assert [name for name in names(target.parent) if name.startswith(f"{target.name}.")] == []
    return found


def test_a_target_without_a_name_of_its_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"expected a path that ends with"):
        make(Path("."))
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_too_long_is_an_error_of_the_target(tmp_path: Path) -> None:
    for look in (begun_work, partial(refuse_target, tmp_path / "source")):
        with pytest.raises(SaveError, match="File name too long"):
            look(tmp_path / ("n" * 300))


def test_a_link_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "t").symlink_to("nowhere")
    with pytest.raises(CheckpointExistsError), target_folder(tmp_path / "t", WORK):
        pytest.fail("the work was begun")
    assert names(tmp_path) == ["t"]


@pytest.mark.parametrize("end", [b"deadbeef {", b'deadbeef {"other": [[], null]}\n'], ids=["torn", "damaged"])
def test_the_same_work_is_resumed(tmp_path: Path, end: bytes) -> None:
    folder = left_by(tmp_path / "t", WORK)
    (folder / f"..metadata.{'0' * 16}.tmp").touch()
    journal = tmp_path / "t.partial.journal"
    journal.write_bytes(journal.read_bytes() + end)
    with target_folder(tmp_path / "t", WORK) as made:
        assert made.folder == folder
        assert (made.journal.written, made.journal.crcs) == ({"half": WRITTEN}, {("key", 0): 8})
    assert names(tmp_path / "t") == ["half"]


@pytest.mark.parametrize("kind", ["nothing done", "damaged journal", "no folder"])
def test_what_is_of_no_use_goes(tmp_path: Path, kind: str) -> None:
    folder = left_by(tmp_path / "t", WORK, is_begun=kind != "nothing done")
    if kind == "damaged journal":
        (tmp_path / "t.partial.journal").write_text('deadbeef ["work", "00"]\n{"worker": "x"}\n')
    elif kind == "no folder":
        (folder / "half").unlink()
        folder.rmdir()
    found = make(tmp_path / "t", "other work" if kind == "nothing done" else WORK)
    assert found == []


def test_a_journal_stays_until_its_target_is_finished_and_no_longer(tmp_path: Path) -> None:
    folder = left_by(tmp_path / "t", WORK)
    finish = mock.Mock(side_effect=LoadError("the tracker file cannot be read"))
    with pytest.raises(LoadError), target_folder(tmp_path / "t", WORK, finish):
        assert names(folder) == ["half"]
    assert names(tmp_path) == ["t", "t.partial.journal"]
    (tmp_path / "t" / ".metadata").write_bytes(b"of another checkpoint in its place")
    with pytest.raises(CheckpointExistsError):
        refuse_target(tmp_path / "source", tmp_path / "t")
    assert names(tmp_path) == ["t"]


def test_what_no_command_has_left_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "t.partial").mkdir()
    (tmp_path / "t.partial" / "file").write_bytes(b"hours of work")
    for _ in range(2):
        with pytest.raises(OptionError, match=r"t\.partial: is or holds what no command"):
            make(tmp_path / "t", restart=True)
    assert names(tmp_path / "t.partial") == ["file"]


@pytest.mark.parametrize("name", ["t.partial", "t.partial.journal"])
def test_a_pipe_or_a_file_of_the_user_is_named_and_left_alone(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=name):
        make(tmp_path / "t")
    (tmp_path / name).unlink()
    (tmp_path / name).write_text("notes")
    with pytest.raises(OptionError, match=name):
        make(tmp_path / "t", restart=True)
    assert (tmp_path / name).read_text() == "notes"
    assert names(tmp_path) == [name]


def test_the_second_run_is_refused_while_the_first_is_at_work(tmp_path: Path) -> None:
    with target_folder(tmp_path / "t", WORK) as made:
        made.journal.record([WRITTEN], [("key", 0, 8)])
        for restart in (False, True):
            with pytest.raises(SaveError, match="another command is making this target"):
                make(tmp_path / "t", restart=restart)
    (tmp_path / "t" / "x").write_text("")
    with pytest.raises(CheckpointExistsError):
        make(tmp_path / "t", restart=True)


def test_a_folder_that_is_not_the_runs_own_does_not_appear(tmp_path: Path) -> None:
    """Where two hosts see no locks of each other, one may throw away what the other is making."""

    def be_replaced() -> None:
        with target_folder(tmp_path / "t", WORK):
            (tmp_path / "t.partial").rename(tmp_path / "gone")
            (tmp_path / "t.partial").mkdir()

    with pytest.raises(SaveError, match="another run has replaced"):
        be_replaced()
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_what_appears_meanwhile_is_not_replaced(tmp_path: Path, kind: str) -> None:
    def be_overtaken() -> None:
        with target_folder(tmp_path / "t", WORK) as made:
            made.journal.record([WRITTEN], [("key", 0, 8)])
            if kind == "file":
                (tmp_path / "t").write_text("somebody's")
            else:
                (tmp_path / "t").mkdir()
                (tmp_path / "t" / "x").write_text("somebody's")

    with pytest.raises(CheckpointExistsError):
        be_overtaken()
    assert names(tmp_path) == ["t"]
    assert (tmp_path / "t" if kind == "file" else tmp_path / "t" / "x").read_text() == "somebody's"


def test_without_locks_only_what_is_old_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_locks = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=no_locks))
    left_by(tmp_path / "t", WORK)
    with pytest.raises(SaveError, match="this file system has no locks"):
        make(tmp_path / "t")
    assert names(tmp_path) == ["t.partial", "t.partial.journal"]
    day_ago = time.time() - 25 * 3600
    os.utime(tmp_path / "t.partial.journal", (day_ago, day_ago))
    assert make(tmp_path / "t") == ["half"]
