"""The pictures of the documentation are what `scripts/pictures.py` makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import pictures


def test_diagrams_are_those_of_the_script() -> None:
    for name, text in pictures.DIAGRAMS.items():
        assert (pictures.PICTURES / name).read_text() == pictures.draw_diagram(text), f"{name}: make pictures"


def test_the_picture_of_the_save_is_that_of_its_trace() -> None:
    trace = json.loads((pictures.PICTURES / pictures.TRACE).read_text())
    assert (pictures.PICTURES / "async_save.svg").read_text() == pictures.draw_trace(trace)


@pytest.mark.long
def test_a_trace_of_a_real_save_is_drawn(tmp_path: Path) -> None:
    pictures.make(["trace"], tmp_path)
    spans = [
        event for event in json.loads((tmp_path / pictures.TRACE).read_text())["traceEvents"] if event["ph"] == "X"
    ]
    for rank in range(2):
        mine = {event["name"]: event for event in spans if event["pid"] == rank}
        assert mine.keys() == {"plan", "stage", "dispatch", "train", "writer", "gather", "commit"}
        assert mine["writer"]["ts"] >= mine["stage"]["ts"] + mine["stage"]["dur"]
    drawn = (tmp_path / "async_save.svg").read_text()
    assert all(f"<title>{event['name']}: {event['dur'] / 1e3:.1f} ms</title>" in drawn for event in spans)
