"""The state of an Adam optimizer of another framework, as Megatron's distributed optimizer keeps it.

    optim.state.NAME.exp_avg, .exp_avg_sq    ->  optimizer.state.exp_avg.KEY, optimizer.state.exp_avg_sq.KEY
    the weights, in float32                  ->  optimizer.state.param.KEY
    step, betas, eps, weight decay           ->  groups of parameters in the common state

Megatron has one step and one pair of betas for all parameters, and keeps everything in float32. What does not fit is
left out as a whole, with the reason: half of an optimizer's state is none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_ckpt.convert._foreign_names import is_foreign_optimizer_key, without_wrappers
from mcore_ckpt.core.errors import CheckpointError, CorruptCheckpointError
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.tools.dtype_cast import as_numbers
from mcore_ckpt.tools.payloads import StoredPayloads, read_box
from mcore_ckpt.tools.plain_state import read_plain_object

__all__ = ["OptimizerPlan", "OptimizerSettings", "plan_optimizer", "stored_settings"]

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "step")
# Of torch's optimizers; and of Megatron-FSDP, which notes the settings of a group for each of its parameters.
_GROUP = re.compile(r"(?:^|\.)(?:param_groups|param_to_group_meta)\.")
_MOST_OBJECTS = 100_000


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """What an optimizer stores beside its moments.

    Attributes:
        steps: of all parameters that have one.
        groups: settings of each group of parameters, by name.
    """

    steps: tuple[float, ...] = ()
    groups: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """What is carried.

    Attributes:
        states: for each state by Megatron's name the stored keys, by the model's names; empty if nothing is carried.
        common: what goes into the common state.
        left_out: what is not carried, and why.
    """

    states: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def stored_settings(payloads: StoredPayloads, directory: Path) -> OptimizerSettings:
    """Settings in a DCP checkpoint: tensors `...step`, objects `...param_groups.GROUP.betas` and the like."""
    keys = [key for key in payloads.index.tensors if is_foreign_optimizer_key(key)]
    if not keys:
        return OptimizerSettings()
    steps = []
    for key in keys:
        entry = payloads.index.tensors[key]
        if key.endswith(".step") and entry.shape in ((), (1,)):
            numbers = as_numbers(read_box(payloads, entry, (0,) * len(entry.shape), entry.shape), entry.dtype)
            steps += [] if numbers is None else [float(numbers[0])]
    index = read_index(directory)
    groups: dict[str, dict[str, Any]] = {}
    for key in list(index.objects)[:_MOST_OBJECTS]:
        group, _, name = key.rpartition(".")
        if name in _SETTINGS and _GROUP.search(group) and is_foreign_optimizer_key(key):
            groups.setdefault(group, {})[name] = read_plain_object(index, index.objects[key])
    if not steps:
        noted = [group.get("step") for group in groups.values()]
        steps = [float(step) for step in noted if isinstance(step, (int, float)) and not isinstance(step, bool)]
    return OptimizerSettings(tuple(steps), tuple(groups.values()))


def plan_optimizer(
    index: CheckpointIndex, names: Mapping[str, str], settings: OptimizerSettings, *, experts: bool
) -> OptimizerPlan:
    """Which states are carried.

    Args:
        index: of what is stored.
        names: stored keys of the parameters, by the model's names.
        settings: what is stored beside the moments.
        experts: whether the model has some, whose parameters Megatron gives an optimizer of their own.
    """
    keys = [key for key in index.tensors if is_foreign_optimizer_key(key)]
    if not keys:
        return OptimizerPlan()
    states: dict[str, dict[str, str]] = {moment: {} for moment in _MOMENTS}
    others = []
    for key in keys:
        parameter, _, leaf = without_wrappers(key).rpartition(".")
        name = _suffix(parameter, names)
        if leaf in states and name is not None and name not in states[leaf]:
            states[leaf][name] = key
        elif leaf != "step":
            others.append(key)
    reason = _why_not(index, names, states, experts)
    groups: list[dict[str, Any]] = []
    if not reason:
        try:
            groups = _groups(settings)
        except CheckpointError as error:
            reason = str(error)
    if reason:
        return OptimizerPlan(left_out=(f"{len(keys)} tensors of the optimizer's state ({reason})",))
    common = {
        "optimizer": {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"},
        "content_metadata": {
            "distrib_optim_sharding_type": "fully_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        },
    }
    left_out = tuple(f"{key} (Megatron's optimizer keeps no such state)" for key in others)
    return OptimizerPlan({"param": dict(names), **states}, common, left_out)


def _suffix(key: str, names: Mapping[str, str]) -> str | None:
    """The longest end of a key, from a dot on, that is a name."""
    at = 0
    while key[at:] not in names:
        at = key.find(".", at) + 1
        if not at:
            return None
    return key[at:]


def _why_not(
    index: CheckpointIndex, names: Mapping[str, str], states: Mapping[str, Mapping[str, str]], experts: bool
) -> str:
    """What keeps the moments from being carried; empty if nothing does."""
    if experts:
        return "experts have an optimizer of their own in Megatron"
    for moment, found in states.items():
        missing = sorted(names.keys() - found.keys())
        if missing:
            return f"{len(missing)} of {len(names)} parameters have no {moment}, the first {missing[0]}"
        for name, key in found.items():
            entry, parameter = index.tensors[key], index.tensors[names[name]]
            if entry.shape != parameter.shape:
                return f"{key} has the shape {list(entry.shape)}, its parameter {list(parameter.shape)}"
    for key in (*names.values(), *(key for found in states.values() for key in found.values())):
        if index.tensors[key].dtype != "float32":
            return f"{key} is stored as {index.tensors[key].dtype}; Megatron's optimizer keeps float32"
    return ""


def _groups(settings: OptimizerSettings) -> list[dict[str, Any]]:
    """Megatron's groups of parameters: with weight decay, and without; raises `CorruptCheckpointError`."""
    steps = set(settings.steps)
    if len(steps) != 1 or not (step := steps.pop()).is_integer():
        shown = ", ".join(f"{step:g}" for step in sorted(settings.steps)[:3]) or "none"
        raise CorruptCheckpointError(f"expected one step for all parameters, got {shown}")
    betas = _same([_numbers(group.get("betas"), 2) for group in settings.groups], "betas")
    (epsilon,) = _same([_numbers([group.get("eps")], 1) for group in settings.groups], "eps")
    rates = [_numbers([group.get("lr")], 1)[0] for group in settings.groups]
    decays = [_numbers([group.get("weight_decay", 0.0)], 1)[0] for group in settings.groups]
    return [
        {
            "lr": max(rates),
            "betas": tuple(betas),
            "eps": epsilon,
            "weight_decay": max(decays) * with_decay,
            "wd_mult": with_decay,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "bias_correction": True,
            "step": int(step),
        }
        for with_decay in (1.0, 0.0)
    ]


def _numbers(values: Any, count: int) -> tuple[float, ...]:
    plain = isinstance(values, (list, tuple)) and len(values) == count
    if not plain or not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        raise CorruptCheckpointError("the groups of parameters do not say lr, betas and eps in numbers")
    return tuple(map(float, values))


def _same(found: Sequence[Iterable[float]], name: str) -> list[float]:
    different = {tuple(values) for values in found}
    if len(different) != 1:
        raise CorruptCheckpointError(f"expected the same {name} for all groups of parameters, got {len(different)}")
    return list(different.pop())
