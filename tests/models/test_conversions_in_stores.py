"""Conversions whose source or target is in an object store: complete or not there, and nothing left over."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt import copy_checkpoint, merge_checkpoints, verify_checkpoint
from mcore_ckpt.core.errors import CheckpointExistsError, CheckpointNotFoundError, OptionError, SaveError
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.directory.commit import Commit
from mcore_ckpt.models.conversions import export_checkpoint, import_checkpoint
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from mcore_ckpt.reshard.target_directory import remove_begun
from mcore_ckpt.tools.runs import Places
from mcore_ckpt.tools.verify import repair_checkpoint
from tests.models import test_huggingface as hugging_face
from tests.support.local_files import contents
from tests.support.meanwhile import interrupted_at
from tests.support.model_like import assert_same, model_tensors, read_all, reshard_killed, write_model
from tests.support.object_server import Fault, ObjectDirectory, Proxy, Request
from tests.support.processes import until


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source") / "iter_0000007"
    write_model(directory, tp=2)
    (directory / "modelopt").mkdir()
    (directory / "modelopt" / "state.bin").write_bytes(bytes(100))
    (directory.parent / "latest_checkpointed_iteration.txt").write_text("7")
    return directory


def fetched(url: str, directory: Path) -> dict[str, torch.Tensor]:
    copy_checkpoint(url, directory)
    return read_all(directory)


def left(store: ObjectDirectory, name: str) -> list[str]:
    return [each.partition("/")[2] for each in store.names() if each.startswith(f"{name}/")]


def test_a_checkpoint_in_a_store_is_resharded_into_a_store(
    source: Path, object_directory: ObjectDirectory, tmp_path: Path
) -> None:
    given, taken = f"{object_directory.url}/given/iter_0000007", f"{object_directory.url}/taken/iter_0000007"
    copy_checkpoint(source, given)
    object_directory.put("given/iter_0000007/modelopt/state.bin", bytes(100))
    object_directory.put("given/latest_checkpointed_iteration.txt", b"7")
    report = reshard_checkpoint(given, taken, tp=4, pp=1)
    assert (report.target, report.verified, report.resumed) == (taken, True, False)
    assert verify_checkpoint(taken).whole
    assert_same(fetched(taken, tmp_path / "fetched"), model_tensors())
    reshard_checkpoint(source, tmp_path / "local", tp=4, pp=1)
    names = [path.relative_to(tmp_path / "local") for path in (tmp_path / "local").rglob("*") if path.is_file()]
    assert left(object_directory, "taken") == sorted(
        ["latest_checkpointed_iteration.txt", *(f"iter_0000007/{name}" for name in names)]
    )
    with pytest.raises(CheckpointExistsError):
        reshard_checkpoint(source, taken, tp=1, pp=1)
    with pytest.raises(OptionError, match="lies inside the source"):
        reshard_checkpoint(given, f"{given}/inside", tp=1, pp=1)


def test_an_average_of_checkpoints_in_a_store(source: Path, object_directory: ObjectDirectory, tmp_path: Path) -> None:
    given, taken = f"{object_directory.url}/given", f"{object_directory.url}/taken"
    copy_checkpoint(source, given)
    assert merge_checkpoints([given, source], taken, weights=(1, 3)).verified
    assert_same(fetched(taken, tmp_path / "fetched"), model_tensors(optimizer=False))
    with pytest.raises(OptionError, match="lies inside the source"):
        merge_checkpoints([given, source], f"{given}/inside")


def test_what_cannot_be_written_leaves_nothing(source: Path, proxied: Proxy, object_directory: ObjectDirectory) -> None:
    def rule(request: Request) -> Fault | None:
        return Fault("status", status=403) if request.makes and "__1_" in request.key else None

    proxied.rule = rule
    with pytest.raises(SaveError, match="403"):
        reshard_checkpoint(source, object_directory.url, tp=2, pp=1)
    assert object_directory.names() == []
    proxied.rule = lambda _: None
    reshard_checkpoint(source, object_directory.url, tp=2, pp=1)
    assert verify_checkpoint(object_directory.url).whole


def test_what_a_target_names_that_may_still_appear_stays(
    source: Path, proxied: Proxy, object_directory: ObjectDirectory, store_deadline: Callable[..., None]
) -> None:
    store_deadline(4.0)
    goes_on, arrived = threading.Event(), threading.Event()

    def rule(request: Request) -> Fault | None:
        if not (request.makes and request.key.endswith("/.metadata")):
            return None
        goes_on.wait(60.0)
        arrived.set()
        return None

    proxied.rule = rule
    with pytest.raises(SaveError, match="may still come into force"):
        reshard_checkpoint(source, object_directory.url, tp=2, pp=1)
    goes_on.set()
    assert arrived.wait(60.0)
    until(lambda: ".metadata" in object_directory.names())
    proxied.rule = lambda _: None
    assert verify_checkpoint(object_directory.url).whole


@pytest.mark.crash
def test_what_a_killed_run_has_left_is_removed_by_the_next(source: Path, object_directory: ObjectDirectory) -> None:
    reshard_killed(source, object_directory.url)
    names = object_directory.names()
    assert "modelopt/state.bin" in names
    assert ".metadata" not in names
    report = reshard_checkpoint(source, object_directory.url, tp=1, pp=1)
    assert verify_checkpoint(object_directory.url).whole
    assert {name for name in object_directory.names() if name.startswith("__")} == set(report.files)
    assert not [name for name in object_directory.names() if "incomplete" in name]


def test_a_target_without_its_tracker_file_gets_it(source: Path, object_directory: ObjectDirectory) -> None:
    with interrupted_at(Places, "finish"):
        reshard_checkpoint(source, f"{object_directory.url}/iter_0000007", tp=1, pp=1)
    with pytest.raises(CheckpointExistsError):  # other work
        reshard_checkpoint(source, f"{object_directory.url}/iter_0000007", tp=2, pp=1)
    assert reshard_checkpoint(source, f"{object_directory.url}/iter_0000007", tp=1, pp=1).resumed
    assert "latest_checkpointed_iteration.txt" in object_directory.names()
    assert not [name for name in object_directory.names() if "incomplete" in name]


def test_an_export_that_lacked_the_end_of_its_note_alone_stays(source: Path, object_directory: ObjectDirectory) -> None:
    with interrupted_at(Commit, "give_up"):
        export_checkpoint(source, object_directory.url)
    for again in (partial(export_checkpoint, to="torch"), partial(export_checkpoint, only="*norm*")):
        before = [name for name in object_directory.names() if "incomplete" not in name]
        with pytest.raises(CheckpointExistsError):
            again(source, object_directory.url)
        assert object_directory.names() == before
    assert "model.safetensors.index.json" in before


@pytest.mark.crash
def test_what_was_begun_of_a_checkpoint_that_is_gone_is_removed_and_nothing_else(
    source: Path, object_directory: ObjectDirectory
) -> None:
    target = checkpoint_path(object_directory.url)
    assert not remove_begun(target, source)  # nothing was begun
    reshard_killed(source, object_directory.url)
    names = object_directory.names()
    assert not remove_begun(target, source.parent / "another")
    assert object_directory.names() == names
    assert remove_begun(target, source)
    assert not object_directory.names()


def test_files_of_others_are_neither_replaced_nor_removed(source: Path, object_directory: ObjectDirectory) -> None:
    object_directory.put("folder/file", b"hours of work")
    for restart in (False, True):
        with pytest.raises(CheckpointExistsError):
            reshard_checkpoint(source, object_directory.url, tp=2, pp=1, restart=restart)
    assert object_directory.names() == ["folder/file"]


def test_a_damaged_checkpoint_in_a_store_is_repaired(
    source: Path, object_directory: ObjectDirectory, tmp_path: Path
) -> None:
    reshard_checkpoint(source, tmp_path / "local", tp=2, pp=1)
    copy_checkpoint(tmp_path / "local", f"{object_directory.url}/copy")
    names = sorted(path.name for path in (tmp_path / "local").glob("*.distcp"))
    content = bytearray(object_directory.get(f"copy/{names[0]}"))
    content[len(content) // 2] ^= 0x40
    object_directory.put(f"copy/{names[0]}", bytes(content))
    object_directory.delete(f"copy/{names[1]}")
    report = verify_checkpoint(f"{object_directory.url}/copy")
    assert not report.whole
    assert repair_checkpoint(report, tmp_path / "local").whole
    for name in names:
        assert object_directory.get(f"copy/{name}") == (tmp_path / "local" / name).read_bytes()


# --- files of models, which are the same as in directories

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "safetensors": ("files", {"max_shard_bytes": 10_000}),
    "hf": ("hf", {"max_shard_bytes": 10_000}),
}
# Without which the others are not read, or not all of them.
LAST = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    import_checkpoint(
        hugging_face.write_hf(place / "hf", hugging_face.model_tensors()), place / "checkpoint", kind="hf", tp=2
    )
    return place / "checkpoint"


def stored(store: ObjectDirectory, folder: str) -> dict[str, bytes]:
    names = [name for name in store.names() if name.startswith(f"{folder}/")]
    return {name.removeprefix(f"{folder}/"): store.get(name) for name in names}


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_what_is_exported_to_a_store_is_what_is_exported_to_a_directory_and_comes_back(
    to: Any, model: Path, object_directory: ObjectDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = KINDS[to]
    export_checkpoint(model, tmp_path / "local", to=to, **options)
    with Proxy(object_directory.server) as proxy, monkeypatch.context() as patched:
        patched.setenv(object_directory.variable, proxy.url)
        export_checkpoint(model, f"{object_directory.url}/model", to=to, **options)
        made = [request.key.rpartition("/")[2] for request in proxy.requests if request.makes]
    assert stored(object_directory, "model") == contents(tmp_path / "local")
    assert len(contents(tmp_path / "local")) > 1
    files = [name for name in made if "incomplete" not in name]
    assert files[-1] == LAST
    assert to != "hf" or files[-2] == "config.json"
    import_checkpoint(f"{object_directory.url}/model", tmp_path / "back", kind=kind)  # type: ignore[arg-type]
    import_checkpoint(tmp_path / "local", tmp_path / "again", kind=kind)  # type: ignore[arg-type]
    assert_same(read_all(tmp_path / "back"), read_all(tmp_path / "again"))
    with pytest.raises(CheckpointExistsError):
        export_checkpoint(model, f"{object_directory.url}/model", to=to, **options)


def test_one_file_in_a_store_is_imported_alone(model: Path, object_directory: ObjectDirectory, tmp_path: Path) -> None:
    export_checkpoint(model, f"{object_directory.url}/model", to="torch")
    import_checkpoint(f"{object_directory.url}/model/pytorch_model.bin", tmp_path / "back")
    copy_checkpoint(model, f"{object_directory.url}/whole")
    assert_same(read_all(tmp_path / "back"), read_all(model))
    with pytest.raises(CheckpointNotFoundError, match="no such file or directory"):
        import_checkpoint(f"{object_directory.url}/model/other.bin", tmp_path / "none")
    with pytest.raises(CheckpointNotFoundError, match="nothing to import"):
        import_checkpoint(f"{object_directory.url}/", tmp_path / "none")
