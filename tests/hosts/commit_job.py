"""A process that saves into a directory, for tests of hosts that do not see each other's processes.

    python -m tests.hosts.commit_job DIRECTORY NAME YOUNG_S

It writes what comes of its beginning to `DIRECTORY.NAME.json`. Once there is `DIRECTORY.NAME.publish` it publishes
`NAME` as `.metadata`, and writes what comes of that. Notes count while they are younger than `YOUNG_S`.
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
from mcore_ckpt.directory import commit as commits
from mcore_ckpt.directory.commit import Commit
from mcore_ckpt.storage.resolve import storage_at


def main(directory: Path, name: str, young_s: float) -> None:
    """Begin, wait and publish."""
    commits.YOUNG_S = young_s  # type: ignore[misc]
    storage = storage_at(directory)
    try:
        commit = Commit.begin(storage)
    except SaveError as error:
        _say(directory, name, error=str(error))
        return
    _say(directory, name, pid=os.getpid(), host=platform.node())
    asked = Path(f"{directory}.{name}.publish")
    while not asked.exists():
        time.sleep(0.05)
    try:
        commit.publish(name.encode())
        _say(directory, name, published=True)
    except SaveError as error:
        _say(directory, name, error=str(error))


def _say(directory: Path, name: str, **facts: Any) -> None:
    told = Path(f"{directory}.{name}.json")
    told.with_suffix(".new").write_text(json.dumps(facts))
    told.with_suffix(".new").replace(told)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
