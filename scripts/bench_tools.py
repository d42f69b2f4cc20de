"""Measure the commands beside coreutils on the same files: reshard, verify, diff, inspect.

    make bench-tools                          a checkpoint of 4 GB, three rounds, some minutes
    make bench-tools ARGS="--gb 1 --rounds 1"

Pages are dropped from the page cache before each. Printed are medians, their ratio to the coreutils of the same round's
work, and the most resident memory that the command took. Only ratios travel between machines.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.scenarios import write_once  # noqa: E402  (found by the line above)
from mcore_ckpt.commands._shell import table  # noqa: E402
from tests.support.gloo_ranks import run_ranks  # noqa: E402

_RANKS = 4
_COMMAND = [sys.executable, "-m", "mcore_ckpt"]


class Work(NamedTuple):
    """One thing to measure: a command, what it is held against, and what has to be gone before it starts."""

    name: str
    command: list[str]
    beside: str = ""
    removed: tuple[Path, ...] = ()
    then_sync: bool = False


def _works(source: Path, many: Path, place: Path) -> list[Work]:
    copy, target = place / "copy", place / "target"
    partial = target.with_name("target.partial")
    files = sorted(map(str, source.glob("*.distcp")))

    def reshard(tp: int, *more: str) -> list[str]:
        return [*_COMMAND, "reshard", str(source), str(target), "--tp", str(tp), "--pp", "1", *more]

    gone = (copy, target, partial)
    return [
        Work("cp -r, sync", ["cp", "-r", str(source), str(copy)], removed=gone, then_sync=True),
        *(
            Work(f"reshard TP 4 -> {tp}{note}", reshard(tp, *more), "cp -r, sync", gone)
            for note, more in ((", --no-verify", ("--no-verify",)), ("", ()))
            for tp in (1, 2)
        ),
        Work("cat", ["cat", *files]),
        Work("verify", [*_COMMAND, "verify", str(source)], "cat"),
        Work("cat of both", ["sh", "-c", f"cat {source}/*.distcp {target}/*.distcp"]),
        Work("diff, TP 4 and 2", [*_COMMAND, "diff", str(source), str(target)], "cat of both"),
        Work("inspect, 20,000 tensors", [*_COMMAND, "inspect", str(many)]),
        Work("--help", [*_COMMAND, "--help"]),
    ]


def _drop_page_cache(*folders: Path) -> None:
    os.sync()
    for file in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def _timed(work: Work, folders: Callable[[], list[Path]]) -> tuple[float, float]:
    """Seconds, and MB of resident memory at most."""
    for path in work.removed:
        shutil.rmtree(path, ignore_errors=True)
    _drop_page_cache(*folders())
    started = time.perf_counter()
    process = subprocess.Popen(work.command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(work.command)}: exit code {process.returncode}")
    if work.then_sync:
        os.sync()
    return time.perf_counter() - started, usage.ru_maxrss / 1024


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the checkpoint, in 1e9 bytes (default: 4)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each (default: 3)")
    parser.add_argument("--dir", type=Path, default=ROOT, help="where to write; the file system that is measured")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="mcore_ckpt_bench_", dir=arguments.dir))
    try:
        run_ranks(write_once, _RANKS, base / "dense", "dense", int(arguments.gb * 1e9), ["mcore_ckpt"], deadline_s=900)
        run_ranks(write_once, 1, base / "small", "small", 0, ["mcore_ckpt"], deadline_s=900)
        works = _works(base / "dense" / "mcore_ckpt", base / "small" / "mcore_ckpt", base)
        seconds: dict[str, list[float]] = {work.name: [] for work in works}
        memory: dict[str, float] = {}
        for _ in range(arguments.rounds):
            for work in works:
                took_s, mb = _timed(work, lambda: [base])
                seconds[work.name].append(took_s)
                memory[work.name] = max(memory.get(work.name, 0.0), mb)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [
        (
            work.name,
            f"{median[work.name]:.2f}",
            f"{min(seconds[work.name]):.2f} - {max(seconds[work.name]):.2f}",
            f"{median[work.name] / median[work.beside]:.2f}" if work.beside else "",
            work.beside,
            f"{memory[work.name]:.0f}",
        )
        for work in works
    ]
    print(table(("work", "median s", "min - max", "ratio", "to", "MB"), rows, right=(1, 2, 3, 5)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
