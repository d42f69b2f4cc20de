"""`mcore-ckpt repair`: repair a damaged checkpoint from another copy, or accept a changed common state."""

from __future__ import annotations

import argparse
from dataclasses import replace

from mcore_ckpt.commands._shell import Outcome, add_dry_run, add_workers
from mcore_ckpt.commands._verify import verified
from mcore_ckpt.core.errors import OptionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("checkpoint", metavar="CKPT", help="directory of the checkpoint, or one with a tracker file")
    parser.add_argument(
        "--from",
        dest="other",
        metavar="OTHER",
        help="a copy of the same save; only bytes whose checksums match are taken from it",
    )
    parser.add_argument(
        "--accept-common-state",
        action="store_true",
        help="take the common state (common.pt) as it is: it was changed on purpose",
    )
    add_dry_run(parser, "show what is wrong, and what of it the copy could repair; write nothing")
    add_workers(parser, "threads that read and sum")


def run(arguments: argparse.Namespace) -> Outcome:
    """Repair, or show what is wrong."""
    if not arguments.other and not arguments.accept_common_state:
        raise OptionError("repair: give --from OTHER, --accept-common-state, or both")
    dry_run, accept = arguments.dry_run, arguments.accept_common_state
    outcome = verified(
        arguments, repair_from=arguments.other, accept=accept and not dry_run, dry_run=dry_run, optimizer=False
    )
    return replace(outcome, text=f"{outcome.text}\nnothing was written") if dry_run else outcome
