"""`mcore-ckpt export`: a checkpoint as a Hugging Face model, safetensors, torch files or a plain DCP checkpoint."""

from __future__ import annotations

import argparse

from mcore_ckpt.commands._shell import (
    Outcome,
    checked_outcome,
    few,
    key_plan_outcome,
    one_line,
    parse_size,
    require_check,
)
from mcore_ckpt.core.console import human_bytes
from mcore_ckpt.core.errors import OptionError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="directory of the checkpoint, or one with a tracker file"
    )
    parser.add_argument("directory", metavar="DIR", help="directory to make; must not exist yet")
    parser.add_argument(
        "--to",
        choices=["safetensors", "torch", "dcp", "hf", "megatron-legacy"],
        default="safetensors",
        help="format (safetensors); hf: a model that transformers loads, by its architecture; "
        "megatron-legacy: files that --ckpt-format torch loads",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", help="largest file, e.g. 2G (5G)")
    parser.add_argument("--rename", metavar="RULES", help="file of lines: key pattern, replacement or `-` to drop")
    parser.add_argument("--only", metavar="PATTERN", help="keys that match (shell pattern, or a part of the key)")
    parser.add_argument("--drop", choices=["optimizer"], help="leave the optimizer's state out")
    parser.add_argument("--dtype", metavar="TYPE", help="convert the model's floating-point tensors: bf16, fp16, fp32")
    legacy = parser.add_argument_group("with --to megatron-legacy")
    legacy.add_argument("--tp", type=int, metavar="N", help="tensor parallel size (1)")
    legacy.add_argument("--pp", type=int, metavar="M", help="pipeline parallel size (1)")
    model = parser.add_argument_group("with --to hf")
    model.add_argument("--arch", metavar="FAMILY", help="the model's family (auto: as arguments or config.json say)")
    model.add_argument(
        "--hf-config", metavar="DIR", help="take config.json from here, and tokenizer files; checked against shapes"
    )
    model.add_argument(
        "--check",
        action="store_true",
        help="then run both models on random tokens, and compare logits; needs transformers and megatron-core",
    )
    model.add_argument("--dry-run", action="store_true", help="show each key's source and transform; write nothing")


def run(arguments: argparse.Namespace) -> Outcome:
    """Export."""
    if arguments.to == "megatron-legacy":
        return _run_legacy(arguments)
    if arguments.tp or arguments.pp:
        raise OptionError("--tp and --pp need --to megatron-legacy: other formats do not divide a model among ranks")
    if arguments.to == "hf":
        return _run_hf(arguments)
    if arguments.arch or arguments.hf_config or arguments.dry_run or arguments.check:
        raise OptionError("--arch, --hf-config, --check and --dry-run need --to hf: other formats know no models")
    from mcore_ckpt.convert.export import export_checkpoint
    from mcore_ckpt.tools.dtype_cast import floating_dtype

    report = export_checkpoint(
        arguments.checkpoint,
        arguments.directory,
        to=arguments.to,
        rename=arguments.rename or None,
        only=arguments.only,
        drop_optimizer=arguments.drop == "optimizer",
        dtype=floating_dtype(arguments.dtype, "--dtype"),
        progress=False if arguments.quiet else None,
        **_max_shard_bytes(arguments),
    )
    text = (
        f"{report.target}: {report.tensors} tensors, {human_bytes(report.payload_bytes)} in {len(report.files)} files"
    )
    if report.left_out:
        text += (
            f"; {report.left_out} objects have no place in this format and were left out: {few(report.left_out_keys)}"
        )
    return Outcome(report, text)


def _max_shard_bytes(arguments: argparse.Namespace) -> dict[str, int]:
    return {} if arguments.max_shard_size is None else {"max_shard_bytes": parse_size(arguments.max_shard_size)}


def _run_legacy(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.convert.legacy_export import export_legacy

    names = ("rename", "only", "dtype", "max_shard_size", "arch", "hf_config", "dry_run", "check")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name, None)]
    if given:
        raise OptionError(f"{', '.join(given)}: not with --to megatron-legacy, whose files hold what Megatron wants")
    report = export_legacy(
        arguments.checkpoint,
        arguments.directory,
        tp=1 if arguments.tp is None else arguments.tp,
        pp=1 if arguments.pp is None else arguments.pp,
        drop_optimizer=arguments.drop == "optimizer",
        progress=False if arguments.quiet else None,
    )
    text = (
        f"{report.target}: {report.tensors} tensors, {human_bytes(report.payload_bytes)} in {len(report.files)} files"
    )
    return Outcome(report, "\n".join([text, *(f"left out: {what}" for what in report.left_out)]))


def _run_hf(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.convert.huggingface import HuggingFaceOptions, export_model, plan_export
    from mcore_ckpt.tools.dtype_cast import floating_dtype

    if arguments.rename or arguments.only:
        raise OptionError("--rename and --only do not go with --to hf: a model has all of its family's keys, so named")
    options = HuggingFaceOptions(
        arguments.arch or "auto",
        arguments.hf_config,
        floating_dtype(arguments.dtype, "--dtype"),
        **_max_shard_bytes(arguments),
    )
    if arguments.check:
        require_check(arguments.dry_run)
    if arguments.dry_run:
        return key_plan_outcome(plan_export(arguments.checkpoint, options), to_megatron=False)
    report = export_model(
        arguments.checkpoint, arguments.directory, options, progress=False if arguments.quiet else None
    )
    text = (
        f"{report.target}: {report.family}, {report.tensors} tensors, {human_bytes(report.payload_bytes)} in "
        f"{len(report.files)} files"
    )
    text += f"; left out: {few(report.left_out)}" if report.left_out else ""
    text = "\n".join([text, *(one_line(f"note: {note}") for note in report.notes)])
    return checked_outcome(report, text, to_megatron=False) if arguments.check else Outcome(report, text)
