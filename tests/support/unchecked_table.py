"""Tables of parameters (`mcore_ckpt/format/parameter_table.py`) that the writer would not write."""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mcore_ckpt.format.parameter_table import Region


@dataclass(frozen=True)
class UncheckedTable:
    """A table by its fields, to be encoded without a check; `buckets`: name and number of elements of each."""

    buckets: Sequence[tuple[str, int]]
    regions: Sequence[Region]
    alignment: int = 64  # of what lies behind padding
    longest: int = 63  # padding

    def encoded(self) -> bytes:
        forms = list(dict.fromkeys(one.form for one in self.regions))
        described = [n for form in forms for n in (len(form.shape), *form.shape, *form.sizes, *form.strides)]
        offsets = [n for one in self.regions for n in one.offsets]
        counts = len(self.buckets), len(forms), len(self.regions), len(described), len(offsets)
        names = [name.encode() for name in (*(n for n, _ in self.buckets), *(one.key for one in self.regions))]
        wide = [*counts, self.alignment, self.longest, *(n for _, n in self.buckets), *described, *offsets]
        wide += [one.first for one in self.regions]
        narrow = [*(one.bucket for one in self.regions), *(forms.index(one.form) for one in self.regions)]
        narrow += [*(one.is_copy for one in self.regions), *map(len, names)]
        content = np.array(wide, "<u8").tobytes() + np.array(narrow, "<u4").tobytes() + b"".join(names)
        return struct.pack("<8sIQ", b"\x89mckFLAT", 1, len(content)) + zlib.compress(content)
