"""Publishing a small file is atomic down to the system call: the process may end before any of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.storage import resolve
from mcore_ckpt.storage.resolve import LocalStorage

pytestmark = pytest.mark.crash

OLD, NEW, AFTER = b"old" * 10, b"new" * 1000, b"after"
CALLS = ("open", "pwrite", "fsync", "close", "link", "replace", "listdir", "unlink")


class _CountedOs:
    """The module `os`, as the storage sees it, but for the k-th call of those that count."""

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._counted(name, real) if name in CALLS else real

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if len(self.calls) == self.at:
                os._exit(17)
            self.calls.append(name)
            return real(*arguments, **keywords)

        return call


def publish_in_child(directory: Path, at: int | None) -> tuple[int, list[str]]:
    """Publish `NEW` in a child that ends before the call number `at`; its exit code and the calls it made."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            counted = _CountedOs(at)
            resolve.os = counted  # type: ignore[attr-defined]
            LocalStorage(directory).publish(".metadata", NEW)
            os.write(write_end, " ".join(counted.calls).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        calls = pipe.read().split()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), calls


@pytest.mark.parametrize("existed", [True, False])
def test_a_publish_that_ends_anywhere_leaves_old_or_new(tmp_path: Path, existed: bool) -> None:
    def fresh(name: str) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        if existed:
            (directory / ".metadata").write_bytes(OLD)
        return directory

    code, calls = publish_in_child(fresh("whole"), None)
    assert code == 0
    assert {"fsync", "replace"} <= set(calls)
    replaced = calls.index("replace")
    for k in range(len(calls)):
        directory = fresh(f"at{k}")
        assert publish_in_child(directory, k)[0] == 17
        file = directory / ".metadata"
        content = file.read_bytes() if file.exists() else None
        assert content == (NEW if k > replaced else OLD if existed else None), f"at {k} ({calls[k]})"
        LocalStorage(directory).publish(".metadata", AFTER)
        assert (directory / ".metadata").read_bytes() == AFTER
