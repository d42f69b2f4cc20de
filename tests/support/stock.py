"""What Megatron-Core by itself can do here. A module of tests that imports this is skipped where there is none."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest
from torch.distributed.checkpoint.metadata import TensorProperties

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

VERSION = tuple(int(part) for part in version("megatron-core").split(".")[:2])
IS_NEW = VERSION >= (0, 17)
# To 0.19 it does not list tensors as torch 2.15 describes them, whoever has saved them, and cannot compare all keys.
LISTS_TENSORS = "strides" not in TensorProperties.__dataclass_fields__

stock_saves_async = pytest.mark.skipif(IS_NEW, reason="stock of this version writes by nvidia-resiliency-ext")
stock_loads = pytest.mark.skipif(
    IS_NEW and find_spec("nvidia_resiliency_ext") is None,
    reason="stock of this version loads by nvidia-resiliency-ext, which is not installed",
)
