"""Threads that read, and the files that they read from: nothing goes on when a load has been left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.load.fetch import OpenFiles, in_parallel
from mcore_ckpt.storage._local import LocalStorage


@pytest.mark.parametrize("interrupted", [1, 2, 3])
def test_nobody_works_on_when_starting_threads_was_interrupted(
    interrupted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool does not know of the thread that it was starting, and does not wait for it."""
    unknown: list[threading.Thread] = []
    submitted = 0
    submit = ThreadPoolExecutor.submit

    def interrupted_submit(pool: ThreadPoolExecutor, work: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        nonlocal submitted
        submitted += 1
        if submitted < interrupted:
            return submit(pool, work, *arguments)
        unknown.append(threading.Thread(target=work, args=arguments))
        unknown[0].start()
        time.sleep(0.02)  # so that it is at work
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted_submit)
    done: list[int] = []

    def work(task: int) -> None:
        time.sleep(0.001)
        done.append(task)

    with pytest.raises(KeyboardInterrupt):
        in_parallel(range(5000), work, 4)
    left = len(done)
    unknown[0].join()
    assert len(done) == left < 5000


def test_a_file_in_use_is_closed_by_its_last_user(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    files = OpenFiles(LocalStorage(tmp_path), "off", None)
    with files.reader("a") as reader:
        with files.reader("a") as again:
            assert again is reader
            files.close()
        assert reader.read(0, 10) == bytes(10)
    with pytest.raises(ValueError, match="closed"):
        reader.read(0, 10)
