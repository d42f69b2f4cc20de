"""Options of conversions, each described once: the commands and the documentation take names and help from here.

A conversion's options are a dataclass whose fields are made by `option`. `TAKES` says which of them each kind of
conversion takes. Values come as people write them (`"bf16"`, `"1G"`, a file of rules) and are checked when the options
are made, for the functions as for the commands.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Final

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.sizes import parse_size, shown_size
from mcore_ckpt.reshard.rules import PartitionRule, RenameRule, parse_partition_rules, parse_rename_rules, rules_in

FULLY_RESHARDABLE: Final = "fully_reshardable"
"""The layout that an optimizer's state can be given."""

# By the field's name. Sizes are called as in Megatron's `tools/checkpoint/convert.py`.
_ALIASES: Final = {
    "workers": "-j",
    "tp": "--target-tensor-parallel-size",
    "pp": "--target-pipeline-parallel-size",
    "ep": "--target-expert-parallel-size",
    "etp": "--target-expert-tensor-parallel-size",
}
_MIN_MEMORY_BYTES: Final = 384 * 1024**2
"""The process itself and the smallest buffers."""


def option(default: Any, text: str, *, flag: str = "", metavar: str = "", choices: Sequence[str] = ()) -> Any:
    """A field of an options class: its default, what it does in a few words, its name in the shell if unlike the
    field's, what stands for its value in help texts, and its choices.
    """
    return field(default=default, metadata={"text": text, "flag": flag, "metavar": metavar, "choices": tuple(choices)})


def flag_of(described: Field[Any]) -> str:
    """The name of an option in the shell."""
    return str(described.metadata["flag"]) or f"--{described.name.replace('_', '-')}"


def flags_of(described: Field[Any]) -> list[str]:
    """All names of an option in the shell."""
    return [name for name in (flag_of(described), _ALIASES.get(described.name)) if name]


def help_of(described: Field[Any]) -> str:
    """What an option does, and its default."""
    default = described.default
    shown = default
    if described.name.endswith("_bytes") and isinstance(default, int):
        shown = shown_size(default)
    plain = default is None or default == () or isinstance(default, bool)
    return str(described.metadata["text"]) + ("" if plain else f" (default: {shown})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions:
    """What every conversion takes."""

    TAKES: ClassVar[Mapping[str, str]] = {}

    dtype: str | None = option(
        None, "convert the model's floating-point tensors: bf16, fp16, fp32, or torch's names", metavar="TYPE"
    )
    drop_optimizer: bool = option(False, "leave the optimizer's state out")
    workers: int = option(2, "threads, and tensors in progress at once", metavar="N")
    memory_bytes: int = option(1024**3, "memory to stay within, e.g. 512MiB", flag="--memory", metavar="SIZE")
    verify: bool = option(True, "compare DST with SRC by checksum before it appears, if DST is a checkpoint")
    restart: bool = option(False, "throw away what an interrupted run has left, instead of resuming it")

    def __post_init__(self) -> None:
        for described in fields(self):
            object.__setattr__(self, described.name, _checked(described, getattr(self, described.name)))
        for name, value in self.normal().items():
            object.__setattr__(self, name, value)

    def normal(self) -> dict[str, Any]:
        """Values as the rest of the package has them; raises `OptionError`."""
        from mcore_ckpt.tools.dtype_cast import floating_dtype  # imports numpy, which no help text needs

        return {
            "dtype": floating_dtype(self.dtype, "dtype"),
            "memory_bytes": parse_size(self.memory_bytes, at_least=_MIN_MEMORY_BYTES),
        }

    def refuse_others(self, kind: str, direction: str) -> None:
        """Raise `OptionError` for an option that a kind of conversion does not take."""
        for described in fields(self):
            kinds = [known for known, names in self.TAKES.items() if described.name in names.split()]
            if kinds and kind not in kinds and getattr(self, described.name) != described.default:
                raise OptionError(f"{flag_of(described)}: not with {direction} {kind}; it goes with {', '.join(kinds)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions(ConversionOptions):
    """What to make of a checkpoint. Without `tp` and `pp` the layout of `like`, or the one it has, is taken over."""

    TAKES: ClassVar[Mapping[str, str]] = {}

    tp: int | None = option(None, "tensor parallel size", metavar="N")
    pp: int | None = option(None, "pipeline parallel size", metavar="N")
    ep: int = option(1, "expert parallel size", metavar="N")
    etp: int | None = option(None, "tensor parallel size of experts (default: as --tp)", metavar="N")
    dp: int | None = option(None, "spread chunks over so many data parallel ranks", metavar="N")
    like: str | None = option(
        None, "take axes (without --tp and --pp: chunks and files) from this checkpoint", metavar="CKPT"
    )
    rules: tuple[PartitionRule, ...] = option(
        (), "file of lines: key pattern (regular expression), axis or `whole`, [x2] for two halves", metavar="FILE"
    )
    merge: bool = option(False, "one file for each rank, instead of one for each rank and worker")
    only: str | None = option(None, "keys to carry (shell pattern, or a part of the key)", metavar="PATTERN")
    optimizer_layout: str | None = option(
        None,
        "give the optimizer's state this layout, which loads under any division of the model",
        choices=(FULLY_RESHARDABLE,),
    )
    file_copy: bool = option(True, "let the kernel copy payloads that stay as they are")

    def normal(self) -> dict[str, Any]:
        return {**ConversionOptions.normal(self), "rules": partition_rules(self.rules)}


def _checked(described: Field[Any], value: Any) -> Any:
    """A value of the type that the field says, if it is not converted by `normal`; raises `OptionError`."""
    kind = str(described.type)
    choices = described.metadata["choices"]
    if value is None and kind.endswith("| None"):
        return None
    if choices and value not in choices:
        raise OptionError(f"{flag_of(described)} {value!r}: expected one of {', '.join(choices)}")
    if kind.startswith("int") and not described.name.endswith("_bytes"):
        if not hasattr(value, "__index__") or isinstance(value, bool) or operator.index(value) < 1:
            raise OptionError(f"{flag_of(described)} {value!r}: expected a whole number of at least 1")
        return operator.index(value)
    if kind == "bool" and not isinstance(value, bool):
        raise OptionError(f"{flag_of(described)} {value!r}: expected True or False")
    if kind.startswith("str"):
        if not isinstance(value, str | os.PathLike):
            raise OptionError(f"{flag_of(described)} {value!r}: expected text")
        return os.fspath(value)
    return value


def kinds_of(cls: type[ConversionOptions], name: str) -> tuple[str, ...]:
    """The kinds of conversion that take an option; empty: all."""
    kinds = tuple(kind for kind, names in cls.TAKES.items() if name in names.split())
    return () if len(kinds) == len(cls.TAKES) else kinds


def partition_rules(given: Any) -> tuple[PartitionRule, ...]:
    """Rules as a caller gives them: a file, or the rules themselves."""
    return rules_in(given or None, parse_partition_rules)


def rename_rules(given: Any) -> tuple[RenameRule, ...]:
    """Rules as a caller gives them: a file, or the rules themselves."""
    return rules_in(given or None, parse_rename_rules)
