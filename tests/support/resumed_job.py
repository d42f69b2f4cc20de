"""A job that is trained, saved and resumed as Megatron-LM does it (`training/`), with this package or without."""

import logging
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.kept_log import kept_log
from tests.support.models import ModelShape, Parallel, build_training
from tests.support.shared_groups import share_groups

TRAINING = Path(__file__).resolve().parent / "training"


class Scheduler:
    """Megatron's, of which the number of steps is all that changes."""

    def __init__(self) -> None:
        self.num_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "max_lr": 1.0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


class Job:
    def __init__(self, shape: ModelShape, parallel: Parallel, seed: int, ours: bool = True, **flags: Any) -> None:
        import mcore_ckpt

        share_groups()
        import megatron

        if (training := str(TRAINING / "megatron")) not in megatron.__path__:
            megatron.__path__ = [training, *megatron.__path__]
        if ours:
            mcore_ckpt.install()
        self.training = build_training(shape, parallel, seed=seed)
        from megatron.training import checkpointing

        self.module: Any = checkpointing
        self.scheduler = Scheduler()
        layout = {
            "distrib_optim_sharding_type": flags.pop("layout", "dp_reshardable"),
            "chained_optim_avoid_prefix": True,
        }
        from megatron.core.rerun_state_machine import Call, Caller, RerunMode, RerunState, get_rerun_state_machine

        self.machine = get_rerun_state_machine()
        if flags.pop("reruns", False):
            self.machine.mode, self.machine.state = RerunMode.VALIDATE_RESULTS, RerunState.WILL_RERUN_FROM_CHECKPOINT
            self.machine.data_iterator_checkpoints = None
            self.machine.failed_validation_call = Call(Caller("loss", 0), 2)
        off = dict.fromkeys(("finetune", "no_load_optim", "no_load_rng"), False)
        self.args = Namespace(metadata=layout, consumed_train_samples=0, ckpt_format="torch_dist", **{**off, **flags})

    @property
    def parts(self) -> tuple[Any, Any, Any, Any]:
        return self.training.model, self.training.optimizer, self.scheduler, self.args

    def save(self, path: Path) -> None:
        self.training.train(2)
        self.scheduler.num_steps, self.args.consumed_train_samples = 16, 16
        self.module.save_checkpoint(2, *self.parts, str(path))

    def resume(self, path: Path, *faults: Callable[[], None]) -> list[str]:
        """What the log says of it."""
        self.module.AFTERWARDS[:] = faults
        with kept_log(logging.INFO) as lines:
            assert self.module.load_checkpoint(*self.parts, str(path))[0] in (0, 2)
        return [line for line in lines if "resumed from" in line]
