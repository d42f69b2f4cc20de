"""Is what a load has put into memory what the checkpoint holds, bit for bit? (`LoadOptions.prove`)

Checksums prove what was read. This proves where it went, under another layout and through Megatron's exchange between
ranks, too. Each rank sums up the main replicas that it holds after the load. The one that has a tensor's first element
adds the fingerprint that was stored with it, or where there is none, what its chunks come to. One reduction of 72 bytes
says whether all is equal. Only if it is not, lists of tensors are exchanged.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mcore_ckpt.core.boxes import flat_boxes
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.core.fingerprints import StateWords, state_words
from mcore_ckpt.core.options import LoadOptions
from mcore_ckpt.core.paths import checkpoint_path
from mcore_ckpt.core.ranks import RankGroup, coordination_group
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, TensorEntry, parse_shadow_key
from mcore_ckpt.items.fingerprints import global_shape, part_of_chunk
from mcore_ckpt.layout.fingerprint import is_factory, part_of_shard, shards_of
from mcore_ckpt.layout.shards import is_main_replica, is_sharded_tensor
from mcore_ckpt.layout.torch_classes import dtype_name
from mcore_ckpt.load.read_requests import ReadRequest, stored_dtype
from mcore_ckpt.load.reader import FileSystemReader

_logger = logging.getLogger("mcore_ckpt")

_SAMPLE = 16  # one tensor in so many
_SHOWN = 10
_WHAT = "prove the state that was loaded"


class _Held(NamedTuple):
    """What one rank holds of a tensor, and, where that begins with its first element, the stored CRC-32."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    crc: int
    stored: int | None


def prove_load(
    stock: Callable[..., Any],
    options: LoadOptions,
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Megatron's `load`, and the proof. Raises `LoadError` on all ranks if a tensor differs."""
    noted = _noted(sharded_state_dict)  # Megatron changes what it is given
    result = stock(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    loaded = result[0] if isinstance(result, tuple) else result
    directory, group = checkpoint_path(checkpoint_dir), coordination_group(kwargs.get("process_group"))
    held: list[_Held] = []

    def words() -> tuple[int, ...]:
        held.extend(_held(list(_with_loaded(noted, loaded)), FileSystemReader(directory, options=options), options))
        total = state_words((one.key, one.dtype, one.shape, one.crc, one.stored is not None) for one in held)
        firsts = [one for one in held if one.stored is not None]
        stored = state_words((one.key, one.dtype, one.shape, one.stored or 0, True) for one in firsts)
        return (*total.words, *(total ^ stored).words)

    found = group.run_xor(_WHAT, words, wrap=LoadError)
    in_part = 0
    if any(found[4:]):
        gathered = group.run_gather(_WHAT, lambda: held, wrap=LoadError)
        in_part = group.run_on_coordinator(_WHAT, partial(_differing, gathered, directory), wrap=LoadError)
    _say(group, directory, options, StateWords(tuple(found[:4])), in_part)
    return result


def _say(group: RankGroup, directory: Path, options: LoadOptions, words: StateWords, in_part: int) -> None:
    if group.is_coordinator:
        _logger.info(
            "%s: state proven: %s%s on %d ranks%s",
            directory,
            words,
            f" (one tensor in {_SAMPLE})" if options.prove == "sample" else "",
            group.size,
            f"; {in_part} tensors were loaded in part, and not compared" if in_part else "",
        )


def _noted(tree: Any) -> Any:
    """The same structure with descriptions of sharded tensors alone, without their data."""
    if isinstance(tree, dict):
        return {key: _noted(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_noted(value) for value in tree]
    if not is_sharded_tensor(tree) and not is_factory(tree):
        return None
    noted = copy.copy(tree)
    noted.data = None
    return noted


def _with_loaded(noted: Any, loaded: Any) -> Iterator[Any]:
    """Descriptions with what was loaded for them."""
    if isinstance(noted, dict):
        if isinstance(loaded, dict):
            for key in noted.keys() & loaded.keys():
                yield from _with_loaded(noted[key], loaded[key])
    elif isinstance(noted, list):
        if isinstance(loaded, (list, tuple)):
            for one, value in zip(noted, loaded, strict=False):
                yield from _with_loaded(one, value)
    elif noted is not None and isinstance(loaded, torch.Tensor):
        noted.data = loaded
        yield noted


def _held(leaves: list[Any], reader: FileSystemReader, options: LoadOptions) -> Iterator[_Held]:
    """This rank's main replicas of what is stored in the same dtype and shape."""
    index = reader.index
    save = reader.path.name.encode() if index.manifest is None else index.manifest.save_id
    seed = crc32(save)
    for shard in shards_of(leaves):
        entry = index.tensors.get(shard.key)
        if entry is None or not is_main_replica(shard) or parse_shadow_key(shard.key) is not None:
            continue
        if options.prove == "sample" and crc32(shard.key.encode(), seed) % _SAMPLE:
            continue
        shape = global_shape(index, entry)
        # What is converted, quantized or padded otherwise has other bits.
        if dtype_name(shard.data.dtype) != entry.dtype or shape != tuple(shard.global_shape):
            continue
        if type(shard.data) not in (torch.Tensor, torch.nn.Parameter):
            continue
        part = part_of_shard(shard.key, shard, True)
        stored = _stored_crc(reader, index, entry, shape) if part.is_first else None
        elements = part.stretch[1] - part.stretch[0]
        yield _Held(part.key, part.dtype, shape, elements, part.crc, stored)


def _stored_crc(reader: FileSystemReader, index: CheckpointIndex, entry: TensorEntry, shape: tuple[int, ...]) -> int:
    stored = index.fingerprints.get(entry.fqn)
    if stored is not None:
        return stored
    total = 0
    for chunk in entry.chunks:
        crc = None if chunk.item.transforms else chunk.item.crc32  # what is transformed has one of its stored form
        total ^= part_of_chunk(entry, chunk, shape, crc, partial(_read, reader, entry, chunk))
    return total


def _read(reader: FileSystemReader, entry: TensorEntry, chunk: StoredChunk, first: int, count: int) -> Any:
    """The bytes of so many elements of a stored chunk."""
    elements = torch.empty(count, dtype=stored_dtype(entry), device="cpu")
    requests, done = [], 0
    for box in flat_boxes(chunk.sizes, first, first + count):
        offsets = tuple(base + at for base, at in zip(chunk.offsets, box.offsets, strict=True))
        part = elements[done : done + math.prod(box.sizes)].view(box.sizes)
        requests.append(ReadRequest(entry.fqn, part, offsets, box.sizes))
        done += part.numel()
    reader.read_items(requests)
    return elements.view(torch.uint8).numpy()


def _differing(gathered: list[list[_Held]] | None, directory: Path) -> int:
    """How many tensors were loaded in part, of which nothing can be said. `LoadError`: complete ones differ."""
    tensors: dict[str, list[tuple[int, _Held]]] = {}
    for rank, held in enumerate(gathered or []):
        for one in held:
            tensors.setdefault(one.key, []).append((rank, one))
    in_part, differing = 0, []
    for key, parts in tensors.items():
        crc = elements = 0
        stored = None
        for _, one in parts:
            crc, elements = crc ^ one.crc, elements + one.elements
            stored = one.stored if one.stored is not None else stored
        if stored is None or elements != math.prod(parts[0][1].shape):
            in_part += 1
        elif crc != stored:
            ranks = ", ".join(str(rank) for rank, _ in parts[:_SHOWN])
            differing.append(f"{key} (CRC-32 {crc:08x} on ranks {ranks}, stored {stored:08x})")
    if differing:
        more = f", and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise LoadError(
            f"{directory}: {len(differing)} of {len(tensors)} tensors in memory are not what is stored: "
            f"{'; '.join(differing[:_SHOWN])}{more}. Do not train with this state: load again, with another layout or "
            "without wrappers; if it stays, report it with this message"
        )
    return in_part
