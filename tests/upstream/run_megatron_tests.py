"""Run Megatron's own `dist_checkpointing` tests on CPU and gloo, with the stock strategies or with ours.

    python tests/upstream/run_megatron_tests.py --repo MEGATRON --tag core_v0.16.1 --strategy stock --out stock.json
    python tests/upstream/run_megatron_tests.py --repo MEGATRON --tag core_v0.16.1 --strategy ours  --out ours.json \
        --only-passed stock.json
    python tests/upstream/run_megatron_tests.py --compare stock.json ours.json

With `MCORE_CKPT_TESTS_COMPARED=FILE` each save of ours behind a fully parallel wrapper, and each state that is
saved without one, is compared with what Megatron's own function says of who saves what. For each a line is added to the
file.

`--repo` is a clone of Megatron-LM (a bare one will do); the tests are read from it at run time, and nothing of them is
kept here. Files run one by one, each on a fresh set of ranks, or `--together`, which takes a fraction of the time; the
tests that a hang or a crash left unrun are started again without the one at fault. A test has passed when it passed on
every rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = "tests/unit_tests/dist_checkpointing"
EXPORTED = ("megatron", "tests/unit_tests", "gpt_builders.py", "model_provider.py")
QUIET_S = 150.0  # a rank that reports nothing for so long hangs
OUTCOMES = ("passed", "failed", "hung", "skipped")
NO_TESTS_LEFT = (0, 5)  # pytest's exit code when all were deselected, and what Megatron's conftest makes of it
# What a test says that failed only because an earlier one had left its ranks out of step.
BROKEN_GROUP = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")


@dataclass(frozen=True, slots=True)
class Run:
    """What all launches of one run share."""

    tree: Path
    strategy: str
    world_size: int
    python: str
    python_path: str
    shim: Path
    limit_s: float


def export(repo: Path, tag: str, target: Path) -> None:
    """Unpack the parts of `repo` at `tag` that the tests need."""
    target.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "-C", str(repo), "archive", tag, *EXPORTED], check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "x", "-C", str(target)], input=archive.stdout, check=True)


def launch(run: Run, selected: list[str]) -> tuple[dict[str, list[dict[str, str]]], str | None]:
    """Run some tests on a fresh set of ranks.

    Returns:
        What each rank reported for each test that started, and the test at which the ranks hung or died, if they did.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        shared = Path(folder)
        environment = {
            **os.environ,
            "WORLD_SIZE": str(run.world_size),
            "LOCAL_WORLD_SIZE": str(run.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": run.python_path,
            "TMPDIR": folder,
            "MCORE_CKPT_TESTS_CPU_SHIM": str(run.shim),
        }
        command = [run.python, "-W", "ignore", str(HERE / "rank_main.py"), "--strategy", run.strategy]
        command += ["--folder", folder, "--repo", str(run.tree), "--", *selected]
        with open(shared / "main.log", "w") as log:
            ranks = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=folder
            )
        stopped = _wait(ranks, shared, run.limit_s)
        stacks = ""
        with contextlib.suppress(ProcessLookupError):  # ranks may outlive the process that forked them
            if stopped:
                os.killpg(ranks.pid, signal.SIGUSR1)
                time.sleep(1)
                stacks = "\n".join(p.read_text()[-3000:] for p in sorted(shared.glob("*.stack")) if p.stat().st_size)
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
        logs = "\n".join(p.read_text()[-1500:] for p in sorted(shared.glob("*.log")))
        if not any(path.stat().st_size for path in shared.glob("*.jsonl")):
            if ranks.returncode in NO_TESTS_LEFT:
                return {}, None
            raise SystemExit(f"no rank ran a test; their last words:\n{logs}")
        return _collect(shared, run.world_size, stacks or logs)


def _wait(ranks: subprocess.Popen[bytes], shared: Path, limit_s: float) -> bool:
    """Wait for all ranks; True if they have to be stopped."""
    started_s = time.monotonic()
    newest_s = started_s
    sizes: dict[Path, int] = {}
    while ranks.poll() is None:
        time.sleep(0.5)
        now_s = time.monotonic()
        current = {path: path.stat().st_size for path in shared.glob("*.jsonl")}
        if current != sizes:
            sizes, newest_s = current, now_s
        if now_s - newest_s > QUIET_S or now_s - started_s > limit_s:
            return True
    return False


def _collect(shared: Path, world_size: int, ends: str) -> tuple[dict[str, list[dict[str, str]]], str | None]:
    reports: dict[str, list[dict[str, str]]] = defaultdict(list)
    culprit: str | None = None
    for rank in range(world_size):
        path = shared / f"{rank}.jsonl"
        last: dict[str, dict[str, str]] = {}
        order: list[str] = []
        for line in path.read_text().splitlines() if path.exists() else []:
            entry = json.loads(line)
            if entry["test"] not in last:
                order.append(entry["test"])
            # A failure in set-up or tear-down outranks what the call reported.
            if last.get(entry["test"], {}).get("outcome") != "failed":
                last[entry["test"]] = entry
        for test in order:
            entry = last[test]
            if entry["outcome"] == "started":
                culprit = culprit or test
                entry = {"test": test, "outcome": "hung", "text": ends}
            reports[test].append(entry)
    return dict(reports), culprit


def verdicts(reports: dict[str, list[dict[str, str]]], world_size: int) -> dict[str, dict[str, str]]:
    """One outcome for each test, from those of the ranks: the worst."""
    found = {}
    for test, entries in reports.items():
        outcomes = {entry["outcome"] for entry in entries}
        for worst in ("hung", "failed", "passed", "skipped"):
            if worst in outcomes:
                break
        else:
            worst = "missing"
        if worst == "passed" and sum(entry["outcome"] == "passed" for entry in entries) < world_size:
            worst = "skipped" if "skipped" in outcomes else "missing"
        text = next((entry["text"] for entry in entries if entry["outcome"] == worst), "")
        found[test] = {"outcome": worst, "text": text}
    return found


def without_victims(outcomes: dict[str, dict[str, str]]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Set apart the tests that failed after another one, for no other reason than that it broke the process group."""
    kept: dict[str, dict[str, str]] = {}
    victims = []
    for test, verdict in outcomes.items():
        failed_before = any(v["outcome"] in ("failed", "hung") for v in kept.values())
        if failed_before and verdict["outcome"] == "failed" and any(sign in verdict["text"] for sign in BROKEN_GROUP):
            victims.append(test)
        else:
            kept[test] = verdict
    return kept, victims


def run_files(run: Run, files: list[str], wanted: set[str] | None) -> dict[str, dict[str, str]]:
    """All tests of some files, started again after a hang for those that did not get their turn."""
    found: dict[str, dict[str, str]] = {}
    excluded: list[str] = []
    while True:
        if wanted is None:
            selected = [*files, *(f"--deselect={test}" for test in (*excluded, *found))]
        else:
            selected = sorted(wanted - set(found) - set(excluded))
            if not selected:
                return found
        reports, culprit = launch(run, selected)
        outcomes, victims = without_victims(verdicts(reports, run.world_size))
        found.update({test: v for test, v in outcomes.items() if v["outcome"] != "missing"})
        if culprit is None and not victims:
            return found
        if culprit is not None:
            excluded.append(culprit)


def compare(stock: Path, ours: Path) -> int:
    """Print a table of both runs; 1 if something passed with stock and not with ours."""
    before, after = json.loads(stock.read_text()), json.loads(ours.read_text())
    was, now = ({test for test, v in side.items() if v["outcome"] == "passed"} for side in (before, after))
    lost = sorted(was - now)
    files = sorted({test.split("::")[0] for test in before})
    print(f"{'file':70} {'passed: stock':>14} {'ours':>6} {'lost':>5}")
    for file in files:
        mine = [test for test in before if test.split("::")[0] == file]
        counts = [sum(test in side for test in mine) for side in (was, now, lost)]
        print(f"{file:70} {counts[0]:>14} {counts[1]:>6} {counts[2]:>5}")
    for test in lost:
        entry = after.get(test, {"outcome": "not run", "text": ""})
        print(f"\n--- {test}: {entry['outcome']}\n{entry['text'][-2500:]}")
    return 1 if lost else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", type=Path, help="clone of Megatron-LM")
    parser.add_argument("--tree", type=Path, help="exported tree to use, or to make (default: a temporary one)")
    parser.add_argument("--tag", default="core_v0.16.1")
    parser.add_argument("--strategy", choices=("stock", "ours"), default="ours")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--path", default="", help="folders to put first on the path, e.g. another megatron-core")
    parser.add_argument("--shim", type=Path, default=ROOT / "tests" / "support" / "cpu_megatron.py")
    parser.add_argument("--package", type=Path, default=ROOT, help="folder that holds mcore_ckpt")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only-passed", type=Path, help="run only the tests that passed in this earlier run")
    parser.add_argument("--limit-s", type=float, default=1800)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("STOCK", "OURS"))
    parser.add_argument("--together", action="store_true", help="all files on one set of ranks, until one hangs")
    parser.add_argument("files", nargs="*", help="test files or test ids; default: all of dist_checkpointing")
    options = parser.parse_args()
    if options.compare:
        return compare(*options.compare)

    with tempfile.TemporaryDirectory() as folder:
        tree = options.tree.resolve() if options.tree else Path(folder) / "megatron"
        if not (tree / FOLDER).is_dir():
            if options.repo is None:
                parser.error("--repo or an existing --tree is needed")
            export(options.repo, options.tag, tree)
        # Not the whole checkout: its folder `tests` would stand in the way of Megatron's.
        ours = Path(folder) / "ours"
        ours.mkdir()
        (ours / "mcore_ckpt").symlink_to(options.package.resolve() / "mcore_ckpt")
        paths = [options.path, str(tree), str(ours), os.environ.get("PYTHONPATH", "")]
        run = Run(
            tree=tree,
            strategy=options.strategy,
            world_size=options.world_size,
            python=options.python,
            python_path=os.pathsep.join(p for p in paths if p),
            shim=options.shim.resolve(),
            limit_s=options.limit_s,
        )
        wanted: dict[str, set[str]] = defaultdict(set)
        if options.only_passed:
            for test, verdict in json.loads(options.only_passed.read_text()).items():
                if verdict["outcome"] == "passed":
                    wanted[test.split("::")[0]].add(test)
        files = options.files or sorted(str(p.relative_to(tree)) for p in (tree / FOLDER).rglob("test_*.py"))
        found: dict[str, dict[str, str]] = {}
        if options.only_passed:
            files = [file for file in files if wanted[file.split("::")[0]]]
        for part in [files] if options.together else [[file] for file in files]:
            started_s = time.monotonic()
            chosen = {test for file in part for test in ([file] if "::" in file else wanted[file])}
            found.update(run_files(run, part, chosen if options.only_passed else None))
            for file in part:
                mine = [v["outcome"] for test, v in found.items() if test.split("::")[0] == file.split("::")[0]]
                print(f"{file}: { {name: mine.count(name) for name in OUTCOMES} }", flush=True)
            print(f"in {time.monotonic() - started_s:.0f} s", flush=True)
            if options.out:
                options.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
