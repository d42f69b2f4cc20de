"""Tensors that are stored in few bits with a scale for each block, as the plain tensors that they stand for.

Two ways of storing them are known: matrices of 8-bit floats with a factor for each square block (`X`, `X_scale_inv`:
DeepSeek-V3, Qwen3), and pairs of 4-bit floats with a power of two for each 32 (`X_blocks`, `X_scales`: MXFP4, GPT-OSS).
Nothing is decoded beforehand: a range of bytes of the plain tensor is computed when it is read.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.reshard.view import DerivedPayloads
from mcore_ckpt.tools.dtype_cast import as_numbers
from mcore_ckpt.tools.payloads import StoredPayload, StoredPayloads, read_box

_SCALE, _BLOCKS, _SCALES = "_scale_inv", "_blocks", "_scales"
_PER_BLOCK: Final = 32
# 4-bit floats: a sign, two bits of exponent, one of mantissa.
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# DeepSeek's, and those of Qwen3.
_FACTORS = ("float32", "bfloat16")
_MAX_SCALES = 64


@dataclass(frozen=True, slots=True)
class _Quantized:
    """What a plain tensor is computed from; `block`: rows and columns that share a factor, None: MXFP4."""

    values: TensorEntry
    scales: TensorEntry
    block: tuple[int, int] | None


def plain_payloads(
    payloads: StoredPayloads, config: Mapping[str, Any], dtype: str | None
) -> tuple[StoredPayloads, frozenset[str]]:
    """Payloads in which tensors stored in blocks are plain, and the keys of those that lie transposed: MXFP4's,
    `[experts, outputs, inputs]`. `OptionError`: values and scales do not fit, or a dtype has to be chosen.
    """
    tensors = payloads.index.tensors
    found: dict[str, _Quantized] = {}
    for key, entry in tensors.items():
        if key.endswith(_SCALE) and key.removesuffix(_SCALE) in tensors:
            values = tensors[key.removesuffix(_SCALE)]
            found[values.fqn] = _squares(values, entry, config)
            if dtype is None:
                raise OptionError(
                    f"{values.fqn}: is stored as {values.dtype} with a factor for each block; say what it is to "
                    "become (--dtype bf16)"
                )
        elif key.endswith(_BLOCKS) and key.removesuffix(_BLOCKS) + _SCALES in tensors:
            found[key.removesuffix(_BLOCKS)] = _mxfp4(entry, tensors[key.removesuffix(_BLOCKS) + _SCALES])
    if not found:
        return payloads, frozenset()
    taken = {part.fqn for quantized in found.values() for part in (quantized.values, quantized.scales)}
    plain = {key: entry for key, entry in tensors.items() if key not in taken}
    plain |= {key: _plain_entry(key, quantized) for key, quantized in found.items()}
    index = CheckpointIndex(payloads.index.path, plain, payloads.index.objects)
    transposed = frozenset(key for key, quantized in found.items() if quantized.block is None)
    return PlainPayloads(payloads, index, found), transposed


def _squares(values: TensorEntry, scales: TensorEntry, config: Mapping[str, Any]) -> _Quantized:
    if not values.dtype.startswith("float8_"):
        raise OptionError(
            f"{values.fqn}: is stored as {values.dtype}, with factors for its blocks ({scales.fqn}); expected 8-bit "
            "floats, which alone are known to be multiplied by such factors. Remove the factors where they are stale"
        )
    settings = config.get("quantization_config")
    block = settings.get("weight_block_size") if isinstance(settings, dict) else None
    block = [128, 128] if block is None else block
    right = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if not right:
        raise OptionError(f"weight_block_size={block!r:.80}: expected rows and columns of a block")
    wanted = tuple(-(-size // n) for size, n in zip(values.shape, block, strict=False))
    if len(values.shape) != 2 or scales.shape != wanted or scales.dtype not in _FACTORS:
        raise OptionError(
            f"{scales.fqn}: {scales.dtype} {list(scales.shape)} for {values.dtype} {list(values.shape)} in blocks of "
            f"{block}; expected {' or '.join(_FACTORS)} {list(wanted)}"
        )
    return _Quantized(values, scales, (block[0], block[1]))


def _mxfp4(values: TensorEntry, scales: TensorEntry) -> _Quantized:
    fits = values.shape == (*scales.shape, _PER_BLOCK // 2) and {values.dtype, scales.dtype} == {"uint8"}
    if not fits or len(scales.shape) != 3:
        raise OptionError(
            f"{values.fqn}: {values.dtype} {list(values.shape)} with scales {scales.dtype} {list(scales.shape)}; "
            f"expected bytes of [experts, outputs, blocks, {_PER_BLOCK // 2}], and a byte for each block"
        )
    return _Quantized(values, scales, None)


def _plain_entry(key: str, quantized: _Quantized) -> TensorEntry:
    shape, dtype = quantized.values.shape, "float32"
    if quantized.block is None:
        *outer, blocks, half = shape
        shape, dtype = (*outer, blocks * half * 2), "bfloat16"  # which holds each of these values
    first = quantized.values.chunks[0].item
    item = StoredItem(first.file, first.offset, first.length)
    return TensorEntry(key, dtype, shape, (StoredChunk((0,) * len(shape), shape, item),))


class PlainPayloads(DerivedPayloads):
    """Payloads some of which are computed from values and scales; a context manager, which closes its base."""

    def __init__(self, base: StoredPayloads, index: CheckpointIndex, quantized: Mapping[str, _Quantized]) -> None:
        super().__init__(base, index)
        self._quantized = quantized
        self._scales: dict[str, np.ndarray[Any, Any]] = {}
        self._lock_scales = threading.Lock()

    def base_chunk(self, entry: TensorEntry, chunk: StoredChunk) -> tuple[TensorEntry, StoredChunk] | None:
        return None if entry.fqn in self._quantized else (entry, chunk)

    def _locate(self, entry: TensorEntry, chunk: StoredChunk) -> StoredPayload:
        quantized = self._quantized.get(entry.fqn)
        if quantized is None:
            return self.base.locate(entry, chunk)
        compute = self._float8 if quantized.block else self._float4

        def fill(start: int, view: memoryview) -> None:
            first, content = compute(quantized, start, start + len(view))
            view[:] = content[start - first : start - first + len(view)]

        return self.computed(entry, chunk, fill)

    def _float8(self, quantized: _Quantized, start: int, stop: int) -> tuple[int, memoryview]:
        """Whole rows around a range of bytes of float32, and where they start."""
        assert quantized.block is not None
        columns = quantized.values.shape[1]
        first, last = start // (4 * columns), -(-stop // (4 * columns))
        codes = self._bytes(quantized.values, first * columns, (last - first) * columns)
        numbers = as_numbers(codes, quantized.values.dtype)
        assert numbers is not None
        rows = self._factors(quantized)[np.arange(first, last) // quantized.block[0]]
        factors = np.repeat(rows, quantized.block[1], axis=1)[:, :columns]
        values = numbers.reshape(last - first, columns) * factors
        return first * columns * 4, memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

    def _float4(self, quantized: _Quantized, start: int, stop: int) -> tuple[int, memoryview]:
        """Whole blocks around a range of bytes of bfloat16, and where they start."""
        block_bytes = 2 * _PER_BLOCK
        first, last = start // block_bytes, -(-stop // block_bytes)
        half = _PER_BLOCK // 2
        codes = np.frombuffer(self._bytes(quantized.values, first * half, (last - first) * half), np.uint8)
        scales = np.frombuffer(self._bytes(quantized.scales, first, last - first), np.uint8)
        values = np.empty((last - first, half, 2), np.float32)
        values[:, :, 0] = _FLOAT4[codes & 15].reshape(-1, half)  # the first of two has the lower bits
        values[:, :, 1] = _FLOAT4[codes >> 4].reshape(-1, half)
        values = np.ldexp(values, scales.astype(np.int32)[:, None, None] - 127)
        bits = (values.reshape(-1).view(np.uint32) >> 16).astype(np.uint16)
        return first * block_bytes, memoryview(bits.view(np.uint8).data)

    def _bytes(self, entry: TensorEntry, start: int, nbytes: int) -> memoryview:
        return self.read_part(entry, entry.chunks[0], start, nbytes)

    def _factors(self, quantized: _Quantized) -> np.ndarray[Any, Any]:
        entry = quantized.scales
        with self._lock_scales:
            known = self._scales.pop(entry.fqn, None)
            if known is None:
                content = read_box(self.base, entry, (0, 0), entry.shape)
                numbers = as_numbers(content, entry.dtype)
                assert numbers is not None
                known = numbers.reshape(entry.shape)
                while len(self._scales) >= _MAX_SCALES:
                    self._scales.pop(next(iter(self._scales)))
            self._scales[entry.fqn] = known
            return known
