"""`python -m mcore_ckpt` is the `mcore-ckpt` command."""

from __future__ import annotations

import sys

from mcore_ckpt.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
