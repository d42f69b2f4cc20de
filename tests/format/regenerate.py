"""Make a golden checkpoint in `tests/format/golden`: of a Megatron-Core, or of this package through it.

Each is written by the system that it is named after, on two gloo ranks, and committed: what old versions wrote must
stay readable when they can no longer be installed. With whatever is first on the path:

    PYTHONPATH=<unpacked megatron-core wheel> python -m tests.format.regenerate megatron|ours <name>

`expected.json` beside each holds what a reader has to find: for tensors dtype, global shape, stored boxes and the
SHA-256 of the global tensor's bytes; for objects the keys. Values follow from the key alone (`global_tensor`).

The committed ones were written with torch 2.13.0, unless their names say another; `writer.txt` in each says by what.
Those of DCP, and of Megatron-Core up to 0.15, were written by an earlier form of this script.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

HERE = Path(__file__).parent
RANKS = 2
_DEADLINE_S = 300


def global_tensor(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The values of tensor `key`: small integers that every dtype holds exactly, different for each key."""
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randint(-60, 60, shape, generator=generator, dtype=torch.int64).abs().to(dtype)


def sha256(tensor: torch.Tensor) -> str:
    """Of the raw bytes, in C order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"").hexdigest()


class Expected:
    """Collects what a reader has to find, on every rank alike."""

    def __init__(self) -> None:
        self.tensors: dict[str, dict[str, Any]] = {}
        self.objects: list[str] = []

    def tensor(
        self, key: str, shape: tuple[int, ...], dtype: torch.dtype, boxes: list[list[list[int]]]
    ) -> torch.Tensor:
        values = global_tensor(key, shape, dtype)
        name = str(dtype).removeprefix("torch.")
        self.tensors[key] = {"dtype": name, "shape": list(shape), "chunks": sorted(boxes), "sha256": sha256(values)}
        return values


def write_megatron(directory: Path, rank: int, expected: Expected, ours: bool) -> None:
    """Column- and row-parallel, replicated and 0-d tensors; objects; a common state."""
    from tests.support.cpu_megatron import pretend_cuda

    pretend_cuda()
    import megatron.core
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    if ours:
        import mcore_ckpt

        mcore_ckpt.install()

    state: dict[str, Any] = {}

    def add(key: str, shape: tuple[int, ...], dtype: torch.dtype, axis: int | None) -> None:
        if axis is None:
            values = expected.tensor(key, shape, dtype, [[[0] * len(shape), list(shape)]])
            state[key] = ShardedTensor.from_rank_offsets(key, values, replica_id=rank)
            return
        part = shape[axis] // RANKS
        sizes = [*shape[:axis], part, *shape[axis + 1 :]]
        boxes = [[[(r * part if d == axis else 0) for d in range(len(shape))], sizes] for r in range(RANKS)]
        values = expected.tensor(key, shape, dtype, boxes).narrow(axis, rank * part, part)
        state[key] = ShardedTensor.from_rank_offsets(key, values.clone(), (axis, rank, RANKS), replica_id=0)

    add("decoder.layers.mlp.linear_fc1.weight", (16, 12), torch.bfloat16, 0)
    add("decoder.layers.mlp.linear_fc2.weight", (6, 32), torch.float32, 1)
    add("decoder.final_layernorm.weight", (12,), torch.float32, None)
    add("embedding.word_embeddings.weight", (40, 12), torch.float16, 0)
    add("optimizer.state.step", (), torch.int64, None)
    add("mask", (4, 2), torch.bool, 0)
    add("grid", (2, 4, 3), torch.uint8, 1)
    state["extra"] = ShardedObject("decoder.layers._extra_state", {"rank": rank, "amax": [1.5] * 3}, (RANKS,), (rank,))
    random_states = {
        "random_rng_state": random.Random(1).getstate(),
        "np_rng_state": np.random.RandomState(1).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(1).get_state()[:64].clone(),
        "rng_tracker_states": {"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)},
    }
    state["rng"] = ShardedObject("rng_state", [random_states], (1, 1), (0, 0), replica_id=rank)
    expected.objects = [f"decoder.layers._extra_state/shard_{r}_{RANKS}" for r in range(RANKS)]
    expected.objects.append("rng_state/shard_0.0_1.1")
    version = tuple(int(part) for part in megatron.core.__version__.split(".")[:2])
    if version >= (0, 19):
        expected.objects.append("common_state/shard_0_1")  # what earlier versions keep in common.pt
    state.update(_common_state())
    dist_checkpointing.save(state, str(directory))
    if rank == 0:
        by = f"mcore_ckpt {mcore_ckpt.__version__} in " if ours else ""
        (directory / "writer.txt").write_text(
            f"{by}megatron-core {megatron.core.__version__}, torch {torch.__version__}, "
            f"Python {sys.version.split()[0]}\n"
        )


def _common_state() -> dict[str, Any]:
    """What Megatron's training keeps in its common state, from its own classes where they exist."""
    import signal

    from megatron.core.enums import ModelType
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.rerun_state_machine import RerunDiagnostic, RerunMode, RerunState
    from megatron.core.transformer.enums import AttnBackend

    args = argparse.Namespace(
        hidden_size=12,
        params_dtype=torch.bfloat16,
        attention_backend=AttnBackend.flash,
        model_type=ModelType.encoder_or_decoder,
        exit_signal=signal.SIGTERM,
        save=Path("checkpoints"),
        lr=1e-4,
        data_path=["a", "b"],
    )
    return {
        "args": args,
        "iteration": 7,
        "checkpoint_version": 3.0,
        "opt_param_scheduler": {"max_lr": 1e-4, "num_steps": 70, "start_wd": 0.01},
        "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"},
        "optimizer_config": OptimizerConfig(lr=1e-4),
        "rerun_state_machine": {"mode": RerunMode.DISABLED, "state": RerunState.NOT_RUNNING_YET},
        "rerun_diagnostic": RerunDiagnostic.CORRECT_RESULT,
    }


def _run_rank(rank: int, kind: str, name: str) -> None:
    os.chdir(HERE / "golden")  # the path becomes part of `.metadata`
    directory, expected = Path(name), Expected()
    write_megatron(directory, rank, expected, kind == "ours")
    dist.barrier()
    if rank == 0:
        content = {"tensors": expected.tensors, "objects": sorted(expected.objects)}
        (directory / "expected.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def main() -> None:
    from tests.format import regenerate  # under this name the ranks find it
    from tests.support.gloo_ranks import run_ranks

    parser = argparse.ArgumentParser(description="Write one golden checkpoint.")
    parser.add_argument("kind", choices=["megatron", "ours"])
    parser.add_argument("name", help="directory under tests/format/golden")
    arguments = parser.parse_args()
    directory = HERE / "golden" / arguments.name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    run_ranks(regenerate._run_rank, RANKS, arguments.kind, arguments.name, deadline_s=_DEADLINE_S)


if __name__ == "__main__":
    main()
