#!/usr/bin/env python3
"""`mcore-ckpt reshard` from a checkout: scripts/reshard.py SRC DST --tp N --pp M [...]."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mcore_ckpt.commands.cli import main

if __name__ == "__main__":
    sys.exit(main(["reshard", *sys.argv[1:]]))
