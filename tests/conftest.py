"""Settings shared by all tests: one thread a process, reproducible hypothesis runs, GPU tests skipped without a GPU."""

from __future__ import annotations

import os
import signal

# Before torch is imported anywhere: several ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts this in the background has SIGINT ignored, and children inherit that; tests send it to them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

# Derandomized in CI so that a failure is the change's fault; the nightly profile searches further. `print_blob` makes
# a failure reproducible by one decorator that it prints.
_COMMON = {
    "deadline": None,  # a shared machine stalls now and then; pytest-timeout catches what really hangs
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("ci", max_examples=60, derandomize=True, **_COMMON)
settings.register_profile("nightly", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_gpu():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
