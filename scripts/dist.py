#!/usr/bin/env python3
"""Build wheel and sdist, and use the wheel as somebody who has just installed it: `make dist`.

    scripts/dist.py [--only torch|megatron] [--keep DIRECTORY]

Both land in dist/; the wheel is built from the sdist, so that the sdist is whole, too. Then two empty environments,
one with the wheel and what it requires (torch), one with `[megatron]`. In each, away from the checkout,
`scripts/installed.py` runs the command, the snippets of README.md and docs/usage.md, and a save and a load.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"


def build() -> Path:
    """Make both; returns the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)])
    (wheel,) = DIST.glob("*.whl")
    (_,) = DIST.glob("*.tar.gz")
    return wheel


def try_out(wheel: Path, kind: str, work: Path) -> None:
    """Install the wheel into an environment of its own, and use it there."""
    environment = work / f"venv-{kind}"
    venv.create(environment, with_pip=True, clear=True)
    python = environment / "bin" / "python"
    wanted = str(wheel) + ("[megatron]" if kind == "megatron" else "")
    run([str(python), "-m", "pip", "install", "--quiet", wanted])
    elsewhere = work / f"elsewhere-{kind}"
    elsewhere.mkdir(exist_ok=True)
    for name in ("scripts/installed.py", "README.md", "docs/usage.md"):
        shutil.copy(ROOT / name, elsewhere)
    run([str(python), "-W", "ignore", "installed.py", kind], cwd=elsewhere)


def run(command: list[str], cwd: Path | None = None) -> None:
    """Run, and end this program where it fails."""
    started_s = time.monotonic()
    print(f"- {' '.join(command)}", flush=True)
    if (code := subprocess.run(command, cwd=cwd, check=False).returncode) != 0:
        sys.exit(f"dist: failed with {code}: {' '.join(command)}")
    print(f"  {time.monotonic() - started_s:.0f} s", flush=True)


def main() -> None:
    """Build, and try out what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["torch", "megatron"], help="one of the two environments")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="make the environments there, and leave them")
    arguments = parser.parse_args()
    os.environ["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
    wheel = build()
    with tempfile.TemporaryDirectory(prefix="mcore-ckpt-dist-") as temporary:
        work = (arguments.keep or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        for kind in [arguments.only] if arguments.only else ["torch", "megatron"]:
            try_out(wheel, kind, work)


if __name__ == "__main__":
    main()
