"""Clocks that are wrong, for hosts made of namespaces: these have one clock with the machine, which nobody may set.

`clock.c` says what is wrong then. It is built where there is a compiler.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Literal

__all__ = ["missing_reason", "wrong_clock"]


def missing_reason() -> str:
    """Why no clock can be wrong here; empty if one can."""
    return "" if shutil.which("cc") else "a clock is made wrong by a library that `cc` builds, which is not installed"


def wrong_clock(ahead_s: int, files: Literal["server", "client"], folder: Path) -> dict[str, str]:
    """Variables for the processes of a host whose clock is so much ahead. Files get their times from that clock, or
    from the one of the machine, which is the right one. `folder`: which that host sees, for the library.
    """
    library = folder / "clock.so"
    if not library.exists():
        source = Path(__file__).with_name("clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "CLOCK_AHEAD_S": str(ahead_s), "CLOCK_OF_FILES": files}
