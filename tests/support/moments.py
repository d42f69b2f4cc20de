"""What some work would leave at each of its moments, after a kill and after a loss of power; see `fuse_memory`."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcore_ckpt.format.metadata_read import INCOMPLETE_MARKER
from tests.support.fuse_memory import FuseMount, Variant, write_tree


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
