"""What planning a save costs a job of as many ranks as asked.

No rank is started. Plans of all ranks are made one after the other by the package's own code, the coordinator's part is
run on them, and each part is timed and weighed in a process of its own. What crosses the network is counted; what that
takes is worked out by a `Network`. For stock, Megatron-Core's and torch's functions are run in the same way.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import pickle
import resource
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mcore_ckpt.save.buckets import RankLayout, TensorSpec, lay_out_rank

__all__ = ["Job", "Network", "Ours", "Stock", "measure_ours", "measure_stock", "shard_of"]

T = TypeVar("T")

_SAVE_ID = bytes(range(16))


class Job(NamedTuple):
    """What is saved: `items` tensors of 1 KB a rank, of which each rank has a few rows."""

    ranks: int
    items: int

    def specs(self, rank: int) -> list[TensorSpec]:
        """The tensors that one rank writes."""
        shape, offsets, sizes = (4 * self.ranks, 64), (4 * rank, 0), (4, 64)
        keys = (f"model.layer{n:05}.weight" for n in range(self.items))
        return [TensorSpec(key, "float32", shape, offsets, sizes, 1024) for key in keys]


@dataclass(frozen=True, slots=True)
class Network:
    """Between hosts: seconds ahead of each message, bytes a second through one host's card; and the seconds of one
    processor that a message of a kilobyte takes, sent and received, as measured here.
    """

    latency_s: float
    bytes_per_s: float
    message_s: float

    def tree_s(self, ranks: int, nbytes: float = 0.0) -> float:
        """Up or down a binomial tree, `nbytes` in all at its root."""
        return math.ceil(math.log2(max(ranks, 2))) * (self.latency_s + self.message_s) + nbytes / self.bytes_per_s

    def ring_s(self, ranks: int, nbytes_each: float) -> float:
        """An all-gather in a ring, which is gloo's: each rank's bytes pass through every rank."""
        return (ranks - 1) * (self.latency_s + self.message_s + nbytes_each / self.bytes_per_s)

    def to_one_s(self, ranks: int, nbytes: float) -> float:
        """All to one, `nbytes` in all."""
        return self.latency_s + (ranks - 1) * self.message_s + nbytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Ours:
    """What the package's own code takes, in seconds of one processor, and bytes."""

    ranks: int
    items: int  # of all ranks
    lay_out_s: float  # the rank with the most items: its layout and its plan
    compare_s: float  # the same rank: whether its structure is that of the save before
    plan_bytes: int  # of all ranks
    check_s: float  # the coordinator: decode all plans and check them
    index_s: float  # the coordinator's writer process: `.metadata`
    results_bytes: int  # all ranks: what they tell the coordinator ahead of the commit
    metadata_bytes: int
    coordinator_bytes: int  # peak of the coordinator's memory, from the plans to the check
    index_bytes: int  # peak of its writer process's memory, from the plans to `.metadata`
    read_s: float  # a rank of a load: read `.metadata`
    requests_s: float  # and plan its reads

    def first_s(self, net: Network) -> float:
        """A first save, until training goes on."""
        return (
            self.lay_out_s
            + self.compare_s
            + 5 * net.tree_s(self.ranks)
            + net.to_one_s(self.ranks, self.plan_bytes)
            + self.check_s
        )

    def later_s(self, net: Network) -> float:
        """A save of the same structure."""
        return self.compare_s + 2 * net.tree_s(self.ranks)

    def commit_s(self, net: Network) -> float:
        """What finalizing exchanges; the coordinator's encoding of the checksums is in `index_s`."""
        return net.to_one_s(self.ranks, self.results_bytes) + 2 * net.tree_s(self.ranks)

    def load_s(self, net: Network, reads_per_s: float) -> float:
        """A load, ahead of its first read of data, if each rank reads `.metadata` at that many bytes a second."""
        return self.metadata_bytes / reads_per_s + self.read_s + self.requests_s


@dataclass(frozen=True, slots=True)
class Stock:
    """The same of Megatron-Core and torch."""

    ranks: int
    describe_s: float  # one rank: its description without data, pickled for all others
    describe_bytes: int  # of all ranks; each gets all of it
    unpickle_s: float  # one rank: all others' descriptions
    validate_s: float  # the coordinator: `validate_sharding_integrity`
    plan_s: float  # one rank: tensors for torch, and its plan
    plan_bytes: int  # of all ranks
    global_s: float  # the coordinator: unpickle all plans, the plan of all, checked; pickle them again

    def first_s(self, net: Network) -> float:
        """A first save, until training goes on; a later one takes the same but for `global_s` and the way back."""
        gathered = net.ring_s(self.ranks, self.describe_bytes / self.ranks) + self.unpickle_s + self.validate_s
        planned = self.plan_s + 2 * net.to_one_s(self.ranks, self.plan_bytes) + self.global_s
        return self.describe_s + gathered + planned

    def later_s(self, net: Network) -> float:
        """A later save with `--ckpt-assume-constant-structure`: the first exchange, and every rank's own plan."""
        gathered = net.ring_s(self.ranks, self.describe_bytes / self.ranks) + self.unpickle_s + self.validate_s
        return self.describe_s + gathered + self.plan_s + 2 * net.tree_s(self.ranks)

    def grown_to(self, ranks: int, smaller: Stock) -> Stock:
        """What it would be for more ranks, if each part goes on growing as between `smaller` and this."""
        steps = math.log(ranks / self.ranks) / math.log(self.ranks / smaller.ranks)
        grown = {}
        for name in self.__slots__:
            now, before = getattr(self, name), getattr(smaller, name)
            grown[name] = now * max(now / before, 1.0) ** steps
        return replace(self, **{**grown, "ranks": ranks})


def measure_ours(job: Job) -> Ours:
    """Run the package's code for all ranks of a job, in a process of its own."""
    return _elsewhere(_ours, job)


def measure_stock(job: Job) -> Stock:
    """Run Megatron-Core's and torch's code for all ranks of a job, in a process of its own."""
    return _elsewhere(_stock, job)


def _elsewhere(function: Callable[..., T], *args: Any) -> T:
    """In a process that has done nothing else: nothing is cached, and no memory was freed that it could use again."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def _timed(function: Callable[[], T]) -> tuple[T, float]:
    gc.collect()
    began = time.process_time()
    value = function()
    return value, time.process_time() - began


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _lay_out(job: Job, rank: int) -> RankLayout:
    return lay_out_rank(job.specs(rank), [f"rng/shard_{rank}"], [4096], rank=rank, thread_count=2)


def _ours(job: Job) -> Ours:
    from mcore_ckpt.save.plan_check import global_plan

    ranks = job.ranks
    encoded: list[tuple[bytes, dict[str, tuple[int, ...]]]] = []
    counts, files = [], []
    for rank in range(ranks):
        layout = _lay_out(job, rank)
        encoded.append((layout.plan.encode(), {}))
        counts.append(len(layout.specs))
        files.append([(bucket.file_name, bucket.image, len(bucket.object_keys)) for bucket in layout.buckets])
        del layout
    busiest = counts.index(max(counts))
    layout, lay_out_s = min((_timed(lambda: _encoded(job, busiest)) for _ in range(3)), key=lambda pair: pair[1])
    compare_s = min(_compare_s(layout.specs) for _ in range(3))
    before = _resident_bytes()
    plan, check_s = _timed(lambda: global_plan(encoded))
    check_bytes = _peak_bytes() - before
    plan_bytes = sum(map(len, plan.encoded))
    content, index_s, results_bytes = _metadata(plan, files)
    index_bytes = _peak_bytes() - before
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ".metadata"
        path.write_bytes(content)
        read_s, requests_s = _elsewhere(_read, path.parent, job, busiest)
    return Ours(
        ranks,
        sum(counts),
        lay_out_s,
        compare_s,
        plan_bytes,
        check_s,
        index_s,
        results_bytes,
        len(content),
        max(check_bytes, 0) + plan_bytes,
        max(index_bytes, 0) + plan_bytes,
        read_s,
        requests_s,
    )


def _encoded(job: Job, rank: int) -> RankLayout:
    layout = _lay_out(job, rank)
    layout.plan.encode()
    return layout


def _compare_s(specs: Sequence[TensorSpec]) -> float:
    """To walk a state dict that is as it was, and to compare what it holds."""
    from mcore_ckpt.save.planner import NOTHING, collect

    state = {spec.key + str(spec.offsets): shard_of(spec) for spec in specs}
    known = collect(state, NOTHING).described
    return _timed(lambda: collect(state, known))[1]


def shard_of(spec: TensorSpec) -> Any:
    """Megatron's description of it, with data that nobody has touched."""
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    data = torch.empty(spec.sizes, dtype=getattr(torch, spec.dtype))
    pieces = tuple(whole // size for whole, size in zip(spec.shape, spec.sizes, strict=True))
    return ShardedTensor(spec.key, data, data.dtype, tuple(data.shape), spec.shape, spec.offsets, pieces, 0)


def _metadata(plan: Any, files: Sequence[Sequence[tuple[str, Any, int]]]) -> tuple[bytes, float, int]:
    """`.metadata`, the seconds that it took, and the bytes of what the ranks have told of their files."""
    from mcore_ckpt.format.integrity import with_id
    from mcore_ckpt.save.buckets import WrittenFile
    from mcore_ckpt.save.commit import metadata_of_save

    written = []
    for of_rank in files:
        done = []
        for name, image, objects in of_rank:
            sums, boundaries = array("I", bytes(4 * len(image.payload_offsets))), sum(image.inner_blocks)
            done.append(
                WrittenFile(
                    with_id(name, _SAVE_ID),
                    image.size_bytes,
                    0,
                    array("I", bytes(4 * 0 * objects)),
                    sums,
                    image.long_payloads,
                    image.inner_blocks,
                    array("I", bytes(4 * boundaries)),
                )
            )
        written.append(tuple(done))
    told = sum(len(pickle.dumps(of_rank)) for of_rank in written)
    content, seconds = _timed(
        lambda: metadata_of_save(
            plan, plan.encoder(), [() for _ in written], written, save_id=_SAVE_ID, storage_meta={}
        )
    )
    return content, seconds, told


def _read(folder: Path, job: Job, rank: int) -> tuple[float, float]:
    """Seconds of reading `.metadata`, and of planning one rank's reads."""
    import torch

    from mcore_ckpt.load.files import WINDOW_BYTES
    from mcore_ckpt.load.reader import FileSystemReader
    from mcore_ckpt.load.requests import LoadPlan, ReadRequest

    specs = job.specs(rank)
    wanted = [torch.empty(spec.sizes, dtype=getattr(torch, spec.dtype)) for spec in specs]
    reader = FileSystemReader(folder)
    _, read_s = _timed(lambda: reader.index)
    requests = [ReadRequest(s.key, into, s.offsets, s.sizes, s.shape) for s, into in zip(specs, wanted, strict=True)]
    _, requests_s = _timed(lambda: LoadPlan(reader.index, reader.conversions, WINDOW_BYTES).add(requests))
    return read_s, requests_s


def _stock(job: Job) -> Stock:
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks = job.ranks
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    described, plans = [], []
    slowest = [0.0, 0.0]
    for rank in range(ranks):
        shards = [shard_of(spec) for spec in job.specs(rank)]
        text, seconds = _timed(lambda shards=shards: pickle.dumps([one.without_data() for one in shards]))  # type: ignore[misc]
        described.append(text)
        planned, plan_s = _timed(lambda shards=shards: _stock_plan(strategies, shards))  # type: ignore[misc]
        plans.append(planned)
        slowest = [max(slowest[0], seconds), max(slowest[1], plan_s)]
    everyone, unpickle_s = _timed(lambda: list(map(pickle.loads, described)))
    _, validate_s = _timed(lambda: validate_sharding_integrity(everyone))

    def plan_of_all() -> None:
        planner = _stock_planner(strategies)
        planner.set_up_planner({}, is_coordinator=True)
        for one in planner.create_global_plan(list(map(pickle.loads, plans)))[0]:
            pickle.dumps(one)

    _, global_s = _timed(plan_of_all)
    return Stock(
        ranks,
        slowest[0],
        sum(map(len, described)),
        unpickle_s,
        validate_s,
        slowest[1],
        sum(map(len, plans)),
        global_s,
    )


def _stock_plan(strategies: Any, shards: Sequence[Any]) -> bytes:
    state: dict[str, list[Any]] = {}
    for shard in shards:
        state.setdefault(shard.key, []).append(shard)
    planner = _stock_planner(strategies)
    planner.set_up_planner(strategies.mcore_to_pyt_state_dict(state, False), is_coordinator=True)
    return pickle.dumps(planner.create_local_plan())


def _stock_planner(strategies: Any) -> Any:
    return strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
