"""Staging from a GPU: the state at the call, through pinned memory, without waiting for the whole device."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from mcore_ckpt import SaveOptions
from mcore_ckpt.save.staging import BucketSource, StagingBuffer, start_writing
from mcore_ckpt.storage.resolve import LocalStorage
from tests.support.tensor_specs import bucket_of, source_of

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def staged(source: BucketSource, pin: bool) -> list[bytes]:
    buffer = StagingBuffer()
    view = buffer.reserve(source.bucket.file.image.size_bytes)
    if pin:
        buffer.pin()
    source.fill_buffer(view, laid_out=False)
    image = source.bucket.file.image
    payloads = [
        bytes(view[start : start + length])
        for start, length in zip(image.payload_offsets, image.payload_lengths, strict=True)
    ]
    del view
    buffer.close()
    return payloads


@pytest.mark.parametrize("pin", [True, False])
def test_device_tensors_are_staged_bit_for_bit(pin: bool) -> None:
    base = torch.randn(512, 512, device="cuda")
    tensors = [base, base[:, 7:9], base.t(), base.to(torch.bfloat16), torch.empty(0, 3, device="cuda"), torch.ones(5)]
    expected = [bytes(t.cpu().contiguous().view(-1).view(torch.uint8).numpy()) for t in tensors]
    assert staged(source_of(*tensors), pin) == expected


def test_what_is_queued_before_the_call_is_in_the_snapshot_and_what_comes_after_is_not(tmp_path: Path) -> None:
    tensor = torch.zeros(64 * 1024 * 1024, device="cuda")
    for step in range(1, 6):
        tensor.fill_(step)  # queued, not waited for
        save = start_writing(LocalStorage(tmp_path / str(step)), [bucket_of(tensor)], SaveOptions(), "test")
        tensor.fill_(-1.0)
        save.result()
    for step in range(1, 6):
        content = (tmp_path / str(step) / "__0_0.distcp").read_bytes()
        image = bucket_of(tensor).file.image
        values = torch.frombuffer(
            bytearray(content), dtype=torch.float32, offset=image.payload_offsets[0], count=tensor.numel()
        )
        assert (values == step).all(), step


def test_staging_does_not_wait_for_other_streams() -> None:
    busy = torch.cuda.Stream()
    tensor = torch.ones(1024, device="cuda")
    with torch.cuda.stream(busy):
        torch.cuda._sleep(2_000_000_000)  # about a second of a stream that has nothing to do with the tensor
    started = time.perf_counter()
    staged(source_of(tensor), pin=True)
    waited_s = time.perf_counter() - started
    still_busy = not busy.query()
    torch.cuda.synchronize()
    assert still_busy, f"staging took {waited_s:.3f} s and outlasted the other stream: it waited for the device"
