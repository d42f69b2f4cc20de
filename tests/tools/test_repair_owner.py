"""A repair that is interrupted, killed or held up: nothing is in force that was not judged, nobody's save is lost.

Of a stranger's directories it neither reads nor writes what links in them lead to.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError, SaveError
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.directory.commit import Commit, Owner, is_note
from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER, read_index
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.load.checks import checks_of
from mcore_ckpt.storage.resolve import LocalStorage
from mcore_ckpt.tools import verify
from mcore_ckpt.tools.verify import repair_checkpoint, verify_checkpoint
from tests.support.local_files import data_file, flip
from tests.support.meanwhile import ahead_of, behind, once
from tests.support.model_like import assert_same, model_tensors, read_all, write_model
from tests.support.processes import in_child
from tests.support.stored_layouts import flip_item
from tests.support.stored_saves import loaded, save

MISSING = "__0_1.distcp"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_model(tmp_path / "ckpt")
    return tmp_path / "ckpt"


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint, tmp_path / "copy")


def test_files_of_another_save_are_not_taken_though_most_tensors_are_frozen(tmp_path: Path) -> None:
    frozen = {f"model.layer{layer}.weight": torch.arange(4096.0) for layer in range(20)}
    for step in (1, 2):
        adapter = {"adapter.weight": torch.full((64,), float(step))}
        dcp.save({**frozen, **adapter}, storage_writer=dcp.FileSystemWriter(tmp_path / str(step)), no_dist=True)
    flip_item(read_index(tmp_path / "2"), "adapter.weight")
    before = contents(tmp_path / "2")
    assert not repair_checkpoint(verify_checkpoint(tmp_path / "2"), tmp_path / "1").whole
    assert contents(tmp_path / "2") == before


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if not is_note(path.name)}


def damage_index(directory: Path) -> None:
    flip(directory / ".metadata", (directory / ".metadata").stat().st_size // 2, 0xFF)


def damage_common(directory: Path) -> None:
    (directory / "common.pt").write_bytes((directory / "common.pt").read_bytes()[:200])


def damage_item(directory: Path) -> None:
    flip_item(read_index(directory), "output_layer.weight")


def test_a_copy_that_does_not_fit_is_never_in_force(tmp_path: Path) -> None:
    """The user takes the wrong iteration, notices it, and stops the repair; the right one mends it afterwards."""
    damaged, right, wrong = tmp_path / "damaged", tmp_path / "right", tmp_path / "wrong"
    save(wrong, 1.0, rows=1)
    save(damaged, 2.0, rows=1)
    shutil.copytree(damaged, right)
    damage_index(damaged)
    before = contents(damaged)
    report = verify_checkpoint(damaged)
    stopped = dict.fromkeys(("verify_checkpoint", "verify_index"), mock.Mock(side_effect=KeyboardInterrupt))
    with mock.patch.multiple(verify, **stopped, create=True), pytest.raises(KeyboardInterrupt):
        repair_checkpoint(report, wrong)
    assert contents(damaged) == before
    with pytest.raises(CorruptCheckpointError, match="does not describe the files"):
        repair_checkpoint(report, wrong)
    assert contents(damaged) == before
    assert repair_checkpoint(report, right).whole
    assert loaded(damaged, rows=1) == 2.0


def test_an_index_that_came_from_the_copy_does_not_make_it_the_same_save(checkpoint: Path, tmp_path: Path) -> None:
    """Another iteration under the same layout, without seals: its index fits, and nothing else of it is taken; neither
    is it when the repair is repeated, though the ids of the two are the same by then."""
    other = tmp_path / "other"
    write_model(other, tensors=model_tensors(seed=9))
    (other / ".metadata").write_bytes(encode_metadata(replace(read_index(other), storage_meta={"save_id": "other"})))
    damage_index(checkpoint)
    (checkpoint / MISSING).unlink()
    for _ in range(2):
        report = repair_checkpoint(verify_checkpoint(checkpoint), other)
        assert not report.whole
        assert not (checkpoint / MISSING).exists()


@pytest.mark.parametrize(
    "damage",
    [damage_index, damage_common, damage_item, lambda directory: (directory / MISSING).unlink()],
    ids=["index", "common state", "item", "file"],
)
def test_a_repair_that_was_stopped_changes_nothing_of_the_save_after_it(
    checkpoint: Path, copy: Path, damage: Callable[[Path], object]
) -> None:
    damage(checkpoint)
    after: list[dict[str, bytes]] = []

    def save_in_another_job() -> None:
        with mock.patch.object(Owner, "process_state", return_value="gone"):
            save(checkpoint, 2.0, rows=1)
        after.append(contents(checkpoint))

    another_job = once(save_in_another_job)
    late = ahead_of(verify, "_take_index", another_job), behind(verify, "_is_same_save", another_job)
    with late[0], late[1], pytest.raises(SaveError, match="has lost: another save"):
        repair_checkpoint(verify_checkpoint(checkpoint), copy)
    assert contents(checkpoint) == after[0]
    assert loaded(checkpoint, rows=1) == 2.0


def test_what_a_killed_repair_has_left_goes(checkpoint: Path, copy: Path) -> None:
    (checkpoint / MISSING).unlink()
    (checkpoint / f".{MISSING}.0123456789abcdef.tmp").write_bytes(b"half")
    kept: list[Commit] = []
    in_child(lambda: kept.append(Commit.begin(LocalStorage(checkpoint))))  # and dies
    assert list(checkpoint.glob(f"{INCOMPLETE_MARKER}*"))
    report = repair_checkpoint(verify_checkpoint(checkpoint), copy)
    assert report.whole
    assert report.repaired == (MISSING,)
    assert contents(checkpoint) == contents(copy)
    assert_same(read_all(checkpoint), model_tensors())


# --- links in a stranger's directories


FILE = "__0_0.distcp"
PRECIOUS = b"precious" * 1000


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    path = tmp_path / "outside" / "file"
    path.write_bytes(PRECIOUS)
    return path


def make(tmp_path: Path, writer: Callable[[Path], object]) -> tuple[Path, Path]:
    damaged, copy = tmp_path / "damaged", tmp_path / "copy"
    damaged.mkdir()
    dcp.save({"w": torch.arange(6.0)}, storage_writer=writer(damaged), no_dist=True)
    shutil.copytree(damaged, copy)
    return damaged, copy


def test_what_lies_under_the_name_of_the_temporary_file_is_not_written_through(tmp_path: Path, outside: Path) -> None:
    damaged, copy = make(tmp_path, dcp.FileSystemWriter)
    (damaged / FILE).unlink()
    (damaged / f".{FILE}.0123456789abcdef.tmp").symlink_to(outside)
    assert repair_checkpoint(verify_checkpoint(damaged), copy).whole
    assert outside.read_bytes() == PRECIOUS
    assert not (damaged / FILE).is_symlink()


def test_a_link_in_the_copy_is_not_followed(tmp_path: Path, outside: Path) -> None:
    damaged, copy = make(tmp_path, dcp.FileSystemWriter)
    (damaged / FILE).unlink()
    (copy / FILE).unlink()
    (copy / FILE).symlink_to(outside)
    assert not repair_checkpoint(verify_checkpoint(damaged), copy).whole
    assert PRECIOUS not in [path.read_bytes() for path in damaged.iterdir()]


def test_a_copy_that_is_replaced_meanwhile_mends_nothing(tmp_path: Path) -> None:
    damaged, copy = make(tmp_path, dcp.FileSystemWriter)
    flip_item(read_index(damaged), "w")
    before, writer = contents(damaged), dcp.FileSystemWriter(copy)
    replace = lambda *_: dcp.save({"w": torch.ones(6)}, storage_writer=writer, no_dist=True)  # noqa: E731
    with (
        behind(verify, "_is_same_save", replace),
        pytest.raises(LoadError, match="was replaced while it was copied from"),
    ):
        repair_checkpoint(verify_checkpoint(damaged), copy)
    assert contents(damaged) == before


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, FileSystemWriterAsync])
def test_a_data_file_that_is_a_link_is_replaced_and_not_written_through(
    tmp_path: Path, outside: Path, writer: Callable[[Path], object]
) -> None:
    damaged, copy = make(tmp_path, writer)
    file = data_file(damaged)
    file.unlink()
    file.symlink_to(outside)
    assert repair_checkpoint(verify_checkpoint(damaged), copy).whole
    assert outside.read_bytes() == PRECIOUS
    assert not file.is_symlink()


def test_a_damaged_file_is_replaced_and_never_written_in_place(checkpoint: Path, copy: Path, tmp_path: Path) -> None:
    """Who has the damaged file open, or linked, keeps it as it was."""
    damage_item(checkpoint)
    file = checkpoint / read_index(checkpoint).tensors["output_layer.weight"].chunks[0].item.file
    kept = tmp_path / "kept"
    kept.hardlink_to(file)
    before = kept.read_bytes()
    report = repair_checkpoint(verify_checkpoint(checkpoint), copy)
    assert report.whole
    assert report.repaired == (file.name,)
    assert kept.read_bytes() == before != file.read_bytes()


def test_a_file_that_is_damaged_in_the_copy_too_is_left_as_it_is(checkpoint: Path, copy: Path) -> None:
    damage_item(checkpoint)
    file = read_index(checkpoint).tensors["output_layer.weight"].chunks[0].item.file
    other = next(item for check in checks_of(read_index(copy)) if (item := check.item).file == file)
    flip(copy / file, other.offset + other.length // 2, 0xFF)
    before = contents(checkpoint)
    report = repair_checkpoint(verify_checkpoint(checkpoint), copy)
    assert report.repaired == ()
    assert contents(checkpoint) == before


def test_nothing_is_written_or_removed_behind_a_link_to_a_folder(tmp_path: Path, outside: Path) -> None:
    storage = LocalStorage(tmp_path / "checkpoint")
    storage.ensure()
    (tmp_path / "checkpoint" / "folder").symlink_to(outside.parent)
    name = f"folder/{outside.name}"
    for change in (
        lambda: storage.delete(name),
        lambda: storage.publish(name, b""),
        lambda: storage.create("folder/new", b""),
        lambda: storage.move(name, "stolen"),
        lambda: storage.open_writer("folder/new", 1),
    ):
        with pytest.raises(SaveError, match="behind the symbolic link"):
            change()
    assert [path.name for path in outside.parent.iterdir()] == [outside.name]
    assert outside.read_bytes() == PRECIOUS
