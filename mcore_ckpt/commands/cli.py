"""The `mcore-ckpt` command: what can be done with `torch_dist` checkpoints, and the runs that they belong to.

Exit codes: 0 done, identical, or valid; 1 different or damaged; 2 bad usage, or something that cannot be read or
written. Errors are one line on standard error that says what to do; `--debug` adds the traceback.

Only the module of the command that runs is imported, and it imports what it needs when it needs it, so that
`--help` costs what Python itself costs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any, TextIO

from mcore_ckpt.commands._shell import FAILED, Outcome, document_of
from mcore_ckpt.core.errors import CheckpointError

# name -> (module in mcore_ckpt.commands, what it does)
_COMMANDS = {
    "reshard": ("reshard", "rewrite a checkpoint for another parallel layout"),
    "inspect": ("inspect", "what a checkpoint holds: summary, tensors, files, items, objects, HTML report"),
    "verify": ("verify", "check structure and every record's checksum; repair from another copy"),
    "diff": ("diff", "compare two checkpoints, whatever their sharding"),
    "export": ("export", "write a Hugging Face model, safetensors, a torch file or a plain DCP checkpoint"),
    "import": (
        "import_",
        "make a torch_dist checkpoint of a Hugging Face model, safetensors, torch files or DCP",
    ),
    "cat": ("cat", "show or extract one tensor or object"),
    "list": ("list", "the checkpoints of a run: which are complete, how large, how old, in which layout"),
    "copy": ("copy", "copy a checkpoint between directories and object stores"),
    "prune": ("prune", "delete a run's old checkpoints"),
}


def _parser(command: str | None) -> argparse.ArgumentParser:
    """The whole parser; only `command` gets its arguments, since only its module is imported."""
    from mcore_ckpt.core.version import __version__

    parser = argparse.ArgumentParser(
        prog="mcore-ckpt",
        description="Work with torch_dist checkpoints of Megatron-Core and torch.distributed.checkpoint: no model, no "
        "GPU, no process group.",
        epilog="exit codes: 0 done, identical or valid; 1 different or damaged; 2 bad usage or unreadable",
    )
    parser.add_argument("--version", action="version", version=f"mcore-ckpt {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    common.add_argument("--quiet", "-q", action="store_true", help="no progress bar")
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    for name, (module, purpose) in _COMMANDS.items():
        sentence = purpose[0].upper() + purpose[1:] + "."
        sub = commands.add_parser(name, help=purpose, description=sentence, parents=[common])
        if name == command:
            import_module(f"mcore_ckpt.commands._{module}").add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in words if not word.startswith("-")), None)
    arguments = _parser(command).parse_args(words)
    try:
        run = import_module(f"mcore_ckpt.commands._{_COMMANDS[arguments.command][0]}").run
        outcome: Outcome = run(arguments)
        try:
            _show(outcome, as_json=arguments.json)
        except BrokenPipeError:
            # The reader of our output has enough (`| head`); Python would complain again while it shuts down.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return outcome.code
    except KeyboardInterrupt:
        print("mcore-ckpt: interrupted", file=sys.stderr)
        return 130
    except (CheckpointError, OSError, MemoryError) as error:
        if arguments.debug:
            raise
        print(f"mcore-ckpt: {_printable(_one_line(error), sys.stderr)}", file=sys.stderr)
        return FAILED
    except Exception as error:
        if arguments.debug:
            raise
        print(
            f"mcore-ckpt: {type(error).__name__}: {_printable(_one_line(error), sys.stderr)} (this should not happen: "
            "run again with --debug and report what it shows)",
            file=sys.stderr,
        )
        return FAILED


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__


# Keys and arguments come from files that are not trusted: in a terminal, control characters of theirs would act.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def _printable(text: str, stream: TextIO) -> str:
    """`text` without control characters, and without what the stream's encoding does not have."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.translate(_CONTROL).encode(encoding, "backslashreplace").decode(encoding)


def _show(outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        try:
            text = json.dumps(outcome.document, default=_jsonable, allow_nan=False)
        except ValueError:  # JSON has no NaN and no infinities
            text = json.dumps(_without_nan(json.loads(json.dumps(outcome.document, default=_jsonable))))
        print(text)
    elif outcome.text:
        print(_printable(outcome.text, sys.stdout))
    sys.stdout.flush()


def _without_nan(value: Any) -> Any:
    """The same with `"nan"`, `"inf"` and `"-inf"` as text."""
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_nan(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _jsonable(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return document_of(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
