"""Time limits of requests are kept by one thread, whatever calls they make."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from mcore_ckpt.storage import _alarms
from mcore_ckpt.storage._alarms import call_off, set_alarm
from mcore_ckpt.storage.resolve import storage_at
from tests.support.forked import exit_code, fork
from tests.support.object_server import S3Directory


def test_calls_are_made_in_their_order_and_not_before_their_moment() -> None:
    made: list[tuple[str, float]] = []
    done = threading.Event()
    began_s = time.monotonic()
    for name, after_s in (("third", 0.6), ("first", 0.2), ("second", 0.4)):
        set_alarm(after_s, lambda name=name: made.append((name, time.monotonic() - began_s)))  # type: ignore[misc]
    set_alarm(0.8, done.set)
    assert done.wait(30.0)
    assert [name for name, _ in made] == ["first", "second", "third"]
    assert all(at_s >= least_s for (_, at_s), least_s in zip(made, (0.2, 0.4, 0.6), strict=True))


def test_what_is_called_off_is_not_called_and_takes_no_memory() -> None:
    made: list[int] = []
    done = threading.Event()
    for number in range(10_000):
        call_off(set_alarm(0.3, lambda number=number: made.append(number)))  # type: ignore[misc]
        assert len(_alarms._clock.waiting) < 200
    set_alarm(0.5, done.set)
    assert done.wait(30.0)
    assert made == []


def test_calling_off_waits_for_a_call_in_progress() -> None:
    """What a request has used may be used by the next one then: it is not cut off any more."""
    begun, ended = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        time.sleep(0.3)
        ended.set()

    alarm = set_alarm(0.0, call)
    assert begun.wait(30.0)
    call_off(alarm)
    assert ended.is_set()


def test_a_call_that_fails_does_not_hold_up_the_others(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def fail() -> None:
        raise ValueError("of a test")

    set_alarm(0.0, fail)
    set_alarm(0.1, done.set)
    assert done.wait(30.0)
    assert "of a test" in caplog.text


def test_a_forked_process_has_alarms_of_its_own() -> None:
    held = set_alarm(60.0, lambda: None)

    def in_child() -> None:
        done = threading.Event()
        set_alarm(0.0, done.set)
        os._exit(0 if done.wait(30.0) else 1)

    assert exit_code(fork(in_child)) == 0
    call_off(held)


def test_requests_start_no_threads(s3_directory: S3Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine each would be waited for longer than the answer."""
    storage = storage_at(s3_directory.url)
    storage.create("first", b"content")
    started: list[str] = []
    start = threading.Thread.start

    def counted(thread: threading.Thread, *arguments: Any) -> None:
        started.append(thread.name)
        start(thread, *arguments)

    monkeypatch.setattr(threading.Thread, "start", counted)
    for number in range(20):
        storage.create(f"{number}", b"content")
        assert storage.read(f"{number}") == b"content"
        with storage.open_reader(f"{number}") as reader:
            reader._client.get_into(reader._key, 0, memoryview(bytearray(7)), reader._e_tag)  # type: ignore[attr-defined]
    assert set(started) <= {"mcore-ckpt-alarms"}
