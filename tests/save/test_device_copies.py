"""Snapshots of tensors on a device: on a simulated one, which does everything late, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from mcore_ckpt import SaveOptions
from mcore_ckpt.image.layout import WriteBucket
from mcore_ckpt.save import staging
from mcore_ckpt.save.staging import BucketSource, DeviceCopies, StagingBuffer, start_writing
from mcore_ckpt.storage.resolve import LocalStorage
from tests.support.simulated_device import OnDevice, SimulatedDevices, simulated_devices
from tests.support.stored_layouts import bucket_of, source_of

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
