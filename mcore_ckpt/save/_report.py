"""What a save took: phases, bytes, the slowest file. For a log line and a trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from mcore_ckpt.core.console import line_level, logger_of, show_aside

_logger = logger_of(__name__)
# A trace may go to another file system than the checkpoint, which may hang; it is then written when that answers.
_TRACE_PATIENCE_S: Final = 5.0

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


@dataclass(frozen=True, slots=True)
class FileReport:
    """One data file. Times in seconds; `write_s` is summed over the I/O threads."""

    rank: int
    file_name: str
    size_bytes: int
    write_s: float
    fsync_s: float


@dataclass(frozen=True, slots=True)
class Took:
    """What a save took on one rank, in seconds; or on the slowest, each figure by itself."""

    waited_s: float  # what training waited for: the call, and what was waited for when it was finalized
    durable_s: float  # from the beginning of the call until the last data file was durable
    writing_s: float  # of that, from the first byte that was written

    def slower(self, other: Took) -> Took:
        """The larger of each."""
        return Took(
            max(self.waited_s, other.waited_s),
            max(self.durable_s, other.durable_s),
            max(self.writing_s, other.writing_s),
        )


@dataclass(frozen=True, slots=True)
class SaveReport:
    """One save, as the coordinator saw it."""

    directory: str  # of the checkpoint
    took: Took  # of the slowest ranks
    published_s: float  # from the plan's beginning to the commit's end, which comes when training asks for it
    # Seconds of each phase: of the slowest rank for `plan`, `stage`, `dispatch` (to the writer process, or the fork)
    # and `write`; of the coordinator for `gather` (waiting for all ranks' results) and `commit`. `writer` is the work
    # of a writer process.
    phases_s: dict[str, float]
    files: tuple[FileReport, ...]  # every rank's files

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def slowest(self) -> FileReport | None:
        """The file that took longest to write and sync."""
        return max(self.files, key=lambda file: file.write_s + file.fsync_s, default=None)

    @property
    def log_level(self) -> int:
        """Level of the save's log line."""
        return line_level(self.size_bytes)

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases_s.items())
        slowest = self.slowest
        straggler = ""
        if slowest is not None:
            took_s = slowest.write_s + slowest.fsync_s
            straggler = (
                f"; slowest file {slowest.file_name} of rank {slowest.rank} "
                f"({took_s:.3f} s: write {slowest.write_s:.3f} s, fsync {slowest.fsync_s:.3f} s)"
            )
        took = self.took
        synchronous = " (a synchronous save)" if "write" in self.phases_s else ""
        rate = f" at {self.size_bytes / _GB / took.writing_s:.2f} GB/s" if took.writing_s else ""
        return (
            f"saved {self.size_bytes / _GB:.3f} GB in {len(self.files)} files to {self.directory}: "
            f"training waited {took.waited_s:.3f} s{synchronous}, files durable after "
            f"{took.durable_s:.3f} s{rate}, published after {self.published_s:.3f} s ({phases}){straggler}"
        )


def write_trace(path: Path, save: str, rank: int, spans: Sequence[Span], files: Sequence[FileReport]) -> None:
    """Write this rank's phases as a trace that Chrome (`chrome://tracing`) and Perfetto show. A trace that cannot be
    written is only warned about: the checkpoint is published.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "trainer"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 1, "args": {"name": "writer process"}},
    ]
    for span in spans:
        writes = span.name in ("write", "writer")
        events.append(
            {
                "ph": "X",
                "cat": "save",
                "name": span.name,
                "pid": rank,
                "tid": int(span.name == "writer"),
                "ts": span.start_s * 1e6,
                "dur": span.seconds * 1e6,
                "args": {"files": [asdict(file) for file in files]} if writes else {"checkpoint": save},
            }
        )
    name = f"{Path(save).name or 'save'}_rank{rank}.trace.json"

    def write() -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        except Exception as error:  # noqa: BLE001  (the checkpoint is published: nothing here may fail its save)
            _logger.warning("%s: the trace of a save cannot be written: %s", path, error)

    show_aside(write, patience_s=_TRACE_PATIENCE_S)
