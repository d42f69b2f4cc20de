"""What is wrong with a checkpoint or an installation: `verify`, `repair`, `copy`, `prune` and `doctor`."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_ckpt.commands.cli import (
    DIFFERS,
    DONE,
    Outcome,
    add_dry_run,
    add_workers,
    document_of,
    first_of,
    human_rate,
    one_line,
    table,
)
from mcore_ckpt.core.console import counted, human_bytes
from mcore_ckpt.core.errors import LoadError, OptionError, UnsupportedMegatronError, without_tracebacks
from mcore_ckpt.core.options import LoadOptions, SaveOptions, checkpoint_path
from mcore_ckpt.core.team import current_team

if TYPE_CHECKING:
    from mcore_ckpt.load.checks import Problem
    from mcore_ckpt.tools.verify import VerifyReport


_SHOWN = 50
_SHOWN_OF_A_FILE = 5
_OTHER_OPTIMIZER = (
    "a job that loads the optimizer resumes from its weights, not from the model's. Megatron-Core saves a fully "
    "reshardable optimizer of several buckets shifted; the model's weights are not, and with --no-load-optim a job "
    "resumes from them"
)

_NOT_COMPARED = (
    "the optimizer was not compared with the model: it stores no weights in float32 under the names of the model's. "
    "Flat buckets (dp_reshardable) do not say which element is whose; reshard them first, and verify that: "
    "mcore-ckpt reshard CKPT NEW --optimizer-layout fully_reshardable"
)


def add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="directory of the checkpoint, or one with a tracker file")
    parser.add_argument(
        "--check-optimizer", action="store_true", help="do the optimizer's weights round to the model's?"
    )
    parser.add_argument("--state", action="store_true", help="show the fingerprint, the same under any layout")
    parser.add_argument("--all", action="store_true", help="CKPT is a run: each checkpoint in it")
    add_workers(parser, "threads that read and sum")
    parser.set_defaults(other=None, accept_common_state=False, dry_run=False)


def run_verify(arguments: argparse.Namespace) -> Outcome:
    if not arguments.all:
        return _verify(arguments)
    from mcore_ckpt.tools.runs import list_run

    report = current_team().first("list the run", lambda: list_run(arguments.checkpoint))
    found = {one.checkpoint.name: _verify_one(arguments, str(one.checkpoint.path)) for one in report.checkpoints}
    if problem := report.tracker_problem:
        found["tracker"] = Outcome({"whole": False, "error": problem}, one_line(f"tracker: {problem}"), DIFFERS)
    text, codes = "\n".join(outcome.text for outcome in found.values()), [one.code for one in found.values()]
    return Outcome({name: one.document for name, one in found.items()}, text, max(codes, default=DONE))


def _verify_one(arguments: argparse.Namespace, checkpoint: str) -> Outcome:
    """One checkpoint of a run: that it cannot be read keeps nobody from the others."""
    from mcore_ckpt.directory.iterations import is_gone
    from mcore_ckpt.format.tensor_pickle import UnsupportedDtypeError

    try:
        found = _verify(argparse.Namespace(**{**vars(arguments), "checkpoint": checkpoint}))
    except (LoadError, UnsupportedDtypeError) as error:
        said = without_tracebacks(str(error))
        found = Outcome({"whole": False, "error": said}, one_line(said), DIFFERS)
    if found.code != DONE and is_gone(checkpoint_path(checkpoint)):
        return Outcome({"removed": True}, one_line(f"{checkpoint}: has been removed since the run was listed"))
    return found


def _verify(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.tools.inspection import holds_weights

    if holds_weights(arguments.checkpoint):
        return _verify_weights(arguments)
    verdict = _verified(arguments)
    return _with_state(verdict, arguments) if arguments.state else verdict


def _verify_weights(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.models.conversions import verify_weights

    path = arguments.checkpoint
    if arguments.check_optimizer or arguments.state:
        raise OptionError(f"{path}: holds safetensors; --check-optimizer and --state are for checkpoints")
    check = partial(verify_weights, path, workers=arguments.workers, progress=arguments.progress)
    report = current_team().first("verify", check)
    unsaid = [] if report.records else ["no checksums are stored there: the structure alone was checked"]
    text = "\n".join([*_problem_lines(report.problems), *unsaid, _verdict(report)])
    return Outcome(document_of(report, whole=report.whole), text, DONE if report.whole else DIFFERS)


def _with_state(verdict: Outcome, arguments: argparse.Namespace) -> Outcome:
    """`verdict` with the fingerprint of the checkpoint, if it is valid."""
    document: dict[str, object] = dict(verdict.document)
    if verdict.code != DONE:
        text = "the state has no fingerprint: other things are wrong"
        return Outcome({**document, "state": None}, f"{verdict.text}\n{text}", verdict.code)
    from mcore_ckpt.tools.diff import checked_fingerprint, model_and_optimizer

    found, others = checked_fingerprint(arguments.checkpoint, workers=arguments.workers, progress=arguments.progress)
    model, optimizer = model_and_optimizer(found)
    document["state"] = {"total": str(found), "model": str(model), "optimizer": str(optimizer), "not_as_saved": others}
    text = f"{verdict.text}\nstate {found}: model {model} ({counted(len(model.tensors or ()), 'tensor')}), "
    text += f"optimizer {optimizer} ({len(optimizer.tensors or ())})"
    if others:
        named = ", ".join(others[:_SHOWN]) + (", ..." if len(others) > _SHOWN else "")
        text += f"\nNOT AS SAVED: another fingerprint than was stored with {counted(len(others), 'tensor')}: {named}"
    return Outcome(document, text, DIFFERS if others else DONE)


def _problem_lines(problems: Sequence[Problem]) -> list[str]:
    """What concerns whole files or the index first; of one file's items the first few."""
    lines: dict[str, list[str]] = {"": []}
    for problem in problems:
        file = one_line(str(problem.file)) if problem.file and problem.fqn else ""
        lines.setdefault(file, []).append(one_line(f"{problem.kind}: {problem.message}"))
    shown = lines.pop("")
    for file, found in lines.items():
        shown += first_of(found, _SHOWN_OF_A_FILE, f" in {file} (--json lists all)")
    return _some(shown)


def _some(lines: Sequence[str]) -> list[str]:
    return first_of(lines, _SHOWN, " lines like these (--json lists all)")


def _verified(arguments: argparse.Namespace) -> Outcome:
    """Verify, after the common state was accepted as it is, and repair what is damaged; each where it is asked for."""
    from mcore_ckpt.tools.inspection import checkpoint_directory
    from mcore_ckpt.tools.verify import accept_common_file, copy_of, repair_checkpoint, verify_checkpoint

    directory, optimizer = checkpoint_directory(arguments.checkpoint), arguments.check_optimizer
    # Looked at first: what is wrong with it shows before the hours that a verification may take.
    other = copy_of(directory, arguments.other) if arguments.other else None
    accepted = None
    if arguments.accept_common_state and not arguments.dry_run:
        accepted = current_team().first("accept the common state", lambda: accept_common_file(directory))
    shown, workers, lost_index = arguments.progress, arguments.workers, other is not None
    report = verify_checkpoint(directory, workers=workers, optimizer=optimizer, lost_index=lost_index, progress=shown)
    if other is not None and (report.problems or report.removed):
        report = repair_checkpoint(report, other, dry_run=arguments.dry_run, progress=shown)
    lines = _lines_of(report, other, accepted)
    if optimizer:
        lines.append(
            "the optimizer was not compared with the model: other things are wrong"
            if report.compared is None
            else f"the optimizer's weights were compared with {counted(report.compared, 'tensor')} of the model"
            if report.compared
            else _NOT_COMPARED
        )
        lines += [_OTHER_OPTIMIZER] if any(problem.kind == "optimizer" for problem in report.problems) else []
    document = document_of(report, whole=report.whole, accepted=accepted)
    return Outcome(document, "\n".join(lines), DONE if report.whole else DIFFERS)


def _lines_of(report: VerifyReport, other: Path | None, accepted: str | None) -> list[str]:
    """What a verification has found, and a repair from `other` has done."""
    lines = _problem_lines(report.problems)
    lines += [f"accepted as it is: {accepted}"] if accepted else []
    lines += _some([f"repaired: {name}" for name in report.repaired])
    lines += _some([f"would repair: {name}" for name in report.would_repair])
    if report.unmatched:
        some = bool(report.repaired or report.would_repair)
        lines.append(
            f"{other} has nothing with the checksums of {'the other damage' if some else 'what is damaged'}; "
            "is it a copy of this very save?"
        )
    if report.problems and not other and not any(problem.kind in ("index", "optimizer") for problem in report.problems):
        lines.append(f"with a copy of this save: mcore-ckpt repair {one_line(report.path)} --from COPY")
    allowed = {*LoadOptions.from_environment().allowed_classes} if report.refused else set()
    if {*report.refused} - allowed and "*" not in allowed:
        named = {"what loads do not read" if name == "*" else name: key for name, key in report.refused.items()}
        held = "; ".join(_some([one_line(f"{name} in {key}") for name, key in named.items()]))
        lines.append(f"loads need MCORE_CKPT_ALLOWED_CLASSES={one_line(','.join(report.refused))}: it holds {held}")
    if report.removed is not None:
        lines.append(one_line(f"model only: {report.removed.said}; `mcore-ckpt repair --from FULL_COPY` undoes it"))
    return [*lines, _verdict(report)]


def _verdict(report: VerifyReport) -> str:
    verdict = "valid" if report.whole else f"DAMAGED, {counted(len(report.problems), 'problem')}"
    return (
        f"{one_line(report.path)}: {verdict}: {counted(report.items, 'item')}, {counted(report.records, 'checksum')}, "
        f"{human_bytes(report.read_bytes)}{human_rate(report.read_bytes, report.seconds)}"
        + (f"; without a checksum: {counted(report.unchecked, 'item')}" if report.unchecked else "")
    )


def add_repair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", help="directory of the checkpoint, or one with a tracker file")
    parser.add_argument(
        "--from", dest="other", metavar="OTHER", help="a copy of the same save; of a model-only CKPT a full one"
    )
    parser.add_argument("--accept-common-state", action="store_true", help="common.pt was changed on purpose")
    add_dry_run(parser, "show what is wrong, and what of it the copy could repair; write nothing")
    add_workers(parser, "threads that read and sum")
    parser.set_defaults(check_optimizer=False)


def run_repair(arguments: argparse.Namespace) -> Outcome:
    if not arguments.other and not arguments.accept_common_state:
        raise OptionError("repair: give --from OTHER, --accept-common-state, or both")
    outcome = _verified(arguments)
    return replace(outcome, text=f"{outcome.text}\nnothing was written") if arguments.dry_run else outcome


def add_copy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="directory of a checkpoint, or its URL")
    parser.add_argument("target", metavar="DST", help="directory or URL of the copy; an interrupted copy is resumed")


def run_copy(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.tools.runs import copy_checkpoint

    report = copy_checkpoint(arguments.source, arguments.target)
    text = (
        f"{report.target}: copied {counted(len(report.copied), 'file')}, {human_bytes(report.copied_bytes)}"
        f"{human_rate(report.copied_bytes, report.seconds)}"
    )
    if report.kept:
        text += f"; {len(report.kept)} were there already"
    text += "".join(f"\nnot copied: {one_line(name)}, in the run's directory" for name in report.left_out)
    return Outcome(report, text)


def add_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory that holds iter_0000100 and the like")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--keep-last", type=int, metavar="N", help="the newest N complete checkpoints stay (1 or more)")
    which.add_argument("--optimizer-last", type=int, metavar="N", help="as --keep-last; others lose their optimizer")
    parser.add_argument("--keep-every", type=int, metavar="N", help="iterations that are multiples of N stay")
    what = parser.add_mutually_exclusive_group()
    add_dry_run(what, "list what would be deleted; this is the default")
    what.add_argument("--yes", "-y", action="store_true", help="delete them; without it they are only listed")


def run_prune(arguments: argparse.Namespace) -> Outcome:
    from mcore_ckpt.directory.retention import prune_run

    options = {"keep_every": arguments.keep_every, "remove": arguments.yes}
    goes, made = "remove", ("to remove", "removed")
    if arguments.optimizer_last is None:
        report = prune_run(arguments.run, keep_last=arguments.keep_last, **options)
    else:
        from mcore_ckpt.reshard.model_only import remove_optimizers

        goes, made = "model only", ("to make model-only", "made model-only")
        report = remove_optimizers(arguments.run, keep_last=arguments.optimizer_last, **options)
    rows, notes, documents = [], [], []
    for decision in report.decisions:
        found = decision.checkpoint
        rows.append((found.name, "keep" if decision.keep else goes, human_bytes(found.size_bytes), decision.reason))
        if decision.left:
            notes.append(f"{found.path}: not of the checkpoint, still there: {', '.join(decision.left[:5])}")
        documents.append(document_of(decision, checkpoint=document_of(found, name=found.name, whole=found.whole)))
    going = sum(not decision.keep for decision in report.decisions)
    text = f"{report.path}: {going} of {counted(len(rows), 'checkpoint')} {made[report.removed]}, "
    text += human_bytes(report.freed_bytes)
    if going and not report.removed:
        text += "; nothing was removed (--yes does it)"
    lines = [table(("checkpoint", "", "size", "why"), rows, right=(2,)), *notes, text]
    return Outcome(document_of(report, decisions=documents), "\n".join(lines))


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", nargs="?", default=".", help="where checkpoints will lie")


def run_doctor(arguments: argparse.Namespace) -> Outcome:
    warnings.simplefilter("ignore")  # Megatron says at each import what else is not installed
    found = [*_software(), *_options(), _direct_io(arguments.directory), *_contract()]
    wrong = [finding for finding in found if finding.is_wrong]
    rows = [(finding.what, finding.state, finding.remark) for finding in found]
    verdict = f"{len(wrong)} of these would stop a job" if wrong else "nothing here would stop a job"
    text = f"{table(('what', 'state', 'remark'), rows)}\n{verdict}"
    return Outcome({"findings": found, "ok": not wrong}, text, DIFFERS if wrong else DONE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis."""

    what: str  # it is about
    state: str  # in a word or two
    remark: str = ""  # what follows from it
    is_wrong: bool = False  # a job would fail


def _software() -> list[Finding]:
    import torch

    from mcore_ckpt.megatron.install import has_nvrx
    from mcore_ckpt.megatron.versions import NEWEST_TESTED, TESTED_VERSIONS, installed_version_text, megatron_version

    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    found = [Finding("torch", torch.__version__, cuda)]
    try:
        version = megatron_version()[:2]
    except UnsupportedMegatronError as error:
        is_too_old = find_spec("megatron") is not None
        remark = str(error) if is_too_old else "torch.distributed.checkpoint is served without it"
        return [*found, Finding("megatron-core", "not served", remark, is_too_old)]
    remark = f"tested: {TESTED_VERSIONS[0]} to {TESTED_VERSIONS[-1]}" if version > NEWEST_TESTED else "tested"
    found.append(Finding("megatron-core", installed_version_text(), remark))
    if not has_nvrx():
        return [*found, Finding("nvidia-resiliency-ext", "not installed", "what Megatron imports of it is supplied")]
    return [*found, Finding("nvidia-resiliency-ext", metadata.version("nvidia-resiliency-ext"), "its queue is served")]


def _options() -> Iterator[Finding]:
    for options in (SaveOptions, LoadOptions):
        try:
            options.from_environment()
        except OptionError as error:
            yield Finding("MCORE_CKPT_* variables", "refused", str(error), is_wrong=True)


def _direct_io(directory: str) -> Finding:
    from mcore_ckpt.storage.base import ALIGNMENT_BYTES
    from mcore_ckpt.storage.direct_io import aligned_buffer, enable

    if not Path(directory).is_dir():
        raise NotADirectoryError(f"{directory}: there is no such directory; name the one where checkpoints will lie")
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".mcore_ckpt_doctor") as file:
        try:  # some file systems take the flag, and refuse the write
            works = enable(file.fileno()) and os.pwrite(file.fileno(), aligned_buffer(ALIGNMENT_BYTES), 0) > 0
        except OSError:
            works = False
    remark = "" if works else "files are written and read through the page cache"
    return Finding(f"direct I/O in {directory}", "works" if works else "refused", remark)


def _contract() -> Iterator[Finding]:
    from mcore_ckpt.megatron.install import CONTRACT, owner_of
    from mcore_ckpt.megatron.versions import megatron_version

    with contextlib.suppress(UnsupportedMegatronError):  # which has been said
        version = megatron_version()[:2]
        for name in CONTRACT:
            if not name.belongs_to(version):
                continue
            if owner_of(name) is not None:
                yield Finding(str(name), f"{'called' if name.made is None else 'replaced'} by mcore_ckpt")
            else:
                yield Finding(str(name), "missing", name.absence or "install() refuses", is_wrong=not name.absence)
