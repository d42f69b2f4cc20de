"""A run's checkpoints: which there are, which are whole, which one the tracker names."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt import list_run
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError
from mcore_ckpt.directory import iterations
from mcore_ckpt.directory.in_force import tracked_name
from mcore_ckpt.format.metadata_read import TRACKER_FILE, encode_config
from mcore_ckpt.storage.direct_io import LocalReader
from tests.support import stored_saves
from tests.support.meanwhile import ahead_of, behind
from tests.support.model_like import write_model

pytestmark = pytest.mark.quick


def write_iteration(run: Path, name: str) -> Path:
    write_model(run / name, tp=1, tensors={"w": torch.ones(3), "v": torch.zeros(2, 2)})
    (run / name / "metadata.json").write_bytes(encode_config())
    torch.save({}, run / name / "common.pt")
    return run / name


def test_checkpoints_by_iteration_and_what_the_tracker_names(tmp_path: Path) -> None:
    for name in ("iter_0000300", "iter_0000020", "release", "iter_12345678"):
        write_iteration(tmp_path, name)
    for name in ("iter_5", "iter_00000010", "iter_0000300.partial", "iteration", "tensorboard"):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000400").write_text("a file")
    (tmp_path / TRACKER_FILE).write_text("300\n")
    found = [listed.checkpoint for listed in list_run(tmp_path).checkpoints]
    assert [checkpoint.name for checkpoint in found] == ["release", "iter_0000020", "iter_0000300", "iter_12345678"]
    assert [checkpoint.iteration for checkpoint in found] == [None, 20, 300, 12345678]
    assert [checkpoint.tracked for checkpoint in found] == [False, False, True, False]
    for checkpoint in found:
        assert checkpoint.whole, checkpoint.problems
        assert not checkpoint.locked
        assert checkpoint.size_bytes == sum(path.stat().st_size for path in checkpoint.path.iterdir())
        assert checkpoint.saved_at_s == (checkpoint.path / ".metadata").stat().st_mtime_ns / 1e9


def _linked(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("elsewhere")))


def _unfinished_with_a_linked_folder(path: Path) -> None:
    (path / ".metadata").unlink()
    (path / "tokenizer").symlink_to(path.parent)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda path: (path / ".metadata").write_bytes(b"\x80\x04K\x01."), "metadata"),
        (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp: the index names this file"),
        (lambda path: os.truncate(path / "__0_0.distcp", 100), "__0_0.distcp: ends at byte 100"),
        (lambda path: _linked(path / "__0_0.distcp"), "__0_0.distcp: is a symbolic link"),
        (lambda path: _unfinished_with_a_linked_folder(path), "no finished checkpoint"),
    ],
    ids=["index", "no file", "cut file", "linked file", "linked folder"],
)
def test_what_is_not_whole(tmp_path: Path, damage: Callable[[Path], None], says: str) -> None:
    write_iteration(tmp_path, "iter_0000001")
    damage(write_iteration(tmp_path, "iter_0000002"))
    whole, broken = (listed.checkpoint for listed in list_run(tmp_path).checkpoints)
    assert whole.whole
    assert not broken.whole
    assert re.search(says, broken.problems[0]), broken.problems


@pytest.mark.parametrize("text", ["", "iter_0000001", "../x"])
def test_a_tracker_that_names_nothing(tmp_path: Path, text: str) -> None:
    write_iteration(tmp_path, "iter_0000003")
    (tmp_path / TRACKER_FILE).write_text(text)
    with pytest.raises(CorruptCheckpointError, match="expected the number of an iteration"):
        tracked_name(tmp_path)
    assert [listed.checkpoint.tracked for listed in list_run(tmp_path).checkpoints] == [False]


def test_no_such_run(tmp_path: Path) -> None:
    for run in (tmp_path / "gone", tmp_path):
        with pytest.raises(CheckpointNotFoundError):
            list_run(run)
    assert tracked_name(tmp_path) is None


@pytest.mark.parametrize("times", [1, 100])
def test_what_is_replaced_while_it_is_looked_at_is_not_incomplete(times: int, tmp_path: Path) -> None:
    """After it was listed, and again after its index was read."""
    checkpoint, left = tmp_path / "iter_0000001", iter(range(2 * times))
    stored_saves.save(checkpoint, rows=1)

    def replace(*_: Any, **__: Any) -> None:
        if next(left, None) is not None:
            stored_saves.save(checkpoint, rows=1)

    reading = iterations, "read_index_and_version", replace
    with ahead_of(*reading), behind(*reading):
        (listed,) = list_run(tmp_path).checkpoints
    assert listed.checkpoint.whole is (times == 1)
    assert listed.checkpoint.whole or "other saves replace it all the time" in listed.checkpoint.problems[0]


def test_an_index_that_seems_cut_where_another_host_publishes_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GlusterFS gives a new file the length of the one before it, for a moment."""
    stored_saves.save(tmp_path / "iter_0000001", 3.0, rows=1)
    real, cut = LocalReader.read_all, list[bytes]()

    def read_all(reader: LocalReader, *arguments: Any) -> bytes:
        reader.may_lag, content = True, real(reader, *arguments)
        if content in cut or not reader.name.endswith(".metadata"):
            return content
        cut.append(content)
        return content[:-1]

    monkeypatch.setattr(LocalReader, "read_all", read_all)
    assert [listed.checkpoint.whole for listed in list_run(tmp_path).checkpoints] == [True]
    cut.clear()
    assert stored_saves.loaded(tmp_path / "iter_0000001", rows=1) == 3.0


def names_in(run: Path) -> list[str]:
    return [listed.checkpoint.name for listed in list_run(run).checkpoints]


def test_checkpoints_of_other_programs_are_listed_and_one_checkpoint_is(tmp_path: Path) -> None:
    for number in (9, 10, 100):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "plain" / f"step_{number}", no_dist=True)
    (tmp_path / "plain" / "logs").mkdir()
    assert names_in(tmp_path / "plain") == ["step_9", "step_10", "step_100"]
    assert names_in(tmp_path / "plain" / "step_10") == ["step_10"]
    write_iteration(tmp_path / "run", "iter_0000003")
    (tmp_path / "run" / "other").mkdir()
    (tmp_path / "run" / "other" / ".metadata").write_bytes(b"not one of the run's")
    assert names_in(tmp_path / "run") == names_in(tmp_path / "run" / "iter_0000003") == ["iter_0000003"]
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoints in it.*; those in it that hold some: run$"):
        list_run(tmp_path)
