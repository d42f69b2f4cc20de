"""The buffers of a rank: never more than the budget together, kept while they fit, given back when they do not."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mcore_ckpt import SaveOptions
from mcore_ckpt.core import process
from mcore_ckpt.core.errors import WriteTimeoutError
from mcore_ckpt.core.options import ranks_of_this_host
from mcore_ckpt.image.layout import WriteBucket
from mcore_ckpt.save import staging
from mcore_ckpt.save.staging import (
    BucketSource,
    DeviceCopies,
    StagingBuffer,
    free_buffer,
    is_busy,
    release_buffer,
    start_writing,
)
from mcore_ckpt.save.writer_process import shared_writer
from mcore_ckpt.storage.resolve import LocalStorage
from tests.support.processes import until
from tests.support.simulated_device import OnDevice, SimulatedDevices, simulated_devices
from tests.support.stored_layouts import bucket_of, source_of
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
def test_the_launcher_tells_how_many_ranks_share_a_host(
    environment: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", environment)
    assert ranks_of_this_host() == expected


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


# --- copies from a device ---------------------------------------------------------------------------------------------

__all__ = ["simulated_devices"]

COUNT = 1000


class Device(NamedTuple):
    """Gives a tensor's copy there; does what is still queued."""

    put: Callable[[torch.Tensor], torch.Tensor]
    finish: Callable[[], object]


@pytest.fixture(params=["simulated", pytest.param("a GPU", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "a GPU":
        return Device(torch.Tensor.cuda, torch.cuda.synchronize)
    return Device(OnDevice, request.getfixturevalue("simulated_devices").finish)


def values(number: float) -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.float32) + number * COUNT


def payloads(bucket: WriteBucket, content: bytes | memoryview) -> list[torch.Tensor]:
    image = bucket.file.image
    return [
        torch.frombuffer(bytearray(content[start : start + length]), dtype=torch.float32)
        for start, length in zip(image.payload_offsets, image.payload_lengths, strict=True)
    ]


def staged(source: BucketSource, laid_out: bool = False) -> list[torch.Tensor]:
    buffer = StagingBuffer()
    view = buffer.reserve(source.bucket.file.image.size_bytes)
    source.fill_buffer(view, laid_out=laid_out)
    found = payloads(source.bucket, view)
    del view
    buffer.close()
    return found


@pytest.mark.parametrize("laid_out", [False, True])
def test_copies_are_complete_when_the_buffer_is_filled(device: Device, laid_out: bool) -> None:
    found = staged(source_of(*(device.put(values(i)) for i in range(50))), laid_out)
    assert all(torch.equal(mine, values(i)) for i, mine in enumerate(found))


def test_what_the_trainer_queued_before_is_in_and_what_it_queues_later_is_not(device: Device, tmp_path: Path) -> None:
    tensor = device.put(values(0).repeat(10_000))
    for step in range(1, 4):
        tensor.fill_(float(step))
        source = bucket_of(tensor)
        (tmp_path / str(step)).mkdir()
        save = start_writing(LocalStorage(tmp_path / str(step)), [source], SaveOptions(), "test")
        tensor.fill_(-1.0)
        device.finish()
        save.result()
        (found,) = payloads(source, (tmp_path / str(step) / "__0_0.distcp").read_bytes())
        assert (found == step).all(), step


def test_what_is_not_contiguous_is_put_in_order_a_piece_at_a_time(
    simulated_devices: SimulatedDevices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_PIECE_BYTES", 400)
    base = torch.randn(37, 41, 11)
    views = [base.permute(2, 0, 1), base[3:30, ::2, 1:9], base[:, :, 4], base[5].t(), base[:1].expand(6, 41, 11)]
    on_device = [OnDevice(view) for view in views]
    for tensors in (views, on_device):
        found = staged(source_of(*tensors))
        for mine, expected in zip(found, views, strict=True):
            assert torch.equal(mine, expected.contiguous().view(-1))
    assert 0 < simulated_devices.largest_bytes <= 400


@pytest.mark.gpu
def test_staging_does_not_wait_for_other_streams() -> None:
    busy = torch.cuda.Stream()
    source = source_of(torch.ones(1024, device="cuda"))
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2_000_000_000)  # about a second of a stream that has nothing to do with the tensor
    staged(source)
    still_busy = not busy.query()
    torch.cuda.synchronize()
    assert still_busy, "staging outlasted the other stream: it waited for the device"


def test_a_device_without_streams_is_copied_from_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: object())
    copies, target = DeviceCopies(), torch.zeros(COUNT)
    copies.copy(values(1), lambda: values(1), target)
    assert torch.equal(target, values(1))
    copies.wait()


@pytest.mark.long
def test_the_script_for_a_machine_with_a_gpu_runs_each_step_dry(tmp_path: Path) -> None:
    root, out = Path(__file__).resolve().parents[2], tmp_path / "gpu.json"
    command = [sys.executable, "-W", "ignore", str(root / "scripts" / "gpu.py"), "--dry-run", "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    found = json.loads(out.read_text())
    assert found["isolation"]["saves"] == 6
    assert set(found["speed"]["mcore_ckpt"]) == {"save", "load", "async: training waits", "async: durable"}
