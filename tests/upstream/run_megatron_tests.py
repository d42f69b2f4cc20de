"""Run Megatron's own `dist_checkpointing` tests on CPU and gloo with our strategies, and those that fail with stock's.

    python tests/upstream/run_megatron_tests.py --repo MEGATRON --tag core_v0.16.1 [FILE...]

`--repo` is a clone of Megatron-LM (a bare one will do); the tests are read from it at run time, and nothing of them is
kept here. Each file runs on a fresh set of ranks; the tests that a hang or a crash left unrun are started again without
the one at fault. A test has passed when it passed on every rank. Exit code 1: one passes with stock and not with ours.
"""

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
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = "tests/unit_tests/dist_checkpointing"
EXPORTED = ("megatron", "tests/unit_tests", "gpt_builders.py", "model_provider.py")
QUIET_S = 150.0  # a rank that reports nothing for so long hangs
NO_TESTS_LEFT = (0, 5)  # pytest's exit code when all were deselected, and what Megatron's conftest makes of it
# What a test says that failed only because an earlier one had left its ranks out of step.
BROKEN_GROUP = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")

Verdicts = dict[str, tuple[str, str]]  # test -> outcome, and what it said


def export(repo: Path, tag: str, target: Path) -> None:
    """Unpack the parts of `repo` at `tag` that the tests need."""
    target.mkdir(parents=True)
    archive = subprocess.run(["git", "-C", str(repo), "archive", tag, *EXPORTED], check=True, stdout=subprocess.PIPE)
    subprocess.run(["tar", "x", "-C", str(target)], input=archive.stdout, check=True)


def run_tests(place: Path, side: str, world_size: int, selected: list[str]) -> Verdicts:
    """The outcome of all tests of files, or of tests named one by one."""
    found: Verdicts = {}
    while True:
        verdicts = launch(place, side, world_size, [*selected, *(f"--deselect={test}" for test in found)])
        done = {test: verdict for test, verdict in verdicts.items() if not _is_victim(test, verdicts)}
        found |= done
        if not done or (len(done) == len(verdicts) and all(outcome != "hung" for outcome, _ in done.values())):
            return found


def _is_victim(test: str, verdicts: Verdicts) -> bool:
    """Whether it failed after another one, for no other reason than that this broke the process group."""
    outcome, text = verdicts[test]
    first = next((name for name, (ended, _) in verdicts.items() if ended in ("failed", "hung")), test)
    return outcome == "failed" and test != first and any(sign in text for sign in BROKEN_GROUP)


def launch(place: Path, side: str, world_size: int, selected: list[str]) -> Verdicts:
    """Run some tests on a fresh set of ranks until all have ended or hang."""
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {
            **os.environ,
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": f"{place / 'megatron'}:{place / 'ours'}:{os.environ.get('PYTHONPATH', '')}",
            "TMPDIR": folder,
            "MCORE_CKPT_TESTS_CPU_SHIM": str(ROOT / "tests" / "support" / "cpu_megatron.py"),
        }
        command = [sys.executable, "-W", "ignore", str(HERE / "rank_main.py"), "--strategy", side, "--folder", folder]
        command += ["--repo", str(place / "megatron"), "--", *selected]
        with open(shared / "main.log", "w") as log:
            ranks = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=folder
            )
        stopped = _wait(ranks, shared)
        with contextlib.suppress(ProcessLookupError):  # ranks may outlive the process that forked them
            if stopped:
                os.killpg(ranks.pid, signal.SIGUSR1)
                time.sleep(1)
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
        ends = "\n".join(path.read_text()[-3000:] for path in sorted([*shared.glob("*.stack"), *shared.glob("*.log")]))
        verdicts = _verdicts(shared, world_size, ends)
        if not verdicts and ranks.returncode not in NO_TESTS_LEFT:
            raise SystemExit(f"no rank ran a test; their last words:\n{ends}")
        return verdicts


def _wait(ranks: subprocess.Popen[bytes], shared: Path) -> bool:
    newest_s, sizes = time.monotonic(), dict[Path, int]()
    while ranks.poll() is None:
        time.sleep(0.5)
        current = {path: path.stat().st_size for path in shared.glob("*.jsonl")}
        if current != sizes:
            sizes, newest_s = current, time.monotonic()
        if time.monotonic() - newest_s > QUIET_S:
            return True
    return False


def _verdicts(shared: Path, world_size: int, ends: str) -> Verdicts:
    """The worst outcome of each test that started, of those that the ranks report."""
    reports: dict[str, dict[int, tuple[str, str]]] = {}
    for rank, path in enumerate(shared / f"{rank}.jsonl" for rank in range(world_size)):
        for line in path.read_text().splitlines() if path.exists() else []:
            entry = json.loads(line)
            ranks = reports.setdefault(entry["test"], {})
            # A failure in set-up or tear-down outranks what the call reported.
            if ranks.get(rank, ("", ""))[0] != "failed":
                ranks[rank] = entry["outcome"], entry["text"]
    found = {}
    for test, ranks in reports.items():
        outcomes = [outcome for outcome, _ in ranks.values()]
        worst = next((outcome for outcome in ("started", "failed", "skipped") if outcome in outcomes), "passed")
        if worst == "passed" and len(ranks) < world_size:  # another test had hung on the other ranks
            continue
        said = next((text for outcome, text in ranks.values() if outcome == worst), "")
        found[test] = ("hung", ends) if worst == "started" else (worst, said)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", type=Path, required=True, help="clone of Megatron-LM")
    parser.add_argument("--tag", default="core_v0.16.1")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("files", nargs="*", help="test files; default: all of dist_checkpointing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        export(options.repo, options.tag, place / "megatron")
        # Not the whole checkout: its folder `tests` would stand in the way of Megatron's.
        (place / "ours").mkdir()
        (place / "ours" / "mcore_ckpt").symlink_to(ROOT / "mcore_ckpt")
        tree = place / "megatron"
        lost: Verdicts = {}
        for file in options.files or sorted(str(path.relative_to(tree)) for path in (tree / FOLDER).rglob("test_*.py")):
            ours = run_tests(place, "ours", options.world_size, [file])
            failed = [test for test, (outcome, _) in ours.items() if outcome not in ("passed", "skipped")]
            stock = run_tests(place, "stock", options.world_size, failed) if failed else {}
            missed = {test: ours[test] for test, (outcome, _) in stock.items() if outcome == "passed"}
            passed = sum(outcome == "passed" for outcome, _ in ours.values())
            print(f"{file}: {passed} tests pass with ours; of the {len(failed)} others {len(missed)} pass with stock")
            lost |= missed
    for test, (outcome, text) in lost.items():
        print(f"\n--- {test}: {outcome}\n{text[-2500:]}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
