"""The door between torch.distributed.checkpoint and the one path of a save.

DCP's write items and their data come in as `ItemBucket`s, become the columns and the `WriteBucket`s that the strategies
make, and are written by the same `write_preloaded_data`; DCP's write results go out.
"""

from __future__ import annotations

import io
import os
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.fingerprints import part_of_run
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.format.integrity import DATA_SUFFIX, NO_SAVE_ID, ManifestFile, with_id
from mcore_ckpt.save.buckets import TensorSpec, WriteBucket, WrittenFile, fill_bucket, lay_out_file, split_buckets
from mcore_ckpt.save.staging import write_in_process
from mcore_ckpt.state.torch_classes import check_memory, dtype_name, storage_info
from mcore_ckpt.storage.resolve import storage_at


@dataclass(slots=True)
class DataFilePrefix:
    """How a rank's data files are named: `prefix`, a number from 0 on, the save's id, `.distcp`. A plan carries it."""

    prefix: str
    save_id: bytes
    is_used: bool = False  # files have been written under it


class BucketData(NamedTuple):
    """The two halves of a bucket: serialized objects, and tensors."""

    bytes_data: list[tuple[WriteItem, io.BytesIO]]
    tensor_data: list[tuple[WriteItem, torch.Tensor]]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, it is the snapshot: torch would move the trainer's own tensors to shared memory, and what is written
        would be their later values.
        """
        copies = [(item, _shareable_copy(tensor) if tensor.is_cpu else tensor) for item, tensor in self.tensor_data]
        return CopiedData, (self.bytes_data, copies)


class CopiedData(BucketData):
    """The same in another process: its tensors on the host belong to it alone, though they lie in shared memory."""


def _shareable_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory that torch can hand to another process without another copy."""
    if tensor.numel() == 0:
        return tensor.clone()
    new_shared = torch.UntypedStorage._new_shared  # noqa: SLF001  (what torch's own data loader collates into)
    storage = new_shared(tensor.numel() * tensor.itemsize, device="cpu")  # type: ignore[no-untyped-call]
    strides = torch.empty(tensor.shape, device="meta").stride()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, strides).copy_(tensor)


class _Bucket(NamedTuple):
    path: str
    storage_key: str
    data: BucketData


class ItemBucket(_Bucket):
    """What goes into one file: a tuple of three, as code for Megatron's writer takes it apart, and the save's id."""

    save_id: bytes = NO_SAVE_ID

    @classmethod
    def of(
        cls, path: str, storage_key: str, bytes_data: Any, tensor_data: Any, save_id: bytes = NO_SAVE_ID
    ) -> ItemBucket:
        """A bucket from its parts."""
        bucket = cls(path, storage_key, BucketData(list(bytes_data), list(tensor_data)))
        bucket.save_id = save_id
        return bucket


class ItemSums(NamedTuple):
    """A written item's file, its CRC-32 (of a tensor's payload, or of the whole item), the cumulative CRC-32 at each
    block boundary inside a long payload, and what a tensor's item adds to that tensor's fingerprint, if that was asked
    for.
    """

    file: ManifestFile
    crc32: int
    blocks: array[int]
    part: int | None = None


@dataclass(frozen=True)
class _SummedResult(WriteResult):
    """DCP's result of one item, with its checksums, which travel to the coordinator that way."""

    sums: ItemSums | None = None


def sums_of(result: WriteResult) -> ItemSums | None:
    """The checksums of a written item; None if another writer wrote it."""
    return result.sums if isinstance(result, _SummedResult) else None


class ResultFile:
    """A memfd where a writer, in this process or another one, leaves its results: it needs no thread here. A process
    that did not inherit the descriptor reaches it through /proc while the owner lives.
    """

    def __init__(self) -> None:
        self._fd = os.memfd_create("mcore_ckpt_results", os.MFD_CLOEXEC)
        self._path = f"/proc/{os.getpid()}/fd/{self._fd}"

    def put(self, outcome: Any) -> None:
        """Leave the results; a later call replaces those of an earlier one."""
        content = pickle.dumps(outcome)
        with Path(self._path).open("r+b") as file:
            file.write(content)
            file.truncate()

    def get(self) -> Any:
        """The results. `SaveError`: the writer has not run, or ended before its work was done."""
        content = Path(self._path).read_bytes()
        if not content:
            raise SaveError("the writer left no results: it did not run, or it ended before its work was done")
        return pickle.loads(content)

    def __getstate__(self) -> dict[str, Any]:
        return {"_fd": -1, "_path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0 and f"/proc/{os.getpid()}/" in self._path:
            os.close(self._fd)


def _item_bytes(item: WriteItem) -> int:
    """Size of a tensor item's data; objects count as nothing, they are spread evenly."""
    if item.tensor_data is None:
        return 0
    count = 1
    for size in item.tensor_data.chunk.sizes:
        count *= size
    return count * item.tensor_data.properties.dtype.itemsize


def prepare_buckets(
    directory: Path,
    items: Sequence[WriteItem],
    resolve_data: Callable[[WriteItem], Any],
    prefix: DataFilePrefix,
    *,
    thread_count: int,
    separation_hint: str | None,
    one_item_per_file: bool,
) -> list[ItemBucket]:
    """Sort a rank's write items into at most `thread_count` balanced buckets, or one for each item, and fetch their
    data by the planner's `resolve_data`.
    """
    chosen: list[tuple[str, list[int]]]
    if one_item_per_file:
        chosen = [("", [index]) for index in range(len(items))]
    else:
        keys = [item.index.fqn for item in items]
        chosen = split_buckets(keys, [_item_bytes(item) for item in items], thread_count, separation_hint)
    buckets = []
    for number, (hint, indices) in enumerate(chosen):
        name = with_id(f"{hint}{prefix.prefix}{number}{DATA_SUFFIX}", prefix.save_id)
        data = BucketData([], [])
        for index in indices:
            item = items[index]
            if item.type == WriteItemType.BYTE_IO:
                data.bytes_data.append((item, resolve_data(item)))
            else:
                tensor = resolve_data(item).detach()
                check_memory(tensor, partial(_where, item))
                data.tensor_data.append((item, tensor))
        buckets.append(ItemBucket.of(str(directory / name), name, *data, prefix.save_id))
    return buckets


def _where(item: WriteItem) -> str:
    return item.index.fqn if item.index.offset is None else f"{item.index.fqn} at offset {tuple(item.index.offset)}"


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    is_view = tensor.device.type == "cpu" and tensor.untyped_storage().size() != tensor.numel() * tensor.itemsize
    return tensor.clone() if is_view else tensor


def write_buckets(
    buckets: Sequence[ItemBucket], options: SaveOptions, extensions: Sequence[Any] = ()
) -> list[list[WriteResult]]:
    """Write buckets of one directory in this process, bytes_data first; for each the results of its items, objects
    first. With DCP's stream transforms, every item passes through them and through memory.
    """
    if not buckets:
        return []
    storage = storage_at(Path(buckets[0].path).parent).within(options.write_deadline_s)
    prepared = [_to_write(bucket, extensions) for bucket in buckets]
    written = write_in_process(storage, [to_write for to_write, _ in prepared], options)
    return [
        _with_sums(results, bucket.save_id, file, to_write.layout.specs)
        for bucket, (to_write, results), file in zip(buckets, prepared, written, strict=True)
    ]


def _with_sums(
    results: Sequence[WriteResult], save_id: bytes, written: WrittenFile, specs: Sequence[TensorSpec]
) -> list[WriteResult]:
    """The results of a file's items, with their checksums, and what its tensors add to fingerprints."""
    file = ManifestFile(written.size_bytes, written.table_crc32, save_id)
    counts = dict(zip(written.long_payloads, written.inner_blocks, strict=True))
    ends = list(accumulate((counts.get(n, 0) for n in range(len(written.crcs))), initial=0))
    blocks = [written.blocks[a:b] for a, b in pairwise(ends)] if counts else [array("I")] * len(written.crcs)
    sums = [ItemSums(file, crc, array("I")) for crc in written.object_crcs]
    strided = dict(written.parts)
    for number, (crc, running) in enumerate(zip(written.crcs, blocks, strict=True)):
        part = strided[number] if number in strided else part_of_run(crc, specs[number].stretch())
        sums.append(ItemSums(file, crc, running, part))
    return [
        _SummedResult(result.index, result.size_in_bytes, result.storage_data, item)
        for result, item in zip(results, sums, strict=True)
    ]


def _to_write(bucket: ItemBucket, extensions: Sequence[Any]) -> tuple[WriteBucket, list[WriteResult]]:
    """The same bucket without DCP's items, and the results of all its items when it is written."""
    name = Path(bucket.path).name
    bytes_data, tensor_data = bucket.data
    # In the order in which readers undo them: the first is the one that writes to the file. (DCP's own writer names
    # them in the reverse order: its readers cannot undo two that do not commute.)
    descriptors = [extension.get_descriptor() for extension in extensions] or None
    blobs = [(item, memoryview(_transformed(data.getvalue(), extensions))) for item, data in bytes_data]
    if extensions:
        # A transform decides how long its output is, so a transformed tensor is an opaque blob like an object.
        blobs += [(item, memoryview(_transformed(_serialized(tensor), extensions))) for item, tensor in tensor_data]
        tensor_data = []
    sizes = [len(blob) for _, blob in blobs]
    blob_keys = [item.index.fqn for item, _ in bytes_data]
    if extensions:
        blob_keys += [item.index.fqn for item, _ in bucket.data.tensor_data]
    specs = [_spec(item, tensor) for item, tensor in tensor_data]
    layout, _ = lay_out_file(name, specs, blob_keys, sizes)
    tensors = [_plain(tensor) for _, tensor in tensor_data]
    to_write = fill_bucket(layout, name, bucket.save_id, [blob for _, blob in blobs], tensors)
    results = [
        WriteResult(item.index, len(blob), storage_info(bucket.storage_key, offset, len(blob), descriptors))
        for (item, blob), offset in zip(blobs, to_write.offsets, strict=True)
    ]
    for (item, _), template, offset in zip(tensor_data, layout.templates, layout.item_offsets, strict=True):
        info = storage_info(bucket.storage_key, offset, template.item_bytes)
        results.append(WriteResult(item.index, template.item_bytes, info))
    return to_write, results


def _spec(item: WriteItem, tensor: torch.Tensor) -> TensorSpec:
    data, sizes = item.tensor_data, tuple(tensor.shape)
    shape, offsets = (sizes, (0,) * len(sizes)) if data is None else (tuple(data.size), tuple(data.chunk.offsets))
    return TensorSpec(item.index.fqn, dtype_name(tensor.dtype), shape, offsets, sizes, tensor.nbytes)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values as they are in memory: pending conjugation and negation carried out."""
    return tensor.detach().resolve_conj().resolve_neg()


def _serialized(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(_own_storage(tensor.cpu()), stream)
    return stream.getvalue()


class _KeepOpen(io.RawIOBase):
    """A stream whose `close` leaves the stream below open: transforms close what they write to."""

    def __init__(self, below: io.BytesIO) -> None:
        self._below = below

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._below.write(data)


def _transformed(content: bytes, extensions: Sequence[Any]) -> bytes:
    if not extensions:
        return content
    below = io.BytesIO()
    stream: Any = _KeepOpen(below)
    for extension in extensions:
        stream = extension.transform_to(stream)
    stream.write(content)
    stream.close()
    return below.getvalue()


def save_buckets(
    options: SaveOptions,
    extensions: Sequence[Any],
    owner_pid: int,
    rank: int,
    buckets: list[ItemBucket],
    results: ResultFile,
) -> None:
    """Body of an async save; runs in the trainer, a forked child or a worker, and reports through `results`."""
    threads = torch.get_num_threads()
    elsewhere = os.getpid() != owner_pid
    if elsewhere:
        torch.set_num_threads(1)  # a fork has none of the threads that OpenMP believes to have, and would wait for them
    try:
        results.put(write_buckets(buckets, options, extensions))
    except Exception as error:  # noqa: BLE001  (whatever it is, the trainer raises it)
        results.put(SaveError(f"rank {rank}: {error}"))
    finally:
        if elsewhere:
            torch.set_num_threads(threads)
