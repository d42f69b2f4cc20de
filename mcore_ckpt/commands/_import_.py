"""`mcore-ckpt import`: a Hugging Face model, safetensors, torch files or a DCP checkpoint as `torch_dist`."""

from __future__ import annotations

import argparse

from mcore_ckpt.commands._shell import (
    MIN_MEMORY_BYTES,
    Outcome,
    checked_outcome,
    few,
    key_plan_outcome,
    parse_size,
    require_check,
)
from mcore_ckpt.core.console import human_bytes
from mcore_ckpt.core.errors import OptionError

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
        choices=["files", "hf", "dcp"],
        default="files",
        help="what SRC is: tensors under their own keys (files), a Hugging Face model, to become Megatron's (hf), or a "
        "DCP checkpoint of such a model, as FSDP2 trains it (dcp)",
    )
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor parallel size (1)")
    parser.add_argument("--pp", type=int, default=1, metavar="M", help="pipeline parallel size (1)")
    parser.add_argument("--ep", type=int, default=1, metavar="K", help="expert parallel size (1)")
    parser.add_argument("--rename", metavar="RULES", help="file of lines: key pattern, replacement or `-` to drop")
    parser.add_argument("--rules", metavar="FILE", help="partition rules, as for reshard; they see the new keys")
    parser.add_argument("--dtype", metavar="TYPE", help="convert floating-point tensors: bf16, fp16, fp32")
    parser.add_argument("--common", metavar="FILE", help="common.pt to take along (an empty one)")
    parser.add_argument("--workers", type=int, default=2, metavar="W", help="tensors in progress at once (2)")
    parser.add_argument("--memory", default="1G", metavar="SIZE", help="memory to stay within, e.g. 512M (1G)")
    parser.add_argument(
        "--verify", action=argparse.BooleanOptionalAction, default=True, help="prove DST against SRC by checksum (on)"
    )
    model = parser.add_argument_group("with --from hf and --from dcp")
    model.add_argument("--hf-config", metavar="DIR", help="take the model's config.json from here (SRC)")
    model.add_argument("--arch", metavar="FAMILY", help="the model's family (auto: as config.json says)")
    model.add_argument("--etp", type=int, metavar="N", help="expert tensor parallel size (as --tp)")
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
        "--check",
        action="store_true",
        help="then run both models on random tokens, and compare logits; needs transformers and megatron-core",
    )
    model.add_argument("--dry-run", action="store_true", help="show each key's source and transform; write nothing")


def run(arguments: argparse.Namespace) -> Outcome:
    """Import."""
    if arguments.source_kind != "files":
        return _run_model(arguments)
    given = [
        f"--{name.replace('_', '-')}"
        for name in (
            *("arch", "etp", "transformer_impl", "numbered_layers", "make_vocab_size_divisible_by", "check", "dry_run"),
            "hf_config",
        )
        if getattr(arguments, name)
    ]
    if given:
        raise OptionError(f"{', '.join(given)}: needs --from hf or --from dcp")
    from mcore_ckpt.convert.import_ import import_checkpoint
    from mcore_ckpt.tools.dtype_cast import floating_dtype

    report = import_checkpoint(
        arguments.source,
        arguments.target,
        tp=arguments.tp,
        pp=arguments.pp,
        ep=arguments.ep,
        rename=arguments.rename or None,
        rules=arguments.rules or None,
        dtype=floating_dtype(arguments.dtype, "--dtype"),
        common=arguments.common,
        workers=max(1, arguments.workers),
        verify=arguments.verify,
        memory_bytes=parse_size(arguments.memory, at_least=MIN_MEMORY_BYTES),
        progress=False if arguments.quiet else None,
    )
    text = f"{report.target}: {report.tensors} tensors, {human_bytes(report.payload_bytes)} from {report.format}"
    if report.left_out:
        text += f"; {report.left_out} entries that are no tensors were left out: {few(report.left_out_keys)}"
    return Outcome(report, text)


def _run_model(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.convert.huggingface import MegatronOptions, import_model, plan_import
    from mcore_ckpt.convert.rules import parse_rename_rules, rules_in
    from mcore_ckpt.tools.dtype_cast import floating_dtype

    taken = ("rules", "common") if arguments.source_kind == "dcp" else ("rename", "rules", "common")
    given = [f"--{name}" for name in taken if getattr(arguments, name)]
    if given:
        raise OptionError(
            f"{', '.join(given)}: not with --from {arguments.source_kind}, where the model's family says all of that"
        )
    multiple = arguments.make_vocab_size_divisible_by
    options = MegatronOptions(
        arguments.tp,
        arguments.pp,
        arguments.ep,
        arguments.etp,
        arch=arguments.arch or "auto",
        dtype=floating_dtype(arguments.dtype, "--dtype"),
        transformer_impl=arguments.transformer_impl or "transformer_engine",
        numbered_layers=arguments.numbered_layers,
        vocabulary_multiple=128 if multiple is None else multiple,
        workers=max(1, arguments.workers),
        verify=arguments.verify,
        memory_bytes=parse_size(arguments.memory, at_least=MIN_MEMORY_BYTES),
        hf_config=arguments.hf_config,
        rename=rules_in(arguments.rename or None, parse_rename_rules),
    )
    if arguments.check:
        if arguments.source_kind == "dcp" or arguments.hf_config:
            raise OptionError("--check: transformers has to load SRC as it is, so not with --from dcp or --hf-config")
        require_check(arguments.dry_run)
    if arguments.dry_run:
        return key_plan_outcome(plan_import(arguments.source, options), to_megatron=True)
    report = import_model(arguments.source, arguments.target, options, progress=False if arguments.quiet else None)
    text = (
        f"{report.target}: {report.family} for {options.layout}, {report.tensors} tensors, "
        f"{human_bytes(report.payload_bytes)} in {len(report.files)} files"
    )
    text += f"; left out: {few(report.left_out)}" if report.left_out else ""
    text = "\n".join([text, *(f"note: {note}" for note in report.notes)])
    return checked_outcome(report, text, to_megatron=True) if arguments.check else Outcome(report, text)
