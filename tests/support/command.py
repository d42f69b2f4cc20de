"""`mcore-ckpt`, called as a function."""

import contextlib
import io
import json
from typing import Any

from mcore_ckpt.commands.cli import main


def output_of(*words: object, code: int = 0) -> str:
    """What the command shows when it ends with this code."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main([str(word) for word in words]) == code, shown.getvalue()
    return shown.getvalue()


def refusal_of(*words: object) -> str:
    """What the command says on stderr when it refuses, with code 2."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main([str(word) for word in words]) == 2, said.getvalue()
    return said.getvalue()


def document_of(*words: object, code: int = 0) -> Any:
    """What it shows as JSON."""
    return json.loads(output_of(*words, "--json", code=code))
