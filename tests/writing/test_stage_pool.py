"""The stages of a rank: never more than the budget together, kept while they fit, given back when they do not."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt import SaveOptions
from mcore_ckpt.core.options import ranks_of_this_host
from mcore_ckpt.layout.buckets import lay_out
from mcore_ckpt.save import _async_save as async_save
from mcore_ckpt.save._async_save import AsyncSave, start_writing
from mcore_ckpt.storage.local import LocalStorage
from mcore_ckpt.writing import stage_pool
from mcore_ckpt.writing.persistent_writer import shared_writer
from mcore_ckpt.writing.stage_pool import is_busy, lease_stage
from mcore_ckpt.writing.staging import BucketSource
from tests.support.tensor_specs import specs_of

_MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def no_stages() -> Iterator[None]:
    """Each test begins and ends without any stage."""
    yield
    for stage in stage_pool._free:
        stage.close()
    stage_pool._free.clear()
    assert not stage_pool._in_use
    shared_writer().close(abort=True)


def _held_bytes() -> int:
    """What all stages of this process take, as the kernel counts it."""
    taken: dict[int, int] = {}  # a mapping has a descriptor of its own for the same memory
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "mcore_ckpt_stage" in os.readlink(entry):
                status = os.stat(entry)
                taken[status.st_ino] = status.st_blocks * 512
        except OSError:
            continue
    return sum(taken.values())


def _source(tensor: torch.Tensor) -> BucketSource:
    layout = lay_out("__0_0.distcp", specs_of([tensor]), 0)
    return BucketSource(layout, [tensor], [], [])


@pytest.mark.parametrize("budget_mib", [1, 3, 64])
def test_a_save_of_any_size_stays_within_the_budget(budget_mib: int, tmp_path: Path) -> None:
    options = SaveOptions(staging_budget_bytes=budget_mib * _MIB, progress=False)
    tensor = torch.arange(5 * _MIB, dtype=torch.float32)  # 20 MiB, and windows of 8
    save = start_writing(LocalStorage(tmp_path), [_source(tensor)], options, "a save")
    assert isinstance(save, AsyncSave)
    assert _held_bytes() <= budget_mib * _MIB
    expected = tensor.clone()
    tensor.zero_()
    save.results()
    image = _source(tensor).layout.image
    content = bytearray((tmp_path / "__0_0.distcp").read_bytes())
    written = torch.frombuffer(content, dtype=torch.float32, offset=image.payload_offsets[0], count=tensor.numel())
    assert torch.equal(written, expected)


def test_saves_in_flight_share_the_budget_and_one_that_does_not_fit_waits() -> None:
    class Job:
        ended = False

        def poll(self) -> bool:
            return self.ended

        def wait(self) -> None:
            while not self.ended:
                time.sleep(0.001)

    options = SaveOptions(staging_budget_bytes=10 * _MIB, max_in_flight=3)
    job: Any = Job()
    first = lease_stage(6 * _MIB, options)
    first.stage.reserve(6 * _MIB)
    first.stage_is_used_by(job)
    assert not is_busy(4 * _MIB, options)
    second = lease_stage(3 * _MIB, options)
    assert second.budget_bytes == 4 * _MIB
    second.stage.reserve(3 * _MIB)
    second.stage_is_used_by(job)
    assert is_busy(2 * _MIB, options)
    threading.Timer(0.2, lambda: setattr(job, "ended", True)).start()
    began_s = time.monotonic()
    third = lease_stage(2 * _MIB, options)
    assert time.monotonic() - began_s > 0.1, "it waits for those before it"
    third.give_back()
    for lease in (first, second):
        lease.give_back()


def test_idle_stages_make_room_for_a_larger_one() -> None:
    options = SaveOptions(staging_budget_bytes=10 * _MIB, max_in_flight=2)
    leases = [lease_stage(4 * _MIB, options) for _ in range(2)]
    for lease in leases:
        lease.stage.reserve(4 * _MIB)
        lease.give_back()
    assert _held_bytes() == 8 * _MIB
    lease = lease_stage(9 * _MIB, options)
    lease.stage.reserve(9 * _MIB)
    assert _held_bytes() == 9 * _MIB
    lease.give_back()
    again = lease_stage(4 * _MIB, options)
    assert again.stage is lease.stage, "memory that is touched already is used again"
    again.give_back()
    smaller = lease_stage(_MIB, SaveOptions(staging_budget_bytes=2 * _MIB))
    assert _held_bytes() == 0, "a budget that has become smaller holds at once"
    smaller.give_back()


def test_the_default_budget_is_divided_among_the_ranks_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_pool, "free_host_bytes", lambda: 800 * _MIB)
    monkeypatch.setattr(stage_pool, "ranks_of_this_host", lambda: 4)
    lease = lease_stage(_MIB, SaveOptions())
    assert lease.budget_bytes == 50 * _MIB
    lease.give_back()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "64"}, 8),
        ({"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "4(x2)", "WORLD_SIZE": "16"}, 16),
        ({}, 1),
    ],
    ids=str,
)
def test_the_launcher_tells_how_many_ranks_share_a_host(environment: dict[str, str], expected: int) -> None:
    assert ranks_of_this_host(environment) == expected


def test_the_choice_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_save, "_told", set())
    sources = [_source(torch.ones(1))]
    with caplog.at_level("INFO"):
        for _ in range(3):
            async_save.log_choice(sources, SaveOptions())
        async_save.log_choice(sources, SaveOptions(stage="cow", writer="fork"))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "a reused stage in shared memory; one writer process" in told[0]
    assert "copy-on-write" in told[1]


def test_copy_on_write_of_pinned_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    options = SaveOptions(stage="cow", writer="fork", progress=False)
    save = start_writing(LocalStorage(tmp_path), [_source(torch.ones(3))], options, "a save")
    with pytest.raises(Exception, match="pinned memory, which a forked process does not inherit"):
        save.results()
