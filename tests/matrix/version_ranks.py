"""What the ranks of a version's job do: save and load one side's checkpoints, saying which strategies really ran."""

import traceback
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.cpu_megatron import pretend_cuda
from tests.support.gloo_ranks import made
from tests.support.models import ModelShape, Parallel, build_training
from tests.support.state_compare import write_state
from tests.support.states import check_state, sharded_state
from tests.support.who_ran import record_strategies

SHAPE = ModelShape(layers=2, hidden=32, vocabulary=64, sequence=8, gated=True)
SAVED_AS, LOADED_AS = Parallel(tensor=2), Parallel(pipeline=2)


def prepare(who: str) -> None:
    """Put one side's strategies in force in this process."""
    warnings.simplefilter("ignore")
    pretend_cuda()
    if who == "ours":
        import mcore_ckpt

        mcore_ckpt.install()
    else:
        from mcore_ckpt.megatron.versions import Patches, serve_with_numpy_2

        serve_with_numpy_2(Patches())


def save_all(rank: int, who: str, targets: list[tuple[str, Path]]) -> list[list[str]]:
    """Save a checkpoint of each kind; returns for each which strategy methods ran."""
    prepare(who)
    outcomes = []
    for kind, directory in targets:
        checkpoint = made(directory / "checkpoint")
        if kind == "model":
            training = build_training(SHAPE, SAVED_AS)
            training.train(2)
            state = training.sharded_state_dict()
            write_state(directory / "reference", rank, state)
        else:
            state = sharded_state(rank, dist.get_world_size(), seed=3)
        with record_strategies() as ran:
            save(who, kind, state, checkpoint)
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


def load_all(rank: int, who: str, targets: list[tuple[str, Path]]) -> list[tuple[list[str], str]]:
    """Load checkpoints one after the other; for each, which strategy methods ran, and what went wrong or differs."""
    prepare(who)
    outcomes: list[tuple[list[str], str]] = []
    for kind, directory in targets:
        with record_strategies() as ran:
            outcome = ""
            try:
                if kind == "model":
                    load_model(rank, directory)
                else:
                    load_plain(rank, kind, directory)
            except Exception:  # noqa: BLE001  (a verdict on this checkpoint; the others get theirs)
                outcome = traceback.format_exc()[-2500:]
        outcomes.append((list(ran), outcome))
        dist.barrier()
    return outcomes


def load_model(rank: int, directory: Path) -> None:
    """Load into a model of another layout; `directory / "loaded"` has what comes of it."""
    from megatron.core import dist_checkpointing

    training = build_training(SHAPE, LOADED_AS, seed=100)
    wanted = training.sharded_state_dict(is_loading=True)
    training.load(dist_checkpointing.load(wanted, str(directory / "checkpoint")))
    write_state(directory / "loaded", rank, training.sharded_state_dict())


def load_plain(rank: int, kind: str, directory: Path) -> None:
    """Load the handmade state, each rank all that it needs or what the wrapper gives it, and compare."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    checkpoint = str(directory / "checkpoint")
    strategy = None
    if kind == "parallel":
        strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(checkpoint))
    size = dist.get_world_size()
    loaded = dist_checkpointing.load(sharded_state(rank, size, blank=True), checkpoint, strategy)
    check_state(loaded, rank, size, 3, size)
