"""As `with_swift`, of adapters alone: LoRA of peft and mcore_bridge on the projections of the attention.

Without Transformer Engine mcore_bridge takes Megatron's own layers where it takes this machine for one with an NPU.
"""

from argparse import Namespace
from typing import Any
from unittest import mock

from megatron.core import distributed

from tests.frameworks import job, with_swift

from mcore_bridge.tuners import lora, patcher  # isort: skip
from swift.tuners import LoraConfig, Swift  # isort: skip

lora.is_torch_npu_available = patcher.is_torch_npu_available = lambda: True


class Job(job.Job):
    """The base is frozen: it is the same for all runs, and is not saved."""

    def __init__(self, *args: Any) -> None:
        stock = distributed.DistributedDataParallel

        def with_adapters(*, module: Any, **others: Any) -> Any:
            Swift.prepare_model(module, LoraConfig(r=4, target_modules=["linear_proj"], lora_dropout=0.1))
            return stock(module=module, **others)

        with mock.patch.object(distributed, "DistributedDataParallel", with_adapters):
            super().__init__(*args)
        assert 0 < sum(one.requires_grad for one in self.model[0].parameters()) <= 4


class Manager(with_swift.Manager):
    """Saves and loads as `with_swift`; `base`: the folder of a checkpoint with the base, which is loaded ahead."""

    source, is_adapter = "mcore_adapter", True

    def __init__(self, job: Any, base: str | None = None, **others: Any) -> None:
        super().__init__(job, **others)
        if base is not None:
            args = Namespace(**vars(self._args), mcore_model=base)
            with_swift.megatron_lm_utils.load_mcore_checkpoint(args, job.model, job.optimizer, job.scheduler)
