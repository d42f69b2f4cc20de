"""Kills at random moments of saves, and jobs that race for one directory.

    python -m tests.save.kills_and_races --kills 60 --races 200 --seed 7        # minutes; `make test-crash`

*Kills*: one or two ranks save over the last checkpoint, in line, by the persistent writer and by a forked one. At a
random moment one of them, or its writer process, is killed. After each: the old checkpoint or the new one is there,
whole, by this package and by stock Megatron-Core in a process without it; the rank that lives knows within seconds; no
process is left; and the next save works. A save that has ended before the kill came is not counted.

*Races*: two jobs, of one or two ranks, each saving in its own way, start at nearly the same moment in one directory,
new or with a checkpoint in it. One is published, or one after the other; a job that is refused is told, on every rank,
which process is at work there, or that another save has been published. What is there in the end is whole, of a job
that has succeeded, and nothing else is left.

Where a checkpoint replaces another, stock Megatron-Core (0.12 to 0.18) reads the new tensors beside the old common
state between two renames. A kill that has fallen into that moment is counted; this package reads the new checkpoint.

The processes are real, forked from one that has imported Megatron.
"""

import argparse
import contextlib
import logging
import os
import platform
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import torch.distributed as dist

import mcore_ckpt
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.directory.in_force import index_files
from mcore_ckpt.format.metadata_read import read_index
from tests.support.checkpoint_reader import CheckpointReader, reader
from tests.support.kill_runner import CallbacksRanError, save, wait_for
from tests.support.processes import children, is_running, until

# Who is killed, how the save is written, and by how many ranks.
_GROUPS: Final = (
    ("trainer", "persistent", 2),
    ("trainer", "fork", 2),
    ("writer", "persistent", 2),
    ("writer", "fork", 2),
    ("trainer", "in_line", 1),
    ("trainer", "persistent", 1),
    ("writer", "persistent", 1),
)
_WITHIN_S: Final = 120.0
_KNOWS_WITHIN_S: Final = 20.0
# One job starts up to so much later than the other: a save of a few hundred kilobytes takes about as long.
_LATER_BY_S: Final = 0.15
# A forked writer exists only while it writes; the persistent one starts with the save, and must be given its time.
_WRITING_SHARE: Final = {"persistent": 0.6, "fork": 0.1}
# (a rank may lose contact to one that is killed after both have published the checkpoint)
_SAVED, _REFUSED, _PUBLISHED, _BROKEN = 0, 3, 4, 101


@dataclass(frozen=True)
class Job:
    """What is saved, how, by how many processes, and how much later than it could."""

    seed: int
    way: str
    ranks: int = 1
    later_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.way} on {self.ranks} rank(s), {self.later_s * 1000:.0f} ms later"


def _rank(job: Job, rank: int, directory: Path, place: Path, ready: int, gate: int) -> NoReturn:
    code, said = _BROKEN, ""
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(f"{place}/store", job.ranks), rank=rank, world_size=job.ranks
        )
        os.write(ready, b".")
        os.read(gate, 1)
        time.sleep(job.later_s)
        save(job.seed, directory, job.way)
        code = _SAVED
    except CallbacksRanError as error:
        code, said = _PUBLISHED, str(error)
    except (SaveError, RuntimeError) as error:  # Megatron's own collectives say in gloo's words who is gone
        code, said = _REFUSED, str(error)
    except BaseException:  # noqa: BLE001  (the child must not return into the parent's code)
        said = traceback.format_exc()
    finally:
        (place / str(rank)).write_text(said)
        os._exit(code)


def start(jobs: Sequence[Job], directory: Path, scratch: Path) -> list[list[int]]:
    """Fork the ranks of jobs that save into one directory; of each job their process ids, once all are off.

    What a rank has raised is in `scratch / NUMBER OF THE JOB / RANK`.
    """
    ready_here, ready = os.pipe()
    gate, gate_open = os.pipe()
    started: list[list[int]] = []
    sys.stdout.flush()
    for number, job in enumerate(jobs):
        place = scratch / str(number)
        place.mkdir(parents=True, exist_ok=True)
        (place / "store").unlink(missing_ok=True)
        started.append([])
        for rank in range(job.ranks):
            child = os.fork()
            if child == 0:
                os.close(ready_here)
                os.close(gate_open)
                _rank(job, rank, directory, place, ready, gate)
            started[-1].append(child)
    os.close(ready)
    os.close(gate)
    for _ in range(sum(job.ranks for job in jobs)):
        os.read(ready_here, 1)
    os.close(ready_here)
    os.close(gate_open)
    return started


def _save_whole(job: Job, directory: Path, scratch: Path) -> None:
    (ranks,) = start([job], directory, scratch)
    ended = wait_for(ranks, _WITHIN_S)
    said = [(scratch / "0" / str(rank)).read_text() for rank in range(job.ranks)]
    assert {code for code, _ in ended.values()} == {_SAVED}, f"a save has failed: {said}"


def _litter(directory: Path) -> set[str]:
    own = {".metadata", "metadata.json", "common.pt", *index_files(read_index(directory))}
    return {path.name for path in directory.iterdir()} - own


# --- kills ------------------------------------------------------------------------------------------------------------


def _strike(victim: str, job: Job, directory: Path, scratch: Path, after_s: float, rank: int) -> str:
    """One save with one kill on one rank: `"saved"`, `"refused"`, `"killed"`, or `"killed late"`, which is after the
    checkpoint was published and its callbacks run. Writers are struck so long after they appeared.
    """
    (trainers,) = start([job], directory, scratch)
    trainer = trainers[rank]
    until_s = time.monotonic() + after_s
    writers: set[int] = set()
    while time.monotonic() < until_s and is_running(trainer):
        appeared = not writers
        writers |= children(trainer)
        if victim == "writer" and not writers:
            until_s = time.monotonic() + after_s
        elif victim == "writer" and appeared:
            until_s = time.monotonic() + after_s * _WRITING_SHARE[job.way]
        time.sleep(0.0005)
    writers |= children(trainer)
    others = writers.union(*map(children, trainers))
    for pid in [trainer] if victim == "trainer" else writers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    ended = wait_for(trainers, 60.0)
    for number, pid in enumerate(trainers):
        code, took_s = ended[pid]
        if code in (_REFUSED, _PUBLISHED):
            assert took_s < _KNOWS_WITHIN_S, (
                f"a rank knew only after {took_s:.1f} s that a process of the save was dead"
            )
            said = (scratch / "0" / str(number)).read_text()
            lost = victim == "trainer" and job.ranks > 1 and ("lost contact" in said or "peer" in said)
            assert lost or (code == _REFUSED and "SIGKILL" in said), f"rank {number} was told something else: {said}"
    until(lambda: not any(map(is_running, others)), f"of {others} some have outlived their trainer", _KNOWS_WITHIN_S)
    codes = {code for code, _ in ended.values()}
    if codes == {_PUBLISHED, -signal.SIGKILL}:
        return "killed late"
    if -signal.SIGKILL in codes and codes <= {_SAVED, _REFUSED, -signal.SIGKILL}:
        return "killed"
    assert codes in ({_SAVED}, {_REFUSED}), f"the trainers ended with {ended}; None: had to be killed"
    return "saved" if codes == {_SAVED} else "refused"


def _kill_in_group(
    victim: str,
    way: str,
    ranks: int,
    rounds: int,
    directory: Path,
    generator: random.Random,
    readers: list[CheckpointReader],
) -> Counter[str]:
    directory.mkdir(parents=True)
    place, scratch = directory / "c", directory / "scratch"
    began_s = time.monotonic()
    _save_whole(Job(1, way, ranks), place, scratch)
    whole_s = time.monotonic() - began_s
    current, number, hits = 1, 0, 0
    beside = 1  # the common state that stock reads; what a kill leaves is repaired when the next save begins to write
    tally: Counter[str] = Counter()
    # A fast machine may finish every save before the kill: then there are more rounds, with earlier moments.
    while hits < rounds:
        assert number < 20 * rounds, f"{hits} kills hit a save in {number} rounds; wanted {rounds}"
        number, new = number + 1, current % 3 + 1
        began_s = time.monotonic()
        after_s, rank = generator.random() * whole_s, generator.randrange(ranks)
        outcome = _strike(victim, Job(new, way, ranks), place, scratch, after_s, rank)
        if outcome == "saved":  # keeps the moments inside a save, also when the machine becomes faster or slower
            whole_s = min(0.7 * whole_s + 0.3 * (time.monotonic() - began_s), 0.8 * whole_s)
        hits += outcome != "saved"
        for process in readers:
            process.ask(place)
        by_ours, by_stock = (process.answer() for process in readers)
        found, what = by_ours.whole, f"round {number}: the save was {outcome}"
        allowed = {"saved": {new}, "refused": {current}, "killed": {current, new}, "killed late": {new}}[outcome]
        assert found in allowed, f"{what}, and the directory holds {by_ours}, not {allowed}"
        assert by_stock.plain == found, f"{what}, the directory holds {found}, and DCP reads {by_stock.plain}"
        between = by_stock.new_beside_old == (found, beside) and any(place.glob("common.pt.*.pending"))
        assert between or by_stock.whole == found, f"{what}, the directory holds {found}, and stock reads {by_stock}"
        tally[f"{outcome}, {'new' if found == new else 'old'} checkpoint{', stock between the renames' * between}"] += 1
        current, beside = found or 0, beside if between else found or 0
    _save_whole(Job(current % 3 + 1, way, ranks), place, scratch)
    assert readers[0].look(place).whole == current % 3 + 1
    assert not (rest := _litter(place)), f"{sorted(rest)} is still there after a save"
    return tally


def kill(count: int, seed: int, directory: Path, readers: list[CheckpointReader]) -> Counter[str]:
    """Kill so often; what came of it. Raises `AssertionError` at the first thing that must not be."""
    tally: Counter[str] = Counter()
    for number, (victim, way, ranks) in enumerate(_GROUPS):
        share = count // len(_GROUPS) + (number < count % len(_GROUPS))
        name = f"{victim}-{way}-{ranks}"
        if share:
            generator = random.Random(f"{seed} {name}")
            tally += _kill_in_group(victim, way, ranks, share, directory / name, generator, readers)
    return tally


# --- races ------------------------------------------------------------------------------------------------------------


def race(count: int, seed: int, directory: Path, readers: list[CheckpointReader]) -> Counter[str]:
    """Let two jobs race so often; what came of it. Raises `AssertionError` at the first thing that must not be."""
    generator = random.Random(f"{seed} races")
    tally: Counter[str] = Counter()
    for number in range(count):
        place, scratch = directory / str(number) / "c", directory / str(number) / "scratch"
        place.mkdir(parents=True)
        replaces = generator.random() < 0.5
        if replaces:
            _save_whole(Job(1, "in_line"), place, scratch)
        late = generator.randrange(2)
        jobs = [
            Job(
                seed=2 + which,
                way=generator.choice(("in_line", "persistent", "fork")),
                ranks=generator.choice((1, 2)),
                later_s=generator.random() * _LATER_BY_S if which == late else 0.0,
            )
            for which in range(2)
        ]
        started = start(jobs, place, scratch)
        ended = wait_for([pid for pids in started for pid in pids], _WITHIN_S)
        what = f"race {number} ({'replacing' if replaces else 'new'}): {'; '.join(map(str, jobs))}: {started}, {ended}"
        won = []
        for which, pids in enumerate(started):
            codes = {ended[pid][0] for pid in pids}
            assert codes in ({_SAVED}, {_REFUSED}), f"{what}: one has failed, or the ranks of one job do not agree"
            if codes == {_SAVED}:
                won.append(jobs[which].seed)
                continue
            holder = f"process {started[1 - which][0]} on host {platform.node()}"
            for rank in range(len(pids)):
                said = (scratch / str(which) / str(rank)).read_text()
                told = holder in said or "has lost: another save" in said
                assert told, f"{what}: a job that is refused is to be told: {holder}, and not: {said}"
        assert won, f"{what}: both were refused"
        for process in readers:
            process.ask(place)
        by_ours, by_stock = (process.answer() for process in readers)
        assert by_ours.whole in won, f"{what}: ours reads {by_ours}"
        assert by_stock.whole == by_stock.plain == by_ours.whole, f"{what}: ours {by_ours}, stock {by_stock}"
        assert not (rest := _litter(place)), f"{what}: {sorted(rest)} is left"
        tally["both, one after the other" if len(won) == 2 else "one saved, the other told"] += 1
    return tally


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """0 if all is as promised, 1 at the first thing that is not."""
    parser = argparse.ArgumentParser(prog="python -m tests.save.kills_and_races", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=60, help="at moments of saves")
    parser.add_argument("--races", type=int, default=200, help="of two jobs for one directory")
    parser.add_argument("--seed", type=int, default=None, help="of all that is random; printed")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    for chatty in ("megatron", "mcore_ckpt"):  # they tell of each directory that is not empty, or taken over
        logging.getLogger(chatty).setLevel(logging.ERROR)
    mcore_ckpt.install()
    began_s = time.monotonic()
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kills-and-races-") as place,
            reader("ours") as ours,
            reader("stock") as stock,
        ):
            for what, work, count in (("kills", kill, given.kills), ("races", race, given.races)):
                tally = work(count, seed, Path(place) / what, [ours, stock])
                told = "; ".join(f"{number} x {name}" for name, number in sorted(tally.items()))
                print(f"{count} {what}: {told}", flush=True)
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    print(f"all as promised; {time.monotonic() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
