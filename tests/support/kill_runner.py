"""Kill the trainer, or the process that writes for it, at random moments of one save after the other into a directory.

After each kill the directory has to hold the old checkpoint or the new one, complete; all trainers that still live have
to know within seconds, and no process may be left. The next round saves over what the last one left. What is saved
depends on a seed alone, so a mix of two checkpoints shows. This process imports Megatron once and forks the trainers,
one for each rank, for each save, and a child for each look.
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

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint import CheckpointException

from mcore_ckpt import AsyncCallsQueue, SaveOptions, TorchDistSaveStrategy
from mcore_ckpt.core.errors import CheckpointError, SaveError, WriterDiedError
from tests.support.processes import children, is_running
from tests.support.seeded_state import sharded_state_dict, tensors

# (a rank may lose contact to one that is killed after both have published the checkpoint)
_SAVED, _REFUSED, _PUBLISHED, _ABSENT, _BROKEN = 0, 3, 4, 100, 101
_KNOWS_WITHIN_S = 20.0
_GONE_WITHIN_S = 20.0
_SEEDS = (1, 2, 3)  # those that `look` recognizes
WAYS: dict[str, dict[str, Any]] = {
    "in_line": {},
    "persistent": {"writer": "persistent"},
    "fork": {"writer": "fork"},
}
# A forked writer exists only while it writes; the persistent one starts with the save, and must be given its time.
_WRITING_SHARE = {"persistent": 0.6, "fork": 0.1}


OPTIONS = SaveOptions(thread_count=2)


def use_way(way: str) -> None:
    """Save so, in this process, from now on."""
    global OPTIONS
    OPTIONS = replace(OPTIONS, **WAYS[way])


def save_in_line(seed: int, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    dist_checkpointing.save(sharded_state_dict(seed), str(directory), TorchDistSaveStrategy(options=OPTIONS))


class CallbacksRanError(AssertionError):
    """The save's callbacks have run, and then the queue has raised: right only if it was published before contact to
    another rank was lost.
    """


def save_asynchronously(seed: int, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    queue = AsyncCallsQueue(persistent=True)
    strategy = TorchDistSaveStrategy(options=OPTIONS)
    state = sharded_state_dict(seed)
    request = dist_checkpointing.save(state, str(directory), strategy, async_sharded_save=True)
    callbacks: list[int] = []
    request.add_finalize_fn(lambda: callbacks.append(seed))
    queue.schedule_async_request(request)
    for value in state.values():
        if isinstance(value, ShardedTensor):
            value.data.zero_()  # training goes on
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except CheckpointError as error:
        if callbacks:
            raise CallbacksRanError(f"a finalize callback of a failed save has run: {error}") from error
        raise
    finally:
        queue.close(abort=True)
    if callbacks != [seed]:
        raise AssertionError("the finalize callback of a good save has not run")


def load_megatron(directory: Path) -> dict[str, Any]:
    wanted = sharded_state_dict(0)
    common = dist_checkpointing.load_common_state_dict(str(directory))
    loaded = dist_checkpointing.load(wanted, str(directory))
    return {**{key: loaded[key] for key in tensors(0)}, "seeds": {loaded["object"]["seed"], common["iteration"]}}


def in_child(work: Callable[[], int]) -> int:
    """Exit code of `work`, run in a forked child with a gloo world of its own; `_BROKEN` if it raises."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = _BROKEN
        try:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            code = work()
        except BaseException:  # noqa: BLE001  (the child must not return into the parent's code)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def look(directory: Path) -> int:
    """The seed of the checkpoint in a directory, `_ABSENT`, or `_BROKEN` for a mix or anything unreadable."""

    def work() -> int:
        # Megatron writes `metadata.json` last, and takes a directory without it for no checkpoint.
        needed = (".metadata", "metadata.json")
        if not all((directory / name).exists() for name in needed):
            try:
                load_megatron(directory)
            except (Exception, CheckpointException):  # noqa: BLE001  (Megatron may answer first, in its words)
                return _ABSENT
            print(f"a directory without all of {needed} was loaded")
            return _BROKEN
        found = load_megatron(directory)
        for seed in range(4):
            if found["seeds"] == {seed} and all(torch.equal(found[key], value) for key, value in tensors(seed).items()):
                return seed
        print(f"a mix: object and common state are of {found['seeds']}, and the tensors of another seed")
        return _BROKEN

    return in_child(work)


def litter(directory: Path) -> set[str]:
    """Files that do not belong to the checkpoint in the directory."""
    from mcore_ckpt.directory.in_force import index_files
    from mcore_ckpt.format.metadata_read import read_index

    own = {".metadata", "metadata.json", "common.pt", *index_files(read_index(directory))}
    return {path.name for path in directory.iterdir()} - own


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
        use_way(way)
        dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
        os.write(ready, b".")
        os.close(ready)
        save = save_in_line if way == "in_line" else save_asynchronously
        save(seed, directory)
        code = _SAVED
    except CallbacksRanError as error:
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
        found = look(directory)
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
    if not _save_whole(way, last, directory, ranks) or look(directory) != last:
        raise AssertionError("the last save does not work")
    if rest := litter(directory):
        raise AssertionError(f"{sorted(rest)} is still there after a save")
    if left := set(Path("/dev/shm").iterdir()) - shared_memory:
        print(f"new in /dev/shm, by whomever: {left}")
    if hits < rounds:
        raise AssertionError(f"{hits} kills hit a save in {number} rounds; wanted {rounds}")
    return tally
