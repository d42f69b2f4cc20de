"""Dozens of async saves leave no process, thread, descriptor, mapping or shared memory behind; killed ones a whole
checkpoint.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.megatron.strategy import TorchDistSaveStrategy
from mcore_ckpt.save.async_queue import AsyncCallsQueue
from mcore_ckpt.save.writer_process import shared_writer
from tests.support.gloo_ranks import run_megatron_ranks as run_ranks
from tests.support.processes import children

pytest.importorskip("megatron.core.dist_checkpointing", reason="the strategies are Megatron's")

_WARM_UP_SAVES = 20
_MEMORY_NOISE_KB = 8_000


def _memory_kb(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("RssAnon", "RssShmem")):
            return int(line.split()[1])
    raise AssertionError("no such line")


def _held(pids: list[int]) -> dict[str, Any]:
    """What processes hold that could leak."""
    gc.collect()
    return {
        "children": len(children()),
        "python threads": threading.active_count(),
        **{f"descriptors {n}": len(os.listdir(f"/proc/{pid}/fd")) for n, pid in enumerate(pids)},
        **{f"threads {n}": len(os.listdir(f"/proc/{pid}/task")) for n, pid in enumerate(pids)},
        **{f"shared mappings {n}": Path(f"/proc/{pid}/maps").read_text().count("memfd:") for n, pid in enumerate(pids)},
    }


def _save_often(rank: int, directory: str, saves: int, options: SaveOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    queue, strategy = AsyncCallsQueue(options=options), TorchDistSaveStrategy(options=options)
    pids = [os.getpid()]
    before: dict[str, Any] = {}
    memory_kb: list[int] = []
    for number in range(saves):
        values = torch.full((20_000,), float(number))
        state = {
            "w": ShardedTensor.from_rank_offsets("w", values, (0, rank, 2)),
            "o": ShardedObject("o", {"number": number}, (2,), (rank,)),
        }
        path = f"{directory}/{number % 3}"
        Path(path).mkdir(exist_ok=True, parents=True)
        queue.schedule_async_request(strategy.async_save(state, path))
        values.zero_()
        queue.maybe_finalize_async_calls(blocking=number % 2 == 0)
        if number == _WARM_UP_SAVES:
            queue.maybe_finalize_async_calls(blocking=True)
            pids += [pid for pid in [shared_writer().pid] if pid is not None]
            before = _held(pids)
            memory_kb = [_memory_kb(pid) for pid in pids]
    queue.maybe_finalize_async_calls(blocking=True)
    assert queue.failures == []
    after = _held(pids)
    for pid, kb in zip(pids, memory_kb, strict=True):
        assert _memory_kb(pid) < kb + _MEMORY_NOISE_KB
    queue.close()
    return before, after


@pytest.mark.parametrize("writer", ["persistent", "fork"])
def test_dozens_of_saves_leave_nothing(writer: Any, tmp_path: Path) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    options = SaveOptions(writer=writer)
    for before, after in run_ranks(_save_often, 2, str(tmp_path), 50, options, deadline_s=300):
        assert after == before
    left = [name for name in set(os.listdir("/dev/shm")) - shared_memory if "mcore" in name]
    assert not [name for name in left if not name.startswith("mcore_ckpt-test-")], "(those are of other tests)"


@pytest.mark.crash
@pytest.mark.long
@pytest.mark.timeout(900)
def test_kills_and_races_leave_one_whole_checkpoint() -> None:
    """Some of those that `make test-crash` makes by the dozen."""
    kills = "-m tests.save.kills_and_races --kills 14 --races 12 --seed 2024".split()
    command, root = [sys.executable, "-W", "ignore", *kills], Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert "all as promised" in done.stdout
