"""Rules that people write into files: new names for keys, and the axes along which tensors are divided.

One rule a line: a regular expression that is searched for in the key, then what is to be done. The first rule that
finds something in a key applies. `#` starts a comment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.core.paths import local_path

_Rule = TypeVar("_Rule")

_DROP = "-"
_MAX_RULES_BYTES = 16 * 1024 * 1024


class RenameRule(NamedTuple):
    """Keys in which the pattern is found get the replacement for it; None drops them."""

    pattern: re.Pattern[str]
    replacement: str | None


def rules_in(
    given: str | os.PathLike[str] | Iterable[_Rule] | None, parse: Callable[[str, str], list[_Rule]]
) -> tuple[_Rule, ...]:
    """Rules as a caller gives them: of a file, by `parse`, or themselves. Raises `OptionError`, `OSError`."""
    if given is None:
        return ()
    if not isinstance(given, str | os.PathLike):
        return tuple(given)
    try:
        with local_path(given).open("rb") as file:
            content = file.read(_MAX_RULES_BYTES + 1)
        if len(content) > _MAX_RULES_BYTES:
            raise OptionError(f"{os.fspath(given)}: no file of rules has more than {_MAX_RULES_BYTES} bytes")
        return tuple(parse(content.decode("utf-8"), os.fspath(given)))
    except UnicodeDecodeError as error:
        raise OptionError(f"{os.fspath(given)}: not a text file: {error}") from error


def parse_rename_rules(text: str, where: str) -> list[RenameRule]:
    r"""Rules from text, one a line: a regular expression, then what to put for it, or `-` to drop the key.

    ^decoder\.layers\.(\d+)\.     model.layers.\1.
    _extra_state                  -
    """

    def rule(words: list[str]) -> RenameRule:
        pattern, replacement = words
        return RenameRule(re.compile(pattern), None if replacement == _DROP else replacement)

    return _parsed(text, where, rule, "PATTERN REPLACEMENT, or PATTERN -")


def rename_keys(keys: Iterable[str], rules: Sequence[RenameRule]) -> dict[str, str]:
    """New names by old ones, without dropped keys; raises `OptionError` if two keys get the same name."""
    renamed: dict[str, str] = {}
    origin: dict[str, str] = {}
    for key in keys:
        new: str | None = key
        for rule in rules:
            if rule.pattern.search(key):
                try:
                    new = None if rule.replacement is None else rule.pattern.sub(rule.replacement, key)
                except (re.error, IndexError) as error:
                    raise OptionError(
                        f"replacement {rule.replacement!r} of {rule.pattern.pattern!r}: {error}"
                    ) from error
                break
        if new is None:
            continue
        if new in origin:
            raise OptionError(f"{key} and {origin[new]} would both be called {new}; correct the rename rules")
        origin[new] = key
        renamed[key] = new
    return renamed


class PartitionRule(NamedTuple):
    """One line of a rules file: keys that the pattern finds are divided along `axis` (None: whole) in `parts` parts."""

    pattern: re.Pattern[str]
    axis: int | None
    parts: int = 1


def parse_partition_rules(text: str, where: str) -> list[PartitionRule]:
    """Rules from text, one a line: a regular expression, an axis of the global shape or `whole`, `x2` for halves.

    linear_qkv\\.weight$   0
    linear_fc1\\.weight$   0 x2     # two halves, each divided
    my_norm               whole
    """

    def rule(words: list[str]) -> PartitionRule:
        pattern, axis, *rest = words
        parts = int(rest[0].removeprefix("x")) if rest else 1
        if len(rest) > 1 or parts < 1:
            raise ValueError("too many words, or fewer parts than one")
        return PartitionRule(re.compile(pattern), None if axis == "whole" else int(axis), parts)

    return _parsed(text, where, rule, "PATTERN AXIS [xPARTS], with AXIS a number or 'whole'")


def _parsed(text: str, where: str, parse: Callable[[list[str]], _Rule], expected: str) -> list[_Rule]:
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split(" #", 1)[0].split()
        if not words or words[0].startswith("#"):
            continue
        try:
            rules.append(parse(words))
        except (ValueError, re.error) as error:
            raise OptionError(f"{where}, line {number}: {line.strip()!r}: expected {expected} ({error})") from error
    return rules
