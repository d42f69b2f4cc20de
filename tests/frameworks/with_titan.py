"""torchtitan's `CheckpointManager`, called as its trainer does: an FSDP model, its optimizers and schedulers."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import dcp as titan
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

import mcore_ckpt
from mcore_ckpt.megatron.versions import patches


class Job:
    """A model that is divided between the ranks. torchtitan saves no random states, so nothing is drawn."""

    def __init__(self, run: str, *_: float) -> None:
        torch.manual_seed(1)
        self.run = run
        self.model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
        config = default_adamw(lr=1e-2)
        config.implementation = "foreach"
        self.optimizers = config.build(model_parts=[self.model])
        schedule = LRSchedulersContainer.Config(warmup_steps=2)
        self.schedulers = schedule.build(optimizers=self.optimizers, training_steps=50)

    def train(self, step: int) -> float:
        """The step of that number; its loss."""
        generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
        batch = torch.randn(8, 64, generator=generator)
        self.optimizers.zero_grad()
        loss = (self.model(batch) - batch.roll(1)).square().mean()
        loss.backward()
        self.optimizers.step()
        self.schedulers.step()
        return float(loss)


class _Steps:
    """As torchtitan's trainer: how far it is."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"])


def plug_in() -> None:
    """The lines of the guide."""
    writer, reader = mcore_ckpt.FileSystemWriterAsync, mcore_ckpt.FileSystemReader

    def save(
        function: Any, state_dict: Any, *, storage_writer: Any = None, checkpoint_id: Any = None, **others: Any
    ) -> Any:
        return function(state_dict, storage_writer=storage_writer or writer(checkpoint_id), **others)

    def load(state_dict: Any, *, storage_reader: Any = None, checkpoint_id: Any = None) -> None:
        dcp.load(state_dict, storage_reader=storage_reader or reader(checkpoint_id))
        mcore_ckpt.certify(state_dict, checkpoint_id)

    titan.dcp = SimpleNamespace(save=partial(save, dcp.save), async_save=partial(save, dcp.async_save), load=load)


class Manager:
    """Saves into `RUN/checkpoint/step-N`; `mode` is torchtitan's `async_mode`."""

    def __init__(self, job: Job, mode: str = "disabled") -> None:
        self._steps = _Steps()
        if patches.replaced():  # as under `mcore_ckpt.launch`
            plug_in()
        self._manager = titan.CheckpointManager(
            titan.CheckpointManager.Config(enable=True, interval=2, async_mode=mode, last_save_model_only=False),
            dataloader=None,
            model_parts=[job.model],
            optimizers=job.optimizers,
            lr_schedulers=job.schedulers,
            states={"train_state": self._steps},
            sd_adapter=None,
            base_folder=job.run,
        )

    def load(self) -> int:
        self._manager.load()
        return self._steps.step

    def between(self) -> None:
        self._manager.maybe_wait_for_staging()

    def save(self, step: int) -> None:
        self._steps.step = step
        self._manager.save(step)

    def finish(self) -> None:
        self._manager.maybe_wait_for_saving()
        self._manager.close()
