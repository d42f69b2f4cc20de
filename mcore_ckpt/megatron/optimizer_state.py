"""Load the optimizer's state alone, in the layout that the model has now, without reading the rest of the checkpoint.

Three ways in which a model can be laid out are understood, key by key:

- Megatron's sharded state dicts (what `optimizer.sharded_state_dict(...)` returns), through Megatron's own `load`;
- DTensors (FSDP2 and its kin): each state tensor gets the mesh and placements of its parameter;
- plain tensors that are a part of the global tensor: whole, a box at an offset, or a flat run of elements at an offset.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import find_state_dict_object

from mcore_ckpt.core.boxes import flat_boxes
from mcore_ckpt.core.errors import CorruptCheckpointError, LoadError, MissingKeyError, ShapeMismatchError
from mcore_ckpt.core.options import LoadOptions, checkpoint_path
from mcore_ckpt.core.ranks import without_modes
from mcore_ckpt.format.index import CheckpointIndex, TensorEntry
from mcore_ckpt.load.reader import CheckpointReader
from mcore_ckpt.load.requests import ReadRequest
from mcore_ckpt.megatron.calls import MegatronErrors
from mcore_ckpt.megatron.versions import megatron_module
from mcore_ckpt.state.shards import carry_layout, global_shape, leaves, local_chunks, tells_its_slices

# A list in a state dict has no more entries than there are keys, unless some were removed.
_MAX_REMOVED = 10_000


@without_modes()
def load_sharded_optimizer_state(
    state_dict: Mapping[str, Any],
    checkpoint: str | os.PathLike[str],
    optimizer_key: str = "optimizer",
    *,
    offsets: Mapping[str, int | Sequence[int]] | None = None,
    options: LoadOptions | None = None,
) -> dict[str, Any]:
    """Load what a checkpoint holds of the optimizer.

    The job of DCP's `load_sharded_optimizer_state_dict` and of its reader for flat shards at an offset.

    Args:
        state_dict: for Megatron, a sharded state dict with the optimizer's part under `optimizer_key` (anything else in
            it is left alone). Otherwise the model's state dict, parameter fqn -> DTensor or tensor: the layout that the
            optimizer's state shall have.
        checkpoint: directory of the checkpoint.
        optimizer_key: first part of the optimizer's keys in the checkpoint.
        offsets: for a tensor that is only part of its global tensor: where it starts, in elements; one number for each
            axis, or a single number into the flattened (row-major) global tensor, for a tensor of one axis.
        options: `LoadOptions`; None takes them from the environment.

    Returns:
        `{optimizer_key: ...}`, nested as it was saved; for Megatron the loaded optimizer state dict.

    Raises:
        MissingKeyError: the checkpoint has nothing under `optimizer_key`.
        CorruptCheckpointError: what its index notes of where a key belongs cannot be.
        ShapeMismatchError: a parameter's part does not lie inside the stored state tensor, or it has another shape and
            `offsets` does not say which part it is.
        LoadError: see `CheckpointReader.read_items`.
    """
    if optimizer_key in state_dict and any(True for _ in leaves(state_dict[optimizer_key])):
        from mcore_ckpt.megatron.strategy import TorchDistLoadStrategy

        strategy, state = TorchDistLoadStrategy(options=options), {optimizer_key: state_dict[optimizer_key]}
        path, load = str(checkpoint_path(checkpoint)), megatron_module().load  # which applies factories
        with MegatronErrors():
            # Ranks may ask for anything, so there is no check that one rank alone loads each shard.
            return {optimizer_key: load(state, path, strategy, validate_access_integrity=False)[optimizer_key]}
    reader = CheckpointReader(checkpoint, options=options)
    index = reader.index
    prefix = optimizer_key + "."
    keys = [key for key in [*index.tensors, *index.objects] if key.startswith(prefix)]
    if not keys:
        raise MissingKeyError(f"{optimizer_key}: {checkpoint} holds no key that begins with {prefix!r}")
    layouts = _Layouts(state_dict, offsets or {})
    paths = {key: _path(index, key, optimizer_key, state_dict) for key in keys}
    _check_paths(paths)
    requests: list[ReadRequest] = []
    values: dict[str, Any] = {}
    for key in keys:
        entry = index.tensors.get(key)
        values[key] = reader.read_object(key) if entry is None else _wanted_part(entry, layouts.of(key), requests)
    reader.read_items(requests)
    return unflatten_state_dict(values, paths)


class _Layouts:
    """Which parameter a state tensor belongs to, by its key."""

    def __init__(self, model: Mapping[str, Any], offsets: Mapping[str, int | Sequence[int]]) -> None:
        self._model = {fqn: value for fqn, value in model.items() if isinstance(value, torch.Tensor)}
        self._offsets = offsets

    def of(self, key: str) -> tuple[torch.Tensor | None, int | Sequence[int] | None]:
        """The parameter whose name is a part of the key (the longest such name), and its offset."""
        parts = key.split(".")
        for length in range(len(parts), 0, -1):
            for start in range(len(parts) - length + 1):
                fqn = ".".join(parts[start : start + length])
                if fqn in self._model:
                    return self._model[fqn], self._offsets.get(fqn)
        return None, None


def _wanted_part(
    entry: TensorEntry, layout: tuple[torch.Tensor | None, int | Sequence[int] | None], requests: list[ReadRequest]
) -> torch.Tensor:
    """A tensor to hold this rank's part of a stored state tensor; the reads that fill it are added to `requests`."""
    parameter, offset = layout
    dtype = getattr(torch, entry.dtype)
    shape = entry.shape
    if parameter is None or math.prod(shape) <= 1:
        whole = torch.empty(shape, dtype=dtype)
        requests.append(ReadRequest(entry.fqn, whole, (0,) * len(shape), shape, shape))
        return whole
    if tells_its_slices(parameter):
        return _wanted_slices(entry, parameter, dtype, requests)
    local_shape = tuple(parameter.shape)
    part = torch.empty(local_shape, dtype=dtype, device=parameter.device)
    if isinstance(offset, int) and len(shape) != 1:
        if len(local_shape) != 1:
            raise ShapeMismatchError(
                f"{entry.fqn}: a flat offset {offset} needs a tensor of one axis, the parameter has shape {local_shape}"
            )
        _want_flat_run(entry, part, offset, requests)
        return part
    if offset is None and local_shape != shape:
        raise ShapeMismatchError(
            f"{entry.fqn}: the checkpoint holds global shape {list(shape)}, the parameter has {list(local_shape)}; if"
            " it is a part of the global one, say in `offsets` which"
        )
    start = (0,) * len(shape) if offset is None else (offset,) if isinstance(offset, int) else tuple(offset)
    requests.append(ReadRequest(entry.fqn, part, start, local_shape))
    return part


def _want_flat_run(entry: TensorEntry, part: torch.Tensor, start: int, requests: list[ReadRequest]) -> None:
    stop = start + part.numel()
    if start < 0 or stop > math.prod(entry.shape):
        raise ShapeMismatchError(
            f"{entry.fqn}: elements [{start}, {stop}) are requested, the stored tensor of shape {entry.shape} has"
            f" {math.prod(entry.shape)}"
        )
    filled = 0
    for box in flat_boxes(entry.shape, start, stop):
        count = math.prod(box.sizes)
        requests.append(ReadRequest(entry.fqn, part[filled : filled + count].view(box.sizes), box.offsets, box.sizes))
        filled += count


def _wanted_slices(
    entry: TensorEntry, parameter: torch.Tensor, dtype: torch.dtype, requests: list[ReadRequest]
) -> torch.Tensor:
    """As `_wanted_part`, for a DTensor and what else tells DCP which slices of a global tensor it holds."""
    with torch.no_grad():  # a copy of the parameter: its class may know no `empty_like`
        state = carry_layout(parameter, parameter.clone().to(dtype))
    for number, chunk in enumerate(local_chunks(state)):
        data = find_state_dict_object({entry.fqn: state}, MetadataIndex(entry.fqn, chunk.offsets, number))
        requests.append(ReadRequest(entry.fqn, data, tuple(chunk.offsets), tuple(chunk.sizes), global_shape(state)))
    return state


def _path(index: CheckpointIndex, key: str, optimizer_key: str, model: Mapping[str, Any]) -> tuple[Any, ...]:
    """Where a value belongs in the nested state dict: as DCP noted it, or else by the names in the key."""
    noted = index.planner_data.get(key) if isinstance(index.planner_data, dict) else None
    if noted is not None and noted != () and noted != []:
        plain = type(noted) in (tuple, list) and all(type(part) in (str, int) for part in noted)
        # DCP makes the key of the path.
        if not plain or ".".join(map(str, noted)) != key:
            raise CorruptCheckpointError(
                f"{key}: the index of {index.path} notes another place for it in the state dict (planner_data, a "
                f"{type(noted).__name__}) than its name says; the index is damaged. Load another copy or an earlier "
                "checkpoint"
            )
        return tuple(noted)
    rest = key[len(optimizer_key) + 1 :]
    for fqn in sorted((fqn for fqn in model if fqn in rest), key=len, reverse=True):
        before, _, after = rest.partition(fqn)
        names = [name for name in (*before.strip(".").split("."), fqn, *after.strip(".").split(".")) if name]
        return (optimizer_key, *names)
    return (optimizer_key, *rest.split("."))


def _check_paths(paths: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise `LoadError` unless a state dict can have all of these places; integers are positions in lists."""
    longest = len(paths) + _MAX_REMOVED
    kinds: dict[tuple[Any, ...], type] = {}  # of what stands in each container: names, or positions
    for key, path in paths.items():
        for depth, part in enumerate(path):
            kind = kinds.setdefault(path[:depth], type(part))
            if kind is not type(part) or (isinstance(part, int) and not 0 <= part < longest):
                raise _contradiction(key)
    if inner := [key for key, path in paths.items() if path in kinds]:
        raise _contradiction(inner[0])


def _contradiction(key: str) -> LoadError:
    return LoadError(f"{key}: the checkpoint's key contradicts the other keys' structure")
