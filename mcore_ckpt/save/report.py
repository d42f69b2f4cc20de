"""What a save took: a line in the log, and a trace that browsers show (`SaveOptions.trace_path`)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from mcore_ckpt.core.console import counted, line_level, logger_of
from mcore_ckpt.image.layout import WrittenFile

_logger = logger_of(__name__)
_GB: Final = 1e9


class Span(NamedTuple):
    """A phase of a save, in seconds on the clock of `time.monotonic()`, which all processes of a host share."""

    name: str
    start_s: float
    stop_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.stop_s - self.start_s


_PHASES: Final = ("plan", "stage", "dispatch", "write", "writer", "gather", "commit")


def log_line(what: str, took_s: Mapping[str, float], files: Sequence[tuple[int, WrittenFile]]) -> str:
    """The line of a save: `took_s` in each of its phases, what training `waited`, until its files were `durable` and it
    was `published`, of the slowest ranks; each file with its rank.
    """
    size_gb = sum(file.size_bytes for _, file in files) / _GB
    phases = ", ".join(f"{name} {took_s[name]:.3f} s" for name in _PHASES if name in took_s)
    straggler = ""
    if files:
        rank, file = max(files, key=lambda each: each[1].write_s + each[1].fsync_s)
        straggler = (
            f"; slowest file {file.name} of rank {rank} ({file.write_s + file.fsync_s:.3f} s: write "
            f"{file.write_s:.3f} s, fsync {file.fsync_s:.3f} s)"
        )
    synchronous = " (a synchronous save)" if "write" in took_s else ""
    rate = f" at {size_gb / took_s['writing']:.2f} GB/s" if took_s["writing"] else ""
    return (
        f"saved {size_gb:.3f} GB in {counted(len(files), 'file')} to {what}: training waited {took_s['waited']:.3f} s"
        f"{synchronous}, files durable after {took_s['durable']:.3f} s{rate}, published after "
        f"{took_s['published']:.3f} s ({phases}){straggler}"
    )


def log_save(
    what: str, took_s: Sequence[Mapping[str, float]], spans: Sequence[Span], files: Sequence[tuple[int, WrittenFile]]
) -> None:
    """Log the line of a save that is published, on the coordinator: `took_s` of each rank, `spans` of this one."""
    slowest: dict[str, float] = {}
    for of_rank in took_s:
        for name, seconds in of_rank.items():
            slowest[name] = max(slowest.get(name, 0.0), seconds)
    ends = {span.name: span.seconds for span in spans[-2:]}  # gather and commit
    slowest |= {**ends, "waited": slowest["waited"] + sum(ends.values())}
    slowest["published"] = time.monotonic() - spans[0].start_s
    _logger.log(line_level(sum(file.size_bytes for _, file in files)), "%s", log_line(what, slowest, files))


def write_trace(path: Path, save: str, rank: int, spans: Sequence[Span], files: Sequence[WrittenFile]) -> None:
    """Write this rank's phases (`Span`) as a trace that Chrome (`chrome://tracing`) and Perfetto show. A trace that
    cannot be written is only warned about: the checkpoint is published.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "trainer"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 1, "args": {"name": "writer process"}},
    ]
    wrote = [
        {"file_name": file.name, "size_bytes": file.size_bytes, "write_s": file.write_s, "fsync_s": file.fsync_s}
        for file in files
    ]
    events += [
        {
            "ph": "X",
            "cat": "save",
            "name": phase,
            "pid": rank,
            "tid": int(phase == "writer"),
            "ts": start_s * 1e6,
            "dur": (stop_s - start_s) * 1e6,
            "args": {"files": wrote} if phase in ("write", "writer") else {"checkpoint": save},
        }
        for phase, start_s, stop_s in spans
    ]
    name = f"{Path(save).name or 'save'}_rank{rank}.trace.json"
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    except Exception as error:  # noqa: BLE001  (the checkpoint is published: nothing here may fail its save)
        _logger.warning("%s: the trace of a save cannot be written: %s", path, error)
