"""A checkpoint is copied between any two places: complete or not at all, resumed, compared."""

import os
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt import (
    CheckpointExistsError,
    LoadError,
    OptionError,
    SaveError,
    copy_checkpoint,
    reshard_checkpoint,
    verify_checkpoint,
)
from mcore_ckpt.commands.cli import main
from mcore_ckpt.directory import commit, copying
from mcore_ckpt.directory.commit import Commit, Owner, file_on_its_way
from mcore_ckpt.format.integrity import with_id
from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER, encode_config
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import LocalWriter, storage_at
from mcore_ckpt.tools import runs
from tests.support.command import output_of, refusal_of
from tests.support.local_files import contents, data_file, flip
from tests.support.meanwhile import ahead_of, behind, interrupted_at, once
from tests.support.model_like import model_tensors, write_model
from tests.support.object_server import ObjectDirectory, S3Directory
from tests.support.stored_saves import loaded, save, state


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").write_text("{}")
    (tmp_path / "saved" / "tokenizer" / "added").mkdir(parents=True)
    (tmp_path / "saved" / "tokenizer" / "merges.txt").write_text("a b")
    (tmp_path / "saved" / "tokenizer" / "added" / "empty").touch()
    save(tmp_path / "saved" / "modelopt_state", 2.0)
    return tmp_path / "saved"


def test_a_copy_to_a_store_and_back_is_the_same(saved: Path, object_directory: ObjectDirectory, tmp_path: Path) -> None:
    assert main(["copy", str(saved), object_directory.url]) == 0
    assert loaded(object_directory.url) == 1.0
    assert main(["copy", object_directory.url, str(tmp_path / "back")]) == 0
    assert verify_checkpoint(tmp_path / "back").whole
    assert contents(saved) == contents(tmp_path / "back")
    assert loaded(f"{object_directory.url}/modelopt_state") == 2.0


def test_other_checkpoints_below_one_are_not_taken_along_and_links_are_refused(saved: Path, tmp_path: Path) -> None:
    save(saved / "iter_0000001")
    (saved / "modelopt_state" / f"{commit.CLAIM}x").symlink_to("the note of a save that was killed")
    copy_checkpoint(saved, tmp_path / "copy")
    assert not (tmp_path / "copy" / "iter_0000001").exists()
    assert not list((tmp_path / "copy" / "modelopt_state").glob(f"{commit.CLAIM}*"))
    (saved / "linked").symlink_to(tmp_path)
    with pytest.raises(LoadError, match=r"linked: expected a regular file or a directory .* is a symbolic link"):
        copy_checkpoint(saved, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("place", ["directory", "store"])
def test_a_checkpoint_is_not_copied_into_itself(
    place: str, tmp_path: Path, object_directory: ObjectDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path / "saved") if place == "directory" else object_directory.url
    save(url)
    before = storage_at(url).list()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    for target in [url, f"{url}/tokenizer/copy"] + ["saved/copy", "link", "link/copy"] * (place == "directory"):
        with pytest.raises(OptionError, match=r"is the checkpoint to be copied, .*, or lies inside it"):
            copy_checkpoint(url, target)
    assert storage_at(url).list() == before
    assert not storage_at(url).folders()
    copy_checkpoint(url, f"{url}-2")
    assert loaded(f"{url}-2") == 1.0


def test_a_copy_that_was_interrupted_is_resumed(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    finished: list[str] = []

    def stop_at_the_second(self: LocalWriter) -> None:
        if finished:
            raise KeyboardInterrupt
        finished.append(self.name)

    with ahead_of(LocalWriter, "finish", stop_at_the_second), pytest.raises(KeyboardInterrupt):
        copy_checkpoint(saved, target)
    assert not (target / ".metadata").exists()
    report = copy_checkpoint(saved, target)
    assert [file_on_its_way(Path(name).name) for name in finished] == list(report.kept)
    assert loaded(target) == 1.0
    again = copy_checkpoint(saved, target)
    assert (again.copied, again.copied_bytes) == ((), 0)


@pytest.mark.parametrize(("how", "folder"), [("a bit", "."), ("gone", "modelopt_state")])
def test_a_damaged_checkpoint_replaces_no_intact_copy(
    how: str, folder: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "copy"
    copy_checkpoint(saved, target)
    before = contents(target)
    damaged = data_file(saved / folder)
    if how == "gone":
        damaged.unlink()
    else:
        flip(damaged, damaged.stat().st_size // 2)
    for place in (target, tmp_path / "first copy"):
        assert main(["copy", str(saved), str(place)]) != 0
        assert damaged.name in capsys.readouterr().err
    assert contents(target) == before
    assert not (tmp_path / "first copy").exists()


@pytest.mark.parametrize(("place", "stopped_at"), [("directory", "finish"), ("store", "_crc")])
def test_a_copy_that_was_held_up_leaves_the_copy_that_took_over(
    place: str, stopped_at: str, tmp_path: Path, s3_directory: S3Directory
) -> None:
    """Of two checkpoints whose files have the same names, as Megatron-Core and DCP give them."""
    for name, value in (("first", 1.0), ("second", 2.0)):
        dcp.save(state(value), storage_writer=dcp.FileSystemWriter(tmp_path / name), no_dist=True)
    target = str(tmp_path / "copy") if place == "directory" else s3_directory.url

    def take_over() -> None:
        with mock.patch.object(Owner, "process_state", return_value="gone"):
            copy_checkpoint(tmp_path / "second", target)

    held_up = ahead_of(copying if stopped_at == "_crc" else LocalWriter, stopped_at, once(take_over))
    with held_up, pytest.raises(SaveError):
        copy_checkpoint(tmp_path / "first", target)
    assert loaded(target) == 2.0
    assert verify_checkpoint(target).whole
    if place == "directory":
        assert not [path for path in Path(target).iterdir() if path.name.startswith(INCOMPLETE_MARKER)]


@pytest.mark.parametrize("folder", ["", "modelopt_state"])
@pytest.mark.parametrize("replaces", ["data files", "by what is there", "all"])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_replaced_while_it_is_copied_makes_no_mix(
    is_first: bool, replaces: str, folder: str, tmp_path: Path
) -> None:
    """Megatron-Core and DCP write over their data files, and replace `.metadata` later."""
    source, target = tmp_path / "source", tmp_path / "copy"

    def stock(value: float) -> None:
        for path in (source, source / "modelopt_state"):
            both = {"a": torch.full((1000,), value), "b": torch.full((1000,), value)}
            dcp.save(both, storage_writer=dcp.FileSystemWriter(path, thread_count=2), no_dist=True)

    stock(1.0)
    if not is_first:
        copy_checkpoint(source, target)
        before = contents(target)
    done: list[object] = []

    def replace(reads: Any, name: str, *_: Any) -> None:
        if not done and name.startswith(folder) and name.endswith("__0_0.distcp"):
            done.append(shutil.copytree(source, tmp_path / "old", copy_function=os.link))
            stock(2.0)
            if is_first and replaces == "by what is there":
                shutil.copytree(source, target, dirs_exist_ok=True, ignore=lambda *_: [".metadata"])
            if replaces != "all":
                for part in ("", "modelopt_state"):
                    os.replace(tmp_path / "old" / part / ".metadata", source / part / ".metadata")

    with behind(copying, "copy_file", replace), pytest.raises(LoadError, match="was replaced while it was copied"):
        copy_checkpoint(source, target)
    assert not (target / ".metadata").exists() if is_first else contents(target) == before


@pytest.mark.parametrize("at", ["check_data_files", "read_common_file"])
def test_what_is_replaced_while_it_is_judged_is_not_called_damaged(at: str, saved: Path, tmp_path: Path) -> None:
    (saved / "common.pt").write_bytes(b"common state")
    (saved / "metadata.json").write_bytes(encode_config())

    def replace(*_: Any) -> None:
        save(saved, 2.0)
        for name in ("common.pt", "metadata.json"):
            (saved / name).unlink()

    with (
        ahead_of(runs, at, replace),
        pytest.raises(LoadError, match="was replaced while it was copied from; begin again"),
    ):
        copy_checkpoint(saved, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    copy_checkpoint(saved, tmp_path / "copy")
    assert loaded(tmp_path / "copy") == 2.0


@pytest.mark.parametrize(("place", "where", "at"), [("directory", Commit, "publish"), ("store", commit, "in_parallel")])
def test_a_copy_that_was_killed_at_or_behind_its_commit_is_resumed(
    place: str, where: Any, at: str, saved: Path, tmp_path: Path, s3_directory: S3Directory
) -> None:
    (saved / "common.pt").write_bytes(b"common state")
    (saved / "metadata.json").write_bytes(encode_config())
    target = s3_directory.url if place == "store" else str(tmp_path / "copy")
    with mock.patch.object(Commit, "give_up"), interrupted_at(where, at):
        copy_checkpoint(saved, target)
    copy_checkpoint(saved, target)
    assert set(storage_at(target).list()) == {path.name for path in saved.iterdir() if path.is_file()}


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_repeated_copy_brings_back_the_common_state(is_gone: bool, saved: Path, tmp_path: Path) -> None:
    (saved / "common.pt").write_bytes(b"common state")
    (saved / "metadata.json").write_bytes(encode_config())
    copy_checkpoint(saved, tmp_path / "copy")
    common = tmp_path / "copy" / "common.pt"
    if is_gone:
        common.unlink()
    else:
        flip(common, 3)
    assert "common.pt" in copy_checkpoint(saved, tmp_path / "copy").copied
    assert contents(saved) == contents(tmp_path / "copy")


def test_what_an_interrupted_copy_of_another_checkpoint_has_left_is_not_published(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    (saved / "common.pt").write_bytes(b"of the first")
    (saved / "metadata.json").write_bytes(encode_config())
    with interrupted_at(copying, "length_flaw"):
        copy_checkpoint(saved, target)
    save(tmp_path / "other", 2.0)
    with pytest.raises(CheckpointExistsError, match=r"not of the checkpoint that is copied: __0_1.*, "):
        copy_checkpoint(tmp_path / "other", target)
    assert not storage_at(target).exists(".metadata")
    copy_checkpoint(saved, target)  # which is resumed
    assert loaded(target) == 1.0


def test_a_copy_that_is_there_leaves_the_files_of_a_save_at_work(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    copy_checkpoint(saved, target)
    with mock.patch.object(commit, "_place", return_value="another host"):
        held_up = Commit.begin(storage_at(target), common=b"of the save")
    note, own = target / (commit.NOTE + held_up.id), with_id("__0_0.distcp", bytes.fromhex(held_up.id))
    os.utime(note, (time.time() - 100.0,) * 2)
    (target / own).write_bytes(b"of the save")
    (saved / "tokenizer.json").write_text("[]")
    with pytest.raises(SaveError, match=r"another save may be at work there \(process .* on host"):
        copy_checkpoint(saved, target)
    assert {own, held_up.pending} <= set(storage_at(target).list())
    assert (target / "tokenizer.json").read_text() == "{}"
    os.utime(note, (time.time() - 4000.0,) * 2)  # nobody can be at work any more
    copy_checkpoint(saved, target)
    assert (target / "tokenizer.json").read_text() == "[]"
    assert not note.exists()


def test_a_file_that_another_program_writes_meanwhile_is_not_replaced(saved: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"

    def write_first(_: Storage, name: str) -> None:
        if name.startswith(".__0_1"):  # it is copied, and has its name next
            (target / name[1:].partition(".distcp")[0]).with_suffix(".distcp").write_bytes(b"of another")

    writing = ahead_of(copying, "crc_of", write_first)
    with writing, pytest.raises(SaveError, match="another program has written it"):
        copy_checkpoint(saved, target)
    (theirs,) = target.glob("*.distcp")
    assert theirs.read_bytes() == b"of another"


def test_a_save_that_is_published_while_a_copy_looks_what_is_left_loses_nothing(saved: Path, tmp_path: Path) -> None:
    target, other = tmp_path / "copy", tmp_path / "other"
    save(other, 2.0)
    copy_checkpoint(saved, target)
    for file in other.glob("*.distcp"):
        shutil.copy(file, target)

    def published(*_: Any) -> list[Owner]:
        shutil.copy(other / ".metadata", target)
        return []  # its note is .metadata now

    with mock.patch.object(copying, "notes", published), pytest.raises(SaveError, match="another checkpoint has repla"):
        copy_checkpoint(saved, target)
    assert loaded(target) == 2.0


def test_other_checkpoints_of_a_run_are_no_part_of_the_copy(saved: Path, tmp_path: Path) -> None:
    save(tmp_path / "run" / "iter_0000001", 2.0)
    copy_checkpoint(saved, tmp_path / "run")
    assert loaded(tmp_path / "run") == 1.0
    (tmp_path / "run" / "notes").write_text("of the user")
    assert copy_checkpoint(saved, tmp_path / "run").copied == ()


def test_what_lies_next_to_the_checkpoints_of_a_run_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save(run / "iter_0000001")
    (run / "latest_checkpointed_iteration.txt").write_text("1")
    (run / "latest_train_state.pt").write_bytes(b"of the framework")
    for folder in ("dataloader", "iter_0000002", "iter_0000003.partial", ".mcore_ckpt_removed.x"):
        (run / folder).mkdir()
    (run / "iter_0000003.partial.journal").touch()
    names = ["dataloader", "latest_train_state.pt"]
    said = output_of("copy", run, tmp_path / "copy").splitlines()[1:]
    assert said == [f"not copied: {name}, in the run's directory" for name in names]
    said = [
        line
        for line in output_of("reshard", run, tmp_path / "made", "--tp", "1", "--allow-whole").splitlines()
        if line.startswith("left out: ")
    ]
    assert said == [f"left out: {name}, in the run's directory" for name in names]
    assert copy_checkpoint(run / "iter_0000001", tmp_path / "one").left_out == ()


def test_another_checkpoint_with_the_same_index_is_not_replaced(tmp_path: Path) -> None:
    """Megatron-Core's index has no id of a save: those of two saves can have the same bytes."""
    for seed in (1, 2):
        write_model(tmp_path / f"iter_{seed:07d}", tensors=model_tensors(seed))
    first, second, partial = tmp_path / "iter_0000001", tmp_path / "iter_0000002", tmp_path / "partial"
    assert (first / ".metadata").read_bytes() == (second / ".metadata").read_bytes()
    shutil.copytree(first, partial)
    (partial / "__0_0.distcp").unlink()
    for target in (second, partial):
        before = contents(target)
        with pytest.raises(CheckpointExistsError, match=r"distcp: differs from .* another checkpoint, or a damaged"):
            copy_checkpoint(first if target is second else second, target)
        assert contents(target) == before
    assert "__0_0.distcp" in copy_checkpoint(first, partial).copied
    assert contents(partial) == contents(first)


def test_a_file_in_the_way_is_not_the_fault_of_a_device(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "a file is where a directory has to be: name another path" in refusal_of("copy", saved, tmp_path / "file")
    (tmp_path / "folder" / data_file(saved).name).mkdir(parents=True)
    assert "a directory is where a file has to be: remove it" in refusal_of("copy", saved, tmp_path / "folder")


@pytest.mark.parametrize("content", [None, "", '{"sharded_backend": "zarr", "sharded_backend_version": 1}'])
def test_what_megatron_could_not_load_is_not_copied(content: str | None, tmp_path: Path) -> None:
    write_model(tmp_path / "iter_0000001")
    config = tmp_path / "iter_0000001" / "metadata.json"
    if content is None:
        config.unlink()
    else:
        config.write_text(content)
    assert main(["verify", str(config.parent)]) == 1
    for command, more in (("copy", []), ("reshard", ["--tp", "1"])):
        assert main([command, str(config.parent), str(tmp_path / "run" / "iter_0000001"), *more]) == 2
    assert not (tmp_path / "run").exists()


def test_a_copy_that_is_not_what_was_read_is_deleted(saved: Path, tmp_path: Path) -> None:
    def damage(_: LocalWriter, offset: int, view: memoryview) -> None:
        if offset == 0 and len(view) > 100_000:
            view[5000] ^= 1

    with (
        ahead_of(LocalWriter, "write", damage),
        pytest.raises(SaveError, match=r"the copy has CRC-32 .*, expected .*Check the device"),
    ):
        copy_checkpoint(saved, tmp_path / "copy")
    assert not (tmp_path / "copy" / ".metadata").exists()


@pytest.mark.parametrize("make", [copy_checkpoint, partial(reshard_checkpoint, tp=1, pp=1)], ids=["copy", "reshard"])
class TestNemo:
    """What lies next to the weights is theirs, complete, and from inside the directory."""

    @pytest.fixture
    def nemo(self, tmp_path: Path) -> Path:
        write_model(tmp_path / "nemo" / "weights")
        (tmp_path / "nemo" / "context" / "tokenizer").mkdir(parents=True)
        for name in ("model.yaml", "tokenizer/merges.txt", "tokenizer/vocab.json"):
            (tmp_path / "nemo" / "context" / name).write_text(name)
        return tmp_path / "nemo"

    @pytest.mark.parametrize("link", ["context/x", "context/tokenizer/x", "context"])
    def test_links_are_refused(self, link: str, make: Any, nemo: Path, tmp_path: Path) -> None:
        if link == "context":
            (nemo / link).rename(tmp_path / "context")
        (nemo / link).symlink_to(tmp_path)
        with pytest.raises(LoadError, match=rf"nemo/{link}: expected .* symbolic link; nothing has been written"):
            make(nemo, tmp_path / "t")
        assert not (tmp_path / "t").exists()

    def test_the_context_of_another_model_is_named(self, make: Any, nemo: Path, tmp_path: Path) -> None:
        shutil.copytree(nemo / "context", tmp_path / "t" / "context")
        (tmp_path / "t" / "context" / "tokenizer" / "vocab.json").write_text("another's")
        before = contents(tmp_path / "t")
        with pytest.raises(CheckpointExistsError, match=r"t/context/tokenizer/vocab.json: differs from"):
            make(nemo, tmp_path / "t")
        assert contents(tmp_path / "t") == before
        shutil.copy(nemo / "context" / "tokenizer" / "vocab.json", tmp_path / "t" / "context" / "tokenizer")
        (tmp_path / "t" / "context" / "adapter_config.json").touch()
        with pytest.raises(CheckpointExistsError, match=r"t/context/adapter_config.json: differs from"):
            make(nemo, tmp_path / "t")
        (tmp_path / "t" / "context" / "adapter_config.json").unlink()
        make(nemo, tmp_path / "t")
        assert verify_checkpoint(tmp_path / "t").whole

    def test_one_that_was_interrupted_is_resumed(self, make: Any, nemo: Path, tmp_path: Path) -> None:
        def stop_at_the_second(self: LocalWriter) -> None:
            if "merges.txt" in self.name:
                raise KeyboardInterrupt

        with ahead_of(LocalWriter, "finish", stop_at_the_second), pytest.raises(KeyboardInterrupt):
            make(nemo, tmp_path / "t")
        (tmp_path / "t" / f".merges.txt.{'0' * 16}.tmp").write_text("what a kill leaves")
        make(nemo, tmp_path / "t")
        assert contents(tmp_path / "t" / "context") == contents(nemo / "context")
        assert sorted(os.listdir(tmp_path / "t")) == ["context", "weights"]

    def test_the_second_of_two_at_once_is_refused(self, make: Any, nemo: Path, tmp_path: Path) -> None:
        def make_too() -> None:
            with pytest.raises(SaveError):
                make(nemo, tmp_path / "t")

        with ahead_of(runs, "sync_folders", once(make_too)):
            make(nemo, tmp_path / "t")
