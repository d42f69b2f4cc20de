"""Megatron-Core imported as on a machine with a GPU; the server of `run_pretending_ranks` imports this once for all."""

from __future__ import annotations

from tests.support.cpu_megatron import pretend_cuda

pretend_cuda()

import megatron.core.dist_checkpointing  # noqa: E402, F401
