"""One conversion, whatever it is from and to: what is wanted, what was thought of it, and what came of it.

    a source, options -> `Import` or `Export`: thought through, nothing written -> its plan, key by key, for showing
                                                                                -> the target, and a report

What kinds of sources and targets there are is in `exchange`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mcore_ckpt.convert._new_directory import new_directory
from mcore_ckpt.convert._partition import Partitioner
from mcore_ckpt.convert._pieces import PiecePayloads, Wanted
from mcore_ckpt.convert._reshard_copy import Journal
from mcore_ckpt.convert._reshard_target import BuildOptions, build_target, refuse_changed
from mcore_ckpt.convert.reshard_plan import TargetLayout, make_plan
from mcore_ckpt.convert.rules import PartitionRule, RenameRule
from mcore_ckpt.families.table import Implementation
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.item_layout import encode_object
from mcore_ckpt.format.metadata_read import COMMON_FILE, CONFIG_FILE, encode_config
from mcore_ckpt.format.safe_pickle import Unavailable
from mcore_ckpt.storage.resolve import storage_at
from mcore_ckpt.tools.payloads import StoredPayloads

__all__ = [
    "Conversion",
    "ConversionPlan",
    "ConversionReport",
    "Export",
    "ExportOptions",
    "Import",
    "ImportOptions",
    "KeyPlan",
    "Made",
    "PickledByName",
    "make_import",
    "saved",
    "write_directory",
]


@dataclass(frozen=True, slots=True)
class ImportOptions:
    """What to make of a source; each kind of source asks for what it knows of.

    Attributes:
        tp, pp, ep, etp: tensor, pipeline, expert, and expert tensor parallel size of the target's files; a launch loads
            them under any other layout as well. None: as a source that is divided among ranks is, otherwise 1, and
            `etp` as `tp`.
        dtype: convert the model's floating-point tensors to it, torch's name without `torch.`.
        drop_optimizer: leave the optimizer's state out.
        arch: of a Hugging Face model, the family's name; `"auto"`: what `config.json` says.
        transformer_impl: as `--transformer-impl` of the launch: the layers call some parameters differently.
        numbered_layers: a tensor for each layer; otherwise, as Megatron does, one for all, if they are alike.
        vocabulary_multiple: `--make-vocab-size-divisible-by` of the launch: rows of the embedding are padded to a
            multiple of this for each tensor parallel rank.
        hf_config: directory with the model's `config.json`; None: it lies beside the tensors.
        global_batch_size: of the launch that goes on with the optimizer's state, where nothing stored tells how many
            samples there were: it then goes on at the optimizer's step, behind as many samples.
        rename: rules for the stored keys.
        rules: how tensors are divided, by their new keys.
        common: a `common.pt` to take along.
        workers, verify, memory_bytes: as for `reshard`.
    """

    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None
    dtype: str | None = None
    drop_optimizer: bool = False
    arch: str = "auto"
    transformer_impl: Implementation = "transformer_engine"
    numbered_layers: bool = False
    vocabulary_multiple: int = 128
    hf_config: str | None = None
    global_batch_size: int | None = None
    rename: tuple[RenameRule, ...] = ()
    rules: tuple[PartitionRule, ...] = ()
    common: str | None = None
    workers: int = 2
    verify: bool = True
    memory_bytes: int = 1024**3

    @property
    def layout(self) -> TargetLayout:
        """The sizes together, 1 where nothing was said; raises `OptionError` where they cannot be."""
        return self.layout_like(TargetLayout(1, 1))

    def layout_like(self, source: TargetLayout) -> TargetLayout:
        """The sizes together, as the source has them where nothing was said."""
        etp = self.etp if self.etp is not None or self.tp is not None else source.etp
        tp, pp, ep = (
            own if size is None else size
            for size, own in ((self.tp, source.tp), (self.pp, source.pp), (self.ep, source.ep))
        )
        return TargetLayout(tp, pp, ep, etp)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """What to make of a checkpoint; each kind of target asks for what it knows of.

    Attributes:
        dtype: convert floating-point tensors to it, torch's name without `torch.`.
        drop_optimizer: leave the optimizer's state out.
        max_shard_bytes: no file holds more, unless one tensor is larger.
        rename: rules for the keys.
        only: keys to carry: with any of `*?[` a shell pattern for the whole key, otherwise a part of it.
        arch: a family's name; `"auto"`: what `hf_config` or the stored arguments say.
        hf_config: directory with the model's `config.json`, which is taken over and held against the stored shapes;
            tokenizer files and `generation_config.json` beside it are taken along.
        tp, pp, ep, etp: parallel sizes of a target that is divided among ranks; `etp` by default as `tp`.
        vpp: how many chunks of the model each pipeline stage has.
    """

    dtype: str | None = None
    drop_optimizer: bool = False
    max_shard_bytes: int = 5 * 1000**3
    rename: tuple[RenameRule, ...] = ()
    only: str | None = None
    arch: str = "auto"
    hf_config: str | None = None
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int = 1


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """A tensor of the target, or a part of one, and what it is made of.

    Attributes:
        source: key of the tensor that it comes from; with `*` where that is said of many.
        pieces: how many of the source's tensors it is put together from, or into how many it is taken apart.
        target: its key; in brackets the index along axes that count layers and experts.
        shape: of the tensor of the side that keeps each parameter by itself.
    """

    source: str
    pieces: int
    transform: str
    target: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """What would be done.

    Attributes:
        format: of the source or the target that is not `torch_dist`.
        family: of the model, where one was found.
        source_layout, target_layout: sizes, for showing; empty where a side is not divided.
        config: the model's `config.json`.
        arguments: Megatron's.
        objects: how many objects the target has.
        notes: what is good to know.
        left_out: what has no place in the target, each with the reason.
    """

    format: str
    family: str
    source_layout: str
    target_layout: str
    keys: tuple[KeyPlan, ...]
    config: Mapping[str, Any]
    arguments: Mapping[str, Any]
    objects: int
    notes: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """What was made of a checkpoint, or into one.

    Attributes:
        format: of the source or the target that is not `torch_dist`: `safetensors`, `torch`, `dcp`, `ucp`, `hf`,
            `megatron-legacy`.
        family: of the model, where one was asked for.
        source_layout, target_layout: sizes, for showing; empty where a side is not divided.
        files: that were written.
        tensors: how many the target has.
        payload_bytes: of them.
        notes: what is good to know.
        left_out: what has no place in the target, with the reason where it is not plain.
    """

    source: str
    target: str
    format: str
    family: str
    source_layout: str
    target_layout: str
    files: tuple[str, ...]
    tensors: int
    payload_bytes: int
    notes: tuple[str, ...]
    left_out: tuple[str, ...]


class Made(NamedTuple):
    """What was written: files, and how many tensors and bytes of elements are in them."""

    files: Sequence[str]
    tensors: int
    payload_bytes: int


def _no_keys() -> Iterable[KeyPlan]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What both directions have been thought through to.

    Attributes:
        keys: one after another, for showing.
        objects: of the target, by full key.
        others: as in a plan.
    """

    format: str
    family: str = ""
    source_layout: str = ""
    target_layout: str = ""
    keys: Callable[[], Iterable[KeyPlan]] = _no_keys
    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def plan(self) -> ConversionPlan:
        """For showing."""
        return ConversionPlan(
            self.format,
            self.family,
            self.source_layout,
            self.target_layout,
            tuple(self.keys()),
            self.config,
            self.arguments,
            len(self.objects),
            self.notes,
            self.left_out,
        )

    def report(self, source: str, target: Path, made: Made) -> ConversionReport:
        """What was made of it."""
        return ConversionReport(
            source,
            str(target),
            self.format,
            self.family,
            self.source_layout,
            self.target_layout,
            tuple(made.files),
            made.tensors,
            made.payload_bytes,
            self.notes,
            self.left_out,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Import(Conversion):
    """A source that is to become a `torch_dist` checkpoint.

    Attributes:
        payloads: of the source, open.
        layout: of the target's files.
        common: the content of `common.pt`, given the dtypes that the target's tensors have.
        wanted: the target's tensors; None: those of the source, as they are.
        rules: how they are divided.
    """

    payloads: StoredPayloads
    layout: TargetLayout
    common: Callable[[set[str]], bytes]
    wanted: Mapping[str, Wanted] | None = None
    rules: tuple[PartitionRule, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Export(Conversion):
    """A checkpoint that is to become something else.

    Attributes:
        payloads: open, of all that is going to be read.
        make: writes it to a directory that is not there yet, showing a bar if it is told to.
    """

    payloads: StoredPayloads
    make: Callable[[Path, bool | None], Made]


def make_import(
    conversion: Import, source: Path, target: Path, options: ImportOptions, progress: bool | None
) -> ConversionReport:
    """Build the target, prove it, and let it appear.

    Args:
        conversion: what was thought through; its payloads are closed.
        source: for the report.
        target: where nothing is yet.
        options: of which `dtype`, `workers`, `verify` and `memory_bytes` are for here.
        progress: show bars; None: if standard error is a terminal.

    Raises:
        CheckpointError: as for `reshard_checkpoint`.
    """
    with conversion.payloads as payloads:
        if conversion.wanted is not None:
            # Many of the objects are one and the same.
            contents = {id(value): saved(value) for value in conversion.objects.values()}
            objects = {key: contents[id(value)] for key, value in conversion.objects.items()}
            payloads = PiecePayloads(payloads, conversion.wanted, objects)
        arguments = conversion.arguments
        partitioner = Partitioner(
            payloads.index, rules=conversion.rules, arguments=arguments, chunks_tell=conversion.wanted is None
        )
        plan = make_plan(
            payloads.index,
            conversion.layout,
            partitioner,
            dtype=options.dtype,
            workers=options.workers,
            arguments=arguments,
        )
        common = conversion.common({move.dtype for move in plan.moves})

        def carry(partial: Path) -> None:
            storage = storage_at(partial)
            storage.publish(CONFIG_FILE, encode_config())
            storage.publish(COMMON_FILE, common)

        build = BuildOptions(workers=options.workers, verify=options.verify, memory_bytes=options.memory_bytes)
        build_target(payloads, plan, target, build, carry=carry, progress=progress)
    nbytes = sum(move.payload_bytes for move in plan.moves)
    return conversion.report(str(source), target, Made(sorted(plan.sizes), len(plan.moves), nbytes))


def write_directory(
    target: Path,
    index: CheckpointIndex,
    seen: Mapping[str, list[int]],
    payloads: StoredPayloads,
    write: Callable[[Path, Journal | None], list[str]],
    *,
    keys: Sequence[str] | None = None,
    fingerprint: str | None = None,
) -> list[str]:
    """Write files into a directory that appears when all of them are there, of a source that nobody has changed.

    Args:
        target: where nothing is yet.
        index: of the source.
        seen: the source's files as they were at first.
        payloads: that are read.
        write: into a folder, with a journal if there is a fingerprint; returns the names of the files.
        keys: of the source's tensors that count; by default, all.
        fingerprint: of what is made, if it can be gone on with when it was interrupted.

    Raises:
        CheckpointError: as for `export_checkpoint`.
    """
    with new_directory(target, fingerprint) as (folder, journal):
        files = write(folder, journal)
        payloads.check_rest()
        refuse_changed(index, seen, keys)
    return files


# --- objects


# Its pickler in Python, whose way of writing names can be changed.
_Pickler: Any = pickle._Pickler  # noqa: SLF001


class PickledByName:
    """Pickles stand-ins as what they stand in for, without importing it; as for `torch.save(pickle_module=)`."""

    __name__ = "pickle"
    HIGHEST_PROTOCOL = pickle.HIGHEST_PROTOCOL

    class Pickler(_Pickler):  # type: ignore[misc]
        """Writes names of what is not there."""

        def reducer_override(self, value: Any) -> Any:
            """An instance of the class that it stands in for."""
            if isinstance(value, Unavailable):
                made = type(value), value.arguments
                return made if value.state is None else (*made, value.state)
            return NotImplemented

        def save_global(self, value: Any, name: Any = None) -> None:
            """Write the name of a class."""
            if not (isinstance(value, type) and issubclass(value, Unavailable)):
                super().save_global(value, name)
                return
            module, _, qualified = value.class_name.rpartition(".")
            self.write(pickle.GLOBAL + f"{module}\n{qualified}\n".encode())
            self.memoize(value)


def saved(value: Any) -> bytes:
    """`value` as `torch.save` writes it; by torch only if there are tensors in it: its start takes seconds."""
    try:
        return encode_object(value, PickledByName.Pickler)
    except TypeError:
        import torch

    content = io.BytesIO()
    torch.save(value, content, pickle_module=PickledByName())
    return content.getvalue()
