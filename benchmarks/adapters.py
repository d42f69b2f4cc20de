"""What is compared: each adapter saves and loads the same shards in its own way."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from benchmarks.machine import private_memory
from benchmarks.state import Shard

__all__ = ["ADAPTERS", "Adapter", "McoreCkpt", "do_nothing_save", "dtensors"]

_PIECE_BYTES = 8 * 1024 * 1024
_PAGE_BYTES = 4096


class Adapter:
    """One way to save and load. Every rank makes one and keeps it for all rounds.

    Attributes:
        isolates: an asynchronous save that holds later values is an error; for baselines it is recorded.
    """

    isolates = False

    def prepare(self, shards: list[Shard]) -> Any:
        """What `save` and `load` take, made outside the measured time."""
        return shards

    def look(self, state: Any, path: Path, cold: bool) -> None:
        """What may be found out about a checkpoint before its load is measured; only lower bounds do."""

    def launch(self) -> None:
        """Start what a training job starts before its first asynchronous save."""

    def save(self, state: Any, path: Path) -> None:
        """Save and make durable."""
        raise NotImplementedError

    def load(self, state: Any, path: Path) -> None:
        """Load into the tensors in place."""
        raise NotImplementedError

    def start(self, state: Any, path: Path) -> Callable[[bool], bool]:
        """Begin an asynchronous save; the function returned finalizes it (waits if told to) and says if it is done."""
        raise NotImplementedError

    def warm_up(self, state: Any) -> None:
        """Do ahead of the first asynchronous save what can be done then; nothing where there is no such call."""


class Raw(Adapter):
    """The device: the same number of bytes by O_DIRECT in 8 MB pieces, one file a rank, from buffers in huge pages.
    As many pieces are in flight at once as this package has of its own by default.
    """

    WRITES, READS = 2, 4

    def __init__(self) -> None:
        self._buffers: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(max(self.WRITES, self.READS)):
            view = memoryview(private_memory(_PIECE_BYTES))
            view[:] = os.urandom(_PIECE_BYTES)
            self._buffers.put(view)

    def _do(self, move: Callable[[memoryview, int], int], start: int, stop: int, threads: int) -> None:
        def piece(offset: int) -> None:
            buffer = self._buffers.get()
            try:
                move(buffer[: _aligned(min(_PIECE_BYTES, stop - offset))], offset)
            finally:
                self._buffers.put(buffer)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(piece, range(start, stop, _PIECE_BYTES)))

    def save(self, state: list[Shard], path: Path) -> None:
        size = sum(shard.tensor.nbytes for shard in state)
        fd = os.open(path / f"raw{dist.get_rank()}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT)
        self._do(lambda view, offset: os.pwrite(fd, view, offset), 0, size, self.WRITES)
        os.fsync(fd)
        os.close(fd)

    def load(self, state: list[Shard], path: Path) -> None:
        """Reads as many bytes as the state has, out of whatever files there are, each rank its share of each file."""
        needed = sum(shard.tensor.nbytes for shard in state)
        files = sorted(file for file in path.iterdir() if file.stat().st_size > 1024 * 1024)
        total = sum(file.stat().st_size for file in files)
        rank, world = dist.get_rank(), dist.get_world_size()
        for file in files:
            size = file.stat().st_size
            start = int(rank * size / world) // _PAGE_BYTES * _PAGE_BYTES
            stop = min(size, start + _aligned(int(min(1.0, needed * world / total) * size / world)))
            fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
            self._do(partial(_preadv, fd), start, stop, self.READS)
            os.close(fd)


def _preadv(fd: int, view: memoryview, offset: int) -> int:
    return os.preadv(fd, [view], offset)


class _UnderMegatron(Adapter):
    """Any strategy under Megatron's `dist_checkpointing`."""

    _save: Any
    _load: Any
    _queue: Any
    _async_arguments: ClassVar[dict[str, Any]] = {}

    def prepare(self, shards: list[Shard]) -> Any:
        return _megatron_state(shards)

    def save(self, state: Any, path: Path) -> None:
        _checkpointing().save(dict(state), str(path), self._save, validate_access_integrity=False)

    def load(self, state: Any, path: Path) -> None:
        _checkpointing().load(dict(state), str(path), self._load(), validate_access_integrity=False)

    def start(self, state: Any, path: Path) -> Callable[[bool], bool]:
        request = _checkpointing().save(
            dict(state),
            str(path),
            self._save,
            validate_access_integrity=False,
            async_sharded_save=True,
            **self._async_arguments,
        )
        self._queue.schedule_async_request(request)
        return lambda blocking: bool(self._queue.maybe_finalize_async_calls(blocking=blocking))


class McoreCkpt(_UnderMegatron):
    """This package, installed as in a job: its reader of the common state, too."""

    isolates = True

    def __init__(self) -> None:
        from mcore_ckpt import AsyncCallsQueue, install

        install()
        self._save, self._queue = self.save_strategy(), AsyncCallsQueue()

    def save_strategy(self) -> Any:
        """A strategy that has not saved anything."""
        from mcore_ckpt import TorchDistSaveStrategy

        return TorchDistSaveStrategy()

    def _load(self) -> Any:
        from mcore_ckpt import TorchDistLoadStrategy

        return TorchDistLoadStrategy()

    def warm_up(self, state: Any) -> None:
        self._save.warm_up(state)


class _Replanned(McoreCkpt):
    """Every save by a strategy that has not seen the structure before, so that all of it is planned."""

    def save(self, state: Any, path: Path) -> None:
        self._save = self.save_strategy()
        super().save(state, path)

    def start(self, state: Any, path: Path) -> Callable[[bool], bool]:
        self._save = self.save_strategy()
        return super().start(state, path)


class _Certified(McoreCkpt):
    """Each load ends with a certificate of one tensor in 32, as a resume of Megatron's does."""

    certify = "sample"

    def load(self, state: Any, path: Path) -> None:
        from mcore_ckpt import LoadOptions, TorchDistLoadStrategy, certify

        strategy = TorchDistLoadStrategy()
        _checkpointing().load(dict(state), str(path), strategy, validate_access_integrity=False)
        certify(state, path, options=LoadOptions(certify=self.certify), reader=strategy.reader)  # type: ignore[arg-type]


class _CertifiedWhole(_Certified):
    certify = "warn"


class _Megatron(_UnderMegatron):
    """Megatron-Core's strategies with the persistent worker, as `--async-save --use-persistent-ckpt-worker` has it."""

    constant_structure = False

    def __init__(self) -> None:
        from megatron.core.dist_checkpointing.strategies import torch as strategies

        self._save = strategies.TorchDistSaveShardedStrategy("torch_dist", 1, **self._strategy_arguments)
        self._save.use_cached_ckpt_structure = self.constant_structure
        self._load = strategies.TorchDistLoadShardedStrategy

    @property
    def _strategy_arguments(self) -> dict[str, Any]:
        return {}

    def launch(self) -> None:
        """What `init_persistent_async_worker` of the version does, which has no other way in than parsed arguments."""
        from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async

        self._queue = async_utils.AsyncCallsQueue(persistent=True)
        if hasattr(self._queue, "warmup_persistent_caller"):  # since 0.17
            self._async_arguments = {"async_strategy": "mcore"}
            self._queue.warmup_persistent_caller(dist.get_rank(), mp_mode="spawn")
            filesystem_async.get_write_results_queue(mp_mode="fork")


class _MegatronConstant(_Megatron):
    constant_structure = True


class _Nvrx(_Megatron):
    """Megatron-Core with `--async-strategy nvrx --async-ckpt-use-cpu-shm`."""

    _async_arguments: ClassVar[dict[str, Any]] = {"async_strategy": "nvrx"}

    @property
    def _strategy_arguments(self) -> dict[str, Any]:
        return {"cpu_shm_mode": True}

    def launch(self) -> None:
        from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

        _, modules = get_async_strategy("nvrx")
        self._queue = modules["AsyncCallsQueue"](persistent=True, cpu_shm_mode=True)
        self._queue.warmup_persistent_caller(dist.get_rank(), cpu_shm_mode=True)
        modules["get_write_results_queue"](mp_mode="fork")


class _NvrxConstant(_Nvrx):
    constant_structure = True


class _Dcp(Adapter):
    """torch.distributed.checkpoint, two threads, DTensors."""

    def __init__(self) -> None:
        # Its asynchronous save runs collectives in a thread, which must not meet those of the benchmark.
        self._group = dist.new_group(backend="gloo")

    def prepare(self, shards: list[Shard]) -> Any:
        return dtensors(shards)

    def save(self, state: Any, path: Path) -> None:
        from torch.distributed import checkpoint

        checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(path, thread_count=2))

    def load(self, state: Any, path: Path) -> None:
        from torch.distributed import checkpoint

        checkpoint.load(state, storage_reader=checkpoint.FileSystemReader(path))

    def start(self, state: Any, path: Path) -> Callable[[bool], bool]:
        from torch.distributed import checkpoint

        future: Any = checkpoint.async_save(
            state, storage_writer=checkpoint.FileSystemWriter(path, thread_count=2), process_group=self._group
        )
        return lambda blocking: _done(future, blocking)


class _TorchCheckpointing(Adapter):
    """`torch_checkpointing` on CPUs, as docs/benchmark.md says what is changed for that."""

    def __init__(self) -> None:
        from torch_checkpointing.metadata_manager import DefaultMetadataManager

        # It exchanges metadata by tensors on "cuda"; the same exchange for CPUs.
        DefaultMetadataManager._all_gather_pickled_data = _gathered_by_rank  # noqa: SLF001
        self._sync = self._manager(asynchronous=False)

    def _manager(self, asynchronous: bool) -> Any:
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
        from torch_checkpointing.default_resharder import DefaultResharder
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        config = CheckpointManager.Config(
            items={"model": ItemSpec(resharder=DefaultResharder())},
            save=AsyncCheckpointSaverConfig(staging_config=staging) if asynchronous else SyncCheckpointSaverConfig(),
            # ext4 refuses its O_DIRECT writes (EINVAL): they are not aligned.
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
        )
        return CheckpointManager(config)

    def prepare(self, shards: list[Shard]) -> Any:
        return {"model": dtensors(shards)}

    def launch(self) -> None:
        self._async = self._manager(asynchronous=True)

    def save(self, state: Any, path: Path) -> None:
        self._sync.save(str(path / "saved"), state)
        _sync_files(path / "saved")

    def load(self, state: Any, path: Path) -> None:
        self._sync.load(str(path / "saved"), into=state)

    def start(self, state: Any, path: Path) -> Callable[[bool], bool]:
        future = self._async.save(str(path / "saved"), state)
        with self._async.lock():  # a trainer takes it before it changes its state
            pass

        def finalize(blocking: bool) -> bool:
            if not _done(future, blocking):
                return False
            _sync_files(path / "saved")
            return True

        return finalize


ADAPTERS: dict[str, type[Adapter]] = {
    "raw": Raw,
    "mcore_ckpt": McoreCkpt,
    "replanned": _Replanned,
    "certified": _Certified,
    "certified whole": _CertifiedWhole,
    "megatron": _Megatron,
    "megatron constant": _MegatronConstant,
    "nvrx": _Nvrx,
    "nvrx constant": _NvrxConstant,
    "torch_checkpointing": _TorchCheckpointing,
    "dcp": _Dcp,
}


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


def _done(future: Any, blocking: bool) -> bool:
    if not blocking and not future.done():
        return False
    future.result()
    return True


def _gathered_by_rank(_: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    gathered: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, data, group=process_group)
    return dict(enumerate(gathered))


def _sync_files(path: Path) -> None:
    """Make durable what was saved: each rank syncs its share of the files."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    for file in files[dist.get_rank() :: dist.get_world_size()]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def dtensors(shards: list[Shard]) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as Split

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        shard.key: DTensor.from_local(
            shard.tensor,
            mesh,
            [Split(shard.axis)],
            run_check=False,
            shape=torch.Size(shard.global_shape),
            stride=(shard.global_shape[1], 1),
        )
        for shard in shards
    }


def _checkpointing() -> Any:
    from megatron.core import dist_checkpointing

    return dist_checkpointing


def _megatron_state(shards: list[Shard]) -> dict[str, Any]:
    from megatron.core.dist_checkpointing import ShardedTensor

    return {
        shard.key: ShardedTensor(
            shard.key,
            shard.tensor,
            shard.tensor.dtype,
            tuple(shard.tensor.shape),
            shard.global_shape,
            shard.offsets,
            None,
        )
        for shard in shards
    }


def do_nothing_save(state: dict[str, Any], path: Path) -> None:
    """Megatron's part of an asynchronous save, without any of a strategy's."""
    from mcore_ckpt import TorchDistSaveStrategy

    class DoNothing(TorchDistSaveStrategy):
        def async_save(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(finalize_fns=[])

    _checkpointing().save(dict(state), str(path), DoNothing(), validate_access_integrity=False, async_sharded_save=True)
