"""Images of files: fed payload by payload or filled window by window they are the same, and results are the plan."""

import random
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_ckpt.core.errors import SaveError
from mcore_ckpt.image.layout import (
    PlannedFile,
    TensorSpec,
    WriteBucket,
    WrittenFile,
    check_results,
    fill_bucket,
    lay_out_file,
)
from mcore_ckpt.image.writer import ImageWriter, WindowPool
from mcore_ckpt.storage.resolve import LocalStorage


def test_results_that_are_not_the_plan_are_refused() -> None:
    image: Any = SimpleNamespace(size_bytes=4096, payload_offsets=[0, 64])
    planned = [PlannedFile(name, image) for name in ("a", "b")]
    none: array[int] = array("I")

    def written(name: str, size_bytes: int = 4096, crcs: int = 2) -> WrittenFile:
        return WrittenFile(name, size_bytes, 0, none, array("I", [7] * crcs), none, none, none)

    right = [written("a"), written("b")]
    check_results(planned, right)
    wrong = ([written("a")], [*right, written("c")], [right[0], written("b", 4095)], [right[0], written("b", crcs=1)])
    for results in wrong:
        with pytest.raises(SaveError, match="not what was planned"):
            check_results(planned, results)


def some_bucket(generator: random.Random, name: str) -> tuple[WriteBucket, list[bytes]]:
    """A file of objects and slices of tensors, rows or columns, and its payloads."""
    specs = []
    for number in range(generator.randrange(6)):
        rows, columns = generator.choice([(0, 4), (1, 1), (3, 5), (40, 100), (700, 512)])
        shape = (rows, columns + generator.choice([0, 7]))
        specs.append(TensorSpec(f"t{number}", "float32", shape, (0, 0), (rows, columns), 4 * rows * columns))
    objects = [memoryview(generator.randbytes(generator.randrange(300))) for _ in range(generator.randrange(3))]
    layout, _ = lay_out_file(name, specs, [f"o{n}" for n in range(len(objects))], list(map(len, objects)))
    return fill_bucket(layout, name, bytes(16), objects), [generator.randbytes(spec.nbytes) for spec in specs]


@pytest.mark.parametrize("seed", range(20))
def test_images_that_are_fed_in_turn_are_those_that_are_filled(seed: int, tmp_path: Path) -> None:
    """Also with fewer buffers than files, whose windows are then written in parts."""
    generator = random.Random(seed)
    buckets = [some_bucket(generator, f"f{number}") for number in range(4)]
    storage = LocalStorage(tmp_path)
    with ImageWriter(WindowPool(4096 * generator.randrange(1, 5), generator.randrange(1, 6))) as images:
        streams = [
            images.open(storage.open_writer(bucket.file.name, bucket.file.image.size_bytes), bucket.file, bucket.around)
            for bucket, _ in buckets
        ]
        left = [b"".join(payloads) for _, payloads in buckets]
        while any(left):
            number = generator.choice([n for n, content in enumerate(left) if content])
            nbytes = generator.choice([1, 100, 5000, 300_000])
            streams[number].feed(memoryview(left[number][:nbytes]))
            left[number] = left[number][nbytes:]
        for stream in streams:
            stream.close()
    with ImageWriter(WindowPool()) as whole:
        for bucket, payloads in buckets:
            content = bytearray()
            for number, payload in enumerate(payloads):
                content += bucket.around(number) + payload
            content += bucket.around(len(payloads))
            writer, image = storage.open_writer(f"{bucket.file.name} filled", len(content)), memoryview(content)
            stream = whole.open(writer, bucket.file)
            stream.fill(lambda window, view, image=image: fill(window, view, image))
            stream.close()
    for fed, filled in zip(images.results, whole.results, strict=True):
        assert (tmp_path / fed.name).read_bytes() == (tmp_path / f"{fed.name} filled").read_bytes()
        assert replace(fed, write_s=0, fsync_s=0) == replace(filled, write_s=0, fsync_s=0)


def fill(window: Any, view: memoryview, image: memoryview) -> None:
    view[:] = image[window.start : window.stop]
