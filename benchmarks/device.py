"""From a GPU into the staging buffer, next to a plain copy of the same bytes into pinned memory.

python -m benchmarks.device [GB]      one process, on a machine with a GPU; prints GB/s of each, round by round
"""

from __future__ import annotations

import sys
import time

import torch

from mcore_ckpt.format.integrity import NO_SAVE_ID
from mcore_ckpt.save.buckets import TensorSpec, fill_bucket, lay_out_file
from mcore_ckpt.save.staging import BucketSource, StagingBuffer

__all__ = ["device_to_stage"]

_ROWS, _COLUMNS = 2048, 4096


def device_to_stage(size_bytes: int, rounds: int) -> dict[str, list[float]]:
    """GB/s of both, in turns; the first of each left out; the staged bytes are compared with the tensors.

    Raises:
        RuntimeError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("this part of the benchmark needs a GPU")
    count = max(1, size_bytes // (2 * _ROWS * _COLUMNS))
    tensors = [torch.randn(_ROWS, _COLUMNS, device="cuda").to(torch.bfloat16) for _ in range(count)]
    pinned = [torch.empty(_ROWS, _COLUMNS, dtype=torch.bfloat16, pin_memory=True) for _ in tensors]
    shape = (_ROWS, _COLUMNS)
    specs = [TensorSpec(str(n), "bfloat16", shape, (0, 0), shape, 2 * _ROWS * _COLUMNS) for n in range(count)]
    layout = lay_out_file("0", specs)
    source = BucketSource(fill_bucket(layout, "0", NO_SAVE_ID, [], tensors))
    image = layout.image
    buffer = StagingBuffer()
    view = buffer.reserve(image.size_bytes)
    buffer.pin()
    nbytes = sum(tensor.nbytes for tensor in tensors)
    samples: dict[str, list[float]] = {"plain pinned copy": [], "staging buffer": []}
    for turn in range(rounds + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for target, tensor in zip(pinned, tensors, strict=True):
            target.copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        plain_s = time.perf_counter() - started
        started = time.perf_counter()
        source.fill_buffer(view, laid_out=turn > 0)
        stage_s = time.perf_counter() - started
        if turn:
            samples["plain pinned copy"].append(nbytes / 1e9 / plain_s)
            samples["staging buffer"].append(nbytes / 1e9 / stage_s)
    for target, start, length in zip(pinned, image.payload_offsets, image.payload_lengths, strict=True):
        if view[start : start + length] != target.view(-1).view(torch.uint8).numpy().data:
            raise AssertionError("the staging buffer does not hold the tensors' bytes")
    return samples


if __name__ == "__main__":
    for name, values in device_to_stage(int(float(sys.argv[1] if sys.argv[1:] else 1) * 1e9), 5).items():
        sys.stdout.write(f"{name}: {', '.join(f'{value:.1f}' for value in values)} GB/s\n")
