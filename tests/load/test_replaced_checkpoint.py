"""Objects that outlive a call, and a directory that holds another checkpoint by the next: never values of both."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from mcore_ckpt import ChecksumError, LoadOptions, SaveOptions, open_checkpoint
from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.dcp.reader import FileSystemReader, MCoreLoadPlanner
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.directory.retention import prune_run
from mcore_ckpt.load.records import OpenFiles
from mcore_ckpt.load.requests import ReadRequest
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools import diff, inspection, verify
from tests.support import stored_saves
from tests.support.gloo_ranks import run_ranks
from tests.support.meanwhile import ahead_of, behind, once

WRITERS = {"ours": FileSystemWriterAsync, "stock": dcp.FileSystemWriter}
# The keys of the second stand in another order, and take other places in the file.
FIRST = {"a": torch.full((4,), 1.0), "b": torch.full((4,), 2.0), "step": 1}
SECOND = {"step": 2, "b": torch.full((4,), 4.0), "a": torch.full((4,), 3.0)}


def save(path: Path, state: dict[str, Any], writer: str = "ours") -> None:
    dcp.save(state, storage_writer=WRITERS[writer](path), no_dist=True)


def loaded(reader: FileSystemReader, planner: Any = None) -> dict[str, Any]:
    state = {"a": torch.zeros(4), "b": torch.zeros(4), "step": 0}
    dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    return state


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(torch.as_tensor(one[key]), torch.as_tensor(value)) for key, value in other.items())


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("planner", [None, MCoreLoadPlanner()])
def test_a_reader_and_a_planner_used_again_load_what_is_there(tmp_path: Path, writer: str, planner: Any) -> None:
    reader = FileSystemReader(tmp_path / "latest")
    for state in (FIRST, SECOND, FIRST):
        save(tmp_path / "latest", state, writer)
        assert same(loaded(reader, planner), state)


class ReadsAhead(FileSystemReader):
    """Goes by an index that was read before the checkpoint was replaced."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        return self.dcp_metadata()


def _load_by_two_indexes(rank: int, path: Path) -> None:
    reader = ReadsAhead(path) if rank == 0 else FileSystemReader(path)
    assert len(reader.index.tensors) == 2
    torch.distributed.barrier()
    if rank == 0:
        save(path, SECOND)
    torch.distributed.barrier()
    dcp.load({key: torch.zeros(4) for key in "ab"}, storage_reader=reader)


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="ranks load alone, which it has no argument for")
def test_two_ranks_with_the_indexes_of_two_saves_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "latest", FIRST)
    with pytest.raises(Exception, match=r"the checkpoint was replaced by another save.*rank 0 .* rank 1"):
        run_ranks(_load_by_two_indexes, 2, tmp_path / "latest")


@pytest.mark.parametrize("writer", WRITERS)
def test_a_checkpoint_that_is_replaced_after_its_index_was_read_is_named(tmp_path: Path, writer: str) -> None:
    save(tmp_path / "latest", FIRST, writer)
    reader = ReadsAhead(tmp_path / "latest")
    assert len(reader.index.tensors) == 2
    save(tmp_path / "latest", SECOND, writer)
    with pytest.raises(CheckpointException, match="the checkpoint was replaced by another save"):
        loaded(reader)


def test_a_file_that_is_another_one_for_the_second_thread_is_named(tmp_path: Path) -> None:
    save(tmp_path, FIRST, "stock")
    files, touched = (OpenFiles(storage_at(tmp_path), "on", None) for _ in range(2))
    with files.reader("__0_0.distcp"), touched.reader("__0_0.distcp"), ThreadPoolExecutor(1) as pool:
        (tmp_path / "__0_0.distcp").touch()
        pool.submit(touched.reader("__0_0.distcp").__enter__).result()  # the same file
        shutil.copy(tmp_path / "__0_0.distcp", tmp_path / "other").replace(tmp_path / "__0_0.distcp")
    with ThreadPoolExecutor(1) as pool, pytest.raises(LoadError, match=r"__0_0\.distcp: another file took its name"):
        pool.submit(files.reader("__0_0.distcp").__enter__).result()


class Renaming(FileSystemReader):
    """Names keys otherwise than they are stored, as code for stock's reader does: in the metadata that it returns."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata = super().read_metadata(*args, **kwargs)
        entries, names = metadata.state_dict_metadata, {"a": "x", "b": "y"}
        metadata.state_dict_metadata = {names.get(key, key): entry for key, entry in entries.items()}
        metadata.storage_data = {
            type(index)(names.get(index.fqn, index.fqn), index.offset, index.index): place
            for index, place in metadata.storage_data.items()
        }
        return metadata


def test_the_metadata_that_is_handed_over_is_gone_by(tmp_path: Path) -> None:
    save(tmp_path, FIRST)
    state = {"x": torch.zeros(4), "y": torch.zeros(4)}
    dcp.load(state, storage_reader=Renaming(tmp_path), no_dist=True)
    assert same(state, {"x": FIRST["a"], "y": FIRST["b"]})


@pytest.mark.parametrize("writer", WRITERS)
def test_an_open_checkpoint_gives_what_it_was_opened_for_or_says_that_it_was_replaced(
    tmp_path: Path, writer: str
) -> None:
    save(tmp_path / "latest", FIRST, writer)
    with open_checkpoint(tmp_path / "latest") as checkpoint:
        save(tmp_path / "latest", SECOND, writer)
        for read in (lambda: checkpoint["a"].torch(), lambda: checkpoint.objects["step"]):
            with pytest.raises(LoadError, match="the checkpoint was replaced by another save"):
                read()


# What is looked at while a save replaces it: what is said is true of one of the two, or it is said.
LOOKS: dict[str, tuple[Any, Callable[[Path], bool]]] = {
    "verify": (verify, lambda path: verify.verify_checkpoint(path).whole),
    "inspect": (inspection, lambda path: not inspection.summarize_checkpoint(path).problems),
    "diff": (diff, lambda path: not diff.diff_checkpoints(path, path.with_name("as before")).identical),
}


@pytest.mark.parametrize("name", LOOKS)
def test_a_checkpoint_that_is_replaced_right_after_its_index_was_read(name: str, tmp_path: Path) -> None:
    module, look = LOOKS[name]
    path = tmp_path / "c"
    for each in (path, tmp_path / "as before"):
        stored_saves.save(each, 1.0, rows=1)
    a_save = once(lambda: stored_saves.save(path, 2.0, rows=1))
    with behind(module, "read_index", a_save), pytest.raises(LoadError, match="replaced the checkpoint"):
        look(path)
    assert look(path)


# --- data files in two places -----------------------------------------------------------------------------------------

NAME = "iter_0000001"


@pytest.fixture
def tiers(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of one checkpoint, equal in both."""
    near, far = tmp_path / "near", tmp_path / "far"
    state = {"weight": torch.ones(3000), "told": {"value": 1.0}}
    dcp.save(state, storage_writer=FileSystemWriterAsync(near / NAME, options=SaveOptions()), no_dist=True)
    shutil.copytree(near, far)
    return near, far


def of_tiers(near: Path, far: Path, home: str) -> FileSystemReader:
    """A reader of the first checkpoint, by the index of either tier."""
    if home == "near":
        return FileSystemReader(near / NAME, options=LoadOptions(drain_to=str(far)))
    return FileSystemReader(far / NAME, options=LoadOptions(local_tier=str(near)))


def read_of(reader: FileSystemReader) -> list[float]:
    found: dict[str, Any] = {"weight": torch.zeros(3000), "told": {"value": 0.0}}
    dcp.load(found, storage_reader=reader, no_dist=True)
    return [*found["weight"].unique().tolist(), found["told"]["value"]]


def damage(directory: Path) -> None:
    """Zeros in the midst of all data files, which keep their lengths."""
    for file in directory.glob("*.distcp"):
        content = bytearray(file.read_bytes())
        content[64 : len(content) // 2] = bytes(len(content) // 2 - 64)
        file.write_bytes(content)


@pytest.mark.parametrize("home", ["near", "far"])
def test_a_damaged_file_of_the_first_tier_is_refused_and_both_are_named(tiers: tuple[Path, Path], home: str) -> None:
    near, far = tiers
    damage(near / NAME)
    with pytest.raises(ChecksumError) as error:
        of_tiers(near, far, home).read_items([ReadRequest("weight", torch.zeros(3000), (0,), (3000,))])
    assert str(error.value).startswith(f"{near / NAME} (or {far / NAME}, for files that are not there): weight")
    for file in (near / NAME).glob("*.distcp"):
        file.unlink()
    assert read_of(of_tiers(near, far, home)) == [1.0, 1.0]


@pytest.mark.parametrize("home", ["near", "far"])
def test_neither_tier_is_pruned_under_a_load_that_reads_there(tiers: tuple[Path, Path], home: str) -> None:
    near, far = tiers
    other = far if home == "near" else near
    dcp.save({"w": torch.ones(3)}, storage_writer=FileSystemWriterAsync(other / "iter_0000002"), no_dist=True)
    if home == "near":
        next((near / NAME).glob("*.distcp")).unlink()

    def pruned() -> str:
        decisions = prune_run(other, keep_last=1, remove=True).decisions
        return next(each.reason for each in decisions if each.checkpoint.name == NAME)

    reasons: list[str] = []
    with ahead_of(FileSystemReader, "read_data", lambda *_: reasons.append(pruned())):
        assert read_of(of_tiers(near, far, home)) == [1.0, 1.0]
    assert reasons == ["a load is reading it"]
    assert pruned() == "removed"
