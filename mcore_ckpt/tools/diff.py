"""What two checkpoints have in common, and by how much the rest differs; whatever their sharding, in bounded memory.

Keys, shapes and dtypes come from the indexes. Values are read from both in the same slabs and compared there: bits
first, at memory speed, numbers only where bits differ. Or fingerprints are compared: those of the tensors in memory
when they were saved, whatever their chunks: this package's saves say it of each tensor. For others, a chunk that is one
run of its tensor adds the CRC-32 that is stored with its elements; the rest is read, and compared with theirs.

Plain values (as `read_plain` gives them) are compared with nothing left out: tensors bit for bit, wherever their
elements lie; arrays, dates and all other objects by what they are made from. Two objects that are made from the same
are the same, whatever their class.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.fingerprints import StateFingerprint, TensorFingerprint, state_of
from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.core.process import in_parallel
from mcore_ckpt.core.team import Progress, current_team
from mcore_ckpt.directory.iterations import refuse_incomplete
from mcore_ckpt.format.index import CheckpointIndex, ObjectEntry, Removed, StoredChunk, TensorEntry
from mcore_ckpt.format.item import element_bytes, verify_records
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.format.parameter_table import TABLE_MEMBER
from mcore_ckpt.format.state_file import StoredStorage
from mcore_ckpt.format.tensor_pickle import DTYPE_OF_STORAGE, DTYPES
from mcore_ckpt.format.unpickler import Opaque
from mcore_ckpt.load.checks import global_shape, part_of_chunk
from mcore_ckpt.load.records import check_apart
from mcore_ckpt.tools.inspection import checkpoint_directory, in_force
from mcore_ckpt.tools.keys import (
    StoredState,
    is_optimizer_key,
    key_filter,
    optimizer_layout,
    plain,
    plain_dict,
    read_object,
    stored_common_state,
)
from mcore_ckpt.tools.payloads import SLAB_BYTES, SlabReader, StoredPayloads, batches, check_elements, check_tiled
from mcore_ckpt.tools.regrid import as_numbers, slabs

Verdict = Literal["same", "different", "unknown"]

SIMPLE_KEYS: Final = frozenset((str, int, float, bool, bytes, type(None)))
"""Types of keys and members of sets that are told apart at once."""


def compare(a: Any, b: Any) -> Verdict:
    """Whether two values are the same; `"unknown"` where that cannot be told. The order of a dict's keys is no matter,
    nor are the device and the strides of a tensor. A NaN is the same as itself.
    """
    digests = _Digests()
    try:
        if digests.of(a) != digests.of(b):
            return "different"
    except RecursionError:
        return "unknown"
    return "unknown" if digests.unknown else "same"


class _Digests:
    """Sums that are equal where values are. A file may refer to one value from many places: each is summed once."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}  # by the id of what lives as long as the two values
        self.unknown = False

    def of(self, value: Any) -> bytes:
        if not isinstance(value, list | tuple | dict | set | frozenset | Opaque):
            return self._of_one(value)
        found = self._known.get(id(value))
        if found is None:
            self._known[id(value)] = b""  # which stays where the value lies within itself
            found = self._known[id(value)] = _digest(value, b"".join(self._parts(value)))
        self.unknown |= not found
        return found

    def _parts(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, dict):
            yield from sorted(self.of(key) + self.of(part) for key, part in value.items())
        elif isinstance(value, set | frozenset):
            yield from sorted(map(self.of, value))
        elif isinstance(value, Opaque):
            elements = _elements(value)
            yield self.of(value.name)
            if elements is not None:
                yield from map(self.of, (value.arguments[0].kind, value.arguments[2], elements))
            yield from map(self.of, value.arguments if elements is None else value.arguments[4:])
            yield self.of(value.state)
        else:
            yield from map(self.of, value)

    def _of_one(self, value: Any) -> bytes:
        if isinstance(value, StoredStorage):
            return _digest(value, ascii(value.kind).encode() + value.content)
        if isinstance(value, type):
            return _digest(value, ascii(value.name if issubclass(value, Opaque) else value.__name__).encode())
        if isinstance(value, bytes | bytearray):
            return _digest(value, value)
        if isinstance(value, int):
            return _digest(value, f"{value:x}".encode())
        if isinstance(value, float):
            return _digest(value, repr(value + 0.0).encode())  # 0.0 and -0.0 are equal
        self.unknown |= not isinstance(value, str | complex | None)
        return _digest(value, ascii(value).encode())


def _digest(value: Any, content: bytes | bytearray) -> bytes:
    kind = type(value).__name__.encode(errors="replace")[:16]
    return hashlib.blake2b(content, digest_size=16, person=kind).digest()


def _elements(tensor: Opaque) -> bytes | None:
    """A tensor's elements in C order, wherever they lie; None if it is none, or has more of them than its storage."""
    if not tensor.name.startswith("torch._utils._rebuild_tensor_v") or len(tensor.arguments) < 4:
        return None
    storage, offset, sizes, strides, *rest = tensor.arguments
    try:
        # An untyped storage comes with a dtype.
        kind = rest[2].name if storage.kind.endswith("UntypedStorage") else storage.kind
        name = kind.rpartition(".")[2]
        width = DTYPES[DTYPE_OF_STORAGE.get(name, name)].element_bytes
        if math.prod(sizes) * width > len(storage.content):
            return None
        dtype, steps = np.dtype((np.void, width)), tuple(stride * width for stride in strides)
        return np.ndarray(sizes, dtype, storage.content, offset * width, steps).tobytes()
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError):
        return None


# --- fingerprints


def checkpoint_fingerprint(path: str | os.PathLike[str], *, only: str | None = None) -> StateFingerprint:
    """The fingerprint of the tensors in a checkpoint: the same under every parallel layout of the save.

    Args:
        path: directory of the checkpoint, or one with a tracker file.
        only: keys to take: with any of `*?[` a shell pattern for the complete key, otherwise a part of it.

    Returns:
        With the fingerprint of each tensor. Objects have no part in it.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError: there is none, or its chunks do not make up a tensor.
        ChecksumError: elements that had to be read are damaged. What is stored is taken as it is: `mcore-ckpt verify
            --state` compares it with the elements.
    """
    index = read_index(checkpoint_directory(path))
    wanted = key_filter(only)
    keys = [key for key in index.tensors if wanted(key)]
    check_tiled(index, keys)
    with StoredPayloads(index) as payloads:
        return payloads_fingerprint(payloads, keys)


def checked_fingerprint(
    path: str | os.PathLike[str], *, workers: int = 2, progress: bool | None = False
) -> tuple[StateFingerprint, list[str]]:
    """As `checkpoint_fingerprint`, from the chunks alone; and keys of the tensors whose stored fingerprint is another:
    chunks lie where others should, or the fingerprint was not that of what was saved.
    """
    index = read_index(checkpoint_directory(path))
    check_tiled(index, list(index.tensors))
    stored, unaware = index.fingerprints, replace(index)
    with StoredPayloads(unaware) as payloads:
        found = payloads_fingerprint(payloads, list(index.tensors), workers=workers, progress=progress)
    taken = found.tensors
    return found, [key for key, crc in stored.items() if key in taken and taken[key].crc32 != crc]


def model_and_optimizer(found: StateFingerprint) -> tuple[StateFingerprint, StateFingerprint]:
    """Fingerprints of the model's and of the optimizer's tensors, from a fingerprint with names."""
    tensors = found.tensors
    return (
        state_of({key: tensor for key, tensor in tensors.items() if not is_optimizer_key(key)}),
        state_of({key: tensor for key, tensor in tensors.items() if is_optimizer_key(key)}),
    )


def payloads_fingerprint(
    payloads: StoredPayloads, keys: list[str], *, workers: int = 2, progress: bool | None = False
) -> StateFingerprint:
    """As `checkpoint_fingerprint`, of open payloads, which may be views. Their chunks have to make up the tensors."""
    index = payloads.index
    found: dict[str, TensorFingerprint] = {}
    unknown = [index.tensors[key] for key in keys if key not in index.fingerprints]
    total = sum(map(_bytes_of, unknown))

    def nbytes(key: str) -> int:
        return 0 if key in index.fingerprints else _bytes_of(index.tensors[key])

    with Progress("fingerprint", total, shown=progress) as bar:

        def take(key: str) -> None:
            entry = index.tensors[key]
            shape = global_shape(index, entry)
            crc = index.fingerprints.get(key)
            if crc is None:
                crc = 0
                for chunk in entry.chunks:
                    crc ^= _part_of_chunk(payloads, entry, chunk, shape)
                    bar.advance(math.prod(chunk.sizes) * element_bytes(entry.dtype))
            found[key] = TensorFingerprint(entry.dtype, shape, crc)

        def take_all(own: Sequence[str]) -> dict[str, TensorFingerprint]:
            in_parallel(own, take, workers)
            return found

        for part in current_team().divide("take fingerprints", keys, nbytes, take_all, bar.counter):
            found |= part
    return state_of({key: found[key] for key in keys})


def _bytes_of(entry: TensorEntry) -> int:
    return math.prod(entry.shape) * element_bytes(entry.dtype)


def _part_of_chunk(payloads: StoredPayloads, entry: TensorEntry, chunk: StoredChunk, shape: tuple[int, ...]) -> int:
    payload, elem_bytes = payloads.locate(entry, chunk), element_bytes(entry.dtype)

    def read(first: int, count: int) -> memoryview:
        view = memoryview(bytearray(count * elem_bytes))
        payloads.read_into(payload, first * elem_bytes, view)
        return view

    return part_of_chunk(entry, chunk, shape, payload.crc32, read)


# --- two checkpoints


@dataclass(frozen=True, slots=True)
class Difference:
    """How two tensors of one shape differ.

    Attributes:
        elements: how many they have.
        differing: how many are not the same value (two NaNs are; so are 0.0 and -0.0).
        max_abs: largest absolute difference of finite elements.
        max_rel: largest difference relative to the larger of the two.
        nan_mismatches: elements of which one is a NaN or infinite, and the other is something else.
        nans_a, nans_b: NaNs on either side.
        identical: every bit is the same.
        measured: `max_abs` and `max_rel` say by how much elements differ; False for dtypes that are no numbers.
    """

    elements: int
    differing: int
    max_abs: float
    max_rel: float
    nan_mismatches: int
    nans_a: int
    nans_b: int
    identical: bool
    measured: bool = True

    def is_within(self, rtol: float, atol: float) -> bool:
        """Whether elements differ by no more than either tolerance allows."""
        is_close = self.max_abs <= atol or self.max_rel <= rtol
        return not self.differing or (self.measured and not self.nan_mismatches and is_close)


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """A tensor of both; `values` None: other shapes, or not compared. `crcs`: of its bytes in C order, if compared."""

    fqn: str
    dtype_a: str
    dtype_b: str
    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    values: Difference | None = None
    within_tolerance: bool = False
    crcs: tuple[int, int] | None = None

    @property
    def same(self) -> bool:
        """Nothing to report: the same dtype, shape and values (or values within the tolerance that was given)."""
        same_kind = self.shape_a == self.shape_b and self.dtype_a == self.dtype_b
        if self.crcs is not None and self.crcs[0] != self.crcs[1]:
            return False
        return same_kind and (self.values is None or self.values.identical or self.within_tolerance)

    @property
    def magnitude(self) -> tuple[float, float, float]:
        """For sorting: what differs most comes first."""
        if self.shape_a != self.shape_b:
            return (math.inf, math.inf, math.inf)
        if self.values is None:
            return (0.0, 0.0, 0.0 if self.same else 1.0)
        if not self.values.measured:
            return (float(self.values.differing), 0.0, 0.0)
        return (float(self.values.nan_mismatches), self.values.max_rel, self.values.max_abs)


class CommonDiff(NamedTuple):
    """A value of the common state that differs: its entry, its name in that (empty: it is the entry), both as text."""

    entry: str
    name: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class DiffReport:
    """Attributes:
    tensors: of both, those that differ most first.
    objects_differ: by full key.
    common_differs: top-level entries of the common state (iteration, arguments, optimizer settings) that differ, or
        that only one of the two has.
    common_values: what differs in these, where their values are plain or have named parts, as arguments do.
    not_compared: those of which it cannot be told whether they do.
    optimizer_layouts: Megatron's names of the layouts of the optimizer's state; None without one.
    removed: of each, what it had when it was saved, and has no longer.
    """

    a: str
    b: str
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    tensors: tuple[TensorDiff, ...]
    objects_differ: tuple[str, ...]
    objects_same: int
    read_bytes: int
    common_differs: tuple[str, ...] = ()
    common_values: tuple[CommonDiff, ...] = ()
    not_compared: tuple[str, ...] = ()
    optimizer_layouts: tuple[str | None, str | None] = (None, None)
    removed: tuple[Removed | None, Removed | None] = (None, None)

    @property
    def optimizer_differs(self) -> bool:
        """Both hold an optimizer's state, each in another layout, so that its keys are not the same."""
        a, b = self.optimizer_layouts
        return a is not None and b is not None and a != b

    @property
    def identical(self) -> bool:
        """Keys, shapes, dtypes, values, objects and common state are the same, and all of it could be compared."""
        keys = not self.only_in_a and not self.only_in_b and not self.objects_differ and not self.common_differs
        return keys and not self.not_compared and all(tensor.same for tensor in self.tensors)


def _kinds(index: CheckpointIndex, wanted: Callable[[str], bool]) -> dict[str, bool]:
    """The keys that are compared, each with whether it is that of a tensor."""
    return {key: key in index.tensors for key in (*index.tensors, *index.objects) if wanted(key)}


def _differing_objects(a: StoredPayloads, b: StoredPayloads, keys: Sequence[str]) -> list[str]:
    """Keys of objects that differ. Raises for a damaged one, which is no other value."""
    contents = ([_contents(payloads.index.objects[key], payloads) for key in keys] for payloads in (a, b))
    differing = [key for key, x, y in zip(keys, *contents, strict=True) if not _are_alike(x, y)]
    for key in differing:
        read_object(a.index, a.index.objects[key])
        read_object(b.index, b.index.objects[key])
    return differing


def diff_checkpoints(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    only: str | None = None,
    values: bool = True,
    state: bool = False,
    rtol: float = 0.0,
    atol: float = 0.0,
    workers: int = 2,
    progress: bool | None = False,
) -> DiffReport:
    """Compare two checkpoints.

    Args:
        a: directory of one, or one with a tracker file.
        b: the other.
        only: keys to compare: with any of `*?[` a shell pattern for the whole key, otherwise a part of it;
            the common state, which has no key, is then left out.
        values: compare values, not just keys, shapes and dtypes.
        state: compare the fingerprints of tensors in place of values; what is stored in runs of rows is not read for
            that (`checkpoint_fingerprint`).
        rtol: tensors whose largest relative difference is no more count as the same.
        atol: tensors whose largest absolute difference is no more do, too.
        workers: threads; each takes about 100 MB.
        progress: show a bar; None: if standard error is a terminal.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError: one of them cannot be read.
        LoadError: a save has replaced one of them meanwhile.
        ChecksumError: a tensor or an object differs since one of them is damaged, or a common state is.
    """
    if not (rtol >= 0 and atol >= 0 and workers >= 1):
        raise OptionError(f"rtol={rtol}, atol={atol}, workers={workers}: expected at least 0, 0 and 1")
    directories = checkpoint_directory(a), checkpoint_directory(b)
    wanted = key_filter(only)
    results: dict[str, Difference] = {}
    read_bytes = 0
    crcs: dict[str, tuple[int, int]] = {}
    with in_force(*directories):
        left, right = read_index(directories[0]), read_index(directories[1])
        for index in (left, right):
            check_apart(index)
        in_a, in_b = _kinds(left, wanted), _kinds(right, wanted)
        both = [key for key, is_tensor in in_a.items() if in_b.get(key) is is_tensor]
        pairs = {key: (left.tensors[key], right.tensors[key]) for key in both if in_a[key]}
        objects = [key for key in both if not in_a[key]]
        comparable = [key for key, (x, y) in pairs.items() if x.shape == y.shape]
        with StoredPayloads(left) as payloads_a, StoredPayloads(right) as payloads_b:
            for index in (left, right) if values or state else ():
                check_tiled(index, comparable)
            if state:
                crcs = _compare_fingerprints(payloads_a, payloads_b, comparable, workers, progress)
            elif values:
                results, read_bytes = _compare_values(payloads_a, payloads_b, comparable, workers, progress)
            compare = partial(_differing_objects, payloads_a, payloads_b)
            parts = current_team().divide("compare the objects", objects, lambda _: 1, compare)
            differing = [key for part in parts for key in part]
        common_values, not_compared = ([], ()) if only else _compare_common_states(left, right)
    within = {key for key, one in results.items() if one.is_within(rtol, atol)}
    found = [
        TensorDiff(key, x.dtype, y.dtype, x.shape, y.shape, results.get(key), key in within, crcs.get(key))
        for key, (x, y) in pairs.items()
    ]
    return DiffReport(
        a=left.path,
        b=right.path,
        only_in_a=tuple(key for key, is_tensor in in_a.items() if in_b.get(key) is not is_tensor),
        only_in_b=tuple(key for key, is_tensor in in_b.items() if in_a.get(key) is not is_tensor),
        tensors=tuple(sorted(found, key=lambda tensor: tensor.magnitude, reverse=True)),
        objects_differ=tuple(differing),
        objects_same=len(objects) - len(differing),
        read_bytes=read_bytes,
        common_differs=tuple(dict.fromkeys(each.entry for each in common_values)),
        common_values=tuple(common_values),
        not_compared=not_compared,
        optimizer_layouts=(optimizer_layout(left, {}), optimizer_layout(right, {})),
        removed=(left.removed, right.removed),
    )


def _compare_common_states(a: CheckpointIndex, b: CheckpointIndex) -> tuple[list[CommonDiff], tuple[str, ...]]:
    """Differences of two common states, and top-level entries for which this cannot be told."""
    left, right = stored_common_state(a), stored_common_state(b)
    for index in (*([a] if left is None else []), *([b] if right is None else [])):
        refuse_incomplete(checkpoint_path(index.path), index)
    if left is not None and right is not None and left.content == right.content:
        return [], ()
    values = [{} if stored is None else _entries(stored) for stored in (left, right)]
    different: list[CommonDiff] = []
    unknown: dict[str, None] = {}
    for (_, entry), mine, other, verdict in _verdicts(*values):
        if verdict == "different":
            parts = [_parts_of(value) for value in (mine, other)]
            named = list(_verdicts(*parts)) if parts[0] and parts[1] else []
            rows = [(name, x, y) for (_, name), x, y, of_part in named if of_part != "same"] or [("", mine, other)]
            different += (CommonDiff(entry, name, _shown(x), _shown(y)) for name, x, y in rows)
        elif verdict == "unknown":
            unknown[entry] = None
    differs = {each.entry for each in different}
    return different, tuple(entry for entry in unknown if entry not in differs)


_MISSING: Final = object()
_SHOWN_CHARACTERS: Final = 60
_Named = dict[tuple[str, str], Any]


def _verdicts(a: _Named, b: _Named) -> Iterator[tuple[tuple[str, str], Any, Any, Verdict]]:
    """What both have under each key, and whether it is the same."""
    for key in dict.fromkeys((*a, *b)):
        mine, other = a.get(key, _MISSING), b.get(key, _MISSING)
        yield key, mine, other, "different" if mine is _MISSING or other is _MISSING else compare(mine, other)


def _parts_of(value: Any) -> _Named:
    """The named parts of a value, by type and name; empty if it has none."""
    state = value.state if isinstance(value, Opaque) else value
    if not isinstance(state, dict) or not all(type(key) in SIMPLE_KEYS for key in state):
        return {}
    return {(type(key).__name__, str(key)): part for key, part in state.items()}


def _shown(value: Any) -> str:
    if value is _MISSING:
        return "(not there)"
    text = repr(plain(value, 1000))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _entries(stored: StoredState) -> _Named:
    """What lies under each key of a common state, by type and name: 1 is another key than "1"."""
    value = plain_dict(stored, with_storages=True)
    return _parts_of(value) if all(type(key) in SIMPLE_KEYS for key in value) else {("str", "common_state"): value}


def _compare_fingerprints(
    a: StoredPayloads, b: StoredPayloads, keys: list[str], workers: int, progress: bool | None
) -> dict[str, tuple[int, int]]:
    """The CRC-32 of each tensor's elements in both."""
    of_a, of_b = (
        payloads_fingerprint(payloads, keys, workers=workers, progress=progress).tensors for payloads in (a, b)
    )
    return {key: (of_a[key].crc32, of_b[key].crc32) for key in keys}


def _compare_values(
    a: StoredPayloads, b: StoredPayloads, keys: list[str], workers: int, progress: bool | None
) -> tuple[dict[str, Difference], int]:
    """How the tensors under these keys differ, and how many bytes that took; slabs are compared in several threads."""
    entries = {key: (a.index.tensors[key], b.index.tensors[key]) for key in keys}
    total = sum(_bytes_of(entry) for pair in entries.values() for entry in pair)

    def place(key: str) -> tuple[str, int]:
        chunks = a.index.tensors[key].chunks
        return (chunks[0].item.file, chunks[0].item.offset) if chunks else ("", 0)

    by_file = sorted(keys, key=place)
    found = {key: Difference(0, 0, 0.0, 0.0, 0, 0, 0, x.dtype == y.dtype) for key, (x, y) in entries.items()}
    threads, lock = threading.local(), threading.Lock()
    with Progress("diff", total, shown=progress) as bar:

        def compare_slab(task: tuple[str, Box]) -> None:
            key, box = task
            readers = getattr(threads, "readers", None)
            if readers is None:
                readers = threads.readers = SlabReader(a), SlabReader(b)
            x, y = entries[key]
            left, right = readers[0].read(x, box), readers[1].read(y, box)
            part = _difference(left, right, x.dtype, y.dtype)
            with lock:
                found[key] = _sum(found[key], part)
            bar.advance(len(left) + len(right))

        def compare_all(own: Sequence[str]) -> dict[str, Difference]:
            in_parallel(_slabs(a.index, own), compare_slab, workers)
            # A damaged file is not another value. Where all bits are the same there is nothing to be mistaken about.
            suspects = [(payloads, key) for key in own if not found[key].identical for payloads in (a, b)]
            in_parallel(suspects, lambda one: check_elements(one[0], one[0].index.tensors[one[1]]), workers)
            return {key: found[key] for key in own}

        def nbytes(key: str) -> int:
            return sum(map(_bytes_of, entries[key]))

        for part in current_team().divide("compare the tensors", by_file, nbytes, compare_all, bar.counter):
            found |= part
    return found, total


def _slabs(index: CheckpointIndex, keys: Sequence[str]) -> Iterator[tuple[str, Box]]:
    for key in keys:
        entry = index.tensors[key]
        for box in slabs(Box((0,) * len(entry.shape), entry.shape), element_bytes(entry.dtype), SLAB_BYTES):
            yield key, box


def _sum(one: Difference, other: Difference) -> Difference:
    return Difference(
        one.elements + other.elements,
        one.differing + other.differing,
        max(one.max_abs, other.max_abs),
        max(one.max_rel, other.max_rel),
        one.nan_mismatches + other.nan_mismatches,
        one.nans_a + other.nans_a,
        one.nans_b + other.nans_b,
        one.identical and other.identical,
        one.measured and other.measured,
    )


def _difference(a: memoryview, b: memoryview, dtype_a: str, dtype_b: str) -> Difference:
    """How the same box of two tensors differs."""
    width = element_bytes(dtype_a)
    left = as_numbers(a, dtype_a)
    if dtype_a == dtype_b and _same_bytes(a, b):
        nans = 0 if left is None else _nans(left)
        return Difference(len(a) // width, 0, 0.0, 0.0, 0, nans, nans, True)
    right = as_numbers(b, dtype_b)
    if left is None or right is None:  # no numbers: only their bits can be compared
        differing = len(a) // width  # all, if they have other widths
        if width == element_bytes(dtype_b):
            others = np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8)
            differing = int(np.count_nonzero(others.reshape(-1, width).any(axis=1)))
        return Difference(len(a) // width, differing, 0.0, 0.0, 0, 0, 0, False, False)
    return reduce(_sum, map(_difference_of_numbers, batches(left), batches(right)))


def _nans(numbers: np.ndarray[Any, Any]) -> int:
    """How many there are; a NaN makes the sum a NaN (so may infinities): one pass that rarely needs another."""
    if numbers.dtype.kind not in "fc":
        return 0
    with np.errstate(all="ignore"):
        total = numbers.sum(dtype=np.float64 if numbers.dtype.kind == "f" else None)
        return int(np.count_nonzero(np.isnan(numbers))) if math.isnan(abs(total)) else 0


def _difference_of_numbers(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Difference:
    wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
    a, b = x.astype(wide), y.astype(wide)
    exact_ints = x.dtype.kind in "iu" and x.dtype == y.dtype  # 64-bit integers are not exact in double precision
    nan_a, nan_b = np.isnan(a), np.isnan(b)
    unequal = ~((x == y if exact_ints else a == b) | (nan_a & nan_b))
    finite = np.isfinite(a) & np.isfinite(b)
    chosen = unequal & finite
    max_abs = max_rel = 0.0
    if chosen.any():
        with np.errstate(all="ignore"):
            if exact_ints:
                high, low = np.maximum(x, y)[chosen], np.minimum(x, y)[chosen]
                # Modulo 2**64 the difference is right whatever the sign, and never too large.
                distance = (high.astype(np.uint64) - low.astype(np.uint64)).astype(np.float64)
            else:
                distance = np.abs(a[chosen] - b[chosen])
            scale = np.maximum(np.abs(a[chosen]), np.abs(b[chosen]))
            max_abs = float(distance.max())
            max_rel = float(np.max(distance / np.where(scale == 0, 1, scale)))
    differing, mismatches, nans_a, nans_b = map(int, map(np.count_nonzero, (unequal, unequal & ~finite, nan_a, nan_b)))
    return Difference(x.size, differing, max_abs, max_rel, mismatches, nans_a, nans_b, False)


def _same_bytes(a: memoryview, b: memoryview) -> bool:
    """At memory speed and without the GIL, unlike `==`."""
    width = 1 if len(a) % 8 else 8
    return len(a) == len(b) and np.array_equal(np.frombuffer(a, f"u{width}"), np.frombuffer(b, f"u{width}"))


def _are_alike(a: object, b: object) -> bool:
    """Whether two objects are; Megatron-Core stores buckets without a table of their parameters."""
    if isinstance(a, dict) and isinstance(b, dict):
        lacking = {_TABLE} - (a.keys() & b.keys())
        a, b = ({name: content for name, content in one.items() if name not in lacking} for one in (a, b))
    return a == b


# What torch.save adds that says nothing about the object.
_INCIDENTAL = ("version", "byteorder", ".data/serialization_id", ".format_version", ".storage_alignment")
_TABLE: Final = TABLE_MEMBER.partition("/")[2]


def _contents(entry: ObjectEntry, payloads: StoredPayloads) -> object:
    """What an object was pickled to; the archives around the same bytes may differ."""
    content = payloads.object_bytes(entry)
    spans = verify_records(lambda at, length: content[at : at + length], len(content), entry.fqn)
    return {
        name: content[span.offset : span.offset + span.nbytes]
        for span in spans
        if (name := span.name.partition("/")[2]) not in _INCIDENTAL
    }
