"""Which slices of which tensors a rank holds, in columns of numbers and a list of keys: its plan. Without torch.

So ranks tell the coordinator, no object graphs: unpickling one object for each write item is most of a coordinator's
time on a large cluster. What it checks of them is in `plan_check.py`.
"""

from __future__ import annotations

import pickle
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from mcore_ckpt.format.integrity import TableColumns


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """One rank's tensors, in columns."""

    keys: list[str]  # fqn of each tensor item
    dtypes: list[str]  # names of the dtypes that occur; `dtype_codes[i]` selects one for item i
    dtype_codes: array[int]
    files: list[str]  # names of the files that this rank writes; `file_codes[i]` selects one for item i
    file_bytes: list[int]  # length of each of those files
    file_codes: array[int]
    # Number of axes of item i; `boxes` holds 3 * ndims[i] numbers for it: global shape, offsets, sizes, all in
    # elements.
    ndims: array[int]
    boxes: array[int]
    places: array[int]  # for each item, offset in its file and length, in bytes

    @classmethod
    def of(cls, files: Iterable[tuple[str, int, TableColumns]]) -> LocalPlan:
        """The plan of files: name, length in bytes, and content."""
        plan = cls([], [], array("i"), [], [], array("i"), array("i"), array("q"), array("q"))
        codes: dict[str, int] = {}
        for number, (name, size_bytes, columns) in enumerate(files):
            plan.files.append(name)
            plan.file_bytes.append(size_bytes)
            own_codes = [codes.setdefault(dtype, len(codes)) for dtype in columns.dtypes]
            plan.dtype_codes.extend(array("i", map(own_codes.__getitem__, columns.dtype_codes)))
            plan.keys.extend(columns.keys)
            plan.file_codes.extend(array("i", [number]) * len(columns.keys))
            plan.ndims.extend(array("i", columns.ndims))
            plan.boxes.extend(columns.boxes)
            plan.places.extend(columns.places)
        plan.dtypes.extend(codes)
        return plan

    def encode(self) -> bytes:
        """The plan as bytes, to send to the coordinator of this process group."""
        keys, *others = (getattr(self, name) for name in self.__slots__)
        columns = pickle.dumps((pickle.dumps(keys, protocol=5), *others), protocol=5)
        # A tenth of the bytes for a tenth of the time: keys and shapes are alike. The coordinator keeps those of all.
        return zlib.compress(columns, 1)


def decoded_plans(encoded: Iterable[bytes]) -> list[LocalPlan]:
    """Plans of several ranks of this process group. Those with the same keys, as most ranks of a large job have, share
    one list of them.
    """
    known_keys: dict[bytes, list[str]] = {}
    plans = []
    for data in encoded:
        encoded_keys, *columns = pickle.loads(zlib.decompress(data))
        if encoded_keys not in known_keys:
            known_keys[encoded_keys] = pickle.loads(encoded_keys)
        plans.append(LocalPlan(known_keys[encoded_keys], *columns))
    return plans
