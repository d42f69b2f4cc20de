"""`mcore-ckpt verify`: is a checkpoint complete and undamaged?"""

from __future__ import annotations

import argparse

from mcore_ckpt.commands._shell import DIFFERS, DONE, Outcome, add_workers, document_of, one_line
from mcore_ckpt.core.console import human_bytes

_SHOWN = 50
_OTHER_OPTIMIZER = (
    "a job that loads the optimizer resumes from its weights, not from the model's. Megatron-Core saves a fully "
    "reshardable optimizer of several buckets shifted; the model's weights are not, and with --no-load-optim a job "
    "resumes from them"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("checkpoint", metavar="CKPT", help="directory of the checkpoint, or one with a tracker file")
    parser.add_argument(
        "--check-optimizer",
        action="store_true",
        help="compare the optimizer's float32 weights with the model's, too: rounded, they are the same",
    )
    parser.add_argument(
        "--state",
        action="store_true",
        help="show the fingerprint of its tensors, which is the same under every parallel layout",
    )
    parser.add_argument(
        "--expect-state",
        metavar="FINGERPRINT",
        help="compare its fingerprint, or its model's or optimizer's, with this",
    )
    add_workers(parser, "threads that read and sum")
    # Names of old; `repair` has the last two.
    parser.add_argument("--optimizer", dest="check_optimizer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--repair-from", help=argparse.SUPPRESS)
    parser.add_argument("--accept-common-state", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> Outcome:
    """Verify."""
    verdict = verified(
        arguments,
        repair_from=arguments.repair_from,
        accept=arguments.accept_common_state,
        optimizer=arguments.check_optimizer,
    )
    if not arguments.state and not arguments.expect_state:
        return verdict
    return _with_state(verdict, arguments)


def _with_state(verdict: Outcome, arguments: argparse.Namespace) -> Outcome:
    """The same with the fingerprint of a valid checkpoint, which may have to be a certain one."""
    document: dict[str, object] = dict(verdict.document)
    if verdict.code != DONE:
        text = "the state has no fingerprint: other things are wrong"
        return Outcome({**document, "state": None}, f"{verdict.text}\n{text}", verdict.code)
    from mcore_ckpt.tools.fingerprints import checked_fingerprint, model_and_optimizer

    found, others = checked_fingerprint(
        arguments.checkpoint, workers=max(1, arguments.workers), progress=False if arguments.quiet else None
    )
    model, optimizer = model_and_optimizer(found)
    document["state"] = {"total": str(found), "model": str(model), "optimizer": str(optimizer), "not_as_saved": others}
    text = f"{verdict.text}\nstate {found}: model {model} ({len(model.tensors or ())} tensors), "
    text += f"optimizer {optimizer} ({len(optimizer.tensors or ())})"
    if others:
        named = ", ".join(others[:_SHOWN]) + (", ..." if len(others) > _SHOWN else "")
        text += f"\nNOT AS SAVED: {len(others)} tensors have another fingerprint than was stored with them: {named}"
        return Outcome(document, text, DIFFERS)
    expected = arguments.expect_state
    if not expected:
        return Outcome(document, text, DONE)
    if expected.lower() in (str(found), str(model), str(optimizer)):
        return Outcome(document, f"{text}, as expected", DONE)
    return Outcome(document, f"{text}, expected {expected}: DIFFERENT", DIFFERS)


def verified(arguments: argparse.Namespace, *, repair_from: str | None, accept: bool, optimizer: bool) -> Outcome:
    """Verify, after the common state was accepted as it is, and repair what is damaged; each where it is asked for."""
    from mcore_ckpt.tools.inspection import checkpoint_directory
    from mcore_ckpt.tools.verify import verify_checkpoint, verify_optimizer

    directory = checkpoint_directory(arguments.checkpoint)
    # Looked at first: what is wrong with it shows before the hours that a verification may take.
    other = checkpoint_directory(repair_from) if repair_from else None
    shown = False if arguments.quiet else None
    accepted = None
    if accept:
        from mcore_ckpt.directory.common_file import accept_common_file

        accepted = accept_common_file(directory)
    report = verify_checkpoint(directory, workers=max(1, arguments.workers), progress=shown)
    if other is not None and report.problems:
        from mcore_ckpt.tools.repair import repair_checkpoint

        report = repair_checkpoint(report, other, progress=shown)
    if optimizer and report.whole:
        report = verify_optimizer(report, progress=shown)
    rate = report.read_bytes / report.seconds if report.seconds else 0
    lines = [one_line(f"{problem.kind}: {problem.message}") for problem in report.problems[:_SHOWN]]
    if len(report.problems) > _SHOWN:
        lines.append(f"... and {len(report.problems) - _SHOWN} more (--json lists all)")
    lines += [f"accepted as it is: {accepted}"] if accepted else []
    lines += [f"repaired: {name}" for name in report.repaired]
    verdict = "valid" if report.whole else f"DAMAGED, {len(report.problems)} problems"
    lines.append(
        f"{one_line(report.path)}: {verdict}: {report.items} items, "
        f"{report.records} checksums, {human_bytes(report.read_bytes)} in {report.seconds:.1f} s "
        f"({human_bytes(int(rate))}/s)" + (f"; {report.unchecked} items carry no checksum" if report.unchecked else "")
    )
    if optimizer:
        lines.append(
            "the optimizer was not compared with the model: other things are wrong"
            if report.compared is None
            else f"the optimizer's weights were compared with {report.compared} tensors of the model"
            + ("" if report.compared else ": it stores none in float32 by their names")
        )
        lines += [_OTHER_OPTIMIZER] if any(problem.kind == "optimizer" for problem in report.problems) else []
    document = document_of(report, whole=report.whole, accepted=accepted)
    return Outcome(document, "\n".join(lines), DONE if report.whole else DIFFERS)
