"""Reading ahead: the same bytes, each read once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mcore_ckpt.reshard import copying
from mcore_ckpt.reshard.copying import AheadSource, ReadAhead
from mcore_ckpt.tools.payloads import StoredPayload

DEADLINE_S = 60
PIECE = 16 * 1024
PAGE = 4096


class _Files:
    """Files in memory; notes what is read."""

    def __init__(self, **contents: bytes) -> None:
        self.contents = contents
        self.reads: list[tuple[str, int, int]] = []
        self.lock = threading.Lock()

    @contextmanager
    def reader(self, name: str) -> Iterator[_Reader]:
        yield _Reader(self, name)

    def close(self) -> None:
        pass


class _Reader:
    def __init__(self, files: _Files, name: str) -> None:
        self._files, self._name = files, name
        self.size_bytes = len(files.contents[name])

    def read_into(self, offset: int, view: memoryview) -> None:
        files = self._files
        with files.lock:
            files.reads.append((self._name, offset, len(view)))
        content = files.contents[self._name][offset : offset + len(view)]
        assert len(content) == len(view)
        view[:] = content


class _Payloads:
    """Payloads that do not lie plainly in a file."""

    def read_into(self, payload: StoredPayload, start: int, view: memoryview) -> None:
        view[:] = bytes([start % 251]) * len(view)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(copying, "_BLOCK_BYTES", PIECE)
    monkeypatch.setattr(copying, "_BUFFER_BYTES", PIECE + 2 * PAGE)
    monkeypatch.setattr(copying, "_MIN_BYTES", 3000)
    before = threading.active_count()
    yield
    assert threading.active_count() == before  # none is left behind


def ahead_of(files: _Files, **options: Any) -> ReadAhead:
    return ReadAhead(files, **options)  # type: ignore[arg-type]


def source(ahead: ReadAhead, payload: StoredPayload) -> AheadSource:
    return AheadSource(ahead, _Payloads(), payload)  # type: ignore[arg-type]


def whole(payload: StoredPayload) -> list[tuple[StoredPayload, int, int]]:
    return [(payload, 0, payload.nbytes)]


@pytest.mark.timeout(DEADLINE_S)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_order_is_asked_for_gives_the_bytes_and_reads_none_twice(seed: int) -> None:
    rng = random.Random(seed)
    files = _Files(a=rng.randbytes(700_000), b=rng.randbytes(300_000))
    payloads = []
    for name, content in files.contents.items():
        at = rng.randrange(100)
        while at < len(content) - 100:
            nbytes = min(rng.choice([10, 2000, 5000, 40_000, 150_000]), len(content) - at)
            payloads.append(StoredPayload(f"{name} {at}", name, at, nbytes, None))
            at += nbytes + rng.choice([0, 0, 0, 700, 9000])
    rng.shuffle(payloads)
    payloads.insert(3, StoredPayload("computed", "a", 0, 5000, None, computed=True))
    wanted = 0
    with ahead_of(files, buffers=rng.choice([1, 2, 4]), threads=rng.choice([1, 2, 3])) as ahead:
        for payload in ahead.steps(payloads, whole):
            given = source(ahead, payload)
            if payload.computed:
                memory = memoryview(bytearray(50))
                given.read_into(7, memory)
                assert bytes(memory) == b"\7" * 50
                continue
            expected = files.contents[payload.file][payload.offset : payload.offset + payload.nbytes]
            left_out = payload.nbytes // 2 if rng.random() < 0.1 else payload.nbytes
            at, content = 0, b""
            while at < left_out:
                nbytes = min(rng.choice([100, 9000, 200_000]), left_out - at)
                view = given.lend(at, nbytes) if rng.random() < 0.5 else None
                if view is None:
                    view = memoryview(bytearray(nbytes))
                    given.read_into(at, view)
                content += bytes(view)
                at += len(view)
            assert content == expected[:left_out]
            wanted += payload.nbytes
    read = sum(nbytes for _, _, nbytes in files.reads)
    assert read <= wanted + 2 * PAGE * len(payloads)
