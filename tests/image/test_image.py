"""Images of files: fed payload by payload or filled window by window they are the same."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt.image.layout import TensorSpec, WriteBucket, fill_bucket, lay_out_file
from mcore_ckpt.image.writer import ImageWriter, WindowPool
from mcore_ckpt.storage.resolve import LocalStorage


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
