"""Families in files: a table in TOML, of groups that families share and of rows of its own; `--arch FILE` reads one.

A file is checked when it is read: names that nobody reads, missing ones, groups, rules and transforms that there are
not. For a model, `relate` then checks that each element of each tensor has one place on either side.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models import _decoders as decoders
from mcore_ckpt.models._rules import RULES, rules
from mcore_ckpt.models._settings import Setting, count, flag, fused_gelu, if_any, layer_count, negated, number
from mcore_ckpt.models._table import TRANSFORMS, Family, Row, Rule

SUFFIX: Final = ".toml"
_MAX_BYTES = 1024**2


class _Group(NamedTuple):
    """Rows, settings and rules that go together; `defaults` of a decoder, whose activation is SiLU unless said."""

    rows: tuple[Row, ...] = ()
    settings: tuple[Setting, ...] = ()
    rules: tuple[Rule, ...] = ()
    defaults: Mapping[str, Any] = {}


GROUPS: Mapping[str, _Group] = {
    "decoder": _Group((), decoders.DECODER_SETTINGS, rules("decoder", "layers alike"), decoders.DECODER_DEFAULTS),
    "sizes": _Group((), decoders.SIZES),
    "rms norm": _Group((), decoders.EPSILON),
    "decoder layers": _Group((), (), rules("decoder"), decoders.DECODER_DEFAULTS),
    "embedding": _Group(decoders.EMBEDDING),
    "attention": _Group(decoders.ATTENTION),
    "latent attention": _Group(decoders.LATENT_ATTENTION, decoders.LATENT_SETTINGS, rules("latent attention")),
    "qkv bias": _Group(decoders.QKV_BIAS),
    "qk norm": _Group(decoders.QK_NORM),
    "mlp": _Group(decoders.DENSE_MLP),
    "experts": _Group(decoders.GATED_EXPERTS, (decoders.INNER_OF_EXPERTS, decoders.CHOSEN_EXPERTS)),
    "shared experts": _Group(decoders.SHARED_EXPERTS, (), rules("shared experts")),
    "sigmoids": _Group((decoders.ROUTER_BIAS,), (decoders.ROUTED_EXPERTS,), rules("scaled weights", "sigmoids")),
    **{
        name: _Group(rules=rules(name))
        for name in (
            *("rotary", "partly rotary", "yarn", "layers without positions", "window", "window of some layers"),
            *("heads", "layers alike", "first dense layers", "listed dense layers", "multi-token prediction"),
        )
    },
}
"""What a file names in `groups`. What depends on others stands behind them."""


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
    **dict.fromkeys("groups tensors settings parts derived".split(), list),
    **dict.fromkeys("defaults allowed constants".split(), dict),
    "default": object,
}
_LAYERS = {"dense layer", "expert layer", "latent queries", "whole queries"}
_ENGINE = re.compile(r"(?:[\w.]|\{layer\}|\{expert\})+")
_PART = re.compile(r"(?:[\w.]|\{layer\}|\{expert\})+ \[[\w ,]+\]")
# Sizes that others are computed from.
_SIZES = {"experts": ("expert ffn",), "kv rank": ("head without positions", "positions", "value")}


def families_in(directory: Path) -> Iterator[Family]:
    """The families of a directory, in the order of their names; none where nothing reads TOML."""
    if importlib.util.find_spec(_parser()):
        for path in sorted(directory.glob(f"*{SUFFIX}")):
            yield family_in(path)


def lacking_parser() -> str:
    """Words for a message about families that are not known, where nothing reads TOML."""
    name = _parser()
    return "" if importlib.util.find_spec(name) else f"; those of tables need {name}, which is not installed"


def _parser() -> str:
    return "tomllib" if sys.version_info >= (3, 11) else "tomli"


def family_in(path: Path) -> Family:
    """The family in a file; raises `OptionError` and `OSError`."""
    try:
        toml = importlib.import_module(_parser())
    except ImportError:
        raise OptionError(f"{path}: Python 3.10 reads tables with tomli: pip install tomli") from None
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise OptionError(f"{path}: no table has more than {_MAX_BYTES} bytes")
    try:
        table = toml.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path}: no TOML: {error}") from None
    return _family(table, str(path))


def _family(table: Any, where: str) -> Family:
    optional = "traits may_have tensors settings defaults allowed constants derived optional_prefix"
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
    loaded = decoders.as_loaded(everything)
    if RULES["multi-token prediction"] in applied:
        everything = decoders.predicting(everything)
    allowed = {**(decoders.SILU if defaults else {}), **found.get("allowed", {})}
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
        defaults={**defaults, **found.get("defaults", {})},
        allowed={name: tuple(values) for name, values in allowed.items()},
        constants=found.get("constants", {}),
        traits=found.get("traits", ""),
        may_have=found.get("may_have", ""),
        derived=(*decoders.BUFFERS, *found.get("derived", ())),
        optional_prefix=found.get("optional_prefix", ""),
    )


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
    return decoders.row(found["megatron"], *found["parts"], how=how, when=when, engine=found.get("engine"))


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
