"""Two tiers: saved on local storage, copied to a second place in the background, and committed there."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

from mcore_ckpt import FileSystemWriterAsync, LoadOptions, OptionError, SaveOptions, verify_checkpoint
from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import LoadError, SaveError
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.directory import drain as drain_module
from mcore_ckpt.directory.drain import give_up
from mcore_ckpt.directory.drain_note import DrainNote
from mcore_ckpt.directory.in_force import saves_of
from mcore_ckpt.directory.iterations import tracked_name
from mcore_ckpt.directory.lock import DirectoryLock
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    DRAIN_FILE,
    METADATA_FILE,
    TRACKER_FILE,
    encode_config,
    read_index,
)
from mcore_ckpt.save import _upkeep_process, upkeep
from mcore_ckpt.storage.resolve import storage_at
from tests.save.test_upkeep import Training, there, until
from tests.support.gcs_server import ObjectDirectory
from tests.support.gloo_ranks import rank_outcomes, run_ranks
from tests.support.gloo_ranks import run_megatron_ranks as run_megatron
from tests.support.object_server import Fault, Proxy, Request, S3Directory

NAME = "iter_0000001"


def options(drain_to: str, **more: Any) -> SaveOptions:
    return SaveOptions(progress=False, drain_to=drain_to, **more)


def _train(rank: int, run: str, saves: list[tuple[int, float]], save_options: SaveOptions) -> None:
    """Saves of iterations, of these values, each of which is copied before the next; `run` may hold the rank."""
    training = Training(rank, run.format(rank=rank), save_options)
    training.shared = "{rank}" not in run
    assert save_options.drain_to is not None
    for iteration, value in saves:
        training.save(iteration, value=value)
        until(lambda name=f"iter_{iteration:07d}": tracked_name(save_options.drain_to) == name)  # type: ignore[misc]
        if rank == 0:  # as Megatron-Core does after it has written the tracker file
            late = Path(training.run) / f"iter_{iteration:07d}" / "tokenizer" / "tokenizer.json"
            late.parent.mkdir(exist_ok=True)
            late.write_text(f"of {iteration}")
    training.queue.close()
    upkeep._finish()  # as at the end of a trainer


def _load(rank: int, directory: str, world: int, load_options: LoadOptions) -> list[float]:
    from megatron.core.dist_checkpointing import ShardedTensor

    from mcore_ckpt import TorchDistLoadStrategy

    blank = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2000 // world), (0, rank, world))}
    loaded = TorchDistLoadStrategy(options=load_options).load(blank, directory.format(rank=rank))["w"]
    return loaded.unique().tolist()  # type: ignore[no-any-return]


def _contents(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def data_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.distcp"))


def note_of(directory: Path) -> DrainNote:
    note = DrainNote.read(directory)
    assert note is not None
    return note


@pytest.mark.parametrize("field", ["copied_bytes", "total_bytes", "attempts", "updated_s", "saved_s", "begun_s"])
@pytest.mark.parametrize("number", ["NaN", "-5", "1" + "0" * 400])
def test_a_note_with_a_number_that_cannot_be_is_damaged(
    field: str, number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / NAME
    dcp.save({"w": torch.ones(3)}, storage_writer=FileSystemWriterAsync(directory), no_dist=True)
    save = next(iter(saves_of(read_index(directory))))
    good = DrainNote(save, str(tmp_path / "far"), state="failed", copied_bytes=5).encode()
    (directory / DRAIN_FILE).write_bytes(good)
    assert note_of(directory).copied_bytes == 5
    (directory / DRAIN_FILE).write_text(json.dumps({**json.loads(good), field: "@"}).replace('"@"', number))
    with pytest.raises(LoadError, match="does not say how far"):
        DrainNote.read(directory)
    assert main(["list", str(tmp_path)]) == 0
    assert "complete" in capsys.readouterr().out


def test_checkpoints_are_committed_in_a_second_directory_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    run_megatron(_train, 2, str(near), [(1, 0.0), (2, 0.0)], options(str(far)))
    for name in there(str(near)):
        contents = [_contents(run / name) for run in (near, far)]
        assert contents[1]["tokenizer/tokenizer.json"] == f"of {int(name[5:])}".encode()
        assert [json.loads(content.pop(DRAIN_FILE))["state"] for content in contents] == ["copied"] * 2
        assert contents[0] == contents[1]
        assert verify_checkpoint(far / name).whole
    assert (far / TRACKER_FILE).read_text() == "2"
    assert main(["list", str(near)]) == 0
    assert len(re.findall("complete, copied", capsys.readouterr().out)) == 2
    assert main(["list", str(near), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["drain"]["state"] for row in listed] == ["copied"] * 2


def test_a_checkpoint_that_is_saved_again_replaces_the_one_in_the_store(
    object_directory: ObjectDirectory, tmp_path: Path
) -> None:
    """The tracker goes back with the run."""
    far = f"{object_directory.url}/run"
    run_megatron(_train, 2, str(tmp_path), [(1, 0.0), (2, 0.0)], options(far))
    assert tracked_name(far) == "iter_0000002"
    run_megatron(_train_from, 2, str(tmp_path), NAME, [(1, 10.0)], options(far))
    assert tracked_name(far) == NAME
    assert verify_checkpoint(f"{far}/{NAME}").whole
    own = f"run/{NAME}/"
    expected = sorted(_contents(tmp_path / NAME))
    assert sorted(name.removeprefix(own) for name in object_directory.names() if name.startswith(own)) == expected
    assert run_ranks(_load, 1, f"{far}/{NAME}", 1, LoadOptions()) == [[11.0]]
    assert object_directory.uploads() == []


def _train_from(rank: int, run: str, name: str, saves: list[tuple[int, float]], save_options: SaveOptions) -> list[str]:
    """A job that has loaded a checkpoint, where there is one; returns what it has said."""
    with pytest.MonkeyPatch.context() as patched:
        said: list[str] = []
        patched.setattr(upkeep._logger, "warning", lambda text, *words: said.append(text % words))
        patched.setattr(upkeep._logger, "log", lambda level, text, *words: said.append(text % words))
        if name:
            _load(rank, f"{run}/{name}", 2, LoadOptions())
        training = Training(rank, run, save_options)
        for iteration, value in saves:
            training.save(iteration, value=value)
        training.queue.close()
        upkeep._finish()
        return said


def test_a_job_that_has_loaded_nothing_turns_no_tracker_file_back(tmp_path: Path) -> None:
    """The local disk was lost: Megatron finds nothing there, and begins again without a word."""
    near, far, new = (tmp_path / name for name in ("near", "far", "new"))
    run_megatron(_train, 2, str(near), [(1, 0.0), (7, 0.0)], options(str(far)))
    said, _ = run_megatron(_train_from, 2, str(new), "", [(3, 0.0), (2, 0.0)], options(str(far)))
    warned = [text for text in said if "had loaded no checkpoint" in text]
    assert len(warned) == 2
    assert all("the second tier holds iter_0000007 of another" in text for text in warned)
    assert all(f"load from {far}" in text for text in warned)
    assert tracked_name(far) == "iter_0000007"
    assert verify_checkpoint(far / "iter_0000003").whole
    # One that has loaded an older checkpoint turns it back, as Megatron-Core's own tracker file.
    said, _ = run_megatron(_train_from, 2, str(new), "iter_0000003", [(4, 0.0)], options(str(far)))
    assert not [text for text in said if "had loaded" in text]
    assert tracked_name(far) == "iter_0000004"


def _train_without_second_tier(rank: int, run: str, drain_to: str) -> float:
    training = Training(rank, run, options(drain_to))
    training.save(1)
    if rank == 0:
        until(lambda: note_of(Path(run) / NAME).state == "failed")
    began_s = time.monotonic()
    training.save(2)
    training.queue.close()
    if rank == 0:
        (process,) = upkeep._started
        os.kill(process.pid, signal.SIGKILL)
    return time.monotonic() - began_s


def _resume(rank: int, run: str) -> None:
    """What a job does that loads: by the strategy, with the option from its environment."""
    assert _load(rank, f"{run}/{NAME}", 2, LoadOptions()) == [1.0]
    upkeep._finish()


def test_a_second_tier_that_cannot_be_reached_fails_no_save_and_the_next_job_resumes(
    s3_directory: S3Directory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    far = f"{s3_directory.url}/run"
    with monkeypatch.context() as patched:
        patched.setenv("AWS_SECRET_ACCESS_KEY", "")  # the client refuses to begin
        patched.setenv("AWS_ACCESS_KEY_ID", "")
        run_megatron(_train_without_second_tier, 2, str(tmp_path), far)
    assert s3_directory.names() == []
    assert main(["list", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "copy failed" in shown
    assert "waits for being copied" in shown or shown.count("copy failed") == 2
    monkeypatch.setenv("MCORE_CKPT_DRAIN_TO", far)
    run_megatron(_resume, 2, str(tmp_path))
    assert there(far) == [NAME, "iter_0000002"]
    assert all(verify_checkpoint(f"{far}/{name}").whole for name in there(far))
    assert tracked_name(far) == "iter_0000002"


def _train_and_die(rank: int, run: str, drain_to: str, started: str) -> None:
    training = Training(rank, run, options(drain_to))
    training.save(1)
    if rank == 0:
        until(Path(started).exists)  # a part of a file is on its way
    training.queue.close()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_copy_that_dies_with_the_trainer_is_resumed(
    object_directory: ObjectDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, started = f"{object_directory.url}/run", tmp_path / "started"

    def stall_data(request: Request) -> Fault | None:
        if request.changes and ".distcp" in request.key:
            started.touch()
            return Fault("stall", seconds=60)
        return None

    with Proxy(object_directory.server, stall_data) as proxy, monkeypatch.context() as patched:
        patched.setenv(object_directory.variable, proxy.url)
        outcomes = rank_outcomes(_train_and_die, 2, str(tmp_path / "run"), far, str(started))
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2
    assert not [name for name in object_directory.names() if name.endswith(METADATA_FILE)]
    assert note_of(tmp_path / "run" / NAME).state in ("waiting", "copying")
    monkeypatch.setenv("MCORE_CKPT_DRAIN_TO", far)
    run_megatron(_resume, 2, str(tmp_path / "run"))
    assert verify_checkpoint(f"{far}/{NAME}").whole


def test_a_load_takes_what_is_nearest(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    run_megatron(_train, 2, str(near), [(1, 0.0)], options(str(far)))
    both = LoadOptions(drain_to=str(far)), LoadOptions(local_tier=str(near))
    first, second = (file.name for file in data_files(near / NAME)[:2])
    (near / NAME / first).unlink()  # is read in the second tier
    (far / NAME / second).unlink()  # lies on local storage
    for path, load_options in zip((near, far), both, strict=True):
        assert run_ranks(_load, 1, str(path / NAME), 1, load_options) == [[1.0]]
        with pytest.raises(LoadError):
            _load(0, str(path / NAME), 1, LoadOptions())
    # A file of that name and of another length is none of this save.
    os.truncate(near / NAME / second, 100)
    with pytest.raises(LoadError):
        _load(0, str(far / NAME), 1, both[1])


@pytest.mark.parametrize("there_already", [False, True])
def test_what_carries_no_id_of_a_save_is_read_where_its_index_is(there_already: bool, tmp_path: Path) -> None:
    """A run that Megatron-Core has saved is resumed with a second tier, which has something else under its names."""
    near, far = tmp_path / "near" / NAME, tmp_path / "far" / NAME
    for directory, value in ((near, 1.0), (far, 2.0))[: 1 + there_already]:
        dcp.save({"w": torch.full((2000,), value)}, storage_writer=dcp.FileSystemWriter(directory), no_dist=True)
        (directory / CONFIG_FILE).write_bytes(encode_config())
        torch.save({}, directory / COMMON_FILE)
    assert run_ranks(_load, 1, str(near), 1, LoadOptions(drain_to=str(far.parent))) == [[1.0]]
    if there_already:
        assert run_ranks(_load, 1, str(far), 1, LoadOptions(local_tier=str(near.parent))) == [[2.0]]


def test_each_node_saves_and_copies_its_own_part(tmp_path: Path) -> None:
    """Every rank has a directory of its own, as on nodes without a shared file system."""
    far = tmp_path / "far"
    near = [tmp_path / f"node{rank}" for rank in range(2)]
    saves = [(1, 0.0), (2, 0.0), (3, 0.0)]
    run_megatron(_train, 2, f"{tmp_path}/node{{rank}}", saves, options(str(far), keep_last=1))
    assert there(str(far)) == [f"iter_000000{iteration}" for iteration in (1, 2, 3)]
    for name in there(str(far)):
        assert verify_checkpoint(far / name).whole
    assert (far / TRACKER_FILE).read_text() == "3"
    assert not list(far.rglob(".mcore_ckpt_arrived*"))
    own = [{file.name for file in data_files(run / "iter_0000003")} for run in near]
    assert not own[0] & own[1]
    assert own[0] | own[1] == {file.name for file in data_files(far / "iter_0000003")}
    assert [there(str(run)) for run in near] == [["iter_0000003"]] * 2, "each node removes old parts of its own"
    for file in data_files(far / "iter_0000003"):
        if file.name in own[1]:
            file.unlink()  # so that rank 1 can have it from its own disk only
    with pytest.raises(LoadError):
        _load(0, str(far / "iter_0000003"), 1, LoadOptions(local_tier=str(near[0])))
    assert _load(1, str(far / "iter_0000003"), 2, LoadOptions(local_tier=str(near[1]))) == [3.0]


def _save_only(rank: int, run: str, drain_to: str) -> None:
    """Both nodes end before anything is copied."""
    upkeep._ask = lambda task: None
    training = Training(rank, run.format(rank=rank), options(drain_to))
    training.shared = False
    training.save(1)
    training.queue.close()


def _copy_of(rank: int, run: str, drain_to: str, nodes: tuple[int, ...]) -> None:
    """The next job, of which these nodes come so far as to copy."""
    directory = Path(run.format(rank=rank)) / NAME
    if rank not in nodes:
        return
    upkeep.run_loaded(directory, options(drain_to))
    if nodes == (0,):
        until(lambda: note_of(directory).copied_bytes > 0 and note_of(directory).state == "waiting")
        os.kill(upkeep._started[-1].pid, signal.SIGKILL)
    else:
        upkeep._finish()


def test_nothing_is_committed_before_the_parts_of_all_nodes_are_there(tmp_path: Path) -> None:
    far, run = tmp_path / "far", f"{tmp_path}/node{{rank}}"
    run_megatron(_save_only, 2, run, str(far))
    assert not far.exists()
    for nodes in ((0,), (1,)):
        run_ranks(_copy_of, 2, run, str(far), nodes)
        assert not (far / NAME / METADATA_FILE).exists()
    assert [note_of(tmp_path / f"node{rank}" / NAME).state for rank in range(2)] == ["waiting", "copied"]
    run_ranks(_copy_of, 2, run, str(far), (0, 1))
    assert verify_checkpoint(far / NAME).whole


def _save_more(rank: int, run: str, drain_to: str, started: str, go_on: str) -> None:
    training = Training(rank, run, options(drain_to, keep_last=1))
    training.save(1)
    if rank == 0:
        until(Path(started).exists)
    training.save(2)
    training.save(3)
    Path(go_on).touch()
    training.queue.close()
    upkeep._finish()


def test_what_goes_before_it_is_copied_leaves_nothing_behind(
    object_directory: ObjectDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that fails for as long as three saves take: what is removed here leaves no part there."""
    far, started, go_on = f"{object_directory.url}/run", tmp_path / "started", tmp_path / "go_on"

    def refuse_the_index(request: Request) -> Fault | None:
        if request.changes and request.key.endswith(METADATA_FILE) and not go_on.exists():
            started.touch()
            return Fault("status", status=403)
        return None

    with Proxy(object_directory.server, refuse_the_index) as proxy, monkeypatch.context() as patched:
        patched.setenv(object_directory.variable, proxy.url)
        run_megatron(_save_more, 2, str(tmp_path / "run"), far, str(started), str(go_on))
    assert len(there(str(tmp_path / "run"))) < 3, "what is being copied at that moment stays"
    assert tracked_name(far) == "iter_0000003"
    found = {name.split("/")[1] for name in object_directory.names()}
    assert found == {TRACKER_FILE, "iter_0000003", *there(far)}
    for name in there(far):  # those that were copied in time
        assert verify_checkpoint(f"{far}/{name}").whole


def test_plain_dcp_is_drained_too(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    writer = FileSystemWriterAsync(near / NAME, options=options(str(far)))
    dcp.save({"w": torch.ones(10)}, storage_writer=writer, no_dist=True)
    upkeep._finish()  # does not wait for a tracker file any more, which there is none of
    assert verify_checkpoint(far / NAME).whole
    with pytest.raises(OptionError, match="the checkpoint is saved there already"):
        FileSystemWriterAsync(near / NAME, options=options(f"{near}/"))


def _save_where_one_rank_drains(rank: int, run: str, drain_to: str) -> None:
    training = Training(rank, run, options(drain_to) if rank else SaveOptions(progress=False))
    with pytest.raises(OptionError, match="drain_to differs between the ranks"):
        training.save(1)


def test_ranks_with_other_second_tiers_are_told_so(tmp_path: Path) -> None:
    run_megatron(_save_where_one_rank_drains, 2, str(tmp_path / "near"), str(tmp_path / "far"))
    assert there(str(tmp_path / "near")) == [NAME]
    assert not list((tmp_path / "near" / NAME).glob("*.distcp"))


def _save_alone(monkeypatch: pytest.MonkeyPatch, run: Path, far: Path, iteration: int, value: float) -> Path:
    """A job of one process that is killed before anything is copied."""
    with monkeypatch.context() as patched:
        patched.setattr(upkeep, "_ask", lambda task: None)
        directory = run / f"iter_{iteration:07d}"
        writer = FileSystemWriterAsync(directory, options=options(str(far)))
        dcp.save({"w": torch.full((1000,), value)}, storage_writer=writer, no_dist=True)
    (run / TRACKER_FILE).write_text(str(iteration))
    return directory


def _resume_alone(run: Path, far: str | Path, tracker: str = "auto") -> list[str]:
    """The next job copies what is left, and ends; returns what it has said."""
    said: list[str] = []
    ends = threading.Event()
    drains = _upkeep_process._Drains(ends)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_upkeep_process, "_say", lambda level, text: said.append(text))
        drains.add(str(run), None, str(far), tracker)
        ends.set()
        drains.close()
        drains.work()
    return said


@pytest.mark.parametrize("place", ["directory", "store"])
def test_what_other_programs_keep_with_a_checkpoint_is_copied_with_it_and_when_it_comes_later(
    place: str, tmp_path: Path, object_directory: ObjectDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = tmp_path / "near"
    far = str(tmp_path / "far") if place == "directory" else object_directory.url
    directory = _save_alone(monkeypatch, near, Path(far) if place == "directory" else checkpoint_path(far), 1, 1.0)
    for name, content in (("modelopt_state/.metadata", b"index"), ("tokenizer/vocab/merges.txt", b"a b")):
        storage_at(directory).publish(name, content)
    _resume_alone(near, far)
    copied = storage_at(f"{far}/{NAME}")
    assert copied.read("modelopt_state/.metadata") == b"index"
    assert copied.read("tokenizer/vocab/merges.txt") == b"a b"
    storage_at(directory).publish("tokenizer/vocab/merges.txt", b"a b c")
    assert "files that came after the save" in " ".join(_resume_alone(near, far))
    assert copied.read("tokenizer/vocab/merges.txt") == b"a b c"
    assert _resume_alone(near, far) == []


@pytest.mark.parametrize(("tracker", "written"), [("auto", False), ("on", True), ("off", False)])
def test_the_tracker_file_of_the_second_tier_is_written_as_the_option_says(
    tracker: str, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    _save_alone(monkeypatch, near, far, 1, 1.0)
    if tracker != "off":
        (near / TRACKER_FILE).unlink()  # as plain DCP, which knows of none
    _resume_alone(near, far, tracker)
    assert verify_checkpoint(far / NAME).whole
    assert (far / TRACKER_FILE).exists() == written


def _value(directory: Path) -> float:
    state = {"w": torch.zeros(1000)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    (value,) = state["w"].unique().tolist()
    return float(value)


def test_leftovers_replace_nothing_that_was_saved_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job goes on with another node, and comes back to the first one, where its earlier saves still lie."""
    far, first, second = (tmp_path / name for name in ("far", "first", "second"))
    old = [_save_alone(monkeypatch, first, far, iteration, 0.0) for iteration in (1, 2)]
    for iteration in (1, 5):
        _save_alone(monkeypatch, second, far, iteration, 100.0)
    _resume_alone(second, far)
    said = _resume_alone(first, far)
    assert "saved later" in " ".join(said)
    assert (_value(far / NAME), (far / TRACKER_FILE).read_text()) == (100.0, "5")
    assert len(data_files(far / NAME)) == 1, "nothing is left of what was not committed"
    assert [note_of(directory).state for directory in old] == ["superseded", "copied"]
    assert _value(far / "iter_0000002") == 0.0
    assert _resume_alone(first, far) == []
    # An older iteration that is saved later takes its place, whichever node saves it.
    _save_alone(monkeypatch, first, far, 1, 200.0)
    _resume_alone(first, far)
    assert (_value(far / NAME), (far / TRACKER_FILE).read_text()) == (200.0, "1")


def _job_on_a_host(monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    """From here on this process stands for a new job, on a host whose clock is that much ahead."""
    real = time.time
    monkeypatch.setattr(upkeep, "_latest_s", 0.0)
    monkeypatch.setattr(upkeep, "_seen", set())
    monkeypatch.setattr(upkeep, "time", SimpleNamespace(time=lambda: real() + ahead_s))


@pytest.mark.parametrize("first_tier_is_lost", [False, True])
def test_a_job_that_resumes_on_a_host_with_a_slower_clock_saves_later(
    first_tier_is_lost: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, other = (tmp_path / name for name in ("near", "far", "other"))
    _job_on_a_host(monkeypatch, 3600.0)
    for iteration in (1, 2):
        _save_alone(monkeypatch, near, far, iteration, 0.0)
    _resume_alone(near, far)
    assert (far / TRACKER_FILE).read_text() == "2"

    _job_on_a_host(monkeypatch, 0.0)
    run = other if first_tier_is_lost else near
    with monkeypatch.context() as patched:
        patched.setattr(upkeep, "_ask", lambda task: None)
        upkeep.run_loaded(far / "iter_0000002" if first_tier_is_lost else near / NAME, options(str(far)))
    for iteration in (2, 3):
        directory = _save_alone(monkeypatch, run, far, iteration, 100.0)
        assert note_of(directory).saved_s > note_of(far / "iter_0000002").saved_s
    _resume_alone(run, far)
    assert (_value(far / "iter_0000002"), _value(far / "iter_0000003")) == (100.0, 100.0)
    assert (far / TRACKER_FILE).read_text() == "3"


def test_leftovers_of_another_run_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far, other = (tmp_path / name for name in ("near", "far", "other"))
    directory = _save_alone(monkeypatch, near, other, 1, 0.0)
    (said,) = _resume_alone(near, far)
    assert f"{other / NAME}, not to {far / NAME}" in said
    assert not far.exists()
    assert note_of(directory).state == "waiting"


def _save_with_sums(rank: int, near: str, far: str, copy: str) -> list[Any]:
    """Saved with Megatron's `integrity.json`, loaded with it in both tiers and a copy; then saved again without it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    import mcore_ckpt

    mcore_ckpt.install()

    def state(value: float) -> dict[str, Any]:
        return {"w": ShardedTensor.from_rank_offsets("w", torch.full((1000,), value), (0, 0, 1)), "iteration": 1}

    strategy = mcore_ckpt.TorchDistSaveStrategy(options=options(far))
    directory = Path(near) / NAME
    directory.mkdir(parents=True)
    (directory / "..metadata.0123456789abcdef.tmp").write_bytes(b"half")
    (directory / "__7_0.0123456789abcdef.distcp").write_bytes(b"of a save that was killed")
    dist_checkpointing.save(state(1.0), str(directory), strategy, verify_integrity=True)
    (Path(near) / TRACKER_FILE).write_text("1")
    upkeep._finish()
    assert mcore_ckpt.copy_checkpoint(directory, copy).copied
    found: list[Any] = [sorted(json.loads((directory / "integrity.json").read_text())["files"])]
    for place in (str(directory), f"{far}/{NAME}", copy):
        loaded = dist_checkpointing.load(state(0.0), place, verify_integrity=True)["w"]
        found.append(loaded.unique().tolist())
    content = bytearray(data_files(Path(copy))[0].read_bytes())
    content[0] ^= 1
    data_files(Path(copy))[0].write_bytes(content)
    with pytest.raises(dist_checkpointing.core.CheckpointingException, match="integrity verification failed for 1 fil"):
        dist_checkpointing.load(state(0.0), copy, verify_integrity=True)
    dist_checkpointing.save(state(2.0), str(directory), strategy)
    upkeep._finish()
    return [*found, _value(Path(far) / NAME), (Path(far) / NAME / "integrity.json").exists()]


def test_the_sums_of_megatron_hold_in_both_tiers_and_in_copies(tmp_path: Path) -> None:
    from megatron.core.dist_checkpointing import validation

    if not hasattr(validation, "save_integrity_manifest"):
        pytest.skip("this version of Megatron-Core writes no integrity.json")
    places = [str(tmp_path / name) for name in ("near", "far", "copy")]
    ((summed, *values, is_there),) = run_megatron(_save_with_sums, 1, *places)
    (file,) = data_files(Path(places[2]))
    assert summed == [".metadata", file.name, "metadata.json"]
    assert (values, is_there) == ([[1.0]] * 3 + [2.0], False)


def _damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damaged_local_files_reach_no_second_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    directory = _save_alone(monkeypatch, near, far, 1, 1.0)
    with monkeypatch.context() as patched:  # committed, and killed before that is noted
        patched.setattr(_upkeep_process._Progress, "end", _kill)
        with pytest.raises(_Killed):
            _resume_alone(near, far)
    assert note_of(directory).state != "copied"
    other = _save_alone(monkeypatch, near, far, 2, 2.0)
    for damaged in (directory, other):
        _damage(data_files(damaged)[0])
    said = _resume_alone(near, far)
    assert verify_checkpoint(far / NAME).whole
    assert [note_of(each).state for each in (directory, other)] == ["copied", "failed"]
    assert "CRC-32" in said[0]
    assert not data_files(far / other.name)


class _Killed(BaseException):
    pass


def _kill(*_: object) -> None:
    raise _Killed


def test_parts_of_what_a_later_job_removes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    _save_alone(monkeypatch, near, far, 1, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(drain_module, "_commit", _fail)
        _resume_alone(near, far)
    assert len(data_files(far / NAME)) == 1
    directory = _save_alone(monkeypatch, near, far, 2, 2.0)
    # Removed first: otherwise it may be copied before.
    upkeep.checkpoint_published(directory, SaveOptions(progress=False, keep_last=1))
    until(lambda: not (near / NAME).exists())
    upkeep.checkpoint_published(directory, options(str(far)))
    upkeep._finish()
    assert there(str(near)) == there(str(far)) == [directory.name]
    assert not (far / NAME).exists()


def _publish_no_common(lock: DirectoryLock, name: str, content: bytes, *, common: bool = False) -> None:
    if common:
        raise SaveError("refused")
    _publish(lock, name, content)


_publish = DirectoryLock.publish


def _fail(*_: object) -> None:
    raise SaveError("refused")


def test_a_commit_that_was_cut_off_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between `.metadata` and the common state of a checkpoint that replaces another."""
    near, far = tmp_path / "near", tmp_path / "far"
    for value in (1.0, 2.0):
        directory = _save_alone(monkeypatch, near, far, 1, value)
        (directory / COMMON_FILE).write_bytes(str(value).encode())
        (directory / CONFIG_FILE).write_bytes(encode_config())
        with monkeypatch.context() as patched:
            if value == 2.0:
                patched.setattr(DirectoryLock, "publish", _publish_no_common)
            _resume_alone(near, far)
    assert (far / NAME / COMMON_FILE).read_bytes() == b"1.0"
    assert len(data_files(far / NAME)) == 2
    _resume_alone(near, far)
    assert (far / NAME / COMMON_FILE).read_bytes() == b"2.0"
    assert sorted(path.name for path in (far / NAME).iterdir()) == sorted(path.name for path in directory.iterdir())


def test_what_an_interrupted_copy_of_another_save_has_left_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for value in (1.0, 2.0):
        directory = _save_alone(monkeypatch, near, far, 1, value)
        with monkeypatch.context() as patched:
            if value == 1.0:
                (directory / CONFIG_FILE).write_bytes(encode_config())
                (directory / COMMON_FILE).write_bytes(b"1.0")
                storage_at(directory).publish("tokenizer/old.txt", b"1.0")
                patched.setattr(drain_module, "refuse_replaced", _fail)
            else:
                (directory / CONFIG_FILE).unlink(missing_ok=True)
                (directory / COMMON_FILE).unlink(missing_ok=True)
                (directory / "tokenizer" / "old.txt").unlink()
            _resume_alone(near, far)
    assert _value(far / NAME) == 2.0
    assert sorted(path.name for path in (far / NAME).iterdir() if path.is_file()) == sorted(
        path.name for path in directory.iterdir() if path.is_file()
    )
    assert not [*(far / NAME / "tokenizer").iterdir()]


def test_parts_of_what_is_saved_again_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    _save_alone(monkeypatch, near, far, 1, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(drain_module, "_commit", _fail)
        _resume_alone(near, far)
    _save_alone(monkeypatch, near, far, 1, 2.0)
    _resume_alone(near, far)
    assert _value(far / NAME) == 2.0
    assert len(data_files(far / NAME)) == 1


def test_what_is_given_up_takes_nothing_from_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = tmp_path / "far"
    note = note_of(_save_alone(monkeypatch, tmp_path / "near", far, 1, 1.0))
    storage = storage_at(far / NAME)
    storage.ensure()
    with DirectoryLock.take(storage):
        storage.publish(CONFIG_FILE, b"{}")  # of a checkpoint that is being committed
        with pytest.raises(SaveError):
            give_up(note)
        assert storage.exists(CONFIG_FILE)
    give_up(note)
    assert not (far / NAME).exists()


def test_a_trainer_that_ends_tries_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a host that was booted a moment ago."""
    near, far = tmp_path / "near", tmp_path / "far"
    _save_alone(monkeypatch, near, far, 1, 1.0)
    far.write_text("no directory")
    booted_s = time.monotonic() - 1.0
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() - booted_s)
    (said,) = _resume_alone(near, far)
    assert "the next run resumes it" in said
