"""The buffers of a rank: never more than the budget together, kept while they fit, given back when they do not."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt import SaveOptions
from mcore_ckpt.core import process
from mcore_ckpt.core.errors import WriteTimeoutError
from mcore_ckpt.core.options import ranks_of_this_host
from mcore_ckpt.save import staging
from mcore_ckpt.save.staging import StagingBuffer, free_buffer, is_busy, release_buffer, start_writing
from mcore_ckpt.save.writer_process import shared_writer
from mcore_ckpt.storage.resolve import LocalStorage
from tests.support.tensor_specs import bucket_of
from tests.support.writer_jobs import MisbehavingStorage

_MIB = 1024 * 1024


@pytest.fixture(autouse=True)
def no_buffers() -> Iterator[None]:
    """Each test begins and ends without any buffer."""
    yield
    assert not is_busy()
    release_buffer()
    shared_writer().close(abort=True)


def _held_bytes() -> int:
    """What all buffers of this process take, as the kernel counts it."""
    taken: dict[int, int] = {}  # a mapping has a descriptor of its own for the same memory
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "mcore_ckpt_buffer" in os.readlink(entry):
                status = os.stat(entry)
                taken[status.st_ino] = status.st_blocks * 512
        except OSError:
            continue
    return sum(taken.values())


@pytest.mark.parametrize("writer", ["persistent", "fork"])
@pytest.mark.parametrize("budget_mib", [1, 64])
def test_a_save_of_any_size_stays_within_the_budget(budget_mib: int, writer: Any, tmp_path: Path) -> None:
    options = SaveOptions(staging_budget_bytes=budget_mib * _MIB, writer=writer)
    tensor = torch.arange(5 * _MIB, dtype=torch.float32)  # 20 MiB, and windows of 8
    save = start_writing(LocalStorage(tmp_path), [bucket_of(tensor)], options, "a save")
    assert _held_bytes() <= budget_mib * _MIB
    expected = tensor.clone()
    tensor.zero_()
    save.result()
    image = bucket_of(tensor).file.image
    content = bytearray((tmp_path / "__0_0.distcp").read_bytes())
    written = torch.frombuffer(content, dtype=torch.float32, offset=image.payload_offsets[0], count=tensor.numel())
    assert torch.equal(written, expected)


def test_a_save_waits_for_the_one_that_is_in_flight() -> None:
    class Job:
        ended = threading.Event()

        def poll(self) -> bool:
            return self.ended.is_set()

        def wait(self) -> None:
            self.ended.wait()

        def memory_is_free(self) -> bool:
            return self.ended.is_set()

    job: Any = Job()
    second: list[StagingBuffer] = []

    def begin() -> None:
        with free_buffer(10 * _MIB) as buffer:
            second.append(buffer)

    with free_buffer(10 * _MIB) as first:
        first.reader = job
        assert is_busy()
        other = threading.Thread(target=begin)
        other.start()
    other.join(timeout=0.3)
    assert second == []
    job.ended.set()
    other.join(timeout=30)
    assert second == [first]
    assert not is_busy()


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


# --- what is left when a save does not end well -----------------------------------------------------------------------


def test_a_buffer_is_not_used_again_while_a_killed_writer_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if it hung inside the kernel: it does not die of being killed, and may go on reading at any time.
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: process.send_signal(signal.SIGSTOP))
    tensor = torch.ones(1000)
    options = SaveOptions(staging_budget_bytes=64 * _MIB, write_deadline_s=0.3)
    save = start_writing(MisbehavingStorage(str(tmp_path), "hang"), [bucket_of(tensor)], options, "a save")
    used = staging._kept
    with pytest.raises(WriteTimeoutError):
        save.result()
    with free_buffer(64 * _MIB) as buffer:
        assert buffer is not used
    monkeypatch.undo()
    os.kill(save.pid, signal.SIGKILL)
    until_s = time.monotonic() + 10
    while not save.memory_is_free():
        assert time.monotonic() < until_s, "it is gone now, and nobody notices"
        time.sleep(0.01)


# --- memory of the host -----------------------------------------------------------------------------------------------


def _group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content + "\n")


@pytest.mark.parametrize(
    ("version", "expected_mib"), [("2", 300), ("1", 200), ("neither", None)], ids=["v2", "v1", "none"]
)
def test_free_memory_is_what_the_tightest_control_group_leaves(
    version: str, expected_mib: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount, of_process = tmp_path / "cgroup", tmp_path / "self"
    two = ("memory.max", "memory.current")
    one = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    if version == "2":
        of_process.write_text("0::/job/step_0/task\n")
        _group(mount / "job", dict(zip(two, (str(1000 * _MIB), str(800 * _MIB)), strict=True)))
        _group(mount / "job", {"memory.stat": f"anon 5\ninactive_file {100 * _MIB}\nactive_file 7"})
        _group(mount / "job/step_0", dict(zip(two, ("max", str(500 * _MIB)), strict=True)))
        _group(mount / "job/step_0/task", dict(zip(two, (str(5000 * _MIB), str(_MIB)), strict=True)))
        _group(mount / "other", dict(zip(two, (str(_MIB), "0"), strict=True)))
    elif version == "1":
        of_process.write_text("5:cpu:/\n4:hugetlb,memory:/job/1\n0::/\n")
        _group(mount / "memory", dict(zip(one, (str(2**63 - 4096), str(_MIB)), strict=True)))
        _group(mount / "memory/job/1", dict(zip(one, (str(300 * _MIB), str(100 * _MIB)), strict=True)))
    else:
        of_process = tmp_path / "not there"
    limits = process._memory_limits(mount, of_process)
    for group in (mount / "job/step_0/task", mount / "memory/job/1", mount / "memory"):
        if group.is_dir():
            (group / "memory.stat").write_text("anon 5\n")
    monkeypatch.setattr(process, "_memory_limits", lambda: limits)
    unlimited = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = process.free_host_bytes()
    assert 0 < free <= unlimited
    if expected_mib is not None:
        assert free == expected_mib * _MIB
