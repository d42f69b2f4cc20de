"""In which order a snapshot asks a device for what; the device is a recorder, since there may be none here."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from mcore_ckpt.writing import staging
from mcore_ckpt.writing.staging import DeviceCopies


class Recorder:
    """Stands in for `torch.cuda`: writes down what is asked of streams and events."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.events = 0
        recorder = self

        class Stream:
            def __init__(self, _: object) -> None:
                recorder.calls.append("new stream")

            def wait_stream(self, other: str) -> None:
                recorder.calls.append(f"side waits for {other}")

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking, "a trainer's core must not spin"
                self.number = recorder.events
                recorder.events += 1

            def record(self, _: Stream) -> None:
                recorder.calls.append(f"record {self.number}")

            def synchronize(self) -> None:
                recorder.calls.append(f"wait {self.number}")

        self.Stream, self.Event = Stream, Event

    def current_stream(self, _: object) -> str:
        return "trainer"

    @contextmanager
    def stream(self, _: object) -> Any:
        self.calls.append("on side")
        yield
        self.calls.append("off side")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for name in ("Stream", "Event", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(recorder, name))
    monkeypatch.setattr(staging, "_streams", {})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waited for the whole device"))
    return recorder


def copy(copies: DeviceCopies, value: float, target: torch.Tensor, cuda: Recorder) -> None:
    tensor = torch.full_like(target, value)

    def source() -> torch.Tensor:
        cuda.calls.append("gather")
        return tensor

    copies.copy(tensor, source, target)


def test_each_tensor_has_an_event_and_the_trainers_work_comes_first(cuda: Recorder) -> None:
    copies, targets = DeviceCopies(), [torch.zeros(3) for _ in range(2)]
    for number, target in enumerate(targets):
        copy(copies, number + 1.0, target, cuda)
    copies.wait()
    assert cuda.calls == [
        *["new stream", "side waits for trainer", "on side", "gather", "record 0", "off side"],
        *["on side", "gather", "record 1", "off side"],
        *["wait 0", "wait 1"],
    ]
    assert [target.tolist() for target in targets] == [[1.0] * 3, [2.0] * 3]


def test_the_next_snapshot_waits_for_the_trainer_anew_and_makes_no_new_events(cuda: Recorder) -> None:
    copies, target = DeviceCopies(), torch.zeros(1)
    copy(copies, 1.0, target, cuda)
    copies.wait()
    cuda.calls.clear()
    copy(copies, 2.0, target, cuda)
    copies.wait()
    copies.wait()
    assert cuda.calls == ["side waits for trainer", "on side", "gather", "record 0", "off side", "wait 0"]
    assert cuda.events == 1


class _OnDevice:
    """Stands in for a tensor of that device."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)


def test_an_event_is_used_again_on_its_own_device_only(cuda: Recorder) -> None:
    copies, target = DeviceCopies(), torch.zeros(1)
    for index in (0, 1, 0, 1):
        copies.copy(_OnDevice(index), lambda: torch.ones(1), target)  # type: ignore[arg-type]
        copies.wait()
    events = [int(call.split()[1]) for call in cuda.calls if call.startswith("record")]
    assert events == [0, 1, 0, 1]


def test_all_sources_of_a_device_share_its_side_stream(cuda: Recorder) -> None:
    for _ in range(3):
        copies = DeviceCopies()
        copy(copies, 1.0, torch.zeros(1), cuda)
        copies.wait()
    assert cuda.calls.count("new stream") == 1
