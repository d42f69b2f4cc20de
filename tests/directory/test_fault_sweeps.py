"""Errors and losses of the file system, one at each of its changes, under saves of 2 and 4 ranks and under the tools.

After each: what was there loads bit for bit, what is new is whole or refused; by this package, by stock Megatron-Core
in a process without this package, and by stock DCP. All ranks say the same, nobody hangs, and the next try works. See
`fuse_memory`, `checkpoint_reader` and `gloo_ranks`.
"""

import contextlib
import errno
import hashlib
import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

pytest.importorskip("megatron.core.dist_checkpointing", reason="the saves are those of Megatron's sharded state")

import mcore_ckpt
from mcore_ckpt.core.errors import CheckpointError, CorruptCheckpointError, SaveError
from mcore_ckpt.dcp.writer import FileSystemWriterAsync
from mcore_ckpt.directory.commit import Commit
from mcore_ckpt.directory.in_force import index_files
from mcore_ckpt.directory.iterations import look_at
from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER, METADATA_FILE, read_index
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.models.conversions import export_checkpoint, import_checkpoint, merge_checkpoints, verify_weights
from mcore_ckpt.reshard.model_only import _decide
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from mcore_ckpt.save import upkeep
from mcore_ckpt.save.jobs import StatusPage
from mcore_ckpt.storage.resolve import LocalStorage
from mcore_ckpt.tools.verify import repair_checkpoint, verify_checkpoint
from tests.models.test_huggingface import model_tensors, write_hf
from tests.support import kill_runner, states
from tests.support.checkpoint_reader import MIX, CheckpointReader, Found, reader
from tests.support.fuse_memory import FuseMount, Misbehaviour, Variant, write_tree
from tests.support.gloo_ranks import MEGATRON, RankOutcome, StandingRanks, standing_ranks
from tests.support.processes import in_child

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1800)]

_STICKY = (errno.ENOSPC, errno.EDQUOT)  # what is full stays full


def sampled(config: pytest.Config, count: int, step: int) -> range:
    """Which of the changes go wrong: every so many, from one on that `--seed` draws."""
    return range(random.Random(config.option.seed).randrange(step), count, step)


# --- who is asked -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Readers:
    """Both processes that load."""

    ours: CheckpointReader
    stock: CheckpointReader

    def look(self, directory: Path, *, tensors_only: bool = False) -> tuple[Found, Found]:
        """What a directory holds, by ours and by stock."""
        for process in (self.ours, self.stock):
            process.ask(directory, tensors_only=tensors_only)
        return self.ours.answer(), self.stock.answer()


@pytest.fixture(scope="module")
def readers(fuse: None) -> Iterator[Readers]:
    with reader("ours") as ours, reader("stock") as stock:
        yield Readers(ours, stock)


@pytest.fixture(scope="module")
def rank_sets(fuse: None) -> Iterator[Callable[[int], StandingRanks]]:
    """Ranks by their number, started when they are first asked for."""
    started: dict[int, StandingRanks] = {}
    with contextlib.ExitStack() as stack:

        def of(world: int) -> StandingRanks:
            if world not in started or started[world].ended:
                started[world] = stack.enter_context(standing_ranks(world, preload=MEGATRON))
                assert all(outcome.ok for outcome in started[world].call(_prepare, within_s=120.0))
            return started[world]

        yield of


def look(
    readers: Readers, directory: Path, old: int | None, new: int, what: str, *, plain: bool = False
) -> tuple[int | None, bool]:
    """What a directory holds: `old`, `new` or None, none; and whether stock reads the new tensors beside the old common
    state, as it does between two renames: a pending common state is there then, which this package reads. `what` has
    happened; `plain`: by plain DCP, and Megatron is not asked.
    """
    ours, stock = readers.look(directory)
    told = f"{what}: ours {ours}, stock {stock}"
    if plain:
        assert ours.plain == stock.plain, told
        assert ours.plain in (old, new, None), told
        return ours.plain, False
    assert ours.whole in (old, new, None), told
    assert ours.whole is not None or ours.refused, told
    for found in (ours, stock):
        # Without Megatron's own metadata.json, which comes last, a published checkpoint is one for DCP alone.
        assert found.plain == ours.whole or (found.plain == new and ours.whole is None), told
    between = stock.new_beside_old == (new, old) and ours.whole == new and any(directory.glob("common.pt.*.pending"))
    assert between or stock.whole == ours.whole, told
    return ours.whole, between


# --- saves ------------------------------------------------------------------------------------------------------------


def _prepare(rank: int) -> None:
    mcore_ckpt.install()


def _save(rank: int, seed: int, directory: Path, way: str) -> None:
    if way == "DCP":
        writer = FileSystemWriterAsync(directory, options=kill_runner.OPTIONS)
        dcp.save(states.tensors(seed), storage_writer=writer)
        return
    kill_runner.save(seed, directory, way)


def save(ranks: StandingRanks, seed: int, directory: Path, way: str) -> list[RankOutcome]:
    """One save; whatever becomes of it becomes of it on all ranks, and is an error of this package."""
    outcomes = ranks.call(_save, seed, directory, way)
    assert len({outcome.ok for outcome in outcomes}) == 1, [outcome.error_text for outcome in outcomes]
    # (DCP wraps what a rank raises in an exception of its own.)
    kind = dcp.CheckpointException if way == "DCP" else CheckpointError
    for outcome in outcomes:
        assert outcome.ok or isinstance(outcome.error, kind) or kind.__name__ in outcome.error_text, outcome.error_text
    return outcomes


def save_well(ranks: StandingRanks, seed: int, directory: Path, way: str) -> None:
    (outcome, *_) = save(ranks, seed, directory, way)
    assert outcome.ok, outcome.error_text


def litter(directory: Path) -> set[str]:
    """What is left of saves that are over."""
    return {file.name for file in directory.iterdir() if file.name.startswith(INCOMPLETE_MARKER) or ".pt." in file.name}


ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE)
# Ranks, way, error, whether a checkpoint is replaced, every how many changes.
ERRORS_OF_SAVES = [
    pytest.param(2, "persistent", errno.EIO, True, 17),
    pytest.param(2, "in_line", errno.ENOSPC, True, 2, marks=pytest.mark.long),
    pytest.param(2, "fork", errno.ESTALE, False, 3, marks=pytest.mark.long),
    pytest.param(4, "persistent", errno.EIO, True, 3, marks=pytest.mark.long),
    pytest.param(4, "in_line", errno.EDQUOT, False, 4, marks=pytest.mark.long),
    pytest.param(4, "DCP", errno.EIO, True, 4, marks=pytest.mark.long),
    *(
        pytest.param(*case, 1, marks=pytest.mark.slow)
        for case in itertools.product((1, 2, 4), ("in_line", "persistent", "fork", "DCP"), ERRORS, (True, False))
    ),
]


@pytest.mark.parametrize(("world", "way", "code", "exists", "step"), ERRORS_OF_SAVES)
def test_no_error_at_any_moment_harms_a_save(
    world: int,
    way: str,
    code: int,
    exists: bool,
    step: int,
    mount: FuseMount,
    readers: Readers,
    rank_sets: Callable[[int], StandingRanks],
    pytestconfig: pytest.Config,
) -> None:
    """The changes of a save, one after the other, are answered with an error."""
    ranks = rank_sets(world)
    probe = mount.path / "probe"
    probe.mkdir()
    if exists:
        save_well(ranks, 1, probe, way)
    mount.behave(Misbehaviour())
    save_well(ranks, 2, probe, way)
    changes = mount.changes()
    assert len(changes) > 15
    sticky = code in _STICKY
    directory, old = probe, 2
    refused = between = 0
    for number in sampled(pytestconfig, len(changes), step):
        if not exists:
            directory = mount.path / str(number)
            directory.mkdir()
        before = old if exists else None
        new, after = old % 3 + 1, (old + 1) % 3 + 1
        mount.behave(Misbehaviour(error_at=number, code=code, sticky=sticky))
        outcome, *_ = save(ranks, new, directory, way)
        mount.behave(Misbehaviour())
        what = f"{errno.errorcode[code]} at change {number} of {len(changes)} ({changes[number]}): {outcome.error_text}"
        found, in_between = look(readers, directory, before, new, what, plain=way == "DCP")
        if outcome.ok:
            assert found == new, what
        else:
            # Where nothing can be written any more, what was published before the error cannot be taken back; nor can
            # it where only Megatron's metadata.json was not to be written.
            published = sticky or "metadata.json" in str(outcome.error)
            assert found in ((before, new) if published else (before,)), what
            refused += 1
        between += in_between
        save_well(ranks, after, directory, way)
        stock = readers.stock.look(directory)
        assert stock.plain == after, f"{what}: then {stock} after the next save"
        assert stock.whole == after or way == "DCP", f"{what}: then {stock} after the next save"
        assert not litter(directory), f"{what}: {litter(directory)} is left after the next save"
        old = after
        if not exists:
            shutil.rmtree(directory)
    assert refused > len(changes) / step / 4 - 1
    # An error that stays can leave that at the rename of the common state, or between the two renames.
    assert between <= (6 if sticky else 0)


# --- kills and losses of power ----------------------------------------------------------------------------------------


def sync(*paths: Path) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def damage(directory: Path) -> None:
    """Overwrite some bytes in the middle of the largest data file."""
    data = max(directory.glob("*.distcp"), key=lambda file: file.stat().st_size)
    with data.open("r+b") as stream:
        stream.seek(data.stat().st_size // 2)
        stream.write(b"\xff" * 8)


def damaged_copy(source: Path, directory: Path) -> None:
    """Make a durable copy of a checkpoint, of which one data file is damaged."""
    shutil.copytree(source, directory)
    damage(directory)
    sync(*directory.iterdir(), directory, directory.parent)


def check_each_moment(
    mount: FuseMount, target: str, work: Callable[[], object], judge: Callable[[Path, str], Any], scratch: Path
) -> list[tuple[Variant, Any]]:
    """Judge what would be left after a kill and after a loss of power at each moment of some work: `judge` is given a
    copy, below `scratch`, of `target` below the mount as it would be, and what moment that is.
    """
    sync(mount.path)
    mount.record()
    work()
    changes, moments = mount.changes(), mount.snapshots()
    assert len(moments) == len(changes) + 1
    seen: dict[int, Any] = {}
    found: list[tuple[Variant, Any]] = []
    for number, trees in enumerate(moments):
        what = f"after {number} of {len(changes)} changes ({changes[number - 1] if number else 'none'})"
        for variant, tree in trees.items():
            there = {name: content for name, content in tree.items() if name.startswith(f"{target}/")}
            key = hash(frozenset((name, content) for name, content in there.items() if INCOMPLETE_MARKER not in name))
            if key not in seen:
                place = scratch / f"{number}-{variant}"
                write_tree(there, place)
                seen[key] = judge(place / target, f"{what}, {variant}")
                shutil.rmtree(place)
            found.append((variant, seen[key]))
    assert len(seen) >= 2
    return found


def check_never_gone_again(found: list[tuple[Variant, Any]], new: Any) -> None:
    """What has appeared stays; and it has appeared when all is done."""
    for variant in ("crash", "synced", "names"):
        values = [value for other, value in found if other == variant]
        assert values[-1] == new, f"{variant}: when all was done, it is {values[-1]}"
        assert all(value == new for value in values[values.index(new) :]), f"{variant}: gone again"


MOMENTS_OF_SAVES = [
    (2, "persistent", True),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in ((1, "in_line", True), (2, "in_line", False), (2, "DCP", True))
    ),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in itertools.product((1, 2, 4), ("in_line", "persistent", "fork", "DCP"), (True, False))
    ),
]


@pytest.mark.parametrize(("world", "way", "exists"), MOMENTS_OF_SAVES)
def test_neither_kill_nor_loss_of_power_harms_a_save(
    world: int,
    way: str,
    exists: bool,
    mount: FuseMount,
    readers: Readers,
    rank_sets: Callable[[int], StandingRanks],
    tmp_path: Path,
) -> None:
    """Of all ranks, at each moment of the save."""
    ranks, directory = rank_sets(world), mount.path / "c"
    directory.mkdir()
    if exists:
        save_well(ranks, 1, directory, way)
    between: set[str] = set()

    def judge(there: Path, what: str) -> int | None:
        found, in_between = look(readers, there, 1 if exists else None, 2, what, plain=way == "DCP")
        if in_between:
            between.add(what)
        return found

    found = check_each_moment(mount, "c", lambda: save_well(ranks, 2, directory, way), judge, tmp_path / "moments")
    assert {value for _, value in found} == {1 if exists else None, 2}
    check_never_gone_again(found, 2)
    assert exists or not between, f"a new checkpoint has no common state that is pending: {between}"


# --- what other file systems do ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("oddity", ["short_writes", "no_direct"])
@pytest.mark.parametrize("way", ["in_line", "persistent", "DCP"])
def test_what_the_file_system_cannot_do_is_done_without(
    way: str, oddity: str, mount: FuseMount, readers: Readers, rank_sets: Callable[[int], StandingRanks]
) -> None:
    mount.behave(Misbehaviour(**{oddity: True}))  # type: ignore[arg-type]
    directory = mount.path / "c"
    for seed in (1, 2):
        save_well(rank_sets(2), seed, directory, way)
        assert look(readers, directory, None, seed, oddity, plain=way == "DCP") == (seed, False)
    assert not litter(directory)


def test_a_listing_that_lags_behind_harms_nothing(
    mount: FuseMount, readers: Readers, rank_sets: Callable[[int], StandingRanks]
) -> None:
    """A checkpoint was published, saves into it were killed, and the listing shows neither."""
    directory = mount.path / "c"
    save_well(rank_sets(2), 1, directory, "in_line")
    (directory / INCOMPLETE_MARKER).write_text('{"first_file": 0, "replaces": []}')
    mount.behave(Misbehaviour(lag_s=3600))
    assert METADATA_FILE not in {file.name for file in directory.iterdir()}
    kept: list[Commit] = []
    in_child(lambda: kept.append(Commit.begin(LocalStorage(directory))))
    for lag_s, place in ((3600.0, directory), (0.3, mount.path / "d")):
        mount.behave(Misbehaviour(lag_s=lag_s))
        for seed in (2, 3, 1):
            save_well(rank_sets(2), seed, place, "in_line")
            assert look(readers, place, None, seed, "listings lag") == (seed, False)


# --- tools ------------------------------------------------------------------------------------------------------------


def _nothing(source: Path, directory: Path) -> None:
    pass


def _repair(source: Path, directory: Path) -> None:
    report = repair_checkpoint(verify_checkpoint(directory), source)
    if not report.whole:
        raise CorruptCheckpointError(f"{directory}: {report.problems}")


def _with_optimizer(source: Path, directory: Path) -> None:
    """Make a durable copy of a checkpoint that has an optimizer's state, too."""
    shutil.copytree(source, directory)
    made = directory.parent / "optimizer"
    dcp.save({"optimizer.m": torch.ones(500)}, storage_writer=FileSystemWriterAsync(made), no_dist=True)
    index, more = read_index(directory), read_index(made)
    assert index.manifest is not None
    assert more.manifest is not None
    for name in index_files(more):
        (made / name).rename(directory / name)
    shutil.rmtree(made)
    manifest = replace(index.manifest, files={**index.manifest.files, **more.manifest.files})
    both = replace(index, tensors={**index.tensors, **more.tensors}, manifest=manifest)
    (directory / METADATA_FILE).write_bytes(encode_metadata(both))
    sync(*directory.iterdir(), directory, directory.parent)


def _remove_optimizer(source: Path, directory: Path) -> None:
    decision = _decide(look_at(directory)[0], directory.parent, "a sweep", remove=True)
    if decision.keep:
        raise SaveError(f"{directory}: {decision.reason}")


def _exported_safetensors(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def _exported_torch(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.bin"):
        found.update(torch.load(file, weights_only=True))
    return found


def _exported_dcp(directory: Path) -> dict[str, torch.Tensor]:
    found = {key: torch.zeros_like(value) for key, value in states.tensors(1).items()}
    dcp.load(found, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return found


def _model_only(source: Path, directory: Path) -> None:
    """Make a durable copy of a checkpoint whose optimizer's state was removed, and a full one next to the source."""
    _with_optimizer(source, directory)
    shutil.copytree(directory, source.with_name("full"), dirs_exist_ok=True)
    _remove_optimizer(source, directory)


def _export_in_background(source: Path, target: Path) -> None:
    with contextlib.closing(StatusPage()) as page:
        upkeep._answer_of(upkeep._EXPORTER, page.fd, str(source), str(target), None)


_LOADS = {"safetensors": _exported_safetensors, "torch": _exported_torch, "dcp": _exported_dcp}
_EXPORT_SHARD_BYTES = 200_000  # two files, and the list of what is in which


@dataclass(frozen=True)
class Tool:
    """One way of making a checkpoint of another."""

    work: Callable[[Path, Path], object]  # is given the source and the target
    before: Callable[[Path, Path], None] = _nothing  # makes what is there before, given both
    exported: str = ""  # in which format of others the target is; empty: it is a checkpoint
    is_model: bool = False  # the source is one that Hugging Face has a family for
    tensors_only: bool = False  # it has neither objects nor a common state
    mends: bool = False  # the target is damaged before, which stock does not notice
    removes: bool | None = None  # it is a whole checkpoint before, too; whether its optimizer's state goes or comes


def _export(to: Any, **options: Any) -> Callable[[Path, Path], object]:
    return lambda source, target: export_checkpoint(source, target, to=to, **options)


TOOLS = {
    "reshard": Tool(lambda source, target: reshard_checkpoint(source, target, tp=2, pp=1)),
    "merge": Tool(lambda source, target: merge_checkpoints([source, source], target), tensors_only=True),
    "import": Tool(lambda source, target: import_checkpoint(source, target), tensors_only=True),
    "export to safetensors": Tool(_export("safetensors", max_shard_bytes=_EXPORT_SHARD_BYTES), exported="safetensors"),
    "export to torch": Tool(_export("torch", max_shard_bytes=_EXPORT_SHARD_BYTES), exported="torch"),
    "export to DCP": Tool(_export("dcp"), exported="dcp"),
    "export to hf": Tool(_export("hf", max_shard_bytes=6_000), exported="safetensors", is_model=True),
    "export in the background": Tool(_export_in_background, exported="safetensors", is_model=True),
    "remove the optimizer": Tool(_remove_optimizer, before=_with_optimizer, removes=True),
    "bring the optimizer back": Tool(
        lambda source, target: _repair(source.with_name("full"), target), before=_model_only, removes=False
    ),
    "repair": Tool(_repair, before=damaged_copy, mends=True),
}


def make_source(tool: Tool, ranks: StandingRanks, source: Path) -> None:
    if tool.is_model:
        import_checkpoint(write_hf(source.with_name("hf"), model_tensors()), source, kind="hf", tp=2)
        return
    source.mkdir()
    save_well(ranks, 2, source, "in_line")


def _use(rank: int, name: str, source: Path, target: Path) -> None:
    TOOLS[name].work(source, target)


def look_at_target(tool: Tool, readers: Readers, directory: Path, what: str) -> int | None:
    """2: it is whole; None: there is nothing, it is refused, or as before. Raises `AssertionError` for what is else."""
    if tool.exported:
        if not directory.exists() or not any(directory.iterdir()):
            return None
        loaded = _LOADS[tool.exported](directory)
        wanted = model_tensors() if tool.is_model else states.tensors(2)
        assert not tool.is_model or ((directory / "config.json").exists() and verify_weights(directory).whole), what
        assert loaded.keys() == wanted.keys(), f"{what}: {sorted(loaded)}"
        assert all(torch.equal(loaded[key], value) for key, value in wanted.items()), what
        return 2
    ours, stock = readers.look(directory, tensors_only=tool.tensors_only)
    told = f"{what}: ours {ours}, stock {stock}"
    if tool.removes is not None:
        assert ours.whole == stock.whole == ours.plain == stock.plain == 2, told
        return 2 if (read_index(directory).removed is not None) is tool.removes else None
    assert ours.whole in (2, None), told
    assert ours.plain == ours.whole or tool.mends, told
    if not tool.mends or ours.whole == 2:
        assert stock.whole == stock.plain == ours.whole, told
    assert ours.whole != MIX
    return ours.whole


def content_of(directory: Path) -> dict[str, str]:
    """Each file's name, and a sum of what is in it."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


def use(ranks: StandingRanks, name: str, source: Path, target: Path) -> RankOutcome:
    """One use of a tool, in a process of its own; it succeeds, or raises what it may."""
    (outcome,) = ranks.call(_use, name, source, target, only=0)
    assert outcome.ok or isinstance(outcome.error, (CheckpointError, OSError)), outcome.error_text
    return outcome


ERRORS_OF_TOOLS = [
    pytest.param("reshard", errno.EIO, 13),
    pytest.param("repair", errno.EIO, 5),
    *(pytest.param(*case, 4, marks=pytest.mark.long) for case in itertools.product(TOOLS, ERRORS[:2])),
    *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in itertools.product(TOOLS, ERRORS)),
]


@pytest.mark.parametrize(("name", "code", "step"), ERRORS_OF_TOOLS)
def test_no_error_at_any_moment_harms_a_tool(
    name: str,
    code: int,
    step: int,
    mount: FuseMount,
    readers: Readers,
    rank_sets: Callable[[int], StandingRanks],
    pytestconfig: pytest.Config,
) -> None:
    ranks = rank_sets(2)
    tool, source = TOOLS[name], mount.path / "source"
    make_source(tool, ranks, source)
    given = content_of(source)
    probe = mount.path / "probe" / "c"
    probe.parent.mkdir()
    tool.before(source, probe)
    mount.behave(Misbehaviour())
    assert use(ranks, name, source, probe).ok
    changes = mount.changes()
    assert len(changes) >= 6
    sticky = code in _STICKY
    refused = 0
    for number in sampled(pytestconfig, len(changes), step):
        directory = mount.path / str(number) / "c"
        directory.parent.mkdir()
        tool.before(source, directory)
        mount.behave(Misbehaviour(error_at=number, code=code, sticky=sticky))
        outcome = use(ranks, name, source, directory)
        mount.behave(Misbehaviour())
        what = f"{name}, {errno.errorcode[code]} at change {number} of {len(changes)} ({changes[number]})"
        what += f": {outcome.error_text}"
        assert content_of(source) == given, f"{what}: the source has changed"
        found = look_at_target(tool, readers, directory, what)
        assert found == 2 or not outcome.ok, what
        refused += not outcome.ok
        if found is None:
            # Again, in the same place.
            again = use(ranks, name, source, directory)
            assert again.ok, f"{what}: then {again.error_text}"
            assert look_at_target(tool, readers, directory, what) == 2
            assert not litter(directory), f"{what}: {litter(directory)} is left after the next try"
            assert {file.name for file in directory.parent.iterdir()} == {"c"}, what
        shutil.rmtree(directory.parent)
    assert refused > len(changes) / step / 4 - 1


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name != "repair")) for name in TOOLS])
def test_neither_kill_nor_loss_of_power_harms_what_a_tool_makes(
    name: str, mount: FuseMount, readers: Readers, rank_sets: Callable[[int], StandingRanks], tmp_path: Path
) -> None:
    tool, source, ranks = TOOLS[name], mount.path / "source", rank_sets(2)
    make_source(tool, ranks, source)
    directory = mount.path / "c"
    tool.before(source, directory)
    found = check_each_moment(
        mount,
        "c",
        lambda: use(ranks, name, source, directory),
        lambda there, what: look_at_target(tool, readers, there, what),
        tmp_path / "moments",
    )
    assert {value for _, value in found} == {None, 2}
    check_never_gone_again(found, 2)
