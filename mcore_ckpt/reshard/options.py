"""Options of conversions, each described once, and the rules that people write into files.

A conversion's options are a dataclass whose fields are made by `option`; commands and documentation take names and help
from there. `TAKES` says which of them each kind of conversion takes. Values come as people write them (`"bf16"`,
`"1G"`, a file of rules) and are checked when the options are made, for the functions as for the commands.

A file of rules has one rule a line: a regular expression that is searched for in the key, then a new name or an axis.
The first rule that finds something in a key applies. `#` starts a comment.
"""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Final, Literal, NamedTuple, TypeVar

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.options import local_path, parse_size

_Rule = TypeVar("_Rule")

_DROP = "-"
_MAX_RULES_BYTES = 16 * 1024 * 1024


class RenameRule(NamedTuple):
    """Keys in which the pattern is found get the replacement for it; None drops them."""

    pattern: re.Pattern[str]
    replacement: str | None


def rules_in(given: Any, parse: Callable[[str, str], list[_Rule]]) -> tuple[_Rule, ...]:
    """Rules as a caller gives them: of a file, by `parse`, or themselves. Raises `OptionError`, `OSError`."""
    if not given or not isinstance(given, str | os.PathLike):
        return tuple(given or ())
    try:
        with local_path(given).open("rb") as file:
            content = file.read(_MAX_RULES_BYTES + 1)
        if len(content) > _MAX_RULES_BYTES:
            raise OptionError(f"{os.fspath(given)}: no file of rules has more than {_MAX_RULES_BYTES} bytes")
        return tuple(parse(content.decode("utf-8"), os.fspath(given)))
    except UnicodeDecodeError as error:
        raise OptionError(f"{os.fspath(given)}: not a text file: {error}") from error


def parse_rename_rules(text: str, where: str) -> list[RenameRule]:
    r"""Rules from text, one a line: a regular expression, then what to put for it, or `-` to drop the key.

    ^decoder\.layers\.(\d+)\.     model.layers.\1.
    _extra_state                  -
    """

    def rule(words: list[str]) -> RenameRule:
        pattern, replacement = words
        return RenameRule(re.compile(pattern), None if replacement == _DROP else replacement)

    return _parsed(text, where, rule, "PATTERN REPLACEMENT, or PATTERN -")


def rename_keys(keys: Iterable[str], rules: Sequence[RenameRule]) -> dict[str, str]:
    """New names by old ones, without dropped keys; raises `OptionError` if two keys get the same name."""
    renamed: dict[str, str] = {}
    origin: dict[str, str] = {}
    for key in keys:
        new: str | None = key
        for rule in rules:
            if rule.pattern.search(key):
                try:
                    new = None if rule.replacement is None else rule.pattern.sub(rule.replacement, key)
                except (re.error, IndexError) as error:
                    raise OptionError(
                        f"replacement {rule.replacement!r} of {rule.pattern.pattern!r}: {error}"
                    ) from error
                break
        if new is None:
            continue
        if new in origin:
            raise OptionError(f"{key} and {origin[new]} would both be called {new}; correct the rename rules")
        origin[new] = key
        renamed[key] = new
    return renamed


class PartitionRule(NamedTuple):
    """One line of a rules file: keys that the pattern finds are divided along `axis` (None: whole) in `parts` parts."""

    pattern: re.Pattern[str]
    axis: int | None
    parts: int = 1


def parse_partition_rules(text: str, where: str) -> list[PartitionRule]:
    """Rules from text, one a line: a regular expression, an axis of the global shape or `whole`, `x2` for halves.

    linear_qkv\\.weight$   0
    linear_fc1\\.weight$   0 x2     # two halves, each divided
    my_norm               whole
    """

    def rule(words: list[str]) -> PartitionRule:
        pattern, axis, *rest = words
        parts = int(rest[0].removeprefix("x")) if rest else 1
        if len(rest) > 1 or parts < 1:
            raise ValueError("too many words, or fewer parts than one")
        return PartitionRule(re.compile(pattern), None if axis == "whole" else int(axis), parts)

    return _parsed(text, where, rule, "PATTERN AXIS [xPARTS], with AXIS a number or 'whole'")


def _parsed(text: str, where: str, parse: Callable[[list[str]], _Rule], expected: str) -> list[_Rule]:
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split(" #", 1)[0].split()
        if not words or words[0].startswith("#"):
            continue
        try:
            rules.append(parse(words))
        except (ValueError, re.error) as error:
            raise OptionError(f"{where}, line {number}: {line.strip()!r}: expected {expected} ({error})") from error
    return rules


FULLY_RESHARDABLE: Final = "fully_reshardable"
"""The layout that an optimizer's state can be given."""
GPT_TO_HYBRID: Final = "gpt-to-hybrid"
HYBRID_TO_GPT: Final = "hybrid-to-gpt"

# By the field's name. Sizes are called as in Megatron's `tools/checkpoint/convert.py`.
_ALIASES: Final = {
    "workers": "-j",
    "tp": "--target-tensor-parallel-size",
    "pp": "--target-pipeline-parallel-size",
    "ep": "--target-expert-parallel-size",
    "etp": "--target-expert-tensor-parallel-size",
}
_MIN_MEMORY_BYTES: Final = 384 * 1024**2  # the process itself and the smallest buffers
ALLOW_WHOLE: Final = "keep whole what these sizes do not divide; without it, that is an error"


def option(default: Any, text: str, *, flag: str = "", metavar: str = "", choices: Sequence[str] = ()) -> Any:
    """A field of an options class: default, help text, name in the shell if unlike the field's, and choices."""
    return field(default=default, metadata={"text": text, "flag": flag, "metavar": metavar, "choices": tuple(choices)})


def flag_of(described: Field[Any]) -> str:
    """The name of an option in the shell."""
    return str(described.metadata["flag"]) or f"--{described.name.replace('_', '-')}"


def flags_of(described: Field[Any]) -> list[str]:
    """All names of an option in the shell."""
    return [name for name in (flag_of(described), _ALIASES.get(described.name)) if name]


def help_of(described: Field[Any]) -> str:
    """The help text of an option, with its default."""
    default, text = described.default, str(described.metadata["text"])
    plain = default is None or default == () or isinstance(default, bool) or "default: " in text
    return text if plain else f"{text} (default: {default})"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionOptions:
    """Options that every conversion takes."""

    TAKES: ClassVar[Mapping[str, str]] = {}

    dtype: str | None = option(
        None, "convert the model's floating-point tensors: bf16, fp16, fp32, or torch's names", metavar="TYPE"
    )
    drop_optimizer: bool = option(False, "leave the optimizer's state out")
    workers: int = option(2, "threads, each of which writes files of its own", metavar="N")
    memory_bytes: int = option(1024**3, "memory to stay within (default: 1GiB)", flag="--memory", metavar="SIZE")
    verify: bool = option(True, "compare DST with SRC by checksum before it appears, if DST is a checkpoint")
    restart: bool = option(False, "throw away what an interrupted run has left, instead of resuming it")

    def __post_init__(self) -> None:
        for described in fields(self):
            object.__setattr__(self, described.name, _checked(described, getattr(self, described.name)))
        for name, value in self.normal().items():
            object.__setattr__(self, name, value)

    def normal(self) -> dict[str, Any]:
        """Values as the rest of the package has them; raises `OptionError`."""
        from mcore_ckpt.tools.regrid import floating_dtype  # imports numpy, which no help text needs

        return {"dtype": floating_dtype(self.dtype, "dtype")}

    def refuse_others(self, kind: str, direction: str) -> None:
        """Raise `OptionError` for a kind of conversion that there is not, or an option that it does not take."""
        if kind not in self.TAKES:
            raise OptionError(f"{direction} {kind}: expected one of {', '.join(self.TAKES)}")
        for described in fields(self):
            kinds = [known for known, names in self.TAKES.items() if described.name in names.split()]
            if kinds and kind not in kinds and getattr(self, described.name) != described.default:
                raise OptionError(f"{flag_of(described)}: not with {direction} {kind}; it goes with {', '.join(kinds)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions(ConversionOptions):
    """Options of a reshard. Without `tp` and `pp` the layout stays."""

    tp: int | None = option(None, "tensor parallel size (default: 1, with --pp)", metavar="N")
    pp: int | None = option(None, "pipeline parallel size (default: 1, with --tp)", metavar="N")
    ep: int = option(1, "expert parallel size", metavar="N")
    etp: int | None = option(None, "tensor parallel size of experts (default: as --tp)", metavar="N")
    rules: tuple[PartitionRule, ...] = option(
        (), "file of lines: key pattern (regular expression), axis or `whole`, [x2] for two halves", metavar="FILE"
    )
    allow_whole: bool = option(False, ALLOW_WHOLE)
    only: str | None = option(None, "keys to carry (shell pattern, or a part of the key)", metavar="PATTERN")
    optimizer_layout: str | None = option(
        None,
        "give the optimizer's state this layout, which loads under any division of the model",
        choices=(FULLY_RESHARDABLE,),
    )
    convert_model: str | None = option(
        None,
        "make a GPTModel a HybridModel, or back, as Megatron-LM's gpt_hybrid_conversion",
        choices=(GPT_TO_HYBRID, HYBRID_TO_GPT),
    )

    def normal(self) -> dict[str, Any]:
        sizes = {} if self.tp is self.pp is None else {"tp": self.tp or 1, "pp": self.pp or 1}
        return {**ConversionOptions.normal(self), **sizes}


def _checked(described: Field[Any], value: Any) -> Any:
    """A value of the type that the field says, of rules in a file and sizes in text, too; raises `OptionError`."""
    kind = str(described.type)
    choices = described.metadata["choices"]
    if value is None and kind.endswith("| None"):
        return None
    if choices and value not in choices:
        raise OptionError(f"{flag_of(described)} {value!r}: expected one of {', '.join(choices)}")
    for rule, parse in (("RenameRule", parse_rename_rules), ("PartitionRule", parse_partition_rules)):
        if kind == f"tuple[{rule}, ...]":
            return rules_in(value, parse)
    if described.name.endswith("_bytes"):
        return parse_size(value, at_least=_MIN_MEMORY_BYTES if described.name == "memory_bytes" else 1)
    if kind.startswith("int"):
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


_RENAME = "file of lines: key pattern (regular expression), replacement or `-` to drop the key"
_FAMILY = "the model's family, or FILE.toml with its table; auto: as"
_MTP = "take layers along that predict further tokens (mtp_num_layers, num_nextn_predict_layers), if there are any"
_SIZE = "default: 1; with megatron-legacy that of SRC"
_MODEL = "dtype hf_config arch mtp transformer_impl numbered_layers vocabulary_multiple global_batch_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions(ConversionOptions):
    """What to make of a source. Parallel sizes are those of the target's files; a job loads them under others."""

    TAKES: ClassVar[Mapping[str, str]] = {
        "files": "dtype rename rules common",
        "hf": f"etp {_MODEL}",
        "dcp": f"etp rename {_MODEL}",
        "megatron-legacy": "etp dtype",
    }

    tp: int | None = option(None, f"tensor parallel size ({_SIZE})", metavar="N")
    pp: int | None = option(None, f"pipeline parallel size ({_SIZE})", metavar="N")
    ep: int | None = option(None, f"expert parallel size ({_SIZE})", metavar="N")
    etp: int | None = option(None, "tensor parallel size of experts (default: as --tp)", metavar="N")
    allow_whole: bool = option(False, ALLOW_WHOLE)
    rename: tuple[RenameRule, ...] = option((), _RENAME, metavar="RULES")
    rules: tuple[PartitionRule, ...] = option((), "partition rules, as for reshard, of the new keys", metavar="FILE")
    common: str | None = option(None, "common.pt to take along (default: an empty one)", metavar="FILE")
    hf_config: str | None = option(
        None,
        "directory with the model's config.json (default: SRC; dcp without it has Megatron's own names)",
        metavar="DIR",
    )
    arch: str = option("auto", f"{_FAMILY} config.json says", metavar="FAMILY")
    transformer_impl: Literal["transformer_engine", "local"] = option(
        "transformer_engine",
        "as of the job, whose layers call some parameters differently",
        choices=("transformer_engine", "local"),
    )
    mtp: bool = option(True, _MTP)
    numbered_layers: bool = option(False, "a tensor for each layer, where Megatron stacks layers")
    vocabulary_multiple: int = option(
        128, "as that argument of the job", flag="--make-vocab-size-divisible-by", metavar="N"
    )
    global_batch_size: int | None = option(
        None,
        "of the job that resumes with the optimizer's state, where no samples are stored: it resumes at the "
        "optimizer's step, behind as many samples",
        metavar="N",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(ConversionOptions):
    """What to make of a checkpoint."""

    TAKES: ClassVar[Mapping[str, str]] = {
        "safetensors": "dtype rename only max_shard_bytes",
        "torch": "dtype rename only max_shard_bytes",
        "dcp": "dtype rename only",
        "hf": "dtype max_shard_bytes arch hf_config vocab_size rope_forwarded mtp",
    }

    max_shard_bytes: int = option(
        5 * 1000**3,
        "no file holds more, unless one tensor is larger (default: 5G)",
        flag="--max-shard-size",
        metavar="SIZE",
    )
    rename: tuple[RenameRule, ...] = option((), _RENAME, metavar="RULES")
    only: str | None = option(None, "keys to carry (shell pattern, or a part of the key)", metavar="PATTERN")
    arch: str = option("auto", f"{_FAMILY} arguments or config.json say", metavar="FAMILY")
    hf_config: str | None = option(
        None, "directory to take config.json and tokenizer files from; checked against shapes", metavar="DIR"
    )
    vocab_size: int | None = option(None, "tokens of the model, if stored and config.json's differ", metavar="N")
    mtp: bool = option(True, _MTP)
    rope_forwarded: bool = option(False, "the job's script gave GPTModel its rotary options; pretrain_gpt.py does not")


_LARGEST_WEIGHT = 1e100  # averages of FP32 elements stay within float64


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions(ConversionOptions):
    """What to make of several checkpoints of one model. The optimizer's state is left out."""

    TAKES: ClassVar[Mapping[str, str]] = {
        "torch_dist": "tp pp ep etp rules allow_whole",
        "hf": "max_shard_bytes arch hf_config vocab_size rope_forwarded",
    }

    weights: Sequence[float] | str = option(
        "uniform",
        "uniform, minus-sqrt (as a learning rate's decay by 1-sqrt would weigh them), or a number for each CKPT, as in "
        "0.2,0.8, which are divided by their sum",
        metavar="WEIGHTS",
    )
    ema: float | None = option(
        None, "an exponential moving average: each CKPT has 1-BETA, all before it BETA", metavar="BETA"
    )
    masters: bool = option(False, "average the optimizer's FP32 copies, and round them once")
    to: str = option("torch_dist", "format of DST; hf: a Hugging Face model", choices=("torch_dist", "hf"))
    tp: int | None = option(None, "tensor parallel size (default: that of the last CKPT; 1 with --pp)", metavar="N")
    pp: int | None = option(None, "pipeline parallel size (default: that of the last CKPT; 1 with --tp)", metavar="N")
    ep: int = option(1, "expert parallel size", metavar="N")
    etp: int | None = option(None, "tensor parallel size of experts (default: as --tp)", metavar="N")
    rules: tuple[PartitionRule, ...] = option((), "partition rules, as for reshard", metavar="FILE")
    allow_whole: bool = option(False, ALLOW_WHOLE)
    max_shard_bytes: int = option(5 * 1000**3, "as for export (default: 5G)", flag="--max-shard-size", metavar="SIZE")
    arch: str = option("auto", f"{_FAMILY} arguments or config.json say", metavar="FAMILY")
    hf_config: str | None = option(None, "directory to take config.json and tokenizer files from", metavar="DIR")
    vocab_size: int | None = option(None, "tokens of the model, as for export", metavar="N")
    rope_forwarded: bool = option(False, "as for export")

    def normal(self) -> dict[str, Any]:
        weights, beta = self.weights, self.ema
        try:
            if weights not in ("uniform", "minus-sqrt"):
                weights = tuple(map(float, weights.split(",") if isinstance(weights, str) else weights))
                if not all(0 < abs(one) <= _LARGEST_WEIGHT for one in weights) or math.fsum(weights) == 0:
                    raise ValueError(
                        f"none is to be 0 (leave that checkpoint out) or above {_LARGEST_WEIGHT:g}, nor their sum 0"
                    )
            if beta is not None and (self.weights != "uniform" or not 0 < (beta := float(beta)) < 1):
                raise ValueError("--ema takes a number above 0 and below 1, and no --weights")
        except (TypeError, ValueError, OverflowError) as error:
            raise OptionError(
                f"--weights {self.weights} --ema {self.ema}: expected uniform, minus-sqrt, or numbers: {error}"
            ) from error
        return {**ConversionOptions.normal(self), "weights": weights, "ema": beta}

    def weights_of(self, count: int) -> tuple[float, ...]:
        """The weight of each of `count` checkpoints, in their order; the average is divided by what they add up to.

        minus-sqrt: a run with a constant learning rate whose k-th of n intervals between checkpoints had been decayed
        to 1 - sqrt(k / n) would have ended in the average with sqrt((k + 1) / n) - sqrt(k / n), k from 0: Tian et al.,
        "WSM: Decay-Free Learning Rate Schedule via Checkpoint Merging", arXiv 2507.17634, in the form of Megatron-LM's
        `tools/checkpoint/weighted_merge.py`.
        """
        if self.ema is not None:
            return (self.ema ** (count - 1), *((1 - self.ema) * self.ema ** (count - 1 - n) for n in range(1, count)))
        if self.weights == "uniform":
            return (1.0,) * count
        if self.weights == "minus-sqrt":
            return tuple(math.sqrt((n + 1) / count) - math.sqrt(n / count) for n in range(count))
        weights = tuple(map(float, self.weights))
        if len(weights) != count:
            raise OptionError(f"--weights: got {len(weights)} numbers, expected {count}, one for each checkpoint")
        return weights
