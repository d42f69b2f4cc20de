"""Listing a run, and deleting its old checkpoints: what must stay stays, whatever is asked for."""

import errno
import hashlib
import itertools
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import LoadPlan
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.directory import retention
from mcore_ckpt.directory.commit import Commit, Owner
from mcore_ckpt.directory.iterations import files_below
from mcore_ckpt.directory.retention import PruneReport, prune_run
from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER, TRACKER_FILE, encode_config
from mcore_ckpt.storage.resolve import LocalStorage, storage_at
from mcore_ckpt.tools import runs
from mcore_ckpt.tools.checkpoint import open_checkpoint
from mcore_ckpt.tools.runs import list_run
from tests.support.command import document_of, output_of
from tests.support.faulty_storage import Faults, FaultyStorage
from tests.support.local_files import flip
from tests.support.meanwhile import ahead_of, behind, once
from tests.support.object_server import ObjectDirectory
from tests.support.processes import exit_code, fork, in_child
from tests.support.stored_layouts import whole, write_checkpoint
from tests.support.stored_saves import loaded
from tests.support.stored_saves import save as save_rows

save = partial(save_rows, rows=1, thread_count=1)
ITERATIONS = (100, 200, 300, 400, 500)


def name_of(iteration: int) -> str:
    return f"iter_{iteration:07d}"


@pytest.fixture
def run(checkpoint: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    for iteration in ITERATIONS:
        shutil.copytree(checkpoint, directory / name_of(iteration))
    (directory / TRACKER_FILE).write_text("500")
    (directory / "tensorboard").mkdir()
    return directory


def left(run: Path) -> list[int]:
    found = (listed.checkpoint for listed in list_run(run).checkpoints)
    return [checkpoint.iteration for checkpoint in found if checkpoint.whole and checkpoint.iteration]


def going(report: PruneReport) -> list[int | None]:
    return [decision.checkpoint.iteration for decision in report.decisions if not decision.keep]


def why(report: PruneReport, iteration: int) -> str:
    return next(decision.reason for decision in report.decisions if decision.checkpoint.iteration == iteration)


def everything(run: Path) -> dict[str, int]:
    return {str(path.relative_to(run)): path.lstat().st_mtime_ns for path in run.rglob("*")}


def test_nothing_is_removed_unless_it_is_asked_for(run: Path) -> None:
    before = everything(run)
    assert main(["prune", str(run), "--keep-last", f"{10**30}", "--yes"]) == 0
    shown = output_of("prune", run, "--keep-last", "1")
    assert "4 of 5 checkpoints to remove" in shown
    assert "--yes" in shown
    assert everything(run) == before


def test_old_checkpoints_go_and_others_stay_as_they_are(run: Path) -> None:
    before = everything(run)
    (run / name_of(100) / f"..mcore_ckpt_drain.{'0' * 16}.{'1' * 16}.tmp").touch()  # a kill has left it
    assert "2 of 5 checkpoints removed" in output_of("prune", run, "--keep-last", "2", "--keep-every", "200", "--yes")
    assert left(run) == [200, 400, 500]
    assert not (run / name_of(100)).exists()
    kept = {path: when for path, when in before.items() if not path.startswith((name_of(100), name_of(300)))}
    assert everything(run) == kept


STAYS: dict[str, Callable[[Path], object]] = {
    "the tracker file names it": lambda run: (run / TRACKER_FILE).write_text("100"),
    # Stock marks nothing: a data file that is newer than the index is all there is to see.
    "a save may be at work": lambda run: os.utime(run / name_of(100) / "__0_0.distcp", (time.time() + 5,) * 2),
    "no index": lambda run: (run / name_of(100) / ".metadata").write_bytes(b"no pickle"),
    "release": lambda run: (run / "release").symlink_to(name_of(100)),
    name_of(900): lambda run: (
        (run / name_of(900)).symlink_to(name_of(100)),
        (run / TRACKER_FILE).write_text("900"),
    ),
}


@pytest.mark.parametrize("reason", STAYS)
def test_what_stays_though_it_is_old(run: Path, reason: str) -> None:
    STAYS[reason](run)
    report = prune_run(run, keep_last=1, remove=True)
    assert reason in why(report, 100)
    assert 500 not in going(report), "a link counts as one of the newest"
    assert {200, 300, 400} <= set(going(report))
    assert (run / name_of(100) / "__0_0.distcp").exists()


def saved_again(run: Path, iteration: int, order: int) -> None:
    """Make it the one that was saved at that place of the order, some hours ago."""
    if not (run / name_of(iteration)).exists():
        shutil.copytree(run / name_of(500), run / name_of(iteration))
    for path in (run / name_of(iteration)).iterdir():
        os.utime(path, (time.time() - 9000 + order,) * 2)


@pytest.mark.parametrize("tracker", [False, True])
def test_after_a_run_was_taken_back_the_newest_are_those_saved_last(run: Path, tracker: bool) -> None:
    """Resumed from 200 where 300 to 500 exist; then saves at other iterations than before."""
    for order, iteration in enumerate((*ITERATIONS, 250)):
        saved_again(run, iteration, order)

    def prune(last: int | None) -> list[int | None]:
        if tracker:
            (run / TRACKER_FILE).write_text("250" if last is None else str(last))
        else:
            (run / TRACKER_FILE).unlink(missing_ok=True)
        return going(prune_run(run, keep_last=2, remove=True, saved_last=None if last is None else name_of(last)))

    assert prune(250) == [100]
    assert left(run) == [200, 250, 300, 400, 500]
    assert prune(None) == []  # a person's: the same, by the times
    saved_again(run, 310, 10)
    assert prune(310) == [200]
    saved_again(run, 350, 11)
    assert prune(350) == [250, 300]  # 300 is of the branch that was left, and passed by now
    assert left(run) == [310, 350, 400, 500]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def flip_in_footer(path: Path) -> None:
    flip(path, -20)


@pytest.mark.parametrize(("damage", "tracked"), [(cut, True), (flip_in_footer, False)])
def test_a_complete_checkpoint_stays_where_the_newest_has_lost_a_part_of_a_file(
    damage: Callable[[Path], None], tracked: bool, tmp_path: Path
) -> None:
    for iteration in (100, 200, 300):
        save(str(tmp_path / name_of(iteration)), float(iteration))
        for path in (tmp_path / name_of(iteration)).iterdir():
            os.utime(path, (time.time() - 9000 + iteration,) * 2)
    (data,) = (tmp_path / name_of(300)).glob("*.distcp")
    times = (data.stat().st_atime, data.stat().st_mtime)
    damage(data)
    os.utime(data, times)
    if tracked:
        (tmp_path / TRACKER_FILE).write_text("300")
    assert damage is flip_in_footer or main(["list", str(tmp_path)]) == 1
    assert going(prune_run(tmp_path, keep_last=1)) == [100]
    assert "1 of 3 checkpoints removed" in output_of("prune", tmp_path, "--keep-last", "1", "--yes")
    assert loaded(tmp_path / name_of(200), rows=1) == 200.0


def test_a_complete_checkpoint_stays_where_the_newest_has_a_damaged_common_state(tmp_path: Path) -> None:
    for iteration in (100, 200):
        path = tmp_path / name_of(iteration)
        path.mkdir()
        write_checkpoint(path, {"w": whole(torch.ones(4))}, {"common_state/shard_0_1": [{"args": "of the job"}]})
        (path / "metadata.json").write_bytes(encode_config())
        for file in path.iterdir():
            os.utime(file, (time.time() - 9000 + iteration,) * 2)
    assert going(prune_run(tmp_path, keep_last=1)) == [100]
    (data,) = (file for file in path.iterdir() if b"of the job" in file.read_bytes())
    times = (data.stat().st_atime, data.stat().st_mtime)
    flip(data, data.read_bytes().index(b"of the job"))
    os.utime(data, times)
    assert going(prune_run(tmp_path, keep_last=1)) == []


def test_other_files_and_directories_stay(run: Path) -> None:
    own = run / name_of(100)
    (own / "notes.txt").write_text("by hand")
    (own / "evaluation").mkdir()
    (own / "evaluation" / "__0_0.distcp").write_bytes(b"of somebody else")
    (own / "__9_9.distcp").write_bytes(b"of no index")
    report = prune_run(run, keep_last=4, remove=True)
    assert report.decisions[0].left == ("__9_9.distcp", "evaluation", "notes.txt")
    assert sorted(path.name for path in own.rglob("*")) == [
        "__0_0.distcp",
        "__9_9.distcp",
        "evaluation",
        "notes.txt",
    ]


@pytest.mark.parametrize("place", ["directory", "store"])
def test_folders_that_megatron_has_made_in_a_checkpoint_go_with_it(
    place: str, tmp_path: Path, object_directory: ObjectDirectory
) -> None:
    root = str(tmp_path) if place == "directory" else object_directory.url
    for iteration in (1, 2):
        save(f"{root}/{name_of(iteration)}", float(iteration))
        for name in ("tokenizer/tokenizer.json", "modelopt_state/.metadata", "modelopt_state/__0_0.distcp"):
            storage_at(f"{root}/{name_of(iteration)}").publish(name, b"of this iteration")
    assert going(prune_run(root, keep_last=1, remove=True)) == [1]
    assert holding_files(root) == [name_of(2)]
    assert place == "store" or storage_at(root).folders() == [name_of(2)]
    assert storage_at(f"{root}/{name_of(2)}").exists("tokenizer/tokenizer.json")


def holding_files(root: str | Path) -> list[str]:
    """The folders of a run but for empty ones, which some stores list for a while."""
    return sorted({name.split("/")[0] for name in files_below(checkpoint_path(root))})


def test_what_goes_while_a_run_is_looked_at_is_no_damage(run: Path) -> None:
    def remove(directory: Path, **_: Any) -> None:
        if directory.name == name_of(100):
            shutil.rmtree(directory, ignore_errors=True)

    with ahead_of(runs, "look_at", remove):
        assert "4 checkpoints, 4 complete" in output_of("list", run)
    with behind(runs, "list_run", lambda _: shutil.rmtree(run / name_of(200))):
        assert f"{name_of(200)}: has been removed since" in output_of("verify", run, "--all")


def test_two_removals_at_once_go_on(run: Path) -> None:
    with Commit.begin(storage_at(run / name_of(200)), {retention.REMOVAL: True}):
        report = prune_run(run, keep_last=2)
    assert (why(report, 200), going(report)) == ("another removal is at work in it", [100, 300])
    with ahead_of(retention, "_remove", once(lambda: prune_run(run, keep_last=1, remove=True))):
        report = prune_run(run, keep_last=1, remove=True)
    assert (why(report, 100), going(report)) == (retention.GONE, [100, 200, 300, 400])


def test_release_and_what_lies_behind_a_link_stay(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / name_of(100), run / "release")
    (run / name_of(200)).rename(tmp_path / "elsewhere")
    (run / name_of(200)).symlink_to(tmp_path / "elsewhere")
    assert going(prune_run(run, keep_last=1, remove=True)) == [100, 300, 400]
    assert (tmp_path / "elsewhere" / ".metadata").exists()
    assert (run / "release" / ".metadata").exists()


@pytest.mark.parametrize("after", [0, 3])
def test_a_removal_that_was_killed_is_finished(run: Path, after: int) -> None:
    """Before it has removed anything, or in the middle."""
    calls = itertools.count()
    with ahead_of(LocalStorage, "delete", lambda *_, **__: os._exit(9) if next(calls) == after else None):
        assert exit_code(fork(lambda: prune_run(run, keep_last=4, remove=True))) == 9
    assert list(run.glob(".mcore_ckpt_removed.*"))
    assert left(run) == [200, 300, 400, 500]
    assert main(["verify", str(run / name_of(100))]) == 2
    assert going(prune_run(run, keep_last=4, remove=True)) == [100]
    assert not (run / name_of(100)).exists()
    assert not list(run.glob(".mcore*"))


def test_what_was_saved_after_it_was_judged_comes_back_from_a_removal_that_was_killed(run: Path) -> None:
    judged = hashlib.sha256(b"another").hexdigest()[:16]
    (run / name_of(200)).rename(run / f".mcore_ckpt_removed.{judged}.{'ab' * 8}.{name_of(200)}")
    prune_run(run, keep_last=5, remove=True)
    assert left(run) == [100, 200, 300, 400, 500]


def test_a_removal_that_is_stopped_at_any_step_takes_nothing_away_that_was_saved_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh(name: str) -> Path:
        for iteration in (1, 2):
            save(str(tmp_path / name / name_of(iteration)), 1.0)
        return tmp_path / name

    def prune(run: Path, faults: Faults) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(retention, "storage_at", lambda path: FaultyStorage(LocalStorage(path), faults))
            patched.setattr(Owner, "process_state", lambda _: "gone")
            with suppress(SaveError):
                prune_run(run, keep_last=1, remove=True, saved_last=name_of(2))

    counted = Faults()
    prune(fresh("counted"), counted)
    assert len(counted.operations) > 3
    assert not (tmp_path / "counted" / name_of(1)).exists()
    for at in range(len(counted.operations)):
        run = fresh(str(at))
        directory = run / name_of(1)
        prune(run, Faults(at, lambda directory=directory: save(str(directory), 11.0)))
        assert loaded(directory, rows=1) == 11.0
        prune_run(run, keep_last=2, remove=True)
        assert sorted(path.name for path in run.iterdir()) == [name_of(1), name_of(2)]


def test_a_full_file_system_does_not_keep_prune_from_making_room(run: Path) -> None:
    """A note takes space, too: where there is none, it goes without."""

    def fail(self: LocalStorage, name: str, _: bytes) -> None:
        if (self.root / ".metadata").exists():
            raise SaveError(f"{name}: No space left on device") from OSError(errno.ENOSPC, "No space left on device")

    with ahead_of(LocalStorage, "create", fail):
        assert going(prune_run(run, keep_last=4, remove=True)) == [100]
    assert not (run / name_of(100)).exists()


def test_a_list_tells_a_save_at_work_from_one_that_is_gone(run: Path) -> None:
    """One at work; one whose process has died; one elsewhere, then silent."""
    at_work = Commit.begin(LocalStorage(run / name_of(100)))
    kept: list[Commit] = []
    in_child(lambda: kept.append(Commit.begin(LocalStorage(run / name_of(300)))))  # and dies
    elsewhere = run / name_of(400) / f"{INCOMPLETE_MARKER}.{'ab' * 8}"
    elsewhere.write_bytes(replace(at_work.owner, host="another", place="another", save="ab" * 8).encode())

    def states() -> list[str]:
        rows = [line for line in output_of("list", run).splitlines() if line.startswith("iter_")]
        return ["written" if "being written" in row else "gone" if "is gone" in row else "" for row in rows]

    assert states() == ["written", "", "gone", "written", ""]
    os.utime(elsewhere, (time.time() - 86400, time.time() - 86400))
    at_work.give_up()
    assert states() == ["", "", "gone", "gone", ""]
    rows = document_of("list", run)["checkpoints"]
    assert [row["locked"] for row in rows] == [row["abandoned"] for row in rows] == [False, False, True, True, False]


def test_a_list_for_people(run: Path) -> None:
    assert output_of("list", run).count("complete") == 6
    (run / name_of(300) / "__0_0.distcp").unlink()
    (run / TRACKER_FILE).write_text("600")
    shown = output_of("list", run, code=1)
    assert "INCOMPLETE" in shown
    assert f"it names {name_of(600)}, which is not there" in shown


def test_what_a_load_reads_stays(tmp_path: Path) -> None:
    """As long as it does, by DCP here; each strategy's load does the same."""
    for iteration in (1, 2):
        save(str(tmp_path / name_of(iteration)), 1.0)
    found: list[str] = []

    class Planner(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            found.append(why(prune_run(tmp_path, keep_last=1, remove=True), 1))
            return super().create_local_plan()

        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            found.append(why(prune_run(tmp_path, keep_last=1, remove=True), 1))
            return super().resolve_tensor(read_item)

    value = loaded(tmp_path / name_of(1), 1, Planner())
    with open_checkpoint(tmp_path / name_of(1)):
        found.append(why(prune_run(tmp_path, keep_last=1, remove=True), 1))
    assert found == ["a load is reading it"] * 4  # of the plan, two tensors, and what is open
    assert value == 1.0
    assert going(prune_run(tmp_path, keep_last=1, remove=True)) == [1]
    assert holding_files(tmp_path) == [name_of(2)]
    assert storage_at(tmp_path).folders() == [name_of(2)]


def test_a_load_that_begins_as_its_checkpoint_is_to_go_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `prune` has asked, and before the directory is renamed."""
    for iteration in (1, 2):
        save(str(tmp_path / name_of(iteration)), float(iteration))
    storage = storage_at(tmp_path / name_of(1))
    before = storage.list()
    load = ExitStack()

    def named(length: int) -> str:
        load.enter_context(storage.in_use(".metadata"))
        return "ab" * length

    with load, monkeypatch.context() as patched:
        patched.setattr(retention, "secrets", SimpleNamespace(token_hex=named))
        report = prune_run(tmp_path, keep_last=1, remove=True)
        assert why(report, 1) == "a load is reading it"
        assert going(report) == []
    assert storage.list() == before
    assert loaded(tmp_path / name_of(1), rows=1) == 1.0
