"""What planning a save costs a job of as many ranks as asked, besides its messages.

    python -m benchmarks.scale                       1,000 tensors of 1 KB a rank, to 4,096 ranks; docs/scale.md

No rank is started. Plans of all ranks are made one after the other by the package's own code, the coordinator's part is
run on them, and each part is timed and weighed in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import resource
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks import tables
from benchmarks.machine import describe_machine
from benchmarks.results import ROOT, add_busy, commit_of_code, wait_until_quiet
from mcore_ckpt.format.integrity import encode_plan
from mcore_ckpt.image.layout import TensorSpec
from mcore_ckpt.save.planner import RankLayout, lay_out_rank

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
class Ours:
    """What the package's own code takes, in seconds of one processor, and bytes."""

    ranks: int
    items: int  # of all ranks
    lay_out_s: float  # the rank with the most items: its layout and its plan
    compare_s: float  # the same rank: whether its structure is that of the save before
    plan_bytes: int  # of all ranks
    check_s: float  # the coordinator: decode all plans and check them
    index_s: float  # the coordinator's writer process: `.metadata`
    metadata_bytes: int
    coordinator_bytes: int  # peak of the coordinator's memory, from the plans to the check
    index_bytes: int  # peak of its writer process's memory, from the plans to `.metadata`
    read_s: float  # a rank of a load: read `.metadata`
    requests_s: float  # and plan its reads


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1000, help="tensors of which each rank has rows (default: 1000)")
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 64, 256, 1024, 4096], help="how many")
    parser.add_argument("--out", type=Path, default=tables.SCALE_FILE, help="results (default: docs/scale.json)")
    add_busy(parser)
    arguments = parser.parse_args()
    wait_until_quiet("scale", busy=arguments.busy)
    jobs = [Job(ranks, arguments.items) for ranks in arguments.ranks]
    results = {
        "commit": commit_of_code(),
        "machine": describe_machine(ROOT),
        "busy": arguments.busy,
        "what": f"{arguments.items:,} tensors of 1 KB a rank",
        "ours": [asdict(_elsewhere(_ours, job)) for job in jobs],
    }
    tables.put_results(arguments.out, results)
    sys.stdout.write(tables.of_scale(results))
    return 0


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
    from mcore_ckpt.save.planner import global_plan

    ranks = job.ranks
    encoded: list[tuple[bytes, dict[str, tuple[int, ...]]]] = []
    counts, files = [], []
    for rank in range(ranks):
        layout = _lay_out(job, rank)
        encoded.append((encode_plan(layout.plan), {}))
        counts.append(len(layout.specs))
        files.append([(bucket.file_name, bucket.image, bucket.footer.object_count) for bucket in layout.buckets])
        del layout
    busiest = counts.index(max(counts))
    layout, lay_out_s = min((_timed(lambda: _encoded(job, busiest)) for _ in range(3)), key=lambda pair: pair[1])
    compare_s = min(_compare_s(layout.specs) for _ in range(3))
    before = _resident_bytes()
    plan, check_s = _timed(lambda: global_plan(encoded))
    check_bytes = _peak_bytes() - before
    plan_bytes = sum(map(len, plan.encoded))
    content, index_s = _metadata(plan, files)
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
        len(content),
        max(check_bytes, 0) + plan_bytes,
        max(index_bytes, 0) + plan_bytes,
        read_s,
        requests_s,
    )


def _encoded(job: Job, rank: int) -> RankLayout:
    layout = _lay_out(job, rank)
    encode_plan(layout.plan)
    return layout


def _compare_s(specs: Sequence[TensorSpec]) -> float:
    """To walk a state dict that is as it was, and to compare what it holds."""
    from mcore_ckpt.save.planner import NOTHING, collect

    state = {spec.key + str(spec.offsets): _shard_of(spec) for spec in specs}
    known = collect(state, NOTHING).described
    return _timed(lambda: collect(state, known))[1]


def _shard_of(spec: TensorSpec) -> Any:
    """Megatron's description of it, with data that nobody has touched."""
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    data = torch.empty(spec.sizes, dtype=getattr(torch, spec.dtype))
    pieces = tuple(whole // size for whole, size in zip(spec.shape, spec.sizes, strict=True))
    return ShardedTensor(spec.key, data, data.dtype, tuple(data.shape), spec.shape, spec.offsets, pieces, 0)


def _metadata(plan: Any, files: Sequence[Sequence[tuple[str, Any, int]]]) -> tuple[bytes, float]:
    """`.metadata`, and the seconds that it took."""
    from mcore_ckpt.format.integrity import with_id
    from mcore_ckpt.image.layout import WrittenFile, metadata_of

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
    names = {name: with_id(name, _SAVE_ID) for name, _ in plan.files}
    objects = [() for _ in written]
    return _timed(lambda: metadata_of(plan.encoder(), objects, written, save_id=_SAVE_ID, storage_meta={}, names=names))


def _read(folder: Path, job: Job, rank: int) -> tuple[float, float]:
    """Seconds of reading `.metadata`, and of planning one rank's reads."""
    import torch

    from mcore_ckpt.dcp.reader import FileSystemReader
    from mcore_ckpt.load.ranges import ReadPolicy
    from mcore_ckpt.load.requests import LoadPlan, ReadRequest

    specs = job.specs(rank)
    wanted = [torch.empty(spec.sizes, dtype=getattr(torch, spec.dtype)) for spec in specs]
    reader = FileSystemReader(folder)
    _, read_s = _timed(lambda: reader.index)
    requests = [ReadRequest(s.key, into, s.offsets, s.sizes, s.shape) for s, into in zip(specs, wanted, strict=True)]
    _, requests_s = _timed(lambda: LoadPlan(reader.index, reader.conversions, ReadPolicy()).add(requests))
    return read_s, requests_s


if __name__ == "__main__":
    sys.exit(main())
