"""What the ranks of a version's job do: save and load one side's checkpoints, saying which strategies really ran."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.models import ModelShape, Parallel, build_training
from tests.support.state_compare import Reference, write_reference
from tests.support.who_ran import record_strategies

SHAPE = ModelShape(layers=2, hidden=32, vocabulary=64, sequence=8, gated=True)
SAVED_AS, LOADED_AS = Parallel(tensor=2), Parallel(pipeline=2)


def prepare(who: str, as_cuda: bool) -> None:
    """Put one side's strategies in force in this process."""
    warnings.simplefilter("ignore")
    if as_cuda:
        from tests.support.cpu_megatron import pretend_cuda

        pretend_cuda()
    if who == "ours":
        import mcore_ckpt

        mcore_ckpt.install()
        return
    from mcore_ckpt.megatron._versions import Patches, serve_with_numpy_2, serve_without_cuda

    serve_with_numpy_2(Patches())
    serve_without_cuda(Patches())


def plain_state(rank: int, size: int, fill: float) -> dict[str, Any]:
    """Tensors of several dtypes, sharded and replicated, objects, and common state; all zeros for `fill=0`."""
    from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    def tensor(key: str, local: torch.Tensor, *offsets: tuple[int, int, int], replica: int = 0) -> Any:
        return ShardedTensor.from_rank_offsets(key, local * fill, *offsets, replica_id=replica)

    def halves(key: str, whole: torch.Tensor, replica_id: Any, flattened_range: Any) -> Any:
        return [
            ShardedTensor.from_rank_offsets(key, part, (0, i, 2), replica_id=replica_id)
            for i, part in enumerate(whole.chunk(2))
        ]

    return {
        "column": tensor("column", torch.arange(24.0).view(4, 6) + rank, (1, rank, size)),
        "row": tensor("row", torch.arange(24.0).view(4, 6) - rank, (0, rank, size)),
        "half": tensor("half", torch.linspace(1, 2, 33).to(torch.bfloat16), replica=rank),
        "large": tensor("large", torch.arange(300_000.0), replica=size - 1 - rank),
        "scalar": tensor("scalar", torch.tensor(2.5), replica=rank),
        "gated": ShardedTensorFactory("gated", torch.arange(8.0) * fill, halves, torch.cat, replica_id=rank),
        "object": ShardedObject("object", {"rank": rank, "fill": fill}, (size,), (rank,)),
        "transient": LocalNonpersistentObject({"not": "stored"}),
        "nested": [{"iteration": int(fill)}, {"rate": 0.5 * fill}],
    }


def differing(found: Any, expected: Any) -> list[str]:
    """Paths at which two loaded states differ."""
    if isinstance(expected, dict):
        missing = [f"{key}: missing" for key in expected if key not in found]
        return missing + [f"{k}.{path}" for k in expected if k in found for path in differing(found[k], expected[k])]
    if isinstance(expected, list):
        return [f"{i}.{path}" for i, value in enumerate(expected) for path in differing(found[i], value)]
    if isinstance(expected, torch.Tensor):
        same = found.dtype == expected.dtype and torch.equal(found, expected)
    else:
        same = found == expected
    return [] if same else [f" {found!r} instead of {expected!r}"[:200]]


def bare(state: Any) -> Any:
    """A sharded state as a load returns it."""
    if isinstance(state, dict):
        return {key: bare(value) for key, value in state.items()}
    if isinstance(state, list):
        return [bare(value) for value in state]
    if hasattr(state, "unwrap"):
        return state.unwrap()
    return state.data if hasattr(state, "data") and hasattr(state, "key") else state


def save_all(rank: int, who: str, targets: list[tuple[str, Path]]) -> list[list[str]]:
    """Save a checkpoint of each kind; returns for each which strategy methods ran."""
    prepare(who, as_cuda=targets[0][0] == "model")
    outcomes = []
    for kind, directory in targets:
        checkpoint = directory / "checkpoint"
        if rank == 0:
            checkpoint.mkdir(parents=True)
        dist.barrier()
        if kind == "model":
            training = build_training(SHAPE, SAVED_AS)
            training.train(2)
            state = training.sharded_state_dict()
            write_reference(directory / "reference", rank, state)
        else:
            state = plain_state(rank, dist.get_world_size(), fill=3.0)
        with record_strategies() as ran:
            save(who, kind, state, str(checkpoint))
        outcomes.append(list(ran))
    return outcomes


def save(who: str, kind: str, state: dict[str, Any], checkpoint: str) -> None:
    """Save as a launch does: ours asynchronously but for the plain kind, in parallel where that is the kind."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    strategy = None
    if kind == "parallel":
        strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), None, True)
    if who == "stock" or kind == "plain":
        dist_checkpointing.save(state, checkpoint, strategy)
        return
    queue = AsyncCallsQueue()
    queue.schedule_async_request(dist_checkpointing.save(state, checkpoint, strategy, async_sharded_save=True))
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()


def load_all(rank: int, who: str, targets: list[tuple[str, Path]]) -> list[tuple[list[str], Any]]:
    """Load checkpoints one after the other; for each, which strategy methods ran, and what differs or went wrong."""
    prepare(who, as_cuda=targets[0][0] == "model")
    outcomes: list[tuple[list[str], Any]] = []
    for kind, directory in targets:
        with record_strategies() as ran:
            try:
                outcome = load_model(directory) if kind == "model" else load_plain(rank, kind, directory)
            except Exception:  # noqa: BLE001  (a verdict on this checkpoint; the others get theirs)
                outcome = traceback.format_exc()[-2500:]
        outcomes.append((list(ran), outcome))
        dist.barrier()
    return outcomes


def load_model(directory: Path) -> Any:
    """Load into a model of another layout; how it compares with what was saved."""
    from megatron.core import dist_checkpointing

    training = build_training(SHAPE, LOADED_AS, seed=100)
    reference = Reference.read(directory / "reference")
    wanted = training.sharded_state_dict(is_loading=True)
    training.load(dist_checkpointing.load(wanted, str(directory / "checkpoint")))
    return reference.compare(training.sharded_state_dict())


def load_plain(rank: int, kind: str, directory: Path) -> list[str]:
    """Load the handmade state, each rank all that it needs or what the wrapper gives it; the paths that differ."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    checkpoint = str(directory / "checkpoint")
    strategy = None
    if kind == "parallel":
        strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(checkpoint))
    size = dist.get_world_size()
    loaded = dist_checkpointing.load(plain_state(rank, size, fill=0.0), checkpoint, strategy)
    return differing(loaded, bare(plain_state(rank, size, fill=3.0)))
