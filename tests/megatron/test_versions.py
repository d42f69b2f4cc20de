"""Objects that claim to be replicas and are not: named at the save, kept, and given back to their ranks."""

import io
import logging
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

from mcore_ckpt import (
    CorruptCheckpointError,
    LoadOptions,
    SaveError,
    SaveOptions,
    TorchDistLoadStrategy,
    TorchDistSaveStrategy,
    certify,
)
from mcore_ckpt.format.safe_pickle import load_object
from mcore_ckpt.format.zip_records import version_of, with_versions
from mcore_ckpt.megatron.versions import parallel_layout
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.megatron.trap_ranks import installed
from tests.support.gloo_ranks import made, on_ranks, run_megatron_ranks, run_stock_ranks
from tests.support.kept_log import kept_log
from tests.support.stock import LISTS_TENSORS


def state(own: Any, rank: int) -> dict[str, Any]:
    """Random states as Megatron-LM describes them, an object that all ranks have alike, extra state as Transformer
    Engine pickles it, and a tensor.
    """
    return {
        "rng_state": ShardedObject("rng_state", [own], (1, 1), (0, 0), replica_id=rank),
        "alike": ShardedObject("alike", {"groups": ["a", "b"]}, (1,), (0,), replica_id=(0, 0, rank)),
        "extra": ShardedObject("layer._extra_state", f"at {rank:#x}", (1,), (0,), replica_id=(0, 0, rank)),
        "w": ShardedTensor.from_rank_offsets("w", torch.ones(4, 4), replica_id=rank),
        "iteration": 3,
    }


def states_of(rank: int) -> dict[str, Any]:
    """Ranks 1 and 3 have their own, rank 2 has that of rank 0."""
    return {"tracker": torch.arange(4) + (rank if rank % 2 else 0), "python": (3, (rank % 2,))}


def save_and_load(rank: int, path: Path) -> tuple[list[str], list[Any], list[str]]:
    dist_checkpointing = installed()
    with kept_log() as lines:
        for name in ("first", "second"):
            dist_checkpointing.save(state(states_of(rank), rank), made(path / name))
    wrapped = FullyParallelLoadStrategyWrapper(TorchDistLoadStrategy())
    loaded = [
        dist_checkpointing.load(state(None, rank), str(path / name), strategy)["rng_state"]
        for name, strategy in {"first": None, "second": wrapped}.items()
    ]
    assert not certify(state(states_of(rank), rank), path / "first", options=LoadOptions(certify="warn")).differing
    with kept_log() as told:
        wrong = certify(state(states_of(0), rank), path / "first", options=LoadOptions(certify="warn"))
    assert wrong.differing == 4, told  # of two ranks, two values
    return lines, loaded, [layout_with(order) for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")]


def layout_with(order: str) -> str:
    """Of groups of the same sizes, whose ranks are others."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2, order=order)
    layout = parallel_layout()
    parallel_state.destroy_model_parallel()
    return layout


@on_ranks(4)
def test_a_save_of_other_objects_is_refused_on_all_ranks_if_they_are_to_raise(rank: int, tmp_path: Path) -> None:
    """Then all have the same object."""
    path = tmp_path / "run"
    strategy = TorchDistSaveStrategy(options=SaveOptions(compare_replicas="raise"))
    made(path)
    said = r'rng_state/shard_0.0_1.1 on ranks 1, 3\. With compare_replicas="warn" it is kept'
    with pytest.raises(SaveError, match=said):
        installed().save(state(states_of(rank), rank), str(path), strategy)
    torch.distributed.barrier()
    assert not list(path.glob("*.distcp")) + list(path.glob(".metadata"))
    torch.distributed.barrier()
    no_zip = mock.patch("mcore_ckpt.save.replicas.with_versions", side_effect=ValueError("no zip"))
    with no_zip, pytest.raises(SaveError, match="no zip"):  # on the rank that has the main one: all are told
        installed().save(state(states_of(rank), rank), str(path))
    torch.distributed.barrier()
    installed().save(state(states_of(0), rank), str(path), strategy)
    assert verify_checkpoint(path).whole


@on_ranks(1)
def test_a_replica_of_the_rank_that_saves_the_main_one_is_compared(rank: int, tmp_path: Path) -> None:
    held = state(3, 0) | {"again": state(4, 1)["rng_state"]}
    strategy = TorchDistSaveStrategy(options=SaveOptions(compare_replicas="raise"))
    path = str(tmp_path)
    with pytest.raises(SaveError, match=r"rng_state/shard_0.0_1.1 on ranks 0\."):
        installed().save(held, path, strategy)
    with kept_log() as lines:
        installed().save(held, path)
    (line,) = lines
    assert "rng_state/shard_0.0_1.1 on ranks 0. " in line
    assert installed().load(state(None, 0), path)["rng_state"] == [3]


def load_alone(rank: int, path: Path) -> tuple[Any, list[str]]:
    loaded = installed().load(state(None, 0), str(path))
    with kept_log(logging.INFO) as lines:
        certify(state(loaded["rng_state"][0], 0), path)
    return loaded["rng_state"], lines


def load_by_stock(rank: int, path: Path) -> Any:
    strict = "raise_all" if LISTS_TENSORS else "assume_ok_unexpected"
    return dist_checkpointing.load(state(None, rank), str(path), strict=strict)["rng_state"]


def is_same(found: Any, rank: int) -> bool:
    expected = states_of(rank)
    (one,) = found
    return bool(one["tracker"].equal(expected["tracker"]) and one["python"] == expected["python"])


@pytest.mark.field("NVIDIA/Megatron-LM#6858", "absent", silent=True)
def test_each_rank_gets_its_own_object_back(tmp_path: Path) -> None:
    told = run_megatron_ranks(save_and_load, 4, tmp_path)
    assert all(is_same(one, rank) for rank, (_, loaded, _) in enumerate(told) for one in loaded)
    ((first, second),) = {tuple(layouts) for _, _, layouts in told}
    assert first != second
    lines, *others = [lines for lines, _, _ in told]
    named = "1 object, of which ranks hold others than the one that is saved though they claim to hold a replica: "
    assert len(lines) == 2
    assert all(f"{named}rng_state/shard_0.0_1.1 on ranks 1, 3. What other ranks hold is kept" in line for line in lines)
    assert not any(others)
    assert verify_checkpoint(tmp_path / "first").whole
    # Under another layout, and by stock with every key checked, all ranks get the one that was saved.
    ((loaded, said),) = run_megatron_ranks(load_alone, 1, tmp_path / "first")
    assert is_same(loaded, 0)
    assert "1 object (in a version of this rank: these are of another layout)" in said[-1]
    assert all(is_same(loaded, 0) for loaded in run_stock_ranks(load_by_stock, 4, tmp_path / "first"))


def record(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save([value], stream)
    return stream.getvalue()


def test_versions_that_cannot_be_are_refused() -> None:
    main = record("mcore_ckpt/ranks.json, archive/mcore_ckpt/ranks.json")
    assert version_of(main, "world 2", 1) is main
    kept = with_versions(main, "world 2", {1: 0}, [record("own")])
    assert torch.load(io.BytesIO(kept)) == torch.load(io.BytesIO(main))
    assert torch.load(io.BytesIO(version_of(kept, "world 2", 1))) == ["own"]
    assert version_of(kept, "world 2", 0) == version_of(kept, "world 4", 1) == kept
    for text in (
        "[" * 100_000,
        "[]",
        "{}",
        '{"layout": "world 2", "ranks": {"1": 7}}',
        '{"layout": "world 2", "ranks": [[]]}',
        "{",
    ):
        stream = io.BytesIO(main)
        with zipfile.ZipFile(stream, "a") as archive:
            archive.writestr("archive/mcore_ckpt/ranks.json", text)
        with pytest.raises(CorruptCheckpointError):
            version_of(stream.getvalue(), "world 2", 1)


def test_a_record_that_torch_wrote_without_checksums_is_read_with_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)  # before what a zip archive can say
    content = io.BytesIO()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": 1}, content)
    finally:
        torch.serialization.set_crc32_options(True)
    both = with_versions(content.getvalue(), "tp 1", {1: 0}, [content.getvalue()])
    assert load_object(both, (), where="record") == {"a": 1}
