"""Renaming keys by rules, for export and import."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mcore_ckpt.errors import OptionError

__all__ = ["RenameRule", "parse_rename_rules", "rename_keys"]

_DROP = "-"


class RenameRule(NamedTuple):
    """Keys in which the pattern is found get the replacement for it; None drops them."""

    pattern: re.Pattern[str]
    replacement: str | None


def parse_rename_rules(text: str, where: str) -> list[RenameRule]:
    r"""Rules from text, one a line: a regular expression, then what to put for it, or `-` to drop the key.

        ^decoder\.layers\.(\d+)\.     model.layers.\1.
        _extra_state                  -

    `#` starts a comment.

    Raises:
        OptionError: a line is none of that.
    """
    rules = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split(" #", 1)[0].split() if not line.lstrip().startswith("#") else []
        if not words:
            continue
        if len(words) != 2:
            raise OptionError(f"{where}, line {number}: {line.strip()!r}: expected PATTERN REPLACEMENT, or PATTERN -")
        try:
            pattern = re.compile(words[0])
        except re.error as error:
            raise OptionError(f"{where}, line {number}: {words[0]!r} is no regular expression: {error}") from error
        rules.append(RenameRule(pattern, None if words[1] == _DROP else words[1]))
    return rules


def rename_keys(keys: Iterable[str], rules: Sequence[RenameRule]) -> dict[str, str]:
    """New names by old ones; dropped keys are left out. The first rule that finds something in a key applies.

    Raises:
        OptionError: two keys get the same name, or a replacement refers to a group that is not there.
    """
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
