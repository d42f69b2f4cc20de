"""Settings of models, as `config.json` has them and as Megatron's arguments do.

Both come from files that are not trusted: each number is checked before it is used. What Megatron-Core has no layer
for is refused. The other direction only translates: `compare_settings` translates what it gives back, and compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mcore_ckpt.core.errors import OptionError

_MOST = 2**40
MOST_LAYERS = 100_000


def count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A positive whole number of a configuration; raises `OptionError`."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MOST:
        raise OptionError(f"{name}={value!r:.80}: expected a positive whole number in the model's configuration")
    return value


def number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A number of a configuration; raises `OptionError`."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MOST < value < _MOST:
        raise OptionError(f"{name}={value!r:.80}: expected a number in the model's configuration")
    return value


def layer_count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """How many layers; raises `OptionError` for more than any model has, before something is made for each."""
    layers = count(config, name, default)
    if layers > MOST_LAYERS:
        raise OptionError(f"{name}={layers}: no model has that many")
    return layers


def setting(arguments: Mapping[str, Any], *names: str, default: Any = None) -> Any:
    """The first of some arguments that is there and not None: versions of Megatron call some things differently."""
    return next((arguments[name] for name in names if arguments.get(name) is not None), default)


def negated(config: Mapping[str, Any], name: str, default: Any = None) -> bool:
    """Whether a setting says no, which is what its absence says."""
    return not config.get(name)


def flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Whether a setting says yes; raises `OptionError` for anything else than yes or no."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r:.80}: expected true or false in the model's configuration")
    return value


def if_any(config: Mapping[str, Any], name: str, default: Any = None) -> int | None:
    """As `count`, where the model has something of the kind."""
    return None if config.get(name) is None else count(config, name)


def fused_gelu(approximation: str) -> Callable[..., Any]:
    """A reader of the kind of GELU, and of whether Megatron-Core's is fused, which computes the approximation."""

    def read(config: Mapping[str, Any], name: str, default: bool = True) -> bool | str:
        value = config.get(name, default)
        if isinstance(value, str):
            return value != "gelu"
        return approximation if value or value is None else "gelu"

    return read


class Setting(NamedTuple):
    """A setting under names of either side: the first is written, the first with a value read, and checked by `read`.
    `default`: of a job that stores none; `size`: what shapes of tensors call it.
    """

    hf: str
    megatron: str
    read: Callable[..., Any] = count
    default: Any = None
    size: str = ""

    def to_megatron(self, config: Mapping[str, Any]) -> Any:
        """The argument for a complete `config.json`; raises `OptionError`."""
        return self.read(config, _present(config, self.hf))

    def to_config(self, arguments: Mapping[str, Any]) -> Any:
        """The setting for Megatron's arguments; raises `OptionError`."""
        return self.read(arguments, _present(arguments, self.megatron), self.default)


def _present(settings: Mapping[str, Any], names: str) -> str:
    first, *others = names.split()
    return next((name for name in (first, *others) if settings.get(name) is not None), first)


def expect(config: Mapping[str, Any], name: str, *values: Any) -> None:
    """Raise `OptionError` unless a setting has one of these values, the first of which is what its absence means."""
    value = config.get(name, values[0])
    if value not in values:
        shown = " or ".join(map(repr, values))
        raise OptionError(f"{name}={value!r:.80}: this family's layers in Megatron-Core have {shown} only")


def groups_of(arguments: Mapping[str, Any]) -> int:
    """Groups of keys and values; without grouped attention each head has its own."""
    heads = count(arguments, "num_attention_heads")
    return count(arguments, "num_query_groups", heads) if arguments.get("group_query_attention") else heads


def expert_layers_of(arguments: Mapping[str, Any]) -> tuple[bool, ...]:
    """For each layer, whether it has experts, as Megatron's arguments say."""
    layers, frequency = count(arguments, "num_layers"), arguments.get("moe_layer_freq", 1)
    if isinstance(frequency, int) and not isinstance(frequency, bool) and frequency > 0 and layers <= MOST_LAYERS:
        return tuple(layer % frequency == 0 for layer in range(layers))
    if isinstance(frequency, list) and len(frequency) == layers:
        return tuple(bool(kind) for kind in frequency)
    raise OptionError(f"the stored argument moe_layer_freq={frequency!r:.80}: expected a number, or one for each layer")


def refuse_weight_of_one(arguments: Mapping[str, Any]) -> None:
    """Raise `OptionError` for one expert a token whose weight is the softmax of its score alone."""
    softmax = arguments.get("moe_router_score_function") == "softmax"
    if softmax and arguments.get("moe_router_topk") == 1 and not arguments.get("moe_router_pre_softmax"):
        raise OptionError(
            "num_experts_per_tok=1: the weight of the one expert is always one in this family; Megatron-Core has no "
            "such router (with moe_router_pre_softmax the weight is the probability, without it there have to be more)"
        )


def window_of(arguments: Mapping[str, Any]) -> int | None:
    """The window as Hugging Face counts it: the token itself, too, and not only those before it."""
    window = arguments.get("window_size")
    if window is None:
        return None
    if not isinstance(window, (list, tuple)) or len(window) != 2 or window[1] not in (0, -1):
        raise OptionError(f"the stored argument window_size={window!r:.80}: expected (tokens before, 0)")
    return count({"window_size": window[0]}, "window_size") + 1


# What Megatron-Core's scaled rotary embedding has fixed, by the names of Hugging Face.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# What `transformers` reads of each kind of scaling.
_YARN_FIELDS = (
    "attention_factor beta_fast beta_slow factor mscale mscale_all_dim original_max_position_embeddings truncate"
)
_ROPE_FIELDS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", *_LLAMA3_SCALING}),
    "yarn": frozenset(_YARN_FIELDS.split()),
}
_LENGTH = "original_max_position_embeddings"
YARN_SCALES = ("mscale", "mscale_all_dim")
# What Megatron-Core takes where a job says nothing, by what arguments begin with: those of latent attention, others.
YARN_DEFAULTS: Mapping[str, Mapping[str, float | None]] = {
    "": {"rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.0},
    "yarn_": {"rotary_scaling_factor": None, "mscale": None, "mscale_all_dim": None},
}
_TRUNCATED = "yarn_correction_range_round_to_int"


def rope_settings(config: Mapping[str, Any], *kinds: str, otherwise: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `transformers` 5 makes of all places of rotary settings, `rope_scaling` before `rope_parameters`:
    `rope_type` and what that kind reads. `kinds`, `otherwise`: the family's. `OptionError`: another kind or setting.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if scaling is None:
        scaling = otherwise or {}
    if not isinstance(scaling, Mapping):
        raise OptionError(f"rope_parameters={scaling!r:.80}: expected settings by name")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in kinds:
        expected = " or ".join("none" if kind == "default" else repr(kind) for kind in kinds)
        raise OptionError(f"rotary scaling {kind!r:.80}: expected {expected} for this family")
    for settings in (config, scaling):
        expect(settings, "partial_rotary_factor", 1.0, None)
    read = _ROPE_FIELDS[kind]
    for name, value in scaling.items():
        if value is not None and name not in {"rope_type", "type", "rope_theta", "partial_rotary_factor", *read}:
            known = f"it has {', '.join(sorted(read))}" if read else "it has none"
            raise OptionError(
                f"rotary settings of the kind {kind!r} with {name!r:.80}={value!r:.80}: no library reads it "
                f"({known}), so that the model may be meant otherwise than it is computed"
            )
    theta = number(scaling if "rope_theta" in scaling else config, "rope_theta")
    found = {"rope_type": kind, "rope_theta": int(theta) if theta == int(theta) else theta}
    for name in sorted(read - {_LENGTH, "truncate"}):
        optional = kind == "yarn" and name != "factor"
        found[name] = None if optional and scaling.get(name) is None else number(scaling, name)
    if _LENGTH in read:
        place = next((place for place in (config, scaling) if _LENGTH in place), None)
        found[_LENGTH] = count(config, "max_position_embeddings") if place is None else count(place, _LENGTH)
    if kind == "yarn":
        found["truncate"] = bool(scaling.get("truncate", True))
        found["beta_fast"], found["beta_slow"] = found["beta_fast"] or 32, found["beta_slow"] or 1
    return found


def rope_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's rotary arguments; `transformers` 5 writes `rope_parameters`, 4 `rope_theta` and `rope_scaling`."""
    found = rope_settings(config, "default", "linear", "llama3", "yarn")
    base = {"rotary_base": found["rope_theta"], "use_rope_scaling": found["rope_type"] == "llama3"}
    if found["rope_type"] == "linear":
        return {**base, "rotary_seq_len_interpolation_factor": found["factor"]}
    if found["rope_type"] == "default":
        return base
    if found["rope_type"] == "yarn":
        return {**base, "position_embedding_type": "yarn", **yarn_arguments(found, "yarn_")}
    for name, fixed in _LLAMA3_SCALING.items():
        if found[name] != fixed:
            raise OptionError(f"rotary scaling with {name}={found[name]!r}: Megatron-Core has {fixed} built in")
    return {**base, "rope_scaling_factor": found["factor"]}


def rope_config(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings as any `transformers` reads them."""
    theta = float(number(arguments, "rotary_base", 10000))
    scaling: dict[str, Any] | None = None
    if arguments.get("position_embedding_type") == "yarn":
        scaling = yarn_config(arguments, "yarn_")
    elif arguments.get("use_rope_scaling"):
        scaling = {"rope_type": "llama3", "factor": number(arguments, "rope_scaling_factor", 8.0), **_LLAMA3_SCALING}
    elif number(arguments, "rotary_seq_len_interpolation_factor", 1) != 1:
        scaling = {"rope_type": "linear", "factor": float(number(arguments, "rotary_seq_len_interpolation_factor"))}
    return {"rope_theta": theta, "rope_scaling": scaling}


def _magnitude(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies by, in either library: softmax's scale by its square, cosines by a quotient of two."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _quotient(factor: float, mscale: float, mscale_all_dim: float) -> float:
    below = _magnitude(factor, mscale_all_dim)
    return _magnitude(factor, mscale) / below if below else math.inf


def _transformers_magnitude(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What `transformers` multiplies cosines and sines by, without an `attention_factor`."""
    return _quotient(factor, mscale, mscale_all_dim) if mscale and mscale_all_dim else _magnitude(factor)


def _megatron_magnitude(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What Megatron-Core (0.16, 0.19) multiplies cosines and sines by."""
    if mscale is None or mscale_all_dim is None:
        return _magnitude(factor)
    return _quotient(factor, mscale, mscale_all_dim)


def _yarn_numbers(arguments: Mapping[str, Any], prefix: str) -> tuple[float, float | None, float | None]:
    """Megatron's factor, mscale and mscale_all_dim, with its defaults; raises `OptionError`."""
    defaults = YARN_DEFAULTS[prefix]
    factor = number(arguments, f"{prefix}rotary_scaling_factor", defaults["rotary_scaling_factor"])
    mscale, mscale_all_dim = (
        None
        if setting(arguments, prefix + name, default=defaults[name]) is None
        else number(arguments, prefix + name, defaults[name])
        for name in YARN_SCALES
    )
    return factor, mscale, mscale_all_dim


def yarn_scales(arguments: Mapping[str, Any], prefix: str) -> tuple[float, float]:
    """What cosines and sines are multiplied by, and what softmax's scale is: with the square of the second. `prefix` is
    what arguments of YaRN begin with: `yarn_`, or nothing, those of latent attention.
    """
    factor, mscale, mscale_all_dim = _yarn_numbers(arguments, prefix)
    return _megatron_magnitude(factor, mscale, mscale_all_dim), _magnitude(factor, mscale_all_dim or 0.0)


def latent_rope_type(arguments: Mapping[str, Any]) -> str:
    """What kind of rotary embedding latent attention has; YaRN by a factor of one is none. Raises `OptionError`."""
    kind = setting(arguments, "rope_type", default="yarn")
    if kind not in ("rope", "yarn"):
        raise OptionError(f"the stored argument rope_type={kind!r:.80}: expected 'rope' or 'yarn'")
    return "rope" if _yarn_numbers(arguments, "")[0] == 1 else str(kind)


def yarn_arguments(found: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Megatron's arguments of YaRN for `rope_settings`; raises `OptionError` where it computes something else."""
    factor = found["factor"]
    mscale, mscale_all_dim = (
        YARN_DEFAULTS[prefix][name] if found[name] is None else found[name] for name in YARN_SCALES
    )
    theirs = found["attention_factor"]
    if theirs is None:
        theirs = _transformers_magnitude(factor, found["mscale"], found["mscale_all_dim"])
    ours = _megatron_magnitude(factor, mscale, mscale_all_dim)
    if not math.isclose(theirs, ours, rel_tol=1e-9):
        given = ", ".join(f"{name}={found[name]}" for name in ("factor", *YARN_SCALES, "attention_factor"))
        raise OptionError(
            f"YaRN with {given}: transformers multiplies cosines and sines by {theirs:.6g} (attention_factor; or else "
            "a quotient of mscale by mscale_all_dim where neither is zero; or else by factor alone), Megatron-Core by "
            f"{ours:.6g} (always the quotient), and it has no other argument for that"
        )
    settings = {
        f"{prefix}rotary_scaling_factor": factor,
        f"{prefix}{_LENGTH}": found[_LENGTH],
        **{f"{prefix}{name}": found[name] for name in ("beta_fast", "beta_slow")},
        f"{prefix}mscale": mscale,
        f"{prefix}mscale_all_dim": mscale_all_dim,
    }
    if prefix:
        return {**settings, _TRUNCATED: found["truncate"]}
    if not found["truncate"]:
        raise OptionError(
            "YaRN with truncate=False: Megatron-Core's latent attention always rounds the range of dimensions between "
            "beta_fast and beta_slow to whole numbers"
        )
    return settings


def yarn_config(arguments: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """YaRN's settings for Megatron's arguments, with which `transformers` computes the same; raises `OptionError`."""
    factor, mscale, mscale_all_dim = _yarn_numbers(arguments, prefix)
    scales = {"mscale": mscale, "mscale_all_dim": mscale_all_dim}
    ours = _megatron_magnitude(factor, mscale, mscale_all_dim)
    if not math.isclose(ours, _transformers_magnitude(factor, mscale, mscale_all_dim), rel_tol=1e-9):
        scales["attention_factor"] = ours  # which goes before the other two
    return {
        "rope_type": "yarn",
        "factor": factor,
        _LENGTH: count(arguments, prefix + _LENGTH, 4096),
        "beta_fast": number(arguments, f"{prefix}beta_fast", 32.0),
        "beta_slow": number(arguments, f"{prefix}beta_slow", 1.0),
        **{name: value for name, value in scales.items() if value is not None},
        **({"truncate": bool(setting(arguments, _TRUNCATED, default=True))} if prefix else {}),
    }
