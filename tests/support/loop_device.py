"""A real file system of any kind, in a file, on a loop device: small enough to be really full. Needs root and `mkfs`.

with loop_device("ext4", tmp_path) as device:
    device.fill(leave_bytes=100_000)
    ...                                  # works in device.path
    device.pull_the_plug()               # what was not written to the device is gone
"""

import errno
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_MIB: Final = 1024 * 1024
# Size in MiB, and how it is made. XFS has no smaller ones; btrfs of this size mixes data and metadata.
KINDS: Final = {
    "ext4": (64, ["mkfs.ext4", "-q", "-F", "-m", "0"], "loop"),
    "btrfs": (64, ["mkfs.btrfs", "-q", "-f", "--mixed"], "loop"),
    "xfs": (320, ["mkfs.xfs", "-q", "-f"], "loop,nouuid"),
}
_FILLER: Final = "filler"
_SMALL_BYTES: Final = 16 * 1024
_ROOM_MIB: Final = 8
_COPIES: Final = 20


class NoLoopDeviceError(Exception):
    """It cannot be had here; says why."""


class LoopDevice:
    """A file system that is mounted; see `loop_device`."""

    def __init__(self, image: Path, path: Path, options: str) -> None:
        self.path = path
        self._image = image
        self._options = options

    def mount(self) -> None:
        _run(["mount", "-o", self._options, str(self._image), str(self.path)])

    def unmount(self) -> None:
        """All is written to the device, as when a machine is shut down."""
        _run(["umount", str(self.path)])

    def fill(self, leave_bytes: int) -> None:
        """Take all room but so much, by files; again, with another amount."""
        self.make_room()
        filler = self.path / _FILLER
        filler.mkdir(exist_ok=True)
        # (Whole files are removed in the end, and none is cut: full, btrfs refuses that.)
        for size in (_MIB, _SMALL_BYTES):
            number, is_full = 0, False
            while not is_full:
                file, number = filler / f"{size}-{number}", number + 1
                if not file.exists():
                    is_full = not _is_written(file, size)
        for file in sorted(filler.glob(f"{_SMALL_BYTES}-*"))[: leave_bytes // _SMALL_BYTES]:
            file.unlink()
        os.sync()

    def make_room(self) -> None:
        """Some MiB of what `fill` has taken."""
        filler = self.path / _FILLER
        for file in [*filler.glob(f"{_SMALL_BYTES}-*"), *sorted(filler.glob(f"{_MIB}-*"))[:_ROOM_MIB]]:
            file.unlink()
        os.sync()

    def pull_the_plug(self) -> None:
        """Go on with what the device has been given up to now: what was in memory only is lost."""
        taken = [self._image.with_suffix(".0"), self._image.with_suffix(".1")]
        shutil.copyfile(self._image, taken[0])
        for number in range(1, _COPIES):
            # A copy of one moment, if nothing was written meanwhile: if the next one is the same.
            now, before = taken[number % 2], taken[(number + 1) % 2]
            shutil.copyfile(self._image, now)
            if now.read_bytes() == before.read_bytes():
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"{self._image}: is written to all the time")
        self.unmount()
        now.replace(self._image)
        before.unlink()
        self.mount()


def _is_written(file: Path, size: int) -> bool:
    """Whether a file has found its place on the disk; there is nothing of it if not."""
    try:
        with file.open("wb") as stream:
            stream.write(os.urandom(size))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        file.unlink(missing_ok=True)
        return False
    return True


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLoopDeviceError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise NoLoopDeviceError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


@contextmanager
def loop_device(kind: str, scratch: Path) -> Iterator[LoopDevice]:
    """Make a file system of `KINDS` and mount it below `scratch` for the block, or raise `NoLoopDeviceError`."""
    size, make, options = KINDS[kind]
    if os.geteuid() != 0:
        raise NoLoopDeviceError("mounting takes root")
    image, path = scratch / f"{kind}.image", scratch / kind
    path.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(size * _MIB)
    _run([*make, str(image)])
    device = LoopDevice(image, path, options)
    device.mount()
    try:
        yield device
    finally:
        subprocess.run(["umount", "--lazy", str(path)], capture_output=True, timeout=60, check=False)
