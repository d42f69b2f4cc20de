"""`mcore-ckpt` and `python -m mcore_ckpt`: `launch` and the commands on checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["launch"]:
        from mcore_ckpt import launch

        return launch.main(words[1:])
    from mcore_ckpt.commands import cli

    return cli.main(words)


if __name__ == "__main__":
    sys.exit(main())
