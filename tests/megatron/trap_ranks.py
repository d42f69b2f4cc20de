"""What the traps of a real launch need: a world that runs them one after the other, and a small state to save.

A trap is a function that every rank of a gloo world calls. Nothing poses as CUDA: it is run on a machine without it, as
it is.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_traps(rank: int, directory: Path, traps: list[Callable[..., None]]) -> dict[str, str]:
    """Run traps one after the other in one world; the traceback of each that failed on this rank, else empty text.

    A trap takes the rank and a directory of its own, which does not exist yet.
    """
    outcomes = {}
    for trap in traps:
        outcomes[trap.__name__] = ""
        try:
            trap(rank, directory / trap.__name__)
        except Exception:  # noqa: BLE001  (the test of this trap shows it)
            outcomes[trap.__name__] = traceback.format_exc()
            # Where the other ranks wait for this one, nothing else tells why.
            sys.stderr.write(f"rank {rank}: {trap.__name__}: {outcomes[trap.__name__]}")
        dist.barrier()
    return outcomes


def installed() -> Any:
    """Megatron with our strategies in force."""
    warnings.simplefilter("ignore")
    import mcore_ckpt

    mcore_ckpt.install()
    from megatron.core import dist_checkpointing

    return dist_checkpointing


def state(fill: int) -> dict[str, Any]:
    """A sharded tensor, a replicated one, an object, and common state, all telling `fill`."""
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    rank, size = dist.get_rank(), dist.get_world_size()
    return {
        "shard": ShardedTensor.from_rank_offsets("shard", torch.full((4, 3), float(fill + rank)), (0, rank, size)),
        "replica": ShardedTensor.from_rank_offsets("replica", torch.arange(100.0) * fill, replica_id=rank),
        "object": ShardedObject("object", {"fill": fill}, (size,), (rank,)),
        "common": {"iteration": fill},
    }


def check(loaded: dict[str, Any], fill: int) -> None:
    """Assert that a loaded state tells `fill` in all its parts."""
    assert torch.equal(loaded["shard"], torch.full((4, 3), float(fill + dist.get_rank())))
    assert torch.equal(loaded["replica"], torch.arange(100.0) * fill)
    assert loaded["object"] == {"fill": fill}
    assert loaded["common"] == {"iteration": fill}


def made(directory: Path) -> str:
    """The directory, made by rank 0; a string, as the launch passes it."""
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return str(directory)


def names(directory: str) -> set[str]:
    """What lies there when all ranks have come here; no rank goes on before all have looked."""
    dist.barrier()
    found = {path.name for path in Path(directory).iterdir()}
    dist.barrier()
    return found
