"""The common state belongs to its save: another beside a sealed `.metadata` is refused, until somebody accepts it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt.commands.cli import main
from mcore_ckpt.core.errors import CheckpointNotFoundError, CorruptCheckpointError, SaveError
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.directory import commit, copying, iterations
from mcore_ckpt.directory.commit import pending_name, remove_tensors
from mcore_ckpt.directory.in_force import saves_of
from mcore_ckpt.directory.iterations import look_at
from mcore_ckpt.format.metadata_read import COMMON_FILE, CONFIG_FILE, encode_config, read_index
from mcore_ckpt.megatron import serialization
from mcore_ckpt.megatron.calls import MegatronSave, in_progress
from mcore_ckpt.megatron.serialization import load_common, save_common
from mcore_ckpt.models.conversions import import_checkpoint
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from mcore_ckpt.storage.resolve import LocalStorage
from mcore_ckpt.tools import keys, verify
from mcore_ckpt.tools.keys import read_plain_state
from mcore_ckpt.tools.runs import copy_checkpoint
from mcore_ckpt.tools.verify import accept_common_file, repair_checkpoint, verify_checkpoint
from tests.support.command import output_of
from tests.support.meanwhile import ahead_of, behind, once
from tests.support.processes import exit_code, fork


def common(iteration: int) -> dict[str, Any]:
    return {"iteration": iteration, "args": {"lr": 1e-3}}


def save(directory: Path, iteration: int) -> Path:
    directory.mkdir(exist_ok=True)
    state = {"a": torch.full((20, 3), float(iteration)), "b": torch.ones(5)}
    with in_progress(MegatronSave(location=str(directory))):  # as a strategy of Megatron's does
        save_common(common(iteration), directory)
        dcp.save(state, storage_writer=FileSystemWriterAsync(directory), no_dist=True)
    (directory / CONFIG_FILE).write_bytes(encode_config())
    return directory


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("saves")
    return save(directory / "iter_0000001", 1), save(directory / "iter_0000002", 2)


@pytest.fixture
def a(saves: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(saves[0], tmp_path / "a"))


def take_of_another_save(a: Path, b: Path) -> None:
    shutil.copy(b / COMMON_FILE, a / COMMON_FILE)


USES: list[Callable[[Path], object]] = [
    load_common,
    lambda directory: read_plain_state(read_index(directory)),
    lambda directory: reshard_checkpoint(directory, directory.with_name("target"), tp=2, pp=1, allow_whole=True),
]


@pytest.mark.parametrize("use", USES)
def test_another_common_state_is_refused_with_a_way_out(
    a: Path, saves: tuple[Path, Path], use: Callable[[Path], object]
) -> None:
    take_of_another_save(a, saves[1])
    with pytest.raises(CorruptCheckpointError, match=rf"{COMMON_FILE}: expected the common state of save .*--accept-c"):
        use(a)
    (problem,) = verify_checkpoint(a).problems
    assert problem.file == COMMON_FILE
    assert "--accept-common-state" in problem.message


def test_a_listing_from_before_the_publish_does_not_make_it_missing(a: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = pending_name(next(iter(saves_of(read_index(a)))))

    def lag(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def lagging(*arguments: Any) -> Any:
            listed = method(*arguments)
            if isinstance(listed, dict):
                return {waiting if name == COMMON_FILE else name: size for name, size in listed.items()}
            return [waiting if name == COMMON_FILE else name for name in listed]

        monkeypatch.setattr(owner, name, lagging)

    lag(LocalStorage, "list")
    lag(LocalStorage, "sizes")
    assert COMMON_FILE not in LocalStorage(a).list()
    assert verify_checkpoint(a).whole
    assert look_at(a)[0].whole
    assert load_common(a) == common(1)
    assert accept_common_file(a) is None
    assert read_plain_state(read_index(a))
    reshard_checkpoint(a, a.with_name("target"), tp=2, pp=1, allow_whole=True)
    assert (a.with_name("target") / COMMON_FILE).exists()


def test_what_was_changed_on_purpose_is_accepted(a: Path) -> None:
    torch.save({**common(1), "args": {"lr": 1e-4}}, a / COMMON_FILE)
    assert main(["verify", str(a)]) == 1
    assert f"accepted as it is: {COMMON_FILE}" in output_of("repair", a, "--accept-common-state")
    assert load_common(a)["args"] == {"lr": 1e-4}
    assert read_index(a).manifest is not None
    assert not [path for path in a.iterdir() if "incomplete" in path.name]
    assert accept_common_file(a) is None
    (a / COMMON_FILE).unlink()
    with pytest.raises(CheckpointNotFoundError):
        accept_common_file(a)


def test_what_was_changed_on_purpose_is_not_replaced_by_a_save_that_was_killed_when_it_was_decided(
    a: Path, saves: tuple[Path, Path]
) -> None:
    def killed() -> None:
        with ahead_of(commit, "_publish", lambda *_: os._exit(9)):
            save(a, 2)

    assert exit_code(fork(killed)) == 9
    changed = common(1) | {"note": "by the user"}
    torch.save(changed, a / COMMON_FILE)
    (a / CONFIG_FILE).unlink()
    for repair in (accept_common_file, lambda path: repair_checkpoint(verify_checkpoint(path), saves[0])):
        with pytest.raises(SaveError, match=r"a save is decided.* delete \.mcore_ckpt_next\.") as caught:
            repair(a)
    (a / str(caught.value).rpartition("delete ")[2]).unlink()
    assert accept_common_file(a) == COMMON_FILE
    assert repair_checkpoint(verify_checkpoint(a), saves[0]).whole
    assert load_common(a) == changed


def test_a_listing_tells_another_length(a: Path) -> None:
    assert not look_at(a)[0].problems
    (a / COMMON_FILE).write_bytes((a / COMMON_FILE).read_bytes() + b"\0")
    (problem,) = look_at(a)[0].problems
    assert COMMON_FILE in problem


def test_it_comes_back_from_a_copy_of_the_same_save(a: Path, saves: tuple[Path, Path]) -> None:
    take_of_another_save(a, saves[1])
    assert not repair_checkpoint(verify_checkpoint(a), saves[1]).whole
    report = repair_checkpoint(verify_checkpoint(a), saves[0])
    assert report.whole
    assert report.repaired == (COMMON_FILE,)
    assert load_common(a) == common(1)


MADE: dict[str, Callable[[Path, Path], object]] = {
    "removed": lambda a, made: remove_tensors(Path(shutil.copytree(a, made)), "b"),
    "resharded": lambda a, made: reshard_checkpoint(a, made, tp=2, pp=1, allow_whole=True),
    "imported": lambda a, made: import_checkpoint(a, made, common=a / COMMON_FILE),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_what_is_made_of_a_checkpoint_is_bound_to_its_common_state(
    a: Path, saves: tuple[Path, Path], tmp_path: Path, make: Callable[[Path, Path], object]
) -> None:
    made = tmp_path / "made"
    make(a, made)
    assert verify_checkpoint(made).whole
    assert load_common(made) == common(1)
    take_of_another_save(made, saves[1])
    assert not verify_checkpoint(made).whole
    with pytest.raises(CorruptCheckpointError, match=COMMON_FILE):
        load_common(made)


def test_a_common_state_that_is_just_given_its_name_is_not_missing(a: Path, tmp_path: Path) -> None:
    """Of a save that is published, but was not done when its common state was looked for."""
    waiting = a / pending_name(next(iter(saves_of(read_index(a)))))
    uses: dict[Any, Callable[[], bool]] = {
        verify: lambda: verify_checkpoint(a).whole,
        iterations: lambda: look_at(a)[0].whole,
        serialization: lambda: bool(load_common(a) == common(1)),
        keys: lambda: bool(read_plain_state(read_index(a))),
        copying: lambda: COMMON_FILE in copy_checkpoint(a, tmp_path / "copy").copied,
    }
    for module, use in uses.items():
        (a / COMMON_FILE).rename(waiting)
        with behind(module, "common_file_in_force", once(lambda: waiting.rename(a / COMMON_FILE))):
            assert use()
        assert not waiting.exists()
