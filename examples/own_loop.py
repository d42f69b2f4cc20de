"""A training loop of one's own that saves asynchronously through Megatron-Core.

torchrun --nproc-per-node 2 own_loop.py RUN
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import mcore_ckpt

mcore_ckpt.install()

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402

STEPS, SAVE_EVERY = 30, 10
run = Path(sys.argv[1])
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
weight = torch.zeros(1000)  # this rank's part of a parameter of ranks * 1000 elements


def sharded_state_dict(part: torch.Tensor, step: int) -> dict:
    return {"weight": ShardedTensor.from_rank_offsets("weight", part, (0, rank, ranks)), "step": step}


queue = mcore_ckpt.AsyncCallsQueue(persistent=True)
strategy = mcore_ckpt.TorchDistSaveStrategy()  # one for the whole run: it keeps the plan and the staging buffer
for step in range(1, STEPS + 1):
    weight += 1  # the training
    time.sleep(0.01 * rank)  # ranks are never at the same place
    queue.maybe_finalize_async_calls(blocking=False)  # every rank, every step: publishes what all have written
    if step % SAVE_EVERY == 0:
        directory = run / f"iter_{step:07d}"
        directory.mkdir(parents=True, exist_ok=True)
        request = dist_checkpointing.save(
            sharded_state_dict(weight, step), str(directory), strategy, async_sharded_save=True
        )
        tracker = run / "latest_checkpointed_iteration.txt"
        if rank == 0:  # runs when the checkpoint of this request is complete on all ranks, not before
            request.add_finalize_fn(lambda tracker=tracker, step=step: tracker.write_text(str(step)))
        queue.schedule_async_request(request)

queue.maybe_finalize_async_calls(blocking=True)  # before a load, before an evaluation that stops, and at the end
last = run / f"iter_{int((run / 'latest_checkpointed_iteration.txt').read_text()):07d}"
loaded = dist_checkpointing.load(sharded_state_dict(torch.zeros(1000), 0), str(last))
assert loaded["step"] == STEPS
weight, step = loaded["weight"], loaded["step"]
certificate = mcore_ckpt.certify(sharded_state_dict(weight, step), last)  # what the loop holds now is what was saved
assert certificate.tensors == 1
assert not certificate.differing
queue.close()
print(f"rank {rank} resumed at step {loaded['step']}", flush=True)
dist.destroy_process_group()
