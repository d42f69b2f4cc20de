"""One megatron-core's part in the matrix: write its checkpoints, or read everybody's. Run by scripts/test_matrix.sh:

    python -m tests.matrix.version_job write DIRECTORY  # DIRECTORY/<version>-<ours|stock>-<kind>/
    python -m tests.matrix.version_job read DIRECTORY   # writes what it could read: DIRECTORY/read-by-<version>.json

Kinds: "plain", a handmade state; "parallel", the same through the fully parallel wrappers and their exchange; "model",
a GPT with Megatron's distributed optimizer, saved with TP 2 and loaded with PP 2. The CPU poses as CUDA. Ours saves
the plain kind synchronously and the others asynchronously.
"""

import json
import shutil
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.matrix.version_ranks import load_all, save_all
from tests.support.gloo_ranks import RanksFailedError, run_ranks
from tests.support.state_compare import differing, read_state

WORLD_SIZE = 2
DEADLINE_S = 240
SIDES = ("ours", "stock")
KINDS = (("plain", "parallel"), ("model",))  # those of one group share a launch


def attempt(function: Any, who: str, targets: list[tuple[str, Path]]) -> tuple[str, list[Any]]:
    """Empty text and the ranks' values, or why it failed."""
    try:
        return "", run_ranks(function, WORLD_SIZE, who, targets, deadline_s=DEADLINE_S)
    except RanksFailedError as failed:
        return str(failed)[-4000:], []


def attempt_reading(who: str, targets: list[tuple[str, Path]]) -> list[tuple[str, list[Any]]]:
    """For each target why it failed, or the ranks' values. What fails or hangs a world is looked for by halves.

    Stock Megatron may raise on one rank while the other waits for it, and then nothing can follow in that world.
    """
    failure, ranks = attempt(load_all, who, targets)
    if failure and len(targets) > 1:
        middle = len(targets) // 2
        return attempt_reading(who, targets[:middle]) + attempt_reading(who, targets[middle:])
    return [(failure, [rank[number] for rank in ranks]) for number in range(len(targets))]


def write_all(directory: Path, version: str) -> None:
    """Write this version's checkpoints, and what came of each into its `outcome.txt`: "ok", or why not."""
    for who in SIDES:
        for kinds in KINDS:
            targets = [(kind, directory / f"{version}-{who}-{kind}") for kind in kinds]
            for _, target in targets:
                shutil.rmtree(target, ignore_errors=True)  # of a run that was interrupted
                (target / "reference").mkdir(parents=True)
            failure, ranks = attempt(save_all, who, targets)
            for number, (kind, target) in enumerate(targets):
                wrong = failure or unexpected(who, saving_method(who, kind), [ran[number] for ran in ranks])
                (target / "outcome.txt").write_text(wrong or "ok")


def saving_method(who: str, kind: str) -> str:
    """The strategy method that Megatron has to call in the end."""
    if who == "stock":
        return "megatron.TorchDistSaveShardedStrategy."
    return "mcore_ckpt.TorchDistSaveStrategy." + ("save" if kind == "plain" else "async_save")


def loading_method(who: str) -> str:
    return {"ours": "mcore_ckpt.TorchDistLoadStrategy.load", "stock": "megatron.TorchDistLoadShardedStrategy.load"}[who]


def unexpected(who: str, expected: str, ran: list[list[str]]) -> str:
    """What is wrong with the strategy methods that ran on each rank; empty if they are the expected ones alone."""
    fine = all(methods and all(method.startswith(expected) for method in methods) for methods in ran)
    return "" if fine else f"{who}: strategy methods that ran: {ran}, expected {expected}"


def read_all(directory: Path, report: dict[str, dict[str, str]]) -> None:
    """Add to the report for each checkpoint that it does not tell of what each side says: "ok", or why not."""
    for kinds in KINDS:
        targets = [
            (kind, path)
            for kind in kinds
            for path in sorted(outcome.parent for outcome in directory.glob(f"*-{kind}/outcome.txt"))
            if path.name not in report and (path / "outcome.txt").read_text() == "ok"
        ]
        if not targets:
            continue
        for who in SIDES:
            for (kind, target), (failure, outcomes) in zip(targets, attempt_reading(who, targets), strict=True):
                report.setdefault(target.name, {})[who] = failure or verdict(who, kind, target, outcomes)


def verdict(who: str, kind: str, target: Path, outcomes: list[tuple[list[str], str]]) -> str:
    """What the ranks' outcomes say about one checkpoint: "ok", or what is wrong."""
    errors = [error for _, error in outcomes if error]
    if errors:
        return errors[0]
    wrong = unexpected(who, loading_method(who), [ran for ran, _ in outcomes])
    if wrong:
        return wrong
    wrong = differing(read_state(target / "loaded"), read_state(target / "reference")) if kind == "model" else []
    return f"differs: {wrong}" if wrong else "ok"


def main() -> int:
    what, directory = sys.argv[1], Path(sys.argv[2])
    version = import_module("megatron.core.package_info").__version__
    try:
        if what == "write":
            write_all(directory, version)
        else:
            path = directory / f"read-by-{version}.json"
            report = json.loads(path.read_text()) if path.exists() else {}
            read_all(directory, report)
            path.write_text(json.dumps(report, indent=1))
    except Exception:  # noqa: BLE001  (the judge of the reports misses this one)
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
