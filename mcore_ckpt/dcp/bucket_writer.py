"""The door between torch.distributed.checkpoint and the one path of a save.

DCP's write items and their data come in as `ItemBucket`s, become the columns and the `WriteBucket`s that the strategies
make, and are written by the same `write_preloaded_data`; DCP's write results go out.
"""

from __future__ import annotations

import io
import math
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
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.core.fingerprints import part_of_run
from mcore_ckpt.core.options import SaveOptions
from mcore_ckpt.format.integrity import DATA_SUFFIX, NO_SAVE_ID, ManifestFile, with_id
from mcore_ckpt.format.safe_pickle import warn_of_refused
from mcore_ckpt.image.layout import TensorSpec, WriteBucket, WrittenFile, fill_bucket, lay_out_file
from mcore_ckpt.save.buckets import split_buckets
from mcore_ckpt.save.staging import write_in_process
from mcore_ckpt.state.torch_classes import ItemSums, check_memory, dtype_name
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


@dataclass(frozen=True)
class _SummedResult(WriteResult):
    """DCP's result of one item, with its checksums, which travel to the coordinator that way."""

    sums: ItemSums | None = None


def sums_of(result: WriteResult) -> ItemSums | None:
    """The checksums of a written item; None if another writer wrote it."""
    return result.sums if isinstance(result, _SummedResult) else None


class ResultFile:
    """Memory where a writer, in this process or a forked one, leaves its results: it needs no thread here."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("mcore_ckpt_results", os.MFD_CLOEXEC)

    def put(self, outcome: Any) -> None:
        """Leave the results; a later call replaces those of an earlier one."""
        os.pwrite(self._fd, pickle.dumps(outcome), 0)

    def get(self) -> Any:
        """The results. `SaveError`: the writer has not run, or ended before its work was done."""
        content = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        if not content:
            raise SaveError("the writer left no results: it did not run, or it ended before its work was done")
        return pickle.loads(content)

    def __del__(self) -> None:
        os.close(self._fd)


def _item_bytes(item: WriteItem) -> int:
    """Size of a tensor item's data; objects count as nothing, they are spread evenly."""
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


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


def write_buckets(buckets: Sequence[ItemBucket], options: SaveOptions) -> list[list[WriteResult]]:
    """Write buckets of one directory in this process, bytes_data first; for each the results of its items, objects
    first.
    """
    if not buckets:
        return []
    storage = storage_at(Path(buckets[0].path).parent).within(options.write_deadline_s)
    prepared = [_to_write(bucket) for bucket in buckets]
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


def _to_write(bucket: ItemBucket) -> tuple[WriteBucket, list[WriteResult]]:
    """The same bucket without DCP's items, and the results of all its items when it is written."""
    name = Path(bucket.path).name
    blobs = [(item, memoryview(data.getvalue())) for item, data in bucket.data.bytes_data]
    for item, blob in blobs:
        warn_of_refused(item.index.fqn, blob)
    specs = [_spec(item, tensor) for item, tensor in bucket.data.tensor_data]
    layout, _ = lay_out_file(name, specs, [item.index.fqn for item, _ in blobs], [len(blob) for _, blob in blobs])
    tensors = [_plain(tensor) for _, tensor in bucket.data.tensor_data]
    to_write = fill_bucket(layout, name, bucket.save_id, [blob for _, blob in blobs], tensors)
    places = [(item, offset, len(blob)) for (item, blob), offset in zip(blobs, to_write.offsets, strict=True)]
    places += [
        (item, offset, template.item_bytes)
        for (item, _), template, offset in zip(
            bucket.data.tensor_data, layout.templates, layout.item_offsets, strict=True
        )
    ]
    return to_write, [
        WriteResult(item.index, length, _StorageInfo(bucket.storage_key, offset, length))
        for item, offset, length in places
    ]


def _spec(item: WriteItem, tensor: torch.Tensor) -> TensorSpec:
    data, sizes = item.tensor_data, tuple(tensor.shape)
    shape, offsets = (sizes, (0,) * len(sizes)) if data is None else (tuple(data.size), tuple(data.chunk.offsets))
    return TensorSpec(item.index.fqn, dtype_name(tensor.dtype), shape, offsets, sizes, tensor.nbytes)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values as they are in memory: pending conjugation and negation carried out."""
    return tensor.detach().resolve_conj().resolve_neg()


def save_buckets(
    options: SaveOptions,
    owner_pid: int,
    rank: int,
    buckets: list[ItemBucket],
    results: ResultFile,
) -> None:
    """Body of an async save; runs in the trainer or a forked child, and reports through `results`."""
    threads = torch.get_num_threads()
    elsewhere = os.getpid() != owner_pid
    if elsewhere:
        torch.set_num_threads(1)  # a fork has none of the threads that OpenMP believes to have, and would wait for them
    try:
        results.put(write_buckets(buckets, options))
    except Exception as error:  # noqa: BLE001  (whatever it is, the trainer raises it)
        results.put(SaveError(f"rank {rank}: {error}"))
    finally:
        if elsewhere:
            torch.set_num_threads(threads)
