"""Payloads that are made of other payloads: a reader need not know which elements are stored and
which are computed.

`DerivedPayloads` hands everything on to its base by itself: what was read, what is left to compare, what the bytes
depend on. A subclass says only which chunk of the base one of its own chunks is, or how its bytes are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, TensorEntry
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.load.checks import chunk_name
from mcore_ckpt.reshard.part_sums import PartSums
from mcore_ckpt.tools.dtype_cast import cast_floats
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads

_Fill = Callable[[int, memoryview], None]


class DerivedPayloads(StoredPayloads):
    """Payloads of `index` that are made of those of `base`; a context manager, which closes its base."""

    def __init__(self, base: StoredPayloads, index: CheckpointIndex) -> None:
        super().__init__(index, base.storage)
        self.base = base
        self.files = base.files
        self._fills: dict[str, _Fill] = {}
        self._sums = PartSums(base.read_into)

    def base_chunk(self, entry: TensorEntry, chunk: StoredChunk) -> tuple[TensorEntry, StoredChunk] | None:
        """The base's chunk with exactly these elements, as they are; None: they are computed, or are others."""
        return entry, chunk

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        found = self.base_chunk(entry, chunk)
        assert found is not None, "a subclass locates what it computes"
        return self.base.locate(*found)

    def computed(self, entry: TensorEntry, chunk: StoredChunk, fill: _Fill, file: str = "") -> StoredPayload:
        """A payload whose bytes `fill(start, view)` makes; `file` is where most of them come from."""
        where = chunk_name(entry.fqn, chunk)
        self._fills[where] = fill
        nbytes = math.prod(chunk.sizes) * element_bytes(entry.dtype)
        return StoredPayload(where, file or chunk.item.file, 0, nbytes, None, computed=True)

    def read_into(self, payload: StoredPayload, start: int, view: memoryview) -> None:
        fill = self._fills.get(payload.where) if payload.computed else None
        if fill is None:
            self.base.read_into(payload, start, view)
        else:
            fill(start, view)

    def read_part(self, entry: TensorEntry, chunk: StoredChunk, start: int, nbytes: int) -> memoryview:
        """Bytes of a chunk of the base, for computing others; their checksum counts for `check_rest`."""
        memory = memoryview(bytearray(nbytes))
        payload = self.base.locate(entry, chunk)
        self.base.read_into(payload, start, memory)
        self.part_was_read(entry, chunk, payload, start, memory)
        return memory

    def part_was_read(
        self, entry: TensorEntry, chunk: StoredChunk, payload: StoredPayload, start: int, content: memoryview
    ) -> None:
        """Bytes of a chunk of the base were read by other means than `read_part`."""
        value = self._sums.note(payload, start, len(content), crc32(content))
        if value is not None:
            self.base.was_read(entry, chunk, value)

    def was_read(self, entry: TensorEntry, chunk: StoredChunk, value: int) -> None:
        found = self.base_chunk(entry, chunk)
        if found is not None:
            self.base.was_read(*found, value)

    def check_rest(self) -> None:
        self._sums.check_rest()
        self.base.check_rest()

    def recipe(self) -> Iterable[str]:
        return self.base.recipe()

    def close(self) -> None:
        """Close the files."""
        self.base.close()


class CastPayloads(DerivedPayloads):
    """Payloads of which those with a key in `dtypes` are in another floating-point dtype."""

    def __init__(self, base: StoredPayloads, dtypes: Mapping[str, str]) -> None:
        self._dtypes = dtypes
        tensors = base.index.tensors
        cast = {key: tensors[key]._replace(dtype=dtype) for key, dtype in dtypes.items()}
        super().__init__(base, replace(base.index, tensors={**tensors, **cast}))

    def base_chunk(self, entry: TensorEntry, chunk: StoredChunk) -> tuple[TensorEntry, StoredChunk] | None:
        return None if entry.fqn in self._dtypes else (entry, chunk)

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        if entry.fqn not in self._dtypes:
            return self.base.locate(entry, chunk)
        before = self.base.index.tensors[entry.fqn]
        self.base.locate(before, chunk)  # raises for a damaged item, before anything is written
        elem_bytes, to_bytes = element_bytes(before.dtype), element_bytes(entry.dtype)

        def fill(start: int, view: memoryview) -> None:
            """Bytes from `start` on, of the dtype that they are converted to; a view may part an element."""
            first, last = start // to_bytes, -(-(start + len(view)) // to_bytes)
            content = self.read_part(before, chunk, first * elem_bytes, (last - first) * elem_bytes)
            try:
                converted = cast_floats(content, before.dtype, entry.dtype, overflow="raise")
            except FloatingPointError as error:
                raise OptionError(
                    f"{chunk_name(entry.fqn, chunk)}: holds elements that are too large for {entry.dtype}, in which "
                    "they would be infinite; choose another dtype (bf16 has the range of fp32)"
                ) from error
            view[:] = converted[start - first * to_bytes :][: len(view)]

        return self.computed(entry, chunk, fill)

    def recipe(self) -> Iterable[str]:
        yield from self.base.recipe()
        yield from (f"{key} from {self.base.index.tensors[key].dtype} to {to}" for key, to in self._dtypes.items())


def cast_payloads(base: StoredPayloads, dtype_of: Callable[[TensorEntry], str]) -> StoredPayloads:
    """`base` with each tensor in the dtype that `dtype_of` gives; `base` itself where all of them have that already."""
    dtypes = {key: dtype for key, entry in base.index.tensors.items() if (dtype := dtype_of(entry)) != entry.dtype}
    return CastPayloads(base, dtypes) if dtypes else base


class RegroupedPayloads(DerivedPayloads):
    """Payloads with an axis that counts several things at once divided into one axis for each, by key in `shapes`.

    Raises `OptionError` where a chunk begins or ends between things that are counted together.
    """

    def __init__(self, base: StoredPayloads, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._together: dict[tuple[str, StoredChunk], tuple[TensorEntry, StoredChunk]] = {}
        tensors = dict(base.index.tensors)
        for key, shape in shapes.items():
            entry = tensors[key]
            axis = next(n for n, size in enumerate(shape) if size != entry.shape[n])
            count = shape[axis + 1]
            chunks = []
            for chunk in entry.chunks:
                offsets, sizes = list(chunk.offsets), list(chunk.sizes)
                if offsets[axis] % count or sizes[axis] % count:
                    raise OptionError(
                        f"{key}: a chunk at {offsets} of sizes {sizes} cuts through what is counted in {count}s along "
                        f"axis {axis}; save the model in complete rows of that axis"
                    )
                offsets[axis : axis + 1] = [offsets[axis] // count, 0]
                sizes[axis : axis + 1] = [sizes[axis] // count, count]
                chunks.append(chunk._replace(offsets=tuple(offsets), sizes=tuple(sizes)))
                self._together[key, chunks[-1]] = entry, chunk
            tensors[key] = TensorEntry(key, entry.dtype, shape, tuple(chunks), entry.requires_grad)
        super().__init__(base, replace(base.index, tensors=tensors))

    def base_chunk(self, entry: TensorEntry, chunk: StoredChunk) -> tuple[TensorEntry, StoredChunk]:
        return self._together.get((entry.fqn, chunk), (entry, chunk))
