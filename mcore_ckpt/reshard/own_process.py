"""A function in an interpreter of its own: what it tells Megatron and torch there stays there, and so does its end."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from mcore_ckpt.core import errors

_CODE = "import sys; sys.path[:] = {!r}; from mcore_ckpt.reshard.own_process import answer; answer({!r}, {!r})"


class ChildError(Exception):
    """The function has raised what is no error of `mcore_ckpt`, or its interpreter has ended; `exit_code` of that."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def in_own_process(
    module: str, name: str, request: Any, environ: Mapping[str, str | None], deadline_s: float | None = None
) -> Any:
    """Call `module.name(request)` in another interpreter; request and result are JSON. A variable that is None in
    `environ` is removed. Raises `CheckpointError` as the function does; otherwise `ChildError`.
    """
    ended = subprocess.run(
        [sys.executable, "-c", _CODE.format(sys.path, module, name)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env={key: value for key, value in {**os.environ, **environ}.items() if value is not None},
        timeout=deadline_s,
        check=False,
    )
    try:
        found: Mapping[str, Any] = json.loads(ended.stdout)
    except ValueError:
        last = ended.stderr.strip().splitlines()[-1:]
        raise ChildError(last[0] if last else f"exit code {ended.returncode}", ended.returncode) from None
    if "result" in found:
        return found["result"]
    if "ours" in found:
        raise getattr(errors, found["ours"])(found["text"])
    raise ChildError(found["text"], ended.returncode)


def answer(module: str, name: str) -> None:
    """In that interpreter: a request from standard input, the result to standard output, all else to standard error."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    try:
        found = {"result": getattr(importlib.import_module(module), name)(request)}
    except errors.CheckpointError as error:
        found = {"ours": type(error).__name__, "text": str(error)}
    except Exception as error:  # noqa: BLE001  (what Megatron raises about arguments of other versions: anything)
        found = {"text": f"{type(error).__name__}: {error!s:.400}"}
    json.dump(found, output)
    output.flush()
