"""The weighted average of several checkpoints' models: as payloads that take the place of the last one's.

    chunks of all sources -> parts of a tensor that the chunks of each tile -> ranges of bytes, computed on demand

The sources may have any layouts. An element is summed in the order of the sources, divided by the sum of the weights,
and rounded once, to the dtype of the target. So its bits depend neither on layouts nor on the order of reading.
Sums are in float64, or in float32 where the elements have 16 bits before and after, which takes half the time. Of n
sources, float32 errs by at most (n + 3) / 2**23 of their largest element: for four, by a 4,000th of the last bit that
it has in bfloat16. A reshard and an export take such payloads as any others, slab by slab.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

import numpy as np

from mcore_ckpt.core.boxes import Box, bounding, flat_boxes, intersect, relative, runs
from mcore_ckpt.core.console import counted
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.format.index import StoredChunk, TensorEntry, is_extra_state
from mcore_ckpt.format.item import element_bytes
from mcore_ckpt.format.parameter_table import STATE_KEY
from mcore_ckpt.load.records import MAX_IDLE_FILES
from mcore_ckpt.reshard.options import MergeOptions
from mcore_ckpt.reshard.plan import target_dtype
from mcore_ckpt.reshard.reshard import Derived, Opened
from mcore_ckpt.reshard.rewriting import changed_common_state, convert_optimizer
from mcore_ckpt.reshard.view import DerivedPayloads, TensorView, ViewPayloads, as_stored
from mcore_ckpt.tools.keys import is_optimizer_key, optimizer_layout
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads, check_tiled, made_objects, read_box
from mcore_ckpt.tools.regrid import as_numbers, assembled, blocks, rounded, rounding_mismatch

_AVERAGED: Final = ("float64", "float32", "float16", "bfloat16")
# Counters and the like, which are the last source's. Integers of one byte may be weights in few bits.
_KEPT: Final = ("int64", "int32", "bool")
# Members of the common state that say where the job stood, or belong to its optimizer. Its arguments stay.
_LEFT_OUT: Final = (
    "iteration num_floating_point_operations_so_far optimizer opt_param_scheduler lr_scheduler rng_state "
    "rerun_state_machine"
).split()
# The part of the memory for what is read at once of all sources, by all workers; the most and the least of one source.
_READ_PART: Final = 8
_MOST_READ_BYTES: Final = 4 * 1024 * 1024
_LEAST_READ_BYTES: Final = 256 * 1024
# What float32 can sum, unless weights of both signs cancel most of one another.
_NARROW: Final = {"float16", "bfloat16"}
# Elements whose sums stay in a processor's cache.
_BATCH_ELEMS: Final = 64 * 1024
# Elements at both ends of a tensor that are compared with their FP32 copies: Megatron-Core to 0.19 may shift those.
_ENDS: Final = 64


def merged(sources: Sequence[Opened], options: MergeOptions) -> Derived:
    """The average of the models of `sources`, and what else of the last one goes along; raises `OptionError`."""
    weights, last = options.weights_of(len(sources)), sources[-1].index
    tensors = _model(sources[-1])
    for source in sources:
        _refuse_other(source, sources[-1])
        check_tiled(source.index, source.index.tensors if options.masters else tensors)
    given = [_masters(source, tensors) if options.masters else source.payloads for source in sources]
    dtypes = {key: target_dtype(entry, options.dtype) for key, entry in tensors.items() if entry.dtype in _AVERAGED}
    objects, common = changed_common_state(
        last, lambda state: {name: value for name, value in state.items() if name not in _LEFT_OUT}
    )
    kept = [key for key in last.objects if is_extra_state(key)]
    taken = [*sorted(tensors.keys() - dtypes.keys()), *kept]
    optimizer = sum(map(is_optimizer_key, (*last.tensors, *last.objects)))
    shares = (weight / math.fsum(weights) for weight in weights)
    return Derived(
        payloads=MergedPayloads(
            [DerivedPayloads(one, one.index) for one in given],
            weights,
            dtypes,
            objects,
            kept,
            options.memory_bytes // _READ_PART // options.workers,
        ),
        common=common,
        notes=(
            *(f"{share:.6g} x {source.index.path}" for share, source in zip(shares, sources, strict=True)),
            *([f"{counted(len(taken), 'key')} as in {last.path}, the first {taken[0]}"] if taken else []),
            "a job starts from it with --finetune: it has neither iteration nor optimizer",
        ),
        left_out=(
            *([f"{optimizer} keys of the optimizer's state"] if optimizer else []),
            *(key for key in last.objects if not (is_extra_state(key) or is_optimizer_key(key) or key in objects)),
            *(f"{name} of the common state" for name in sources[-1].common if name in _LEFT_OUT),
        ),
    )


def _model(source: Opened) -> dict[str, TensorEntry]:
    return {key: entry for key, entry in source.index.tensors.items() if not is_optimizer_key(key)}


def _refuse_other(source: Opened, last: Opened) -> None:
    """Raise `OptionError` for a model that is not the last one's, or has tensors of which there is no average."""
    found, expected = (
        {key: f"{entry.dtype} {list(entry.shape)}" for key, entry in _model(one).items()} for one in (source, last)
    )
    for key in sorted(found.keys() | expected.keys()):
        got, wanted = found.get(key, "missing"), expected.get(key, "missing")
        if got != wanted:
            tied = key.endswith("output_layer.weight") and "missing" in (got, wanted)
            why = ": other vocabularies, or other padding of them" if "embedding" in key else ""
            why = ": one model ties its embeddings" if tied else why
            raise OptionError(
                f"{source.index.path} and {last.index.path}: {key} is {got} and {wanted}{why}. Models of the same "
                "keys, shapes and dtypes (`mcore-ckpt reshard --dtype`) have an average. Nothing was written"
            )
        if not got.startswith((*_AVERAGED, *_KEPT)):
            raise OptionError(
                f"{source.index.path}: {key} is {got}, which has no average; save the model in one of "
                f"{', '.join(_AVERAGED)}. Nothing was written"
            )


def _masters(source: Opened, tensors: Mapping[str, TensorEntry]) -> StoredPayloads:
    """The model with the optimizer's copy of each parameter that it has one of; others are frozen, or of float32."""
    index, views, found = source.index, dict[str, TensorView](), dict[str, TensorView]()
    if optimizer_layout(index, source.common) is not None:
        converted = convert_optimizer(source.payloads, source.common)
        views = (
            {key: as_stored(entry) for key, entry in index.tensors.items()} if converted is None else converted.tensors
        )
    for key, view in views.items():
        match = STATE_KEY.fullmatch(key)
        if match is not None and match["state"] in ("param", "fp32_param") and match["key"] in tensors:
            found[match["key"]] = view
    dtypes = {index.tensors[part.key].dtype for view in found.values() for part in view.parts if part.key is not None}
    wrong = [key for key, view in found.items() if view.shape != tensors[key].shape]
    if not found or not dtypes <= set(_AVERAGED) or wrong:
        got = f"another shape of {wrong[0]}" if wrong else ", ".join(sorted(dtypes)) or "no copies"
        raise OptionError(
            f"{index.path}: {got} in the optimizer, expected FP32 copies of the model's tensors: leave --masters out. "
            "Nothing was written"
        )
    model = {key: found.get(key) or as_stored(entry) for key, entry in tensors.items()}
    masters = ViewPayloads(source.payloads, model, {}, index.objects)
    for key in found:
        stored, copy = index.tensors[key], masters.index.tensors[key]
        sizes = tuple(
            min(_ENDS, size) if axis == len(stored.shape) - 1 else 1 for axis, size in enumerate(stored.shape)
        )
        for corner in (
            ((0,) * len(sizes), tuple(map(operator.sub, stored.shape, sizes))) if 0 not in stored.shape else ()
        ):
            exact = read_box(masters, copy, corner, sizes, checked=False)
            model_part = read_box(source.payloads, stored, corner, sizes, checked=False)
            if rounding_mismatch(exact, copy.dtype, model_part, stored.dtype):
                raise OptionError(
                    f"{index.path}: the optimizer's copy of {key} is not what the model has (`mcore-ckpt verify "
                    "--check-optimizer`): leave --masters out. Nothing was written"
                )
    return masters


class MergedPayloads(DerivedPayloads):
    """Averages of the sources' tensors with a key in `dtypes`, in that dtype. The other tensors and the `kept` objects
    are the last source's; `objects` are new ones, as for `ViewPayloads`. `read_bytes`: of all sources, for each thread.
    """

    def __init__(
        self,
        sources: Sequence[DerivedPayloads],
        weights: Sequence[float],
        dtypes: Mapping[str, str],
        objects: Mapping[str, bytes],
        kept: Sequence[str],
        read_bytes: int,
    ) -> None:
        self._sources, self._weights = sources, weights
        self._read_bytes = max(_LEAST_READ_BYTES, min(_MOST_READ_BYTES, read_bytes // len(sources)))
        self.open_files = len(sources) * MAX_IDLE_FILES
        self._members: dict[tuple[str, tuple[int, ...]], list[list[StoredChunk]]] = {}
        self._memory = threading.local()
        last = sources[-1].index
        tensors = {key: entry for key, entry in last.tensors.items() if not is_optimizer_key(key)}
        for key, dtype in dtypes.items():
            tensors[key] = tensors[key]._replace(dtype=dtype, chunks=tuple(self._parts(key)) or tensors[key].chunks)
        found = {key: last.objects[key] for key in kept} | made_objects(objects)
        super().__init__(sources[-1], replace(last, tensors=tensors, objects=found), objects)

    def _parts(self, key: str) -> Iterator[StoredChunk]:
        """The parts of a tensor that the chunks of each source tile, as chunks near the last source's."""
        chunks = [(n, chunk) for n, one in enumerate(self._sources) for chunk in one.index.tensors[key].chunks]
        boxes = [Box(chunk.offsets, chunk.sizes) for _, chunk in chunks]
        for members, _ in blocks(boxes, ()):
            around = bounding([boxes[member] for member in members])
            by_source: list[list[StoredChunk]] = [[] for _ in self._sources]
            for number, chunk in map(chunks.__getitem__, members):
                by_source[number].append(chunk)
            self._members[key, around.offsets] = by_source
            item = by_source[-1][0].item
            yield StoredChunk(*around, item._replace(crc32=None))

    def base_chunk(self, entry: TensorEntry, chunk: StoredChunk) -> tuple[TensorEntry, StoredChunk] | None:
        return None if (entry.fqn, chunk.offsets) in self._members else (entry, chunk)

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        members = self._members.get((entry.fqn, chunk.offsets))
        if members is None:
            return self.base.locate(entry, chunk)
        for source, chunks in zip(self._sources, members, strict=True):
            for one in chunks:
                source.locate(source.index.tensors[entry.fqn], one)  # raises for a damaged item, before all others
        return self.computed(entry, chunk, partial(self._fill, entry, chunk))

    def was_read_before(self, entry: TensorEntry, chunk: StoredChunk) -> None:
        members = self._members.get((entry.fqn, chunk.offsets))
        if members is None:
            super().was_read_before(entry, chunk)
        for source, chunks in zip(self._sources, members or (), strict=False):
            for one in chunks:
                source.expect(source.index.tensors[entry.fqn], one)

    def check_rest(self) -> None:
        for source in self._sources:
            source.check_rest()

    def close(self) -> None:
        """Close the files of all sources."""
        for source in self._sources:
            source.close()

    def _fill(self, entry: TensorEntry, chunk: StoredChunk, start: int, view: memoryview) -> None:
        """Bytes of an average from `start` on."""
        width, done = element_bytes(entry.dtype), 0
        assert start % width == len(view) % width == 0, "slabs part no element"
        widest = max(element_bytes(source.index.tensors[entry.fqn].dtype) for source in self._sources)
        first, step = start // width, self._read_bytes // widest
        stop = first + len(view) // width
        for at in range(first, stop, step):
            for inside in flat_boxes(chunk.sizes, at, min(stop, at + step)):
                part = Box(tuple(map(operator.add, chunk.offsets, inside.offsets)), inside.sizes)
                nbytes = math.prod(part.sizes) * width
                try:
                    weighted_average(
                        self._read(entry.fqn, chunk, part), self._weights, entry.dtype, view[done : done + nbytes]
                    )
                except FloatingPointError as error:
                    raise OptionError(
                        f"{entry.fqn}: has averages too large for {entry.dtype}, in which they would be infinite; "
                        "choose another dtype (bf16 has almost the range of fp32)"
                    ) from error
                done += nbytes

    def _read(self, key: str, chunk: StoredChunk, part: Box) -> list[tuple[memoryview, str]]:
        """The elements of each source, in memory that the thread keeps: to get new one costs as much as a read. A part
        is one run of bytes of each chunk that it shares elements with.
        """
        contents, memory = [], cast(dict[int, memoryview], self._memory.__dict__)
        for n, (source, chunks) in enumerate(zip(self._sources, self._members[key, chunk.offsets], strict=True)):
            entry = source.index.tensors[key]
            width, read, at = element_bytes(entry.dtype), list[tuple[Box, memoryview]](), 0
            if len(memory.get(n, b"")) < math.prod(part.sizes) * width:
                memory[n] = memoryview(bytearray(math.prod(part.sizes) * width))
            for one in chunks:
                cell = intersect(Box(one.offsets, one.sizes), part)
                if cell is not None:
                    first = runs(one.sizes, relative(cell, one.offsets), width).first_byte
                    nbytes = math.prod(cell.sizes) * width
                    read.append((cell, source.read_part(entry, one, first, nbytes, memory[n][at:])))
                    at += nbytes
            contents.append((read[0][1] if len(read) == 1 else assembled(part, width, read), entry.dtype))
        return contents


def weighted_average(
    contents: Sequence[tuple[memoryview, str]], weights: Sequence[float], to: str, out: memoryview
) -> None:
    """Fill `out` with the average, summed in order, rounded once to `to`. `FloatingPointError`: infinite."""
    whole, all_weights, count = math.fsum(weights), math.fsum(map(abs, weights)), len(out) // element_bytes(to)
    in_singles = {to, *(dtype for _, dtype in contents)} <= _NARROW and 2 * abs(whole) >= all_weights
    if in_singles:  # by a power of two, after which no sum is larger than the largest element
        exponent = math.frexp(all_weights)[1]
        weights, whole = [math.ldexp(weight, -exponent) for weight in weights], math.ldexp(whole, -exponent)
    scratch = *np.empty((2, _BATCH_ELEMS), np.float32 if in_singles else np.float64), np.empty(_BATCH_ELEMS, np.uint32)
    with np.errstate(over="raise", invalid="ignore"):
        for at in range(0, count, _BATCH_ELEMS):
            total, summand, spare = (array[: count - at] for array in scratch)
            for n, ((content, dtype), weight) in enumerate(zip(contents, weights, strict=True)):
                width, into = element_bytes(dtype), summand if n else total
                some = content[at * width : (at + _BATCH_ELEMS) * width]
                if dtype == "bfloat16":  # as `as_numbers`, which takes twice as long with new arrays for each batch
                    bits = into.view(np.uint32) if in_singles else spare
                    np.copyto(bits, np.frombuffer(some, np.uint16))
                    np.left_shift(bits, 16, out=bits)
                if dtype != "bfloat16" or not in_singles:
                    found = spare.view(np.float32) if dtype == "bfloat16" else as_numbers(some, dtype)
                    np.copyto(into, cast(Any, found))
                if weight != 1:
                    np.multiply(into, weight, out=into)
                if n:
                    np.add(total, summand, out=total)
            if whole != 1:
                np.divide(total, whole, out=total)
            made = rounded(total, to).data.cast("B")
            out[at * element_bytes(to) :][: len(made)] = made
