"""A job of a framework's checkpoint code on CPUs: a GPT of Megatron-Core, the distributed optimizer, dropout.

    torchrun ... [-m mcore_ckpt.launch] job.py FRAMEWORK RUN STEPS [NAME=VALUE ...]

Resumes RUN as the framework does, trains to step STEPS and saves every two. Names, with values in YAML:
    tensor: size of tensor parallelism, 1 unless given.
    dropout: 0.1 unless given.
    die: part of a path; rank 1 ends itself by SIGKILL when it has written a save into such a directory.
    late: no save is finalized, and none published, ahead of the last step.
    kill_writer: a step; the writer process of rank 1 gets SIGKILL in the asynchronous save of that step.
Others are for the framework: see `with_*.py`.

`FRAMEWORK_PATH` names folders, joined by colons, with its packages. Some have a package `tests`: so they are put on the
path here, when ours has been imported, and not at the head of this file, which is run again by what is spawned.
`launch/site` has to be on PYTHONPATH.
"""

import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy
import sitecustomize
import torch
import torch.distributed as dist
import yaml

SAVE_EVERY = 2


class Job:
    """What a framework is given: the model with its optimizer and scheduler, and where to save."""

    def __init__(self, run: str, tensor: int, dropout: float) -> None:
        from tests.support.models import ModelShape, Parallel, build_training

        random.seed(1)
        numpy.random.seed(1)
        self.run, self.tensor = run, tensor
        self.training = build_training(ModelShape(dropout=dropout), Parallel(tensor))
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        self.model, self.optimizer = self.training.model, self.training.optimizer
        for group in self.optimizer.param_groups:
            group["min_lr"] = 1e-4
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=1e-4,
            lr_warmup_steps=2,
            lr_decay_steps=50,
            lr_decay_style="cosine",
            start_wd=0.01,
            end_wd=0.05,
            wd_incr_steps=20,
            wd_incr_style="linear",
            use_checkpoint_opt_param_scheduler=True,
            override_opt_param_scheduler=False,
        )

    def train(self, step: int) -> float:
        """The step of that number; its loss."""
        self.training.step = step - 1  # by which tokens are drawn
        (loss,) = self.training.train(1)
        self.scheduler.step(1)
        return loss


def _die_in_saves_to(part: str) -> None:
    """End this rank by SIGKILL when it has written a save into such a directory, and is about to say so."""
    from mcore_ckpt.dcp.writer import FileSystemWriterAsync
    from mcore_ckpt.save.transaction import SaveTransaction

    commit, write_data = SaveTransaction.commit, FileSystemWriterAsync.write_data

    def commit_or_die(self: Any) -> None:
        if part in self.what:
            os.kill(os.getpid(), signal.SIGKILL)
        commit(self)

    def write_and_die(self: Any, *args: Any) -> Any:
        written = write_data(self, *args)
        if part in str(self.checkpoint_id):
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    SaveTransaction.commit = commit_or_die  # type: ignore[method-assign]
    FileSystemWriterAsync.write_data = write_and_die  # type: ignore[method-assign]


@contextmanager
def _writer_is_killed() -> Iterator[None]:
    """Within the block saves are scheduled, of which the writer process of this rank writes nothing before it ends."""
    from mcore_ckpt.save.writer_process import shared_writer

    writer = shared_writer().pid
    assert writer is not None
    os.kill(writer, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (writer, signal.SIGKILL)).start()  # a second save waits for the first
    yield


def main(framework: str, run: str, steps: str, *fields: str) -> None:
    values = {name: yaml.safe_load(value) for name, _, value in (field.partition("=") for field in fields)}
    manager_of = f"tests.frameworks.with_{framework}"
    import_module("tests.support.models")
    sys.path[:0] = os.environ["FRAMEWORK_PATH"].split(":")
    dist.init_process_group("gloo")
    logger = logging.getLogger("mcore_ckpt")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(logging.StreamHandler())
    die, kill_writer, late = (values.pop(name, None) for name in ("die", "kill_writer", "late"))
    if die and dist.get_rank() == 1:
        _die_in_saves_to(die)
    module = import_module(manager_of)
    job = getattr(module, "Job", Job)(run, values.pop("tensor", 1), values.pop("dropout", 0.1))
    manager = module.Manager(job, **values)
    first = manager.load()
    print(f"begins at step {first}", flush=True)
    for step in range(first + 1, int(steps) + 1):
        mean = torch.tensor(job.train(step), dtype=torch.float64)
        dist.all_reduce(mean)
        sitecustomize._record("loss", iteration=step, loss=float(mean) / dist.get_world_size())
        if not late:
            manager.between()
        if step == kill_writer:
            manager.finish()  # the save before that one
        if step % SAVE_EVERY == 0:
            with _writer_is_killed() if step == kill_writer and dist.get_rank() == 1 else nullcontext():
                manager.save(step)
    assert not (late and [*Path(run).rglob(".metadata")])
    manager.finish()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
