"""What a load's error says, too, where optimizer state belongs to the layout that saved it: how it can be converted.

`dp_reshardable` state is flat buckets of TP, PP and EP.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from mcore_ckpt.directory.in_force import iteration_of
from mcore_ckpt.format.index import CheckpointIndex, is_flat_bucket

_LAYOUT: Final = "fully_reshardable"


def advice_on(checkpoint: Path, index: CheckpointIndex, shards: Iterable[Any]) -> str:
    """What a load's error says, too, if flat buckets were requested of another layout than the stored; or nothing."""
    stored = index.tensors
    wanted = {shard.key: tuple(shard.global_shape) for shard in shards if is_flat_bucket(shard.key)}
    if all(key in stored and stored[key].shape == shape for key, shape in wanted.items()):
        return ""
    step = iteration_of(checkpoint.name)
    run = str(checkpoint if step is None else checkpoint.parent)
    name, chosen = ("", "") if step is None else (f"/iter_{step:07d}", f" --ckpt-step {step}")
    words = shlex.join(["mcore-ckpt", "reshard", run + name, f"{run}-{_LAYOUT}{name}", "--optimizer-layout", _LAYOUT])
    return (
        ". The optimizer's state is flat buckets (dp_reshardable) of the TP, PP and EP that saved it. Convert it, for "
        f"any layout: {words}; then --load {shlex.quote(f'{run}-{_LAYOUT}')}{chosen}"
    )
