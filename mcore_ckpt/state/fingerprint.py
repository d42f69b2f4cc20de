"""The fingerprint of the state that ranks hold in memory: Megatron's sharded tensors, whatever the layout, or DTensors.

Without names each rank sums up its main replicas, and one reduction of 40 bytes puts the parts together (and names
tensors without elements, since what several ranks hold of one of them is the same). With names it
sums up all its replicas, and the coordinator compares them. So it does for the tensors of plain DCP, of which no rank
by itself knows who else holds the same. A state is plain DCP's if no rank holds anything sharded by Megatron.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mcore_ckpt.core.boxes import Box, Stretch, flat_boxes
from mcore_ckpt.core.errors import PlanError
from mcore_ckpt.core.fingerprints import (
    DivergedReplica,
    StateFingerprint,
    StateWords,
    TensorFingerprint,
    part_of,
    state_of,
    state_words,
)
from mcore_ckpt.core.ranks import coordination_group, without_modes
from mcore_ckpt.format.index import parse_shadow_key
from mcore_ckpt.state.dcp_tensors import dcp_tensors
from mcore_ckpt.state.shards import is_main_replica, is_sharded_tensor, leaves, local_box
from mcore_ckpt.state.torch_classes import check_memory, dtype_name, pointer_of

if TYPE_CHECKING:
    import torch.distributed as dist

_WINDOW_BYTES = 32 * 1024 * 1024
# What the storage of a subclass holds is not known.
_PLAIN = (torch.Tensor, torch.nn.Parameter)

# What a tensor that is that stretch of a global one adds, if that is known already.
Known = Callable[[torch.Tensor, Stretch], int | None]


@without_modes()
def fingerprint(
    sharded_state_dict: Any, process_group: dist.ProcessGroup | None = None, *, names: bool = False
) -> StateFingerprint:
    """The fingerprint of what the ranks hold now: the same under every parallel layout, and that of the checkpoint.

    All ranks of the group call it together. Objects have no part in it. A tensor that layouts pad otherwise (a
    vocabulary) is another tensor.

    Args:
        sharded_state_dict: nested dict/list with Megatron's sharded tensors, and factories of them, which are built.
            Without any of Megatron's on any rank, a state dict as plain DCP saves it: its tensors and DTensors (FSDP2)
            count, under the keys that DCP gives them. Which of several replicas DCP saves is settled when it saves; the
            one of the lowest rank counts. So where some have diverged, the checkpoint may have another fingerprint.
        process_group: the ranks that hold it together; None: all.
        names: also return the fingerprint of each tensor, on every rank, and compare replicas with those that count.
            All replicas are read then, and lists of them are exchanged.

    Raises:
        PlanError: a shard has no data, or (with `names`) ranks disagree on a tensor, or their main replicas do not make
            it up.
    """
    group = coordination_group(process_group)
    what = "take the fingerprint of the state"
    built: list[Any] = []

    def of_rank() -> _OfRank:
        built.append(_built(sharded_state_dict))
        is_megatrons = next(leaves(built[0]), None) is not None
        return _OfRank.of([] if names else parts_of(built[0], replicas=False), is_megatrons)

    found = group.run_merged(what, of_rank, _OfRank.merged, lambda merged: merged, wrap=PlanError)
    if found.is_megatrons and not names:
        return StateFingerprint(str(found.words ^ state_words((*one, 0, True) for one in found.empty)))
    take = partial(parts_of, replicas=True) if found.is_megatrons else _dcp_parts
    gathered = group.run_gather(what, lambda: list(take(built[0])), wrap=PlanError)
    compared = group.run_on_coordinator(what, lambda: _compared(gathered or []), wrap=PlanError)
    return compared if names else StateFingerprint(compared.total)


class Part(NamedTuple):
    """One rank's replica of a slice of a tensor, or of a stretch of the flattened slice."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    stretch: tuple[int, int]  # in elements of the flattened slice
    crc: int  # what it adds to the tensor's CRC-32
    is_main: bool | None  # None: not known; one of those that hold this slice is

    @property
    def is_first(self) -> bool:
        """Whether the tensor's first element is among these, or would be."""
        start, stop = self.stretch
        return start == 0 and not any(self.box.offsets) and (stop > 0 or not math.prod(self.shape))


class _OfRank(NamedTuple):
    """Of the main replicas of a rank, or of several; and whether they hold anything of Megatron's."""

    words: StateWords
    empty: frozenset[tuple[str, str, tuple[int, ...]]]  # tensors without elements: several ranks may hold the first one
    is_megatrons: bool

    @classmethod
    def of(cls, mains: Iterable[Part], is_megatrons: bool) -> _OfRank:
        """Of one rank."""
        empty = set()

        def others() -> Iterator[tuple[str, str, tuple[int, ...], int, bool]]:
            for part in mains:
                if 0 in part.shape:
                    empty.add((part.key, part.dtype, part.shape))
                else:
                    yield part.key, part.dtype, part.shape, part.crc, part.is_first

        words = state_words(others())
        return cls(words, frozenset(empty), is_megatrons)

    def merged(self, other: _OfRank) -> _OfRank:
        """Of both."""
        is_megatrons = self.is_megatrons or other.is_megatrons
        return _OfRank(self.words ^ other.words, self.empty | other.empty, is_megatrons)


def parts_of(tree: Any, *, replicas: bool) -> Iterator[Part]:
    """The main replicas of Megatron's that this rank holds, or all replicas, summed up."""
    for shard in shards_of(tree):
        shadow = parse_shadow_key(shard.key)
        is_main = shadow is None and is_main_replica(shard)
        if is_main or replicas:
            yield part_of_shard(shard.key if shadow is None else shadow.fqn, shard, is_main)


def _dcp_parts(tree: Any) -> Iterator[Part]:
    """All that plain DCP would find on this rank."""
    for key, data, shape, box in dcp_tensors(tree):
        yield _part(key, data, shape, box, (0, math.prod(box.sizes)), None)


def shards_of(tree: Any) -> list[Any]:
    """The sharded tensors in a nested dict/list, those that factories make among them."""
    return [leaf for leaf in leaves(_built(tree)) if is_sharded_tensor(leaf)]


def is_factory(value: object) -> bool:
    """Whether this is Megatron's `ShardedTensorFactory`."""
    return hasattr(value, "build_fn") and hasattr(value, "build")


def _built(tree: Any) -> Any:
    """The same with what factories make in their place."""
    if is_factory(tree):
        return _built(tree.build())
    if isinstance(tree, dict):
        return {key: _built(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_built(value) for value in tree]
    return tree


def part_of_shard(key: str, shard: Any, is_main: bool, known: Known | None = None) -> Part:
    """A replica, summed up, unless what it adds is `known`. Raises `PlanError` as `fingerprint`."""
    data = shard.data
    if not isinstance(data, torch.Tensor):
        raise PlanError(f"{key}: the shard at {list(shard.global_offset)} has no data ({type(data).__name__})")
    shape, sizes = tuple(map(int, shard.global_shape)), local_box(shard)
    box, stretch = Box(tuple(map(int, shard.global_offset)), sizes), (0, math.prod(sizes))
    flattened = getattr(shard, "flattened_range", None)
    if flattened is not None:
        stretch = flattened.start, flattened.stop
    if data.numel() != stretch[1] - stretch[0]:
        raise PlanError(
            f"{key}: the shard at {list(box.offsets)} has data of shape {list(data.shape)}, expected "
            f"{stretch[1] - stretch[0]} elements of the slice of sizes {list(sizes)}"
        )
    if known is not None:
        start, stop = stretch
        crc = known(data, Stretch(shape, box, start, stop - start, data.element_size()))
        if crc is not None:
            return Part(key, dtype_name(data.dtype), shape, box, stretch, crc, is_main)
    return _part(key, data, shape, box, stretch, is_main)


def _part(
    key: str, data: torch.Tensor, shape: tuple[int, ...], box: Box, stretch: tuple[int, int], is_main: bool | None
) -> Part:
    elem_bytes, crc = data.element_size(), 0
    with torch.no_grad():
        for content, inside in _contents(key, data, box.sizes, stretch):
            lies = Box(tuple(map(operator.add, box.offsets, inside.offsets)), inside.sizes)
            crc ^= part_of(content, shape, lies, elem_bytes)
    return Part(key, dtype_name(data.dtype), shape, box, stretch, crc, is_main)


def _contents(
    key: str, data: torch.Tensor, sizes: tuple[int, ...], stretch: tuple[int, int]
) -> Iterator[tuple[Any, Box]]:
    """The bytes of a shard's elements, as slices of its own slice; what cannot be read where it lies in windows."""
    in_place = type(data) in _PLAIN and bool(pointer_of(data)) and not data.is_conj() and not data.is_neg()
    if type(data) in _PLAIN and data.layout is torch.strided and not data.is_meta:
        check_memory(data, lambda: key)
    flat, (start, stop) = data.detach().reshape(-1), stretch
    step = max(1, stop - start if in_place else _WINDOW_BYTES // data.element_size())
    at = start
    for low in range(start, stop, step):
        for inside in flat_boxes(sizes, low, min(low + step, stop)):
            elements = flat[at - start : at - start + math.prod(inside.sizes)]
            if not in_place:
                elements = torch.empty(elements.shape, dtype=data.dtype, device="cpu").copy_(elements)
            yield elements.view(torch.uint8).numpy(), inside
            at += len(elements)


def _compared(gathered: list[list[Part]]) -> StateFingerprint:
    """All ranks' parts put together."""
    mains: dict[str, list[tuple[int, Part]]] = {}
    slices: dict[tuple[str, Box, tuple[int, int]], list[tuple[int, Part]]] = {}
    for rank, parts in enumerate(gathered):
        for part in parts:
            known = slices.setdefault((part.key, part.box, part.stretch), [])
            known.append((rank, part))
            if part.is_main or (part.is_main is None and len(known) == 1):
                mains.setdefault(part.key, []).append((rank, part))
    tensors: dict[str, TensorFingerprint] = {}
    for key, of_key in mains.items():
        rank, first = of_key[0]
        crc = elements = 0
        for other, part in of_key:
            if (part.dtype, part.shape) != (first.dtype, first.shape):
                raise PlanError(
                    f"{key}: rank {rank} holds {first.dtype} of global shape {list(first.shape)}, rank {other} "
                    f"{part.dtype} of {list(part.shape)}"
                )
            crc ^= part.crc
            elements += part.stretch[1] - part.stretch[0]
        if elements != math.prod(first.shape):
            raise PlanError(
                f"{key}: ranks {sorted({rank for rank, _ in of_key})} hold main replicas of {elements} elements, "
                f"expected {math.prod(first.shape)} of the shape {list(first.shape)}"
            )
        tensors[key] = TensorFingerprint(first.dtype, first.shape, crc)
    return state_of(tensors, list(_diverged(slices)))


def _diverged(
    slices: dict[tuple[str, Box, tuple[int, int]], list[tuple[int, Part]]],
) -> Iterator[DivergedReplica]:
    for (key, box, _), of_slice in slices.items():
        main = next(((rank, part) for rank, part in of_slice if part.is_main), of_slice[0])
        others = tuple(rank for rank, part in of_slice if (part.crc, part.dtype) != (main[1].crc, main[1].dtype))
        if others:
            # What DCP finds on several ranks is saved by one that depends on planner and sizes.
            saved_by = None if main[1].is_main is None else main[0]
            yield DivergedReplica(key, *box, saved_by, others, main[0])
