"""Kill the trainer, or the process that writes for it, at random moments of one save after the other into a directory.

After each kill the directory has to hold the old checkpoint or the new one, whole; all trainers that still live have to
know within seconds, and no process may be left. The next round saves over what the last one left. As in `crash_runner`,
this process imports Megatron once and forks the trainers, one for each rank, for each save.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from mcore_ckpt.core.errors import SaveError, WriterDiedError
from tests.support import crash_runner
from tests.support.processes import children, is_running

# (a rank may lose contact to one that is killed after both have published the checkpoint)
_SAVED, _REFUSED, _PUBLISHED, _BROKEN = 0, 3, 4, 101
_KNOWS_WITHIN_S = 20.0
_GONE_WITHIN_S = 20.0
_SEEDS = (1, 2, 3)  # those that `crash_runner.look` recognizes
WAYS: dict[str, dict[str, Any]] = {
    "in_line": {},
    "persistent": {"writer": "persistent"},
    "fork": {"writer": "fork"},
}
# A forked writer exists only while it writes; the persistent one starts with the save, and must be given its time.
_WRITING_SHARE = {"persistent": 0.6, "fork": 0.1}


def start_save(way: str, seed: int, directory: Path, ranks: int, struck: str) -> list[int]:
    """Fork trainers that save; their process ids, by rank, once they have found each other."""
    sys.stdout.flush()
    meeting = tempfile.mkdtemp(prefix="mcore-ckpt-kills-")
    ready, ready_here = os.pipe()
    trainers = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.close(ready)
            _save(way, seed, directory, rank, ranks, f"{meeting}/store", ready_here, struck)
        trainers.append(child)
    os.close(ready_here)
    for _ in trainers:
        os.read(ready, 1)
    os.close(ready)
    shutil.rmtree(meeting, ignore_errors=True)
    return trainers


def _save(way: str, seed: int, directory: Path, rank: int, ranks: int, store: str, ready: int, struck: str) -> NoReturn:
    code = _BROKEN
    try:
        crash_runner.OPTIONS = replace(crash_runner.OPTIONS, **WAYS[way])
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
        os.write(ready, b".")
        os.close(ready)
        save = crash_runner.save_in_line if way == "in_line" else crash_runner.save_asynchronously
        save(seed, directory)
        code = _SAVED
    except crash_runner.CallbacksRanError as error:
        lost = "lost contact" in str(error)
        code = _PUBLISHED if lost and struck == "trainer" and ranks > 1 else _BROKEN
        if code == _BROKEN:
            traceback.print_exc()
    except WriterDiedError as error:
        code = _REFUSED if "SIGKILL" in str(error) else _BROKEN
    except (SaveError, RuntimeError) as error:
        # Another rank's trainer was killed; Megatron's own collectives say that in gloo's words.
        lost = "lost contact" in str(error) or "peer" in str(error)
        code = _REFUSED if lost and struck == "trainer" and ranks > 1 else _BROKEN
        if code == _BROKEN:
            traceback.print_exc()
    except BaseException:  # noqa: BLE001  (the child must not return into the parent's code)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(pids: list[int], within_s: float) -> dict[int, tuple[int | None, float]]:
    """Of each child its exit code, None if it had to be killed at the deadline, and how long it took, in seconds."""
    began_s = time.monotonic()
    ended: dict[int, tuple[int | None, float]] = {}
    while len(ended) < len(pids):
        took_s = time.monotonic() - began_s
        for pid in set(pids) - set(ended):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[pid] = (os.waitstatus_to_exitcode(status), took_s)
            elif took_s > within_s:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                ended[pid] = (None, took_s)
        time.sleep(0.002)
    return ended


def _save_whole(way: str, seed: int, directory: Path, ranks: int) -> bool:
    ended = wait_for(start_save(way, seed, directory, ranks, "nobody"), 120)
    return all(code == _SAVED for code, _ in ended.values())


def _strike(
    victim: str, way: str, seed: int, directory: Path, after_s: float, ranks: int, rank: int
) -> tuple[str, float]:
    """One save with one kill on one rank: `"saved"`, `"refused"`, `"killed"`, or `"killed late"`, which is after the
    checkpoint was published and its callbacks run; and when the last trainer knew.

    Writers are struck so long after they appeared.
    """
    trainers = start_save(way, seed, directory, ranks, victim)
    trainer = trainers[rank]
    until_s = time.monotonic() + after_s
    writers: set[int] = set()
    others: set[int] = set()
    while time.monotonic() < until_s and is_running(trainer):
        appeared = not writers
        writers |= children(trainer)
        if victim == "writer" and not writers:
            until_s = time.monotonic() + after_s
        elif victim == "writer" and appeared:
            until_s = time.monotonic() + after_s * _WRITING_SHARE[way]
        time.sleep(0.0005)
    writers |= children(trainer)
    others = writers.union(*map(children, trainers))
    with contextlib.suppress(ProcessLookupError):
        if victim == "trainer":
            os.kill(trainer, signal.SIGKILL)
        for writer in writers if victim == "writer" else ():
            os.kill(writer, signal.SIGKILL)
    ended = wait_for(trainers, 60.0)
    codes = {code for code, _ in ended.values()}
    knew_s = max((took_s for code, took_s in ended.values() if code in (_REFUSED, _PUBLISHED)), default=0.0)
    if None in codes:
        raise AssertionError("a trainer hangs")
    if knew_s > _KNOWS_WITHIN_S:
        raise AssertionError(f"a trainer knew only after {knew_s:.1f} s that a process of the save was dead")
    gone_until_s = time.monotonic() + _GONE_WITHIN_S
    while left := [pid for pid in others if is_running(pid)]:
        if time.monotonic() > gone_until_s:
            raise AssertionError(f"processes {left} have outlived their trainer")
        time.sleep(0.005)
    if codes == {_PUBLISHED, -signal.SIGKILL}:
        return "killed late", knew_s
    if -signal.SIGKILL in codes and codes <= {_SAVED, _REFUSED, -signal.SIGKILL}:
        return "killed", knew_s
    if len(codes) == 1 and codes <= {_SAVED, _REFUSED}:
        return ("saved" if _SAVED in codes else "refused"), knew_s
    raise AssertionError(f"the trainers ended with {ended}")


def run(
    victim: str,
    way: str,
    rounds: int,
    directory: Path,
    ranks: int,
    *,
    seed: str,
    judge: Callable[[Path, int, int], str],
) -> Counter[str]:
    """Kill again and again, and look each time. A save that has ended before the kill came is not counted as a round.

    Args:
        victim: `"trainer"` or `"writer"`.
        way: of saving, see `WAYS`.
        rounds: how often.
        directory: to save into.
        ranks: how many trainers.
        seed: whom and when it strikes.
        judge: is given the directory after each kill, the checkpoint that it holds, and the one before; says what to
            count besides.

    Returns:
        What came of the rounds.

    Raises:
        AssertionError: at the first thing that must not be.
    """
    scenario = crash_runner.SCENARIOS["async-error-replace"]
    generator = random.Random(seed)
    directory.parent.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    if not _save_whole(way, _SEEDS[0], directory, ranks):
        raise AssertionError("the first save failed")
    whole_s = time.monotonic() - started_s
    shared_memory = set(Path("/dev/shm").iterdir())
    current = _SEEDS[0]
    tally: Counter[str] = Counter()
    number = hits = 0
    slowest_s = 0.0
    # A fast machine may finish every save before the kill: then there are more rounds, with earlier moments.
    while hits < rounds and number < 20 * rounds:
        number += 1
        new = current % len(_SEEDS) + 1
        began_s = time.monotonic()
        after_s, rank = generator.random() * whole_s, generator.randrange(ranks)
        outcome, knew_s = _strike(victim, way, new, directory, after_s, ranks, rank)
        slowest_s = max(slowest_s, knew_s)
        if outcome == "saved":  # keeps the moments inside a save, also when the machine becomes faster or slower
            whole_s = min(0.7 * whole_s + 0.3 * (time.monotonic() - began_s), 0.8 * whole_s)
        found = crash_runner.look(scenario, directory)
        hits += outcome != "saved"
        more = judge(directory, found, current)
        tally[f"{outcome}, {'new' if found == new else 'old'} checkpoint{more}"] += 1
        allowed = {"saved": {new}, "refused": {current}, "killed": {current, new}, "killed late": {new}}[outcome]
        if found not in allowed:
            raise AssertionError(
                f"round {number}: the save was {outcome}, and the directory holds {found}, not {allowed}"
            )
        current = found
    print(
        f"{victim} killed, {way}, {ranks} rank(s), seed {seed!r}: {dict(sorted(tally.items()))}; "
        f"the last trainer knew after {slowest_s:.2f} s at worst"
    )
    last = current % len(_SEEDS) + 1
    if not _save_whole(way, last, directory, ranks) or crash_runner.look(scenario, directory) != last:
        raise AssertionError("the last save does not work")
    if rest := crash_runner.litter(directory):
        raise AssertionError(f"{sorted(rest)} is still there after a save")
    if left := set(Path("/dev/shm").iterdir()) - shared_memory:
        print(f"new in /dev/shm, by whomever: {left}")
    if hits < rounds:
        raise AssertionError(f"{hits} kills hit a save in {number} rounds; wanted {rounds}")
    return tally
