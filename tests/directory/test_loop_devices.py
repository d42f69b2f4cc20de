"""Saves of two ranks, and the tools, on ext4, btrfs and XFS: loss of power, and a disk that is really full."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("megatron.core.dist_checkpointing", reason="the saves are those of Megatron's sharded state")

from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER
from mcore_ckpt.models.conversions import export_checkpoint
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from mcore_ckpt.tools.runs import copy_checkpoint
from mcore_ckpt.tools.verify import repair_checkpoint, verify_checkpoint
from tests.directory.test_fault_sweeps import _prepare, damage, save, save_well
from tests.support.checkpoint_reader import CheckpointReader, reader
from tests.support.gloo_ranks import MEGATRON, StandingRanks, standing_ranks
from tests.support.loop_device import KINDS, LoopDevice, NoLoopDeviceError, loop_device

pytestmark = [pytest.mark.crash, pytest.mark.slow, pytest.mark.timeout(900)]

WAYS = ("in_line", "persistent", "fork")
# What a save here takes is about 300 KB: with less than that it fails, sooner or later.
_LEFT_BYTES = range(0, 640 * 1024, 80 * 1024)


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LoopDevice]:
    try:
        with loop_device(request.param, tmp_path) as found:
            yield found
    except NoLoopDeviceError as error:
        pytest.skip(f"no {request.param} on a loop device here: {error}")


@pytest.fixture(scope="module")
def readers() -> Iterator[dict[str, CheckpointReader]]:
    with reader("ours") as ours, reader("stock") as stock:
        yield {"ours": ours, "stock": stock}


@pytest.fixture(scope="module")
def ranks() -> Iterator[StandingRanks]:
    with standing_ranks(2, preload=MEGATRON) as found:
        found.values(_prepare)
        yield found


def check(readers: dict[str, CheckpointReader], directory: Path, wanted: int | None, what: str) -> None:
    """By ours, stock Megatron and stock DCP."""
    for who, process in readers.items():
        found = process.look(directory)
        assert found.whole == found.plain == wanted, f"{what}: {who} reads {found}"


@pytest.mark.parametrize("way", WAYS)
def test_what_a_save_has_returned_from_stays_when_the_power_goes(
    way: str, device: LoopDevice, ranks: StandingRanks, readers: dict[str, CheckpointReader]
) -> None:
    for name, seeds in {"new": (1,), "replaced": (1, 2), "replaced again": (3, 1, 2)}.items():
        directory = device.path / "run" / name / "iter_0000001"
        directory.parent.mkdir(parents=True)
        for seed in seeds:
            save_well(ranks, seed, directory, way)
        device.pull_the_plug()
        check(readers, directory, seeds[-1], name)
        assert not [file.name for file in directory.iterdir() if file.name.startswith(INCOMPLETE_MARKER)]


def test_what_a_tool_has_returned_from_stays_when_the_power_goes(
    device: LoopDevice, ranks: StandingRanks, readers: dict[str, CheckpointReader]
) -> None:
    source, target = device.path / "source", device.path / "target"
    save_well(ranks, 2, source, "in_line")
    reshard_checkpoint(source, target, tp=2, pp=1)
    device.pull_the_plug()
    check(readers, target, 2, "reshard")
    copy_checkpoint(target, device.path / "copy")
    damage(target)
    device.unmount()
    device.mount()
    damaged = verify_checkpoint(target)
    assert not damaged.whole
    assert repair_checkpoint(damaged, device.path / "copy").whole
    device.pull_the_plug()
    assert verify_checkpoint(target).whole
    check(readers, target, 2, "repair")
    export_checkpoint(source, device.path / "exported", to="dcp")
    device.pull_the_plug()
    assert readers["stock"].look(device.path / "exported").plain == 2


@pytest.mark.parametrize("way", WAYS)
def test_a_disk_that_is_really_full_harms_nothing(
    way: str, device: LoopDevice, ranks: StandingRanks, readers: dict[str, CheckpointReader]
) -> None:
    directory = device.path / "c"
    save_well(ranks, 1, directory, way)
    old, refused = 1, 0
    for left in _LEFT_BYTES:
        new, after = old % 3 + 1, (old + 1) % 3 + 1
        device.fill(left)
        outcome, *_ = save(ranks, new, directory, way)
        what = f"{left} bytes left: {outcome.error_text}"
        if not outcome.ok:
            assert "ENOSPC" in str(outcome.error), what
            refused += 1
        check(readers, directory, new if outcome.ok else old, what)
        device.make_room()
        save_well(ranks, after, directory, way)
        check(readers, directory, after, what)
        assert not [file.name for file in directory.iterdir() if file.name.startswith(INCOMPLETE_MARKER)], what
        old = after
    assert refused >= 3, "the disk was never full"
