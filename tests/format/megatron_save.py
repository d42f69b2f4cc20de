"""A small checkpoint of whatever Megatron-Core is installed: a process of its own, for interpreters that have another.

python -m tests.format.megatron_save stock|ours DIR SEED
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.distributed import HashStore, init_process_group

from tests.support.cpu_megatron import pretend_cuda


def main(who: str, target: str, seed: int) -> None:
    """Save by stock, or by this package under `install()`."""
    pretend_cuda()
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    if who == "ours":
        import mcore_ckpt

        mcore_ckpt.install()
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "decoder.weight": torch.randn(64, 48, generator=generator),
        "decoder.bias": torch.randn(48, generator=generator).bfloat16(),
        "large": torch.randn(300, 500, generator=generator),
    }
    state = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}
    rng = ShardedObject("rng", {"seed": seed, "name": "generator"}, (1,), (0,))
    common = {"iteration": seed, "args": {"lr": 1e-3 * seed, "names": ["a", "b"]}, "scale": torch.full((4,), seed / 3)}
    Path(target).mkdir(parents=True)
    dist_checkpointing.save({**state, "rng": rng, **common}, target)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
