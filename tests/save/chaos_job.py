"""A small Megatron job that is killed and resumed: `python -m tests.save.chaos_job DIRECTORY synchronous|asynchronous`.

It resumes from the checkpoint that the tracker file names, as Megatron-LM does, and writes a sum of all weights at the
end.
"""

from __future__ import annotations

import hashlib
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.models import ModelShape, Parallel, build_training

_STEPS, _EVERY = 4, 2


def _track(tracker: Path, step: int) -> None:
    new = tracker.with_suffix(".new")
    new.write_text(str(step))
    os.replace(new, tracker)


def main(run: Path, how: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training = build_training(ModelShape(layers=1, hidden=32), Parallel())
    from megatron.core import dist_checkpointing

    import mcore_ckpt

    mcore_ckpt.install()
    queue = mcore_ckpt.AsyncCallsQueue()
    tracker = run / "latest_checkpointed_iteration.txt"
    if tracker.exists():
        newest = run / f"iter_{int(tracker.read_text()):07d}"
        training.load(dist_checkpointing.load(training.sharded_state_dict(is_loading=True), str(newest)))
    print(f"resumed from step {training.step}", flush=True)
    while training.step < _STEPS:
        training.train(1)
        if training.step % _EVERY:
            continue
        directory = run / f"iter_{training.step:07d}"
        directory.mkdir(parents=True, exist_ok=True)
        strategy, is_async = mcore_ckpt.TorchDistSaveStrategy(), how == "asynchronous"
        state = training.sharded_state_dict()
        request = dist_checkpointing.save(state, str(directory), strategy, async_sharded_save=is_async)
        if request is None:
            _track(tracker, training.step)
        else:
            request.add_finalize_fn(partial(_track, tracker, training.step))
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=False)
    queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    total = hashlib.sha256()
    for weight in training.model[0].parameters():
        total.update(weight.detach().contiguous().view(torch.uint8).numpy().tobytes())
    (run / "result.txt").write_text(total.hexdigest())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
