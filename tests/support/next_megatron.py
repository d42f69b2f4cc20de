"""A Megatron-Core without asynchronous saves of its own, made from an installed one that still has them.

Megatron-LM's pull request 7052 removes `strategies/async_utils.py`, `strategies/filesystem_async.py` and the arguments
`async_strategy`; from then on nvidia-resiliency-ext (NVRx) alone saves asynchronously. `without_own_async` makes such a
tree: the modules go, what imported from them imports from NVRx, in `try` where Megatron must run without it.
"""

import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

_CHECKPOINTING = "megatron/core/dist_checkpointing"
_GONE = ("async_utils", "filesystem_async", "cached_metadata_filesystem_reader", "state_dict_saver")
_NVRX = "nvidia_resiliency_ext.checkpointing.async_ckpt"
# Of the modules that go, what the others use besides, and where it lies in the tree that is made.
_KEPT = ("_disable_gc", "_set_process_qos")
_KEPT_IN = f"{_CHECKPOINTING}/utils.py"


def without_own_async(installed: Path, target: Path) -> Path:
    """Make the tree in `target`, which must not exist, of the folder in which megatron-core is installed; `save` and
    `load` no longer take `async_strategy`, nor hand it to strategies. Returns `target`.
    """
    shutil.copytree(installed / "megatron", target / "megatron")
    strategies = target / _CHECKPOINTING / "strategies"
    helpers = _functions((strategies / "async_utils.py").read_text(), _KEPT)
    for name in _GONE:
        (strategies / f"{name}.py").unlink()
    with (target / _KEPT_IN).open("a") as utils:
        utils.write("\n\nimport gc\nimport os\nimport subprocess\nfrom contextlib import contextmanager\n" + helpers)
    for path in target.glob("megatron/**/*.py"):
        text = path.read_text()
        if "async" in text:
            text = _rewritten(text)
            # The strategies' own bodies, which ours stand in for, keep what they do with the argument.
            path.write_text(text if path.name == "torch.py" else _without_arguments(text))
    return target


def _rewritten(text: str) -> str:
    for name in _KEPT:
        text = re.sub(
            rf"from (?:megatron\.core\.dist_checkpointing)?\.?strategies\.async_utils import {name}\b",
            f"from {_KEPT_IN.removesuffix('.py').replace('/', '.')} import {name}",
            text,
        )
    text = re.sub(
        r"^from (?:\.|\.strategies\.|megatron\.core\.dist_checkpointing\.strategies\.)async_utils import AsyncRequest$",
        f"try:\n    from {_NVRX}.core import AsyncRequest\nexcept ImportError:\n    AsyncRequest = None",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"\ndef _import_mcore_async\(\).*?(?=\n\S)", "\n", text, flags=re.DOTALL)
    return text.replace("imports = _import_mcore_async()", "raise ModuleNotFoundError('mcore has no async saves')")


def _without_arguments(text: str) -> str:
    """`async_strategy` is no argument any more, and `get_async_strategy` returns NVRx's names alone."""
    text = re.sub(r"\n *async_strategy: [^\n]*,(?=\n)", "", text)  # a parameter on a line of its own
    text = re.sub(r"\n *async_strategy=[^\n]*,(?=\n)", "", text)
    text = re.sub(r", async_strategy(: [\w\[\]]+)? ?= ?[\"\w.]+(?=[,)\n])", "", text)
    text = re.sub(r", async_strategy=[^,)\n]+(?=[,)])", "", text)
    text = re.sub(r"^(?! *def )(.*), async_strategy(?=\))", r"\1", text, flags=re.MULTILINE)
    return re.sub(r"(,\s*)async_strategy,?(?=\n)", r"\1", text)


def _functions(text: str, names: tuple[str, ...]) -> str:
    found = []
    for name in names:
        match = re.search(rf"^(?:@[^\n]*\n)*def {name}\(.*?(?=^\S)", text, flags=re.DOTALL | re.MULTILINE)
        assert match, f"the checkout has no {name}"
        found.append(match.group(0).rstrip())
    return "\n\n\n" + "\n\n\n".join(found) + "\n"


# --- what a rank does with it -----------------------------------------------------------------------------------------


def _serve(tree: Path) -> None:
    """In a process that has not imported Megatron: this package serves that tree."""
    assert "megatron" not in sys.modules
    sys.path.insert(0, str(tree))
    import megatron.core

    import mcore_ckpt

    assert Path(megatron.core.__path__[0]).is_relative_to(tree)
    mcore_ckpt.install()


def _state(value: int) -> dict[str, Any]:
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((64,), float(value))), "iteration": value}


def _folder(run: Path, iteration: int) -> str:
    path = run / f"iter_{iteration:07d}"
    path.mkdir(parents=True, exist_ok=True)
    return str(path)


def save_and_be_killed(rank: int, tree: Path, run: Path) -> None:
    """One synchronous save, one asynchronous one, and a third that is not committed when SIGKILL comes."""
    _serve(tree)
    from megatron.core.dist_checkpointing import save
    from megatron.core.dist_checkpointing.strategies import torch as strategies
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

    assert not [
        name for name in sys.modules if name.endswith(("strategies.async_utils", "strategies.filesystem_async"))
    ]
    queue, strategy = AsyncCallsQueue(persistent=True), strategies.TorchDistSaveShardedStrategy()
    save(_state(1), _folder(run, 1))
    queue.schedule_async_request(save(_state(2), _folder(run, 2), strategy, async_sharded_save=True))
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    save(_state(3), _folder(run, 3), strategy, async_sharded_save=True)
    os.kill(os.getpid(), signal.SIGKILL)


def load_what_was_saved(rank: int, tree: Path, run: Path) -> list[int]:
    """The iterations of the first two saves; of the third there is nothing."""
    _serve(tree)
    from megatron.core.dist_checkpointing import load

    iterations = []
    for number in (1, 2):
        loaded = load(_state(0), _folder(run, number))
        assert loaded["w"].eq(number).all()
        iterations.append(loaded["iteration"])
    assert not os.path.exists(_folder(run, 3) + "/.metadata")
    return iterations
