"""`FileSystemWriterAsync`: a storage writer for torch.distributed.checkpoint that keeps objects apart from tensors.

    plan -> prepare_write_data -> buckets (bytes_data | tensor_data)
         -> write_preloaded_data, in this process or a forked one -> write results
         -> finish: compared with the plan, item by item, and published

It serves `dcp.save(state_dict, storage_writer=...)` and `dcp.async_save`, and code written for Megatron's writer of the
same name: for that code there are `get_save_function_and_args`, `preload_tensors`, `write_preloaded_data` and
`retrieve_write_results`, whose buckets hold DCP's write items (`ItemBucket`). They become the columns and the
`WriteBucket`s that the strategies make, and are written by the same `write_preloaded_data`.

`MCoreSavePlanner` is DCP's default planner, which checks that the chunks make up each tensor.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import io
import math
import os
import pickle
import secrets
import threading
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from traceback import StackSummary, extract_tb
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from mcore_ckpt.core.boxes import Box, covers
from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError, PlanError, SaveError
from mcore_ckpt.core.options import SaveOptions, checkpoint_path, is_supported, store_url
from mcore_ckpt.core.process import collector_paused
from mcore_ckpt.core.ranks import own_rank, without_modes
from mcore_ckpt.directory.commit import Commit, check_files, discard, open_target
from mcore_ckpt.directory.in_force import is_in_force
from mcore_ckpt.format.index import (
    CheckpointIndex,
    ObjectEntry,
    StoredChunk,
    StoredItem,
    TensorEntry,
    is_compressed,
    of_different_offsets,
)
from mcore_ckpt.format.integrity import DATA_SUFFIX, NO_SAVE_ID, SAVE_ID_BYTES, ManifestFile, shown_id, with_id
from mcore_ckpt.format.metadata_read import COMMON_FILE, INTEGRITY_FILE
from mcore_ckpt.format.metadata_write import MetadataEncoder, manifest_of
from mcore_ckpt.format.safe_pickle import warn_of_refused
from mcore_ckpt.image.layout import TensorSpec, WriteBucket, WrittenFile, fill_bucket, lay_out_file
from mcore_ckpt.save.planner import check_hint, split_buckets
from mcore_ckpt.save.staging import write_in_process
from mcore_ckpt.state.shards import carry_layout, check_memory, dtype_name
from mcore_ckpt.storage.base import Storage
from mcore_ckpt.storage.resolve import storage_at


class MCoreSavePlanner(DefaultSavePlanner):
    """Plans a save as DCP's default planner does, and checks that the chunks make up each tensor.

    Args:
        dedup_replicated_tensors: accepted for Megatron's sake; replicas are never written twice.
        can_run_decentralized_global_plan: accepted for Megatron's sake; the coordinator plans.
        options: as in DCP's default planner.
    """

    def __init__(
        self,
        *,
        dedup_replicated_tensors: bool | None = None,
        can_run_decentralized_global_plan: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)

    @without_modes()
    def create_local_plan(self) -> SavePlan:
        return super().create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The coordinator's part: deduplicate what is replicated, and check that the chunks make up each tensor.

        Raises:
            PlanError: a chunk is planned twice, is missing, or lies outside its tensor; names the key.
        """
        try:
            plans, metadata = super().create_global_plan(all_plans)
        except (ValueError, AssertionError) as error:
            raise PlanError(f"the ranks' plans do not fit together: {error}") from error
        for key, stored in metadata.state_dict_metadata.items():
            if isinstance(stored, TensorStorageMetadata):
                boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
                problem = covers(tuple(stored.size), boxes)
                if problem:
                    raise PlanError(f"{key}: {problem}")
        return plans, metadata


def _refuse(extensions: Iterable[Any]) -> None:
    """Raise `OptionError` if there is a stream transform."""
    if any(True for _ in extensions):
        raise OptionError("stream transforms (`_extensions`) are not supported; save with DCP's own FileSystemWriter")


def compare_items(metadata: Metadata, written: Counter[MetadataIndex], path: str) -> None:
    """Raise `SaveError` unless each item that the metadata promises was written once, and nothing else."""
    planned: Counter[MetadataIndex] = Counter()
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            planned[MetadataIndex(key)] += 1
        else:
            planned.update(MetadataIndex(key, chunk.offsets) for chunk in stored.chunks)
    missing, excess = planned - written, written - planned
    if missing or excess:
        examples = ", ".join(f"{index.fqn} at {index.offset}" for index in list(chain(missing, excess))[:5])
        raise SaveError(
            f"{path}: {sum(missing.values())} planned items were not written and {sum(excess.values())} written items"
            f" were not planned ({examples}); the checkpoint is not published"
        )


_DCP_VERSION = "1.0.0"


@dataclasses.dataclass(eq=False)
class _Save:
    """One save of a writer: where it goes, and what it has begun there."""

    path: Path
    storage: Storage
    save_id: bytes = dataclasses.field(default_factory=partial(secrets.token_bytes, SAVE_ID_BYTES))
    is_coordinator: bool = False
    thread: threading.Thread | None = None  # that begins and ends it, if one does
    target: Commit | None = None  # the directory, locked

    def give_up(self) -> None:
        """Release the directory."""
        target, self.target = self.target, None
        if target is not None:
            target.give_up()

    def is_over(self) -> bool:
        """Whether a synchronous save has ended or failed, by its thread: DCP tells no writer of others' errors."""
        if self.target is None or self.thread is None:
            return False
        if self.thread is threading.current_thread():
            return True
        if not self.thread.daemon:  # (as one that Python has not started)
            self.thread.join(0.1)  # DCP's thread tells of a failed save before it ends
        return not self.thread.is_alive()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Save, (self.path, self.storage)  # another process begins its own


class _OfThread(threading.local):
    """What one thread does by a writer."""

    path: Path | None = None  # that its `reset` has named for the save that it begins next
    save: _Save | None = None  # that it has begun

    def __reduce__(self) -> tuple[Any, ...]:
        return _OfThread, ()


# The saves of this process that have locked a directory last, by location.
_unfinished: weakref.WeakValueDictionary[str, _Save] = weakref.WeakValueDictionary()


class FileSystemWriterAsync(StorageWriter, BlockingAsyncStager):
    """Writes one rank's part of a checkpoint, and publishes the checkpoint on the coordinator. Threads that save at the
    same time have each a save of their own, at the path that their own `reset` has named, if any. A step of a thread
    that has begun none is one of the latest.

    Args:
        path: directory of the checkpoint, or its URL; a relative path is made absolute at once.
        single_file_per_rank: balanced buckets of many items; False writes each item into a file of its own.
        sync_files: accepted for DCP's sake; files are durable before the checkpoint is published.
        thread_count: files that each rank writes, at most; None takes it from `options`.
        per_thread_copy_ahead: accepted for DCP's sake; the writer copies one window ahead.
        cache_staged_state_dict: accepted for DCP's sake; `stage` takes memory for each call.
        overwrite: replace a checkpoint that is there (safely); False raises `CheckpointExistsError`.
        _extensions: DCP's stream transforms; refused.
        serialization_format: only DCP's `TORCH_SAVE`.
        separation_hint: items whose key starts with it go to files whose names start with it.
        use_msc: accepted for Megatron's sake; the path alone tells whether it names an object store.
        options: `SaveOptions`; None takes them from the environment.

    Raises:
        OptionError: a combination that cannot work, or a URL of an unknown kind.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int | None = None,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = None,
        *,
        separation_hint: str | None = None,
        use_msc: bool = False,
        options: SaveOptions | None = None,
    ) -> None:
        BlockingAsyncStager.__init__(self)
        if serialization_format is not None and getattr(serialization_format, "value", "") != "torch_save":
            raise OptionError(f"serialization_format={serialization_format}: only TORCH_SAVE is supported")
        _refuse(_extensions or ())
        options = SaveOptions.from_environment() if options is None else options
        self.options = dataclasses.replace(
            options,
            thread_count=options.thread_count if thread_count is None else thread_count,
            on_existing=options.on_existing if overwrite else "error",
        )
        self.single_file_per_rank = single_file_per_rank
        if separation_hint is not None:
            check_hint(separation_hint)
        self.separation_hint = separation_hint
        self.write_buckets: list[ItemBucket] | None = None
        self.results_queue: ResultFile | None = None
        self._own = _OfThread()
        self._latest = self._at(path)
        self.path = self._latest.path  # of the save that begins next, or has begun last

    def _at(self, path: str | os.PathLike[str]) -> _Save:
        # The directory that it names now: what writes and publishes later must not follow a `chdir`.
        path = checkpoint_path(path).absolute()
        if self.options.drain_to or self.options.export_to:
            from mcore_ckpt.save.upkeep import check_places

            check_places(path, self.options)
        return _Save(path, storage_at(path, deadline_s=self.options.write_deadline_s))

    @property
    def _save(self) -> _Save:
        return self._own.save or self._latest

    def _give_up(self) -> None:
        own, self._own.save = self._own.save, None
        if own is not None:
            own.give_up()

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory of the checkpoint."""
        return self.path

    checkpoint_dir = checkpoint_id  # Megatron's name for it

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True for a known URL, which is not asked, and for a path below a directory that is writable."""
        if not is_supported(checkpoint_id):
            return False
        if store_url(checkpoint_id) is not None:
            return True
        path = checkpoint_path(checkpoint_id).absolute()
        existing = next(place for place in (path, *path.parents) if place.exists())
        return existing.is_dir() and os.access(existing, os.W_OK)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save is to begin, at `checkpoint_id` if given. One that this thread has not finished is given up."""
        if checkpoint_id is not None:
            self.path = self._at(checkpoint_id).path
        self._own.path = self.path
        self._give_up()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save; DCP says who coordinates it. Raises `OptionError` for `use_collectives=False`."""
        if not kwargs.get("use_collectives", True):
            raise OptionError(
                f"{self._save.path}: use_collectives=False makes each rank a checkpoint of its own, which this writer "
                "does not; save with torch.distributed.checkpoint.FileSystemWriter, or with use_collectives=True"
            )
        self._give_up()
        path, self._own.path = self._own.path or self.path, None
        self._latest = self._own.save = save = self._at(path)
        save.thread, save.is_coordinator = threading.current_thread(), is_coordinator

    @property
    def save_id(self) -> str:
        """The id of the save that was begun last, as the checkpoint's metadata shows it; known on the coordinator."""
        return shown_id(self._latest.save_id)

    def storage_meta(self) -> StorageMeta:
        """DCP's note of which save this is."""
        return storage_meta({"checkpoint_id": str(self._save.path), "save_id": shown_id(self._save.save_id)})

    # -- planning ------------------------------------------------------------------------------------------------

    @without_modes()
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Lock the directory, before anything is written; refuse if there is a checkpoint that may not be replaced.

        The coordinator does so for all ranks.

        Raises:
            CheckpointExistsError: see `overwrite`.
            SaveError: another save holds the directory.
        """
        save = self._save
        save.storage.ensure()
        if save.is_coordinator:
            earlier = _unfinished.get(save.storage.location)
            if earlier is not None and earlier.is_over():
                earlier.give_up()
            save.target = open_target(save.storage, self.options)
            save.save_id = save.target.save_id
            _unfinished[save.storage.location] = save
        return plan

    @without_modes()
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: tell each rank how its files are named."""
        return [
            dataclasses.replace(plan, storage_data=DataFilePrefix(f"__{rank}_", self._save.save_id))
            for rank, plan in enumerate(plans)
        ]

    @without_modes()
    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Sort the plan's items into balanced buckets, objects apart from tensors, and hold on to their data.

        Tensors are detached. They are copied by `preload_tensors`, or when they are written.
        """
        self.write_buckets = self._prepared(plan, planner)
        self._save.thread = None
        self.results_queue = ResultFile() if self.write_buckets else None

    def _prepared(self, plan: SavePlan, planner: SavePlanner) -> list[ItemBucket]:
        """The plan's items in at most `thread_count` balanced buckets, or one for each, with their data."""
        prefix = plan.storage_data
        # A planner that caches plans puts back that of an earlier save: then the names carry an id of this rank's own.
        if not isinstance(prefix, DataFilePrefix) or prefix.is_used:
            prefix = DataFilePrefix(prefix.prefix, self._save.save_id)
        prefix.is_used = True
        chosen: list[tuple[str, list[int]]]
        if not self.single_file_per_rank:
            chosen = [("", [index]) for index in range(len(plan.items))]
        else:
            keys, sizes = [item.index.fqn for item in plan.items], [_item_bytes(item) for item in plan.items]
            chosen = split_buckets(keys, sizes, self.options.thread_count, self.separation_hint)
        resolve: Callable[[WriteItem], Any] = planner.resolve_data
        buckets = []
        for number, (hint, indices) in enumerate(chosen):
            name = with_id(f"{hint}{prefix.prefix}{number}{DATA_SUFFIX}", prefix.save_id)
            data = BucketData([], [])
            for item in map(plan.items.__getitem__, indices):
                if item.type == WriteItemType.BYTE_IO:
                    data.bytes_data.append((item, resolve(item)))
                else:
                    tensor = resolve(item).detach()
                    check_memory(tensor, partial(_where, item))
                    data.tensor_data.append((item, tensor))
            buckets.append(ItemBucket.of(str(self._save.path / name), name, *data, prefix.save_id))
        return buckets

    # -- writing -------------------------------------------------------------------------------------------------

    @without_modes()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write everything before the call returns; no process is started."""
        try:
            results = write_buckets(self._prepared(plan, planner), self.options)
        except BaseException:
            self._give_up()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(list(chain.from_iterable(results)))
        return future

    def get_save_function_and_args(
        self,
    ) -> tuple[Callable[..., None] | None, Callable[[], list[ItemBucket]] | None, list[Any]]:
        """What an async caller runs: `(save function, preload function, arguments)`.

        The arguments are `[rank, write buckets, results queue]`; the second is to be replaced by what the preload
        function returns. `(None, None, [])` if this rank has nothing to write.
        """
        if not self.write_buckets:
            return None, None, []
        rank, save = own_rank(), partial(save_buckets, self.options, os.getpid())
        return save, partial(self.preload_tensors, self.write_buckets), [rank, self.write_buckets, self.results_queue]

    @staticmethod
    @without_modes()
    def preload_tensors(write_buckets: list[ItemBucket], non_blocking: bool = True) -> list[ItemBucket]:
        """Copy all tensors to host memory of their own: the snapshot, for a process that is forked then.

        Args:
            write_buckets: the buckets to copy.
            non_blocking: queue all copies, then wait for those devices once.
        """
        devices: set[torch.device] = set()
        staged = []
        for bucket in write_buckets:
            bytes_data, tensor_data = bucket.data
            devices.update(tensor.device for _, tensor in tensor_data if not tensor.is_cpu)
            copies = [(item, tensor.to("cpu", non_blocking=non_blocking, copy=True)) for item, tensor in tensor_data]
            staged.append(ItemBucket.of(bucket.path, bucket.storage_key, bytes_data, copies, bucket.save_id))
        if non_blocking:
            for device in devices:
                torch.cuda.current_stream(device).synchronize()
        return staged

    @staticmethod
    @without_modes()
    def write_preloaded_data(
        transform_list: Sequence[Any],
        local_proc_idx: int,
        write_bucket: ItemBucket,
        results_queue: Any = None,
        count_queue: Any = None,
        use_fsync: bool = True,
        **options: Any,
    ) -> list[WriteResult]:
        """Write one bucket: its bytes_data, then its tensor_data.

        Args:
            transform_list: DCP's stream transforms (objects with `extensions`), none of which may have any.
            local_proc_idx: number of the bucket, which comes back with the results.
            write_bucket: the bucket, its tensors on the host.
            results_queue: also receives `(local_proc_idx, results or exception)`, if given.
            count_queue: for callers in Megatron's manner: one entry is taken and marked done at the end.
            use_fsync: accepted for Megatron's sake; the file is durable in any case.
            **options: fields of `SaveOptions`.

        Raises:
            SaveError: the file could not be written (unless the exception goes to `results_queue`).
        """
        outcome: list[WriteResult] | Exception
        try:
            _refuse(chain.from_iterable(getattr(transform, "extensions", ()) for transform in transform_list))
            [outcome] = write_buckets([write_bucket], SaveOptions.from_environment(**options))
        except Exception as error:
            if results_queue is None:
                raise
            outcome = error
        if results_queue is not None:
            results_queue.put((local_proc_idx, outcome))
        if count_queue is not None:
            count_queue.get()
            count_queue.task_done()
        return outcome if isinstance(outcome, list) else []

    def retrieve_write_results(self) -> list[WriteResult] | tuple[SaveError, StackSummary]:
        """What the save function wrote; or, if it failed or has not run, the error and its traceback.

        The error is returned in DCP's form (`WRAPPED_EXCEPTION`) and not raised: a caller gathers it from all ranks.
        """
        try:
            return self._results()
        except SaveError as error:
            return error, extract_tb(error.__traceback__)

    def _results(self) -> list[WriteResult]:
        if self.results_queue is None:
            return []
        outcome = self.results_queue.get()
        files, self.write_buckets, self.results_queue = len(self.write_buckets or ()), None, None
        if isinstance(outcome, BaseException):
            raise SaveError(f"Worker failure: writing {self._save.path} failed: {outcome}") from outcome
        if len(outcome) != files:
            raise SaveError(f"{self._save.path}: expected results of {files} files, got {len(outcome)}")
        return list(chain.from_iterable(outcome))

    @without_modes()
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator: publish the checkpoint, if what was written is exactly what was planned.

        Args:
            metadata: from the planner; completed with where each item lies.
            results: of all ranks.

        Raises:
            SaveError: an item is missing, was written twice, or was not planned. Nothing is published.
        """
        save = self._save
        target = save.target
        if target is None:
            raise SaveError(f"{save.path}: this save was given up; nothing of it is published")
        written = list(chain.from_iterable(results))
        ends: dict[str, int] = {}
        try:
            compare_items(metadata, Counter(result.index for result in written), str(save.path))
            for place in (result.storage_data for result in written):
                ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
            metadata.version = _DCP_VERSION
            metadata.storage_data = {result.index: result.storage_data for result in written}
            metadata.storage_meta = self.storage_meta()
            files, sums = _files_and_sums(written, target)
            content = encoded_metadata(metadata, save.path, save.save_id, files, sums)
            ends |= {name: files[name].size_bytes for name in ends if name in files}
            check_files(target, ends, at_least=True)
            if self.options.drain_to is not None:
                from mcore_ckpt.save.upkeep import note_drain

                note_drain(save.path, self.options, save.save_id, None, commits=True)
            target.publish(content, needed=ends, stale=(INTEGRITY_FILE,))
        except BaseException:
            save.give_up()
            if not (target.is_undecided or is_in_force(save.storage, save.save_id)):
                discard(save.storage, ends)
            raise
        save.target = self._own.save = None
        if self.options.has_upkeep:
            from mcore_ckpt.save.upkeep import checkpoint_published

            checkpoint_published(save.path, self.options)

    # -- dcp.async_save ------------------------------------------------------------------------------------------

    @without_modes()
    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of a state dict on the host that nothing the trainer does can change: tensors, views and objects.
        This thread begins a save by that, and DCP's continues it.
        """
        self._give_up()
        staged: dict[str, Any] = _copy(state_dict, {}, ())
        return staged


def _files_and_sums(
    written: Sequence[WriteResult], target: Commit
) -> tuple[dict[str, ManifestFile], dict[tuple[str, int], ItemSums]]:
    """The files of a save, and the checksums of the items that this package wrote, by file and offset."""
    found = {
        (result.storage_data.relative_path, result.storage_data.offset): result.sums
        for result in written
        if isinstance(result, _SummedResult) and result.sums is not None
    }
    files = {file: sums.file for (file, _), sums in sorted(found.items(), key=lambda pair: pair[0])}
    if (common := target.common_file) is not None:  # that was written ahead of the save
        files[COMMON_FILE] = common
    return files, found


def _copy(value: Any, done: dict[int, tuple[Any, Any]], path: tuple[Any, ...]) -> Any:
    if id(value) in done:
        return done[id(value)][1]
    copied: Any
    if isinstance(value, torch.Tensor):
        local = getattr(value, "_local_tensor", value)  # of a DTensor
        if local.layout == torch.strided and not hasattr(local, "__create_chunk_list__"):
            check_memory(local.detach(), lambda: ".".join(map(str, path)))
        copied = carry_layout(value, _copy_tensor(value))
    elif isinstance(value, dict):
        copied = {key: _copy(item, done, (*path, key)) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        make: Any = list if isinstance(value, list) else getattr(value, "_make", tuple)  # a named one, too
        copied = make(_copy(item, done, (*path, number)) for number, item in enumerate(value))
    else:
        copied = copy.deepcopy(value)
    done[id(value)] = value, copied  # kept: no other value gets its id
    return copied


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    source = tensor.detach()
    if type(source) is not torch.Tensor:
        # DTensor and its like know how to move their local part.
        return source.clone() if source.device.type == "cpu" else source.to("cpu", copy=True)
    return torch.empty(source.shape, dtype=source.dtype, device="cpu").copy_(source)


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


def _where(item: WriteItem) -> str:
    return item.index.fqn if item.index.offset is None else f"{item.index.fqn} at offset {tuple(item.index.offset)}"


def write_buckets(buckets: Sequence[ItemBucket], options: SaveOptions) -> list[list[WriteResult]]:
    """Write buckets in this process, bytes_data first; returns for each the results of its items, objects first."""
    if not buckets:
        return []
    storage = storage_at(Path(buckets[0].path).parent, deadline_s=options.write_deadline_s)
    to_write = [_to_write(bucket) for bucket in buckets]
    return list(map(_results, buckets, to_write, write_in_process(storage, to_write, options)))


def _to_write(bucket: ItemBucket) -> WriteBucket:
    """The bucket without DCP's items."""
    name, blobs = Path(bucket.path).name, [memoryview(data.getvalue()) for _, data in bucket.data.bytes_data]
    keys = [item.index.fqn for item, _ in bucket.data.bytes_data]
    for key, blob in zip(keys, blobs, strict=True):
        warn_of_refused(key, blob)
    specs = [_spec(item, tensor) for item, tensor in bucket.data.tensor_data]
    layout, _ = lay_out_file(name, specs, keys, list(map(len, blobs)))
    # Pending conjugation and negation are carried out in what is written.
    tensors = [tensor.detach().resolve_conj().resolve_neg() for _, tensor in bucket.data.tensor_data]
    return fill_bucket(layout, name, bucket.save_id, blobs, tensors)


def _results(bucket: ItemBucket, to_write: WriteBucket, written: WrittenFile) -> list[WriteResult]:
    """The results of a file's items, objects first, with their checksums, and what its tensors add to fingerprints."""
    layout, file = to_write.layout, ManifestFile(written.size_bytes, written.table_crc32, bucket.save_id)
    counts = dict(zip(written.long_payloads, written.inner_blocks, strict=True))
    ends = list(accumulate((counts.get(n, 0) for n in range(len(written.crcs))), initial=0))
    blocks = [written.blocks[a:b] for a, b in pairwise(ends)] if counts else [array("I")] * len(written.crcs)
    sums = [ItemSums(file, crc, array("I")) for crc in written.object_crcs]
    strided = dict(written.parts)
    from mcore_ckpt.core.fingerprints import part_of_run  # (a trainer that saves by a strategy does not come here)

    for number, (crc, running) in enumerate(zip(written.crcs, blocks, strict=True)):
        part = strided[number] if number in strided else part_of_run(crc, layout.specs[number].stretch())
        sums.append(ItemSums(file, crc, running, part))
    offsets = [*to_write.offsets, *layout.item_offsets]
    lengths = [*map(len, to_write.bytes_data), *(template.item_bytes for template in layout.templates)]
    items = (item for half in bucket.data for item, _ in half)
    return [
        _SummedResult(item.index, length, _StorageInfo(bucket.storage_key, offset, length), own)
        for item, offset, length, own in zip(items, offsets, lengths, sums, strict=True)
    ]


def _spec(item: WriteItem, tensor: torch.Tensor) -> TensorSpec:
    data, sizes = item.tensor_data, tuple(tensor.shape)
    shape, offsets = (sizes, (0,) * len(sizes)) if data is None else (tuple(data.size), tuple(data.chunk.offsets))
    return TensorSpec(item.index.fqn, dtype_name(tensor.dtype), shape, offsets, sizes, tensor.nbytes)


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


# --- `.metadata` ------------------------------------------------------------------------------------------------------

# Versions of torch differ in the fields of these classes. What one of them lacks is set all the same, and not read
# there; what is written is what the oldest one reads.


def storage_meta(fields: Mapping[str, Any]) -> StorageMeta:
    """DCP's note of which save this is; where the installed torch lacks a field (`modules` in 2.6), nobody reads it."""
    meta = StorageMeta()
    vars(meta).update(fields)
    return meta


# What torch <= 2.14 reads of a pickled TensorProperties; 2.15 appends the strides, and reads five values as well.
_PROPERTIES = 5


def _reduced_properties(properties: Any) -> tuple[Any, ...]:
    return copyreg.__newobj__, (TensorProperties,), properties.__getstate__()[:_PROPERTIES]  # type: ignore[attr-defined]


def _pickled_metadata(metadata: Metadata) -> bytes:
    """`metadata` as DCP pickles it, in a form that older versions of torch read, too."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: _reduced_properties}
    pickler.dump(metadata)
    return stream.getvalue()


class ItemSums(NamedTuple):
    """The checksums of a written item, and its file."""

    file: ManifestFile
    crc32: int  # of its payload; of an object, of all of it
    blocks: array[int]  # cumulative CRC-32 at each block boundary inside a long payload
    part: int | None = None  # what it adds to the fingerprint of its tensor; None where that is not known


@collector_paused()
def encoded_metadata(
    metadata: Metadata,
    path: str | Path,
    save_id: bytes,
    files: Mapping[str, ManifestFile],
    sums: Mapping[tuple[str, int], ItemSums],
) -> bytes:
    """The content of `.metadata` for what DCP has planned; no manifest where an item has no `sums`."""
    if type(metadata).__name__ not in _KNOWN_METADATA or not _KNOWN_ATTRIBUTES.issuperset(vars(metadata)):
        return _pickled_metadata(metadata)  # of a planner that keeps more in it than anybody knows
    index = index_of(metadata, path, {place: one.crc32 for place, one in sums.items()})
    tensors = dict(index.tensors)
    for key, entry in tensors.items():
        if len(entry.chunks) > 1 and (kept := of_different_offsets(entry.chunks)):
            tensors[key] = entry._replace(chunks=tuple([entry.chunks[n] for n in kept]))
    index = dataclasses.replace(
        index, tensors=tensors, blocks={place: one.blocks for place, one in sums.items() if one.blocks}
    )
    index = index.with_fingerprints(_fingerprints(index, sums))
    return MetadataEncoder(index).encode(
        index.objects,
        storage_meta=index.storage_meta,
        manifest=manifest_of(index, save_id, files),
    )


_KNOWN_METADATA = {"Metadata", "MCoreMetadata"}
_KNOWN_ATTRIBUTES = {
    *("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    "mcore_data",
}


def _fingerprints(index: CheckpointIndex, sums: Mapping[tuple[str, int], ItemSums]) -> dict[str, int]:
    """Fingerprints of the tensors that were saved in their own shape and have a checksum of each chunk."""
    found: dict[str, int] = {}
    for key, entry in index.tensors.items():
        if key in index.mcore_data:
            continue
        total = 0
        for chunk in entry.chunks:
            of_item = sums.get((chunk.item.file, chunk.item.offset))
            if of_item is None or of_item.part is None:
                break
            total ^= of_item.part
        else:
            found[key] = total
    return found


def index_of(metadata: Metadata, path: str | Path, crcs: Mapping[tuple[str, int], int]) -> CheckpointIndex:
    """What a `Metadata` describes; `crcs`: of items, by file and offset. Raises `CorruptCheckpointError`."""
    if not isinstance(metadata.storage_data, dict):
        raise CorruptCheckpointError(
            f"{path}: the metadata holds no storage data of DCP's file system writer (got "
            f"{type(metadata.storage_data).__name__}); expected a finished checkpoint of torch_dist or DCP"
        )
    items: dict[tuple[str, tuple[int, ...] | None], StoredItem] = {}
    for key, info in metadata.storage_data.items():
        offsets = None if key.offset is None else tuple(key.offset)
        compressed = is_compressed(getattr(info, "transform_descriptors", None), str(path), key.fqn)  # not in torch 2.6
        crc = crcs.get((info.relative_path, info.offset))
        items[key.fqn, offsets] = StoredItem(info.relative_path, info.offset, info.length, crc, compressed)

    def item_of(fqn: str, offsets: tuple[int, ...] | None) -> StoredItem:
        item = items.get((fqn, offsets))
        if item is None:
            at = "" if offsets is None else f", chunk at {list(offsets)},"
            raise CorruptCheckpointError(f"{path}: {fqn!r}{at} is in the index, but no file holds it")
        return item

    tensors: dict[str, TensorEntry] = {}
    objects: dict[str, ObjectEntry] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            stored = []
            for chunk in entry.chunks:
                offsets = tuple(chunk.offsets)
                stored.append(StoredChunk(offsets, tuple(chunk.sizes), item_of(fqn, offsets)))
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            tensors[fqn] = TensorEntry(
                fqn, dtype, tuple(entry.size), tuple(stored), bool(entry.properties.requires_grad)
            )
        else:
            objects[fqn] = ObjectEntry(fqn, item_of(fqn, None))
    meta = getattr(metadata, "storage_meta", None)
    fields = None
    if meta is not None:
        checkpoint_id = None if meta.checkpoint_id is None else str(meta.checkpoint_id)
        fields = {
            "checkpoint_id": checkpoint_id,
            "save_id": meta.save_id,
            "load_id": meta.load_id,
            "modules": list(getattr(meta, "modules", ())),
        }
    return CheckpointIndex(
        str(path),
        tensors,
        objects,
        planner_data=metadata.planner_data,
        mcore_data=getattr(metadata, "mcore_data", None) or {},
        storage_meta=fields,
        version=getattr(metadata, "version", None),
    )
