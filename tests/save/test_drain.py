"""Two tiers: saved on local storage, copied to a second place in the background, and committed there."""

import ctypes
import itertools
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

from megatron.core.dist_checkpointing import ShardedTensor

from mcore_ckpt import (
    FileSystemReader,
    FileSystemWriterAsync,
    LoadOptions,
    OptionError,
    SaveOptions,
    TorchDistLoadStrategy,
    verify_checkpoint,
)
from mcore_ckpt.core.errors import LoadError, SaveError
from mcore_ckpt.directory import copying
from mcore_ckpt.directory.commit import common_file_in_force
from mcore_ckpt.directory.copying import identity_of, metadata_of
from mcore_ckpt.directory.in_force import DrainNote, is_drain_note, tracked_name
from mcore_ckpt.directory.retention import NOT_COPIED, PruneReport, prune_run
from mcore_ckpt.format.metadata_read import (
    COMMON_FILE,
    CONFIG_FILE,
    DRAIN_FILE,
    METADATA_FILE,
    TRACKER_FILE,
    encode_config,
    read_index,
)
from mcore_ckpt.save import upkeep
from mcore_ckpt.storage.resolve import LocalStorage, is_same_directory, storage_at
from tests.save.test_upkeep import Training, there
from tests.support.command import document_of, output_of
from tests.support.gloo_ranks import run_megatron_ranks as run_ranks
from tests.support.kept_log import kept_log
from tests.support.local_files import contents, flip
from tests.support.object_server import Fault, ObjectDirectory, Proxy, Request, S3Directory
from tests.support.processes import in_child, until

NAME = "iter_0000001"
_CLONE_NEWNS = 0x20000  # <sched.h>


def options(drain_to: str, **more: Any) -> SaveOptions:
    return SaveOptions(drain_to=drain_to, **more)


def _train(rank: int, run: str, saves: list[tuple[int, float]], save_options: SaveOptions) -> None:
    """Saves of iterations, of these values, each of which is copied before the next; `run` may hold the rank."""
    training = Training(rank, run.format(rank=rank), save_options)
    training.shared = "{rank}" not in run
    assert save_options.drain_to is not None
    for iteration, value in saves:
        training.save(iteration, value=value)
        until(lambda name=f"iter_{iteration:07d}": tracked_name(save_options.drain_to) == name)  # type: ignore[misc]
    training.queue.close()
    upkeep._finish()  # as at the end of a trainer


def _load(rank: int, directory: str, world: int, load_options: LoadOptions) -> list[float]:
    blank = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(2000 // world), (0, rank, world))}
    loaded = TorchDistLoadStrategy(options=load_options).load(blank, directory.format(rank=rank))["w"]
    return loaded.unique().tolist()  # type: ignore[no-any-return]


def _without_note(place: Path) -> dict[str, bytes]:
    return {name: content for name, content in contents(place).items() if not is_drain_note(name)}


def data_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.distcp"))


def note_of(directory: Path) -> DrainNote:
    note = DrainNote.in_force(directory)
    assert note is not None
    return note


def test_checkpoints_are_committed_in_a_second_directory_as_they_are(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    run_ranks(_train, 2, str(near), [(1, 0.0), (2, 0.0)], options(str(far)))
    for name in there(str(near)):
        assert contents(far / name) == _without_note(near / name)
        assert verify_checkpoint(far / name).whole
    assert (far / TRACKER_FILE).read_text() == "2"
    assert len(re.findall("complete, copied", output_of("list", near))) == 2
    listed = document_of("list", near)["checkpoints"]
    assert [row["drain"]["done"] for row in listed] == [True] * 2


def test_a_checkpoint_that_is_saved_again_replaces_the_one_in_the_store(
    object_directory: ObjectDirectory, tmp_path: Path
) -> None:
    """The tracker goes back with the run."""
    far = f"{object_directory.url}/run"
    run_ranks(_train, 2, str(tmp_path), [(1, 0.0), (2, 0.0)], options(far))
    assert tracked_name(far) == "iter_0000002"
    run_ranks(_train, 2, str(tmp_path), [(1, 10.0)], options(far))
    assert tracked_name(far) == NAME
    assert verify_checkpoint(f"{far}/{NAME}").whole
    own = f"run/{NAME}/"
    expected = sorted(_without_note(tmp_path / NAME))
    assert sorted(name.removeprefix(own) for name in object_directory.names() if name.startswith(own)) == expected
    assert run_ranks(_load, 1, f"{far}/{NAME}", 1, LoadOptions()) == [[11.0]]


def _train_without_second_tier(rank: int, run: str, drain_to: str) -> float:
    training = Training(rank, run, options(drain_to))
    training.save(1)
    if rank == 0:
        until(lambda: note_of(Path(run) / NAME).error != "")
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
    s3_directory: S3Directory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = f"{s3_directory.url}/run"
    with monkeypatch.context() as patched:
        patched.setenv("AWS_SECRET_ACCESS_KEY", "")  # the client refuses to begin
        patched.setenv("AWS_ACCESS_KEY_ID", "")
        run_ranks(_train_without_second_tier, 2, str(tmp_path), far)
    assert s3_directory.names() == []
    shown = output_of("list", tmp_path)
    assert shown.count("complete, not copied yet") == 2
    monkeypatch.setenv("MCORE_CKPT_DRAIN_TO", far)
    run_ranks(_resume, 2, str(tmp_path))
    assert there(far) == [NAME, "iter_0000002"]
    assert all(verify_checkpoint(f"{far}/{name}").whole for name in there(far))
    assert tracked_name(far) == "iter_0000002"


def test_each_node_saves_and_copies_its_own_part(tmp_path: Path) -> None:
    """Every rank has a directory of its own, as on nodes without a shared file system."""
    far = tmp_path / "far"
    near = [tmp_path / f"node{rank}" for rank in range(2)]
    saves = [(1, 0.0), (2, 0.0), (3, 0.0)]
    run_ranks(_train, 2, f"{tmp_path}/node{{rank}}", saves, options(str(far), keep_last=1))
    assert there(str(far)) == [f"iter_000000{iteration}" for iteration in (1, 2, 3)]
    for name in there(str(far)):
        assert verify_checkpoint(far / name).whole
    assert (far / TRACKER_FILE).read_text() == "3"
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
        own = {file.name for file in data_files(directory)}
        until(lambda: {file.name for file in data_files(Path(drain_to) / NAME)} == own)
        os.kill(upkeep._started[-1].pid, signal.SIGKILL)
    else:
        upkeep._finish()


def test_nothing_is_committed_before_the_parts_of_all_nodes_are_there(tmp_path: Path) -> None:
    far, run = tmp_path / "far", f"{tmp_path}/node{{rank}}"
    run_ranks(_save_only, 2, run, str(far))
    assert not far.exists()
    for nodes in ((0,), (1,)):
        run_ranks(_copy_of, 2, run, str(far), nodes)
        assert not (far / NAME / METADATA_FILE).exists()
    assert [note_of(tmp_path / f"node{rank}" / NAME).done for rank in range(2)] == [False, True]
    run_ranks(_copy_of, 2, run, str(far), (0, 1))
    assert verify_checkpoint(far / NAME).whole


def _save_more(rank: int, run: str, drain_to: str, go_on: str) -> list[str]:
    with kept_log(logging.INFO) as said:
        training = Training(rank, run, options(drain_to, keep_last=1))
        for iteration in (1, 2, 3):
            training.save(iteration)
        if rank == 0:
            # (That which is being copied at the moment is not among them.)
            until(lambda: any("more than keep_last=1 stay" in text for text in said))
        found = there(run)
        if rank == 0:
            Path(go_on).touch()
        training.queue.close()
        upkeep._finish()
    return found


def test_nothing_goes_before_it_is_in_the_second_tier(
    object_directory: ObjectDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that fails for as long as three saves take."""
    far, go_on = f"{object_directory.url}/run", tmp_path / "go_on"

    def refuse_the_index(request: Request) -> Fault | None:
        fails = request.changes and request.key.endswith(METADATA_FILE) and not go_on.exists()
        return Fault("status", status=403) if fails else None

    with Proxy(object_directory.server, refuse_the_index) as proxy, monkeypatch.context() as patched:
        patched.setenv(object_directory.variable, proxy.url)
        found = run_ranks(_save_more, 2, str(tmp_path / "run"), far, str(go_on))
    all_of_them = [f"iter_000000{iteration}" for iteration in (1, 2, 3)]
    assert found[0] == all_of_them
    assert there(str(tmp_path / "run")) == all_of_them[-1:], "as soon as they are copied, the old ones go"
    assert tracked_name(far) == "iter_0000003"
    assert there(far) == all_of_them
    assert all(verify_checkpoint(f"{far}/{name}").whole for name in all_of_them)


def test_where_files_are_lost_the_tier_that_has_them_is_named(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    dcp.save({"w": torch.ones(10)}, storage_writer=FileSystemWriterAsync(near / NAME, options=options(str(far))))
    upkeep._finish()
    for file in data_files(near / NAME):
        file.unlink()
    named = f"the second tier has a copy, {far / NAME}: with MCORE_CKPT_DRAIN_TO={far} a load reads missing files there"
    assert f"{NAME}: {named}" in output_of("list", near, code=1)
    state = {"w": torch.zeros(10)}
    with pytest.raises(dcp.CheckpointException, match=re.escape(named)):
        dcp.load(state, storage_reader=FileSystemReader(near / NAME))
    dcp.load(state, storage_reader=FileSystemReader(near / NAME, options=LoadOptions(drain_to=str(far))))
    assert state["w"].sum() == 10
    for file in data_files(far / NAME):
        file.unlink()
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(state, storage_reader=FileSystemReader(near / NAME, options=LoadOptions(drain_to=str(far))))
    assert "second tier has" not in str(caught.value)


def _save_alone(
    run: Path, far: str | Path, iteration: int, value: float, *, overwrite: bool = True, **others: bytes
) -> Path:
    """A job of one process that is killed before anything is copied; `others`: files of other programs."""
    with mock.patch.object(upkeep, "_ask"):
        directory = run / f"iter_{iteration:07d}"
        writer = FileSystemWriterAsync(directory, overwrite=overwrite, options=options(str(far)))
        dcp.save({"w": torch.full((1000,), value)}, storage_writer=writer, no_dist=True)
    for name, content in others.items():
        storage_at(directory).publish(name, content)
    (run / TRACKER_FILE).write_text(str(iteration))
    return directory


def _copy_has_begun(directory: Path) -> None:
    note = note_of(directory)
    replace(note, replaces=identity_of(metadata_of(storage_at(note.to)))).write(directory)


def _resume_alone(run: Path, far: str | Path, name: str | None = None) -> list[str]:
    """The next job copies what is left, or (`name`) the job that has saved it, and ends; returns what it has said."""
    said: list[str] = []
    copies = upkeep._Copies()
    with mock.patch.object(upkeep, "_say", lambda level, text: said.append(text)):
        copies.add(str(run), name, str(far))
        copies.finish()
        copies.work()
    return said


def _value(directory: Path) -> float:
    state = {"w": torch.zeros(1000)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    (value,) = state["w"].unique().tolist()
    return float(value)


class _Killed(BaseException):
    pass


def test_leftovers_replace_nothing_that_has_come_there_since(tmp_path: Path) -> None:
    """A job goes on with another node, and comes back to the first one, where its earlier saves still lie."""
    far, first, second = (tmp_path / name for name in ("far", "first", "second"))
    old = [_save_alone(first, far, iteration, 0.0) for iteration in (1, 2)]
    with mock.patch.object(copying, "length_flaw", side_effect=SaveError("refused")):  # one copy had begun
        _resume_alone(first, far)
    for iteration in (1, 5):
        _save_alone(second, far, iteration, 100.0)
    _resume_alone(second, far)
    (far / TRACKER_FILE).write_text("5")
    assert "holds another checkpoint than when this one was saved" in " ".join(_resume_alone(first, far))
    assert _value(far / NAME) == 100.0
    assert len(data_files(far / NAME)) == 1, "nothing is left of what was not committed"
    assert [note_of(directory).done for directory in old] == [True, True]
    assert "complete, not copied" in output_of("list", first)
    assert _value(far / "iter_0000002") == 0.0
    assert _resume_alone(first, far) == []


def test_a_job_that_replaces_nothing_leaves_what_another_has_in_the_second_tier(tmp_path: Path) -> None:
    """As DCP's `overwrite=False`: on_existing="error"."""
    far, near = tmp_path / "far", tmp_path / "near"
    _save_alone(tmp_path / "other", far, 1, 0.0)
    _resume_alone(tmp_path / "other", far)
    for iteration in (1, 2):
        _save_alone(near, far, iteration, 100.0, overwrite=False)
    assert "holds another checkpoint" in " ".join(_resume_alone(near, far, NAME))
    assert _value(far / NAME) == 0.0
    assert _value(far / "iter_0000002") == 100.0
    prune_run(near, keep_last=1, remove=True)
    assert _value(near / NAME) == 100.0


def test_what_has_been_copied_goes_only_as_long_as_the_copy_is_there(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for iteration in (1, 2, 3):
        _save_alone(near, far, iteration, 1.0)
    _resume_alone(near, far)
    data_files(far / NAME)[0].unlink()
    kept = {each.checkpoint.name: each.reason for each in prune_run(near, keep_last=1, remove=True).decisions}
    assert NOT_COPIED in kept[NAME]
    assert there(str(near)) == [NAME, "iter_0000003"]
    next((near / NAME).glob(f"{DRAIN_FILE}.*")).unlink()  # a person says that it is not needed there
    prune_run(near, keep_last=1, remove=True)
    assert there(str(near)) == ["iter_0000003"]


def test_a_second_tier_that_cannot_be_opened_stops_nothing_that_does_not_need_it(tmp_path: Path) -> None:
    near, far, nowhere = tmp_path / "near", tmp_path / "far", "msc://nowhere/run"
    _save_alone(near, nowhere, 1, 1.0)
    for iteration in (2, 3):
        _save_alone(near, far, iteration, 1.0)
    _resume_alone(near, far)
    kept = {each.checkpoint.name: each.reason for each in prune_run(near, keep_last=1, remove=True).decisions}
    assert re.match(f"{NOT_COPIED}, .*{nowhere}/{NAME}: ", kept[NAME])
    assert there(str(near)) == [NAME, "iter_0000003"]
    reader = FileSystemReader(near / NAME, options=LoadOptions(drain_to=nowhere))
    state = {"w": torch.zeros(1000)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert state["w"].sum() == 1000
    data_files(near / NAME)[0].unlink()
    with pytest.raises(dcp.CheckpointException, match=f"the second tier, {nowhere}, cannot be opened: {nowhere}"):
        dcp.load(state, storage_reader=reader, no_dist=True)


def test_the_save_directory_itself_is_no_second_tier(tmp_path: Path) -> None:
    """Behind a link from the start, and behind one that is made later."""
    near, far, link = tmp_path / "near", tmp_path / "far", tmp_path / "link"
    near.mkdir()
    link.symlink_to(near)
    with pytest.raises(OptionError, match="the checkpoint is saved there already"):
        FileSystemWriterAsync(near / NAME, options=options(str(link)))
    early, dangling = tmp_path / "early", tmp_path / "dangling"
    dangling.symlink_to(early)
    with pytest.raises(OptionError, match="the checkpoint is saved there already"):
        FileSystemWriterAsync(early / NAME, options=options(str(dangling)))
    for iteration in (1, 2):
        _save_alone(near, far, iteration, 1.0)
    far.symlink_to(near)
    said = _resume_alone(near, far)
    assert len([text for text in said if "itself, by another path: there is no second tier" in text]) == 2
    _only_old_ones_stay(near, prune_run(near, keep_last=1, remove=True))
    assert not note_of(near / NAME).done
    copying.give_up(note_of(near / NAME))
    assert _value(near / NAME) == 1.0


def test_list_says_who_copies_what_has_not_been_copied(tmp_path: Path) -> None:
    """Its job has ended, and the next one copies to another directory."""
    near = tmp_path / "near"
    _save_alone(near, tmp_path / "far", 1, 1.0)
    assert f"{NAME}: a job with drain_to={tmp_path / 'far'} copies it, or `mcore-ckpt copy`" in output_of("list", near)
    _resume_alone(near, tmp_path / "other")
    assert f"not to {tmp_path / 'other' / NAME} as jobs do now: `mcore-ckpt copy` does it" in output_of("list", near)


def _only_old_ones_stay(near: Path, report: PruneReport) -> None:
    assert "its own directory, by another path" in report.decisions[0].reason
    assert there(str(near)) == [NAME, "iter_0000002"]


def _in_a_mount(near: Path, far: Path) -> str:
    """In a child: why it gets no mount namespace of its own; nothing once all is checked in one."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        return os.strerror(ctypes.get_errno())
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", near, far], check=True)
    assert is_same_directory(near, far)
    assert is_same_directory(near / "new", far / "new")
    assert any("itself, by another path: there is no second tier" in text for text in _resume_alone(near, far))
    _only_old_ones_stay(near, prune_run(near, keep_last=1, remove=True))
    return ""


def test_nor_is_it_by_a_mount(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    for iteration in (1, 2):
        _save_alone(near, far, iteration, 1.0)
    far.mkdir()
    if forbidden := in_child(_in_a_mount, near, far):
        pytest.skip(f"no mount namespace here: {forbidden}")


def test_damaged_local_files_reach_no_second_tier(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    directory = _save_alone(near, far, 1, 1.0)
    (file,) = data_files(directory)
    flip(file, file.stat().st_size // 2)
    (said,) = _resume_alone(near, far)
    assert "CRC-32" in said
    assert not data_files(far / NAME)
    assert note_of(directory).error != ""


_CHANGING = "create delete claim move open_writer overwrite publish".split()
_OTHERS = ("tokenizer/vocab.json", "train_dataloader_dprank000.pt", COMMON_FILE, CONFIG_FILE)


def _saved_with_others(run: Path, far: Path, value: float) -> Path:
    """As Megatron-Core leaves a checkpoint."""
    directory = _save_alone(run, far, 1, value, **dict.fromkeys(_OTHERS[:2], str(value).encode()))
    torch.save({"value": value}, directory / COMMON_FILE)
    (directory / CONFIG_FILE).write_bytes(encode_config())
    return directory


@pytest.mark.parametrize("replaces", [False, True])
def test_killed_at_any_step_a_copy_is_no_mix_and_the_next_job_resumes_it(replaces: bool, tmp_path: Path) -> None:
    for number in itertools.count(1):
        near, far = tmp_path / f"near{number}", tmp_path / f"far{number}"
        if replaces:
            _saved_with_others(near, far, 0.0)
            _resume_alone(near, far)
            _copy_has_begun(_saved_with_others(near, far, 1.0))
        else:
            _saved_with_others(near, far, 1.0)
        steps: list[str] = []

        def counted(real: Callable[..., Any], far: Path = far, steps: list[str] = steps, at: int = number) -> Any:
            def step(storage: LocalStorage, *more: Any, **options: Any) -> Any:
                if Path(storage.root).is_relative_to(far):
                    steps.append(f"{real.__name__} {more[0]}")
                    if len(steps) >= at:
                        raise _Killed
                return real(storage, *more, **options)

            return step

        with pytest.MonkeyPatch.context() as patched:
            for method in _CHANGING:
                patched.setattr(LocalStorage, method, counted(getattr(LocalStorage, method)))
            try:
                _resume_alone(near, far)
                break
            except _Killed:
                pass
        if (far / NAME / METADATA_FILE).exists():
            value = _value(far / NAME)
            assert value in ((0.0, 1.0) if replaces else (1.0,)), steps[-1]
            index = read_index(far / NAME)
            common = common_file_in_force(storage_at(far / NAME), index)
            assert common is not None, steps[-1]
            assert torch.load(far / NAME / common) == {"value": value}, steps[-1]
        else:
            assert not replaces, steps[-1]
        _resume_alone(near, far)
        assert contents(far / NAME) == _without_note(near / NAME), steps[-1]
        assert (far / TRACKER_FILE).read_text() == "1", steps[-1]
    assert number > 10
