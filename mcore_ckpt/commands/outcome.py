"""What a sub-command hands back to be shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

__all__ = ["DIFFERS", "DONE", "FAILED", "Outcome"]

DONE: Final = 0
"""Done, identical, or whole."""

DIFFERS: Final = 1
"""Different, or damaged."""

FAILED: Final = 2
"""Bad usage, or something that cannot be read or written."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Attributes: `document` is what `--json` prints, `text` what a person reads."""

    document: Any
    text: str
    code: int = DONE
