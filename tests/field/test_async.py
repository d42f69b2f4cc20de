"""Reports of asynchronous saves: what they write, and what becomes of them when they fail. One rank."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import async_utils
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync as StockWriter
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed._state_dict_utils import _offload_state_dict_to_cpu
from torch.distributed.checkpoint import CheckpointException

import mcore_ckpt
from mcore_ckpt import AsyncCallsQueue, FileSystemWriterAsync, SaveOptions, TorchDistSaveStrategy, WriterDiedError
from mcore_ckpt.commands.cli import main
from mcore_ckpt.save.writer_process import shared_writer
from tests.support.gloo_ranks import MEGATRON, STOCK, StandingRanks, made, standing_ranks
from tests.support.kept_log import kept_log
from tests.support.processes import children, is_running, until
from tests.support.shared_groups import fork_results_queue
from tests.support.stock import IS_NEW, stock_saves_async


def state(fill: float) -> dict[str, Any]:
    return {key: ShardedTensor.from_rank_offsets(key, torch.full((64, 8), fill)) for key in "ab"}


def stored(path: Path) -> set[float]:
    """The values of all elements, as DCP reads them."""
    wanted = {key: torch.zeros(64, 8) for key in "ab"}
    dcp.load(wanted, checkpoint_id=path, no_dist=True)
    return {value for one in wanted.values() for value in one.unique().tolist()}


@pytest.fixture(scope="module")
def stock() -> Iterator[StandingRanks]:
    with standing_ranks(1, preload=STOCK) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def ours() -> Iterator[StandingRanks]:
    with standing_ranks(1, preload=MEGATRON) as ranks:
        yield ranks


def call(ranks: StandingRanks, function: Callable[..., Any], *args: Any) -> Any:
    (value,) = ranks.values(function, *args, within_s=60)
    return value


# --- what is written --------------------------------------------------------------------------------------------------


def stock_request(path: Path, weights: dict[str, Any]) -> Any:
    fork_results_queue()
    return TorchDistSaveShardedStrategy("torch_dist", 1).async_save(weights, Path(made(path)))


def written_later(rank: int, path: Path) -> set[float]:
    """A persistent worker gets the tensors of the host as they are, and training goes on before it writes."""
    weights = state(1)
    request = stock_request(path, weights)
    rank_, _, *others = request.async_fn_args
    staged = request.preload_fn()
    for one in weights.values():
        one.data.fill_(7)
    request.async_fn(rank_, staged, *others)
    for finalize in request.finalize_fns:
        finalize()
    return stored(path)


def written_by_us(rank: int, path: Path) -> set[float]:
    weights, queue = state(1), AsyncCallsQueue()
    queue.schedule_async_request(TorchDistSaveStrategy().async_save(weights, Path(made(path))))
    for one in weights.values():
        one.data.fill_(7)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return stored(path)


@stock_saves_async
@pytest.mark.field("NVIDIA/Megatron-LM#1713", "absent", silent=True)
def test_an_async_save_holds_what_training_did_later(stock: Any, ours: Any, tmp_path: Path) -> None:
    assert call(stock, written_later, tmp_path / "stock") == {7}
    assert call(ours, written_by_us, tmp_path / "ours") == {1}


def written_from_a_cache(rank: int, run: Path) -> list[set[float]]:
    """A worker keeps the tensors of the first save, and the model has moved to other memory before the second."""
    kept: list[Any] = []
    stage = StockWriter.preload_tensors

    def stage_once(buckets: Any, non_blocking: bool = True) -> Any:
        staged = stage(buckets, False)
        kept[:] = kept or [tensors for _, _, (_, tensors) in staged]
        return [(*names, (objects, old)) for (*names, (objects, _)), old in zip(staged, kept, strict=True)]

    with mock.patch.object(StockWriter, "preload_tensors", staticmethod(stage_once)):
        for step in (1, 2):
            stock_request(run / f"iter_{step:07d}", state(step)).execute_sync()
    return [stored(run / f"iter_{step:07d}") for step in (1, 2)]


def written_each_time(rank: int, run: Path) -> list[set[float]]:
    strategy, queue = TorchDistSaveStrategy(), AsyncCallsQueue()
    for step in (1, 2):
        queue.schedule_async_request(strategy.async_save(state(step), Path(made(run / f"iter_{step:07d}"))))
        queue.maybe_finalize_async_calls(blocking=True)
    assert strategy.validated_cache_reuse  # what is kept from save to save is the plan
    queue.close()
    return [stored(run / f"iter_{step:07d}") for step in (1, 2)]


@stock_saves_async
@pytest.mark.field("NVIDIA-NeMo/RL#3312", "absent", silent=True)
def test_each_async_save_writes_the_first_ones_weights(
    stock: Any, ours: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(stock, written_from_a_cache, tmp_path / "stock") == [{1}, {1}]
    assert call(ours, written_each_time, tmp_path / "ours") == [{1}, {2}]
    said = {
        run: (main(["diff", *(str(tmp_path / run / f"iter_{step:07d}") for step in (1, 2))]), capsys.readouterr().out)
        for run in ("stock", "ours")
    }
    assert said["stock"][0] == 0
    assert "identical: " in said["stock"][1]
    assert said["ours"][0] == 1


class AsItWas(dcp.FileSystemWriter):
    """Copies tensors of devices alone, as torch 2.5 did, and is late."""

    def stage(self, state_dict: Any) -> Any:
        return _offload_state_dict_to_cpu(state_dict)

    def write_data(self, *args: Any) -> Any:
        assert GOES_ON.wait(60)
        return super().write_data(*args)


class Late(FileSystemWriterAsync):
    def write_data(self, *args: Any) -> Any:
        assert GOES_ON.wait(60)
        return super().write_data(*args)


GOES_ON = threading.Event()


def saved_by_dcp(rank: int, path: Path, writer: Callable[[Path], Any]) -> set[float]:
    weights = {key: torch.full((64, 8), 1.0) for key in "ab"}
    GOES_ON.clear()
    future = dcp.async_save(weights, storage_writer=writer(path))
    for one in weights.values():
        one.fill_(7)
    GOES_ON.set()
    future.result()
    return stored(path)


@pytest.mark.field("pytorch/pytorch#144657", "absent", silent=True)
def test_an_async_save_of_dcp_holds_what_training_did_later(ours: Any, tmp_path: Path) -> None:
    assert call(ours, saved_by_dcp, tmp_path / "stock", AsItWas) == {7}
    assert call(ours, saved_by_dcp, tmp_path / "ours", Late) == {1}


# --- what fails -------------------------------------------------------------------------------------------------------


def fails_by_stock(rank: int, path: Path) -> str:
    queue, request = async_utils.AsyncCallsQueue(), stock_request(path, state(1))
    path.rename(path.with_name("gone"))  # the directory of the files
    queue.schedule_async_request(request)
    with pytest.raises(CheckpointException) as caught:  # and the trainer ends
        queue.maybe_finalize_async_calls(blocking=True)
    return str(caught.value)


def fails_by_us(rank: int, run: Path) -> tuple[list[str], list[str]]:
    options = SaveOptions(on_failure="warn")
    strategy, queue, tracker = TorchDistSaveStrategy(options=options), AsyncCallsQueue(options=options), list[str]()
    with kept_log() as lines:
        for name in ("first", "second"):
            request = strategy.async_save(state(1), Path(made(run / name)))
            request.add_finalize_fn(partial(tracker.append, name))
            pid = shared_writer().pid
            if name == "first":
                os.kill(pid or 0, signal.SIGKILL)
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    assert not (run / "first" / ".metadata").exists()
    assert stored(run / "second") == {1}
    return lines, tracker


@stock_saves_async
@pytest.mark.field("NVIDIA/Megatron-LM#1435", "absent")
def test_a_failed_async_save_ends_the_job(stock: Any, ours: Any, tmp_path: Path) -> None:
    assert "Worker failure" in call(stock, fails_by_stock, tmp_path / "stock")
    lines, tracker = call(ours, fails_by_us, tmp_path / "ours")
    assert "first" in lines[0]
    assert tracker == ["second"]


def dies_in_stock(rank: int, path: Path) -> bool:
    """Whether the job waits on for a writer that is dead."""
    began = path.with_name("began")

    def die(*_: Any, **__: Any) -> None:
        began.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(StockWriter, "write_preloaded_data", die):
        queue = async_utils.AsyncCallsQueue()
        queue.schedule_async_request(stock_request(path, state(1)))
        process = queue.async_calls[0].async_caller.process
        until(lambda: began.exists() and not any(map(is_running, children(process.pid))))
        waits = queue.maybe_finalize_async_calls() == [] and is_running(process.pid)
    for child in children(process.pid):
        os.kill(child, signal.SIGKILL)
    process.kill()
    return waits


def dies_here(rank: int, path: Path) -> str:
    strategy, queue = TorchDistSaveStrategy(), AsyncCallsQueue()
    strategy.warm_up(state(1))
    pid = shared_writer().pid or 0
    os.kill(pid, signal.SIGSTOP)  # so that it dies in mid-save
    queue.schedule_async_request(strategy.async_save(state(1), Path(made(path))))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WriterDiedError) as caught:
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    return str(caught.value)


@stock_saves_async
@pytest.mark.field("NVIDIA/Megatron-LM#2422", "refused")
def test_a_dead_writer_is_waited_for(stock: Any, ours: Any, tmp_path: Path) -> None:
    assert call(stock, dies_in_stock, tmp_path / "stock")
    assert "SIGKILL" in call(ours, dies_here, tmp_path / "ours")


# --- what cannot begin ------------------------------------------------------------------------------------------------


def begins(rank: int, path: Path, is_ours: bool) -> str:
    if is_ours:
        mcore_ckpt.install()
    try:
        request = dist_checkpointing.save(state(1), made(path), async_sharded_save=True)
    except ModuleNotFoundError as error:
        return str(error)
    finally:
        mcore_ckpt.uninstall() if not is_ours else None
    queue = async_utils.AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    mcore_ckpt.uninstall()
    return ""


@pytest.mark.skipif(
    not IS_NEW or find_spec("nvidia_resiliency_ext") is not None, reason="of Megatron-Core 0.17 and later, without NVRx"
)
@pytest.mark.field("radixark/miles#2816", "absent")
@pytest.mark.field("NovaSky-AI/SkyRL#1838", "absent")
def test_an_async_save_needs_what_cannot_be_installed(ours: Any, tmp_path: Path) -> None:
    assert "`nvidia-resiliency-ext` installation is required" in call(ours, begins, tmp_path / "stock", False)
    assert call(ours, begins, tmp_path / "ours", True) == ""
    assert stored(tmp_path / "ours") == {1}
