"""Options of imports and exports; which of them each kind takes is `TAKES`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from mcore_ckpt.core.options import parse_size
from mcore_ckpt.reshard.options import (
    ALLOW_WHOLE,
    ConversionOptions,
    PartitionRule,
    RenameRule,
    option,
    partition_rules,
    rename_rules,
)

_SIZE = "default: 1; with megatron-legacy that of SRC"
_MODEL = "dtype hf_config arch transformer_impl numbered_layers vocabulary_multiple global_batch_size"


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
    rename: tuple[RenameRule, ...] = option(
        (), "file of lines: key pattern (regular expression), replacement or `-` to drop the key", metavar="RULES"
    )
    rules: tuple[PartitionRule, ...] = option(
        (), "partition rules, as for reshard; they see the new keys", metavar="FILE"
    )
    common: str | None = option(None, "common.pt to take along (default: an empty one)", metavar="FILE")
    hf_config: str | None = option(
        None,
        "directory with the model's config.json (default: SRC; dcp without it has Megatron's own names)",
        metavar="DIR",
    )
    arch: str = option("auto", "the model's family; auto: as config.json says", metavar="FAMILY")
    transformer_impl: Literal["transformer_engine", "local"] = option(
        "transformer_engine",
        "as of the job, whose layers call some parameters differently",
        choices=("transformer_engine", "local"),
    )
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

    def normal(self) -> dict[str, Any]:
        rules = {"rename": rename_rules(self.rename), "rules": partition_rules(self.rules)}
        return {**ConversionOptions.normal(self), **rules}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions(ConversionOptions):
    """What to make of a checkpoint."""

    TAKES: ClassVar[Mapping[str, str]] = {
        "safetensors": "dtype rename only max_shard_bytes",
        "torch": "dtype rename only max_shard_bytes",
        "dcp": "dtype rename only",
        "hf": "dtype max_shard_bytes arch hf_config vocab_size rope_forwarded",
    }

    max_shard_bytes: int = option(
        5 * 1000**3,
        "no file holds more, unless one tensor is larger (default: 5G)",
        flag="--max-shard-size",
        metavar="SIZE",
    )
    rename: tuple[RenameRule, ...] = option(
        (), "file of lines: key pattern (regular expression), replacement or `-` to drop the key", metavar="RULES"
    )
    only: str | None = option(None, "keys to carry (shell pattern, or a part of the key)", metavar="PATTERN")
    arch: str = option("auto", "the model's family; auto: as arguments or config.json say", metavar="FAMILY")
    hf_config: str | None = option(
        None, "directory to take config.json and tokenizer files from; checked against shapes", metavar="DIR"
    )
    vocab_size: int | None = option(None, "tokens of the model, if stored and config.json's differ", metavar="N")
    rope_forwarded: bool = option(False, "the job's script gave GPTModel its rotary options; pretrain_gpt.py does not")

    def normal(self) -> dict[str, Any]:
        most = parse_size(self.max_shard_bytes)
        return {**ConversionOptions.normal(self), "rename": rename_rules(self.rename), "max_shard_bytes": most}
