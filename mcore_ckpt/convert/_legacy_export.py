"""A `torch_dist` checkpoint as files of `--ckpt-format torch`, one for each rank: the other way of `_legacy_import`.

    index -> which box of which tensor a rank has -> a view under the ranks' keys (`_pieces`) -> one file after another

For tools that know nothing else. The order in which Megatron's optimizers number parameters is that of its layers, and
is known here for the local ones of a decoder; for others there is the model alone.
"""

from __future__ import annotations

import functools
import math
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from mcore_ckpt.convert._legacy_files import FEWEST, MODEL_FILE, OPTIMIZER_FILE, Arguments, owned
from mcore_ckpt.convert._legacy_import import LOCAL_NORMS
from mcore_ckpt.convert._legacy_optimizer import (
    buffer_members,
    flat_places,
    group_members,
    is_buffer,
    likely_layout,
    main_parameter,
)
from mcore_ckpt.convert._partition import Partitioner, holds_several
from mcore_ckpt.convert._pieces import PiecePayloads, Source, Wanted
from mcore_ckpt.convert._reshard_target import file_states
from mcore_ckpt.convert._shard_files import Exported, stream_tensor
from mcore_ckpt.convert.conversion import Export, ExportOptions, KeyPlan, Made, PickledByName, write_directory
from mcore_ckpt.convert.reshard_plan import padded_vocabulary, token_count
from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.console import Progress
from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, object_key, parse_object_key
from mcore_ckpt.format.item_layout import element_bytes
from mcore_ckpt.format.metadata_read import COMMON_FILE
from mcore_ckpt.format.state_file import FileTensor, read_state_file
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.keys import is_optimizer_key
from mcore_ckpt.tools.payloads import StoredPayloads, check_tiled
from mcore_ckpt.tools.plain_state import read_object, stored_common_state, unwrapped
from mcore_ckpt.tools.regrid import Sink, Walk

__all__ = ["legacy_export"]

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_NUMBERED = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")
_EXPERTS = re.compile(r"(mlp\.experts)\.experts\.(linear_fc[12])\.(\w+)")
_STATE = re.compile(r"optimizer\.state\.([^.]+)\.(.+)")
# Arguments by which the stages of a pipeline get different numbers of layers, and what they are where none does.
_UNEVEN = {
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "pipeline_model_parallel_layout": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
_EXTRA_STATE = "_extra_state"
# The order of the local layers' modules, and of the parameters in each.
_ORDER = (
    *("embedding.word_embeddings", "embedding.position_embeddings", "decoder.layers"),
    *("decoder.final_layernorm", "output_layer"),
)
_LAYER_ORDER = (
    *("input_layernorm", "self_attention.core_attention", "self_attention.linear_proj", "self_attention.linear_qkv"),
    *("self_attention.q_layernorm", "self_attention.k_layernorm", "pre_mlp_layernorm"),
    *("mlp.linear_fc1", "mlp.linear_fc2", "mlp.router", "mlp.experts.local_experts"),
    *("mlp.shared_experts", "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
)
_LOCAL_EXPERT = re.compile(r"(mlp\.experts\.local_experts)\.(\d+)\.(.+)")
_PARAMETERS = ("weight", "bias")
# What modules that contain no such parameters, or others behind them, have of their own.
_ALONE = (("self_attention.core_attention", "softmax_offset"), ("mlp.shared_experts", "gate_weight"))
_MOST = 4096
_WINDOW_BYTES = 4 * 1024 * 1024


class _Local(NamedTuple):
    """A parameter of one rank: its key in the state dict of a chunk, which tensor it is of, and its shape."""

    stored: str
    chunk: int
    key: str
    tensor: FileTensor


@dataclass(slots=True)
class _Rank:
    """What the files of one rank are made of.

    Attributes:
        tp, pp, ep, etp: its tensor, pipeline, expert, and expert tensor parallel rank.
        stage_rank: its number in its pipeline stage, of the first rank that these are the files of.
        parameters: in the model's order.
    """

    tp: int
    pp: int
    ep: int
    etp: int
    stage_rank: int
    folder: str
    parameters: list[_Local] = field(default_factory=list)


class _Sizes(NamedTuple):
    """Parallel sizes of the target; `vpp` is how many chunks of the model a pipeline stage has."""

    tp: int
    pp: int
    ep: int
    etp: int
    vpp: int

    @property
    def stage_ranks(self) -> int:
        """The fewest ranks of a stage that hold both groupings."""
        return math.lcm(self.tp, self.etp * self.ep)

    def __str__(self) -> str:
        etp = "" if self.etp == self.tp else f" ETP {self.etp}"
        vpp = "" if self.vpp == 1 else f" VPP {self.vpp}"
        return f"TP {self.tp} PP {self.pp}{vpp} EP {self.ep}{etp}"


def legacy_export(index: CheckpointIndex, options: ExportOptions) -> Export:
    """The files that a launch with `--ckpt-format torch` loads at some parallel sizes.

    Raises:
        OptionError: the model cannot be divided so, or it is not known how it is.
        CheckpointNotFoundError, CorruptCheckpointError: the checkpoint is damaged.
    """
    keys = [key for key in index.tensors if not (options.drop_optimizer and is_optimizer_key(key))]
    check_tiled(index, keys)
    seen = file_states(index, keys)
    draft = _Draft(index, keys, _sizes(options))
    payloads = PiecePayloads(StoredPayloads(index), draft.wanted)

    def make(target: Path, progress: bool | None) -> Made:
        def write(folder: Path, _: object) -> list[str]:
            files: list[str] = []
            with Progress("ranks", len(draft.ranks), shown=progress) as bar:
                for rank in draft.ranks:
                    files += _write_rank(draft, rank, payloads, folder)
                    bar.advance(1)
            return files

        files = write_directory(target, index, seen, payloads, write, keys=keys)
        return Made(files, len(draft.wanted), sum((target / file).stat().st_size for file in files))

    return Export(
        format="megatron-legacy",
        target_layout=str(draft.sizes),
        keys=draft.rows,
        notes=tuple(draft.notes),
        left_out=tuple(draft.left_out),
        payloads=payloads,
        make=make,
    )


def _sizes(options: ExportOptions) -> _Sizes:
    etp = options.tp if options.etp is None else options.etp
    sizes = _Sizes(options.tp, options.pp, options.ep, etp, options.vpp)
    if not all(1 <= size <= _MOST for size in sizes):
        named = ", ".join(f"{name}={size}" for name, size in sizes._asdict().items())
        raise OptionError(f"{named}: expected sizes of 1 to {_MOST}")
    if sizes.etp not in (1, sizes.tp):
        raise OptionError(
            f"etp={sizes.etp}, tp={sizes.tp}: experts are divided among as many ranks as other layers, or not at all, "
            "in this format here"
        )
    if sizes.vpp > 1 and sizes.pp == 1:
        raise OptionError(f"vpp={sizes.vpp}: a pipeline of one stage has no virtual stages; give pp")
    return sizes


class _Draft:
    """An export that is being thought through."""

    def __init__(self, index: CheckpointIndex, keys: Sequence[str], sizes: _Sizes) -> None:
        self.index, self.sizes = index, sizes
        self.left_out: list[str] = []
        self.common = _common(index)
        given = self.common.get("args")
        if not isinstance(given, Namespace):
            raise OptionError(f"{index.path}: stores no arguments of Megatron, which the files have to hold")
        where = str(Path(index.path) / COMMON_FILE)
        stored_bytes = sum(chunk.item.length for key in keys for chunk in index.tensors[key].chunks)
        self.stored = Arguments(vars(given), where, max(FEWEST, stored_bytes))
        self.local = self.stored.values.get("transformer_impl") == "local"
        self.layers = self.stored.count("num_layers")
        self.experts = self.stored.count("num_experts") if self.stored.values.get("num_experts") else 0
        self.per_chunk, left = divmod(self.layers, sizes.pp * sizes.vpp)
        if left:
            chunks = f"{sizes.pp} stages" + (f" of {sizes.vpp} chunks" if sizes.vpp > 1 else "")
            raise OptionError(f"{self.layers} layers do not divide into {chunks}")
        if (self.experts or 1) % sizes.ep:
            raise OptionError(f"{self.experts} experts do not divide among {sizes.ep} expert parallel ranks")
        self.grouped = self.experts > 0 and self.stored.flag("moe_grouped_gemm")
        if self.grouped and (self.local or self.stored.flag("moe_use_legacy_grouped_gemm")):
            raise OptionError(
                f"{index.path}: experts of the grouped GEMM before Transformer Engine's (--moe-grouped-gemm with local "
                "layers, --moe-use-legacy-grouped-gemm) are not written in this format here"
            )
        uneven = [name for name, default in _UNEVEN.items() if self.stored.values.get(name) not in (None, default)]
        if sizes.pp > 1 and uneven:
            raise OptionError(
                f"{index.path}: the stored argument {uneven[0]} is {self.stored.values[uneven[0]]!s:.80}: stages with "
                "different numbers of layers are not written in this format here; take one stage (--pp 1)"
            )
        self.notes: list[str] = []
        #: Rows of the embedding, with those by which a launch pads it.
        self.vocabulary = self._padded_rows()
        #: As a launch has them that saves such files.
        self.arguments = Arguments(vars(self._rank_arguments()), where)
        self.tied = not self.stored.flag("untie_embeddings_and_output_weights")
        self.partitioner = Partitioner(index, arguments=self.stored.values)
        self.states: dict[str, dict[str, str]] = {}
        for key in keys:
            state = _STATE.fullmatch(key)
            if state is not None:
                self.states.setdefault(state.group(2), {})[state.group(1)] = key
            elif is_optimizer_key(key):
                raise OptionError(
                    f"{index.path}: {key}: the optimizer's state is not by parameter; make it so by `mcore-ckpt "
                    "reshard --optimizer fully_reshardable`, or leave it out (--drop optimizer)"
                )
        self.model = [key for key in keys if not is_optimizer_key(key)]
        if self.states and not self.local:
            raise OptionError(
                f"{index.path}: the order of the optimizer's parameters is known for local layers only "
                "(--transformer-impl local); leave the optimizer's state out (--drop optimizer)"
            )
        self.wanted: dict[str, Wanted] = {}
        self._rows: dict[tuple[str, str], KeyPlan] = {}
        self.ranks = [rank for stage in range(sizes.pp) for rank in self._stage(stage)]
        random = [key for key in index.objects if key.startswith("rng_state/")]
        if random and not all(self.random_state(rank) for rank in self.ranks):
            self.left_out.append("rng_state (of another number of ranks; a launch has to be given --no-load-rng)")

    def _padded_rows(self) -> int:
        entry = self.index.tensors.get(_EMBEDDING)
        if entry is None or len(entry.shape) != 2:
            return 0
        padded = _rows_at(self.stored, entry.shape[0], self.sizes.tp)
        if padded is None:
            self.notes.append(
                f"the stored arguments do not tell the vocabulary's size: its {entry.shape[0]} rows stay; a launch at "
                "this size that pads it to fewer needs --use-checkpoint-args"
            )
        return entry.shape[0] if padded is None else padded

    def _rank_arguments(self) -> Namespace:
        """The arguments, of this division."""
        sizes = self.sizes
        changed: dict[str, Any] = {
            "tensor_model_parallel_size": sizes.tp,
            "pipeline_model_parallel_size": sizes.pp,
            "virtual_pipeline_model_parallel_size": sizes.vpp if sizes.vpp > 1 else None,
            "num_layers_per_virtual_pipeline_stage": self.per_chunk if sizes.vpp > 1 else None,
            "expert_model_parallel_size": sizes.ep,
            "expert_tensor_parallel_size": sizes.etp,
            "ckpt_format": "torch",
            "use_dist_ckpt": False,
            **{name: default for name, default in _UNEVEN.items() if name in self.stored.values},
            **({"padded_vocab_size": self.vocabulary} if self.vocabulary else {}),
        }
        return Namespace(**{**self.stored.values, **changed})

    def rows(self) -> Iterator[KeyPlan]:
        """Each tensor of the source and of a rank, for showing."""
        distributed = any("param_state_sharding_type" in one for one in _optimizers(self)) if self.states else False
        file = OPTIMIZER_FILE if distributed else MODEL_FILE
        for row in self._rows.values():
            yield row
            for state, key in self.states.get(row.source, {}).items():
                dtype = self.index.tensors[key].dtype
                yield replace(row, source=key, target=f"{state} of {row.target} ({file})", dtype=dtype)

    def random_state(self, rank: _Rank) -> str | None:
        """The object with a rank's random state, if it is stored for such ranks."""
        sizes = self.sizes
        if sizes.ep == 1:
            key = object_key("rng_state", (rank.pp, rank.tp), (sizes.pp, sizes.tp))
            return key if key in self.index.objects else None
        # With experts on several ranks, there is one for each data parallel rank.
        for full in self.index.objects:
            shard = parse_object_key(full)
            if shard is not None and shard.key == "rng_state" and len(shard.shape) == 3:
                place = (rank.pp, rank.tp, rank.stage_rank // sizes.tp)
                key = object_key("rng_state", place, (sizes.pp, sizes.tp, shard.shape[2]))
                return key if key in self.index.objects else None
        return None

    def states_of(self, rank: _Rank, parameter: _Local) -> dict[str, _Filled]:
        """The optimizer's tensors of a parameter."""
        found = {}
        for state, key in self.states.get(parameter.key, {}).items():
            part = _view_key(rank, state, parameter.chunk, parameter.stored)
            found[state] = _Filled(self.index.tensors[key].dtype, parameter.tensor.shape, (part,))
        return found

    def place_of_layer(self, number: int) -> tuple[int, int, int]:
        """Stage, chunk of the model, and number in the chunk: chunk after chunk, layers go through all stages."""
        block, local = divmod(number, self.per_chunk)
        chunk, stage = divmod(block, self.sizes.pp)
        return stage, chunk, local

    def _stage(self, stage: int) -> Iterator[_Rank]:
        """The ranks of a stage that have files of their own."""
        sizes, seen = self.sizes, set()
        for number in range(sizes.stage_ranks):
            tp, ep, etp = number % sizes.tp, number // sizes.etp % sizes.ep, number % sizes.etp
            if (tp, ep) in seen:
                continue
            seen.add((tp, ep))
            folder = f"mp_rank_{tp:02d}" + (f"_{stage:03d}" if sizes.pp > 1 else "")
            rank = _Rank(tp, stage, ep, etp, number, folder + (f"_{ep:03d}" if sizes.ep > 1 else ""))
            for key in self.model:
                self._add_all(rank, key)
            rank.parameters.sort(key=lambda parameter: (parameter.chunk, *_place_in_model(parameter.stored)))
            if self.states:
                self._refuse_unknown_order(rank)
            yield rank

    def _refuse_unknown_order(self, rank: _Rank) -> None:
        for parameter in rank.parameters:
            if _module_order(parameter.stored) is None and not is_buffer(parameter):
                raise OptionError(
                    f"{self.index.path}: {parameter.key}: it is not known where Megatron's optimizer has it among the "
                    "others; leave the optimizer's state out (--drop optimizer)"
                )

    def _add_all(self, rank: _Rank, key: str) -> None:
        """What a rank has of a tensor."""
        last = (self.sizes.pp - 1, self.sizes.vpp - 1)
        stacked, numbered = _STACKED.fullmatch(key), _NUMBERED.fullmatch(key)
        if stacked is not None:
            if self.index.tensors[key].shape[:1] != (self.layers,):
                raise CorruptCheckpointError(
                    f"{key}: has the shape {list(self.index.tensors[key].shape)}, expected {self.layers} layers first"
                )
            for number in range(self.layers):
                self._add_layer(rank, key, number, stacked.group(1), (number,))
        elif numbered is not None:
            self._add_layer(rank, key, int(numbered.group(1)), numbered.group(2), ())
        elif key.startswith("embedding."):
            if rank.pp == 0:
                self._add(rank, 0, key, key, ())
            if key == _EMBEDDING and self.tied and self.sizes.pp > 1 and rank.pp == last[0]:
                self._add(rank, last[1], _OUTPUT, key, ())
        elif key.startswith(("decoder.final_layernorm.", "output_layer.")):
            if rank.pp == last[0]:
                self._add(rank, last[1], key, key, ())
        else:
            raise OptionError(f"{self.index.path}: {key}: it is not known which rank has it in this format")

    def _add_layer(self, rank: _Rank, key: str, number: int, rest: str, index: tuple[int, ...]) -> None:
        stage, chunk, local = self.place_of_layer(number)
        if stage != rank.pp:
            return
        for own, place in self.own_names(rank, key, rest):
            self._add(rank, chunk, f"decoder.layers.{local}.{own}", key, (*index, *place))

    def own_names(
        self, rank: _Rank, key: str, rest: str, expert_number: int | None = None
    ) -> Iterator[tuple[str, tuple[int, ...]]]:
        """What a rank calls a layer's parameter, or those of its experts; and the index along the axis of experts.

        Args:
            rank: whose.
            key: the whole, for messages.
            rest: of the key, behind the layer.
            expert_number: of one expert alone.
        """
        expert = _EXPERTS.fullmatch(rest)
        if holds_several(rest):
            raise OptionError(
                f"{self.index.path}: {key}: layers of Mamba and of linear attention are not written in this format "
                "here: ranks' files have this together with others in one tensor"
            )
        if expert is None:
            if ".experts." in f".{rest}":
                raise OptionError(f"{self.index.path}: {key}: experts in this form are not written in this format here")
            for local, other in LOCAL_NORMS if self.local else ():
                if rest.startswith(other):
                    rest = local + rest.removeprefix(other)
            yield rest, ()
            return
        count = self.experts // self.sizes.ep
        before, linear, leaf = expert.groups()
        for number in range(count) if expert_number is None else [expert_number - rank.ep * count]:
            place = (rank.ep * count + number,)
            if not 0 <= number < count:
                continue
            if not self.grouped:
                yield f"{before}.local_experts.{number}.{linear}.{leaf}", place
            elif leaf != _EXTRA_STATE:
                yield f"{before}.{linear}.{leaf}{number}", place
            elif number == 0:  # one for all of them
                yield f"{before}.{linear}.{leaf}", place

    def _add(self, rank: _Rank, chunk: int, stored: str, key: str, index: tuple[int, ...]) -> None:
        entry = self.index.tensors[key]
        partition = self.partitioner.decide(key)
        lead = len(index)
        counts = (*((self.layers,) if _STACKED.fullmatch(key) else ()), *((self.experts,) if _is_expert(key) else ()))
        if entry.shape[:lead] != counts:
            raise CorruptCheckpointError(f"{key}: has the shape {list(entry.shape)}, expected {list(counts)} first")
        own = list(entry.shape[lead:])
        if key in (_EMBEDDING, _OUTPUT) and entry.shape[0] == self.index.tensors[_EMBEDDING].shape[0]:
            own[0] = self.vocabulary
        slots, slot = (self.sizes.etp, rank.etp) if partition.expert else (self.sizes.tp, rank.tp)
        if partition.source == "whole" and slots > 1:
            raise OptionError(f"{key}: nothing tells how it is divided among tensor parallel ranks")
        axis = None if partition.axis is None or slots == 1 else partition.axis - lead
        boxes = [(Box((0,) * len(own), tuple(own)), [0] * len(own))]
        if axis is not None:
            if own[axis] % (slots * partition.parts):
                raise OptionError(f"{key}: {list(entry.shape)} cannot be divided among {slots} ranks along axis {axis}")
            whole, step = own[axis] // partition.parts, own[axis] // (partition.parts * slots)
            own[axis] //= slots
            boxes = []
            for part in range(partition.parts):
                sizes, at, origin = list(own), [0] * len(own), [0] * len(own)
                sizes[axis], at[axis], origin[axis] = step, part * step, part * whole + slot * step
                boxes.append((Box(tuple(at), tuple(sizes)), origin))
        shape = tuple(own)
        for state, stored_key in {"model": key, **self.states.get(key, {})}.items():
            if self.index.tensors[stored_key].shape != entry.shape:
                raise CorruptCheckpointError(f"{stored_key}: is not of the shape of {key}")
            sources = [
                source
                for box, origin in boxes
                for source in _sources(box, stored_key, index, origin, entry.shape[lead:])
            ]
            self.wanted[_view_key(rank, state, chunk, stored)] = Wanted(
                shape, tuple(sources), self.index.tensors[stored_key].dtype
            )
        rank.parameters.append(_Local(stored, chunk, key, FileTensor("", entry.dtype, 0, shape)))
        self._note_row(stored, key, shape, axis, lead, partition.parts)

    def _note_row(self, stored: str, key: str, shape: tuple[int, ...], axis: int | None, lead: int, parts: int) -> None:
        pattern = _pattern(stored)
        known = self._rows.get((key, pattern))
        if known is not None:
            self._rows[key, pattern] = replace(known, pieces=known.pieces + 1)
            return
        how = []
        if axis is not None:
            how.append(f"divided along axis {axis}" + (", each half by itself" if parts > 1 else ""))
        if lead:
            how.append("taken apart")
        transform = ", ".join(how) or "as it is"
        self._rows[key, pattern] = KeyPlan(key, 1, transform, pattern, shape, self.index.tensors[key].dtype)


def _sources(
    box: Box, key: str, index: tuple[int, ...], origin: Sequence[int], stored: tuple[int, ...]
) -> Iterator[Source]:
    """A box of a rank's tensor, of a stored one that has this shape behind `index`; zeros behind its last row."""
    lead = (1,) * len(index)
    left = max(0, stored[0] - origin[0]) if stored else 0
    if not stored or box.sizes[0] <= left:
        yield Source(box, key, Box((*index, *origin), (*lead, *box.sizes)))
        return
    if left:
        sizes = (left, *box.sizes[1:])
        yield Source(Box(box.offsets, sizes), key, Box((*index, *origin), (*lead, *sizes)))
    padding = Box((box.offsets[0] + left, *box.offsets[1:]), (box.sizes[0] - left, *box.sizes[1:]))
    yield Source(padding, None)


def _rows_at(arguments: Arguments, rows: int, tp: int) -> int | None:
    """To how many rows a launch at `tp` pads a vocabulary, of which `rows` are stored; None if that is not known."""
    stored_tp, values = arguments.count("tensor_model_parallel_size", default=1), arguments.values
    if token_count(values) is not None:
        # Whoever has given the number of rows himself gives it again.
        return padded_vocabulary(values, tp) if padded_vocabulary(values, stored_tp) == rows else rows
    if not values.get("make_vocab_size_divisible_by"):
        return rows
    multiple = arguments.count("make_vocab_size_divisible_by")
    unit, stored_unit = multiple * tp, multiple * stored_tp
    if rows % stored_unit:
        return rows
    # The tokens end in the last unit that is stored.
    fewest, most = (-(-tokens // unit) * unit for tokens in (rows - stored_unit + 1, rows))
    return most if fewest == most else None


@functools.lru_cache(maxsize=100_000)  # names that ranks have in common
def _pattern(stored: str) -> str:
    """A rank's key without the numbers of layers and experts."""
    pattern = re.sub(r"\.(layers|local_experts)\.\d+\.", r".\1.*.", stored)
    return re.sub(r"(\.experts\.linear_fc[12]\.[a-z]+)\d+$", r"\1*", pattern)


def _is_expert(key: str) -> bool:
    layer = _STACKED.fullmatch(key) or _NUMBERED.fullmatch(key)
    return layer is not None and _EXPERTS.fullmatch(layer.groups()[-1]) is not None


def _view_key(rank: _Rank, state: str, chunk: int, stored: str) -> str:
    return f"{rank.folder}/{state}{chunk}/{stored}"


def _module_order(stored: str) -> tuple[int, ...] | None:
    """Where the module stands that has a parameter; None if it is not known."""
    layer = _NUMBERED.fullmatch(stored)
    owner, _, leaf = (layer.group(2) if layer else stored).rpartition(".")
    expert = 0
    if leaf not in _PARAMETERS and (owner, leaf) not in _ALONE:
        return None
    if layer and (found := _LOCAL_EXPERT.fullmatch(layer.group(2))):
        owner, expert = found.group(1), int(found.group(2))
        if found.group(3).rpartition(".")[0] not in ("linear_fc1", "linear_fc2"):
            return None
        return _ORDER.index("decoder.layers"), int(layer.group(1)), _LAYER_ORDER.index(owner), expert
    order = _LAYER_ORDER if layer else _ORDER
    if owner not in order:
        return None
    if layer:
        return _ORDER.index("decoder.layers"), int(layer.group(1)), order.index(owner), 0
    return order.index(owner), 0, 0, 0


def _place_in_model(stored: str) -> tuple[Any, ...]:
    """For sorting: where a parameter stands among those of a chunk, as Megatron's modules register them."""
    module = _module_order(stored)
    owner, _, leaf = stored.rpartition(".")
    layer = _NUMBERED.fullmatch(stored)
    unknown = (_ORDER.index("decoder.layers"), int(layer.group(1)), len(_LAYER_ORDER), 0) if layer else (len(_ORDER),)
    leaf_at = _PARAMETERS.index(leaf) if leaf in _PARAMETERS else len(_PARAMETERS)
    return (*(unknown if module is None else module), owner, leaf_at, leaf)


def _common(index: CheckpointIndex) -> dict[str, Any]:
    """The common state, with stand-ins for classes of packages that are not there."""
    stored = stored_common_state(index)
    if stored is None or stored.transforms:
        raise OptionError(f"{index.path}: stores no common state, which the files have to hold (arguments, iteration)")
    value = unwrapped(_object_in(stored.content, stored.where))
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{stored.where}: expected a dict, got {type(value).__name__}")
    return value


def _object_in(content: bytes, where: str) -> Any:
    def read(offset: int, length: int) -> bytes:
        return content[offset : offset + length]

    state = read_state_file(read, len(content), where)
    return owned(state.value, read, where, state.records)


# --------------------------------------------------------------------------------------------------------------- a file


class _Filled(NamedTuple):
    """A tensor of a file by its parts, one after another: keys of the view, counts of zeros, or bytes of elements."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[str | int | bytes, ...]


def _write_rank(draft: _Draft, rank: _Rank, payloads: PiecePayloads, folder: Path) -> list[str]:
    (folder / rank.folder).mkdir()
    state, flat = _state_of(draft, rank)
    contents = {f"{rank.folder}/{MODEL_FILE}": state}
    if flat is not None:
        contents[f"{rank.folder}/{OPTIMIZER_FILE}"] = flat
    for name, content in contents.items():
        _write_file(folder / name, content, payloads)
    storage_at(folder / rank.folder).sync()
    return list(contents)


def _write_file(path: Path, content: Any, payloads: PiecePayloads) -> None:
    import torch

    from mcore_ckpt.convert._torch_files import write_torch_file

    tensors: list[_Filled] = []

    def number(value: Any) -> Any:
        """`value` with a number for each tensor, in the order in which a pickle comes by them."""
        if isinstance(value, torch.Tensor):
            plain = value.detach().contiguous()
            elements = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
            value = _Filled(str(plain.dtype).removeprefix("torch."), tuple(plain.shape), (elements,))
        if isinstance(value, _Filled):
            tensors.append(value)
            return _Number(len(tensors) - 1)
        return _mapped(value, number)

    numbered = number(content)

    def around(made: Sequence[Any]) -> Any:
        def put(value: Any) -> Any:
            return made[value.number] if isinstance(value, _Number) else _mapped(value, put)

        return put(numbered)

    walk = Walk()

    def fill(at: int, sink: Sink) -> None:
        filled = tensors[at]
        width = element_bytes(filled.dtype)
        for part in filled.parts:
            if isinstance(part, str):
                stream_tensor(payloads, Exported(part, payloads.index.tensors[part], filled.dtype), sink, walk)
            else:
                _give(sink, part if isinstance(part, bytes) else bytes(part * width))

    described = [(f"{path.name} {n}", getattr(torch, one.dtype), one.shape) for n, one in enumerate(tensors)]
    write_torch_file(path, described, fill, around=around, pickle_module=PickledByName())


class _Number(NamedTuple):
    """Stands for a tensor while a state dict is laid out."""

    number: int


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container with changed members; anything else as it is."""
    if isinstance(value, dict):
        return {key: change(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(part) for part in value)
    return value


def _give(sink: Sink, content: bytes) -> None:
    left = memoryview(content)
    while left:
        view = sink.space(min(len(left), _WINDOW_BYTES))
        view[:] = left[: len(view)]
        sink.filled(view)
        left = left[len(view) :]


# ------------------------------------------------------------------------------------------------------ what it holds


def _state_of(draft: _Draft, rank: _Rank) -> tuple[dict[str, Any], Any]:
    """A rank's state dict, and what its file of flat buffers holds (None: it has none)."""
    chunks: list[dict[str, Any]] = [{} for _ in range(draft.sizes.vpp)]
    for parameter in rank.parameters:
        part = _view_key(rank, "model", parameter.chunk, parameter.stored)
        chunks[parameter.chunk][parameter.stored] = _Filled(parameter.tensor.dtype, parameter.tensor.shape, (part,))
    for chunk, key, value in _extra_states(draft, rank):
        chunks[chunk][key] = value
    state: dict[str, Any] = {}
    flat = None
    for key, value in draft.common.items():
        if key == "args":
            state["args"] = Namespace(**draft.arguments.values)
        elif key == "optimizer":
            if draft.states:
                state["optimizer"], flat = _optimizers_of(draft, rank)
        elif key != "content_metadata":
            state[key] = value
    state |= {"model" if len(chunks) == 1 else f"model{number}": chunk for number, chunk in enumerate(chunks)}
    random = draft.random_state(rank)
    if random is not None and not draft.left_out:
        state["rng_state"] = _stored_object(draft.index, random)
    return state, flat


def _stored_object(index: CheckpointIndex, key: str) -> Any:
    return unwrapped(_object_in(read_object(index, index.objects[key]), f"{key} ({index.objects[key].item.file})"))


def _extra_states(draft: _Draft, rank: _Rank) -> Iterator[tuple[int, str, Any]]:
    """What layers keep of their own, by chunk; the output layer's is in these files alone."""
    found = False
    for full in draft.index.objects:
        shard = parse_object_key(full)
        if shard is None or not shard.key.endswith(f".{_EXTRA_STATE}"):
            continue
        stacked, numbered = _STACKED.fullmatch(shard.key), _NUMBERED.fullmatch(shard.key)
        if stacked is not None:
            number, rest, expert = shard.offset[0], stacked.group(1), shard.offset[1:]
        elif numbered is not None:
            number, rest, expert = int(numbered.group(1)), numbered.group(2), shard.offset
        elif shard.key == f"decoder.final_layernorm.{_EXTRA_STATE}":
            if rank.pp == draft.sizes.pp - 1:
                yield draft.sizes.vpp - 1, shard.key, _stored_object(draft.index, full)
            continue
        else:
            raise OptionError(f"{draft.index.path}: {full}: it is not known which rank has it in this format")
        stage, chunk, local = draft.place_of_layer(number)
        if stage != rank.pp:
            continue
        for own, place in draft.own_names(rank, full, rest, expert[0] if expert else None):
            if draft.grouped and place and draft.stored.values.get("fp8"):
                raise OptionError(f"{draft.index.path}: {full}: scales of grouped experts in FP8 are not joined here")
            yield chunk, f"decoder.layers.{local}.{own}", _stored_object(draft.index, full)
            found = True
    if rank.pp == draft.sizes.pp - 1 and found:
        yield draft.sizes.vpp - 1, f"output_layer.{_EXTRA_STATE}", None


def _optimizers(draft: _Draft) -> list[dict[str, Any]]:
    """Settings of the optimizers that the ranks have: experts on several ranks have one of their own."""
    given = draft.common.get("optimizer")
    if not isinstance(given, dict):
        raise OptionError(f"{draft.index.path}: has the optimizer's state by parameter, and no settings of it")
    found: list[Any] = [given[number] for number in sorted(given)] if set(given) & {0, 1} else [given]
    wanted = 2 if draft.experts and draft.sizes.ep > 1 else 1
    if len(found) > 2 or not all(isinstance(one, dict) for one in found):
        raise OptionError(f"{draft.index.path}: {len(found)} optimizers are not written in this format here")
    if len(found) == wanted:
        return found
    # One alone has the settings for all: those of experts differ in nothing but that they are theirs.
    return [found[0], _for_experts(found[0])] if wanted == 2 else [found[0]]


def _for_experts(settings: Mapping[str, Any]) -> dict[str, Any]:
    inner = dict(settings.get("optimizer", settings))
    flag = "is_expert_parallel"
    inner["param_groups"] = [
        {**group, (f"pre_{flag}" if f"pre_{flag}" in group else flag): True} for group in inner["param_groups"]
    ]
    return {**settings, "optimizer": inner} if "optimizer" in settings else inner


def _optimizers_of(draft: _Draft, rank: _Rank) -> tuple[Any, Any]:
    """The optimizers' part of a rank's state dict, and what its file of flat buffers holds."""
    made, flats = [], []
    covered: set[int] = set()
    for position, settings in enumerate(_optimizers(draft)):
        inner = settings.get("optimizer", settings)
        members = group_members(rank.folder, inner["param_groups"], rank.parameters, draft.arguments)
        if position:
            kept = [number for number, group in enumerate(members) if group]  # biases are there, or not
            inner = {**inner, "param_groups": [inner["param_groups"][number] for number in kept]}
            settings = {**settings, "optimizer": inner} if "optimizer" in settings else inner
            members = [members[number] for number in kept]
        own = [number for group in members for number in group]
        covered |= set(own)
        made.append(_optimizer_of(draft, rank, settings, members))
        if "param_state_sharding_type" in settings:
            # Of what all data parallel ranks have alike, the first one saves it.
            is_first = position > 0 or rank.stage_rank < draft.sizes.tp
            flats.append(_flat_of(draft, rank, sorted(own)) if is_first else None)
    missing = [n for n, parameter in enumerate(rank.parameters) if n not in covered and not is_buffer(parameter)]
    if missing:
        raise OptionError(
            f"{draft.index.path}: no group of the optimizer has {rank.parameters[missing[0]].key}, by what tells its "
            "groups apart; leave the optimizer's state out (--drop optimizer)"
        )
    if len(made) == 1:
        return made[0], flats[0] if flats else None
    return made, flats or None


def _optimizer_of(
    draft: _Draft, rank: _Rank, settings: Mapping[str, Any], members: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """An optimizer as a rank's state dict has it."""
    found = {key: value for key, value in settings.items() if key != "param_state_sharding_type"}
    distributed = "param_state_sharding_type" in settings
    inner = dict(found.get("optimizer", found))
    groups = [dict(group) for group in inner["param_groups"]]
    inner["param_groups"] = groups
    if not distributed:
        step = inner.pop("state", {}).get("common_step")
        state: dict[int, Any] = {}
        copies = []
        for group, numbers in zip(groups, members, strict=True):
            group["params"] = list(range(len(state), len(state) + len(numbers)))
            mains = []
            for number in numbers:
                given = draft.states_of(rank, rank.parameters[number])
                main = given.pop(main_parameter(distributed=False), None)
                mains += [] if main is None else [main]
                state[len(state)] = given if step is None else {**given, "step": step}
            copies.append(mains)
        inner = {"state": state, **inner}
        if "optimizer" in found:
            found["fp32_from_fp16_params"] = copies
    return {**found, "optimizer": inner} if "optimizer" in found else inner


def _flat_of(draft: _Draft, rank: _Rank, members: Sequence[int]) -> dict[Any, Any]:
    """The buffers of a rank, as the first data parallel rank gathers them."""
    import torch

    found: dict[Any, Any] = {"buckets_coalesced": True}
    for at, (chunk, dtype, numbers) in enumerate(buffer_members(members, rank.parameters)):
        sizes = {number: math.prod(rank.parameters[number].tensor.shape) for number in numbers}
        shared = draft.tied and draft.sizes.pp > 1
        alone = {n for n in numbers if shared and rank.parameters[n].stored in (_EMBEDDING, _OUTPUT)}
        layout = likely_layout(rank.pp, chunk, draft.arguments, sum(sizes.values()))
        starts, total = flat_places(sizes, alone, layout)
        tensors: dict[str, Any] = {}
        for state in (main_parameter(distributed=True), "exp_avg", "exp_avg_sq"):
            parts: list[str | int | bytes] = []
            position = 0
            for number in sorted(numbers, key=lambda n: starts[n]):
                given = draft.states_of(rank, rank.parameters[number]).get(state)
                if given is None or given.dtype != "float32":
                    raise OptionError(
                        f"{draft.index.path}: {rank.parameters[number].key}: its {state} is not there in float32, as "
                        "the distributed optimizer's files have it; leave the optimizer's state out (--drop optimizer)"
                    )
                parts += [starts[number] - position, *given.parts]
                position = starts[number] + sizes[number]
            tensors[state] = _Filled("float32", (total,), (*parts, total - position))
        tensors["numel_unpadded"] = total
        wide = dtype == "float32" or draft.arguments.flag("accumulate_allreduce_grads_in_fp32")
        gradient = torch.float32 if wide else getattr(torch, dtype)
        found[at] = {(getattr(torch, dtype), gradient): tensors}
    return found
