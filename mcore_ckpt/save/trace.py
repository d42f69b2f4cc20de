"""What a save took, as a trace that browsers show (`SaveOptions.trace_path`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.image.layout import WrittenFile

_logger = logger_of(__name__)


def write_trace(
    path: Path, save: str, rank: int, spans: Sequence[tuple[str, float, float]], files: Sequence[WrittenFile]
) -> None:
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
