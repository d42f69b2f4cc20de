"""The storage writer under plain torch.distributed.checkpoint: a drop-in that replaces safely and checks results."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from mcore_ckpt import (
    CheckpointExistsError,
    FileSystemReader,
    FileSystemWriterAsync,
    MCoreSavePlanner,
    OptionError,
    SaveError,
)
from mcore_ckpt.commands.cli import main
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.support.gloo_ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated")


def a_state(step: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    base = torch.randn(64, 48, generator=generator)
    return {
        "model": {
            "weight": base,
            "slice": base[:, 3:7],
            "transposed": base.t(),
            "half": torch.randn(700, 400, generator=generator).to(torch.bfloat16),
            "scalar": torch.tensor(1.5 + step),
            "empty": torch.empty(0, 5),
            "flags": torch.tensor([True, False, True]),
            "conj": torch.randn(9, dtype=torch.complex64, generator=generator).conj(),
        },
        "step": step,
        "notes": {"names": ["a", "b"], "limit": None},
    }


def blank(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=state.dtype)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [] if isinstance(state, list) else 0


def assert_same(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert a.resolve_conj().contiguous().view(-1).view(torch.uint8).tolist() == (
            b.resolve_conj().contiguous().view(-1).view(torch.uint8).tolist()
        )
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    else:
        assert a == b


@pytest.mark.parametrize(
    ("keywords", "planner"),
    [({}, None), ({"single_file_per_rank": False}, MCoreSavePlanner)],
)
def test_what_it_writes_stock_dcp_reads(tmp_path: Path, keywords: dict[str, Any], planner: Any) -> None:
    state = a_state()
    dcp.save(state, storage_writer=FileSystemWriterAsync(tmp_path, **keywords), planner=planner and planner())
    loaded = blank(state)
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert_same(state, loaded)


def test_it_refuses_to_replace_when_told_so(tmp_path: Path) -> None:
    dcp.save(a_state(1), storage_writer=FileSystemWriterAsync(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(a_state(2), storage_writer=FileSystemWriterAsync(tmp_path, overwrite=False))
    [(error, _)] = caught.value.failures.values()  # DCP wraps what a step raised
    assert isinstance(error, CheckpointExistsError)
    assert isinstance(error, RuntimeError), "what DCP's own writer raises"
    assert "Checkpoint already exists" in str(caught.value), "the words of DCP's own writer"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_dcp_wraps_is_caught_as_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "usage.md").read_text()
    block = page.split("## Errors")[1].split("```python\n")[1].split("```")[0]
    dcp.save(a_state(), checkpoint_id=tmp_path)
    for path, says in ((tmp_path, "CorruptCheckpointError"), (tmp_path / "gone", "gone: no such directory")):
        for file in tmp_path.glob("*.distcp"):
            os.truncate(file, 100)
        names = {"dcp": dcp, "FileSystemReader": FileSystemReader, "path": path, "state_dict": blank(a_state())}
        exec(block, names)
        said = capsys.readouterr().out
        assert said.startswith("rank 0: ")
        assert says in said


def prepared(path: Path, state: dict[str, Any], **keywords: Any) -> tuple[FileSystemWriterAsync, Metadata]:
    """A writer that has gone through planning as DCP does it, and the metadata."""
    writer = FileSystemWriterAsync(path, **keywords)
    planner = MCoreSavePlanner()
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    [plan] = writer.prepare_global_plan(plans)
    writer.prepare_write_data(planner.finish_plan(plan), planner)
    return writer, metadata


def test_nothing_is_published_when_results_are_not_the_plan(tmp_path: Path) -> None:
    writer, metadata = prepared(tmp_path, a_state())
    save, _, arguments = writer.get_save_function_and_args()
    assert save is not None
    save(*arguments)
    results = writer.retrieve_write_results()
    assert isinstance(results, list)
    with pytest.raises(SaveError, match="not published"):
        writer.finish(metadata, [results[:-1]])
    assert {path.suffix for path in tmp_path.iterdir()} == {".distcp"}, "the directory is free"


def test_threads_that_share_a_writer_have_each_a_save_of_their_own(tmp_path: Path) -> None:
    writer, metadata = prepared(tmp_path / "1", a_state(1))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(writer.reset, tmp_path / "2").result()  # as a save by DCP begins
        save, _, arguments = writer.get_save_function_and_args()
        assert save is not None
        save(*arguments)
        writer.finish(metadata, [writer.retrieve_write_results()])
        with mock.patch.object(writer, "reset"):
            pool.submit(dcp.save, a_state(2), storage_writer=writer, no_dist=True).result()
    for number in (1, 2):
        loaded = blank(a_state(number))
        dcp.load(loaded, checkpoint_id=tmp_path / f"{number}", no_dist=True)
        assert_same(a_state(number), loaded)


def test_the_separation_hint_prefixes_file_names(tmp_path: Path) -> None:
    state = {"model.a": torch.ones(3), "ema.b": torch.ones(4), "ema.c": torch.ones(5)}
    writer = FileSystemWriterAsync(tmp_path, separation_hint="ema", thread_count=2)
    dcp.save(state, storage_writer=writer)
    files = {
        index.fqn: info.relative_path for index, info in FileSystemReader(tmp_path).read_metadata().storage_data.items()
    }
    assert files["ema.b"].startswith("ema__0_")
    assert files["ema.c"].startswith("ema__0_")
    assert files["model.a"].startswith("__0_")


# DCP has stream transforms since torch 2.7.
extensions = pytest.importorskip("torch.distributed.checkpoint._extension")


@on_ranks(2, preload=(), deadline_s=100)
def test_plans_that_a_planner_has_cached_are_written_under_the_names_of_the_save(rank: int, tmp_path: Path) -> None:
    for step, name in enumerate(["one", "one", "two", "one"]):
        path = tmp_path / name
        state = {"w": torch.full((100,), float(step)), "n": step, "more": torch.ones(7 if step < 3 else 9)}
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(state, storage_writer=FileSystemWriterAsync(path), planner=planner)
        loaded = blank(state)
        dcp.load(loaded, storage_reader=FileSystemReader(path))
        assert_same(state, loaded)
        assert verify_checkpoint(path).whole
        torch.distributed.barrier()


def test_a_relative_path_does_not_follow_a_change_of_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is the one that was meant when the writer was made, whatever is current when it publishes."""
    (tmp_path / "there" / "checkpoint").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    writer = FileSystemWriterAsync("checkpoint")
    monkeypatch.chdir(tmp_path / "there")
    dcp.save(a_state(), storage_writer=writer)
    loaded = blank(a_state())
    dcp.load(loaded, checkpoint_id=tmp_path / "checkpoint")
    assert_same(a_state(), loaded)
    assert not list((tmp_path / "there" / "checkpoint").iterdir())


@pytest.mark.parametrize(("key", "folder"), [("w", b"r\xff"), ("w\udcff", b"r\xff")])
def test_keys_and_paths_that_are_no_utf8_go_through_saves_loads_and_commands(
    key: str, folder: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), folder)))
    source, made = str(run / "iter_0000001"), str(run / "resharded" / "iter_0000001")
    for _ in range(2):
        dcp.save({key: torch.ones(4, 4)}, storage_writer=FileSystemWriterAsync(source))
    assert main(["reshard", source, made, "--tp", "1", "--pp", "1"]) == 0
    for path in (source, made):
        loaded = {key: torch.zeros(4, 4)}
        dcp.load(loaded, storage_reader=FileSystemReader(path))
        assert torch.equal(loaded[key], torch.ones(4, 4))
        assert main(["verify", "--state", path]) == 0
    assert main(["list", str(run)]) == 0
    assert main(["diff", source, made]) == 0
    capsys.readouterr()
    exported = main(["export", source, str(run / "exported")])
    if key == "w":
        assert exported == 0
    else:
        assert exported == 2
        assert "w\\ud" in (said := capsys.readouterr().err)
        assert "safetensors cannot store" in said


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="stream transforms"):
        FileSystemWriterAsync(tmp_path, _extensions=[object()])
    with pytest.raises(OptionError, match="stream transforms"):
        FileSystemReader(tmp_path, _extension_registry=extensions.ExtensionRegistry())
    with pytest.raises(OptionError, match="TORCH_SAVE"):
        FileSystemWriterAsync(tmp_path, serialization_format=dcp.filesystem.SerializationFormat.SAFETENSORS)
    for hint in ("sub/", "../x", "a:b", "a\n"):
        with pytest.raises(OptionError, match="separation_hint"):
            FileSystemWriterAsync(tmp_path, separation_hint=hint)
