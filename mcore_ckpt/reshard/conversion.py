"""One conversion, whatever it is from and to.

a source, options -> `Conversion` (nothing is written) -> its rows (`dry_run`), or the target -> `ConversionReport`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mcore_ckpt.format.index import CheckpointIndex, TensorEntry
from mcore_ckpt.reshard.build import build_target
from mcore_ckpt.reshard.derived import cast_payloads
from mcore_ckpt.reshard.options import ConversionOptions
from mcore_ckpt.reshard.plan import target_dtype
from mcore_ckpt.reshard.slots import TargetPlan
from mcore_ckpt.reshard.source_files import SourceFiles
from mcore_ckpt.reshard.target_files import TargetFiles
from mcore_ckpt.tools.payloads import StoredPayloads
from mcore_ckpt.tools.run_folders import Places


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """A tensor of the target, or a part of one, and what it is made of.

    Attributes:
        source: key of the tensor that it comes from; with `*` where many have one row.
        parts: how many of the source's tensors it is put together from, or into how many it is taken apart.
        target: its key; in brackets the index along axes that count layers and experts.
        shape: of the tensor on the side that keeps each parameter by itself.
        decided_by: for a reshard, what tells the axis; `guess` if that is a name or a shape alone.
    """

    source: str
    parts: int
    transform: str
    target: str
    shape: tuple[int, ...]
    dtype: str
    decided_by: str = ""
    guess: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionReport:
    """What a conversion does, and what it has written.

    Attributes:
        source, target: directories.
        format: of the side that is not `torch_dist`: `safetensors`, `torch`, `dcp`, `ucp`, `hf`, `fsdp_dtensor`,
            `megatron-legacy`; of a reshard `torch_dist`.
        family: of the model, where one was found.
        source_layout, target_layout: parallel sizes, for showing; empty where a side is not divided.
        keys: row by row; with `dry_run` alone.
        config: the model's `config.json`.
        arguments: Megatron's.
        objects: how many objects the target has.
        tensors, payload_bytes, chunks: of the target.
        guesses: how many tensors are divided by a guess.
        notes: what is good to know.
        left_out: what has no place in the target, with the reason where it is not plain.
        files: that were written; none with `dry_run`.
        file_bytes: of them.
        resumed: an earlier run had begun the target.
        verified: the target was read back and compared with the source.
        copy_s, verify_s: seconds.
    """

    source: str = ""
    target: str = ""
    format: str
    family: str = ""
    source_layout: str = ""
    target_layout: str = ""
    keys: tuple[KeyPlan, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    objects: int = 0
    tensors: int = 0
    payload_bytes: int = 0
    chunks: int = 0
    guesses: int = 0
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    file_bytes: int = 0
    resumed: bool = False
    verified: bool = False
    copy_s: float = 0.0
    verify_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion that has been planned; nothing has been written."""

    payloads: StoredPayloads  # of everything that is written, open
    source: SourceFiles  # the files behind them, as they were at first
    plan: TargetPlan  # of the target
    keys: Callable[[], Iterable[KeyPlan]]  # rows, one after another, for showing
    report: ConversionReport  # what is known before anything is written
    carry: Callable[[TargetFiles], None] = lambda _: None  # adds what is no tensor
    carried: Sequence[str] = ()  # names of the files that `carry` may add


def shadow_note(index: CheckpointIndex) -> tuple[str, ...]:
    """What a report says of the shadow copies in a source: they belong to its ranks, and are not converted."""
    count = len(index.shadow_copies())
    return (f"{count} shadow copies of tensors (`__shadow_<rank>__...`) are not converted",) if count else ()


def run_conversion(
    conversion: Conversion,
    places: Places,
    options: ConversionOptions,
    *,
    dry_run: bool,
    progress: bool | None,
    move_files: bool = True,
) -> ConversionReport:
    """Write what was planned, or only report it (`dry_run`); closes the payloads."""
    plan = conversion.plan
    written: dict[str, Any] = {}
    with conversion.payloads as payloads:
        if dry_run:
            written["keys"] = tuple(conversion.keys())
        else:
            built = build_target(
                payloads,
                plan,
                places.target,
                source=conversion.source,
                workers=options.workers,
                verify=options.verify,
                restart=options.restart,
                move_files=move_files,
                memory_bytes=options.memory_bytes,
                carry=conversion.carry,
                carried=conversion.carried,
                progress=progress,
            )
            written = asdict(built)
            places.finish()
    moves = list(plan.moves)
    return replace(
        conversion.report,
        source=str(places.source),
        target=str(places.target),
        tensors=len(moves),
        payload_bytes=plan.payload_bytes,
        chunks=sum(len(move.slots) for move in moves),
        **written,
    )


def arguments_of(common: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's arguments in a common state of plain values; empty if it has none."""
    found = common.get("args")
    return found if isinstance(found, dict) else {}


def in_dtype(payloads: StoredPayloads, dtype: str | None) -> StoredPayloads:
    """Payloads in which the model's floating-point tensors have this dtype."""

    def wanted(entry: TensorEntry) -> str:
        return target_dtype(entry, dtype)

    return cast_payloads(payloads, wanted)
