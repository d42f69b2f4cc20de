"""Save again and again into a directory, each time with another thing going wrong, and look at what is left.

    python -m tests.support.crash_runner DIRECTORY SCENARIO...

A process of its own: it imports Megatron once, without starting a thread, and forks a child for each save and each
look, so that a crash costs milliseconds. It writes to standard output what it tried, one line each, and ends with 1 at
the first thing that must not be.

A save is one of three: of Megatron, in line; of Megatron, asynchronously by the persistent writer; of
`torch.distributed.checkpoint`. What is saved depends on a seed alone, so a mix of two checkpoints shows.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint import CheckpointException

import mcore_ckpt
from mcore_ckpt import AsyncCallsQueue, FileSystemReader, FileSystemWriterAsync, SaveOptions, TorchDistSaveStrategy
from mcore_ckpt.core.errors import CheckpointError
from mcore_ckpt.storage import resolve
from mcore_ckpt.storage.resolve import LocalStorage
from tests.support.faulty_storage import Faults, FaultyStorage, How
from tests.support.seeded_state import sharded_state_dict, tensors

OPTIONS = SaveOptions(thread_count=2)
_SAVED, _REFUSED = 0, 3
_ABSENT, _BROKEN = 100, 101  # exit codes of a look; below them, the seed that was found


# The three ways of saving and of looking


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


def save_dcp(seed: int, directory: Path) -> None:
    state = {**tensors(seed), "object": {"seed": seed}}
    dcp.save(state, storage_writer=FileSystemWriterAsync(directory, options=OPTIONS), no_dist=True)


def load_dcp(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = {**tensors(0), "seed": None, "object": {"seed": -1}}
    del state["seed"]
    dcp.load(state, storage_reader=FileSystemReader(directory), no_dist=True)
    return {**state, "seeds": {state["object"]["seed"]}}


@dataclass(frozen=True)
class Scenario:
    """One way of saving, and what goes wrong with it.

    Attributes:
        save: writes the state of a seed into a directory.
        load: reads it back, as tensors by key, and `"seeds"`, which all else that was read belongs to.
        exists: whether there is a checkpoint before.
        faults: what goes wrong, but for the number of the operation.
        in_writer: it goes wrong in the writer process.
    """

    save: Callable[[int, Path], None]
    load: Callable[[Path], dict[str, Any]]
    exists: bool
    faults: Faults
    in_writer: bool = False


def _scenarios() -> Iterator[tuple[str, Scenario]]:
    ways: dict[str, tuple[Callable[[int, Path], None], Callable[[Path], dict[str, Any]]]] = {
        "in_line": (save_in_line, load_megatron),
        "async": (save_asynchronously, load_megatron),
        "dcp": (save_dcp, load_dcp),
    }
    hows: dict[str, Faults] = {
        "error": Faults(how="error"),
        "full_disk": Faults(how="error", sticky=True),
        "exit": Faults(how="exit"),
        "torn": Faults(how="torn"),
    }
    for way, (save, load) in ways.items():
        for how, faults in hows.items():
            for exists in (False, True):
                name = f"{way}-{how}-{'replace' if exists else 'fresh'}"
                yield name, Scenario(save, load, exists, faults)
    kill: How = "kill"
    for name, faults in (("error", Faults()), ("killed", Faults(how=kill)), ("torn", Faults(how="torn"))):
        yield f"writer-{name}-replace", Scenario(save_asynchronously, load_megatron, True, faults, in_writer=True)


SCENARIOS = dict(_scenarios())


# Children


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


def attempt(scenario: Scenario, seed: int, directory: Path, faults: Faults | None) -> int:
    """Save; `_SAVED`, `_REFUSED` with one of our errors, or how the process ended."""

    def work() -> int:
        if faults is not None:
            resolve.LocalStorage = lambda root, **given: FaultyStorage(LocalStorage(root, **given), faults)  # type: ignore[misc, assignment]
        try:
            scenario.save(seed, directory)
        except (CheckpointError, CheckpointException) as error:  # DCP wraps what ranks raise in one of its own
            if faults is not None and re.search("injected|SIGKILL|exit code 17", _whole_text(error)):
                return _REFUSED
            raise  # for another reason than the one that we gave
        return _SAVED

    return in_child(work)


def _whole_text(error: BaseException | None) -> str:
    text = ""
    while error is not None:
        text, error = f"{text} {error}", error.__cause__
    return text


def look(scenario: Scenario, directory: Path) -> int:
    """The seed of the checkpoint in a directory, `_ABSENT`, or `_BROKEN` for a mix or anything unreadable."""

    def work() -> int:
        # Megatron writes `metadata.json` last, and takes a directory without it for no checkpoint; DCP knows it not.
        needed = (".metadata",) if scenario.load is load_dcp else (".metadata", "metadata.json")
        if not all((directory / name).exists() for name in needed):
            try:
                scenario.load(directory)
            except (Exception, CheckpointException):  # noqa: BLE001  (Megatron or DCP may answer first, in their words)
                return _ABSENT
            print(f"a directory without all of {needed} was loaded")
            return _BROKEN
        found = scenario.load(directory)
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


# The loop


def run(scenario: Scenario, base: Path) -> None:
    """Strike at each operation of a save, and check each time.

    Raises:
        AssertionError: at the first thing that must not be.
    """
    old, new, after = 1, 2, 3
    template = base / "old"
    if scenario.exists and attempt(scenario, old, template, None) != _SAVED:
        raise AssertionError("the first save failed")
    operations = _record(scenario, template, base, new)
    print(f"{len(operations)} operations: {', '.join(operations)}")
    if len(operations) < 5:
        raise AssertionError("too few operations were recorded: the storage under test is not the one in use")
    for k, operation in enumerate(operations):
        directory = _fresh_copy(scenario, template, base / f"at{k}")
        faults = replace(scenario.faults, at=k)
        outcome = attempt(scenario, new, directory, Faults(in_writer=faults) if scenario.in_writer else faults)
        found = look(scenario, directory)
        print(f"at {k} ({operation}): the save ended with {outcome}, the directory holds {found}")
        # (Where nothing can be written any more, what is in force cannot be made durable, nor taken back.)
        refused = {old if scenario.exists else _ABSENT, *([new] if scenario.faults.sticky else [])}
        allowed = {_SAVED: {new}, _REFUSED: refused}
        crashed = {old, new} if scenario.exists else {_ABSENT, new}
        if outcome == _BROKEN or found not in allowed.get(outcome, crashed):
            raise AssertionError(f"at {k} ({operation}): the save ended with {outcome}, the directory holds {found}")
        if attempt(scenario, after, directory, None) != _SAVED or look(scenario, directory) != after:
            raise AssertionError(f"at {k} ({operation}): the next save into the directory does not work")
        if rest := litter(directory):
            raise AssertionError(f"at {k} ({operation}): after the next save, {sorted(rest)} is still there")
        shutil.rmtree(directory)


def _record(scenario: Scenario, template: Path, base: Path, seed: int) -> list[str]:
    record = base / "operations"
    faults = Faults(record=str(record))
    directory = _fresh_copy(scenario, template, base / "recorded")
    if attempt(scenario, seed, directory, Faults(in_writer=faults) if scenario.in_writer else faults) != _SAVED:
        raise AssertionError("a save without faults failed")
    if look(scenario, directory) != seed or litter(directory):
        raise AssertionError(f"a save without faults left {look(scenario, directory)} and {litter(directory)}")
    return record.read_text().splitlines()


def _fresh_copy(scenario: Scenario, template: Path, directory: Path) -> Path:
    if scenario.exists:
        shutil.copytree(template, directory)
    return directory


def main(base: Path, *names: str) -> int:
    mcore_ckpt.install()
    for name in names:
        print(f"== {name}")
        (base / name).mkdir(parents=True, exist_ok=True)
        try:
            run(SCENARIOS[name], base / name)
        except AssertionError as error:
            print(f"FAILED: {name}: {error}")
            return 1
        shutil.rmtree(base / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
