"""The commit protocol: a directory holds the old checkpoint or the new one, after a failure or a crash at any step."""

import os
import re
from array import array
from pathlib import Path

import pytest

from mcore_ckpt import CheckpointExistsError, SaveError, SaveOptions
from mcore_ckpt.directory.commit import Commit, check_files, common_file_in_force, open_target, write_config
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.format.integrity import Manifest, ManifestFile, data_file_name, with_id, with_manifest
from mcore_ckpt.format.metadata_read import COMMON_FILE, CONFIG_FILE, METADATA_FILE, read_index
from mcore_ckpt.format.metadata_write import MetadataEncoder
from mcore_ckpt.storage.resolve import LocalStorage, storage_at
from tests.support.local_files import names
from tests.support.processes import in_child

pytestmark = pytest.mark.quick

OPTIONS = SaveOptions()


def metadata(*files: str, objects: tuple[str, ...] = ()) -> bytes:
    """A `.metadata` whose tensors lie in these files."""
    tensors = {
        name: TensorEntry(name, "float32", (1,), (StoredChunk((0,), (1,), StoredItem(name, 0, 64)),)) for name in files
    }
    entries = {key: ObjectEntry(key, StoredItem(files[0], 64, 64)) for key in objects}
    return MetadataEncoder(CheckpointIndex("", tensors, {})).encode(entries)


def file_of(commit: Commit, rank: int = 0, number: int = 0) -> str:
    return with_id(data_file_name(rank, number), commit.save_id)


def save_as_stock(path: Path, name: str = "__0_0.distcp") -> str:
    """A checkpoint whose file is named as stock names it; returns that name."""
    path.mkdir(exist_ok=True)
    (path / name).write_bytes(b"data")
    (path / COMMON_FILE).write_bytes(b"stock's")
    (path / METADATA_FILE).write_bytes(metadata(name))
    return name


def save(path: Path, common: bytes | None = b"common") -> str:
    """A whole save of one rank; returns the name of its data file."""
    path.mkdir(exist_ok=True)
    commit, name = begin(path, common)
    commit.publish(metadata(name))
    return name


def begin(path: Path, common: bytes | None = None) -> tuple[Commit, str]:
    """A save that has written its data file and not published."""
    storage = LocalStorage(path)
    commit = open_target(storage, OPTIONS) if common is None else Commit.begin(storage, common=common)
    name = file_of(commit)
    (path / name).write_bytes(b"data")
    return commit, name


def begin_and_be_killed(path: Path) -> str:
    """A save in a process that ends without another word; returns the name of its data file."""
    kept: list[Commit] = []  # (a claim that is forgotten is let go)

    def killed() -> str:
        commit, name = begin(path, b"killed save's")
        kept.append(commit)
        return name

    return in_child(killed)


@pytest.mark.parametrize("reserved", [False, True])
def test_on_existing_error_touches_nothing(reserved: bool, tmp_path: Path) -> None:
    save(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    storage = LocalStorage(tmp_path)
    kept = [Commit.begin(storage, common=b"of the save that is refused")] if reserved else []
    # The directory is named as its user knows it, not as a class of ours.
    with pytest.raises(CheckpointExistsError, match=rf"^{re.escape(str(tmp_path))}: .* and on_existing"):
        open_target(storage, SaveOptions(on_existing="error"))
    assert all(commit.is_over for commit in kept)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_what_a_killed_save_left_is_removed_by_the_next_and_nothing_else(tmp_path: Path) -> None:
    first = save(tmp_path, b"one")
    (tmp_path / "notes.txt").write_text("mine")
    killed = begin_and_be_killed(tmp_path)
    (tmp_path / killed.replace("__0_1", "hint__3_2")).write_bytes(b"half")
    # Killed here. The old checkpoint is in force, its common state too.
    assert common_file_in_force(storage_at(tmp_path), read_index(tmp_path)) == COMMON_FILE
    assert first in names(tmp_path)
    third = save(tmp_path, b"three")
    assert names(tmp_path) == {third, METADATA_FILE, COMMON_FILE, "notes.txt"}
    assert (tmp_path / COMMON_FILE).read_bytes() == b"three"


@pytest.mark.parametrize("old", ["of this format", "of stock"])
def test_a_replaced_checkpoint_goes_when_the_new_one_is_there_and_not_before(old: str, tmp_path: Path) -> None:
    first = save_as_stock(tmp_path) if old == "of stock" else save(tmp_path)
    begin_and_be_killed(tmp_path)
    (tmp_path / "__5_5.distcp").write_bytes(b"by others")
    storage = LocalStorage(tmp_path)
    open_target(storage, OPTIONS).give_up()
    assert names(tmp_path) >= {first, METADATA_FILE, COMMON_FILE, "__5_5.distcp"}
    assert read_index(tmp_path).tensors.keys() == {first}
    last = save(tmp_path)
    assert names(tmp_path) == {last, METADATA_FILE, COMMON_FILE, "__5_5.distcp"}


@pytest.mark.parametrize("replaces", [False, True])
def test_a_common_file_of_a_killed_save_is_not_put_beside_a_common_state_object(tmp_path: Path, replaces: bool) -> None:
    """A save of an older version was killed; the next is of a version that keeps the common state in the data files."""
    if replaces:
        save(tmp_path, b"old version's")
    begin_and_be_killed(tmp_path)
    commit, name = begin(tmp_path)
    content = metadata(name, objects=("common_state/shard_0_1",))
    commit.publish(content, stale=(COMMON_FILE,))
    assert common_file_in_force(storage_at(tmp_path), read_index(tmp_path)) is None
    assert names(tmp_path) == {name, METADATA_FILE}


def test_the_common_state_of_a_killed_save_is_not_that_of_a_checkpoint_that_stock_has_saved_since(
    tmp_path: Path,
) -> None:
    save(tmp_path, b"one")
    begin_and_be_killed(tmp_path)
    save_as_stock(tmp_path)
    assert common_file_in_force(storage_at(tmp_path), read_index(tmp_path)) == COMMON_FILE
    save(tmp_path, b"three")
    assert not [name for name in names(tmp_path) if "pending" in name]


def test_what_a_foreign_strategy_saves_beside_a_common_state_is_settled(tmp_path: Path) -> None:
    """Megatron may save the sharded part by a strategy that is not ours."""
    first = save(tmp_path, b"one")
    storage = LocalStorage(tmp_path)
    commit = Commit.begin(storage, common=b"two")
    stock = data_file_name(0, 0)
    (tmp_path / stock).write_bytes(b"data")
    (tmp_path / METADATA_FILE).write_bytes(metadata(stock))
    assert write_config(storage, b"{}", commit)
    assert write_config(storage, b"{}", None)
    assert names(tmp_path) == {first, stock, METADATA_FILE, COMMON_FILE, CONFIG_FILE}
    assert (tmp_path / COMMON_FILE).read_bytes() == b"two"
    last = save(tmp_path)
    assert names(tmp_path) == {last, METADATA_FILE, COMMON_FILE, CONFIG_FILE}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["larger than any index", "a pipe"])
def test_what_cannot_be_an_index_is_not_read_for_one(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"of whatever it was")
    if kind == "a pipe":
        os.mkfifo(tmp_path / METADATA_FILE)
    else:
        with (tmp_path / METADATA_FILE).open("wb") as stream:
            stream.truncate(5 * 1024**3)  # of which the disk holds nothing
    file = save(tmp_path)
    assert set(read_index(tmp_path).tensors) == {file}
    assert (tmp_path / file).exists()
    assert ("expected at most" if kind != "a pipe" else "a pipe") in caplog.text


def sealed(file: str, save_id: bytes) -> bytes:
    """A `.metadata` of one tensor in this file, with the seal of a save."""
    seal = Manifest(save_id, {file: ManifestFile(4, 0, save_id)}, array("I", [0]))
    return with_manifest(metadata(file), seal)


def test_a_pending_common_state_is_in_force_only_beside_the_metadata_of_its_own_save(tmp_path: Path) -> None:
    """A file of stock's name tells no save; the seal of `.metadata` does."""
    save(tmp_path, b"one")
    storage = LocalStorage(tmp_path)
    lost = Commit.begin(storage, common=b"of a save that did not publish")
    name = data_file_name(0, 0)
    (tmp_path / name).write_bytes(b"data")
    storage.publish(METADATA_FILE, sealed(name, b"x" * 16))
    assert common_file_in_force(storage_at(tmp_path), read_index(tmp_path)) == COMMON_FILE
    storage.publish(METADATA_FILE, sealed(name, lost.save_id))
    assert common_file_in_force(storage_at(tmp_path), read_index(tmp_path)) == lost.pending


def test_a_file_that_is_there_at_another_size_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_ckpt.directory.commit._FILES_APPEAR_WITHIN_S", 0.0)
    (tmp_path / "__0_0.distcp").write_bytes(b"x" * 9)
    with pytest.raises(SaveError, match="planned with 10 bytes, and has 9"):
        check_files(Commit.begin(LocalStorage(tmp_path)), {"__0_0.distcp": 10})
