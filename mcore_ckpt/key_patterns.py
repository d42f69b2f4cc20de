"""Keys by pattern, in the one way that all commands understand: a shell pattern, or a part of the key."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

__all__ = ["key_filter"]


def key_filter(pattern: str | None) -> Callable[[str], bool]:
    """A test for keys.

    Args:
        pattern: with any of `*?[`, a shell pattern for the whole key (`*` also passes dots); otherwise a part of it.
            None and `""` match everything.
    """
    if not pattern:
        return lambda key: True
    if any(character in pattern for character in "*?["):
        match = re.compile(fnmatch.translate(pattern)).match
        return lambda key: match(key) is not None
    return lambda key: pattern in key
