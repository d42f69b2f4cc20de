"""The `mcore-ckpt` command: what can be done with `torch_dist` checkpoints, and the runs that they belong to.

Exit codes: 0 done, identical, or valid; 1 different or damaged; 2 bad usage, or something that cannot be read or
written; 70 a mistake of this package; 130 interrupted. Errors are one line on standard error that says what to do;
`--debug` adds the traceback.

Only the module of the running command is imported, and it imports what it needs when it needs it: `--help` costs as
much as Python itself.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

from mcore_ckpt.core.console import human_bytes, is_terminal, printable
from mcore_ckpt.core.errors import CheckpointError, OptionError, without_tracebacks
from mcore_ckpt.core.options import tell_unknown_variables

Container = argparse._ActionsContainer  # noqa: SLF001  (a parser, or a group of its arguments)

# Exit codes, as above; a mistake of this package has `EX_SOFTWARE` of sysexits.h.
DONE, DIFFERS, FAILED, INTERNAL, INTERRUPTED = 0, 1, 2, 70, 130


@dataclass(frozen=True, slots=True)
class Outcome:
    """Attributes: `document` is what `--json` prints, `text` what a person reads."""

    document: Any
    text: str
    code: int = DONE


def add_workers(parser: Container, what: str) -> None:
    parser.add_argument("--workers", "-j", type=int, default=2, metavar="N", help=f"{what} (default: 2)")


def add_dry_run(parser: Container, what: str) -> None:
    parser.add_argument("--dry-run", "-n", action="store_true", help=what)


def document_of(report: Any, **more: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, and others, or others in their place."""
    return {**{field.name: getattr(report, field.name) for field in fields(report)}, **more}


def human_age(seconds: float) -> str:
    """`5 min`, `3 h`, `12 d`: the largest unit of which there is more than one."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def human_rate(nbytes: int, seconds: float) -> str:
    """` in 12.3 s (2.1 GB/s)`; without the rate below a second, which says nothing of the storage."""
    rate = f" ({human_bytes(int(nbytes / seconds))}/s)" if seconds >= 1 else ""
    return f" in {seconds:.1f} s{rate}"


def one_line(text: str) -> str:
    """What a key or a message says, in one line: no checkpoint is to write a line of the command's."""
    return text.replace("\n", "\\n")


def first_of(lines: Sequence[str], limit: int, more: str = "") -> list[str]:
    """So many lines, and one that says how many others there are."""
    left = len(lines) - limit
    return [*lines[:limit], *([f"... and {left} more{more}"] if left > 0 else [])]


def numbers(values: Iterable[int]) -> str:
    """A shape or an offset: `[4096, 1024]`."""
    return "[" + ", ".join(map(str, values)) + "]"


def _cell(value: object) -> str:
    return "-" if value is None else numbers(value) if isinstance(value, tuple) else str(value)


def table(header: Sequence[str], rows: Iterable[Sequence[object]], *, right: Iterable[int] = ()) -> str:
    """Columns as wide as their widest cell; a narrow terminal gets the cells of a row below its first."""
    cells = [[one_line(_cell(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    columns = shutil.get_terminal_size().columns
    if is_terminal(sys.stdout) and sum(widths) + 2 * (len(widths) - 1) > columns:
        lines, wrapper = [], textwrap.TextWrapper(columns - 4, break_long_words=False, break_on_hyphens=False)
        for first, *others in cells:
            named = (f"{name} {cell}".strip() for name, cell in zip(header[1:], others, strict=True) if cell)
            together = "; ".join(text.replace(" ", "\xa0") for text in named)  # no cell is broken
            lines += [first, *(f"    {line}".replace("\xa0", " ") for line in wrapper.wrap(together))]
        return "\n".join(lines)
    rows = [list(header), ["-" * width for width in widths], *cells]
    sides = [">" if n in set(right) else "<" for n in range(len(header))]
    layout = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return "\n".join(layout.format(*row).rstrip() for row in rows)


@dataclass(frozen=True, slots=True)
class _Command:
    """What `--help` says of a command."""

    purpose: str
    examples: tuple[str, ...]  # the words behind its name
    outcomes: tuple[str, ...] = ("done",)  # what exit codes 0 and 1 mean


_GROUPS: Final = {
    "look": ("list", "inspect", "verify", "cat", "diff"),
    "change": ("copy", "repair", "prune"),
    "convert": ("reshard", "export", "merge", "import"),
    "run": ("doctor", "launch"),
}
_COMMANDS: Final = {
    "list": _Command(
        "a run's checkpoints: completeness, size, age, parallel layout",
        ("run", "run --json"),
        (
            "all are complete, but for what a save is writing or a killed one has left",
            "one that no save has marked is incomplete, or the tracker file names none that is complete",
        ),
    ),
    "inspect": _Command(
        "what a checkpoint holds: tensors, files, objects; an HTML report",
        ("run/iter_0001000", "run/iter_0001000 --tensors layernorm", "run/iter_0001000 --html report.html"),
    ),
    "verify": _Command(
        "check structure and every record's checksum",
        ("run/iter_0001000", "run/iter_0001000 --check-optimizer -j 4", "run --all --check-optimizer"),
        ("valid", "damaged"),
    ),
    "cat": _Command(
        "show or extract one tensor or object",
        ("run/iter_0001000 decoder.final_layernorm.weight", "run/iter_0001000 output_layer.weight --slice '0:4, :'"),
    ),
    "diff": _Command(
        "compare two checkpoints, whatever their sharding",
        (
            "run/iter_0001000 copy/iter_0001000",
            "run/iter_0001000 other/iter_0001000 --only 'decoder.*' --rtol 1e-3",
            "--state run",
        ),
        ("identical", "different"),
    ),
    "copy": _Command(
        "copy a checkpoint between directories and object stores",
        ("run/iter_0001000 s3://bucket/run/iter_0001000", "s3://bucket/run/iter_0001000 back/iter_0001000"),
    ),
    "repair": _Command(
        "repair a damaged checkpoint from another copy",
        ("run/iter_0001000 --from copy/iter_0001000", "run/iter_0001000 --from copy/iter_0001000 --dry-run"),
        ("valid", "still damaged"),
    ),
    "prune": _Command(
        "delete a run's old checkpoints, or their optimizers' state",
        ("run --keep-last 3", "run --keep-last 3 --keep-every 1000 --yes", "run --optimizer-last 2 --yes"),
    ),
    "reshard": _Command(
        "rewrite a checkpoint for another parallel layout",
        (
            "run/iter_0001000 tp4/iter_0001000 --tp 4 --pp 2",
            "run/iter_0001000 new/iter_0001000 --optimizer-layout fully_reshardable",
            "run/iter_0001000 model/iter_0001000 --tp 1 --pp 1 --drop-optimizer --dry-run",
        ),
    ),
    "export": _Command(
        "write a Hugging Face model, safetensors, a torch file or DCP",
        ("run/iter_0001000 model --to hf", "run/iter_0001000 tensors --dtype bf16 --max-shard-size 2GB"),
        ("done", "with --check-logits: the models compute different logits"),
    ),
    "merge": _Command(
        "average the models of checkpoints",
        (
            "merged/release run/iter_0001000 run/iter_0002000 run/iter_0003000",
            "merged/release run/iter_0001000 run/iter_0002000 --weights minus-sqrt --masters --tp 4",
            "model run/iter_0001000 run/iter_0002000 --ema 0.9 --to hf",
        ),
    ),
    "import": _Command(
        "make a checkpoint of a Hugging Face model, safetensors, torch or DCP",
        ("Llama-3.1-8B start/release --from hf --tp 4", "tensors imported/iter_0000001 --tp 2"),
        ("done", "with --check-logits: the models compute different logits"),
    ),
    "doctor": _Command(
        "what install() finds of Megatron here, and what would stop a job",
        ("", "/checkpoints"),
        ("nothing would stop a job", "something would"),
    ),
    "launch": _Command(  # which `mcore_ckpt/__main__.py` runs, since it is no command on checkpoints
        "run a training script under mcore_ckpt.install()",
        ("pretrain_gpt.py --ckpt-format torch_dist",),
        ("the script has ended",),
    ),
}
_MODULES: Final = {
    **dict.fromkeys(("list", "inspect", "cat", "diff"), "_look"),
    **dict.fromkeys(("verify", "repair", "copy", "prune", "doctor"), "_checks"),
    **dict.fromkeys(("reshard", "export", "merge", "import"), "_conversions"),
}

# Several processes divide the work of these; that of others the first one does, and the rest wait.
_DIVIDED: Final = frozenset(("verify", "diff", "copy", "repair", "reshard", "export", "merge", "import"))


def _function(verb: str, command: str) -> Any:
    """`add_COMMAND(parser)`, which declares its arguments, or `run_COMMAND(arguments)`, which gives an `Outcome`."""
    return getattr(import_module(f"mcore_ckpt.commands.{_MODULES[command]}"), f"{verb}_{command}")


def _overview() -> str:
    lines = [
        "Work with torch_dist checkpoints of Megatron-Core and of",
        "torch.distributed.checkpoint: no model, no GPU, no process group.",
    ]
    for group, names in _GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:<9} {_COMMANDS[name].purpose}" for name in names)]
    return "\n".join(lines)


def _codes(outcomes: Sequence[str]) -> str:
    meanings = {
        **dict(enumerate(outcomes)),
        FAILED: "bad usage, or something cannot be read or written",
        INTERNAL: "a mistake of mcore_ckpt: please report it",
        INTERRUPTED: "interrupted",
    }
    return "\n".join(["exit codes:", *(f"  {code:>3}  {meaning}" for code, meaning in meanings.items())])


class _Parser(argparse.ArgumentParser):
    """Says which command, option or value one that is misspelt is most like."""

    def error(self, message: str) -> NoReturn:
        import difflib

        known = [word for action in self._actions for word in (*action.option_strings, *(action.choices or ()))]
        _, _, unknown = message.partition("unrecognized arguments: ")
        words = [word.partition("=")[0] for word in unknown.split()] or re.findall("invalid choice: '(.+?)'", message)
        alike = [near for word in words for near in difflib.get_close_matches(word, known, n=1)]
        super().error(printable(f"{message}; did you mean {', '.join(alike)}?" if alike else message))


def make_parser(command: str = "") -> argparse.ArgumentParser:
    """The whole parser; only `command` gets its arguments, since only its module is imported."""
    from mcore_ckpt import __version__

    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="mcore-ckpt",
        usage="%(prog)s [--version] COMMAND ...",
        description=_overview(),
        epilog=f"{_codes(('done, valid or identical', 'damaged or different'))}\n\n"
        "`mcore-ckpt COMMAND --help` has options and examples.",
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"mcore-ckpt {__version__}")
    # The description lists the commands in groups, which argparse cannot do.
    added = parser.add_subparsers(
        prog="mcore-ckpt", dest="command", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    common = _Parser(add_help=False)
    output = common.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    output.add_argument("--quiet", "-q", dest="progress", action="store_const", const=False, help="no progress bar")
    output.add_argument("--debug", action="store_true", help="show the traceback of an error")
    for name, one in _COMMANDS.items():
        sentence = one.purpose[0].upper() + one.purpose[1:] + "."
        parents = [] if name == "launch" else [common]
        examples = [f"  mcore-ckpt {name} {words}" for words in one.examples]
        epilog = "\n".join(["examples:", *examples, "", _codes(one.outcomes)])
        sub = added.add_parser(name, description=sentence, epilog=epilog, parents=parents, formatter_class=raw)
        sub.set_defaults(parser=sub)
        if name == command != "launch":
            _function("add", name)(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: the next file that is opened would get its number
            setattr(sys, name, Path(os.devnull).open("r+"))  # noqa: SIM115
    words = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser(*words[:1])
    if not words:
        parser.print_help(sys.stderr)
        return FAILED
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    tell_unknown_variables()
    try:
        return _run(arguments, words)
    except KeyboardInterrupt as interrupt:
        more = f": {_one_line(interrupt)}" if interrupt.args else ""
        print(f"mcore-ckpt: interrupted{_printable(more, sys.stderr)}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if arguments.debug:
            raise
        is_expected = isinstance(error, CheckpointError | OSError | MemoryError)
        said = _printable(_one_line(error), sys.stderr)
        if not is_expected:
            said = f"{type(error).__name__}: {said} (this should not happen: run again with --debug and report it)"
        print(f"mcore-ckpt: {said}", file=sys.stderr)
        return FAILED if is_expected else INTERNAL


def _run(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the command with the other processes of a launcher; the first one shows the outcome."""
    from mcore_ckpt.core.team import team_of_launcher

    def outcome() -> Outcome:
        found: Outcome = _function("run", arguments.command)(arguments)
        return found

    with team_of_launcher() as team:
        given = dict.fromkeys(team.run("begin", lambda: shlex.join(words)))
        if len(given) > 1:
            raise OptionError(f"the ranks were not given the same command line: `{'`, `'.join(given)}`")
        if arguments.command not in _DIVIDED:
            return team.first(arguments.command, lambda: _show(outcome(), as_json=arguments.json))
        found = team.end(arguments.command, outcome)
        return team.end("show the outcome", lambda: found.code if team.rank else _show(found, as_json=arguments.json))


def _one_line(error: BaseException) -> str:
    text = " ".join(without_tracebacks(str(error)).split())
    return text or type(error).__name__


def _printable(text: str, stream: TextIO) -> str:
    """As `printable`, also for what the stream's encoding does not have."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return printable(text).encode(encoding, "backslashreplace").decode(encoding)


def _show(outcome: Outcome, *, as_json: bool) -> int:
    """Print, and give the exit code."""
    try:
        if as_json:
            import json

            text = json.dumps(outcome.document, default=_jsonable)
            # JSON has no NaN and no infinities: they become text.
            print(json.dumps(json.loads(text, parse_constant=lambda name: str(float(name)))))
        elif outcome.text:
            print(_printable(outcome.text, sys.stdout))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has enough (`| head`); Python would complain again while it shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return outcome.code


def _jsonable(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return document_of(value)
    return str(value)
