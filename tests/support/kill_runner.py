"""Kill the trainer, or the process that writes for it, at random moments of one save after the other into a directory.

    python -m tests.support.kill_runner ROUNDS DIRECTORY trainer:persistent writer:cow ...   (VICTIM:WAY)

After each kill the directory has to hold the old checkpoint or the new one, whole; a trainer whose writer was killed
has to know within seconds, and no process may be left. The next round saves over what the last one left. As in
`crash_runner`, this process imports Megatron once and forks a trainer for each save.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import mcore_ckpt
from mcore_ckpt.errors import WriterDiedError
from tests.support import crash_runner

_SAVED, _REFUSED, _BROKEN = 0, 3, 101
_KNOWS_WITHIN_S = 5.0
_GONE_WITHIN_S = 1.0
_SEEDS = (1, 2, 3)  # those that `crash_runner.look` recognizes
_WAYS: dict[str, dict[str, Any]] = {
    "in_line": {},
    "persistent": {"writer": "persistent"},
    "fork": {"writer": "fork"},
    "cow": {"writer": "fork", "stage": "cow"},
}
# A forked writer exists only while it writes; the persistent one starts with the save, and must be given its time.
_WRITING_SHARE = {"persistent": 0.6, "fork": 0.1, "cow": 0.1}


def _start_save(way: str, seed: int, directory: Path) -> int:
    """Fork a trainer that saves; its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = _BROKEN
    try:
        crash_runner.OPTIONS = replace(crash_runner.OPTIONS, **_WAYS[way])
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        save = crash_runner.save_in_line if way == "in_line" else crash_runner.save_asynchronously
        save(seed, directory)
        code = _SAVED
    except WriterDiedError as error:
        code = _REFUSED if "SIGKILL" in str(error) else _BROKEN
    except BaseException:  # noqa: BLE001  (the child must not return into the parent's code)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found.update(map(int, (task / "children").read_text().split()))
    return found


def _is_running(pid: int) -> bool:
    try:
        return b") Z" not in Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False


def _wait(pid: int, within_s: float) -> int | None:
    """Exit code of a child, or None at the deadline; the child is killed then."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _strike(victim: str, way: str, seed: int, directory: Path, after_s: float) -> str:
    """One save with one kill: `"saved"`, `"refused"` or `"killed"`. Writers are struck so long after they appeared."""
    trainer = _start_save(way, seed, directory)
    until_s = time.monotonic() + after_s
    others: set[int] = set()
    while time.monotonic() < until_s and _is_running(trainer):
        appeared = not others
        others |= _children(trainer)
        if victim == "writer" and not others:
            until_s = time.monotonic() + after_s
        elif victim == "writer" and appeared:
            until_s = time.monotonic() + after_s * _WRITING_SHARE[way]
        time.sleep(0.0005)
    others |= _children(trainer)
    with contextlib.suppress(ProcessLookupError):
        if victim == "trainer":
            os.kill(trainer, signal.SIGKILL)
        for writer in others if victim == "writer" else ():
            os.kill(writer, signal.SIGKILL)
    struck_s = time.monotonic()
    code = _wait(trainer, 60.0)
    took_s = time.monotonic() - struck_s
    if code is None:
        raise AssertionError("the trainer hangs")
    if code == _REFUSED and took_s > _KNOWS_WITHIN_S:
        raise AssertionError(f"the trainer knew only after {took_s:.1f} s that its writer was dead")
    gone_until_s = time.monotonic() + _GONE_WITHIN_S
    while left := [pid for pid in others if _is_running(pid)]:
        if time.monotonic() > gone_until_s:
            raise AssertionError(f"processes {left} have outlived their trainer")
        time.sleep(0.005)
    outcome = {_SAVED: "saved", _REFUSED: "refused", -signal.SIGKILL: "killed"}.get(code)
    if outcome is None:
        raise AssertionError(f"the trainer ended with {code}")
    return outcome


def run(victim: str, way: str, rounds: int, directory: Path) -> None:
    """Kill again and again, and look each time.

    Raises:
        AssertionError: at the first thing that must not be.
    """
    scenario = crash_runner.SCENARIOS["async-error-replace"]
    generator = random.Random(f"{victim} {way} {rounds}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    if _wait(_start_save(way, _SEEDS[0], directory), 120) != _SAVED:
        raise AssertionError("the first save failed")
    whole_s = time.monotonic() - started_s
    shared_memory = set(Path("/dev/shm").iterdir())
    current = _SEEDS[0]
    tally: Counter[str] = Counter()
    number = 0
    # A fast machine may finish every save before the kill: then there are more rounds, with earlier moments.
    while number < rounds or (all(name.startswith("saved") for name in tally) and number < 20 * rounds):
        number += 1
        new = current % len(_SEEDS) + 1
        began_s = time.monotonic()
        outcome = _strike(victim, way, new, directory, generator.random() * whole_s)
        if outcome == "saved":  # keeps the moments inside a save, also when the machine becomes faster or slower
            whole_s = min(0.7 * whole_s + 0.3 * (time.monotonic() - began_s), 0.8 * whole_s)
        found = crash_runner.look(scenario, directory)
        tally[f"{outcome}, {'new' if found == new else 'old'} checkpoint"] += 1
        allowed = {"saved": {new}, "refused": {current}, "killed": {current, new}}[outcome]
        if found not in allowed:
            raise AssertionError(
                f"round {number}: the save was {outcome}, and the directory holds {found}, not {allowed}"
            )
        current = found
    print(f"{victim} killed, {way}: {dict(sorted(tally.items()))}")
    last = current % len(_SEEDS) + 1
    if _wait(_start_save(way, last, directory), 120) != _SAVED or crash_runner.look(scenario, directory) != last:
        raise AssertionError("the last save does not work")
    if rest := crash_runner.litter(directory):
        raise AssertionError(f"{sorted(rest)} is still there after a save")
    if left := set(Path("/dev/shm").iterdir()) - shared_memory:
        print(f"new in /dev/shm, by whomever: {left}")
    if not tally or all(name.startswith("saved") for name in tally):
        raise AssertionError("no kill hit a save")


def main(rounds: int, directory: Path, pairs: list[str]) -> int:
    mcore_ckpt.install()
    try:
        for pair in pairs:
            victim, way = pair.split(":")
            run(victim, way, rounds, directory / pair)
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
