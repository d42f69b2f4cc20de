"""The buffers of a rank: never more than the budget together, kept while they fit, given back when they do not."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
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
from tests.support.processes import until
from tests.support.stored_layouts import bucket_of
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
    larger = LocalStorage(tmp_path / "larger")
    larger.ensure()
    start_writing(larger, [bucket_of(torch.ones(8 * _MIB))], SaveOptions(), "a larger one").result()
    tensor = torch.arange(5 * _MIB, dtype=torch.float32)  # 20 MiB
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
    until(save.memory_is_free, "it is gone now, and nobody notices", within_s=10.0)


# --- memory of the host -----------------------------------------------------------------------------------------------


# The line of the process; names of limit and usage; of each group both in MiB, and its memory.stat; MiB that are free.
GROUPS = {
    "2": (
        "0::/job/step_0/task\n",
        ("memory.max", "memory.current"),
        {
            "job": (1000, 800, f"anon 5\ninactive_file {100 * _MIB}\nactive_file 7\n"),
            "job/step_0": (None, 500, ""),
            "job/step_0/task": (5000, 1, "anon 5\n"),
            "other": (1, 0, ""),
        },
        300,
    ),
    "1": (
        "5:cpu:/\n4:hugetlb,memory:/job/1\n0::/\n",
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        {"memory": (2**43 - 1, 1, "anon 5\n"), "memory/job/1": (300, 100, "anon 5\n")},
        200,
    ),
}


@pytest.mark.parametrize("version", GROUPS)
def test_free_memory_is_what_the_tightest_control_group_leaves(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, names, groups, expected_mib = GROUPS[version]
    (tmp_path / "self").write_text(line)
    for group, (limit_mib, used_mib, stat) in groups.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        for name, mib in zip(names, (limit_mib, used_mib), strict=True):
            (tmp_path / group / name).write_text("max\n" if mib is None else f"{mib * _MIB}\n")
        (tmp_path / group / "memory.stat").write_text(stat)
    limits = process._memory_limits(tmp_path, tmp_path / "self")
    monkeypatch.setattr(process, "_memory_limits", lambda: limits)
    assert process.free_host_bytes() == expected_mib * _MIB
