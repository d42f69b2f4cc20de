"""Which shards and objects each rank holds, replicas included: what Megatron calls access integrity.

Megatron gathers every shard of every rank on every rank for it, as objects. Here each rank tells the coordinator in
columns, and what many ranks say alike (which replicas they hold that others write) is sent by one of them.
"""

from __future__ import annotations

import json
import math
import operator
from array import array
from collections.abc import Sequence
from itertools import chain, compress
from operator import itemgetter
from typing import Any, NamedTuple

from mcore_ckpt.layout.buckets import TensorSpec
from mcore_ckpt.layout.plans import LocalPlan
from mcore_ckpt.layout.shards import is_main, leaves_by_kind, stored_form
from mcore_ckpt.layout.torch_classes import dtype_name


class _Shard(NamedTuple):
    """What a check asks of a shard, by Megatron's names."""

    key: str
    dtype: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    prepend_axis_num: int
    axis_fragmentations: tuple[int, ...] | None  # None: the shards lie on no regular grid
    flattened_range: slice | None
    replica_id: Any


class Accesses(NamedTuple):
    """The shards of one rank, in columns of an entry for each, to compare with those of another save."""

    tensors: tuple[list[Any], ...]  # by the fields of `_Shard`
    objects: tuple[list[Any], ...]  # key, unique key, global shape, replica

    @classmethod
    def of(cls, sharded_state_dict: Any) -> Accesses:
        """Those of a nested dict/list, as they are now."""
        tensors, objects = leaves_by_kind(sharded_state_dict)
        return cls(
            (
                [shard.key for shard in tensors],
                [shard.dtype for shard in tensors],
                [tuple(shard.global_shape) for shard in tensors],
                [tuple(shard.global_offset) for shard in tensors],
                [tuple(shard.local_shape) for shard in tensors],
                [shard.prepend_axis_num for shard in tensors],
                [shard.axis_fragmentations for shard in tensors],
                [getattr(shard, "flattened_range", None) for shard in tensors],
                [shard.replica_id for shard in tensors],
            ),
            (
                [leaf.key for leaf in objects],
                [leaf.unique_key for leaf in objects],
                [tuple(leaf.global_shape) for leaf in objects],
                [leaf.replica_id for leaf in objects],
            ),
        )

    def told(self, written: Sequence[TensorSpec] | None = None, *, mains_are_written: bool = False) -> list[bytes]:
        """What the coordinator is told of them (`plan_check.py`): main replicas, other replicas, objects. Of main
        replicas nothing, where they are what the plan of this rank says that it has `written`, or are known to be what
        all ranks together have.
        """
        keys, dtypes, shapes, offsets, sizes = _stored(self.tensors)
        are_main = list(map(is_main, self.tensors[-1]))
        mains = [list(compress(column, are_main)) for column in (keys, dtypes, shapes, offsets, sizes)]
        is_written = mains_are_written or (
            written is not None and mains == [list(map(itemgetter(field), written)) for field in range(5)]
        )
        others = zip(keys, dtypes, shapes, strict=True)
        replicas = list(dict.fromkeys(other for other, main in zip(others, are_main, strict=True) if not main))
        uneven = list(dict.fromkeys(key for key, grid in zip(keys, self.tensors[6], strict=True) if grid is None))
        counts: dict[str, int] = {}
        unique_keys = []
        for key, unique_key, shape, replica in zip(*self.objects, strict=True):
            counts.setdefault(key, math.prod(shape))
            if is_main(replica):
                unique_keys.append((key, unique_key))
        return [
            b"" if is_written else _plan_of(*mains).encode(),
            _encoded([replicas, uneven]),
            _encoded([unique_keys, counts]),
        ]


def _stored(tensors: tuple[list[Any], ...]) -> tuple[list[Any], ...]:
    """Key, dtype, global shape, offsets and sizes of shards, as they are stored."""
    keys, dtypes, shapes, offsets, boxes, prepended, _, stretches, _ = tensors
    sizes = [(1,) * axes + box if axes else box for axes, box in zip(prepended, boxes, strict=True)]
    if any(stretch is not None for stretch in stretches):
        forms = [stored_form(shard) for shard in map(_Shard._make, zip(*tensors, strict=True))]
        shapes, offsets, sizes = ([form[field] for form in forms] for field in range(3))
    return keys, list(map(dtype_name, dtypes)), shapes, offsets, sizes


def _plan_of(keys: list[str], dtypes: list[str], shapes: list[Any], offsets: list[Any], sizes: list[Any]) -> LocalPlan:
    codes = {dtype: code for code, dtype in enumerate(dict.fromkeys(dtypes))}
    boxes = chain.from_iterable(chain.from_iterable(zip(shapes, offsets, sizes, strict=True)))
    return LocalPlan(
        keys=keys,
        dtypes=list(codes),
        dtype_codes=array("i", map(codes.__getitem__, dtypes)),
        files=[],
        file_bytes=[],
        file_codes=array("i"),
        ndims=array("i", map(len, shapes)),
        boxes=array("q", boxes),
        places=array("q"),
    )


def _encoded(value: Any) -> bytes:
    # Ranks that say the same say it by the same bytes, which pickles need not be. Shapes may be numpy's integers.
    return json.dumps(value, separators=(",", ":"), default=operator.index).encode()
