"""Make the golden checkpoints in `tests/format/golden` again.

Each is written by the system that it is named after, on two gloo ranks, and committed: what old versions wrote must
stay readable when they can no longer be installed. One call writes one of them, with whatever is first on the path:

    PYTHONPATH=<unpacked megatron-core wheel> python tests/format/regenerate.py megatron <name>
    python tests/format/regenerate.py dcp <name>          (torch.distributed.checkpoint: plain tensors and objects)
    python tests/format/regenerate.py dtensor <name>      (the same, sharded as DTensor)
    python tests/format/regenerate.py ours <name>         (this package, through Megatron-Core)

`expected.json` beside each holds what a reader has to find: for tensors dtype, global shape, stored boxes and the
SHA-256 of the global tensor's bytes; for objects the keys. Values follow from the key alone (`global_tensor`).

The committed ones were written with torch 2.13.0, unless their names say another; `writer.txt` in each says by what.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

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


def _row_boxes(shape: tuple[int, ...]) -> list[list[list[int]]]:
    rows = shape[0] // RANKS
    return [[[rank * rows, *[0] * (len(shape) - 1)], [rows, *shape[1:]]] for rank in range(RANKS)]


def _whole(shape: tuple[int, ...]) -> list[list[list[int]]]:
    return [[[0] * len(shape), list(shape)]]


def write_megatron(directory: Path, rank: int, expected: Expected, ours: bool) -> None:
    """Column- and row-parallel, replicated, 0-d, empty and (up to 0.15) flattened tensors; objects; a common state."""
    from tests.support.cpu_megatron import pretend_cuda

    pretend_cuda()
    _let_megatron_0_12_write()
    import megatron.core
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    if ours:
        import mcore_ckpt

        mcore_ckpt.install()

    state: dict[str, Any] = {}

    def add(key: str, shape: tuple[int, ...], dtype: torch.dtype, axis: int | None) -> None:
        if axis is None:
            values = expected.tensor(key, shape, dtype, _whole(shape))
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
    state["rng"] = ShardedObject("rng_state", [_random_states()], (1, 1), (0, 0), replica_id=rank)
    expected.objects = [f"decoder.layers._extra_state/shard_{r}_{RANKS}" for r in range(RANKS)]
    expected.objects.append("rng_state/shard_0.0_1.1")
    version = tuple(int(part) for part in megatron.core.__version__.split(".")[:2])
    if version >= (0, 19):
        expected.objects.append("common_state/shard_0_1")  # what earlier versions keep in common.pt
    if version < (0, 16):
        import numpy as np

        np.product = np.prod  # these versions call it, and numpy 2 dropped it
        # Flat shards of one parameter [6, 10], as the distributed optimizer wrote them then: stored as [1, 1, 60], with
        # the first shape in `mcore_data`.
        shape = (6, 10)
        flat_boxes = [[[0, 0, 0], [1, 1, 25]], [[0, 0, 25], [1, 1, 35]]]
        whole = expected.tensor("optimizer.exp_avg.weight", (1, 1, 60), torch.float32, flat_boxes)
        half = slice(0, 25) if rank == 0 else slice(25, 60)
        state["flat"] = ShardedTensor.from_rank_offsets_flat(
            "optimizer.exp_avg.weight", whole.flatten()[half].clone(), shape, replica_id=0, flattened_range=half
        )
    state.update(_common_state())
    dist_checkpointing.save(state, str(directory))
    if rank == 0:
        by = f"mcore_ckpt {mcore_ckpt.__version__} in " if ours else ""
        (directory / "writer.txt").write_text(
            f"{by}megatron-core {megatron.core.__version__}, torch {torch.__version__}, "
            f"Python {sys.version.split()[0]}\n"
        )


def _random_states() -> dict[str, Any]:
    import numpy as np

    return {
        "random_rng_state": random.Random(1).getstate(),
        "np_rng_state": np.random.RandomState(1).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(1).get_state()[:64].clone(),
        "rng_tracker_states": {"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)},
    }


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


def _let_megatron_0_12_write() -> None:
    """megatron-core 0.12 calls a function of torch's that has one parameter more since torch 2.8."""
    import torch.distributed.checkpoint.filesystem as filesystem

    write_item = filesystem._write_item

    def write_item_of_old(*arguments: Any, **options: Any) -> Any:
        options.setdefault("serialization_format", filesystem.SerializationFormat.TORCH_SAVE)
        return write_item(*arguments, **options)

    filesystem._write_item = write_item_of_old


def write_dcp(directory: Path, rank: int, expected: Expected) -> None:
    import torch.distributed.checkpoint as dcp

    model = {
        "weight": expected.tensor("model.weight", (6, 4), torch.float32, _whole((6, 4))),
        "half": expected.tensor("model.half", (5,), torch.bfloat16, _whole((5,))),
        "scalar": expected.tensor("model.scalar", (), torch.int32, _whole(())),
        "empty": expected.tensor("model.empty", (0, 3), torch.float64, _whole((0, 3))),
        "parameter": torch.nn.Parameter(expected.tensor("model.parameter", (3,), torch.float32, _whole((3,)))),
    }
    expected.objects = ["step", "names"]
    dcp.save({"model": model, "step": 5, "names": ["a", "b"]}, checkpoint_id=str(directory))
    if rank == 0:
        (directory / "writer.txt").write_text(f"torch.distributed.checkpoint {torch.__version__}\n")


def write_dtensor(directory: Path, rank: int, expected: Expected) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (RANKS,))
    uneven = [[[0, 0], [2, 4]], [[2, 0], [1, 4]]]
    tensors = {
        "rows": (expected.tensor("rows", (6, 4), torch.float32, _row_boxes((6, 4))), Shard(0)),
        "uneven": (expected.tensor("uneven", (3, 4), torch.bfloat16, uneven), Shard(0)),
        # One row for two ranks: the second holds a chunk of no elements, at the end of the tensor.
        "one": (expected.tensor("one", (1, 2), torch.float32, [[[0, 0], [1, 2]], [[1, 0], [0, 2]]]), Shard(0)),
        "columns": (
            expected.tensor("columns", (2, 6), torch.float16, [[[0, 0], [2, 3]], [[0, 3], [2, 3]]]),
            Shard(1),
        ),
        "replicated": (expected.tensor("replicated", (4,), torch.float32, _whole((4,))), Replicate()),
    }
    dcp.save(
        {key: distribute_tensor(values, mesh, [placement]) for key, (values, placement) in tensors.items()},
        checkpoint_id=str(directory),
    )
    if rank == 0:
        (directory / "writer.txt").write_text(f"torch.distributed.checkpoint, DTensor, {torch.__version__}\n")


def _run_rank(kind: str, directory: Path, rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    expected = Expected()
    if kind in ("megatron", "ours"):
        write_megatron(directory, rank, expected, kind == "ours")
    else:
        {"dcp": write_dcp, "dtensor": write_dtensor}[kind](directory, rank, expected)
    dist.barrier()
    if rank == 0:
        content = {"tensors": expected.tensors, "objects": sorted(expected.objects)}
        (directory / "expected.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write one golden checkpoint.")
    parser.add_argument("kind", choices=["megatron", "dcp", "dtensor", "ours"])
    parser.add_argument("name", help="directory under tests/format/golden")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        # Relative to the folder that the ranks run in: the path becomes part of `.metadata`.
        _run_rank(arguments.kind, Path(arguments.name), arguments.rank, arguments.store)
        return
    directory = HERE / "golden" / arguments.name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        store = str(Path(scratch) / "store")
        command = [sys.executable, str(Path(__file__).resolve()), arguments.kind, arguments.name, "--store", store]
        root = str(HERE.parent.parent)
        given = os.environ.get("PYTHONPATH", "")
        # Absolute: the ranks run elsewhere, and would write with the version that is installed.
        paths = os.pathsep.join(os.path.abspath(path) for path in [*filter(None, given.split(os.pathsep)), root])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=environment, cwd=directory.parent)
            for rank in range(RANKS)
        ]
        try:
            codes = [process.wait(_DEADLINE_S) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
