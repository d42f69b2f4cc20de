"""What `torchrun` starts on each host: a Megatron model is trained, saved and loaded.

    python -m torch.distributed.run ... -m tests.hosts.job FOLDER STORY

Each rank appends a line to `FOLDER/rank<N>.jsonl` for what it has seen. The hosts share `FOLDER`.
"""

import json
import os
import platform
import signal
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support.cpu_megatron import pretend_cuda

# How long an exchange waits for a rank.
TIMEOUT_S = {"saves": 60.0, "loads": 15.0, "fails": 15.0, "resumes": 180.0}


def main(folder: Path, story: str) -> None:
    """Run one of the stories below."""
    warnings.simplefilter("ignore")  # of Megatron and torch about themselves
    pretend_cuda()
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S[story]))
    import mcore_ckpt

    mcore_ckpt.install()
    _tell(folder, host=platform.node(), pid=os.getpid(), world=dist.get_world_size())
    stories = {"saves": _saves, "loads": _loads, "fails": _fails, "resumes": _resumes}
    stories[story](folder)
    dist.barrier()
    dist.destroy_process_group()


def _tell(folder: Path, **facts: Any) -> None:
    with (folder / f"rank{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps(facts) + "\n")


def _training(seed: int) -> Any:
    from tests.support.models import DENSE, Parallel, build_training

    return build_training(DENSE, Parallel(tensor=dist.get_world_size() // 2 or 1), seed)


def _save(training: Any, directory: Path) -> None:
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        directory.mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(training.sharded_state_dict(), directory)


def _saves(folder: Path) -> None:
    """A save, an async save during training, and a load of both into other weights."""
    from megatron.core import dist_checkpointing

    import mcore_ckpt
    from tests.support.state_compare import write_state

    training = _training(seed=1)
    queue = mcore_ckpt.AsyncCallsQueue()
    for name in ("sync", "async"):
        training.train(1)
        write_state(folder / f"{name}-saved", dist.get_rank(), training.sharded_state_dict())
        if name == "sync":
            _save(training, folder / name)
            continue
        if dist.get_rank() == 0:
            (folder / name).mkdir()
        dist.barrier()
        queue.schedule_async_request(
            dist_checkpointing.save(training.sharded_state_dict(), folder / name, async_sharded_save=True)
        )
        training.train(1)  # what is saved must not be this
        queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    for name in ("sync", "async"):
        other = _training(seed=100)
        state = dist_checkpointing.load(other.sharded_state_dict(is_loading=True), folder / name)
        other.load(state)
        write_state(folder / f"{name}-loaded", dist.get_rank(), other.sharded_state_dict())


def _stays_s() -> float:
    """How long the ranks of the host that `STAYS` stay where they are."""
    return float(os.environ.get("STAYS_S", "600"))


def _loads(folder: Path) -> None:
    """A load of all ranks; those of one host stay where they read."""
    import torch
    from megatron.core import dist_checkpointing

    import mcore_ckpt
    from mcore_ckpt.load.reader import CheckpointReader

    read = CheckpointReader._read

    def stays(self: CheckpointReader, plan: Any) -> None:
        _tell(folder, reads=True)
        time.sleep(_stays_s())
        read(self, plan)

    if platform.node() == os.environ["STAYS"]:
        CheckpointReader._read = stays  # type: ignore[method-assign]
    make = dist_checkpointing.ShardedTensor.from_rank_offsets
    directory = folder / "lost"
    if dist.get_rank() == 0:
        directory.mkdir()
    dist.barrier()
    dist_checkpointing.save({"large": make("large", torch.ones(20_000_000), replica_id=dist.get_rank())}, directory)
    strategy = mcore_ckpt.TorchDistLoadStrategy()
    wanted = {"large": make("large", torch.zeros(20_000_000), replica_id=dist.get_rank())}
    dist_checkpointing.load(wanted, directory, strategy)
    _tell(folder, error="")


def _fails(folder: Path) -> None:
    """A save that is complete, and a second one: the data files are written, and the ranks of a host stay there."""
    import mcore_ckpt
    from mcore_ckpt.save import transaction as commit

    # torchrun ends the ranks of a host with the first of them, or with the rendezvous: here all are to tell before.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    training = _training(seed=1)
    training.train(1)
    _save(training, folder / "first")
    training.train(1)
    finished = commit.SaveTransaction._finished

    def stays(save: commit.SaveTransaction) -> commit.Written:
        written = finished(save)
        _tell(folder, written=True)
        if platform.node() == os.environ["STAYS"]:
            time.sleep(_stays_s())
        return written

    commit.SaveTransaction._finished = stays  # type: ignore[method-assign]
    try:
        _save(training, folder / "second")
    except mcore_ckpt.SaveError as error:
        _tell(folder, error=str(error))
        raise
    _tell(folder, error="")


def _resumes(folder: Path) -> None:
    """What a job does that goes on: loads the first checkpoint, trains, and saves into the directory of the second."""
    from megatron.core import dist_checkpointing

    from mcore_ckpt.directory import commit

    training = _training(seed=100)
    training.load(dist_checkpointing.load(training.sharded_state_dict(is_loading=True), folder / "first"))
    _tell(folder, resumed=training.step)
    losses = training.train(1)
    commit.YOUNG_S = 0.0  # type: ignore[misc]  # a job that goes on so soon after the host is lost would be refused
    _save(training, folder / "second")
    _tell(folder, saved=training.step, losses=losses)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
