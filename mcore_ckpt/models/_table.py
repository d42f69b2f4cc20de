"""What a family of models is: a table of parameters, and a table of settings. A family is data; this gives it meaning.

    FAMILY = Family(
        name="llama",
        architecture="LlamaForCausalLM",
        rows=(*EMBEDDING, *ATTENTION, *GATED_MLP),
        ...
    )

A row names a parameter of Megatron-Core, the tensors of Hugging Face that it is made of, and how. `how` is the name of
a transform: it maps slices of parts to slices of the parameter. So every row can be read in both directions. Keys have
`{layer}` and `{expert}` in them; shapes are words, sizes that a model has by name.

`relate` unfolds a table for one model: every tensor on both sides with its shape, and the links between them. It checks
that links cover each tensor exactly once, on either side, before anybody moves a byte.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from mcore_ckpt.core.boxes import Box, covers
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.models._settings import Setting, count, expect, refuse_weight_of_one
from mcore_ckpt.reshard.partition import ShardedName

Implementation = Literal["local", "transformer_engine"]
Axes = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of Hugging Face: its key, with `{layer}` and `{expert}`, and its shape in names of sizes, or numbers. An
    axis that counts pairs is a tuple of sizes, the slowest first: `("ffn", 2)` for `gate, up, gate, ...`.
    """

    key: str
    shape: tuple[str | int | tuple[str | int, ...], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A parameter of Megatron-Core, and what it is made of."""

    megatron: str  # its key; of layers and experts, as if they were numbered
    parts: tuple[Part, ...]  # the tensors of Hugging Face, in the order in which the transform wants them
    how: str = "same"  # name of the transform
    when: tuple[str, ...] = ()  # words, all of which have to hold of the model or of the layer
    engine: str | None = None  # the key that Transformer Engine's layers have, where it is another


@dataclass(frozen=True, slots=True)
class Model:
    """One model of a family: what its `config.json` says, as far as shapes depend on it."""

    layers: int
    sizes: Mapping[str, int]  # by name, in elements: `hidden`, `ffn`, `vocab`, `q`, `kv`,
    heads: int  # of attention: those of queries
    groups: int  # of attention: heads of keys and values
    head_dim: int  # elements of a head
    experts: int = 0  # for each layer that has some; 0 for a dense model
    expert_layers: tuple[bool, ...] = ()  # for each layer, whether its MLP is one of experts
    holds: frozenset[str] = frozenset()  # words that hold of the model, for the rows' `when`
    predicting: int = 0  # layers behind the last one, which predict further tokens

    def shape(self, names: Sequence[str | int | tuple[str | int, ...]]) -> tuple[int, ...]:
        """A shape in elements, axes that count several things at once taken apart."""
        flat = [part for name in names for part in (name if isinstance(name, tuple) else (name,))]
        if unknown := [name for name in flat if not isinstance(name, int) and name not in self.sizes]:
            known = ", ".join(sorted(self.sizes))
            raise OptionError(f"the family's table has a shape with {unknown[0]!r:.80}; its settings give {known}")
        return tuple(name if isinstance(name, int) else self.sizes[name] for name in flat)

    def stored_shape(self, names: Sequence[str | int | tuple[str | int, ...]]) -> tuple[int, ...]:
        """Shape of the parts as they are stored."""
        return tuple(math.prod(self.shape(name if isinstance(name, tuple) else (name,))) for name in names)


PREDICTING = "mtp.layers.{layer}."
"""Begins Megatron's keys of layers behind the last one, which predict further tokens."""
PREDICTING_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
"""What `config.json` calls their number, older and newer."""


def predicting_layers(config: Mapping[str, Any]) -> int:
    """How many layers behind the last one a `config.json` has; raises `OptionError`."""
    name = next((name for name in PREDICTING_LAYERS if config.get(name)), None)
    return 0 if name is None else count(config, name)


class Rule(NamedTuple):
    """Settings that no row says, read both ways. The first raises `OptionError` for what Megatron-Core has not; what
    the second cannot say is found by translating back (`compare_settings`).
    """

    to_megatron: Callable[[Mapping[str, Any], Model], dict[str, Any]]
    to_config: Callable[[Mapping[str, Any]], dict[str, Any]]
    # Where `transformers` computes a little else than Megatron-Core for a complete `config.json`.
    remarks: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda config: ()


# What `transformers` reads of the configuration of any model: whether tokens see those behind them, and settings that
# layers have of their own.
_EVERYWHERE: Mapping[str, tuple[Any, ...]] = {"is_causal": (True,), "per_layer_config": (None,)}


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models."""

    name: str  # as people give it to `--arch`
    architecture: str  # the class that `transformers` loads it with
    rows: tuple[Row, ...]
    defaults: Mapping[str, Any]  # what `transformers` takes for a setting that `config.json` leaves out, except sizes
    settings: tuple[Setting, ...]  # those that both sides have, one by one
    # Words of `traits_of` Megatron's arguments that a family requires, and further ones that it allows. Without any, a
    # family is that of a `config.json`, or of `--arch`.
    traits: str = ""
    may_have: str = ""
    rules: tuple[Rule, ...] = ()  # settings that no row says
    # Settings with the values for which Megatron-Core has layers; the first is meant where none is given, and written.
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)  # Megatron's arguments, the same for all of its models
    # Regular expressions of keys that hold nothing of their own: buffers, layers that are not loaded.
    derived: tuple[str, ...] = ()
    optional_prefix: str = ""  # of keys that some checkpoints of the family leave out
    # The table of a model that `transformers` has loaded, where its parameters are others than in files.
    loaded: tuple[Row, ...] = ()
    others: tuple[str, ...] = ()  # what `config.json` calls other models of the family

    @property
    def model_type(self) -> str:
        """What `config.json` calls it."""
        return self.name.replace("-", "_")

    def complete(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """A `config.json` as `transformers` reads it: with the defaults of what it leaves out."""
        return {**self.defaults, **config}

    def model(self, config: Mapping[str, Any]) -> Model:
        """What a `config.json` says about shapes; raises `OptionError` if it cannot be."""
        config = self.complete(config)
        said = {row.size: row.to_megatron(config) for row in self.settings if row.size}
        sizes = {name: value for name, value in said.items() if type(value) is int}
        holds = {name for name, value in said.items() if value is True}
        layers, heads = sizes["layers"], sizes["heads"]
        groups, head_dim = self._heads(config, sizes)
        experts = sizes.get("experts", 0)
        gates = {name.replace("ffn", "gate and up"): 2 * size for name, size in sizes.items() if name.endswith("ffn")}
        sizes |= {"embedding and hidden": 2 * sizes["hidden"], **gates}
        if "expert ffn" in sizes and config.get("n_shared_experts") is not None:
            sizes["shared ffn"] = sizes["expert ffn"] * count(config, "n_shared_experts")
        if "kv rank" in sizes:
            holds.add("latent queries" if "q rank" in sizes else "whole queries")
        expert_layers = self._expert_layers(config, layers) if experts else ()
        predicting = predicting_layers(config) if any(row.megatron.startswith(PREDICTING) for row in self.rows) else 0
        return Model(layers, sizes, heads, groups, head_dim, experts, expert_layers, frozenset(holds), predicting)

    def _heads(self, config: Mapping[str, Any], sizes: dict[str, int]) -> tuple[int, int]:
        """Groups and elements of heads; adds the sizes that attention has to `sizes`."""
        heads = sizes["heads"]
        if "kv rank" in sizes:
            groups, head_dim = heads, sizes["head without positions"] + sizes["positions"]
            sizes |= {
                "q": heads * head_dim,
                "kv rank and positions": sizes["kv rank"] + sizes["positions"],
                "kv": heads * (sizes["head without positions"] + sizes["value"]),
                "values": heads * sizes["value"],
            }
            return groups, head_dim
        # A family without these settings has no use for them.
        given = {name: config[name] for name in ("num_key_value_heads", "head_dim") if name in self.defaults}
        groups = count(given, "num_key_value_heads", heads)
        head_dim = count(given, "head_dim", max(1, sizes["hidden"] // heads))
        queries, keys = heads * head_dim, groups * head_dim
        sizes |= {"q": queries, "kv": keys, "qkv": queries + 2 * keys, "head": head_dim}
        return groups, head_dim

    def _expert_layers(self, config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
        """For each layer, whether it has experts: all have in families without a setting for it."""
        if "first_k_dense_replace" in self.defaults:
            first = config["first_k_dense_replace"]
            if type(first) is not int or not 0 <= first <= layers:
                raise OptionError(f"first_k_dense_replace={first!r:.80}: expected a number of layers, of {layers}")
            return tuple(layer >= first for layer in range(layers))
        if "mlp_only_layers" not in self.defaults:
            return (True,) * layers
        step, dense = count(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or len(dense) > layers:
            raise OptionError(f"mlp_only_layers={dense!r:.80}: expected a list of layers, of {layers}")
        return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))

    def arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Megatron's arguments for a `config.json`; raises `OptionError` for what Megatron-Core has not."""
        config = self.complete(config)
        for name, values in {**_EVERYWHERE, **self.allowed}.items():
            expect(config, name, *values)
        found: dict[str, Any] = {}
        model = self.model(config)
        for rule in self.rules:
            found |= rule.to_megatron(config, model)
        found |= {row.megatron.split()[0]: row.to_megatron(config) for row in self.settings}
        found |= self.constants
        refuse_weight_of_one(found)
        return found

    def config(self, arguments: Mapping[str, Any], vocabulary: int) -> dict[str, Any]:
        """A `config.json` for Megatron's arguments and a vocabulary without padding; raises `OptionError`."""
        arguments = {**arguments, "vocab_size": vocabulary}
        found = {name: values[0] for name, values in self.allowed.items()}
        for rule in self.rules:
            found |= rule.to_config(arguments)
        return found | {row.hf.split()[0]: row.to_config(arguments) for row in self.settings}

    def remarks(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Where `transformers` computes a little else than Megatron-Core for a complete `config.json`."""
        return tuple(text for rule in self.rules for text in rule.remarks(config))

    def of_keys(self, keys: Iterable[str]) -> Family:
        """This family, with the table that stored keys are of: that of files, or that of a loaded model."""
        files, loaded = ({part.key for row in rows for part in row.parts} for rows in (self.rows, self.loaded))
        leaves = tuple(key.rpartition("}")[2] for key in loaded - files)
        return replace(self, rows=self.loaded) if leaves and any(key.endswith(leaves) for key in keys) else self


@dataclass(frozen=True, slots=True)
class Naming:
    """How a checkpoint of Megatron-Core with layers of `implementation` names what they hold. `stacked_*`: one tensor
    for all of them, otherwise keys have numbers. `halves_apart`: `weight_w` and `weight_v` of a gated layer.
    """

    implementation: Implementation = "local"
    stacked_layers: bool = True
    stacked_experts: bool = True
    halves_apart: bool = False

    def place(
        self, key: str, model: Model, layer: int | None, expert: int | None
    ) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """The stored key of a row's key, and index and size of each axis that counts layers or experts."""
        index: tuple[int, ...] = ()
        sizes: tuple[int, ...] = ()
        if layer is not None:
            if self.stacked_layers and not key.startswith(PREDICTING):
                key, index, sizes = key.replace("{layer}.", ""), (layer,), (model.layers,)
            else:
                key = key.replace("{layer}", str(layer))
        if expert is not None:
            if self.stacked_experts:
                key, index, sizes = key.replace("{expert}.", ""), (*index, expert), (*sizes, model.experts)
            else:
                key = key.replace("{expert}", str(expert))
        return key, index, sizes


class Link(NamedTuple):
    """Elements that are the same on both sides: a slice of each, of equal sizes but for axes of one element."""

    megatron: str
    megatron_box: Box
    hf: str
    hf_box: Box
    # Which axis of one is which of the other, `(Megatron's, Hugging Face's)`, counted from the last, -1; all others
    # have one element in either slice. None: the last axes are the same, as many as both have.
    axes: Axes | None
    how: str  # the transform that gave it
    lead: int = 0  # how many of the first axes of Megatron's slice count layers or experts


@dataclass(slots=True)
class Relation:
    """A table unfolded for one model: shapes by key, and links. `joined`: shapes as stored, where axes count several
    things; `padding`: Megatron's rows alone; `copies`: keys of Hugging Face that hold what another one does.
    """

    megatron: dict[str, tuple[int, ...]] = field(default_factory=dict)
    hf: dict[str, tuple[int, ...]] = field(default_factory=dict)
    joined: dict[str, tuple[int, ...]] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    padding: dict[str, Box] = field(default_factory=dict)
    copies: dict[str, str] = field(default_factory=dict)

    def parameters(self) -> Iterator[ShardedName]:
        """Megatron's, one by one."""
        for key, box, *_, lead in self.links:
            yield ShardedName(key, box.offsets[:lead], self.megatron[key][:lead])


_MOST_INSTANCES = 1_000_000

# Part, slice of the parameter, slice of the part, which axis is which.
_Slice = tuple[int, Box, Box, Axes | None]
_Shape = tuple[int, ...]
_Transform = Callable[[Model, Sequence[_Shape], int], tuple[_Shape, list[_Slice]]]


def _all_of(shape: _Shape) -> Box:
    return Box((0,) * len(shape), shape)


def _rows(shape: _Shape, start: int, count: int) -> Box:
    """Rows `[start, start + count)` of a tensor."""
    return Box((start, *(0,) * (len(shape) - 1)), (count, *shape[1:]))


def _same(model: Model, shapes: Sequence[_Shape], expert: int) -> tuple[_Shape, list[_Slice]]:
    """The one part is the parameter."""
    (shape,) = shapes
    return shape, [(0, _all_of(shape), _all_of(shape), None)]


def _halves(model: Model, shapes: Sequence[_Shape], expert: int) -> tuple[_Shape, list[_Slice]]:
    """Parts follow one another along the first axis: the gate, then what it lets through."""
    slices: list[_Slice] = []
    start = 0
    for number, shape in enumerate(shapes):
        slices.append((number, _rows(shape, start, shape[0]), _all_of(shape), None))
        start += shape[0]
    return (start, *shapes[0][1:]), slices


def _joined_halves(model: Model, shapes: Sequence[_Shape], expert: int) -> tuple[_Shape, list[_Slice]]:
    """The one part is the parameter: the gate, then what it lets through."""
    (shape,) = shapes
    half = shape[0] // 2
    return shape, [(0, _rows(shape, start, half), _rows(shape, start, half), None) for start in (0, half)]


def _pairs(model: Model, shapes: Sequence[_Shape], expert: int) -> tuple[_Shape, list[_Slice]]:
    """Axes are in the reverse order, and the last one counts pairs: the first of each, then the second of each."""
    ((*inner, pairs, two),) = shapes
    own = (two * pairs, *reversed(inner))
    axes = (*((-1 - n, n - len(inner) - 2) for n in range(len(inner))), (-1 - len(inner), -2))
    theirs = [Box((*(0,) * len(inner), 0, half), (*inner, pairs, 1)) for half in range(two)]
    return own, [(0, _rows(own, half * pairs, pairs), theirs[half], axes) for half in range(two)]


def _qkv(model: Model, shapes: Sequence[_Shape], expert: int) -> tuple[_Shape, list[_Slice]]:
    """Group by group queries, key, value: of three parts, or of one with all queries, then keys, then values."""
    total = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    joined = len(shapes) == 1
    starts = (0, model.heads * model.head_dim, (model.heads + model.groups) * model.head_dim) if joined else (0, 0, 0)
    slices: list[_Slice] = []
    row = 0
    for group in range(model.groups):
        for which, rows in enumerate((model.heads // model.groups * model.head_dim, model.head_dim, model.head_dim)):
            number = 0 if joined else which
            theirs = _rows(shapes[number], starts[which] + group * rows, rows)
            slices.append((number, _rows(total, row, rows), theirs, None))
            row += rows
    return total, slices


def _transposed(transform: _Transform) -> _Transform:
    """The transform for parts that are matrices stored transposed: inputs before outputs."""

    def of_transposed(model: Model, shapes: Sequence[_Shape], expert: int) -> tuple[_Shape, list[_Slice]]:
        if len(shapes[0]) < 2:
            return transform(model, shapes, expert)
        own, slices = transform(model, [shape[::-1] for shape in shapes], expert)
        exchanged = ((-2, -1), (-1, -2))
        return own, [
            (n, mine, Box(theirs.offsets[::-1], theirs.sizes[::-1]), exchanged) for n, mine, theirs, _ in slices
        ]

    return of_transposed


def _of_all(transform: _Transform) -> _Transform:
    """The transform for parts that have all experts', one after another."""

    def of_one(model: Model, shapes: Sequence[_Shape], expert: int) -> tuple[_Shape, list[_Slice]]:
        own, slices = transform(model, [shape[1:] for shape in shapes], expert)
        return own, [
            (n, mine, Box((expert, *theirs.offsets), (1, *theirs.sizes)), axes) for n, mine, theirs, axes in slices
        ]

    return of_one


TRANSFORMS: dict[str, _Transform] = {
    "same": _same,
    "vocabulary": _same,  # and Megatron's has rows behind it, up to a number that divides among its ranks
    "transposed": _transposed(_same),
    "halves": _halves,
    "joined halves": _joined_halves,
    "grouped qkv": _qkv,
    "joined qkv": _qkv,
    "joined qkv transposed": _transposed(_qkv),
    "of all experts": _of_all(_transposed(_same)),
    "pairs of all experts": _of_all(_pairs),
    "each of all experts": _of_all(_same),
    "halves of all experts": _of_all(_joined_halves),
}


def relate(family: Family, model: Model, naming: Naming, padded_vocabulary: int) -> Relation:
    """Unfold a table for one model and so many rows of vocabulary; raises `OptionError` for contradictions and gaps."""
    instances = model.layers * max(1, model.experts)
    if instances > _MOST_INSTANCES or model.heads > _MOST_INSTANCES:
        raise OptionError(
            f"{model.layers} layers of {model.experts} experts and {model.heads} heads: no model has that many"
        )
    if model.groups < 1 or model.heads % model.groups:
        raise OptionError(f"{model.heads} attention heads cannot be divided into {model.groups} groups")
    if padded_vocabulary < model.sizes["vocab"]:
        raise OptionError(
            f"Megatron's embedding has {padded_vocabulary} rows, fewer than the vocabulary of {model.sizes['vocab']}"
        )
    if naming.stacked_layers and len(set(model.expert_layers)) > 1:
        raise OptionError("layers with experts and layers without cannot be stacked in one tensor")
    relation = Relation()
    for row in family.rows:
        for layer, expert in _instances(row, model):
            _add(relation, row, model, naming, padded_vocabulary, layer, expert)
    _check_complete(relation)
    originals = {link.megatron: link.hf for link in relation.links}
    for row in (row for row in family.rows if row.how == "copy" and set(row.when) <= model.holds):
        for layer in range(model.layers, model.layers + model.predicting):
            relation.copies[row.parts[0].key.format(layer=layer)] = originals[row.megatron]
    return relation


def _instances(row: Row, model: Model) -> Iterator[tuple[int | None, int | None]]:
    """Layer and expert of each parameter that a row stands for. A layer that predicts is of the last one's kind."""
    if row.how == "copy":
        return
    if "{layer}" not in row.megatron:
        if set(row.when) <= model.holds:
            yield None, None
        return
    predicts = row.megatron.startswith(PREDICTING)
    for layer in range(model.predicting if predicts else model.layers):
        has_experts = model.expert_layers and model.expert_layers[-1 if predicts else layer]
        kind = "expert layer" if has_experts else "dense layer"
        if set(row.when) <= {*model.holds, kind}:
            for expert in range(model.experts) if "{expert}" in row.megatron else (None,):
                yield layer, expert


def _add(
    relation: Relation,
    row: Row,
    model: Model,
    naming: Naming,
    padded_vocabulary: int,
    layer: int | None,
    expert: int | None,
) -> None:
    template = row.engine if row.engine and naming.implementation == "transformer_engine" else row.megatron
    key, index, counts = naming.place(template, model, layer, expert)
    there = layer if layer is None or not template.startswith(PREDICTING) else model.layers + layer
    keys = [part.key.format(layer=there, expert=expert) for part in row.parts]
    shapes = [model.shape(part.shape) for part in row.parts]
    try:
        own, slices = TRANSFORMS[row.how](model, shapes, expert or 0)
    except (ValueError, IndexError):
        shown = ", ".join(f"{part} {list(shape)}" for part, shape in zip(keys, shapes, strict=True))
        raise OptionError(f"{key}: {row.how!r} makes no parameter of {shown}") from None
    for hf_key, shape, part in zip(keys, shapes, row.parts, strict=True):
        relation.hf[hf_key] = shape
        joined = model.stored_shape(part.shape)
        if joined != shape:
            relation.joined[hf_key] = joined
    apart = naming.halves_apart and row.how.removeprefix("joined ").startswith(("halves", "pairs"))
    if row.how == "vocabulary":
        if padded_vocabulary > own[0]:
            relation.padding[key] = _rows(own, own[0], padded_vocabulary - own[0])
        own = (padded_vocabulary, *own[1:])
    for number, mine, theirs, axes in slices:
        stored, shape, box = key, own, mine
        if apart:
            stored, shape = f"{key}_{'wv'[mine.offsets[0] // mine.sizes[0]]}", mine.sizes
            box = _all_of(shape)
        relation.megatron[stored] = (*counts, *shape)
        lead = Box((*index, *box.offsets), (*(1,) * len(index), *box.sizes))
        relation.links.append(Link(stored, lead, keys[number], theirs, axes, row.how, len(index)))


def _check_complete(relation: Relation) -> None:
    """Each element of each tensor, on either side, is in exactly one link (or padding)."""
    mine: dict[str, list[Box]] = {key: [box] for key, box in relation.padding.items()}
    theirs: dict[str, list[Box]] = {}
    for link in relation.links:
        mine.setdefault(link.megatron, []).append(link.megatron_box)
        theirs.setdefault(link.hf, []).append(link.hf_box)
    for shapes, found, side in ((relation.megatron, mine, "Megatron"), (relation.hf, theirs, "Hugging Face")):
        for key, shape in shapes.items():
            problem = covers(shape, found.get(key, []))
            if problem and math.prod(shape):
                raise OptionError(f"{key} ({side}, {list(shape)}): the family's table does not cover it: {problem}")
