"""Torch files that are filled in tensor by tensor: what `torch.load` reads, and their checksums, are as ever."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch

from mcore_ckpt.convert._torch_files import write_torch_file
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.tools.regrid import Sink

TENSORS = {
    "weight": torch.randn(1000, 33),
    "bf16": torch.randn(7, 5).to(torch.bfloat16),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
    "flags": torch.tensor([True, False, True]),
    "fp8": torch.randn(100).to(torch.float8_e4m3fn),
    "complex": torch.randn(9, dtype=torch.complex64),
    "longer than the buffer": torch.arange(3_000_000, dtype=torch.int64),
}


def write(path: Path) -> None:
    tensors = list(TENSORS.values())

    def fill(number: int, sink: Sink) -> None:
        content = memoryview(tensors[number].reshape(-1).view(torch.uint8).numpy())
        while content:
            space = sink.space(len(content))
            space[:] = content[: len(space)]
            sink.filled(space)
            content = content[len(space) :]

    write_torch_file(path, [(name, t.dtype, tuple(t.shape)) for name, t in TENSORS.items()], fill)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_what_was_given(tmp_path: Path, mmap: bool) -> None:
    write(tmp_path / "file.bin")
    loaded = torch.load(tmp_path / "file.bin", weights_only=True, mmap=mmap)
    assert list(loaded) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]


def test_every_record_has_its_checksum(tmp_path: Path) -> None:
    write(tmp_path / "file.bin")
    with zipfile.ZipFile(tmp_path / "file.bin") as archive:
        assert archive.testzip() is None
        stated = {info.filename: info.CRC for info in archive.infolist() if "/data/" in info.filename}
    assert sum(value != 0 for value in stated.values()) == len(TENSORS) - 1
    torch.save(TENSORS, tmp_path / "torch.bin")
    with zipfile.ZipFile(tmp_path / "torch.bin") as archive:
        by_torch = {info.filename: info.CRC for info in archive.infolist() if "/data/" in info.filename}
    assert list(stated.values()) == list(by_torch.values())


def test_too_few_elements_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="0 bytes of a were given, expected 12"):
        write_torch_file(tmp_path / "file.bin", [("a", torch.float32, (3,))], lambda number, sink: None)


def test_memory_does_not_depend_on_the_size_of_a_tensor(tmp_path: Path) -> None:
    code = """
        import sys, torch
        from mcore_ckpt.convert._torch_files import write_torch_file

        def fill(number, sink):
            left = 1 << 30
            while left:
                space = sink.space(left)
                sink.filled(space)
                left -= len(space)

        before = int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
        write_torch_file(__import__("pathlib").Path(sys.argv[1]), [("a", torch.float32, (1 << 28,))], fill)
        after = int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
        print(after - before)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "file.bin")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert int(ended.stdout) < 64 * 1024  # KB, of a tensor of 1 GiB
