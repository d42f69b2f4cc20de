"""The families of models that there are, and which one a model belongs to. A family is a table, of parameters and of
settings: a file of TOML in `families`, or that of `--arch FILE`. It names groups that families share (`_decoders`), and
has rows of its own; rules there have what no row says: YaRN, windows, groups of experts.

A file is checked when it is read: names that nobody reads, missing ones, groups, rules and transforms that there are
not. For a model, `relate` then checks that each element of each tensor has one place on either side.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.options import local_path
from mcore_ckpt.models._decoders import (
    BUFFERS,
    GROUPS,
    RULES,
    SILU,
    as_loaded,
    predicting,
    row_of,
)
from mcore_ckpt.models._settings import (
    Setting,
    count,
    flag,
    fused_gelu,
    if_any,
    layer_count,
    negated,
    number,
    setting,
)
from mcore_ckpt.models._table import TRANSFORMS, Family, Row, Rule

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# --- tables in files

SUFFIX: Final = ".toml"
_MAX_BYTES = 1024**2


def _inner_of_gpt2(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """The inner size of the MLP: four times the hidden size, where nothing is said."""
    return count(config, name, 4 * count(config, "n_embd" if "n_embd" in config else "hidden_size"))


KINDS: Mapping[str, Any] = {
    "count": count,
    "layers": layer_count,
    "number": number,
    "flag": flag,
    "not": negated,
    "count or none": if_any,
    "count or four times n_embd": _inner_of_gpt2,
    **{f"fused {kind}": fused_gelu(kind) for kind in ("gelu_new", "gelu_pytorch_tanh")},
}
_TYPES: Mapping[str, type] = {
    **dict.fromkeys("groups tensors settings parts derived others".split(), list),
    **dict.fromkeys("defaults allowed constants".split(), dict),
    "default": object,
}
_LAYERS = {"dense layer", "expert layer", "latent queries", "whole queries"}
_ENGINE = re.compile(r"(?:[\w.]|\{layer\}|\{expert\})+")
_PART = re.compile(r"(?:[\w.]|\{layer\}|\{expert\})+ \[[\w ,]+\]")
# Sizes that others are computed from.
_SIZES = {"experts": ("expert ffn",), "kv rank": ("head without positions", "positions", "value")}


def family_in(path: Path) -> Family:
    """The family in a file; raises `OptionError` and `OSError`."""
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise OptionError(f"{path}: no table has more than {_MAX_BYTES} bytes")
    try:
        table = tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path}: no TOML: {error}") from None
    return _family(table, str(path))


def _family(table: Any, where: str) -> Family:
    optional = "traits may_have tensors settings defaults allowed constants derived optional_prefix others"
    found = _fields(table, "name architecture groups", optional, where)
    rows: dict[str, list[Row]] = {}
    settings: list[Setting] = []
    applied: list[Rule] = []
    defaults: dict[str, Any] = {}
    for given in found["groups"]:
        one = {"group": given} if isinstance(given, str) else given
        one = _fields(one, "group", "when", f"{where}: groups")
        group = GROUPS[_one_of(one["group"], GROUPS, "group", where)]
        for row in group.rows:
            when = (*row.when, *_words(one))
            rows.setdefault(row.megatron, []).append(replace(row, when=when))
        settings += group.settings
        applied += group.rules
        defaults |= group.defaults
    own = [_row(row, f"{where}: tensors[{number}]") for number, row in enumerate(found.get("tensors", ()))]
    for row in own:  # in the place of the groups' row, if there is one
        rows[row.megatron] = [other for other in own if other.megatron == row.megatron]
    settings += [_setting(row, f"{where}: settings[{number}]") for number, row in enumerate(found.get("settings", ()))]
    everything = tuple(row for several in rows.values() for row in several)
    loaded = as_loaded(everything)
    if RULES["multi-token prediction"] in applied:
        everything = predicting(everything)
    allowed = {**(SILU if defaults else {}), **found.get("allowed", {})}
    _check(everything, settings, where)
    sizes, given = {row.size for row in settings}, {row.megatron.split()[0] for row in settings}
    if RULES["shared experts"] in applied and not sizes & {"shared ffn", "expert ffn"}:
        raise OptionError(f"{where}: groups: shared experts need a setting with the size 'expert ffn' or 'shared ffn'")
    if both := sorted(given & found.get("constants", {}).keys()):
        raise OptionError(f"{where}: constants.{both[0]}: a setting gives it, too")
    for name, values in allowed.items():
        if not isinstance(values, list | tuple) or not values:
            raise OptionError(f"{where}: allowed.{name}: expected a list of values, the usual one first")
    return Family(
        name=found["name"],
        architecture=found["architecture"],
        rows=everything,
        loaded=loaded,
        settings=tuple(settings),
        rules=tuple(applied),
        defaults={**defaults, **{name: _value(one) for name, one in found.get("defaults", {}).items()}},
        allowed={name: tuple(map(_value, values)) for name, values in allowed.items()},
        constants=found.get("constants", {}),
        traits=found.get("traits", ""),
        may_have=found.get("may_have", ""),
        derived=(*BUFFERS, *found.get("derived", ())),
        optional_prefix=found.get("optional_prefix", ""),
        others=tuple(found.get("others", ())),
    )


def _value(given: Any) -> Any:
    """The value of a setting; TOML has no word for none."""
    return None if given == "null" else given


def _row(table: Any, where: str) -> Row:
    found = _fields(table, "megatron parts", "how when engine", where)
    for text in (f"{found['megatron']} [1]", *found["parts"]):
        if not isinstance(text, str) or not _PART.fullmatch(text):
            raise OptionError(
                f"{where}: {text!r:.80}: expected a key and a shape, as in 'lm_head.weight [vocab, hidden]'"
            )
    how = _one_of(found.get("how", "same"), TRANSFORMS, "transform", where)
    when = ", ".join(_words(found))
    if not _ENGINE.fullmatch(found.get("engine", "same")):
        raise OptionError(f"{where}: engine={found['engine']!r:.80}: expected a key")
    return row_of(found["megatron"], *found["parts"], how=how, when=when, engine=found.get("engine"))


def _setting(table: Any, where: str) -> Setting:
    found = _fields(table, "config megatron", "kind default size", where)
    read = KINDS[_one_of(found.get("kind", "count"), KINDS, "kind", where)]
    if not found["config"].strip() or not found["megatron"].strip():
        raise OptionError(f"{where}: expected a name on either side")
    return Setting(found["config"], found["megatron"], read, found.get("default"), found.get("size", ""))


def _fields(table: Any, required: str, optional: str, where: str) -> dict[str, Any]:
    """The fields of a table; raises `OptionError` for a missing or unknown one, or one of another type."""
    names, more = required.split(), optional.split()
    if not isinstance(table, dict):
        raise OptionError(f"{where}: {table!r:.80}: expected a table of {', '.join(names + more)}")
    unknown, missing = sorted(table.keys() - {*names, *more}), [name for name in names if name not in table]
    if unknown or missing:
        what = f"{unknown[0]!r:.80} is not known" if unknown else f"{missing[0]!r} is missing"
        raise OptionError(f"{where}: {what}; expected {', '.join(names)}, and perhaps {', '.join(more)}")
    for name, value in table.items():
        wanted = _TYPES.get(name, str)
        if not isinstance(value, wanted) or (name in names and not value):
            raise OptionError(f"{where}: {name}={value!r:.80}: expected {'text' if wanted is str else wanted.__name__}")
    return table


def _one_of(name: Any, known: Mapping[str, Any], what: str, where: str) -> str:
    if name not in known:
        raise OptionError(f"{where}: {what} {name!r:.80}: expected one of {', '.join(known)}")
    return str(name)


def _words(found: Mapping[str, Any]) -> list[str]:
    return [word.strip() for word in found.get("when", "").split(",") if word.strip()]


def _check(rows: tuple[Row, ...], settings: list[Setting], where: str) -> None:
    """Raise `OptionError` for words that no setting gives, and settings that another one lacks."""
    sizes = {row.size for row in settings}
    wanted = {"vocab", "hidden", "layers", "heads"}
    wanted |= {size for name in sizes & _SIZES.keys() for size in _SIZES[name]}
    if missing := sorted(wanted - sizes):
        raise OptionError(f"{where}: no setting has the size {', '.join(missing)}")
    if unknown := sorted({word for row in rows for word in row.when} - sizes - _LAYERS):
        raise OptionError(f"{where}: when = {unknown[0]!r:.80}: no setting has this as its size, and no layer is so")
    read: dict[str, Setting] = {}
    for row in settings:
        first = read.setdefault(row.megatron.split()[0], row)
        if first[2:] != row[2:] or (row.size and first is not row):  # two kinds of dropout may be one of Megatron's
            raise OptionError(f"{where}: two settings give {row.megatron.split()[0]}")


# --- which family a model belongs to

FAMILIES: tuple[Family, ...] = tuple(map(family_in, sorted((Path(__file__).parent / "families").glob(f"*{SUFFIX}"))))
"""In the order in which arguments are compared with them."""

_TRAITS = (
    "num_experts multi_latent_attention qk_layernorm add_qkv_bias add_bias_linear window_size moe_shared_expert_gate "
    "moe_shared_expert_intermediate_size layernorm_zero_centered_gamma scale_embeddings_by_hidden_size "
    "no_rope_freq rotary_interleaved"
).split()
_GATES = "swiglu quick_geglu gated_linear_unit squared_relu".split()


def traits_of(arguments: Mapping[str, Any]) -> set[str]:
    """Words in Megatron's arguments by which families differ; how experts are rated, unless by the usual softmax."""
    values = {name: arguments.get(name) for name in _TRAITS}
    found = {name for name, value in values.items() if (any(value) if isinstance(value, list) else value)}
    found |= {str(arguments.get("normalization")), next((name for name in _GATES if arguments.get(name)), "plain")}
    if arguments.get("position_embedding_type") == "learned_absolute":
        found.add("learned_absolute")
    rated = str(setting(arguments, "moe_router_score_function", default="softmax"))
    if arguments.get("multi_latent_attention") or (arguments.get("num_experts") and rated != "softmax"):
        found.add(rated)
    return found


def family_named(name: str) -> Family:
    """A family by its name, or by the file that has its table; raises `OptionError`."""
    if name.endswith(SUFFIX):
        return family_in(local_path(name))
    for family in FAMILIES:
        if family.name == name:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise OptionError(f"arch {name!r}: expected auto, FILE{SUFFIX} with a table, or one of {known}")


def family_of_config(config: Mapping[str, Any], where: str, name: str = "auto") -> Family:
    """The family that a `config.json` names, unless it has another `name`; raises `OptionError`."""
    if name != "auto":
        return family_named(name)
    kind = config.get("model_type")
    for family in FAMILIES:
        if kind == family.model_type or kind in family.others:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise OptionError(
        f"{where}: model_type {kind!r:.80} is not known here; expected one of {known}, or a table "
        f"of its own (--arch FILE{SUFFIX}; docs/huggingface.md)"
    )


def family_of_arguments(arguments: Mapping[str, Any], where: str, name: str = "auto") -> Family:
    """The family that Megatron's arguments describe, unless it has another `name`; raises `OptionError`."""
    if name != "auto":
        return family_named(name)
    found = traits_of(arguments)
    for family in FAMILIES:
        if family.traits and {*family.traits.split()} <= found <= {*family.traits.split(), *family.may_have.split()}:
            return family
    raise OptionError(
        f"{where}: its stored arguments are those of no family known here; name one (--arch) or give the model's "
        "config.json (--hf-config)"
    )
