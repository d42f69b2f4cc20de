"""Names of Megatron's parameters: which part counts layers, which part counts experts, and which name belongs to which.

    decoder.layers.3.mlp.linear_fc1.weight                    a layer by number: a module's name, or a sharded key
    decoder.layers.mlp.linear_fc1.weight                      a sharded key of all layers, stacked on the first axis
    ...mlp.experts.local_experts.5.linear_fc1.weight          an expert in a module of its own
    ...mlp.experts.linear_fc1.weight5                         an expert in a grouped layer
    ...mlp.experts.experts.5.linear_fc1.weight                an expert in a sharded key
    ...mlp.experts.experts.linear_fc1.weight                  all experts, stacked on the next axis
    ...mlp.linear_fc1.weight_w                                the first half of a gated layer; `weight_v` is the second

Names of modules become sharded keys as `sharded_state_dict` of Megatron-Core makes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from mcore_ckpt.core.errors import OptionError

EMBEDDING: Final = "embedding.word_embeddings.weight"
OUTPUT: Final = "output_layer.weight"
EXTRA_STATE: Final = "_extra_state"
"""Last part of the key of an object that a layer keeps for itself."""

_LAYER = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?P<number>\d{1,9})\.(?P<rest>.+)")
_STACKED = re.compile(r"(?P<before>(?:.*\.)?layers\.)(?!\d)(?P<rest>.+)")
_EXPERT = re.compile(
    r"(?P<before>(?:.*\.)?mlp\.experts)\.(?:"
    r"local_experts\.(?P<local>\d{1,6})\.(?P<local_rest>.+)"
    r"|experts\.(?:(?P<sharded>\d{1,6})\.)?(?P<sharded_rest>.+)"
    r"|(?P<grouped_rest>linear_fc[12]\.(?:weight|bias))(?P<grouped>\d{1,6}))"
)
_HALF = re.compile(r"(.*linear_fc1\.(?:weight|bias)\d*)_([wv])")
# Mamba and linear attention: `torch_dist` has what is in these in several tensors (`in_proj.weight.z`, `.x`, ...).
_SEVERAL = re.compile(r"(?:^|\.)(?:mixer|self_attention\.(?:in_proj|conv1d))\.")

# Norms of the local layers get the names that Transformer Engine's have, which the layer behind holds.
_LOCAL_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)


class LayerName(NamedTuple):
    """A name in a layer: what stands before the layer's number (None: all layers, stacked), and behind it."""

    before: str
    number: int | None
    rest: str


class ExpertName(NamedTuple):
    """A name in an expert: the module of all experts, the expert's number (None: all, stacked), and the rest."""

    before: str
    number: int | None
    rest: str


def layer_of(name: str) -> LayerName | None:
    """What a name says about layers; None outside of layers."""
    if found := _LAYER.fullmatch(name):
        return LayerName(found["before"], int(found["number"]), found["rest"])
    if found := _STACKED.fullmatch(name):
        return LayerName(found["before"], None, found["rest"])
    return None


def expert_of(name: str) -> ExpertName | None:
    """What a name says about experts, in any of the four forms; None for everything else."""
    found = _EXPERT.fullmatch(name)
    if found is None:
        return None
    form = next(form for form in ("local", "grouped", "sharded") if found[f"{form}_rest"] is not None)
    number = found[form]
    return ExpertName(found["before"], None if number is None else int(number), found[f"{form}_rest"])


def is_expert_key(key: str) -> bool:
    """Whether a key belongs to experts that are divided among ranks (not to shared ones)."""
    return ".experts." in key


def split_half(name: str) -> tuple[str, str]:
    """A name without the mark of a half of a gated layer, and that mark: `w`, `v`, or nothing."""
    found = _HALF.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


def prefix_of(keys: Iterable[str]) -> str | None:
    """What wrappers of the model put before all its keys (`module.` in checkpoints of NeMo); None: no embedding."""
    return min((key.removesuffix(EMBEDDING) for key in keys if key.endswith(EMBEDDING)), key=len, default=None)


def holds_several(name: str) -> bool:
    """Whether a rank has in such a parameter its parts of several tensors, each divided by itself."""
    return _SEVERAL.search(name) is not None


def pattern_of(name: str) -> str:
    """A name with `*` for the numbers of layers and experts, for showing."""
    name = re.sub(r"\.(layers|local_experts)\.\d+\.", r".\1.*.", name)
    return re.sub(r"(\.experts\.linear_fc[12]\.[a-z]+)\d+$", r"\1*", name)


def local_norms(names: Iterable[str], arguments: Mapping[str, Any]) -> bool:
    """Whether modules are Megatron's own ("local") layers, whose norms get other names in sharded keys."""
    if arguments.get("multi_latent_attention"):
        return False
    if arguments.get("transformer_impl") is not None:
        return bool(arguments["transformer_impl"] == "local")
    return not any("linear_qkv.layer_norm_weight" in name for name in names)


class ShardedName(NamedTuple):
    """A sharded key; where it is along its axes that count layers and experts, and the sizes of those axes."""

    key: str
    offsets: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stacking:
    """How modules' names and sharded keys of one model of so many layers and experts (0: none) belong together.

    `stacked`: one tensor holds a parameter of all layers. `local_norms`: modules are Megatron's own layers.
    """

    layers: int
    experts: int
    stacked: bool
    local_norms: bool

    def sharded(self, name: str, first_layer: int = 0, first_expert: int = 0) -> ShardedName:
        """The sharded key of a module's parameter, whose numbers count from the first layer and expert it has.

        Raises `OptionError` for parameters that are not known here.
        """
        layer = layer_of(name)
        if layer is None:
            if "experts." in name:
                raise _unknown(name, "experts outside of layers")
            return ShardedName(name, (), ())
        if layer.before != "decoder.layers." or layer.number is None:
            raise _unknown(name, "layers other than those of a decoder (`decoder.layers.N`)")
        number, rest = first_layer + layer.number, layer.rest
        for local, fused in _LOCAL_NORMS if self.local_norms else ():
            if rest.startswith(local):
                rest = fused + rest.removeprefix(local)
        index, counts = ((number,), (self.layers,)) if self.stacked else ((), ())
        expert = expert_of(rest)
        if expert is not None and expert.number is not None:
            index, counts = (*index, first_expert + expert.number), (*counts, self.experts)
            rest = f"{expert.before}.experts.{expert.rest}"
        elif is_expert_key(f".{rest}"):
            raise _unknown(
                name,
                "experts in this form (expected `mlp.experts.local_experts.N`, or `mlp.experts.linear_fc1.weightN` of "
                "a grouped layer)",
            )
        return ShardedName(
            f"decoder.layers.{rest}" if self.stacked else f"decoder.layers.{number}.{rest}", index, counts
        )

    def of_module(self, rest: str) -> str:
        """The name in its layer that a module has for what a sharded key calls so."""
        for local, fused in _LOCAL_NORMS if self.local_norms else ():
            if rest.startswith(fused):
                return local + rest.removeprefix(fused)
        return rest


def extra_states(parameters: Iterable[ShardedName], *, engine: bool = False) -> list[ShardedName]:
    """The `_extra_state` objects that Megatron's layers ask for; without FP8 they hold nothing.

    `engine`: layers are Transformer Engine's, where norms and the core of attention have such objects, too.
    """
    found: dict[ShardedName, None] = {}
    for key, offsets, counts in parameters:
        owner, _, leaf = key.rpartition(".")
        name = owner.rpartition(".")[2]
        if leaf == "weight" and (name.startswith("linear_") or (engine and name.endswith("norm"))):
            found[ShardedName(f"{owner}.{EXTRA_STATE}", offsets or (0,), counts or (1,))] = None
        if engine and key.endswith(".self_attention.linear_proj.weight"):
            core = owner.removesuffix("linear_proj") + "core_attention"
            found[ShardedName(f"{core}.{EXTRA_STATE}", offsets or (0,), counts or (1,))] = None
    return list(found)


def _unknown(name: str, what: str) -> OptionError:
    return OptionError(
        f"{name}: {what} are not put together here. Load the checkpoint once with Megatron, and save it as torch_dist"
    )
