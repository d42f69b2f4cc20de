"""What an error says, too, where optimizer state belongs to the layout that saved it: how it can be converted.

`dp_reshardable` state is flat buckets of TP, PP and EP. What Megatron-LM proposes there, an option of the next save,
does not help the checkpoint that is there.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.core.console import logger_of
from mcore_ckpt.directory.in_force import iteration_of
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
    run = str(getattr(arguments, "load", None) or "RUN")
    line = f"mcore_ckpt: that option does not help here. {_conversion(run, getattr(arguments, 'ckpt_step', None))}"
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
    step = iteration_of(checkpoint.name)
    return (
        ". The optimizer's state is flat buckets (dp_reshardable) of the TP, PP and EP that saved it. "
        + _conversion(str(checkpoint if step is None else checkpoint.parent), step)
    )


def _conversion(run: str, step: int | None) -> str:
    """The conversion of a run, or of one of its checkpoints, as a command; and what the job loads then."""
    name, chosen = ("", "") if step is None else (f"/iter_{step:07d}", f" --ckpt-step {step}")
    words = shlex.join(["mcore-ckpt", "reshard", run + name, f"{run}-{_LAYOUT}{name}", "--optimizer-layout", _LAYOUT])
    return f"Convert it, for any layout: {words}; then --load {shlex.quote(f'{run}-{_LAYOUT}')}{chosen}"
