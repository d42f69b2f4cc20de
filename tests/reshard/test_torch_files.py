"""Torch files that are laid out by hand: what `torch.load` reads, and their checksums, are as ever."""

import zipfile
from pathlib import Path

import torch

from mcore_ckpt.format.item import ArchiveLayout
from mcore_ckpt.reshard.conversion import Conversion, ConversionReport, SourceFiles, run_conversion
from mcore_ckpt.reshard.options import ConversionOptions
from mcore_ckpt.reshard.view import FilePayloads, FileRange
from mcore_ckpt.reshard.weight_files import Exported, SavedTensor, pickle_state, plan_torch_files
from mcore_ckpt.tools.runs import Places
from tests.support.model_like import assert_same

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


def write(target: Path, most_bytes: int = 1 << 40) -> None:
    source = target.with_name("source")
    source.mkdir()
    ranges, content = {}, b""
    for name, tensor in TENSORS.items():
        elements = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        ranges[name] = FileRange("elements", len(content), len(elements), dtype, shape)
        content += elements
    (source / "elements").write_bytes(content)
    payloads = FilePayloads(source, ranges)
    exported = [Exported(name, entry) for name, entry in payloads.index.tensors.items()]
    plan = plan_torch_files(exported, most_bytes)
    report = ConversionReport(format="torch")
    conversion = Conversion(
        payloads=payloads, source=SourceFiles(payloads.index), plan=plan, keys=lambda: (), report=report
    )
    run_conversion(conversion, Places(source, target), ConversionOptions(), dry_run=False, progress=False)


def test_torch_reads_what_was_given_and_every_record_has_its_checksum(tmp_path: Path) -> None:
    write(tmp_path / "t")
    for mmap in (False, True):
        loaded = torch.load(tmp_path / "t" / "pytorch_model.bin", weights_only=True, mmap=mmap)
        assert list(loaded) == list(TENSORS)
        assert_same(loaded, TENSORS)
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["pytorch_model.bin"]
    with zipfile.ZipFile(tmp_path / "t" / "pytorch_model.bin") as archive:
        assert archive.testzip() is None
        stated = {info.filename: info.CRC for info in archive.infolist() if "/data/" in info.filename}
    assert sum(value != 0 for value in stated.values()) == len(TENSORS) - 1
    torch.save(TENSORS, tmp_path / "torch.bin")
    with zipfile.ZipFile(tmp_path / "torch.bin") as archive:
        by_torch = {info.filename: info.CRC for info in archive.infolist() if "/data/" in info.filename}
    assert list(stated.values()) == list(by_torch.values())


def test_an_archive_of_more_than_4_gib_is_one_that_torch_reads(tmp_path: Path) -> None:
    """The file has holes: neither elements nor what lies behind them takes space."""
    large = SavedTensor("uint8", (5 * 1024**3,), "large")
    pickled, tensors = pickle_state({"large": large, "last": SavedTensor("int16", (2,), "last")})
    layout = ArchiveLayout(pickled, [tensor.nbytes for tensor in tensors])
    with (tmp_path / "x.pt").open("wb") as file:
        file.write(layout.begin)
        for offset, frame, tensor in zip(layout.offsets, layout.frames, tensors, strict=True):
            file.seek(offset)
            file.write(frame.head)
            file.seek(tensor.nbytes, 1)
            file.write(frame.tail_with(0))
        file.write(layout.end([0, 0]))
    assert (tmp_path / "x.pt").stat().st_size == layout.size_bytes
    loaded = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)
    assert (loaded["large"].shape, loaded["last"].tolist()) == ((5 * 1024**3,), [0, 0])
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert [info.file_size for info in archive.infolist() if "/data/" in info.filename] == [5 * 1024**3, 4]
