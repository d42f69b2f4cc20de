"""Print the versions' reports as the table of docs/megatron.md: `python -m tests.matrix.table DIRECTORY KIND ...`."""

import json
import sys
from pathlib import Path


def table(directory: Path, kinds: list[str]) -> str:
    """Rows: who wrote; columns: the version that reads; cells: whose reader could, of all the kinds given."""
    reports = {p.stem.removeprefix("read-by-"): json.loads(p.read_text()) for p in directory.glob("read-by-*.json")}
    readers = sorted(reports)
    lines = ["| written by | " + " | ".join(readers) + " |", "|" + "---|" * (len(readers) + 1)]
    names = sorted({path.name.rpartition("-")[0] for path in directory.glob("*-*-*") if path.is_dir()})
    for writer in names:
        cells = [cell(reports[reader], [f"{writer}-{kind}" for kind in kinds]) for reader in readers]
        version, _, who = writer.partition("-")
        lines.append(f"| {who} {version} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(report: dict[str, dict[str, str]], names: list[str]) -> str:
    """ "both", "ours", "stock" or "-": whose readers read all these checkpoints; empty if they were not written."""
    written = [report[name] for name in names if name in report]
    if not written:
        return ""
    able = [side for side in ("ours", "stock") if all(sides[side] == "ok" for sides in written)]
    return "both" if len(able) == 2 else "".join(able) or "-"


if __name__ == "__main__":
    print(table(Path(sys.argv[1]), sys.argv[2:]))
