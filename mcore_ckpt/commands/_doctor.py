"""What a job would stumble over here: `mcore-ckpt doctor`."""

from __future__ import annotations

import argparse
import warnings

from mcore_ckpt.commands._shell import DIFFERS, DONE, Outcome, table


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("directory", metavar="DIR", nargs="?", default=".", help="where checkpoints will lie")


def run_doctor(arguments: argparse.Namespace) -> Outcome:
    """Diagnose."""
    from mcore_ckpt.megatron.doctor import diagnose

    warnings.simplefilter("ignore")  # Megatron says at each import what else is not installed
    found = diagnose(arguments.directory)
    wrong = [finding for finding in found if finding.is_wrong]
    rows = [(finding.what, finding.state, finding.remark) for finding in found]
    verdict = f"{len(wrong)} of these would stop a job" if wrong else "nothing here would stop a job"
    text = f"{table(('what', 'state', 'remark'), rows)}\n{verdict}"
    return Outcome({"findings": found, "ok": not wrong}, text, DIFFERS if wrong else DONE)
