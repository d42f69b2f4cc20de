"""A process that locks a directory, for tests of hosts that do not see each other's processes.

    python -m tests.hosts.lock_job DIRECTORY NAME

It writes what comes of its attempt to `DIRECTORY.NAME.json`. If it has the directory it stays; once there is a file
`DIRECTORY.NAME.publish` it publishes a file `NAME`, and writes what comes of that.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.directory import lock
from mcore_ckpt.storage.resolve import storage_at

# A lease of a minute would make a test take minutes.
LEASE_S = 6.0
_BEAT_S = 0.5


def main(directory: Path, name: str) -> None:
    """Attempt to lock, and stay."""
    lock.LEASE_S, lock.BEAT_S = LEASE_S, _BEAT_S  # type: ignore[misc]
    storage = storage_at(directory)
    held = lock.holders(storage)
    seen = [[owner.pid, Path(f"/proc/{owner.pid}").exists()] for owner in held]
    began = time.monotonic()
    try:
        taken = lock.DirectoryLock.take(storage)
    except SaveError as error:
        _say(directory, name, error=str(error), seen=seen)
        return
    after = [owner.save_id for owner in taken.after]
    facts = {"pid": os.getpid(), "host": platform.node(), "after": after, "seen": seen}
    _say(directory, name, seconds=time.monotonic() - began, save=taken.owner.save_id, **facts)
    asked = Path(f"{directory}.{name}.publish")
    while not asked.exists():
        time.sleep(0.05)
    try:
        taken.publish(name, b"")
        _say(directory, name, published=True)
    except SaveError as error:
        _say(directory, name, error=str(error))


def _say(directory: Path, name: str, **facts: Any) -> None:
    told = Path(f"{directory}.{name}.json")
    told.with_suffix(".new").write_text(json.dumps(facts))
    told.with_suffix(".new").replace(told)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
