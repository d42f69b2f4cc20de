"""Measure saves and loads next to Megatron-Core, DCP, torch_checkpointing and the raw device, in one run.

    make bench                                       everything: the tables in README.md and docs come out of it
    make bench ARGS="--against 65e37f1"              the package of that commit takes its turns in every row, too
    make bench ARGS="--only dense --gb 0.1 --rounds 1 --out build/bench.json"      a try, which changes no table
    python scripts/bench.py --tables                 the tables of all pages again, out of docs/*.json

With `--against` the ratios to that commit are printed. A part begins when the load average is at most 1.

Baselines that need Python 3.12 (Megatron-Core 0.19, nvidia-resiliency-ext, torch_checkpointing) run under
`--python312`, which `make bench` makes where there is such a Python. What is not installed is named as not run.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import results, tables  # noqa: E402  (found by the line above)
from benchmarks.groups import Interpreter, package_of  # noqa: E402
from benchmarks.parts import PARTS, Contender, Run  # noqa: E402

_PYTHON312 = ROOT / ".venv312" / "bin" / "python"


class _Interpreters:
    """Started when first asked for; ended together."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._started: dict[tuple[Any, ...], Interpreter] = {}

    def __call__(self, python: Path, path: tuple[Path, ...], *, megatron: bool = True) -> Interpreter:
        key = (python, path, megatron)
        if key not in self._started:
            self._started[key] = Interpreter(python, path, megatron=megatron)
            self._stack.callback(self._started[key].close)
        return self._started[key]


def _contenders(
    arguments: argparse.Namespace, interpreters: _Interpreters, folder: Path
) -> tuple[list[Contender], dict[str, str]]:
    """Who takes part; and who does not, with the reason."""
    pythons: list[tuple[Path, tuple[Path, ...]]] = [(Path(sys.executable), (ROOT,))]
    not_run = {}
    if arguments.python312.exists():
        pythons.append((arguments.python312, (arguments.python312.parent.parent / "baselines", ROOT)))
    else:
        for name in ("Megatron-Core 0.19.2", "nvidia-resiliency-ext", "torch_checkpointing"):
            not_run[name] = f"there is no {arguments.python312}; `make bench` makes it where there is a Python 3.12"
    main = interpreters(*pythons[0])
    found = [
        Contender("raw device", "raw", interpreters(*pythons[0], megatron=False), "mcore_ckpt", True),
        Contender("lower bound", "bare", main, "mcore_ckpt", True),
        Contender("lower bound", "bare loop", main, "mcore_ckpt", True),
        Contender("mcore_ckpt", "mcore_ckpt", main, own=True),
        Contender("mcore_ckpt, replanned", "replanned", main, own=True),
        Contender('certify="sample"', "certified", main, own=True),
        Contender('certify="warn"', "certified whole", main, own=True),
    ]
    if arguments.against:
        old = interpreters(pythons[0][0], (package_of(arguments.against, ROOT, folder / "against"), ROOT))
        found.append(Contender(f"mcore_ckpt {arguments.against[:7]}", "mcore_ckpt", old, own=True, role="against"))
    for python, path in pythons:
        interpreter, plain = interpreters(python, path), interpreters(python, path, megatron=False)
        versions = interpreter.versions
        last = python == pythons[-1][0]
        if interpreter is not main:
            found.append(Contender(f"mcore_ckpt, {_short(versions)}", "mcore_ckpt", interpreter, own=True))
        if core := versions["megatron-core"]:
            found.append(Contender(f"Megatron-Core {core}", "megatron", interpreter))
            found.append(Contender(f"Megatron-Core {core}, constant structure", "megatron constant", interpreter))
        if last and (nvrx := versions["nvidia-resiliency-ext"]) and core:
            found.append(Contender(f"Megatron-Core {core}, nvrx {nvrx}", "nvrx", interpreter))
            found.append(
                Contender(f"Megatron-Core {core}, nvrx {nvrx}, constant structure", "nvrx constant", interpreter)
            )
        if last and (meta := versions["torch-checkpointing"]):
            found.append(Contender(f"torch_checkpointing {meta}", "torch_checkpointing", plain))
        if last:
            found.append(Contender(f"DCP of torch {versions['torch']}", "dcp", plain))
        for name in ("nvidia-resiliency-ext", "torch-checkpointing") if last and len(pythons) > 1 else ():
            if not versions[name]:
                not_run[name] = f"not installed for {python}; see CONTRIBUTING.md"
    return found, not_run


def _short(versions: dict[str, str | None]) -> str:
    return f"Python {'.'.join((versions['python'] or '').split('.')[:2])}"


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the dense state, in 1e9 bytes (default: 1)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: 5)")
    parser.add_argument("--baseline-rounds", type=int, default=3, help="those with baselines (default: 3)")
    parser.add_argument("--slow-s", type=float, default=8.0, help="what takes longer is measured once (default: 8)")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=[], help="parts to measure (default: all)")
    parser.add_argument("--against", default="", metavar="COMMIT", help="measure the package of this commit, too")
    parser.add_argument("--python312", type=Path, default=_PYTHON312, help="for baselines that need Python 3.12")
    parser.add_argument("--dir", type=Path, default=ROOT, help="where to write; the file system that is measured")
    parser.add_argument("--out", type=Path, default=results.FILE, help="results (default: docs/benchmark.json)")
    parser.add_argument("--tables", action="store_true", help="only write the tables again")
    results.add_busy(parser)
    arguments = parser.parse_args()
    if arguments.tables:
        tables.write(ROOT)
        return 0
    measurement = results.Measurement(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is written is removed
    base = Path(tempfile.mkdtemp(prefix="mcore_ckpt_bench_", dir=arguments.dir))
    try:
        with ExitStack() as stack:
            contenders, not_run = _contenders(arguments, _Interpreters(stack), base)
            measurement.results["not run"] = not_run
            measurement.results["contenders"] |= {
                one.label: {"adapter": one.role or one.adapter, **one.interpreter.versions} for one in contenders
            }
            run = Run(
                contenders, base, int(arguments.gb * 1e9), arguments.rounds, arguments.baseline_rounds, arguments.slow_s
            )
            for name in arguments.only or PARTS:
                measurement.begin(name)
                samples = run.part(name)
                failed = [f"{label} ({why})" for label, why in run.failed.get(name, {}).items()]
                measurement.put(name, samples, failed=failed, baseline_rounds=arguments.baseline_rounds)
                for work in samples:
                    shutil.rmtree(base / work, ignore_errors=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    sys.stdout.write(tables.everything(measurement.results))
    if arguments.against:
        sys.stdout.write(tables.one(measurement.results, "against"))
    if arguments.out == results.FILE:
        tables.write(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
