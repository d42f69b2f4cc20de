"""What is compared: each adapter saves and loads the same shards in its own way."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from benchmarks.state import Shard
from mcore_ckpt.storage.base import align_up
from mcore_ckpt.storage.direct_io import aligned_buffer

__all__ = ["ADAPTERS", "Adapter", "do_nothing_save"]

_PIECE_BYTES = 8 * 1024 * 1024


class Adapter:
    """One way to save and load. Every rank makes one and keeps it for all rounds.

    Attributes:
        name: in tables.
        can_async: it has an asynchronous save.
    """

    name = ""
    can_async = False

    def prepare(self, shards: list[Shard]) -> Any:
        """What `save` and `load` take, made outside the measured time."""
        return shards

    def look(self, state: Any, path: Path, cold: bool) -> None:
        """What may be found out about a checkpoint before its load is measured; nothing, for whoever is compared."""

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
    """The device: the same number of bytes by O_DIRECT in 8 MB pieces, one file a rank.

    The buffer lies in huge pages where there are some, as those of this package do: a device is faster from them.
    """

    name = "raw"

    def __init__(self) -> None:
        self._buffer = aligned_buffer(_PIECE_BYTES)
        self._buffer[:] = os.urandom(_PIECE_BYTES)

    def save(self, state: list[Shard], path: Path) -> None:
        size = sum(shard.tensor.nbytes for shard in state)
        fd = os.open(path / f"raw{dist.get_rank()}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT)
        for offset in range(0, size, _PIECE_BYTES):
            os.pwrite(fd, self._buffer[: align_up(min(_PIECE_BYTES, size - offset))], offset)
        os.fsync(fd)
        os.close(fd)

    def load(self, state: list[Shard], path: Path) -> None:
        """Reads as many bytes as the state has, out of whatever files there are, each rank its share of each file."""
        wanted = sum(shard.tensor.nbytes for shard in state)
        files = sorted(file for file in path.iterdir() if file.stat().st_size > 1024 * 1024)
        total = sum(file.stat().st_size for file in files)
        rank, world = dist.get_rank(), dist.get_world_size()
        for file in files:
            share = align_up(int(min(1.0, wanted * world / total) * file.stat().st_size / world))
            start = int(rank * file.stat().st_size / world) // 4096 * 4096
            fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
            done = 0
            while done < share:
                count = os.preadv(fd, [self._buffer[: min(_PIECE_BYTES, share - done)]], start + done)
                if count <= 0:
                    break
                done += count
            os.close(fd)


class Ours(Adapter):
    """This package's strategies, under Megatron's `dist_checkpointing`."""

    name = "mcore_ckpt"
    can_async = True
    save_options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        from mcore_ckpt import AsyncCallsQueue, TorchDistLoadStrategy

        self._save, self._load, self._queue = self._strategy(), TorchDistLoadStrategy, AsyncCallsQueue()

    def _strategy(self) -> Any:
        from mcore_ckpt import SaveOptions, TorchDistSaveStrategy

        return TorchDistSaveStrategy(options=SaveOptions(**self.save_options))

    def prepare(self, shards: list[Shard]) -> Any:
        return _megatron_state(shards)

    def save(self, state: Any, path: Path) -> None:
        _checkpointing().save(dict(state), str(path), self._save, validate_access_integrity=False)

    def load(self, state: Any, path: Path) -> None:
        _checkpointing().load(dict(state), str(path), self._load(), validate_access_integrity=False)

    def start(self, state: Any, path: Path) -> Callable[[bool], bool]:
        request = _checkpointing().save(
            dict(state), str(path), self._save, validate_access_integrity=False, async_sharded_save=True
        )
        self._queue.schedule_async_request(request)
        return lambda blocking: bool(self._queue.maybe_finalize_async_calls(blocking=blocking))

    def warm_up(self, state: Any) -> None:
        self._save.warm_up(state)


class OursReplanned(Ours):
    """Every save by a strategy that has not seen the structure before, so that all of it is planned."""

    name = "mcore_ckpt replanned"

    def save(self, state: Any, path: Path) -> None:
        self._save = self._strategy()
        super().save(state, path)

    def start(self, state: Any, path: Path) -> Callable[[bool], bool]:
        self._save = self._strategy()
        return super().start(state, path)


class Megatron(Adapter):
    """Stock megatron-core."""

    name = "megatron"
    can_async = True
    persistent = False

    def __init__(self) -> None:
        from megatron.core.dist_checkpointing.strategies import async_utils
        from megatron.core.dist_checkpointing.strategies import torch as strategies

        self._save = strategies.TorchDistSaveShardedStrategy("torch_dist", 1)
        self._load = strategies.TorchDistLoadShardedStrategy
        self._queue = async_utils.AsyncCallsQueue(self.persistent)

    def prepare(self, shards: list[Shard]) -> Any:
        return _megatron_state(shards)

    def save(self, state: Any, path: Path) -> None:
        _checkpointing().save(dict(state), str(path), self._save, validate_access_integrity=False)

    def load(self, state: Any, path: Path) -> None:
        _checkpointing().load(dict(state), str(path), self._load(), validate_access_integrity=False)

    def start(self, state: Any, path: Path) -> Callable[[bool], bool]:
        request = _checkpointing().save(
            dict(state), str(path), self._save, validate_access_integrity=False, async_sharded_save=True
        )
        self._queue.schedule_async_request(request)
        return lambda blocking: bool(self._queue.maybe_finalize_async_calls(blocking=blocking))


class Dcp(Adapter):
    """Stock torch.distributed.checkpoint, two threads, DTensors."""

    name = "dcp"
    can_async = True

    def __init__(self) -> None:
        # Its asynchronous save runs collectives in a thread, which must not meet those of the benchmark.
        self._group = dist.new_group(backend="gloo")

    def prepare(self, shards: list[Shard]) -> Any:
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

        def finalize(blocking: bool) -> bool:
            if not blocking and not future.done():
                return False
            future.result()
            return True

        return finalize


ADAPTERS: dict[str, type[Adapter]] = {cls.name: cls for cls in (Raw, Ours, OursReplanned, Megatron, Dcp)}


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
