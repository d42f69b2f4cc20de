"""verl's `MegatronCheckpointManager`, called as its engine and its trainer do: model, optimizer and extra."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from verl.trainer.config import CheckpointConfig
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager

_ALL = ("model", "optimizer", "extra")


class Manager:
    """Saves into `RUN/global_step_N/actor`.

    Args:
        job: what is trained.
        load: what is loaded.
        one_by_one: load each of it by itself.
        async_save, fully_reshardable: as of verl's configuration.
    """

    def __init__(
        self,
        job: Any,
        load: tuple[str, ...] = _ALL,
        one_by_one: bool = False,
        async_save: bool = False,
        fully_reshardable: bool = False,
    ) -> None:
        self._run, self._async_save = Path(job.run), async_save
        self._loads = [[name] for name in load] if one_by_one else [list(load)]
        megatron = SimpleNamespace(
            dist_ckpt_optim_fully_reshardable=fully_reshardable, distrib_optim_fully_reshardable_mem_efficient=False
        )

        def manager(load: list[str]) -> Any:
            return MegatronCheckpointManager(
                config=SimpleNamespace(model=SimpleNamespace(path="none"), megatron=megatron),
                checkpoint_config=CheckpointConfig(load_contents=load, async_save=async_save),
                model_config=None,
                transformer_config=job.model[0].config,
                role="actor",
                model=job.model,
                arch="GPT",
                hf_config=None,
                param_dtype=torch.bfloat16,
                share_embeddings_and_output_weights=False,
                processing_class=None,
                optimizer=job.optimizer,
                optimizer_scheduler=job.scheduler,
                use_distributed_optimizer=True,
                use_checkpoint_opt_param_scheduler=True,
                use_dist_checkpointing=True,
            )

        self._managers = [manager(load) for load in self._loads]

    def load(self) -> int:
        """Resume from the checkpoint that verl's tracker file names; its step."""
        found = find_latest_ckpt_path(str(self._run))
        if found is None:
            return 0
        for manager in self._managers:
            manager.load_checkpoint(f"{found}/actor")
        return int(found.rpartition("_")[2])

    def save(self, step: int) -> None:
        self._managers[0].save_checkpoint(str(self._run / f"global_step_{step}" / "actor"), global_step=step)
        if not self._async_save and torch.distributed.get_rank() == 0:  # as the trainer does
            (self._run / "latest_checkpointed_iteration.txt").write_text(str(step))

    def between(self, blocking: bool = False) -> None:
        """verl's trainer calls the workers' `async_calls_finalize_fn_exec`, which finalizes this queue."""
        if self._async_save:
            from megatron.core.dist_checkpointing.strategies.base import async_calls

            async_calls.maybe_finalize_async_calls(blocking=blocking)

    def finish(self) -> None:
        self.between(blocking=True)
