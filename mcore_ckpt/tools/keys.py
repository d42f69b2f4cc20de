"""What keys, the common state and the index say of a checkpoint: kinds of tensors, arguments, the parallel layout.

The common state (iteration, Megatron's arguments, optimizer settings) is a `torch.save` archive: `common.pt`, or from
Megatron-Core 0.19 on an object `common_state` in the data files. Its pickle is read with a stand-in for every class
that it names, so nothing is imported or run, whatever it says. Tensors and other objects come out as `Opaque`. To load
the state for use, take `common_state.load_common`.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mcore_ckpt.core.errors import CorruptCheckpointError
from mcore_ckpt.directory.commit import common_file_in_force
from mcore_ckpt.format.index import (
    COMMON_STATE_KEY,
    CheckpointIndex,
    ObjectEntry,
    TensorEntry,
    is_flat_bucket,
    read_item,
)
from mcore_ckpt.format.integrity import data_file_of
from mcore_ckpt.format.metadata_read import checked_footer, read_common_file
from mcore_ckpt.format.state_file import read_plain
from mcore_ckpt.format.unpickler import Opaque
from mcore_ckpt.load.records import check_content
from mcore_ckpt.storage.resolve import storage_at


def key_filter(pattern: str | None) -> Callable[[str], bool]:
    """A test for keys: with any of `*?[` by a shell pattern for the complete key, otherwise by a part of it."""
    if not pattern:
        return lambda key: True
    if any(character in pattern for character in "*?["):
        match = re.compile(fnmatch.translate(pattern)).match
        return lambda key: match(key) is not None
    return lambda key: pattern in key


_OPTIMIZER_KEY = re.compile(r"(?:optimizers?|optim|chained_\d+)(?:\.|$)")


def is_optimizer_key(fqn: str) -> bool:
    """Whether a key belongs to the optimizer's state (Megatron's layouts, and DCP's `optim.` and `optimizer.`)."""
    return _OPTIMIZER_KEY.match(fqn) is not None


_OPTIMIZER_STATE = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.[^.]+\.(?P<key>.+)$")


def model_key(fqn: str) -> str:
    """The parameter that an optimizer state belongs to (`optimizer.state.exp_avg.<key>`); other keys as they are."""
    found = _OPTIMIZER_STATE.match(fqn)
    return found.group("key") if found else fqn


# What a key is about, most telling first.
_GROUPS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("embedding", lambda key: "embedding" in key),
    ("output layer", lambda key: "output_layer" in key or "lm_head" in key),
    ("norm", lambda key: "norm" in key.rsplit(".", 2)[-2:][0] or "norm" in key.rsplit(".", 1)[-1]),
    ("router", lambda key: ".router." in key),
    ("shared experts", lambda key: "shared_experts." in key),
    ("experts", lambda key: ".experts." in key),
    ("attention", lambda key: "attention." in key or "attn." in key),
    ("mamba", lambda key: ".mixer." in key),
    ("mlp", lambda key: ".mlp." in key),
)
_STATES = ("exp_avg_sq", "exp_avg", "momentum_buffer", "fp32_param", "param")


def group_of(fqn: str) -> str:
    """The kind of tensor that a key names: `"attention"`, `"mlp"`, `"optimizer exp_avg"`, ..."""
    if is_optimizer_key(fqn):
        parts = fqn.split(".")
        state = next((state for state in _STATES if state in parts), None)
        return f"optimizer {state}" if state else "optimizer"
    return next((group for group, matches in _GROUPS if matches(fqn)), "other")


_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")


def layer_number(fqn: str) -> int | None:
    """The layer that a key names (`decoder.layers.3.mlp...`), or None."""
    found = _LAYER.search(fqn)
    return int(found.group(1)) if found else None


_STACKED_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d)")
_STACKED_EXPERTS = re.compile(r"\.experts\.(?!\d)(?:experts\.(?!\d))?")


class StackedAxes(NamedTuple):
    """Leading axes that count layers and experts; None where there is none. `own` is the parameter's first own axis."""

    layer: int | None
    expert: int | None
    own: int


def stacked_axes(fqn: str, shape: Sequence[int]) -> StackedAxes:
    """Which leading axes count layers and experts, from the key."""
    key = model_key(fqn)
    layer = 0 if _STACKED_LAYERS.search(key) and len(shape) > 1 else None
    at = 0 if layer is None else 1
    expert = at if _STACKED_EXPERTS.search(key) and ".shared_experts." not in key and len(shape) > at + 1 else None
    return StackedAxes(layer, expert, at + (expert is not None))


# --- the parallel layout

_ARGUMENTS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of the parallel groups; None where nothing tells."""

    tp: int | None
    pp: int | None
    ep: int | None
    etp: int | None = None

    def __str__(self) -> str:
        sizes = (("TP", self.tp), ("PP", self.pp), ("EP", self.ep), ("ETP", self.etp))
        return " ".join(f"{name} {size}" for name, size in sizes if size is not None) or "unknown"


def data_file_rank(file: str) -> int | None:
    """The rank that wrote a data file, from its name; None for other names."""
    found = data_file_of(file)
    return None if found is None else found.rank


def optimizer_layout(index: CheckpointIndex, common: Mapping[str, Any]) -> str | None:
    """Megatron's name of the optimizer's layout, or `unknown`; None without one. What is stored decides, then what is
    declared: a job with Muon declares `dp_reshardable`, and stores tensors of the parameters' shapes.
    """
    keys = [fqn for fqn in (*index.tensors, *index.objects) if is_optimizer_key(fqn)]
    if not keys:
        return None
    for fqn in keys:
        if is_flat_bucket(fqn):
            return "dp_reshardable"
        if ".optimizer_state" in fqn or "dp_zero" in fqn:
            return "dp_zero_gather_scatter"
    if any(fqn in index.mcore_data and index.mcore_data[fqn] for fqn in keys):
        return "fully_sharded_model_space"
    states = [
        (entry, index.tensors.get(model_key(fqn))) for fqn, entry in index.tensors.items() if model_key(fqn) != fqn
    ]
    parameters = [(entry, parameter) for entry, parameter in states if parameter is not None]
    if parameters and all(entry.shape == parameter.shape for entry, parameter in parameters):
        return "fully_reshardable"
    content = common.get("content_metadata")
    declared = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    if isinstance(declared, str):
        return declared
    return "fully_reshardable" if states else "unknown"


def layout_of_arguments(common: Mapping[str, Any]) -> ParallelLayout | None:
    """The layout that Megatron's stored arguments name; None without them."""
    arguments = common.get("args")
    if not isinstance(arguments, dict) or not isinstance(arguments.get(_ARGUMENTS["tp"]), int):
        return None
    sizes = {name: arguments.get(argument) for name, argument in _ARGUMENTS.items()}
    return ParallelLayout(**{name: size if isinstance(size, int) else None for name, size in sizes.items()})


def layout_of_chunks(index: CheckpointIndex) -> ParallelLayout:
    """The layout that the chunks of the model and the names of their files show."""
    return ParallelLayout(tensor_parallel(index), _pipeline_parallel(index), _expert_parallel(index))


def tensor_parallel(index: CheckpointIndex, *, of_experts: bool = False) -> int | None:
    """What most weights of attention and second layers of an MLP are divided into; those are never stored in halves."""
    votes: Counter[int] = Counter()
    for fqn, entry in index.tensors.items():
        is_of_kind = (".experts." in fqn) is of_experts and not is_optimizer_key(fqn)
        if is_of_kind and fqn.endswith(("linear_qkv.weight", "linear_proj.weight", "linear_fc2.weight")):
            votes[max(grid_of(entry)[stacked_axes(fqn, entry.shape).own :], default=1)] += 1
    return votes.most_common(1)[0][0] if votes else None


def grid_of(entry: TensorEntry) -> tuple[int, ...]:
    """The number of chunks along each axis."""
    return tuple(len({chunk.offsets[axis] for chunk in entry.chunks}) for axis in range(len(entry.shape)))


def _pipeline_parallel(index: CheckpointIndex) -> int | None:
    """Groups of layers that share no rank. A key without a number holds all layers, stacked along its first axis."""
    ranks_of_layer: dict[int, set[int]] = {}
    for fqn, entry in index.tensors.items():
        number = layer_number(fqn)
        stacked = number is None and stacked_axes(fqn, entry.shape).layer is not None
        if is_optimizer_key(fqn) or (number is None and not stacked):
            continue
        for chunk in entry.chunks:
            rank = data_file_rank(chunk.item.file)
            if rank is not None:
                layer = chunk.offsets[0] if number is None else number
                ranks_of_layer.setdefault(layer, set()).add(rank)
    groups: list[set[int]] = []
    for ranks in ranks_of_layer.values():
        touching = [group for group in groups if group & ranks]
        groups = [group for group in groups if not group & ranks]
        groups.append(set().union(ranks, *touching))
    return len(groups) or None


def _expert_parallel(index: CheckpointIndex) -> int | None:
    """Groups of experts (the axis before the last two, or the number in the key) that share no rank."""
    counts: Counter[int] = Counter()
    for fqn, entry in index.tensors.items():
        if ".experts." not in fqn or is_optimizer_key(fqn) or len(entry.shape) < 3:
            continue
        ranks: dict[int, set[int | None]] = {}
        for chunk in entry.chunks:
            ranks.setdefault(chunk.offsets[-3], set()).add(data_file_rank(chunk.item.file))
        counts[len({frozenset(group) for group in ranks.values()})] += 1
    return counts.most_common(1)[0][0] if counts else None


# --- the common state, and objects


def read_plain_state(index: CheckpointIndex) -> dict[str, Any]:
    """The common state as far as it is plain values; empty if there is none (plain DCP). Raises `LoadError`."""
    stored = stored_common_state(index)
    if stored is None:
        return {}
    return {str(key): plain(part) for key, part in plain_dict(stored).items()}


class StoredState(NamedTuple):
    """The common state as it is stored, all checksums compared."""

    where: str  # file, or key and file, for messages
    content: bytes  # an archive of `torch.save`


def stored_common_state(index: CheckpointIndex) -> StoredState | None:
    """The common state of a checkpoint; None if it has none. Raises as `read_plain_state`."""
    storage = storage_at(index.path)
    file = common_file_in_force(storage, index)
    if file is not None:
        where = storage.path(file)
        content = read_common_file(storage, file, index.manifest)
        check_content(content, where)
        return StoredState(where, content)
    entry = index.objects.get(COMMON_STATE_KEY)
    if entry is None:
        return None
    return StoredState(f"{entry.fqn} ({entry.item.file})", read_object(index, entry))


def unwrapped(value: Any) -> Any:
    """The common state out of what is stored: as an object, it is the only member of a list."""
    return value[0] if isinstance(value, list) and value else value


def plain_dict(stored: StoredState, *, with_storages: bool = False) -> dict[Any, Any]:
    """A common state as `read_plain` gives it; raises as that, and for other values than a dict."""
    value = unwrapped(read_plain(stored.content, stored.where, with_storages=with_storages))
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{stored.where}: expected a dict, got {type(value).__name__}")
    return value


def read_plain_object(index: CheckpointIndex, entry: ObjectEntry) -> Any:
    """A stored object as plain values, for display: no torch, and no class that it names. Raises `LoadError`."""
    where = f"{entry.fqn} ({entry.item.file})"
    return plain(read_plain(read_object(index, entry), where))


def read_object(index: CheckpointIndex, entry: ObjectEntry) -> bytes:
    """The bytes of a stored object, after its file's footer and all its checksums were compared. Raises `LoadError`."""
    item, where = entry.item, f"{entry.fqn} ({entry.item.file})"
    with storage_at(index.path).open_reader(item.file) as reader:
        checked_footer(index, item.file, reader)
        content = read_item(reader, item)
    check_content(content, where, item.crc32)
    return content


# A few bytes of pickle can refer to one list or text many times over; no common state has that many values.
_MAX_VALUES = 1_000_000
_CHARACTERS_OF_A_VALUE = 64


def plain(value: Any, most: int | None = None) -> Any:
    """`value` for showing and for JSON; namespaces as dicts, other objects as text, and of `most` values the first."""
    left = _MAX_VALUES if most is None else most

    def shown(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1 + (len(value) // _CHARACTERS_OF_A_VALUE if isinstance(value, str) else 0)
        if depth > 20 or left < 0:
            return "..."
        if value is None or isinstance(value, (str, int, float, bool)):
            return value
        if isinstance(value, Mapping):
            return {str(key): shown(part, depth + 1) for key, part in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [shown(part, depth + 1) for part in (value if left > len(value) else [*value][: left + 1])]
        if isinstance(value, Opaque):
            if value.name in ("argparse.Namespace", "types.SimpleNamespace") and isinstance(value.state, dict):
                return shown(value.state, depth + 1)
            if value.name == "torch._utils._rebuild_tensor_v2" and len(value.arguments) > 2:
                return f"<tensor of shape {shown(value.arguments[2], depth + 1)}>"
            simple = [part for part in value.arguments if isinstance(part, (str, int, float))]
            return f"<{value.name}{' ' + repr(simple[0]) if simple else ''}>"
        if isinstance(value, type):  # a dtype or the like, named and not called
            return value.name if issubclass(value, Opaque) else value.__name__
        return f"<{type(value).__name__}>"

    return shown(value, 0)
