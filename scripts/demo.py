"""The main job from end to end, on the CPU of this machine: `make demo`.

A real Megatron-Core GPT model with gated MLPs and a distributed Adam trains on 4 gloo ranks at TP=2 x PP=2. It is saved
asynchronously by the writer process while training goes on, and loaded under other layouts, by stock Megatron-Core and
by plain torch.distributed.checkpoint (DCP); then checkpoints of those two are loaded by this package. Each comparison
is of every byte of every parameter and optimizer moment, against the state at the moment of the save.

Exit code 0 if every verdict is good, 1 if one is not.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.gloo_ranks import RanksFailedError, run_ranks
from tests.support.models import GATED, Parallel, build_training
from tests.support.state_compare import differing, read_state, write_state
from tests.support.who_ran import record_strategies

MODEL = dataclasses.replace(GATED, layers=4, hidden=256, vocabulary=2048, sequence=32)
TRAINING_LAYOUT = Parallel(tensor=2, pipeline=2)
STEPS_BEFORE_SAVE = 3
LEAST_STEPS_DURING_SAVE = 2
DEADLINE_S = 240
IDENTICAL = "bit-identical"

Tensors = dict[str, Any]  # global ones by key


@dataclass(frozen=True, slots=True)
class Saved:
    """One rank's account of a save."""

    blocking_s: float
    durable_s: float
    steps_meanwhile: int
    writers: int  # processes that this rank started for the save
    strategies: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """One rank's account of a load."""

    seconds: float
    strategies: tuple[str, ...]
    iteration: int


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the final table."""

    what: str
    layout: str
    seconds: float
    verdict: str
    good: bool


def train_and_save_async(rank: int, work: Path) -> Saved:
    """Train, take the reference, save with this package's writer process, and go on training until it is published."""
    quiet()
    training = build_training(MODEL, TRAINING_LAYOUT, seed=1)
    training.train(STEPS_BEFORE_SAVE)

    from megatron.core import dist_checkpointing

    import mcore_ckpt

    mcore_ckpt.install()
    queue = mcore_ckpt.AsyncCallsQueue()
    state_dict = training.sharded_state_dict()
    write_state(work / "reference", rank, state_dict)
    children = set(psutil.Process().children())
    steps = 0
    with record_strategies() as strategies:
        started_s = time.monotonic()
        request = dist_checkpointing.save(
            state_dict,
            fresh_directory(rank, work / "ours"),
            mcore_ckpt.TorchDistSaveStrategy(),
            async_sharded_save=True,
        )
        queue.schedule_async_request(request)
        blocking_s = time.monotonic() - started_s
        writers = len(set(psutil.Process().children()) - children)
        while queue.get_num_unfinalized_calls() or steps < LEAST_STEPS_DURING_SAVE:
            training.train(1)
            steps += 1
            queue.maybe_finalize_async_calls(blocking=False)
        durable_s = time.monotonic() - started_s
    queue.close()
    write_state(work / "reference-later", rank, training.sharded_state_dict())
    return Saved(blocking_s, durable_s, steps, writers, tuple(strategies))


def train_and_save_stock(rank: int, work: Path) -> Saved:
    """The same model of another seed, saved by stock Megatron-Core in line."""
    quiet()
    training = build_training(MODEL, TRAINING_LAYOUT, seed=2)
    training.train(STEPS_BEFORE_SAVE)
    from megatron.core import dist_checkpointing

    state_dict = training.sharded_state_dict()
    write_state(work / "stock-reference", rank, state_dict)
    with record_strategies() as strategies:
        started_s = time.monotonic()
        dist_checkpointing.save(state_dict, fresh_directory(rank, work / "stock"))
        seconds = time.monotonic() - started_s
    write_state(work / "stock-reference-later", rank, training.sharded_state_dict())
    assert "mcore_ckpt" not in sys.modules
    return Saved(seconds, seconds, 0, 0, tuple(strategies))


def save_stock_then_load_ours(rank: int, work: Path) -> tuple[Saved, Loaded]:
    """Both jobs of a process that has never imported this package."""
    saved = train_and_save_stock(rank, work)
    loaded = load(rank, work / "ours", work / "by-stock", Parallel(tensor=2))
    assert "mcore_ckpt" not in sys.modules
    return saved, loaded


def load_with_ours(rank: int, jobs: list[tuple[Path, Path, Parallel]]) -> list[Loaded]:
    """Load each (checkpoint, place of what is compared, layout) with this package installed."""
    quiet()
    from tests.support.cpu_megatron import pretend_cuda

    pretend_cuda()
    import mcore_ckpt

    mcore_ckpt.install()
    return [load(rank, *job) for job in jobs]


def load(rank: int, checkpoint: Path, place: Path, layout: Parallel) -> Loaded:
    """Load into a freshly initialized model, with whatever strategies are in force; its state before and after."""
    training = build_training(MODEL, layout, seed=100)
    from megatron.core import dist_checkpointing

    # The model alone: where state is to be loaded, Megatron's optimizer has memory that nobody has written.
    write_state(place / "before", rank, training.sharded_state_dict(is_loading=True)["model"])
    barrier()
    with record_strategies() as strategies:
        started_s = time.monotonic()
        training.load(dist_checkpointing.load(training.sharded_state_dict(is_loading=True), checkpoint))
        seconds = time.monotonic() - started_s
    write_state(place / "after", rank, training.sharded_state_dict())
    return Loaded(seconds, tuple(strategies), training.step)


def load_with_stock_dcp(checkpoint: Path, reference: Tensors) -> Row:
    """Plain DCP, which knows nothing of Megatron, reads our checkpoint in this process."""
    from torch.distributed.checkpoint import FileSystemReader

    return dcp_load("ours -> stock DCP", FileSystemReader(checkpoint), reference)


def load_dcp_checkpoint_with_ours(checkpoint: Path, reference: Tensors) -> Row:
    """Plain DCP writes the reference; our reader, as a DCP storage reader, loads it."""
    import torch.distributed.checkpoint as dcp

    from mcore_ckpt import FileSystemReader

    dcp.save(dict(reference), checkpoint_id=checkpoint, no_dist=True)
    return dcp_load("stock DCP -> ours", FileSystemReader(checkpoint), reference)


def dcp_load(what: str, reader: Any, reference: Tensors) -> Row:
    """Load every tensor of the reference through `reader` and compare."""
    import torch
    import torch.distributed.checkpoint as dcp

    # Filled with ones: an element that the reader leaves alone must not pass for a loaded zero.
    tensors = {fqn: torch.ones_like(tensor) for fqn, tensor in reference.items()}
    started_s = time.monotonic()
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    seconds = time.monotonic() - started_s
    wrong = difference(tensors, reference)
    return Row(what, "no process group", seconds, wrong or IDENTICAL, not wrong)


def difference(found: Tensors, expected: Tensors) -> str:
    """Which tensors are not the same; empty if all are."""
    wrong = differing(found, expected)
    return f"{len(wrong)} tensors differ, such as {wrong[0]}" if wrong else ""


def saved_row(what: str, accounts: list[Saved], reference: Path, package: str, is_async: bool) -> Row:
    """Judge a save: the right strategy ran on every rank and, if async, in a process beside training that went on."""
    problems = wrong_strategies([account.strategies for account in accounts], package)
    # The state after the save, which training has changed if it went on.
    changed = difference(read_state(reference.with_name(f"{reference.name}-later")), read_state(reference))
    writers = [account.writers for account in accounts]
    if is_async and writers != [1] * len(accounts):
        problems.append(f"writer processes of each rank: {writers}, expected 1")
    if is_async and not changed:
        problems.append("training did not change the state, so the snapshot proves nothing")
    if not is_async and changed:
        problems.append(f"state after the save: {changed}")
    note = "published"
    if is_async:
        steps = min(account.steps_meanwhile for account in accounts)
        note += f"; the call took {max(a.blocking_s for a in accounts):.2f} s, {steps} steps trained meanwhile"
    seconds = max(account.durable_s for account in accounts)
    return Row(what, str(TRAINING_LAYOUT), seconds, "; ".join(problems) or note, not problems)


def loaded_row(
    what: str, layout: Parallel, accounts: list[Loaded], place: Path, reference: Tensors, package: str
) -> Row:
    """Judge a load: the right strategy ran, the model was different before, and is identical now."""
    problems = wrong_strategies([account.strategies for account in accounts], package)
    before = read_state(place / "before")
    if not difference(before, {key: reference[key] for key in before}):
        problems.append("the model was the same before the load, so the comparison proves nothing")
    if {account.iteration for account in accounts} != {STEPS_BEFORE_SAVE}:
        problems.append(f"iterations {[account.iteration for account in accounts]}, expected {STEPS_BEFORE_SAVE}")
    if wrong := difference(read_state(place / "after"), reference):
        problems.append(wrong)
    data_size = len(accounts) // (layout.tensor * layout.pipeline)
    shown = f"{layout}" + (f" DP={data_size}" if data_size > 1 else "")
    return Row(what, shown, max(a.seconds for a in accounts), "; ".join(problems) or IDENTICAL, not problems)


def wrong_strategies(ran: list[tuple[str, ...]], package: str) -> list[str]:
    """Complaints about strategies of another package than the expected one, or none at all."""
    wrong = sorted({name for names in ran for name in names if not name.startswith(package + ".")})
    complaints = [f"{name} ran, expected one of {package}" for name in wrong]
    return complaints + ([f"no strategy of {package} ran"] if not all(ran) else [])


def demonstrate(work: Path) -> list[Row]:
    """Run everything below `work` and return the lines of the table."""
    rows: list[Row] = []
    ours, stock = work / "ours", work / "stock"
    say("training at TP=2 PP=2 on 4 ranks; async save by the writer process while training goes on")
    saved = run_ranks(train_and_save_async, 4, work, deadline_s=DEADLINE_S)
    reference = read_state(work / "reference")
    rows.append(saved_row("async save, writer process", saved, work / "reference", "mcore_ckpt", is_async=True))

    say("stock Megatron-Core, in processes of its own: saves a model, and loads ours")
    pairs = run_ranks(save_stock_then_load_ours, 4, work, deadline_s=DEADLINE_S)
    stock_reference = read_state(work / "stock-reference")
    stock_saved = saved_row("stock save", [s for s, _ in pairs], work / "stock-reference", "megatron", is_async=False)
    by_stock, layout = [loaded for _, loaded in pairs], Parallel(tensor=2)
    ours_by_stock = loaded_row("ours -> stock Megatron", layout, by_stock, work / "by-stock", reference, "megatron")

    say("loading at TP=4, TP=2 DP=2, and stock's at TP=1 PP=4")
    jobs = [
        ("ours -> ours", ours, work / "tp4", Parallel(tensor=4), reference),
        ("ours -> ours", ours, work / "tp2", Parallel(tensor=2), reference),
        ("stock Megatron -> ours", stock, work / "of-stock", Parallel(pipeline=4), stock_reference),
    ]
    per_rank = run_ranks(load_with_ours, 4, [job[1:4] for job in jobs], deadline_s=DEADLINE_S)
    say("loading at TP=1 PP=1")
    alone = run_ranks(load_with_ours, 1, [(ours, work / "alone", Parallel())], deadline_s=DEADLINE_S)
    rows.append(loaded_row("ours -> ours", Parallel(), [alone[0][0]], work / "alone", reference, "mcore_ckpt"))
    for number, (what, _, place, layout, job_reference) in enumerate(jobs):
        accounts = [rank_loads[number] for rank_loads in per_rank]
        rows.append(loaded_row(what, layout, accounts, place, job_reference, "mcore_ckpt"))
    rows[-1:-1] = [ours_by_stock, stock_saved]  # before the load of stock's checkpoint

    say("plain DCP: loads ours, and writes one that ours loads")
    rows.append(load_with_stock_dcp(ours, reference))
    rows.append(load_dcp_checkpoint_with_ours(work / "dcp", reference))
    return rows


def report(rows: list[Row], work: Path, seconds: float) -> None:
    """Print what was saved and each comparison's verdict."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 130)
    files = Table(title="What was saved", title_justify="left")
    for column in ("checkpoint", "tensors", "payload", "data files", "bytes on disk"):
        files.add_column(column, justify="left" if column == "checkpoint" else "right")
    for name, reference_name in (("ours", "reference"), ("stock", "stock-reference"), ("dcp", "reference")):
        reference = read_state(work / reference_name)
        paths = [path for path in (work / name).iterdir() if path.is_file()]
        data_files = sum(path.suffix == ".distcp" for path in paths)
        on_disk = sum(path.stat().st_size for path in paths)
        size = sum(tensor.nbytes for tensor in reference.values())
        files.add_row(name, str(len(reference)), f"{size:,}", str(data_files), f"{on_disk:,}")
    console.print(files)
    table = Table(title="What was compared, every byte of every tensor", title_justify="left")
    for column in ("step", "layout", "seconds", "", "verdict"):
        table.add_column(column, justify="right" if column == "seconds" else "left")
    for row in rows:
        mark = "[green]ok[/]" if row.good else "[red]FAILED[/]"
        table.add_row(row.what, row.layout, f"{row.seconds:.2f}", mark, row.verdict)
    console.print(table)
    failed = sum(not row.good for row in rows)
    console.print(f"{len(rows)} steps, {failed} failed, {seconds:.0f} s in all")


def say(what: str) -> None:
    """Tell what begins now."""
    print(f"- {what}", flush=True)


def quiet() -> None:
    """Megatron and torch warn about much that concerns GPUs."""
    warnings.simplefilter("ignore")


def barrier() -> None:
    """Wait for all ranks, outside anything that is timed."""
    import torch.distributed as dist

    dist.barrier()


def fresh_directory(rank: int, path: Path) -> Path:
    """Megatron wants the directory to exist."""
    if rank == 0:
        path.mkdir(parents=True)
    barrier()
    return path


def main() -> int:
    """Run the demo in a temporary directory, or in the one given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new or empty directory that keeps the files")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
        if any(arguments.keep.iterdir()):
            parser.error(f"{arguments.keep} is not empty")
    work = arguments.keep or Path(tempfile.mkdtemp(prefix="mcore-ckpt-demo-"))
    quiet()
    started_s = time.monotonic()
    try:
        rows = demonstrate(work)
        report(rows, work, time.monotonic() - started_s)
    except RanksFailedError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if arguments.keep is None:
            shutil.rmtree(work, ignore_errors=True)
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
