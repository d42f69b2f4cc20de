"""A volume that two hosts share: `make test-shared-fs` starts each kind of it in namespaces of its own."""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.shared_fs.volumes import Ceph, Gluster, running

Hosts = tuple[Path, Path]
_numbers = itertools.count()
_SEEN_WITHIN_S = 10.0  # as docs/reliability.md asks


@pytest.fixture(scope="session")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gluster | Ceph]:
    kind = os.environ.get("MCORE_CKPT_TEST_SHARED_FS")
    if kind is None:
        pytest.skip("needs servers of GlusterFS or CephFS: `make test-shared-fs`")
    with running(kind, tmp_path_factory.mktemp("volume")) as volume:
        yield volume


@pytest.fixture
def hosts(volume: Gluster | Ceph) -> Hosts:
    """A new directory of the volume, as its two clients have it."""
    a, b = volume.mount("a"), volume.mount("b")
    name = f"test{next(_numbers)}"
    (a / name).mkdir()
    return a / name, b / name


def seen(condition: Callable[[], bool]) -> bool:
    """Whether it comes to be so, within the time that docs/reliability.md allows a file system."""
    until_s = time.monotonic() + _SEEN_WITHIN_S
    while time.monotonic() < until_s:
        try:
            if condition():
                return True
        except OSError:
            pass
        time.sleep(0.02)
    return False
