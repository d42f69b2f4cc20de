"""Copies to a second tier that meet others there, are stopped for long, or are cut off at any step."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

from mcore_ckpt import OptionError, SaveOptions, verify_checkpoint
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.dcp import writer as dcp_writer
from mcore_ckpt.directory import copying
from mcore_ckpt.directory import drain as drain_module
from mcore_ckpt.directory import lock as lock_module
from mcore_ckpt.directory.drain import give_up
from mcore_ckpt.directory.drain_note import DrainNote
from mcore_ckpt.directory.iterations import look_at
from mcore_ckpt.directory.lock import DirectoryLock
from mcore_ckpt.directory.retention import prune_run
from mcore_ckpt.format.metadata_read import COMMON_FILE, CONFIG_FILE, DRAIN_FILE, METADATA_FILE, encode_config
from mcore_ckpt.save import _upkeep_process, upkeep
from mcore_ckpt.storage._local import LocalStorage
from mcore_ckpt.storage.resolve import storage_at
from tests.save.test_drain import (
    NAME,
    _contents,
    _kill,
    _Killed,
    _resume_alone,
    _save_alone,
    _value,
    data_files,
    note_of,
    options,
)
from tests.save.test_upkeep import there
from tests.support.gcs_server import ObjectDirectory


def _save_with_others(monkeypatch: pytest.MonkeyPatch, run: Path, far: Path, value: float) -> Path:
    """As Megatron-Core leaves a checkpoint; `tokenizer/` has a file of its own for each value."""
    directory = _save_alone(monkeypatch, run, far, 1, value)
    torch.save({"value": value}, directory / COMMON_FILE)
    (directory / CONFIG_FILE).write_bytes(encode_config())
    for name in ("vocab.json", f"only of {value}.json"):
        storage_at(directory).publish(f"tokenizer/{name}", f"{value}".encode())
    return directory


_CHANGING = "create delete delete_through lock move move_new open_writer publish revoke".split()


class _Steps:
    """Calls `interlude` when a process comes to its step `number` of those that change the directory `place`."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, place: Path, number: int, interlude: Callable[[], None]
    ) -> None:
        self.names: list[str] = []
        self.is_reached = False
        self._place, self._number, self._interlude = place, number, interlude
        for method in _CHANGING:
            monkeypatch.setattr(LocalStorage, method, self._counted(method, getattr(LocalStorage, method)))

    def _counted(self, method: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(storage: LocalStorage, name: str, *more: Any, **options: Any) -> Any:
            if not self.is_reached and Path(storage.root) == self._place:
                self.names.append(f"{method} {name}")
                if len(self.names) == self._number:
                    self.is_reached = True
                    self._interlude()
            return real(storage, name, *more, **options)

        return counted


@pytest.mark.long
def test_a_drain_that_was_stopped_at_any_step_leaves_a_later_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives no sign of life; another host takes the directory over and commits a later save of the iteration."""
    monkeypatch.setattr(lock_module, "BEAT_S", 0.02)
    monkeypatch.setattr(lock_module, "LEASE_S", 0.1)
    for number in itertools.count(1):
        base = tmp_path / str(number)
        before, first, second, far = (base / name for name in ("before", "first", "second", "far"))
        _save_with_others(monkeypatch, before, far, 0.0)
        _resume_alone(before, far)
        _save_with_others(monkeypatch, first, far, 1.0)
        _save_with_others(monkeypatch, second, far, 2.0)

        def another_host(second: Path = second, far: Path = far) -> None:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(lock_module, "platform", SimpleNamespace(node=lambda: "another-host"))
                said = _resume_alone(second, far)
            assert note_of(second / NAME).state == "copied", said

        with monkeypatch.context() as patched:
            patched.setattr(lock_module, "_renew", lambda owner, life: None)
            counted = _Steps(patched, far / NAME, number, another_host)
            _resume_alone(first, far)
        if not counted.is_reached:
            break
        _resume_alone(first, far)
        where = f"stopped before step {number}: {counted.names[-1]}"
        expected = _contents(second / NAME)
        assert _contents(far / NAME) == {**expected, DRAIN_FILE: (far / NAME / DRAIN_FILE).read_bytes()}, where
        assert note_of(far / NAME).save == note_of(second / NAME).save, where
        assert verify_checkpoint(far / NAME).whole, where
        # (stopped when all but the lock's own files was done, it had copied it)
        assert note_of(first / NAME).state in ("superseded", "copied"), where
    assert number > 20


@pytest.mark.parametrize("place", ["directory", "store"])
def test_of_two_drains_of_one_save_the_slower_removes_nothing_that_is_committed(
    place: str, tmp_path: Path, object_directory: ObjectDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads back something else than it has written, or so it seems to it."""
    near = tmp_path / "near"
    far = checkpoint_path(str(tmp_path / "far") if place == "directory" else object_directory.url)
    _save_alone(monkeypatch, near, far, 1, 1.0)
    real, others = copying._crc_of, []

    def wrong(storage: Any, name: str) -> int:
        crc = real(storage, name)
        if not others:
            others.append(name)
            _resume_alone(near, far)
            assert (note_of(near / NAME).state, storage.exists(METADATA_FILE)) == ("copied", True)
            return crc ^ 1
        return crc

    with monkeypatch.context() as patched:
        patched.setattr(copying, "_crc_of", wrong)
        (said,) = _resume_alone(near, far)
    assert "could not be copied" in said
    assert verify_checkpoint(far / NAME).whole
    assert _resume_alone(near, far)[0].endswith(" s")
    assert verify_checkpoint(far / NAME).whole
    assert not [name for name in storage_at(far / NAME).list() if name.startswith(copying.COPYING)]


def test_a_file_on_its_way_has_no_name_that_others_would_take_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    directory = _save_alone(monkeypatch, near, far, 1, 1.0)
    real, seen = copying.refuse_changed, []

    def killed(*arguments: Any) -> None:
        real(*arguments)
        seen.extend(path.name for path in (far / NAME).iterdir())
        _kill()

    with monkeypatch.context() as patched:
        patched.setattr(copying, "refuse_changed", killed)
        patched.setattr(copying.RangeWriter, "abort", lambda self: None)
        patched.setattr("mcore_ckpt.storage._local_writer.LocalWriter.abort", lambda self: None)
        with pytest.raises(_Killed):
            _resume_alone(near, far)
    assert len(seen) == 1
    assert seen[0].startswith(copying.COPYING)
    _resume_alone(near, far)
    expected = sorted(path.name for path in directory.iterdir())
    assert sorted(path.name for path in (far / NAME).iterdir()) == expected


def test_what_was_committed_by_another_process_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    note = note_of(_save_alone(monkeypatch, near, far, 1, 1.0))
    real = DirectoryLock.take.__func__  # type: ignore[attr-defined]

    def late(kind: type[DirectoryLock], storage: Any, *more: Any, **options: Any) -> DirectoryLock:
        monkeypatch.setattr(DirectoryLock, "take", classmethod(real))
        _resume_alone(near, far)
        return DirectoryLock.take(storage, *more, **options)

    (far / NAME).mkdir(parents=True)
    (far / NAME / data_files(near / NAME)[0].name).write_bytes(b"a part")
    monkeypatch.setattr(DirectoryLock, "take", classmethod(late))
    give_up(note)
    assert verify_checkpoint(far / NAME).whole


@pytest.mark.parametrize("ends", [_kill, lambda *_: (_ for _ in ()).throw(OSError("no space"))])
@pytest.mark.parametrize("was_copied", [False, True])
def test_a_save_that_was_cut_off_before_it_was_published_takes_no_note_away(
    was_copied: bool,
    ends: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    directory = _save_alone(monkeypatch, near, far, 1, 1.0)
    if was_copied:
        _resume_alone(near, far)
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(dcp_writer, "publish", ends)
            with pytest.raises(BaseException):  # noqa: B017
                _save_alone(monkeypatch, near, far, 1, 2.0)
    assert _value(directory) == 1.0
    said = _resume_alone(near, far)
    assert [text for text in said if "copied to" not in text] == []
    assert len(said) == (not was_copied)
    assert _value(far / NAME) == 1.0
    assert verify_checkpoint(far / NAME).whole
    assert _resume_alone(near, far) == []
    main(["list", str(near)])
    assert "copied" in capsys.readouterr().out
    # One that is published is copied in its place.
    _save_alone(monkeypatch, near, far, 1, 3.0)
    _resume_alone(near, far)
    assert _value(far / NAME) == 3.0


def test_a_save_during_a_note_of_how_far_an_earlier_one_is_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    directory = _save_alone(monkeypatch, near, far, 1, 1.0)
    create, values = LocalStorage.create, [2.0]

    def save_meanwhile(self: LocalStorage, name: str, content: bytes) -> None:
        create(self, name, content)
        if name.startswith(f".{DRAIN_FILE}.") and values:
            _save_alone(monkeypatch, near, far, 1, values.pop())

    monkeypatch.setattr(LocalStorage, "create", save_meanwhile)
    _resume_alone(near, far)
    assert not values, "a note was to be written, and was overtaken"
    _resume_alone(near, far)
    assert _value(far / NAME) == 2.0
    assert verify_checkpoint(far / NAME).whole
    assert note_of(directory).state == "copied"
    assert not [path.name for path in directory.iterdir() if path.name.endswith(".tmp")]


def test_a_note_that_was_half_written_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    directory = _save_alone(monkeypatch, near, far, 1, 1.0)
    left, fresh = (directory / f".{DRAIN_FILE}.{digit * 16}.tmp" for digit in "01")
    for file in (left, fresh):
        file.write_bytes(b"half")
    os.utime(left, (0, 0))
    _resume_alone(near, far)
    assert note_of(directory).state == "copied"
    assert (left.exists(), fresh.exists()) == (False, True)


@pytest.mark.timeout(120)
def test_notes_of_two_processes_at_once_lose_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    directory = _save_alone(monkeypatch, near, far, 1, 0.0)
    pid = os.fork()
    if pid == 0:
        while True:  # as the process that copies does every 2 s
            with contextlib.suppress(Exception):
                note = note_of(directory)
                for copied_bytes in range(3):
                    _upkeep_process._write(replace(note, copied_bytes=copied_bytes), directory)
    try:
        for number in range(1, 60):
            _save_alone(monkeypatch, near, far, 1, float(number))
            found = DrainNote.in_force(directory)
            assert found is not None
            assert found.save == note_of(directory).save, f"save {number} has lost its note"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    _resume_alone(near, far)
    assert _value(far / NAME) == 59.0


def test_leftovers_are_pruned_by_when_they_were_saved_not_when_they_were_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest is copied first: what is copied last is not what was saved last."""
    near, far = tmp_path / "near", tmp_path / "far"
    for iteration in (9, 1, 2, 3):  # taken back from 9
        _save_alone(monkeypatch, near, far, iteration, 0.0)
    _resume_alone(near, far)
    times = {name: (far / name / METADATA_FILE).stat().st_mtime for name in there(str(far))}
    assert max(times, key=times.__getitem__) == NAME
    (far / "latest_checkpointed_iteration.txt").unlink()
    decisions = prune_run(far, keep_last=1).decisions
    reasons = {decision.checkpoint.iteration: decision.reason for decision in decisions}
    assert reasons[3] == "one of the newest 1"
    assert "that of the last save, 3" in reasons[9]


@pytest.mark.parametrize("loads", ["by the strategy", "plain DCP"])
def test_a_job_that_goes_back_in_the_second_tier_to_before_what_a_faster_clock_has_saved(
    loads: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, new = (tmp_path / name for name in ("near", "far", "new"))
    real = time.time

    def job(ahead_s: float) -> None:
        monkeypatch.setattr(upkeep, "_latest_s", 0.0)
        monkeypatch.setattr(upkeep, "_seen", set())
        monkeypatch.setattr(upkeep, "time", SimpleNamespace(time=lambda: real() + ahead_s))

    for iteration, ahead_s in ((1, 600.0), (2, 630.0)):
        job(ahead_s)
        _save_alone(monkeypatch, near, far, iteration, float(iteration))
    _resume_alone(near, far)
    job(0.0)
    if loads == "by the strategy":
        with monkeypatch.context() as patched:
            patched.setattr(upkeep, "_ask", lambda task: None)
            upkeep.run_loaded(far / NAME, options(str(far)), str(new))
    for iteration in (2, 3):
        _save_alone(monkeypatch, new, far, iteration, 100.0)
    said = _resume_alone(new, far)
    assert [text for text in said if "is not copied" in text] == []
    assert (_value(far / "iter_0000002"), _value(far / "iter_0000003")) == (100.0, 100.0)
    assert (far / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_a_second_tier_that_does_not_answer_holds_the_first_save_up_for_seconds_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, ends = [], threading.Event()

    def hang(second: Path) -> None:
        asked.append(second)
        ends.wait()

    monkeypatch.setattr(upkeep, "_see_all", hang)
    monkeypatch.setattr(upkeep, "_LOOK_WITHIN_S", 0.05)
    far = tmp_path / "far"
    for iteration in (1, 2):
        _save_alone(monkeypatch, tmp_path / "near", far, iteration, 1.0)
    ends.set()
    assert asked == [far]
    assert caplog.text.count("could not be looked through") == 1


def test_a_second_tier_that_is_the_first_one_by_another_path_is_refused(tmp_path: Path) -> None:
    near = tmp_path / "disk" / "run"
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    for drain_to in (str(near), f"{near}/", str(tmp_path / "link" / "run"), f"{near}/../run"):
        with pytest.raises(OptionError, match="the checkpoint is saved there already"):
            upkeep.check_second_tier(near / NAME, SaveOptions(drain_to=drain_to))
    for drain_to in (tmp_path / "run", tmp_path / "link" / "other", near / "far"):
        upkeep.check_second_tier(near / NAME, SaveOptions(drain_to=str(drain_to)))


def test_a_second_tier_that_is_the_first_one_by_a_mount_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imitated: what is mounted in two places has two paths, and neither leads to the other by a link."""
    disk, mounted = tmp_path / "disk", tmp_path / "mounted"
    disk.mkdir()
    mounted.mkdir()
    real = os.stat

    def as_mounted(path: Any, *more: Any, **options: Any) -> os.stat_result:
        text = os.fspath(path)
        is_path = isinstance(text, str)
        return real(text.replace(str(mounted), str(disk)) if is_path else path, *more, **options)

    monkeypatch.setattr(upkeep.os, "stat", as_mounted)
    for run in ("run", "run/below"):
        with pytest.raises(OptionError, match="the checkpoint is saved there already"):
            upkeep.check_second_tier(disk / run / NAME, SaveOptions(drain_to=str(mounted / run)))
    upkeep.check_second_tier(disk / "run" / NAME, SaveOptions(drain_to=str(mounted / "other")))


def test_a_profile_that_names_the_first_tier_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("multistorageclient", reason="profiles are read by it")
    with pytest.raises(OptionError, match="the checkpoint is saved there already"):
        upkeep.check_second_tier(tmp_path / NAME, SaveOptions(drain_to=f"msc://__filesystem__{tmp_path}"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"save": "x", "to": "/x", "files": null}'])
def test_a_damaged_note_is_no_damage_and_holds_up_no_other_checkpoint(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for iteration in (1, 2, 3):
        _save_alone(monkeypatch, near, far, iteration, float(iteration))
    (near / NAME / DRAIN_FILE).write_bytes(content)
    said = _resume_alone(near, far)
    assert there(str(far)) == ["iter_0000002", "iter_0000003"]
    assert [text for text in said if f"{near / NAME / DRAIN_FILE}: does not say" in text]
    assert main(["list", str(near)]) == 0
    assert "INCOMPLETE" not in capsys.readouterr().out
    # A save of that iteration leaves a note that can be read.
    _save_alone(monkeypatch, near, far, 1, 4.0)
    _resume_alone(near, far)
    assert _value(far / NAME) == 4.0


def test_a_drain_that_was_killed_leaves_no_lock_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the marker is there, and after it is gone: nothing leads to the lease then."""
    near, far = tmp_path / "near", tmp_path / "far"
    _save_alone(monkeypatch, near, far, 1, 1.0)
    storage = storage_at(far / NAME)
    storage.ensure()
    for left in ("", ".publish", ".common"):
        dead = lock_module.Owner.here()
        storage.create(f".mcore_ckpt_incomplete.{dead.save_id}{left}", dead.encode() if not left else b"")
    _resume_alone(near, far)
    assert sorted(_contents(far / NAME)) == sorted(_contents(near / NAME))
    assert not look_at(far / NAME)[0].locked


def test_late_files_of_the_same_length_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    directory = _save_alone(monkeypatch, near, far, 1, 1.0)
    (directory / "state.json").write_text('{"consumed": 0000}')
    _resume_alone(near, far)
    (directory / "state.json").write_text('{"consumed": 4096}')
    (said,) = _resume_alone(near, far)
    assert "files that came after the save" in said
    assert (far / NAME / "state.json").read_text() == '{"consumed": 4096}'
    assert _resume_alone(near, far) == []


def test_late_files_of_a_run_that_has_gone_back_are_copied_by_the_next_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for iteration in (200, 150):
        directory = _save_alone(monkeypatch, near, far, iteration, float(iteration))
        _resume_alone(near, far)
    storage_at(directory).publish("tokenizer/tokenizer.json", b"late")
    assert "files that came after the save" in " ".join(_resume_alone(near, far))
    assert (far / directory.name / "tokenizer" / "tokenizer.json").read_bytes() == b"late"


@pytest.mark.parametrize("nbytes", [10, 1000])
def test_a_copy_that_is_cut_off_before_its_publish_leaves_what_it_was_to_replace(
    nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_module, "_MAX_REPLACED_BYTES", 100)
    names = ("tokenizer/vocab.json", "modelopt_state/.metadata", "train_dataloader_dprank000.pt", "integrity.json")

    def kept() -> list[Any]:
        return [_value(far / NAME), *((far / NAME / name).read_bytes() for name in names)]

    def expected(value: float) -> list[Any]:
        return [value, *[str(value).encode() * nbytes] * len(names)]

    near, far = tmp_path / "near", tmp_path / "far"
    publish = DirectoryLock.publish
    for value in (1.0, 2.0):
        directory = _save_alone(monkeypatch, near, far, 1, value)
        for name in names:
            storage_at(directory).publish(name, str(value).encode() * nbytes)
        with monkeypatch.context() as patched:
            if value == 2.0:
                patched.setattr(
                    DirectoryLock,
                    "publish",
                    lambda self, name, *more, **options: (
                        _kill() if name == METADATA_FILE else publish(self, name, *more, **options)
                    ),
                )
                with pytest.raises(_Killed):
                    _resume_alone(near, far)
            else:
                _resume_alone(near, far)
        assert kept() == expected(1.0)
    _resume_alone(near, far)
    assert kept() == expected(2.0)


def test_files_that_only_the_replaced_save_had_go_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for value in (1.0, 2.0):
        directory = _save_with_others(monkeypatch, near, far, value)
        (directory / "tokenizer" / "only of 1.0.json").unlink() if value == 2.0 else None
        _resume_alone(near, far)
    assert sorted(path.name for path in (far / NAME / "tokenizer").iterdir()) == ["only of 2.0.json", "vocab.json"]


def test_a_local_checkpoint_that_was_lost_in_part_is_restored_by_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    directory = _save_alone(monkeypatch, near, far, 1, 1.0)
    _resume_alone(near, far)
    (directory / METADATA_FILE).unlink()
    assert main(["copy", str(far / NAME), str(directory)]) == 0
    assert _value(directory) == 1.0
    assert look_at(directory)[0].drain == note_of(directory)
