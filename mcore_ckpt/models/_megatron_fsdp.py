"""A `torch_dist` checkpoint as Megatron-FSDP has one (`--ckpt-format fsdp_dtensor`): the reverse of `_megatron_named`.

    decoder.layers.mlp.linear_fc1.weight             ->  model.module.decoder.layers.3.mlp.linear_fc1.weight_w
    optimizer.state.param.KEY, or else the weight    ->  model.module.NAME
    optimizer.state.exp_avg.KEY                      ->  optimizer.state.module.module.module.NAME.exp_avg
    groups of parameters in the common state         ->  optimizer.param_to_group_meta.module.module.module.NAME.lr

Megatron-FSDP keeps one copy of the parameters, the one that its optimizer updates, and calls it the model. It has plain
DCP load that into DTensors of any sizes, so each parameter is one chunk. Names are those of
`preprocess_fsdp_dtensor_state_dict` and `DistributedOptimizer.sharded_param_state_fsdp_dtensor` (Megatron-LM 0.16 to
its main branch of August 2026).
"""

from __future__ import annotations

import re
import struct
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, parse_object_key
from mcore_ckpt.models._legacy_files import StoredModel
from mcore_ckpt.models.options import ExportOptions
from mcore_ckpt.reshard.conversion import Conversion, ConversionReport, KeyPlan, SourceFiles
from mcore_ckpt.reshard.partition import (
    EMBEDDING,
    EXTRA_STATE,
    OUTPUT,
    expert_of,
    holds_several,
    is_expert_key,
    layer_of,
)
from mcore_ckpt.reshard.plan import DividedTensor, TargetPlan, plan_torch_dist
from mcore_ckpt.reshard.view import Part, TensorView, ViewPayloads
from mcore_ckpt.reshard.weight_files import encode_state
from mcore_ckpt.tools.keys import is_optimizer_key, optimizer_layout
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled

FSDP_DTENSOR: Final = "fsdp_dtensor"

_MODEL: Final = ("model", "module.")
_STATE_KEY = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<state>[^.]+)\.(?P<key>.+)")
_MAIN_PARAMETERS = ("param", "fp32_param")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_GATED = re.compile(r"(?:.*\.)?linear_fc1\.(?:weight|bias)\d*")
# What else a job asks a checkpoint for.
_PROGRESS = ("iteration", "checkpoint_version", "num_floating_point_operations_so_far", "opt_param_scheduler")


class _Parameter(NamedTuple):
    """A parameter as its module has it, and the slice of a sharded tensor that it is."""

    name: str  # without the mark of a half
    half: str  # "_w", "_v", or nothing
    shape: tuple[int, ...]
    key: str
    slice: Box


@dataclass(slots=True)
class _Target:
    """What is going to be stored: tensors and objects by their path in the state dict."""

    tensors: dict[tuple[str, ...], TensorView] = field(default_factory=dict)
    objects: dict[tuple[str, ...], Any] = field(default_factory=dict)

    @property
    def paths(self) -> dict[str, tuple[str, ...]]:
        """Paths by the keys that DCP gives them."""
        return {".".join(path): path for path in (*self.tensors, *self.objects)}


def fsdp_export(index: CheckpointIndex, options: ExportOptions) -> Conversion:
    """A checkpoint that a job with `--use-megatron-fsdp --ckpt-format fsdp_dtensor` loads."""
    keys = [key for key in index.tensors if not is_optimizer_key(key)]
    model = StoredModel(index, keys)
    common = model.common
    arguments = common["args"]
    states = {} if options.drop_optimizer else _states(index, keys, common)
    check_tiled(index, (*keys, *(key for of_state in states.values() for key in of_state.values())))
    parameters = list(_Names(model, keys).parameters())
    target = _Target()
    rows: list[KeyPlan] = []
    for parameter in parameters:
        path = (_MODEL[0], f"{_MODEL[1]}{parameter.name}{parameter.half}")
        stored = states.get("param", {}).get(parameter.key, parameter.key)
        target.tensors[path] = _view(parameter, stored)
        rows.append(_row(index, parameter, stored, path))
    if states:
        rows += _add_optimizer(target, index, parameters, states, common)
    target.objects |= {
        ("args",): Namespace(**{**vars(arguments), "ckpt_format": FSDP_DTENSOR, "use_megatron_fsdp": True}),
        ("checkpoint_version",): 3.0,
        ("iteration",): 0,
    }
    for name in _PROGRESS:
        found = common.get(name)
        if isinstance(found, dict):
            target.objects |= {(name, str(part)): value for part, value in found.items()}
        elif found is not None:
            target.objects[(name,)] = found
    contents = {".".join(path): encode_state(value) for path, value in target.objects.items()}
    views = {".".join(path): view for path, view in target.tensors.items()}
    payloads = ViewPayloads(StoredPayloads(index), views, contents)
    return Conversion(
        payloads=payloads,
        source=SourceFiles(index),
        plan=_plan(payloads.index, target, options.workers),
        keys=lambda: rows,
        report=ConversionReport(
            format=FSDP_DTENSOR,
            objects=len(contents),
            notes=_notes(index, bool(states), arguments),
            left_out=tuple(_left_out(index, common, dropped=not states)),
        ),
    )


def _plan(index: CheckpointIndex, target: _Target, workers: int) -> TargetPlan:
    """One rank's DCP checkpoint, without Megatron's sidecars: a `metadata.json` would say `torch_dist`."""
    whole = {key: Box((0,) * len(entry.shape), entry.shape) for key, entry in index.tensors.items()}
    tensors = [DividedTensor(entry, key, (whole[key],), (0,)) for key, entry in index.tensors.items()]
    plan = plan_torch_dist(index, tensors, [(entry, 0) for entry in index.objects.values()], workers)
    assert plan.index is not None
    return replace(plan, index=replace(plan.index, planner_data=target.paths, mcore_data={}))


def _view(parameter: _Parameter, stored: str) -> TensorView:
    everything = Box((0,) * len(parameter.shape), parameter.shape)
    return TensorView(parameter.shape, (Part(everything, stored, parameter.slice),))


def _row(index: CheckpointIndex, parameter: _Parameter, stored: str, path: tuple[str, ...]) -> KeyPlan:
    transform = {"_w": "first half", "_v": "second half"}.get(parameter.half, "as it is")
    return KeyPlan(stored, 1, transform, ".".join(path), parameter.shape, index.tensors[stored].dtype)


def _notes(index: CheckpointIndex, optimizer: bool, arguments: Namespace) -> tuple[str, ...]:
    embedding, found = index.tensors.get(EMBEDDING), []
    if embedding is not None:
        tp = getattr(arguments, "tensor_model_parallel_size", 1)
        rows = f"the vocabulary has {embedding.shape[0]} rows, as at TP {tp}"
        found.append(f"{rows}; for a job that pads it otherwise, reshard the checkpoint to the job's TP first")
    if optimizer:
        found.append("weights are the optimizer's own copies, as Megatron-FSDP keeps them")
    return tuple(found)


def _left_out(index: CheckpointIndex, common: Mapping[str, Any], *, dropped: bool) -> Iterator[str]:
    if dropped and (count := sum(map(is_optimizer_key, (*index.tensors, *index.objects)))):
        yield f"{count} keys of the optimizer's state (a job is given --no-load-optim)"
    kinds = {parse.key for key in index.objects if (parse := parse_object_key(key)) is not None}
    for kind in sorted(kinds):
        if not kind.endswith(f".{EXTRA_STATE}") and kind != "common_state" and not is_optimizer_key(kind):
            yield f"{kind} (Megatron-FSDP keeps it in another form, and goes on without)"
    known = {"args", "optimizer", "content_metadata", *_PROGRESS}
    yield from (f"{name} (a job does not ask for it)" for name in common if name not in known)


# --- names


class _Names:
    """What Megatron's modules call the parameters that are stored under sharded keys."""

    def __init__(self, model: StoredModel, keys: list[str]) -> None:
        self._model, self._keys = model, keys
        self._is_gated = model.arguments.flag("swiglu")

    def parameters(self) -> Iterator[_Parameter]:
        """All parameters. Raises `OptionError` for what has no such name, `CorruptCheckpointError` for shapes that
        contradict the arguments.
        """
        for key in self._keys:
            if key == OUTPUT and self._model.is_tied:
                raise self._refused(key, "the stored arguments tie it to the embedding")
            for name, index in self._named(key):
                yield from self._halves(name, index, key)

    def _named(self, key: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names of what a stored tensor holds, and where it is along axes that count layers and experts."""
        layer = layer_of(key)
        if layer is None and key.startswith(("embedding.", "output_layer.", "decoder.final_")):
            yield key, ()
        elif layer is None or layer.before != "decoder.layers.":
            raise self._refused(key, "it is known of a decoder's layers, embedding and output layer alone")
        elif holds_several(layer.rest):
            raise self._refused(key, "modules of Mamba and of linear attention have it together with others")
        else:
            for number in [layer.number] if layer.number is not None else range(self._model.layers):
                for rest, place in self._in_layer(key, layer.rest):
                    yield f"decoder.layers.{number}.{rest}", (*(() if layer.number is not None else (number,)), *place)

    def _in_layer(self, key: str, rest: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        expert = expert_of(rest)
        if expert is None:
            if is_expert_key(f".{rest}"):
                raise self._refused(key, "experts in this form are not known here")
            yield self._model.stacking.of_module(rest), ()
            return
        for number in [expert.number] if expert.number is not None else range(self._model.experts):
            name = f"local_experts.{number}.{expert.rest}" if not self._model.is_grouped else f"{expert.rest}{number}"
            yield f"{expert.before}.{name}", () if expert.number is not None else (number,)

    def _halves(self, name: str, index: tuple[int, ...], key: str) -> Iterator[_Parameter]:
        lead, own = len(index), self._model.own_shape(key, len(index))
        halves = ("_w", "_v") if self._is_gated and _GATED.fullmatch(name) else ("",)
        if not own or own[0] % len(halves):
            if len(halves) > 1:
                raise CorruptCheckpointError(f"{self._model.index.path}: {key} {list(own)} is no pair of halves")
            halves = ("",)
        rows = own[0] // len(halves) if own else 0
        for number, half in enumerate(halves):
            sizes = (rows, *own[1:]) if own else ()
            offsets = (number * rows, *(0,) * (len(own) - 1)) if own else ()
            yield _Parameter(name, half, sizes, key, Box((*index, *offsets), (*(1,) * lead, *sizes)))

    def _refused(self, key: str, reason: str) -> OptionError:
        return OptionError(
            f"{self._model.index.path}: {key} is not written as {FSDP_DTENSOR} here: {reason}. Nothing was written"
        )


# --- the optimizer


def _states(index: CheckpointIndex, keys: list[str], common: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Stored keys of the optimizer's state by its kind (`param`: the main parameters) and by model key; empty without
    an optimizer. Raises `OptionError` for what is no Adam's, or not in the model's shapes.
    """
    found: dict[str, dict[str, str]] = {}
    for key in filter(is_optimizer_key, index.tensors):
        named = _STATE_KEY.fullmatch(key)
        state = "" if named is None else named["state"]
        kind = "param" if state in _MAIN_PARAMETERS else state
        if named is None or index.mcore_data.get(key):
            layout = optimizer_layout(index, common)
            raise OptionError(
                f"{index.path}: its optimizer state is {layout!r}; expected fully_reshardable, in the shapes of the "
                "parameters. Make it so with `mcore-ckpt reshard --optimizer-layout "
                "fully_reshardable`, or leave the optimizer out (--drop-optimizer). Nothing was written"
            )
        if kind not in ("param", *_MOMENTS):
            raise OptionError(
                f"{index.path}: {key} is no state of Adam, with which Megatron-FSDP goes on; leave the optimizer out "
                "(--drop-optimizer). Nothing was written"
            )
        found.setdefault(kind, {})[named["key"]] = key
    if not found:
        return {}
    first, second = (found.get(moment, {}) for moment in _MOMENTS)
    strange = sorted(first.keys() ^ second.keys()) or sorted((first.keys() | found.get("param", {}).keys()) - {*keys})
    strange = strange or [
        key
        for of_kind in found.values()
        for key in of_kind
        if index.tensors[of_kind[key]].shape != index.tensors[key].shape
    ]
    if strange or not first:
        what = strange[0] if strange else "all parameters"
        raise CorruptCheckpointError(
            f"{index.path}: the optimizer's state does not fit the model: of {what}, {' or '.join(_MOMENTS)} is not "
            "there, or has another shape than the parameter; leave the optimizer out (--drop-optimizer). Nothing was "
            "written"
        )
    return found


def _add_optimizer(
    target: _Target,
    index: CheckpointIndex,
    parameters: list[_Parameter],
    states: Mapping[str, Mapping[str, str]],
    common: Mapping[str, Any],
) -> list[KeyPlan]:
    """Put moments and settings into `target`; returns rows for showing."""
    rows = []
    groups = _Groups(common, index.path)
    # What stands around the model: Megatron-FSDP twice, and the module that casts inputs to 16 bits.
    arguments = common["args"]
    around = "module." * (2 + any(getattr(arguments, name, False) for name in ("bf16", "fp16")))
    noted: dict[str, Mapping[str, Any]] = {}
    for parameter in parameters:
        if parameter.key not in states[_MOMENTS[0]]:
            continue  # a buffer, or not trained
        path = ("optimizer", "state", f"{around}{parameter.name}{parameter.half}")
        for moment in _MOMENTS:
            stored = states[moment][parameter.key]
            target.tensors[(*path, moment)] = _view(parameter, stored)
            rows.append(_row(index, parameter, stored, (*path, moment)))
        if f"{around}{parameter.name}" not in noted:
            noted[f"{around}{parameter.name}"] = groups.of(parameter)
        # Torch's own AdamW keeps it so; Transformer Engine's and Apex's among the settings.
        step = struct.pack("<f", groups.step)
        target.tensors[(*path, "step")] = TensorView((), (Part(Box((), ()), None),), "float32", step)
    for name, settings in noted.items():
        target.objects |= {("optimizer", "param_to_group_meta", name, key): value for key, value in settings.items()}
    return rows


class _Groups:
    """The groups of parameters in a common state, and which parameter is in which."""

    def __init__(self, common: Mapping[str, Any], path: str) -> None:
        self._path = path
        optimizer = common.get("optimizer")
        parts: list[Any] = []
        if isinstance(optimizer, dict):
            parts = list(optimizer.values()) if all(isinstance(key, int) for key in optimizer) else [optimizer]
        self._groups: list[Mapping[str, Any]] = []
        for part in parts:
            inner = part.get("optimizer", part) if isinstance(part, dict) else {}
            groups = inner.get("param_groups") if isinstance(inner, dict) else None
            self._groups += [group for group in groups or () if isinstance(group, dict)]
        steps = {group["step"] for group in self._groups if isinstance(group.get("step"), (int, float))}
        if len(steps) != 1:
            raise self._refused(f"expected one step for all groups of parameters, got {sorted(steps) or 'none'}")
        self.step = float(steps.pop())
        self._decoupled = getattr(common.get("args"), "decoupled_lr", None) is not None

    def of(self, parameter: _Parameter) -> Mapping[str, Any]:
        """A parameter's settings, as Megatron sorts parameters: biases and vectors have no weight decay, experts and
        (with a learning rate of its own) what is next to the vocabulary are by themselves.
        """
        single = parameter.name.endswith(".bias") or len(parameter.shape) == 1
        expert = is_expert_key(f".{parameter.name}")
        vocabulary = self._decoupled and parameter.name in (EMBEDDING, OUTPUT)
        found = self._groups
        for setting, value in (
            ("is_expert_parallel", expert),
            ("is_decoupled_lr", vocabulary),
            ("wd_mult", not single),
        ):
            found = [group for group in found if bool(group.get(setting, setting == "wd_mult")) is value] or found
        settings = [{key: value for key, value in group.items() if key != "params"} for group in found]
        if any(one != settings[0] for one in settings):
            raise self._refused(f"nothing tells which of {len(settings)} groups {parameter.name} is in")
        return settings[0]

    def _refused(self, reason: str) -> OptionError:
        return OptionError(
            f"{self._path}: the optimizer's settings are not written as {FSDP_DTENSOR} here: {reason}; leave the "
            "optimizer out (--drop-optimizer). Nothing was written"
        )
