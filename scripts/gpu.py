"""What only a GPU can show, in at most 8 minutes; docs/gpu.json gets what was seen.

    make gpu                          on a machine with a GPU
    make gpu ARGS="--dry-run"         each step on the CPU, small, with gloo; build/gpu.json gets what was seen

Each step is a process with a deadline of its own: what fails or hangs is among the results, and the others run.

tests       the tests marked `gpu`
isolation   asynchronous saves while kernels and a CUDA graph change the tensors, with a staging buffer that is pinned
            and one that is not: each checkpoint holds the values of its call. NCCL is the job's backend, of one rank
speed       saves and loads of 8 GB on one rank, next to Megatron-Core and to nvidia-resiliency-ext's shared memory
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

DEADLINES_S = {"tests": 100, "isolation": 120, "speed": 240}
_DRY_GB = 0.01
_ROUNDS = 3
_CHANGES = 20  # that are queued right after a save has begun


def begin(folder: Path, dry: bool) -> tuple[Any, str]:
    """A job of one rank: torch, and the device."""
    import torch
    import torch.distributed as dist

    if dry:
        torch.set_num_threads(1)
    backend = "gloo" if dry else "nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    return torch, "cpu" if dry else "cuda"


def tests(folder: Path, dry: bool, gb: float) -> dict[str, Any]:
    """Runs pytest; what its last line says."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/save/test_staging_buffers.py"]
    ended = subprocess.run([*command, "--collect-only"] if dry else command, cwd=ROOT, capture_output=True, text=True)
    lines = ended.stdout.strip().splitlines() or [ended.stderr]
    if ended.returncode:
        raise RuntimeError("\n".join(lines[-20:]))
    return {"said": lines[-1]}


def isolation(folder: Path, dry: bool, gb: float) -> dict[str, Any]:
    """Counts the saves that hold anything but the values of their call."""
    torch, device = begin(folder, dry)
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import ShardedTensor

    from mcore_ckpt import AsyncCallsQueue, TorchDistLoadStrategy, TorchDistSaveStrategy
    from mcore_ckpt.save.staging import StagingBuffer

    tensors = [torch.zeros((1_000 if dry else 500_000) + number, device=device) for number in range(16)]

    def change() -> None:
        for one in tensors:
            one.add_(1)

    ways: dict[str, Callable[[], object]] = {"stream": change}
    if not dry:
        graph = torch.cuda.CUDAGraph()
        change()  # CUDA wants to have run it before
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            change()
        ways["graph"] = graph.replay
    wrong, saves = list[str](), 0
    for is_pinned in (True, False):
        pin = StagingBuffer.pin if is_pinned else lambda self: None
        with mock.patch.object(StagingBuffer, "pin", pin):
            strategy, queue = TorchDistSaveStrategy(), AsyncCallsQueue()
            for way, train in ways.items():
                for step in range(_ROUNDS):
                    path = folder / f"{is_pinned}-{way}-{step}"
                    path.mkdir()
                    for one in tensors:
                        one.fill_(100.0 * step)  # queued, as all that follows
                    state = {str(n): ShardedTensor.from_rank_offsets(str(n), one) for n, one in enumerate(tensors)}
                    queue.schedule_async_request(strategy.async_save(state, path))
                    for _ in range(_CHANGES):
                        train()
                    queue.maybe_finalize_async_calls(blocking=True)
                    loaded = [torch.full_like(one, -1) for one in tensors]
                    wanted = {str(n): ShardedTensor.from_rank_offsets(str(n), one) for n, one in enumerate(loaded)}
                    TorchDistLoadStrategy().load(wanted, path)
                    saves += 1
                    wrong += [path.name] * any(bool((one != 100.0 * step).any()) for one in loaded)
            queue.close()
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {saves} saves hold values of another moment: {', '.join(wrong)}")
    return {"saves": saves, "backend": dist.get_backend(), "ways": sorted(ways)}


def speed(folder: Path, dry: bool, gb: float) -> dict[str, Any]:
    """Seconds of each round, by contender and work."""
    _, device = begin(folder, dry)
    from benchmarks import state

    adapters = import_module("benchmarks.adapters").ADAPTERS  # baselines that are not installed bring no types

    kind = state.kinds(int(gb * 1e9))["dense"]
    shards = [one._replace(tensor=one.tensor.to(device)) for one in state.build(kind, 1, 0)]
    found: dict[str, Any] = {"bytes": kind.size_bytes}
    for name in ("megatron", "nvrx", "mcore_ckpt"):  # which is installed into Megatron, so that it comes last
        if dry and name != "mcore_ckpt":
            found[name] = "not run: its worker names a CUDA device"
            continue
        try:
            adapter = adapters[name]()
            adapter.launch()
        except (ImportError, TypeError, AttributeError) as error:
            found[name] = f"not run: {error}"
            continue
        rounds = [
            rates(adapter, adapter.prepare(shards), folder / f"{name}{n}", dry) for n in range(1 if dry else _ROUNDS)
        ]
        found[name] = {work: [one[work] for one in rounds] for work in rounds[0]}
    return found


def rates(adapter: Any, state: Any, path: Path, dry: bool) -> dict[str, float]:
    """Seconds of one round."""
    import torch

    seconds = dict[str, float]()

    def note(work: str, since: float) -> None:
        if not dry:
            torch.cuda.synchronize()
        seconds[work] = round(time.perf_counter() - since, 3)

    for name in ("at-once", "later"):
        (path / name).mkdir(parents=True)
    began = time.perf_counter()
    adapter.save(state, path / "at-once")
    note("save", began)
    began = time.perf_counter()
    adapter.load(state, path / "at-once")
    note("load", began)
    began = time.perf_counter()
    finalize = adapter.start(state, path / "later")
    note("async: training waits", began)
    finalize(True)
    note("async: durable", began)
    shutil.rmtree(path)  # of the next round there is as much
    return seconds


def main() -> int:
    """Run the steps, or in a process of its own the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, small")
    parser.add_argument("--gb", type=float, default=8.0, help="size of the state of `speed` (default: 8)")
    parser.add_argument("--out", type=Path, help="results (default: docs/gpu.json; build/gpu.json of a dry run)")
    parser.add_argument("--step", choices=DEADLINES_S, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        done = globals()[arguments.step](arguments.folder, arguments.dry_run, arguments.gb)
        sys.stdout.write(f"\n{json.dumps(done)}\n")
        return 0
    import torch

    from benchmarks.results import commit_of_code

    if not (arguments.dry_run or torch.cuda.is_available()):
        raise SystemExit("there is no GPU; with ARGS=--dry-run each step runs on the CPU")
    gb = _DRY_GB if arguments.dry_run else arguments.gb
    device = "none: a dry run" if arguments.dry_run else torch.cuda.get_device_name()
    results: dict[str, Any] = {
        "commit": commit_of_code(),
        "device": device,
        "torch": torch.__version__,
        "host": platform.machine(),
    }
    failed = 0
    for step, deadline_s in DEADLINES_S.items():
        folder = tempfile.mkdtemp(prefix="mcore_ckpt_gpu_", dir=ROOT)
        command = [sys.executable, __file__, "--step", step, "--folder", folder, "--gb", str(gb)]
        command += ["--dry-run"] * arguments.dry_run
        try:
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=deadline_s)
            is_well = ended.returncode == 0
            results[step] = json.loads(ended.stdout.splitlines()[-1]) if is_well else {"failed": ended.stderr[-2000:]}
        except subprocess.TimeoutExpired:
            is_well, results[step] = False, {"failed": f"not done after {deadline_s} s"}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        failed += not is_well
        sys.stdout.write(f"{step}: {json.dumps(results[step])}\n")
    out = arguments.out or ROOT / ("build" if arguments.dry_run else "docs") / "gpu.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
