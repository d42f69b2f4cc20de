"""`mcore-ckpt import`: what others have written, and Megatron itself in its older format, as `torch_dist`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mcore_ckpt.commands._shell import (
    MIN_MEMORY_BYTES,
    Outcome,
    checked_outcome,
    few,
    one_line,
    parse_size,
    plan_outcome,
    require_check,
)
from mcore_ckpt.core.console import human_bytes
from mcore_ckpt.core.errors import OptionError

if TYPE_CHECKING:
    from mcore_ckpt.convert.conversion import ConversionReport
    from mcore_ckpt.convert.exchange import SourceKind

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "source", metavar="SRC", help="directory of safetensors or torch files, one file, or a DCP checkpoint"
    )
    parser.add_argument("target", metavar="DST", help="directory to make; must not exist yet")
    parser.add_argument(
        "--from",
        dest="source_kind",
        choices=["files", "hf", "dcp", "ucp", "megatron-legacy"],
        default="files",
        help="what SRC is: tensors under their own keys (files), a Hugging Face model, to become Megatron's (hf), one "
        "that FSDP2 has saved by DCP (dcp), or DeepSpeed as a universal checkpoint (ucp), or what a launch has saved "
        "with --ckpt-format torch (megatron-legacy)",
    )
    parser.add_argument("--tp", type=int, metavar="N", help="tensor parallel size (1; as SRC with megatron-legacy)")
    parser.add_argument("--pp", type=int, metavar="M", help="pipeline parallel size (1; as SRC with megatron-legacy)")
    parser.add_argument("--ep", type=int, metavar="K", help="expert parallel size (1; as SRC with megatron-legacy)")
    parser.add_argument("--rename", metavar="RULES", help="file of lines: key pattern, replacement or `-` to drop")
    parser.add_argument("--rules", metavar="FILE", help="partition rules, as for reshard; they see the new keys")
    parser.add_argument("--dtype", metavar="TYPE", help="convert floating-point tensors: bf16, fp16, fp32")
    parser.add_argument("--common", metavar="FILE", help="common.pt to take along (an empty one)")
    parser.add_argument("--workers", type=int, default=2, metavar="W", help="tensors in progress at once (2)")
    parser.add_argument("--memory", default="1G", metavar="SIZE", help="memory to stay within, e.g. 512M (1G)")
    parser.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=True, help="prove DST against SRC by checksum (on)"
    )
    model = parser.add_argument_group("with --from megatron-legacy")
    model.add_argument("--drop", choices=["optimizer"], help="leave the optimizer's state out")
    model = parser.add_argument_group("with --from hf, dcp, ucp and megatron-legacy")
    model.add_argument("--etp", type=int, metavar="N", help="expert tensor parallel size (as --tp)")
    model.add_argument("--dry-run", action="store_true", help="show each key's source and transform; write nothing")
    model = parser.add_argument_group("with --from hf, dcp and ucp")
    model.add_argument(
        "--hf-config",
        metavar="DIR",
        help="take the model's config.json from here (SRC; without it, dcp and ucp have Megatron's own names)",
    )
    model.add_argument("--arch", metavar="FAMILY", help="the model's family (auto: as config.json says)")
    model.add_argument(
        "--transformer-impl",
        choices=["transformer_engine", "local"],
        help="of the launch that is going to load it (transformer_engine)",
    )
    model.add_argument(
        "--numbered-layers", action="store_true", help="a tensor for each layer, where Megatron stacks layers"
    )
    model.add_argument(
        "--make-vocab-size-divisible-by", type=int, metavar="N", help="as that argument of the launch (128)"
    )
    model.add_argument(
        "--global-batch-size",
        type=int,
        metavar="N",
        help="of the launch that goes on with the optimizer's state: at its step, behind as many samples",
    )
    model.add_argument(
        "--check",
        action="store_true",
        help="then run both models on random tokens, and compare logits; needs transformers and megatron-core",
    )


_MODELS = ("hf", "dcp", "ucp")
_OF_MODELS = ("arch", "transformer_impl", "numbered_layers", "make_vocab_size_divisible_by", "check", "hf_config")


def run(arguments: argparse.Namespace) -> Outcome:
    """Import."""
    kind = _kind(arguments)
    if arguments.workers < 1:
        raise OptionError(f"--workers {arguments.workers}: expected at least 1")
    from mcore_ckpt.convert.conversion import ImportOptions
    from mcore_ckpt.convert.exchange import import_as, plan_import
    from mcore_ckpt.convert.rules import parse_partition_rules, parse_rename_rules, rules_in
    from mcore_ckpt.tools.dtype_cast import floating_dtype

    multiple = arguments.make_vocab_size_divisible_by
    options = ImportOptions(
        tp=arguments.tp,
        pp=arguments.pp,
        ep=arguments.ep,
        etp=arguments.etp,
        dtype=floating_dtype(arguments.dtype, "--dtype"),
        drop_optimizer=arguments.drop == "optimizer",
        arch=arguments.arch or "auto",
        transformer_impl=arguments.transformer_impl or "transformer_engine",
        numbered_layers=arguments.numbered_layers,
        vocabulary_multiple=128 if multiple is None else multiple,
        hf_config=arguments.hf_config,
        global_batch_size=arguments.global_batch_size,
        rename=rules_in(arguments.rename or None, parse_rename_rules),
        rules=rules_in(arguments.rules or None, parse_partition_rules),
        common=arguments.common,
        workers=arguments.workers,
        verify=arguments.verify,
        memory_bytes=parse_size(arguments.memory, at_least=MIN_MEMORY_BYTES),
    )
    if arguments.check:
        require_check(arguments.dry_run)
    if arguments.dry_run:
        return plan_outcome(plan_import(kind, arguments.source, options))
    progress = False if arguments.quiet else None
    report = import_as(kind, arguments.source, arguments.target, options, progress=progress)
    if arguments.check:
        return checked_outcome(report, _text(kind, report), to_megatron=True)
    return Outcome(report, _text(kind, report))


def _kind(arguments: argparse.Namespace) -> SourceKind:
    """What SRC is; raises `OptionError` for options that say nothing of it."""
    kind = arguments.source_kind
    if kind not in _MODELS and (given := _given(arguments, (*_OF_MODELS, "global_batch_size"))):
        raise OptionError(f"{given}: needs --from hf, dcp or ucp")
    if kind == "megatron-legacy":
        if given := _given(arguments, ("rename", "rules", "common")):
            raise OptionError(
                f"{given}: not with --from megatron-legacy, where keys, axes and arguments are Megatron's own"
            )
        return "megatron-legacy"
    if kind == "files" and (given := _given(arguments, ("etp", "dry_run"))):
        raise OptionError(f"{given}: needs --from hf, dcp, ucp or megatron-legacy")
    taken = () if kind == "files" else ("rename", "rules", "common") if kind == "hf" else ("rules", "common")
    if given := _given(arguments, taken):
        raise OptionError(f"{given}: not with --from {kind}, where the model's family says all of that")
    if arguments.drop:
        raise OptionError("--drop optimizer: needs --from megatron-legacy; for files, a rename rule can drop keys")
    if kind == "files":
        return "files"
    if kind == "hf" or arguments.hf_config:
        if arguments.check and (kind != "hf" or arguments.hf_config):
            raise OptionError("--check: transformers has to load SRC as it is, so --from hf alone, without --hf-config")
        return "hf"
    if given := _given(arguments, tuple(name for name in _OF_MODELS if name != "hf_config")):
        raise OptionError(f"{given}: needs --hf-config; without it, SRC has Megatron's own names")
    return "megatron"


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name))


def _text(kind: SourceKind, report: ConversionReport) -> str:
    size = f"{report.tensors} tensors, {human_bytes(report.payload_bytes)}"
    if kind == "files":
        text = f"{report.target}: {size} from {report.format}"
        if report.left_out:
            count = len(report.left_out)
            text += f"; {count} entries that are no tensors were left out: {few(report.left_out)}"
        return text
    size = f"{size} in {len(report.files)} files"
    if kind == "megatron-legacy":
        text = f"{report.target}: {report.source_layout} as {report.target_layout}, {size}"
        return "\n".join([text, *(one_line(f"left out: {what}") for what in report.left_out)])
    text = f"{report.target}: {report.family} for {report.target_layout}, {size}"
    text += f"; left out: {few(report.left_out)}" if report.left_out else ""
    return "\n".join([text, *(one_line(f"note: {note}") for note in report.notes)])
