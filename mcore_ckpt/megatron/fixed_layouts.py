"""What to do where optimizer state belongs to the parallel layout that saved it (`dp_reshardable`): flat buckets of TP,
PP and EP. What Megatron-LM proposes there, an option of the next save, does not help the checkpoint that is there.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.core.errors import LoadError
from mcore_ckpt.directory.iterations import is_checkpoint_name, iteration_of, tracked_name
from mcore_ckpt.format.index import CheckpointIndex, is_flat_bucket

_logger = logger_of(__name__)
# In Megatron-LM's message; its training code raises it before anything is loaded by this package.
_MEGATRONS_WORDS: Final = "not supported for DistributedOptimizer with sharding type dp_"
_LAYOUT: Final = "fully_reshardable"


def advise_on(error: BaseException) -> None:
    """Put a line below Megatron-LM's error, if it is of such state: how the checkpoint that is there can be loaded."""
    if _MEGATRONS_WORDS not in str(error):
        return
    arguments = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    run = getattr(arguments, "load", None) or "RUN"
    line = f"mcore_ckpt: that option does not help here. {_conversion(str(run), getattr(arguments, 'ckpt_step', None))}"
    if sys.version_info >= (3, 11):
        error.add_note(line)
    else:
        _logger.error("%s", line)


def advice_on(checkpoint: Path, index: CheckpointIndex, shards: Iterable[Any]) -> str:
    """What a load's error says, too, if flat buckets were requested of another layout than the stored; or nothing."""
    stored = index.tensors
    wanted = {shard.key: tuple(shard.global_shape) for shard in shards if is_flat_bucket(shard.key)}
    if all(key in stored and stored[key].shape == shape for key, shape in wanted.items()):
        return ""
    why = ". The optimizer's state is flat buckets (dp_reshardable) of the TP, PP and EP that saved it. "
    if not is_checkpoint_name(checkpoint.name):
        return why + _command(str(checkpoint), "load that")
    run, step = checkpoint.parent, iteration_of(checkpoint.name)
    with contextlib.suppress(LoadError):
        step = None if tracked_name(run) == checkpoint.name else step
    return why + _conversion(str(run), step)


def _conversion(run: str, step: int | None) -> str:
    """The conversion of a run, or of one of its checkpoints, as a command; and what the job gets then."""
    if step is None:
        return _command(run, f"--load {shlex.quote(f'{run}-{_LAYOUT}')}")
    name = f"/iter_{step:07d}"
    return _command(run, f"--load {shlex.quote(f'{run}-{_LAYOUT}')} --ckpt-step {step}", name)


def _command(source: str, then: str, name: str = "") -> str:
    words = shlex.join(["mcore-ckpt", "reshard", source + name, f"{source}-{_LAYOUT}{name}"])
    return f"Convert it, for any layout: {words} --optimizer-layout {_LAYOUT}; then {then}"
