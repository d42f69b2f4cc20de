"""Images come out the same by every way of writing them, and a failure leaves nothing behind."""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import struct
import threading
import time
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_ckpt.core.errors import SaveError, WriteTimeoutError
from mcore_ckpt.save.buckets import FileImage, PlannedFile, Window, WrittenFile, plan_windows
from mcore_ckpt.save.writer import ImageWriter, WindowPool
from mcore_ckpt.storage.base import RangeWriter
from mcore_ckpt.storage.resolve import LocalStorage
from tests.support.faulty_storage import Faults, FaultyStorage
from tests.support.local_files import aligned, names, open_fds, random_bytes

PAGE = mmap.PAGESIZE


def make_image(
    lengths: list[int], gaps: list[int], *, crc_gaps: tuple[int, ...] = (3, 40), name: str = "file"
) -> PlannedFile:
    """Payloads of `lengths` bytes, `gaps[i]` unused bytes before payload i, and CRCs at `crc_gaps` behind each."""
    offsets, positions = array("q"), array("q")
    end = 0
    for length, gap in zip(lengths, gaps, strict=True):
        offsets.append(end + gap)
        end += gap + length
        for crc_gap in crc_gaps:
            positions.append(end + crc_gap)
            end += crc_gap + 4
    return PlannedFile(name, FileImage(end + 5, offsets, array("q", lengths), positions))


def expected(planned: PlannedFile, content: bytes) -> tuple[bytes, list[int]]:
    """The file and its CRCs, the plain way."""
    image = planned.image
    file, crcs = bytearray(content), []
    per_item = len(image.crc_positions) // max(1, len(image.payload_offsets))
    for item, (offset, length) in enumerate(zip(image.payload_offsets, image.payload_lengths, strict=True)):
        crcs.append(zlib.crc32(content[offset : offset + length]))
        for position in image.crc_positions[item * per_item : (item + 1) * per_item]:
            struct.pack_into("<I", file, position, crcs[-1])
    return bytes(file), crcs


def write_image(
    writer: RangeWriter,
    image: PlannedFile,
    view: memoryview,
    **options: Any,
) -> WrittenFile:
    """Write one image from memory."""
    with ImageWriter(**options) as images:
        images.write_image(writer, image, view)
    return images.results[0]


def write_windows(
    writer: RangeWriter,
    image: PlannedFile,
    fill: Callable[[Window, memoryview], None],
    **options: Any,
) -> WrittenFile:
    """Write one image by windows."""
    with ImageWriter(**options) as images:
        images.write_windows(writer, image, fill)
    return images.results[0]


def copy_from(content: bytes) -> Callable[[Window, memoryview], None]:
    def fill(window: Window, view: memoryview) -> None:
        view[:] = content[window.start : window.stop]

    return fill


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def writing_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mcore-ckpt-write")]


LAYOUTS = {
    "empty file": ([], []),
    "no payload bytes": ([0, 0, 0], [10, 0, 7]),
    "one byte": ([1], [0]),
    "many small": ([k * 37 % 300 for k in range(200)], [k % 70 for k in range(200)]),
    "larger than a window": ([3 * PAGE, 5 * PAGE + 1, 17], [64, PAGE - 100, 1]),
    "payload ends with the window": ([PAGE - 64, 100], [64, 0]),
    "CRC across two windows": ([PAGE - 64 - 5, 100], [64, 0]),
    "CRC in the next window": ([PAGE - 64 - 2, 100], [64, 0]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("window_pages", [1, 3])
def test_all_ways_write_the_same_file(
    storage: LocalStorage, tmp_path: Path, layout: str, direct: str, window_pages: int
) -> None:
    image = make_image(*LAYOUTS[layout])
    content = random_bytes(image.image.size_bytes)
    file, crcs = expected(image, content)

    whole = write_image(
        storage.open_writer("whole", size_bytes=image.image.size_bytes, direct=direct),
        image,
        aligned(content),
        piece_bytes=window_pages * PAGE,
    )
    with ImageWriter(piece_bytes=window_pages * PAGE, through_windows=False) as writer:
        writer.write_image(storage.open_writer("in place", direct=direct), image, aligned(content))
    windowed = write_windows(
        storage.open_writer("windowed", direct=direct), image, copy_from(content), pool=WindowPool(window_pages * PAGE)
    )

    assert (tmp_path / "whole").read_bytes() == file
    assert (tmp_path / "in place").read_bytes() == file
    assert (tmp_path / "windowed").read_bytes() == file
    for result in (whole, windowed, writer.results[0]):
        assert list(result.crcs) == crcs
        assert result.size_bytes == image.image.size_bytes
        assert result.name == "file"


class MemoryWriter(RangeWriter):
    """Keeps what is written; for properties, where a file for each example would be slow."""

    name = "memory"
    direct = False

    def __init__(self) -> None:
        self.content = bytearray()
        self.finished: int | None = None
        self._lock = threading.Lock()

    def write(self, offset: int, view: memoryview) -> None:
        with self._lock:
            self.content.extend(bytes(max(0, offset + len(view) - len(self.content))))
            self.content[offset : offset + len(view)] = view

    def finish(self, size_bytes: int) -> None:
        del self.content[size_bytes:]
        self.finished = size_bytes

    def abort(self) -> None:
        self.content.clear()


@given(
    payloads=st.lists(st.tuples(st.integers(0, 3 * PAGE), st.integers(0, PAGE)), max_size=12),
    crc_gaps=st.lists(st.integers(0, PAGE), min_size=1, max_size=3),
    window_pages=st.integers(1, 4),
    windows=st.integers(1, 3),
    io_threads=st.integers(1, 3),
)
def test_any_layout_is_summed_and_patched(
    payloads: list[tuple[int, int]], crc_gaps: list[int], window_pages: int, windows: int, io_threads: int
) -> None:
    image = make_image([length for length, _ in payloads], [gap for _, gap in payloads], crc_gaps=tuple(crc_gaps))
    content = random_bytes(image.image.size_bytes)
    file, crcs = expected(image, content)
    in_place, windowed = MemoryWriter(), MemoryWriter()
    with ImageWriter(io_threads=io_threads, piece_bytes=window_pages * PAGE, through_windows=False) as writer:
        writer.write_image(in_place, image, aligned(content))
    pool = WindowPool(window_pages * PAGE, windows)
    result = write_windows(windowed, image, copy_from(content), pool=pool, io_threads=io_threads)
    assert [list(writer.results[0].crcs), list(result.crcs)] == [crcs, crcs]
    assert bytes(in_place.content) == file
    assert bytes(windowed.content) == file


def test_windows_tile_the_file() -> None:
    for pages in (0, 1, 5):
        windows = list(plan_windows(pages * PAGE + 1, 2 * PAGE))
        assert [window.start for window in windows] == [0, *(window.stop for window in windows)][:-1]
        assert windows[-1].stop == pages * PAGE + 1


def test_several_images_go_through_one_pool_that_does_not_grow(storage: LocalStorage, tmp_path: Path) -> None:
    images = [make_image([k * PAGE, 999, 3 * PAGE], [64, 7, 100], name=f"f{k}") for k in range(5)]
    contents = [random_bytes(image.image.size_bytes, seed) for seed, image in enumerate(images)]
    pool = WindowPool(2 * PAGE, 2)
    seen_buffers = set()
    written: list[int] = []
    for round_ in range(3):
        with ImageWriter(pool=pool, on_written=written.append) as writer:
            for image, content in zip(images, contents, strict=True):

                def fill(window: Window, view: memoryview, content: bytes = content) -> None:
                    seen_buffers.add(id(view.obj))
                    view[:] = content[window.start : window.stop]

                writer.write_windows(storage.open_writer(f"{image.name}_{round_}"), image, fill)
        assert [result.name for result in writer.results] == [image.name for image in images]
        for image, content, result in zip(images, contents, writer.results, strict=True):
            file, crcs = expected(image, content)
            assert (tmp_path / f"{image.name}_{round_}").read_bytes() == file
            assert list(result.crcs) == crcs
    assert len(seen_buffers) <= 2
    assert sum(written) >= 3 * sum(image.image.size_bytes for image in images)
    assert writing_threads() == []


def test_times_are_reported(storage: LocalStorage) -> None:
    image = make_image([64 * PAGE], [0])

    def slow(window: Window, view: memoryview) -> None:
        time.sleep(0.01)
        view[:] = bytes(len(view))

    result = write_windows(storage.open_writer("file"), image, slow, pool=WindowPool(32 * PAGE))
    assert isinstance(result, WrittenFile)
    assert 0.02 <= result.fill_s < 5
    assert result.crc_s > 0
    assert result.write_s > 0
    assert result.fsync_s > 0


def test_an_image_is_cheap_to_pickle() -> None:
    image = make_image([100] * 20_000, [64] * 20_000)
    pickled = pickle.dumps(image, protocol=5)
    assert len(pickled) < 20_000 * 33
    assert pickle.loads(pickled) == image


# Failures


@pytest.mark.parametrize("operation", ["write", "finish"])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("by_windows", [True, False], ids=["windows", "in place"])
def test_any_failure_removes_all_files_of_the_job(
    storage: LocalStorage, tmp_path: Path, operation: str, at: int, by_windows: bool
) -> None:
    (tmp_path / "bystander").write_bytes(b"precious")
    before = open_fds()
    faulty = FaultyStorage(storage, Faults(at=at, only=frozenset({operation}), code=errno.EIO))
    images = [make_image([5 * PAGE, 77], [64, 64], name=f"f{k}") for k in range(4)]
    pool = WindowPool(PAGE, 3)

    def save() -> None:
        with ImageWriter(pool=pool, piece_bytes=PAGE, through_windows=False) as writer:
            for image in images:
                content = random_bytes(image.image.size_bytes)
                out = faulty.open_writer(image.name)
                if by_windows:
                    writer.write_windows(out, image, copy_from(content))
                else:
                    writer.write_image(out, image, aligned(content))

    with pytest.raises(SaveError, match=rf"f\d: {operation} failed: Input/output error") as caught:
        save()
    frames = {entry.name for entry in caught.traceback}
    assert operation in frames, "the traceback does not reach the call that failed"
    assert names(tmp_path) == {"bystander"}
    assert open_fds() == before
    assert writing_threads() == []


def test_the_pool_is_whole_after_a_failure(storage: LocalStorage) -> None:
    pool = WindowPool(PAGE, 2)
    image = make_image([9 * PAGE], [0])
    for at in range(3):
        faulty = FaultyStorage(storage, Faults(at=at, only=frozenset({"write"})))
        with pytest.raises(SaveError):
            write_windows(faulty.open_writer("file"), image, copy_from(bytes(image.image.size_bytes)), pool=pool)
    assert pool.take() is not None
    assert pool.take() is not None
    assert pool.take() is None


@pytest.mark.parametrize("error", [KeyError("staging broke"), KeyboardInterrupt()])
def test_an_error_of_the_caller_is_raised_as_it_is(error: BaseException, storage: LocalStorage, tmp_path: Path) -> None:
    image = make_image([9 * PAGE], [0])
    pool = WindowPool(PAGE, 2)

    def fill(window: Window, view: memoryview) -> None:
        if window.start >= 4 * PAGE:
            raise error
        view[:] = bytes(len(view))

    with pytest.raises(type(error)) as caught:
        write_windows(storage.open_writer("file"), image, fill, pool=pool)
    assert caught.value is error
    assert names(tmp_path) == set()
    assert writing_threads() == []
    assert pool.take() is not None
    assert pool.take() is not None


def test_a_failure_is_raised_while_the_caller_still_fills(storage: LocalStorage) -> None:
    """A full disk must not cost the time of computing the rest."""
    image = make_image([1000 * PAGE], [0])
    filled = []

    def fill(window: Window, view: memoryview) -> None:
        filled.append(window.start)
        view[:] = bytes(len(view))

    faulty = FaultyStorage(storage, Faults(at=1, only=frozenset({"write"})))
    with pytest.raises(SaveError):
        write_windows(faulty.open_writer("file"), image, fill, pool=WindowPool(PAGE, 2))
    assert len(filled) < 10


def test_a_file_is_finished_while_the_next_one_is_filled(storage: LocalStorage) -> None:
    """An fsync takes long on some storage; it must not hold up the next file."""
    order: list[str] = []
    first_finishing, second_filling = threading.Event(), threading.Event()

    class SlowFinish(MemoryWriter):
        def finish(self, size_bytes: int) -> None:
            first_finishing.set()
            assert second_filling.wait(10)
            order.append("finished first")
            super().finish(size_bytes)

    def fill_second(window: Window, view: memoryview) -> None:
        if window.start == 0:
            assert first_finishing.wait(10)
            order.append("filling second")
            second_filling.set()
        view[:] = bytes(len(view))

    image = make_image([3 * PAGE], [0])
    with ImageWriter(pool=WindowPool(PAGE)) as writer:
        writer.write_windows(SlowFinish(), image, copy_from(bytes(image.image.size_bytes)))
        writer.write_windows(MemoryWriter(), image, fill_second)
    assert order == ["filling second", "finished first"]


def test_a_stuck_device_is_noticed_by_the_deadline() -> None:
    released = threading.Event()

    class Stuck(MemoryWriter):
        name = "stuck file"

        def write(self, offset: int, view: memoryview) -> None:
            assert released.wait(30)

    image = make_image([9 * PAGE], [0])
    pool = WindowPool(PAGE, 2)
    started = time.monotonic()

    def save() -> None:
        with ImageWriter(pool=pool, deadline_s=0.2) as writer:
            writer.write_windows(Stuck(), image, copy_from(bytes(image.image.size_bytes)))

    with pytest.raises(WriteTimeoutError, match=r"stuck file: no write has ended for 0\.2 s"):
        save()
    assert time.monotonic() - started < 10
    assert pool.take() is None, "a buffer that the device may still read from was given back"
    released.set()
    while writing_threads():
        assert time.monotonic() - started < 30
    assert pool.take() is not None


def test_a_deadline_does_not_strike_while_things_move(storage: LocalStorage) -> None:
    class Slow(MemoryWriter):
        def write(self, offset: int, view: memoryview) -> None:
            time.sleep(0.1)
            super().write(offset, view)

    image = make_image([20 * PAGE], [0])
    with ImageWriter(pool=WindowPool(PAGE, 2), deadline_s=1.0) as writer:
        writer.write_windows(Slow(), image, copy_from(bytes(image.image.size_bytes)))


def test_a_view_that_is_too_small_is_refused(storage: LocalStorage, tmp_path: Path) -> None:
    image = make_image([100], [0])
    with pytest.raises(ValueError, match=r"file: the view has 100 bytes; expected 4096"):
        write_image(storage.open_writer("file"), image, memoryview(bytearray(100)))
    assert names(tmp_path) == set()


@pytest.mark.parametrize("position", [50, -8, 10**9])
def test_a_crc_position_that_cannot_be_is_refused(storage: LocalStorage, tmp_path: Path, position: int) -> None:
    image = PlannedFile("file", FileImage(300, array("q", [0]), array("q", [100]), array("q", [position])))
    for write in (
        lambda writer: write_image(writer, image, aligned(bytes(300))),
        lambda writer: write_windows(writer, image, copy_from(bytes(300))),
    ):
        with pytest.raises(
            ValueError, match=rf"CRC-32 of payload 0, which ends at byte 100, cannot lie at byte {position}"
        ):
            write(storage.open_writer("file"))
        assert names(tmp_path) == set()


@pytest.mark.parametrize(("offsets", "lengths", "positions"), [(2, 1, 2), (2, 2, 3), (0, 0, 1)])
def test_arrays_that_do_not_go_together_are_refused(offsets: int, lengths: int, positions: int) -> None:
    with pytest.raises(ValueError, match="do not go together"):
        FileImage(0, array("q", [0] * offsets), array("q", [0] * lengths), array("q", [0] * positions))


@pytest.mark.parametrize(("window_bytes", "windows"), [(0, 3), (1000, 3), (PAGE, 0)])
def test_pools_that_cannot_work_are_refused(window_bytes: int, windows: int) -> None:
    with pytest.raises(ValueError, match="whole pages"):
        WindowPool(window_bytes, windows)


def test_hundreds_of_images_leak_nothing(storage: LocalStorage) -> None:
    image = make_image([100], [0])
    pool = WindowPool(PAGE)
    before = open_fds(), threading.active_count(), len(os.listdir("/proc/self/task"))
    for k in range(300):
        write_windows(MemoryWriter(), image, copy_from(bytes(image.image.size_bytes)), pool=pool, io_threads=1 + k % 2)
    assert (open_fds(), threading.active_count()) == before[:2]
    deadline = time.monotonic() + 10  # the kernel's side of a joined thread ends a moment later
    while len(os.listdir("/proc/self/task")) > before[2]:
        assert time.monotonic() < deadline, "threads of the kernel are left"
    assert len(pool._free) == 1
