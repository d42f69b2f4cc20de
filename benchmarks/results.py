"""The results: one JSON file, of one commit, to which each part adds its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine

__all__ = ["FILE", "ROOT", "Measurement", "Results", "add_busy", "commit_of_code", "wait_until_quiet"]

# What the file holds: "commit", "machine", "contenders" (label -> adapter, versions), "not run" (name -> why),
# "parts" (part -> date, rounds and the like), "samples" (work -> figure -> label -> one value for each round).
Results = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "docs" / "benchmark.json"
_CODE = ("mcore_ckpt", "benchmarks", "scripts/bench.py", "scripts/bench_tools.py")
_MOST_LOAD = 1.0
_QUIET_WITHIN_S = 600.0


def add_busy(parser: argparse.ArgumentParser) -> None:
    """The option that lets a busy machine be measured."""
    text = f"measure although the load average is above {_MOST_LOAD:g}; the results say so"
    parser.add_argument("--busy", action="store_true", help=text)


def wait_until_quiet(part: str, *, busy: bool) -> None:
    """Wait until what ran before is over; end the program if the machine stays busy, unless `busy` is allowed."""
    until_s = time.monotonic() + _QUIET_WITHIN_S
    while not busy and (load := os.getloadavg()[0]) > _MOST_LOAD:
        if time.monotonic() > until_s:
            raise SystemExit(
                f"{part}: the load average is {load:.1f}, expected at most {_MOST_LOAD:g}: its figures would be "
                "those of other work, too. End that, or give --busy"
            )
        time.sleep(5)


class Measurement:
    """Results of this commit while they come in, those of earlier runs among them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """`arguments` of the command line: `out`, `dir`, `gb`, `rounds`, `busy`."""
        self._arguments = arguments
        commit = commit_of_code()
        found: Results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
        if found.get("commit", commit) != commit:
            sys.stderr.write(f"{arguments.out} is of {found['commit']}, this is {commit}: its figures are left out\n")
            found = {}
        empty: Results = {"contenders": {}, "not run": {}, "parts": {}, "samples": {}}
        about = {"commit": commit, "machine": describe_machine(arguments.dir)}
        self.results: Results = empty | found | about

    def begin(self, part: str) -> None:
        """Begin a part, when the machine is quiet."""
        wait_until_quiet(part, busy=self._arguments.busy)
        self._started_s, self._load_average = time.monotonic(), os.getloadavg()[0]

    def put(self, part: str, samples: Mapping[str, Any], **more: Any) -> None:
        """Put in what has been measured since `begin`, in place of an earlier part of that name; write all."""
        self.results["parts"][part] = {
            "date": datetime.now(timezone.utc).isoformat(timespec="minutes"),
            "took s": round(time.monotonic() - self._started_s),
            "load average": f"{self._load_average:.1f} to {os.getloadavg()[0]:.1f}",
            "gb": self._arguments.gb,
            "rounds": self._arguments.rounds,
            "busy": self._arguments.busy,
            "failed": [],
            **more,
        }
        for work, by_figure in samples.items():
            self.results["samples"][work] = {
                figure: {label: [float(f"{value:.4g}") for value in values] for label, values in by_label.items()}
                for figure, by_label in by_figure.items()
            }
        out = self._arguments.out
        out.parent.mkdir(parents=True, exist_ok=True)
        pending = out.with_name(out.name + ".new")
        pending.write_text(_text(self.results) + "\n")
        pending.replace(out)
        sys.stderr.write(f"{part}: {self.results['parts'][part]['took s']} s\n")


def commit_of_code() -> str:
    """The last commit that changed the package or its benchmarks, with a mark if there are changes since."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    changed = git("--no-optional-locks", "status", "--porcelain", "--", *_CODE)
    return git("log", "-1", "--format=%h", "--", *_CODE) + (" with changes" if changed else "")


def _text(value: Any, depth: int = 0) -> str:
    """JSON with a row's samples on one line."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    indent = " " * (depth + 1)
    inner = ",\n".join(f"{indent}{json.dumps(key)}: {_text(one, depth + 1)}" for key, one in value.items())
    return "{\n" + inner + "\n" + indent[1:] + "}"
