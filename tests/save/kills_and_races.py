"""Kills at random moments of asynchronous saves, jobs that race for one directory, and the moment that stock has.

    python -m tests.save.kills_and_races --kills 60 --races 200 --seed 7        # minutes; `make test-crash`

*Kills*: one or two ranks save over the last checkpoint, in line, by the persistent writer and by a forked one. At a
random moment one of them, or its writer process, is killed. After each: the old checkpoint or the new one is there,
whole, by this package and by stock Megatron-Core in a process without it; the rank that lives knows within seconds; no
process is left; and the next save works. A save that has ended before the kill came is not counted.

*Races*: two jobs, of one or two ranks, each saving in its own way, start at nearly the same moment in one directory,
new or with a checkpoint in it. One is published, or one after the other; a job that is refused is told, on every rank,
which process is at work there, or that another save has been published. What is there in the end is whole, of a job
that has succeeded, and nothing else is left.

*The moment*: where a checkpoint replaces another, stock Megatron-Core (0.12 to 0.18) reads the new tensors beside the
old common state between two renames; how long that takes here is measured. A kill that has fallen into it is counted,
and this package has to read the new checkpoint then.

The processes are real, forked from one that has imported Megatron.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import torch.distributed as dist

import mcore_ckpt
from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.storage import resolve
from tests.support import kill_runner
from tests.support.checkpoint_reader import CheckpointReader, reader

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
_RACING_WAYS: Final = ("in_line", "persistent", "fork")
_RACE_WITHIN_S: Final = 120.0
# One job starts up to so much later than the other: a save of a few hundred kilobytes takes about as long.
_LATER_BY_S: Final = 0.15
_SAVED, _REFUSED, _BROKEN = 0, 3, 101


# --- kills ------------------------------------------------------------------------------------------------------------


def judge_by(stock: CheckpointReader) -> Callable[[Path, int, int], str]:
    """What stock says of a directory after a kill; raises `AssertionError` if that is not what ours says."""

    def judge(directory: Path, found: int, before: int) -> str:
        told = stock.look(directory)
        assert told.plain == found, f"the directory holds {found}, and DCP reads {told.plain}"
        if told.new_beside_old == (found, before) and any(directory.glob("common.pt.*.pending")):
            return ", stock between the renames"
        assert told.whole == found, f"the directory holds {found}, and stock reads {told}"
        return ""

    return judge


def kill(count: int, seed: int, directory: Path, stock: CheckpointReader) -> Counter[str]:
    """Kill so often; what came of it."""
    tally: Counter[str] = Counter()
    for number, (victim, way, ranks) in enumerate(_GROUPS):
        share = count // len(_GROUPS) + (number < count % len(_GROUPS))
        if share:
            tally += kill_runner.run(
                victim,
                way,
                share,
                directory / f"{victim}-{way}-{ranks}",
                ranks,
                seed=f"{seed} {victim} {way}" + (f" {ranks}" if ranks != 2 else ""),
                judge=judge_by(stock),
            )
    return tally


# --- races ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One of two that race.

    Attributes:
        seed: of what it saves.
        way: how.
        ranks: of how many processes it is.
        later_s: it starts so much later than it could.
    """

    seed: int
    way: str
    ranks: int
    later_s: float

    def __str__(self) -> str:
        return f"{self.way} on {self.ranks} rank(s), {self.later_s * 1000:.0f} ms later"


def _race(job: Job, rank: int, store: Path, directory: Path, ready: int, gate: int, said: Path) -> NoReturn:
    code = _BROKEN
    try:
        kill_runner.use_way(job.way)
        dist.init_process_group("gloo", store=dist.FileStore(str(store), job.ranks), rank=rank, world_size=job.ranks)
        os.write(ready, b".")
        os.read(gate, 1)
        time.sleep(job.later_s)
        save = kill_runner.save_in_line if job.way == "in_line" else kill_runner.save_asynchronously
        save(job.seed, directory)
        code = _SAVED
    except SaveError as error:
        said.write_text(str(error))
        code = _REFUSED
    except BaseException:  # noqa: BLE001  (the child must not return into the parent's code)
        said.write_text(traceback.format_exc())
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_race(jobs: Sequence[Job], directory: Path, scratch: Path) -> list[tuple[set[int | None], list[str], int]]:
    """Let jobs save into one directory at once; of each its exit codes, what its ranks said, and its first process."""
    ready_here, ready = os.pipe()
    gate, gate_open = os.pipe()
    children: list[list[int]] = []
    sys.stdout.flush()
    for number, job in enumerate(jobs):
        children.append([])
        for rank in range(job.ranks):
            child = os.fork()
            if child == 0:
                os.close(ready_here)
                os.close(gate_open)
                _race(job, rank, scratch / f"store-{number}", directory, ready, gate, scratch / f"said-{number}-{rank}")
            children[-1].append(child)
    os.close(ready)
    os.close(gate)
    for _ in range(sum(job.ranks for job in jobs)):
        os.read(ready_here, 1)
    os.close(ready_here)
    os.close(gate_open)  # they are off
    ended = kill_runner.wait_for([child for pids in children for child in pids], _RACE_WITHIN_S)
    found = []
    for number, pids in enumerate(children):
        said = [scratch / f"said-{number}-{rank}" for rank in range(len(pids))]
        found.append(({ended[pid][0] for pid in pids}, [file.read_text() for file in said if file.exists()], pids[0]))
    return found


def race(count: int, seed: int, directory: Path, stock: CheckpointReader, ours: CheckpointReader) -> Counter[str]:
    """Let two jobs race so often; what came of it. Raises `AssertionError` at the first thing that must not be."""
    generator = random.Random(f"{seed} races")
    tally: Counter[str] = Counter()
    for number in range(count):
        place, scratch = directory / str(number) / "c", directory / str(number) / "scratch"
        scratch.mkdir(parents=True)
        place.mkdir()
        replaces = generator.random() < 0.5
        if replaces:
            (codes, said, _), *_ = run_race([Job(1, "in_line", 1, 0.0)], place, scratch)
            assert codes == {_SAVED}, said
            (scratch / "store-0").unlink(missing_ok=True)
        late = generator.randrange(2)
        jobs = [
            Job(
                seed=2 + which,
                way=generator.choice(_RACING_WAYS),
                ranks=generator.choice((1, 2)),
                later_s=generator.random() * _LATER_BY_S if which == late else 0.0,
            )
            for which in range(2)
        ]
        outcomes = run_race(jobs, place, scratch)
        what = f"race {number} ({'replacing' if replaces else 'new'}): {'; '.join(map(str, jobs))}: {outcomes}"
        won = []
        for which, (codes, said, _) in enumerate(outcomes):
            assert len(codes) == 1, f"{what}: the ranks of one job do not agree"
            assert codes <= {_SAVED, _REFUSED}, what
            if codes == {_SAVED}:
                won.append(jobs[which].seed)
                continue
            holder = f"process {outcomes[1 - which][2]} on host {platform.node()}"
            assert len(said) == jobs[which].ranks, what
            told = all(holder in text or "has lost: another save" in text for text in said)
            assert told, f"{what}: a job that is refused is to be told: {holder}"
        assert won, f"{what}: both were refused"
        for process in (ours, stock):
            process.ask(place)
        by_ours, by_stock = ours.answer(), stock.answer()
        assert by_ours.whole in won, f"{what}: ours reads {by_ours}"
        assert by_stock.whole == by_stock.plain == by_ours.whole, f"{what}: ours {by_ours}, stock {by_stock}"
        rest = kill_runner.litter(place)
        assert not rest, f"{what}: {sorted(rest)} is left"
        if len(won) == 2:
            tally["both, one after the other"] += 1
        else:
            tally["one saved, the other told who holds the directory"] += 1
    return tally


# --- the moment between two renames -----------------------------------------------------------------------------------


class _TimedOs:
    """The module `os`, as the storage sees it, noting when files were given their names."""

    def __init__(self) -> None:
        self.at_s: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._timed(real) if name in ("replace", "rename") else real

    def _timed(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, destination: Any, **keywords: Any) -> Any:
            done = real(source, destination, **keywords)
            self.at_s[Path(os.fspath(destination)).name] = time.perf_counter()
            return done

        return call


def measure_moment(count: int, directory: Path) -> list[float]:
    """Seconds between the rename of `.metadata` and that of the common state, in so many replacing saves."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(receive)
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            kill_runner.save_in_line(1, directory)
            timed = _TimedOs()
            resolve.os = timed  # type: ignore[attr-defined]
            for number in range(count):
                kill_runner.save_in_line(number % 3 + 1, directory)
                os.write(send, f"{timed.at_s['common.pt'] - timed.at_s['.metadata']}\n".encode())
        except BaseException:  # noqa: BLE001  (the child must not return into the parent's code)
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        found = [float(line) for line in pipe]
    os.waitpid(child, 0)
    assert len(found) == count, "a save has failed"
    return found


# --- the command ------------------------------------------------------------------------------------------------------


def _told(tally: Counter[str]) -> str:
    return "; ".join(f"{count} x {name}" for name, count in sorted(tally.items()))


def main(arguments: Sequence[str]) -> int:
    """0 if all is as promised, 1 at the first thing that is not."""
    parser = argparse.ArgumentParser(prog="python -m tests.save.kills_and_races", description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=60, help="at moments of saves")
    parser.add_argument("--races", type=int, default=200, help="of two jobs for one directory")
    parser.add_argument("--saves", type=int, default=100, help="in which the moment between two renames is measured")
    parser.add_argument("--seed", type=int, default=None, help="of all that is random; printed")
    given = parser.parse_args(arguments)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}", flush=True)
    for chatty in ("megatron", "mcore_ckpt"):  # they tell of each directory that is not empty, or taken over
        logging.getLogger(chatty).setLevel(logging.ERROR)
    mcore_ckpt.install()
    began_s = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="kills-and-races-") as place, reader("stock") as stock:
            directory = Path(place)
            if given.kills:
                tally = kill(given.kills, seed, directory / "kills", stock)
                hits = sum(count for name, count in tally.items() if not name.startswith("saved"))
                print(f"{hits} kills: {_told(tally)}", flush=True)
            if given.races:
                with reader("ours") as ours:
                    print(f"{given.races} races: {_told(race(given.races, seed, directory, stock, ours))}", flush=True)
            if given.saves:
                moments = sorted(measure_moment(given.saves, directory / "moment"))
                print(
                    f"between the two renames, in {len(moments)} saves: {1000 * statistics.median(moments):.2f} ms in "
                    f"the median, {1000 * moments[-1]:.2f} ms at most"
                )
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    print(f"all as promised; {time.monotonic() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
