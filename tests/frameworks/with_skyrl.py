"""SkyRL's `MegatronStrategy`, called as its workers and its trainer do, staging requests ahead (`prestage`) or not."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

# Its class is named in annotations alone; importing it needs Megatron-Bridge.
sys.modules["skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper"] = SimpleNamespace(  # type: ignore[assignment]
    MegatronModelWrapper=object
)

from skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy import MegatronStrategy  # noqa: E402


class _Nothing:
    """Of Hugging Face's configuration and tokenizer nothing is saved."""

    def save_pretrained(self, folder: str) -> None:
        """Nothing."""


class Manager:
    """Saves into `RUN/global_step_N/policy`.

    Args:
        job: what is trained.
        async_save, prestage, fully_reshardable: as of SkyRL's configuration.
        resume: the step of its `resume_path`; None: what its tracker file names.
    """

    def __init__(
        self,
        job: Any,
        async_save: bool = False,
        prestage: bool = True,
        fully_reshardable: bool = False,
        resume: int | None = None,
    ) -> None:
        self._job, self._run, self._resume = job, Path(job.run), resume
        self._model = SimpleNamespace(actor_module=job.model)
        config = SimpleNamespace(
            async_dist_ckpt_save=async_save,
            async_save_prestage_to_cpu=prestage,
            dist_ckpt_optim_fully_reshardable=fully_reshardable,
        )
        self._strategy = MegatronStrategy(config)
        self._strategy.hf_config = _Nothing()
        self._strategy.save_hf_configs = lambda *_: None

    @property
    def _tracker(self) -> Path:
        return self._run / "latest_ckpt_global_step.txt"

    def _folder(self, step: int) -> str:
        return str(self._run / f"global_step_{step}" / "policy")

    def load(self) -> int:
        if not self._tracker.exists():
            return 0
        step = int(self._tracker.read_text()) if self._resume is None else self._resume
        self._strategy.load_checkpoint(self._model, self._folder(step), self._job.optimizer, self._job.scheduler)
        return step

    def save(self, step: int) -> None:
        """The trainer writes its tracker when the workers have scheduled the save."""
        self._strategy.save_checkpoint(self._model, self._folder(step), 0, self._job.optimizer, self._job.scheduler)
        if torch.distributed.get_rank() == 0:
            self._tracker.write_text(str(step))

    def between(self) -> None:
        """SkyRL finalizes a save before the next one, before a load, and at the end."""

    def finish(self) -> None:
        self._strategy.finalize_pending_saves()
