"""`mcore-ckpt import`: what others have written, and Megatron itself in its older format, as `torch_dist`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from mcore_ckpt.commands._shell import (
    MIN_MEMORY_BYTES,
    Outcome,
    checked_outcome,
    few,
    key_plan_outcome,
    numbers,
    one_line,
    parse_size,
    require_check,
    table,
)
from mcore_ckpt.core.console import human_bytes
from mcore_ckpt.core.errors import OptionError

if TYPE_CHECKING:
    from mcore_ckpt.convert.huggingface import MegatronOptions
    from mcore_ckpt.convert.legacy import LegacyPlan

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
        "--check",
        action="store_true",
        help="then run both models on random tokens, and compare logits; needs transformers and megatron-core",
    )


_MODELS = ("hf", "dcp", "ucp")
_OF_MODELS = ("arch", "transformer_impl", "numbered_layers", "make_vocab_size_divisible_by", "check", "hf_config")


def run(arguments: argparse.Namespace) -> Outcome:
    """Import."""
    if arguments.source_kind in _MODELS:
        return _run_model(arguments)
    if given := _given(arguments, _OF_MODELS):
        raise OptionError(f"{given}: needs --from hf, dcp or ucp")
    if arguments.source_kind == "megatron-legacy":
        return _run_legacy(arguments)
    if given := _given(arguments, ("etp", "dry_run")):
        raise OptionError(f"{given}: needs --from hf, dcp, ucp or megatron-legacy")
    _refuse_drop(arguments)
    from mcore_ckpt.convert.import_ import import_checkpoint
    from mcore_ckpt.tools.dtype_cast import floating_dtype

    report = import_checkpoint(
        arguments.source,
        arguments.target,
        **_sizes(arguments),
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


def _given(arguments: argparse.Namespace, names: tuple[str, ...]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name))


def _refuse_drop(arguments: argparse.Namespace) -> None:
    if arguments.drop:
        raise OptionError("--drop optimizer: needs --from megatron-legacy; for files, a rename rule can drop keys")


def _sizes(arguments: argparse.Namespace) -> dict[str, int]:
    given = {name: getattr(arguments, name) for name in ("tp", "pp", "ep")}
    return {name: 1 if size is None else size for name, size in given.items()}


def _run_legacy(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.convert.legacy import LegacyOptions, import_legacy, plan_legacy_import
    from mcore_ckpt.tools.dtype_cast import floating_dtype

    if given := _given(arguments, ("rename", "rules", "common")):
        raise OptionError(
            f"{given}: not with --from megatron-legacy, where keys, axes and arguments are Megatron's own"
        )
    options = LegacyOptions(
        arguments.tp,
        arguments.pp,
        arguments.ep,
        arguments.etp,
        drop_optimizer=arguments.drop == "optimizer",
        dtype=floating_dtype(arguments.dtype, "--dtype"),
        workers=max(1, arguments.workers),
        verify=arguments.verify,
        memory_bytes=parse_size(arguments.memory, at_least=MIN_MEMORY_BYTES),
    )
    if arguments.dry_run:
        return _legacy_plan_outcome(plan_legacy_import(arguments.source, options))
    report = import_legacy(arguments.source, arguments.target, options, progress=False if arguments.quiet else None)
    text = (
        f"{report.target}: {report.source_layout} as {report.target_layout}, {report.tensors} tensors, "
        f"{human_bytes(report.payload_bytes)} in {len(report.files)} files"
    )
    return Outcome(report, "\n".join([text, *(one_line(f"left out: {what}") for what in report.left_out)]))


def _legacy_plan_outcome(plan: LegacyPlan) -> Outcome:
    rows = [
        (key.source, str(key.pieces), key.transform, key.target, numbers(key.shape), key.dtype) for key in plan.keys
    ]
    lines = [
        table(("source", "pieces", "transform", "target", "shape", "dtype"), rows),
        "",
        f"{plan.source_layout} as {plan.target_layout}: {len(plan.keys)} tensors and {len(plan.objects)} objects",
        "nothing was written",
        *(one_line(f"left out: {what}") for what in plan.left_out),
    ]
    return Outcome(plan, "\n".join(lines))


def _run_named(arguments: argparse.Namespace, options: MegatronOptions) -> Outcome:
    """A model with Megatron's own names, which need no family's table."""
    from mcore_ckpt.convert.megatron_named import import_named, plan_named

    given = _given(arguments, tuple(name for name in _OF_MODELS if name != "hf_config"))
    if given:
        raise OptionError(f"{given}: needs --hf-config; without it, SRC has Megatron's own names")
    if arguments.dry_run:
        return key_plan_outcome(plan_named(arguments.source, options), to_megatron=True)
    report = import_named(arguments.source, arguments.target, options, progress=False if arguments.quiet else None)
    text = (
        f"{report.target}: {report.family} for {options.layout}, {report.tensors} tensors, "
        f"{human_bytes(report.payload_bytes)} in {len(report.files)} files"
    )
    text += f"; left out: {few(report.left_out)}" if report.left_out else ""
    return Outcome(report, text)


def _run_model(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.convert.huggingface import MegatronOptions, import_model, plan_import
    from mcore_ckpt.convert.rules import parse_rename_rules, rules_in
    from mcore_ckpt.tools.dtype_cast import floating_dtype

    taken = ("rules", "common") if arguments.source_kind in ("dcp", "ucp") else ("rename", "rules", "common")
    given = [f"--{name}" for name in taken if getattr(arguments, name)]
    if given:
        raise OptionError(
            f"{', '.join(given)}: not with --from {arguments.source_kind}, where the model's family says all of that"
        )
    _refuse_drop(arguments)
    multiple = arguments.make_vocab_size_divisible_by
    options = MegatronOptions(
        **_sizes(arguments),
        etp=arguments.etp,
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
    if arguments.source_kind != "hf" and not arguments.hf_config:
        return _run_named(arguments, options)
    if arguments.check:
        if arguments.source_kind != "hf" or arguments.hf_config:
            raise OptionError("--check: transformers has to load SRC as it is, so --from hf alone, without --hf-config")
        require_check(arguments.dry_run)
    if arguments.dry_run:
        return key_plan_outcome(plan_import(arguments.source, options), to_megatron=True)
    report = import_model(arguments.source, arguments.target, options, progress=False if arguments.quiet else None)
    text = (
        f"{report.target}: {report.family} for {options.layout}, {report.tensors} tensors, "
        f"{human_bytes(report.payload_bytes)} in {len(report.files)} files"
    )
    text += f"; left out: {few(report.left_out)}" if report.left_out else ""
    text = "\n".join([text, *(one_line(f"note: {note}") for note in report.notes)])
    return checked_outcome(report, text, to_megatron=True) if arguments.check else Outcome(report, text)
