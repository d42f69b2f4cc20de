"""A crew of threads: tasks in order, the first error, and nothing that works on when its caller has left."""

import threading
import time
from functools import partial

import pytest

from mcore_ckpt.core.process import Crew, in_parallel
from tests.support.meanwhile import behind
from tests.support.processes import in_child, suspend

pytestmark = pytest.mark.quick


def refuse_threads_from(number: int, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if int(thread.name.rpartition("-")[2]) >= number:
            raise RuntimeError(reason)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.parametrize("threads", [0, 2])
def test_the_first_error_is_raised_and_what_had_not_begun_is_dropped(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not threads:
        refuse_threads_from(0, "can't start new thread", monkeypatch)
    done: list[int] = []
    released: list[int] = []

    def work(number: int) -> None:
        time.sleep(0.001)
        if number in (5, 6):
            raise KeyError(number)
        done.append(number)

    def submit_many() -> None:
        with Crew(threads or 2, "crew") as crew:
            for number in range(100_000):
                crew.submit(partial(work, number), partial(released.append, number))

    with pytest.raises(KeyError) as raised:
        submit_many()
    assert raised.value.args[0] in (5, 6)
    assert max(done) < 10
    assert sorted(released) == list(range(len(released)))
    assert len(released) < 100_000
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("crew")]


@pytest.mark.parametrize("interrupted", [1, 3])
def test_nobody_works_on_when_starting_threads_was_interrupted(interrupted: int) -> None:
    started: list[threading.Thread] = []

    def interrupt(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) == interrupted:
            time.sleep(0.02)  # so that it is at work
            raise KeyboardInterrupt

    done: list[int] = []

    def work(task: int) -> None:
        time.sleep(0.001)
        done.append(task)

    with behind(threading.Thread, "start", interrupt), pytest.raises(KeyboardInterrupt):
        in_parallel(range(5000), work, 4)
    left = len(done)
    for thread in started:
        thread.join()
    assert len(done) == left < 5000


def test_there_are_no_more_threads_than_tasks() -> None:
    both = threading.Barrier(2, timeout=30)
    names: set[str] = set()

    def work(task: int) -> None:
        names.add(threading.current_thread().name)
        both.wait()

    in_parallel(range(2), work, 10**30)
    assert names == {"mcore_ckpt-read-0", "mcore_ckpt-read-1"}


def _suspended() -> bool:
    def task() -> None:
        suspend(for_s=3.0)
        until_s = time.thread_time() + 0.2
        while time.thread_time() < until_s:
            pass

    with Crew(1, "suspended", deadline_s=1.5) as crew:
        crew.submit(task)
    return True


def test_a_caller_that_was_suspended_has_not_waited() -> None:
    assert in_child(_suspended) == "True"
