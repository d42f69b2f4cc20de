"""What a data file says that it holds: the table before its integrity footer, which `verify` compares."""

from __future__ import annotations

from itertools import accumulate
from typing import Final, NamedTuple

from mcore_ckpt.core.crc import crc32
from mcore_ckpt.format.integrity import TABLE_HEAD, Columns, FileFooter

_MIN_ITEM_BYTES: Final = 64


class TensorRow(NamedTuple):
    """A tensor item as an index or a file's table describes it: dtype, and box of a global tensor, in elements."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


Items = dict[tuple[int, int], str | TensorRow]
"""By offset and length, in bytes, what lies in a file: an object's key, or a tensor item."""


def decode_table(data: bytes, footer: FileFooter, where: str) -> Items:
    """The table of a file, from the bytes before its footer; raises `CorruptCheckpointError`."""
    what = f"{where}: the table of its integrity footer"
    whole = Columns(data, what)
    if len(data) != footer.table_bytes or crc32(data) != footer.table_crc32:
        raise whole.wrong(f"it does not have the CRC-32 {footer.table_crc32:#010x} that the footer states")
    places_bytes = 16 * footer.object_count
    if places_bytes > len(data):
        raise whole.wrong(f"{footer.object_count} objects are said to be in it")
    table = Columns.inflated(whole.bytes(len(data) - places_bytes), footer.unpacked_bytes, what)
    tensors, objects, dtypes = TABLE_HEAD.unpack(table.bytes(TABLE_HEAD.size))
    if (tensors + objects) * _MIN_ITEM_BYTES > footer.file_bytes:
        raise table.wrong(f"{tensors + objects} items cannot lie in {footer.file_bytes} bytes")
    if objects != footer.object_count:
        raise table.wrong(f"the footer counts {footer.object_count} objects, the table {objects}")
    lengths = table.column("I", dtypes + tensors + objects)
    codes, ndims = table.column("I", tensors), table.column("I", tensors)
    if any(code >= dtypes for code in codes):
        raise table.wrong("a tensor has a dtype that is not in it")
    boxes = table.column("q", 3 * sum(ndims)).tolist()
    places = table.column("q", 2 * tensors)
    names = table.texts(lengths)
    table.finish()
    object_places = whole.column("Q", 2 * objects)
    whole.finish()
    dtype_names, keys, object_keys = names[:dtypes], names[dtypes:], names[dtypes + tensors :]
    starts = accumulate((3 * ndim for ndim in ndims), initial=0)
    items: Items = {
        (places[2 * n], places[2 * n + 1]): TensorRow(
            keys[n],
            dtype_names[codes[n]],
            tuple(boxes[at : at + ndim]),
            tuple(boxes[at + ndim : at + 2 * ndim]),
            tuple(boxes[at + 2 * ndim : at + 3 * ndim]),
        )
        for n, (ndim, at) in enumerate(zip(ndims, starts, strict=False))
    }
    return items | {(object_places[2 * n], object_places[2 * n + 1]): object_keys[n] for n in range(objects)}
