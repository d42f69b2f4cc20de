"""What a save took: phases, bytes, the slowest file. For a log line, a callback and a trace."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["FileReport", "SaveReport"]

_GB = 1e9


@dataclass(frozen=True, slots=True)
class FileReport:
    """One data file. Times in seconds; `write_s` is summed over the I/O threads."""

    rank: int
    file_name: str
    size_bytes: int
    write_s: float
    fsync_s: float


@dataclass(frozen=True, slots=True)
class SaveReport:
    """One save, as the coordinator saw it.

    Attributes:
        directory: of the checkpoint.
        total_s: from the plan's beginning to the commit's end.
        phases_s: seconds of each phase: of the slowest rank for `plan`, `stage` and `write`; of the coordinator for
            `gather` (waiting for all ranks' results) and `commit`.
        files: every rank's files.
    """

    directory: str
    total_s: float
    phases_s: dict[str, float]
    files: tuple[FileReport, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def slowest(self) -> FileReport | None:
        """The file that took longest to write and sync."""
        return max(self.files, key=lambda file: file.write_s + file.fsync_s, default=None)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values, for a callback or JSON."""
        rate = self.size_bytes / _GB / self.total_s if self.total_s else 0.0
        slowest = None if self.slowest is None else asdict(self.slowest)
        return {**asdict(self), "size_bytes": self.size_bytes, "gb_per_s": rate, "slowest": slowest}

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases_s.items())
        slowest = self.slowest
        straggler = ""
        if slowest is not None:
            took_s = slowest.write_s + slowest.fsync_s
            straggler = f"; slowest file {slowest.file_name} of rank {slowest.rank} ({took_s:.3f} s)"
        size = f"{self.size_bytes / _GB:.3f} GB in {len(self.files)} files"
        return f"saved {size} to {self.directory} in {self.total_s:.3f} s ({phases}){straggler}"
