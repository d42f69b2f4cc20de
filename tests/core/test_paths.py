"""A local path is a local path; a URL is one of a store that is known, or refused alike at every entrance."""

import importlib.util
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mcore_ckpt
from mcore_ckpt import OptionError, SaveOptions
from mcore_ckpt.core.options import checkpoint_path, is_supported, local_path
from mcore_ckpt.storage.resolve import storage_at
from tests.support.command import refusal_of

pytestmark = pytest.mark.quick

STORES = ["s3://bucket/run/iter_0000001", "msc://profile/run", "gs://b/x", "az://c/x"]
UNKNOWN = "abfss://c@a.dfs.core.windows.net/x"


@pytest.mark.parametrize("path", [*STORES, UNKNOWN])
def test_a_store_is_told_by_its_scheme(path: str) -> None:
    for form in (path, Path(path)):
        assert is_supported(form) == (path in STORES)
        with pytest.raises(OptionError, match=r"in an object store|names an object store .* does not know"):
            local_path(form)


@pytest.mark.parametrize("url", STORES)
def test_a_directory_in_a_store_is_joined_and_shown_as_a_url(url: str) -> None:
    for form in (url, Path(url), checkpoint_path(url)):
        path = checkpoint_path(form)
        assert str(path) == os.fspath(path) == str(path.absolute()) == url
        assert str(path / "a" / "b") == f"{url}/a/b"
        assert str((path / "iter_0000002").parent) == url
        assert (path / ".metadata").name == ".metadata"
        assert pickle.loads(pickle.dumps(path)) == path


@pytest.mark.parametrize("url", ["s3://", "s3:/", "s3:", "S3://", "gs://", "az://", "msc://", "s3:///run", "s3:////"])
def test_a_url_without_a_bucket_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    forms = [url] if url == "s3:///run" else [url, Path(url)]  # (a `Path` keeps one slash of three)
    for form in forms:
        assert not is_supported(form)
        for use in (checkpoint_path, storage_at, lambda path: SaveOptions(drain_to=str(path))):
            with pytest.raises(OptionError, match=r"names no (bucket|profile): expected (s3|gs|az|msc)://"):
                use(form)
    (tmp_path / "s3:").mkdir()  # a directory that is there, and is meant
    assert checkpoint_path("s3:") == Path("s3:")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        *((f"{scheme}://KEYID:SEC/RET@bucket/run", "is not shown here") for scheme in ("s3", "gs", "msc", "https")),
        ("s3:/SECRET@bucket/run", "is not shown here"),
        ("s3://bucket/run/../run/iter_0000001", r"has `\.\.` in it, which stores do not resolve"),
    ],
)
def test_a_url_with_credentials_or_dots_is_refused_at_once(url: str, said: str) -> None:
    for use in (checkpoint_path, storage_at, lambda path: SaveOptions(drain_to=path)):
        with pytest.raises(OptionError, match=said) as raised:
            use(url)
        assert not re.search("KEYID|SEC|RET", str(raised.value))
    assert str(checkpoint_path("s3://bucket/run/./a:b@c")) == "s3://bucket/run/a:b@c"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A checkpoint in the working directory, next to which nothing comes to lie."""
    import torch
    from torch.distributed import checkpoint as dcp

    monkeypatch.chdir(tmp_path)
    dcp.save({"key": torch.ones(3)}, storage_writer=mcore_ckpt.FileSystemWriterAsync("here"), no_dist=True)
    there = sorted(str(path) for path in tmp_path.rglob("*"))
    yield
    assert sorted(str(path) for path in tmp_path.rglob("*")) == there


@pytest.mark.parametrize(
    "command",
    [
        *("inspect TARGET", "verify TARGET", "repair here --from TARGET", "cat TARGET key", "list TARGET"),
        *("reshard TARGET there --tp 1 --pp 1", "reshard here TARGET --tp 1 --pp 1", "prune TARGET --keep-last 1"),
        *("diff TARGET here", "diff here TARGET", "export TARGET there", "export here TARGET", "import TARGET there"),
        "import here TARGET",
    ],
)
def test_every_command_refuses_what_names_no_place(command: str, here: None) -> None:
    control = ("s3://bucket/a\nb", "control character")
    for target, said in ((UNKNOWN, "object store"), ("s3://", "names no"), ("a\0b", "NUL"), control):
        assert said in refusal_of(*[target if word == "TARGET" else word for word in command.split()])


@pytest.mark.parametrize("target", ["s3://", "s3://bucket/file", "a\0b", "a\ud800"])
@pytest.mark.parametrize("command", ["inspect here --html TARGET", "reshard here there --tp 1 --pp 1 --rules TARGET"])
def test_a_file_is_named_by_a_path(command: str, target: str, here: None) -> None:
    assert re.search(
        "a path in a file system is needed|NUL",
        refusal_of(*[target if word == "TARGET" else word for word in command.split()]),
    )


@pytest.mark.parametrize("path", ["run", "/scratch/run", "./a:b/c", "C:/x", "iter:1/x", "iter:", "a//b", "~/x://y"])
def test_all_else_is_local_as_it_was_given(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "iter:").mkdir()  # a directory that is there, and is meant
    for form in (path, Path(path)):
        assert local_path(form) == Path(path)


@pytest.mark.parametrize("form", [str, Path])
def test_every_entrance_refuses_an_unknown_store_and_writes_nothing(
    form: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uses: list[Callable[[Any], object]] = [mcore_ckpt.FileSystemWriterAsync, mcore_ckpt.FileSystemReader]
    uses += [mcore_ckpt.open_checkpoint, lambda path: mcore_ckpt.load_sharded_optimizer_state({}, path)]
    if importlib.util.find_spec("megatron"):
        save, load = mcore_ckpt.TorchDistSaveStrategy(), mcore_ckpt.TorchDistLoadStrategy()
        uses += [lambda path: save.save({}, path), lambda path: load.load({}, path), load.load_sharded_metadata]
        uses += [lambda path: load.remove_sharded_tensors(path, "w")]
    for use in uses:
        with pytest.raises(OptionError, match="object store"):
            use(form(UNKNOWN))
    assert os.listdir(tmp_path) == []
