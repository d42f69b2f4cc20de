"""Files of models go into object stores and come from there as they do in directories."""

from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import copy_checkpoint
from mcore_ckpt.core.errors import CheckpointExistsError, CheckpointNotFoundError
from mcore_ckpt.models.conversions import export_checkpoint, import_checkpoint
from tests.models.test_huggingface import model_tensors, write_hf
from tests.support.local_files import contents
from tests.support.model_like import assert_same, read_all
from tests.support.object_server import ObjectDirectory, Proxy

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "safetensors": ("files", {"max_shard_bytes": 10_000}),
    "hf": ("hf", {"max_shard_bytes": 10_000}),
}
# Without which the others are not read, or not all of them.
LAST = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    import_checkpoint(write_hf(place / "hf", model_tensors()), place / "checkpoint", kind="hf", tp=2)
    return place / "checkpoint"


def stored(store: ObjectDirectory, folder: str) -> dict[str, bytes]:
    names = [name for name in store.names() if name.startswith(f"{folder}/")]
    return {name.removeprefix(f"{folder}/"): store.get(name) for name in names}


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_what_is_exported_to_a_store_is_what_is_exported_to_a_directory_and_comes_back(
    to: Any, checkpoint: Path, object_directory: ObjectDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = KINDS[to]
    export_checkpoint(checkpoint, tmp_path / "local", to=to, **options)
    with Proxy(object_directory.server) as proxy, monkeypatch.context() as patched:
        patched.setenv(object_directory.variable, proxy.url)
        export_checkpoint(checkpoint, f"{object_directory.url}/model", to=to, **options)
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
        export_checkpoint(checkpoint, f"{object_directory.url}/model", to=to, **options)


def test_one_file_in_a_store_is_imported_alone(
    checkpoint: Path, object_directory: ObjectDirectory, tmp_path: Path
) -> None:
    export_checkpoint(checkpoint, f"{object_directory.url}/model", to="torch")
    import_checkpoint(f"{object_directory.url}/model/pytorch_model.bin", tmp_path / "back")
    copy_checkpoint(checkpoint, f"{object_directory.url}/whole")
    assert_same(read_all(tmp_path / "back"), read_all(checkpoint))
    with pytest.raises(CheckpointNotFoundError, match="no such file or directory"):
        import_checkpoint(f"{object_directory.url}/model/other.bin", tmp_path / "none")
    with pytest.raises(CheckpointNotFoundError, match="nothing to import"):
        import_checkpoint(f"{object_directory.url}/", tmp_path / "none")
