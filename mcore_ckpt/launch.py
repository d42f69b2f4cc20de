"""Run a training script with `install()` in force, without a change to the script:

    torchrun ... -m mcore_ckpt.launch pretrain_gpt.py --ckpt-format torch_dist ...
    torchrun ... --no-python mcore-ckpt launch pretrain_gpt.py --ckpt-format torch_dist ...

The script runs as `__main__`, with its own folder first on the path and its arguments untouched, as `python script.py`
would run it; `-m package.module` runs a module. Options come from `MCORE_CKPT_*` variables.
"""

from __future__ import annotations

import builtins
import logging
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from pkgutil import get_importer
from typing import Any

from mcore_ckpt import __version__
from mcore_ckpt.core.errors import OptionError, UnsupportedMegatronError

USAGE = (
    "usage: python -m mcore_ckpt.launch SCRIPT [arguments ...]\n"
    "       python -m mcore_ckpt.launch -m MODULE [arguments ...]\n"
    "       python -m mcore_ckpt.launch --help | --version"
)
HELP = f"""{USAGE}

Run a training script with mcore_ckpt.install() in force, without a change to the script.
`mcore-ckpt launch` is the same.

options are environment variables, one for each field of SaveOptions and LoadOptions; docs/usage.md lists them, such as:
  MCORE_CKPT_ON_FAILURE=warn     a failed async save logs a warning, and training continues
  MCORE_CKPT_ON_DAMAGED=go_back  if the checkpoint is damaged, the newest older one that is complete is loaded instead

examples:
  torchrun --nproc-per-node 8 -m mcore_ckpt.launch pretrain_gpt.py \\
      --ckpt-format torch_dist --async-save --use-persistent-ckpt-worker ...

exit codes: those of the script; 2 if there is no script, or install() is impossible"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, then run the script or module that the arguments (the command line's) name, and leave its exit to the
    caller. Returns 2 if there is nothing to run or `install()` is impossible; the reason is on stderr.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    as_module = bool(words) and words[0] == "-m"
    target = words[1:] if as_module else words
    if not target:
        print(USAGE, file=sys.stderr)  # noqa: T201  (a command's usage)
        return 2
    if not as_module and target[0] in ("-h", "--help", "--version"):
        print(f"mcore_ckpt {__version__}" if target[0] == "--version" else HELP)  # noqa: T201
        return 0
    script = Path(target[0]).absolute()
    holder: Any = None if as_module else get_importer(str(script))  # a folder or a zip file, whose `__main__` runs
    module: ModuleSpec | None = holder and holder.find_spec("__main__")
    if not as_module and not (module if holder else script.exists()):
        print(f"mcore_ckpt.launch: there is no script '{script}'{' with __main__' if holder else ''}", file=sys.stderr)  # noqa: T201
        return 2
    if not getattr(sys.flags, "safe_path", False):
        # Before install(): a checkout of Megatron-LM next to the script is the Megatron that the script will use.
        sys.path[0] = str(Path.cwd() if as_module else script if holder else script.resolve().parent)
    try:
        from mcore_ckpt.megatron.install import announce, install

        install()
        if how := _how_it_saves(target):
            announce("%s", how)
        if logging.getLogger("mcore_ckpt").level == logging.NOTSET:  # one line for each save, once Megatron logs at all
            logging.getLogger("mcore_ckpt").setLevel(logging.INFO)
    except (OptionError, UnsupportedMegatronError) as error:
        print(f"mcore_ckpt.launch: {error}", file=sys.stderr)  # noqa: T201
        return 2
    sys.argv = target
    if as_module:
        if (module := _module(target[0])) is None:
            print(f"mcore_ckpt.launch: there is no module {target[0]!r}", file=sys.stderr)  # noqa: T201
            return 2
        sys.argv[0] = str(module.origin)
    if module is None:
        _run_as_main(compile(script.read_bytes(), str(script), "exec", dont_inherit=True), __file__=str(script))
    else:
        loader: Any = module.loader
        found = {"__file__": module.origin, "__loader__": loader, "__package__": module.parent, "__spec__": module}
        _run_as_main(loader.get_code(module.name), **found)
    return 0


def _module(name: str) -> ModuleSpec | None:
    """The module of that name, or of a package the one that runs, if it is there and can be run."""
    if "" in name.split("."):
        return None
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # a parent is there, and needs it
            raise
        return None
    return spec if hasattr(getattr(spec, "loader", None), "get_code") else None


def _how_it_saves(words: Sequence[str]) -> str:
    """What a job of Megatron-LM with these arguments gives away of mcore_ckpt's saves, and what to add; or nothing."""
    given = {}
    for word, after in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        given[flag] = value if equals else after
    if "--save" not in given:
        return ""
    form = given.get("--ckpt-format", given.get("--dist-ckpt-format", "torch_dist"))
    if form != "torch_dist":
        return f"--ckpt-format {form}: Megatron-LM saves by its own code; mcore_ckpt saves --ckpt-format torch_dist"
    missing = [flag for flag in ("--async-save", "--use-persistent-ckpt-worker") if flag not in given]
    if not missing:
        return ""
    return f"saves are synchronous, training waits until each is durable; for asynchronous ones add {' '.join(missing)}"


def _run_as_main(code: Any, **given: Any) -> None:
    """Run code as `python` does. `runpy` would take `__main__` away again before the exit handlers run."""
    module = types.ModuleType("__main__")
    vars(module).update(given, __builtins__=builtins)
    # By the second name started processes send objects of its classes back; multiprocessing has taken the launcher.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    exec(code, vars(module))


if __name__ == "__main__":
    sys.exit(main())
