"""What other frameworks have for what Megatron has: names of parameters, and the optimizer's state.

Names. A checkpoint of `torch.distributed.checkpoint` holds whatever state dict was given to it: `model.layers.0...`,
`app.model.model.layers.0...`, `module.model.layers.0...`. So no prefix is known beforehand; it is what stands before
the names that a model has in most keys.

The state of an Adam optimizer, as Megatron's distributed optimizer keeps it:

    optim.state.NAME.exp_avg, .exp_avg_sq    ->  optimizer.state.exp_avg.KEY, optimizer.state.exp_avg_sq.KEY
    the weights, in float32                  ->  optimizer.state.param.KEY
    step, betas, eps, weight decay           ->  groups of parameters in the common state

Megatron has one step and one pair of betas for all parameters, and keeps everything in float32. What does not fit is
left out completely, with the reason: half of an optimizer's state is of no use.

And the last step of all imports: from payloads of a source to the plan of a `torch_dist` checkpoint.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_ckpt.core.errors import CheckpointError, CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import COMMON_FILE, CONFIG_FILE, encode_config, read_index
from mcore_ckpt.models.options import ImportOptions
from mcore_ckpt.reshard.conversion import Conversion, ConversionReport, KeyPlan, SourceFiles, in_dtype
from mcore_ckpt.reshard.options import PartitionRule
from mcore_ckpt.reshard.partition import Partitioner
from mcore_ckpt.reshard.plan import TargetLayout, make_plan
from mcore_ckpt.reshard.target_directory import Target
from mcore_ckpt.reshard.view import TensorView, ViewPayloads
from mcore_ckpt.reshard.weight_files import encode_state
from mcore_ckpt.tools.keys import read_plain_object
from mcore_ckpt.tools.payloads import StoredPayloads, read_box
from mcore_ckpt.tools.regrid import as_numbers

# --- names

# Bytes of tensors that are compared at a time.
_COMPARED_BYTES = 4 * 1024**2
# Put into names by wrappers of modules: torch.compile, activation checkpointing, FSDP.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_OPTIMIZER = re.compile(r"(?:^|\.)(?:optim|optimizers?|chained_\d+)\.")


def is_foreign_optimizer_key(key: str) -> bool:
    """Whether a key belongs to an optimizer's state, whatever stands before it."""
    return _OPTIMIZER.search(key) is not None


def without_wrappers(key: str) -> str:
    """A key without what wrappers of modules put into it."""
    return _WRAPPERS.sub("", key)


def plain_names(keys: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """All stored keys (without the optimizer's) by the names that a model has for them. An unknown key goes without
    wrappers and without the prefix of most known ones, or as stored if that is taken.
    """
    bare = {key: without_wrappers(key) for key in keys}
    found: Counter[str] = Counter()
    for name in bare.values():
        if (end := _suffix(name, known)) is not None:
            found[name.removesuffix(end)] += 1
    prefix = min(found, key=lambda text: (-found[text], len(text)), default="")
    names: dict[str, str] = {}
    for key, name in bare.items():
        new = name.removeprefix(prefix)
        names[key if new in names else new] = key
    return names


def refuse_another(payloads: StoredPayloads, key: str, embedding: str, said: str) -> None:
    """Raise `OptionError` where an output layer that is to be tied to the embedding (as `said`) holds other values."""
    entries = payloads.index.tensors[key], payloads.index.tensors[embedding]
    differs = "it has another shape" if entries[0].shape != entries[1].shape else ""
    rows, *own = entries[0].shape
    step = max(1, _COMPARED_BYTES // max(1, math.prod(own) * 8))
    for start in range(0, 0 if differs else rows, step):
        sizes = (min(step, rows - start), *own)
        found = [read_box(payloads, entry, (start, *(0 for _ in own)), sizes) for entry in entries]
        if entries[0].dtype == entries[1].dtype:
            same = found[0] == found[1]
        else:
            mine, theirs = (as_numbers(part, entry.dtype) for part, entry in zip(found, entries, strict=True))
            same = mine is not None and theirs is not None and bool((mine == theirs).all())
        if not same:
            differs = f"first in rows [{start}, {start + sizes[0]})"
            break
    if differs:
        raise OptionError(
            f"{payloads.index.path}: {key} is not {embedding} ({differs}), though {said}: which of the two the model "
            "computes with is not known. Say that they are not tied, or remove the one that is not meant. Nothing was "
            "written"
        )


# --- the optimizer's state

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "step")
# Groups of torch's optimizers; and of Megatron-FSDP, which notes the settings of a group for each of its parameters.
_GROUP = re.compile(r"(?:^|\.)(?:param_groups|param_to_group_meta)\.")
_MOST_OBJECTS = 100_000


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """What an optimizer stores besides its moments: the steps of its parameters, settings by group."""

    steps: tuple[float, ...] = ()
    groups: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class OptimizerPlan:
    """What is carried of an optimizer; `states`: by Megatron's name the stored keys, by the model's names. Without
    states, `left_out` says why. `step` is how often the parameters were updated.
    """

    states: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Training:
    """How far a training was, by Megatron's own names, as far as that is stored. `schedule`: of learning rate and
    weight decay (`opt_param_scheduler`); `operations` counts floating-point ones.
    """

    iteration: int = 0
    schedule: Mapping[str, Any] = field(default_factory=dict)
    operations: float = 0


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


def others_than_settings(keys: Iterable[str]) -> Iterator[str]:
    """Keys of objects without the settings that are taken; of the others one for each name, with how many there are."""
    counts: Counter[tuple[str, str]] = Counter()
    for key in keys:
        group, _, name = key.rpartition(".")
        found = _GROUP.search(group)
        if found is None or not is_foreign_optimizer_key(key):
            yield key
        elif name not in _SETTINGS:
            counts[group[: found.end()], name] += 1
    yield from (f"{groups}*.{name} of {count} parameters or groups" for (groups, name), count in counts.items())


def plan_optimizer(
    index: CheckpointIndex, names: Mapping[str, str], settings: OptimizerSettings, apart: Mapping[str, str]
) -> OptimizerPlan:
    """Which states are carried; `names` are stored keys of the parameters, by the model's names. `apart`: Megatron's
    keys of experts' parameters if experts are on several ranks, where those have an optimizer of their own.
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
    reason = _why_not(index, names, states)
    groups: list[dict[str, Any]] = []
    if not reason:
        try:
            groups = _groups(settings)
        except CheckpointError as error:
            reason = str(error)
    if reason:
        return OptimizerPlan(left_out=(f"{len(keys)} tensors of the optimizer's state ({reason})",))
    kinds = {not key.endswith(".bias") for key in apart.values()}  # with weight decay, or without
    of_experts = [{**group, "is_expert_parallel": True} for group in groups if bool(group["wd_mult"]) in kinds]
    optimizers = [
        {"optimizer": {"param_groups": own}, "param_state_sharding_type": "fully_reshardable"}
        for own in (groups, of_experts)
        if own
    ]
    common = {
        "optimizer": dict(enumerate(optimizers)) if apart else optimizers[0],
        "content_metadata": {
            "distrib_optim_sharding_type": "fully_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        },
    }
    left_out = tuple(f"{key} (Megatron's optimizer keeps no such state)" for key in others)
    return OptimizerPlan({"param": dict(names), **states}, common, groups[0]["step"], left_out)


# What a job asks a stored schedule for; but for the last one, it can be told to take its own.
_SCHEDULE = ("max_lr", "min_lr", "lr_warmup_steps", "lr_decay_steps", "lr_decay_style", "num_steps")


def launch_state(
    optimizer: OptimizerPlan, training: Training, arguments: Mapping[str, Any], batch: int | None
) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """What a job needs besides tensors to resume: for the common state, for the arguments, and what is good to know.
    `batch`: its `--global-batch-size`, where nothing stored tells how many samples there were.
    """
    iteration, notes = training.iteration, tuple[str, ...]()
    if optimizer.states and not iteration and batch is not None:
        iteration = optimizer.step
    samples = arguments.get("consumed_train_samples")
    if not isinstance(samples, int) or (not samples and batch is not None):
        known = batch if batch is not None else arguments.get("global_batch_size")
        samples = iteration * known if isinstance(known, int) else 0
    common: dict[str, Any] = {
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": training.operations,
        **optimizer.common,
    }
    if optimizer.states:
        schedule = {name: value for name, value in training.schedule.items() if value is not None}
        if not set(_SCHEDULE) <= schedule.keys():
            schedule = {**dict.fromkeys(_SCHEDULE), **schedule, "num_steps": schedule.get("num_steps", samples)}
            told = f"a job resumes at iteration {iteration}, after {samples} samples, by its own one"
            notes = (f"no schedule of the learning rate is stored: {told} (--override-opt_param-scheduler)",)
        common["opt_param_scheduler"] = schedule
    # Other frameworks keep no random states as Megatron does; so said, a job does not look for them.
    more = {"consumed_train_samples": samples, "no_save_rng": True}
    more |= {} if "consumed_valid_samples" in arguments else {"consumed_valid_samples": 0}
    return common, more, notes


def _suffix(key: str, names: Collection[str]) -> str | None:
    """The longest end of a key, from a dot on, that is a name."""
    at = 0
    while key[at:] not in names:
        at = key.find(".", at) + 1
        if not at:
            return None
    return key[at:]


def _why_not(index: CheckpointIndex, names: Mapping[str, str], states: Mapping[str, Mapping[str, str]]) -> str:
    """What keeps the moments from being carried; empty if nothing does."""
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


# --- the plan of an import

_UNDIVIDED = TargetLayout(1, 1)


def layout_of(options: ImportOptions, source: TargetLayout = _UNDIVIDED) -> TargetLayout:
    """The sizes together, as the source has them where nothing was said; raises `OptionError` where they cannot be."""
    etp = options.etp if options.etp is not None or options.tp is not None else source.etp
    tp, pp, ep = (
        own if size is None else size
        for size, own in ((options.tp, source.tp), (options.pp, source.pp), (options.ep, source.ep))
    )
    return TargetLayout(tp, pp, ep, etp)


def import_conversion(
    payloads: StoredPayloads,
    options: ImportOptions,
    layout: TargetLayout,
    arguments: Mapping[str, Any],
    common: Callable[[set[str]], bytes],
    *,
    format: str,
    keys: Callable[[], Iterable[KeyPlan]],
    tensors: Mapping[str, TensorView] | None = None,
    objects: Mapping[str, Any] | None = None,
    rules: tuple[PartitionRule, ...] = (),
    **more: Any,
) -> Conversion:
    """Plan the target of an import. `common` gives the content of `common.pt` for the dtypes of the target's tensors.
    `tensors` of the target: None for those of the source; `more`: further fields of `ConversionReport`.
    """
    files = SourceFiles(payloads.index)
    if tensors is not None:
        # Many of the objects are one and the same.
        contents = {id(value): encode_state(value) for value in (objects or {}).values()}
        payloads = ViewPayloads(payloads, tensors, {key: contents[id(value)] for key, value in (objects or {}).items()})
    payloads = in_dtype(payloads, options.dtype)
    index = payloads.index
    partitioner = Partitioner(index, rules=rules, arguments=arguments, chunks_tell=tensors is None)
    is_asked = any(size is not None for size in (options.tp, options.pp, options.ep, options.etp))
    plan = make_plan(
        index,
        layout,
        partitioner,
        workers=options.workers,
        arguments=arguments,
        allow_whole=options.allow_whole or not is_asked,
    )

    def carry(target: Target) -> None:
        target.put(CONFIG_FILE, encode_config())
        target.put(COMMON_FILE, common({entry.dtype for entry in index.tensors.values()}))

    return Conversion(
        payloads=payloads,
        source=files,
        plan=plan.target,
        keys=keys,
        report=ConversionReport(
            format=format, target_layout=str(plan), arguments=arguments, objects=len(objects or ()), **more
        ),
        carry=carry,
        carried=(CONFIG_FILE, COMMON_FILE),
    )
