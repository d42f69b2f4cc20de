"""ms-swift's `save_mcore_checkpoint` and `load_mcore_checkpoint`, called as its trainer does, with its patches."""

import os
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.extensions import transformer_engine
from torch import distributed, nn

from tests.launch.absent import stand_in

stand_in(("transformer_engine",), ("mcore_bridge", "swift"))
for _name, _value in list(vars(transformer_engine).items()):
    if _name.startswith("TE") and not isinstance(_value, type):  # what mcore_bridge changes
        setattr(transformer_engine, _name, type(_name, (nn.Module,), {}))

from swift.megatron.utils import megatron_lm_utils  # noqa: E402
from swift.megatron.utils.patcher import patch_torch_dist_shard  # noqa: E402
from swift.utils import update_last_checkpoint_symlink  # noqa: E402


class Manager:
    """Saves into `RUN/checkpoint-N/iter_000000N`, and resumes from `RUN/last-checkpoint`.

    Args:
        job: what is trained.
        async_save, fully_reshardable: as of ms-swift's arguments.
        files: how many each rank writes, as of its `thread_count`.
    """

    source, is_adapter = "mcore_model", False

    def __init__(
        self, job: Any, async_save: bool = False, fully_reshardable: bool = False, files: int | None = None
    ) -> None:
        self._job = job
        if files is not None:
            patch_torch_dist_shard(files)
        if async_save:
            megatron_lm_utils.init_persistent_async_worker()
        Path(job.run).mkdir(exist_ok=True)
        os.chdir(job.run)  # the arguments are saved: they are the same for all runs
        self._args = Namespace(
            async_save=async_save,
            tuner_type="lora" if self.is_adapter else "full",
            finetune=False,
            no_load_optim=False,
            no_load_rng=False,
            no_save_optim=False,
            no_save_rng=False,
            data_parallel_random_init=False,
            dist_ckpt_save_pre_mcore_014=False,
            dist_ckpt_optim_fully_reshardable=fully_reshardable,
            distrib_optim_fully_reshardable_mem_efficient=False,
            use_distributed_optimizer=True,
            tensor_model_parallel_size=job.tensor,
            pipeline_model_parallel_size=1,
            fp16=False,
            bf16=True,
            consumed_train_samples=0,
        )

    def load(self) -> int:
        if not (last := Path("last-checkpoint")).exists():
            return 0
        job, args = self._job, Namespace(**vars(self._args), **{self.source: str(last)})
        step: int = megatron_lm_utils.load_mcore_checkpoint(
            args, job.model, job.optimizer, job.scheduler, load_arg=self.source
        )
        assert args.consumed_train_samples == 8 * step
        return step

    def save(self, step: int) -> None:
        job, folder = self._job, f"checkpoint-{step}"
        self._args.consumed_train_samples = 8 * step
        link = partial(update_last_checkpoint_symlink, folder)
        is_deferred = megatron_lm_utils.save_mcore_checkpoint(
            self._args,
            job.model,
            job.optimizer,
            job.scheduler,
            iteration=step,
            output_dir=folder,
            peft_format=self.is_adapter,
            async_finalize_fn=link,
        )
        if not is_deferred and distributed.get_rank() == 0:
            link()

    def between(self) -> None:
        megatron_lm_utils.maybe_finalize_async_save(self._args)

    def finish(self) -> None:
        megatron_lm_utils.maybe_finalize_async_save(self._args, blocking=True, terminate=True)
