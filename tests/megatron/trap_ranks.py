"""What ranks of a launch need: Megatron with our strategies, and a small state to save."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mcore_ckpt
from tests.support.meanwhile import ahead_of

dist_checkpointing = pytest.importorskip("megatron.core.dist_checkpointing", reason="megatron-core is not installed")


def installed() -> Any:
    warnings.simplefilter("ignore")
    mcore_ckpt.install()
    return dist_checkpointing


def state(fill: int) -> dict[str, Any]:
    """A sharded tensor, a replicated one, an object, and common state, all telling `fill`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shard = dist_checkpointing.ShardedTensor.from_rank_offsets
    return {
        "shard": shard("shard", torch.full((4, 3), float(fill + rank)), (0, rank, size)),
        "replica": shard("replica", torch.arange(100.0) * fill, replica_id=rank),
        "object": dist_checkpointing.ShardedObject("object", {"fill": fill}, (size,), (rank,)),
        "common": {"iteration": fill},
    }


def check(loaded: dict[str, Any], fill: int) -> None:
    """Assert that a loaded state tells `fill` in all its parts."""
    assert torch.equal(loaded["shard"], torch.full((4, 3), float(fill + dist.get_rank())))
    assert torch.equal(loaded["replica"], torch.arange(100.0) * fill)
    assert loaded["object"] == {"fill": fill}
    assert loaded["common"] == {"iteration": fill}


def names(directory: str) -> set[str]:
    """What lies there when all ranks have come here; no rank goes on before all have looked."""
    dist.barrier()
    found = {path.name for path in Path(directory).iterdir()}
    dist.barrier()
    return found


@contextmanager
def counted(owner: Any, *names: str) -> Iterator[list[str]]:
    """The names of those functions of a module, or methods of a class, that are called inside the block."""
    calls: list[str] = []
    with ExitStack() as patched:
        for name in names:
            patched.enter_context(ahead_of(owner, name, lambda *_, name=name, **__: calls.append(name)))
        yield calls
