"""Run `tests/shared_fs` on file systems that hosts share: `make test-shared-fs`.

    scripts/shared_fs/run.py [gluster] [gluster-r2] [ceph] [pytest arguments ...]       # all three by default
    scripts/shared_fs/run.py --missing gluster       # why one cannot be served here; exit code 1 if it can

Each runs in namespaces of its own, for mounts, network and processes, and ends with them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.shared_fs.volumes import KINDS, TYPES  # noqa: E402

_APART: Final = "unshare --mount --net --pid --fork --kill-child --mount-proc".split()
# The shell stays: the first process of a namespace has to reap the others.
_SETS_UP: Final = 'ip link set lo up && mount -t tmpfs own /run && "$@"; exit $?'
_TESTS: Final = "-m  --show-capture=no -p no:cacheprovider tests/shared_fs".split(" ")


def main(arguments: Sequence[str]) -> int:
    """Run them; returns the exit code."""
    if arguments[:1] == ["--missing"]:
        reason = TYPES[arguments[1]][0].missing()
        print(reason)
        return not reason
    kinds = [kind for kind in KINDS if kind in arguments] or KINDS
    others = [argument for argument in arguments if argument not in KINDS]
    said, failed = [], False
    for kind in kinds:
        if reason := TYPES[kind][0].missing():
            said.append(f"{kind}: SKIPPED: {reason}")
            continue
        began_s = time.monotonic()
        command = [*_APART, "sh", "-c", _SETS_UP, "sh", sys.executable, "-m", "pytest", *_TESTS, *others]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "MCORE_CKPT_TEST_SHARED_FS": kind}).returncode
        said.append(f"{kind}: {'passed' if code == 0 else 'FAILED'} in {time.monotonic() - began_s:.0f} s")
        failed |= code != 0
    print("\n".join(said))
    return failed


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
