"""What a load takes of the host's memory, beyond its destinations, as the operating system counts it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.load.reader import FileSystemReader
from mcore_ckpt.load.requests import ReadRequest
from tests.support.gloo_ranks import run_ranks
from tests.support.stored_layouts import whole, write_checkpoint

MIB = 1024 * 1024
SIDE = 4096


def destinations(kind: str) -> list[tuple[torch.Tensor, Box]]:
    everything = Box((0, 0), (SIDE, SIDE))
    if kind == "another dtype":
        return [(torch.ones(SIDE, SIDE, dtype=torch.bfloat16), everything)]
    if kind == "transposed":
        return [(torch.ones(SIDE, SIDE).t(), everything)]
    if kind == "half of every row":
        return [(torch.ones(SIDE, SIDE // 2), Box((0, 0), (SIDE, SIDE // 2)))]
    return [(torch.ones(SIDE, SIDE), everything)]


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name} in /proc/self/status")


def peak_bytes_of_load(rank: int, path: str, kind: str) -> int:
    wanted = destinations(kind)
    reader = FileSystemReader(path)
    # What torch and the interpreter set up on first use is not what is measured.
    small = torch.ones(2, 2, dtype=wanted[0][0].dtype)
    reader.read_items([ReadRequest("small", small, (0, 0), (2, 2))])
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status_bytes("VmRSS")
    reader.read_items([ReadRequest("large", tensor, *box) for tensor, box in wanted])
    return status_bytes("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts memory as Linux does")
@pytest.mark.parametrize("kind", ["in place", "another dtype", "transposed", "half of every row"])
def test_a_load_takes_its_buffers_and_no_more(kind: str, tmp_path: Path) -> None:
    """Four buffers, which are 32 MiB, and what four threads and the allocator take besides: 38 to 41 MiB seen."""
    tensors = {"large": whole(torch.zeros(SIDE, SIDE)), "small": whole(torch.zeros(2, 2))}
    write_checkpoint(tmp_path, tensors, padding=[3])
    (taken,) = run_ranks(peak_bytes_of_load, 1, str(tmp_path), kind)
    assert taken <= 48 * MIB
