"""Lets an unchanged `pretrain_gpt.py` of Megatron-LM train on a machine without a GPU, and writes down what it does.

Python imports this by itself in every process that has this folder on PYTHONPATH: the ranks of a launch, and what they
spawn. Nothing happens until `megatron.core` is imported, so that the processes that need none of it stay as they are.

Environment:
    LAUNCH_RECORD: folder for `rank<N>.jsonl`, one line for each event; no recording where it is not set.
    LAUNCH_KILL: `rank:event:iteration`; that rank ends itself by SIGKILL when it has recorded this event.
    LAUNCH_LOGITS: folder with `tokens.pt`; instead of training, what the model makes of them is put in `logits.pt`.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import re
import signal
import sys
import time
import types
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec

_SUPPORT = Path(__file__).resolve().parents[2] / "support"


def _record(event: str, **facts: Any) -> None:
    folder = os.environ.get("LAUNCH_RECORD")
    rank = os.environ.get("RANK", "none")
    if folder:
        with open(f"{folder}/rank{rank}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **facts}) + "\n")
    if os.environ.get("LAUNCH_KILL") == f"{rank}:{event}:{facts.get('iteration')}":
        os.kill(os.getpid(), signal.SIGKILL)


def _pretend_cuda() -> None:
    # By its path: a checkout of Megatron-LM has a package named `tests`, too.
    spec = importlib.util.spec_from_file_location("launch_cpu_megatron", _SUPPORT / "cpu_megatron.py")
    assert spec is not None
    assert spec.loader is not None
    support = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = support  # an optimizer that is offloaded saves the classes of its parts
    spec.loader.exec_module(support)
    support.pretend_cuda()
    _keep_generator_from_data_loader()
    # A thread of gloo, here in the place of NCCL, may still drop tensors of Megatron's last all-gather when a process
    # ends 7 ms behind it, and torch aborts then (pytorch/pytorch#190489). Stock's takes as long as this to end.
    atexit.register(time.sleep, 1)
    extension = types.ModuleType("megatron.core.datasets.helpers_cpp")
    vars(extension).update(build_sample_idx_int32=_sample_index, build_sample_idx_int64=_sample_index)
    sys.modules[extension.__name__] = extension


def _keep_generator_from_data_loader() -> None:
    """A data loader takes its seed from the CPU's generator. Here dropout's, the GPU's, is the same one."""
    import torch
    from torch.utils.data import dataloader

    begin = dataloader._BaseDataLoaderIter.__init__

    def begin_without_a_trace(self: Any, *args: Any, **kwargs: Any) -> None:
        state = torch.get_rng_state()
        begin(self, *args, **kwargs)
        torch.set_rng_state(state)

    dataloader._BaseDataLoaderIter.__init__ = begin_without_a_trace  # type: ignore[method-assign]


def _sample_index(
    sizes: Any, documents: Any, sequence_length: int, epochs: int, epoch_tokens: int, drop_last: bool, extra: int
) -> Any:
    """Where each sample begins, `[samples + 1, 2]`: which document of the order, and which token of it.

    What Megatron compiles in C++ when it starts: documents are laid end to end and cut into pieces of
    `sequence_length` tokens, each of which reads `extra` tokens more.
    """
    import numpy

    tokens = epochs * epoch_tokens - int(extra)
    samples = tokens // sequence_length if drop_last else -(-tokens // sequence_length)
    ends = numpy.cumsum(sizes[documents], dtype=numpy.int64)
    starts = numpy.minimum(numpy.arange(samples + 1, dtype=numpy.int64) * sequence_length, tokens)
    document = numpy.searchsorted(ends, starts, side="right")
    offset = starts - numpy.where(document > 0, ends[document - 1], 0)
    return numpy.stack([document, offset], axis=1).astype(documents.dtype)


def _without_build(module: Any) -> None:
    """No make, no nvcc: what they would build is replaced above, or not used on a CPU."""
    for name in ("compile_helpers", "load"):
        if hasattr(module, name):
            setattr(module, name, lambda *_, **__: None)


def _without_engine(module: Any) -> None:
    """0.16 asks for this name of Transformer Engine where that is not installed, too, and never defines it there."""
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


def _splits_are_numbers(module: Any) -> None:
    """How many tokens go where stays a tensor on a CPU, which gloo refuses; from a GPU it comes as numpy has it."""

    def move(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor

    module.maybe_move_tensor_to_cpu = move


def _loads_float32(module: Any) -> None:
    """Let the distributed optimizer load where the model is float32.

    It copies into views of the parameters, which torch refuses while gradients are recorded. Under bfloat16, which
    everybody uses on a GPU, it copies into tensors of its own.
    """
    import torch

    optimizer = module.DistributedOptimizer
    optimizer.load_state_dict = torch.no_grad()(optimizer.load_state_dict)


def _record_losses(module: Any) -> None:
    training_log = module.training_log

    @functools.wraps(training_log)
    def log(loss_dict: Any, total: Any, learning_rate: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        for value in loss_dict.values():
            _record("loss", iteration=iteration, loss=float(value))
        return training_log(loss_dict, total, learning_rate, iteration, *args, **kwargs)

    module.training_log = log


def _compute_logits(module: Any) -> None:
    """End with what the model that was built and loaded makes of the tokens that there are, before any training."""
    import torch

    folder, set_up = Path(os.environ["LAUNCH_LOGITS"]), module.setup_model_and_optimizer

    def set_up_and_compute(*args: Any, **kwargs: Any) -> None:
        (model,), *_ = set_up(*args, **kwargs)
        tokens = torch.load(folder / "tokens.pt")
        positions = torch.arange(tokens.shape[1]).unsqueeze(0).expand_as(tokens)
        mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
        with torch.no_grad():
            torch.save(model.eval()(tokens, positions, mask), folder / "logits.pt")
        raise SystemExit

    module.setup_model_and_optimizer = set_up_and_compute


def _record_methods(owner: Any, names: Sequence[str], describe: Callable[..., dict[str, Any]]) -> None:
    for name in names:
        if name in vars(owner):
            setattr(owner, name, _recorded(vars(owner)[name], f"{owner.__name__}.{name}", describe))


def _iteration(text: object) -> dict[str, int]:
    found = re.search(r"iter_(\d+)", str(text))
    return {"iteration": int(found[1])} if found else {}


def _recorded(original: Any, event: str, describe: Callable[..., dict[str, Any]]) -> Any:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        facts = describe(self, args, result)
        if facts:
            _record(event, **facts)
        return result

    return call


def _of_strategy(self: Any, args: tuple[Any, ...], _result: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"package": type(self).__module__.partition(".")[0], **_iteration(args[1:2])}
    for name in ("use_cached_ckpt_structure", "validated_cache_reuse"):
        if hasattr(self, name):
            facts[name] = bool(getattr(self, name))
    return facts


def _record_strategies(module: Any) -> None:
    for name in (
        "TorchDistSaveShardedStrategy",
        "TorchDistLoadShardedStrategy",
        "TorchDistSaveStrategy",
        "TorchDistLoadStrategy",
    ):
        if name in vars(module):
            _record_methods(vars(module)[name], ("save", "async_save", "load"), _of_strategy)
    if "_Commit" in vars(module):
        _record_methods(module._Commit, ("__call__",), lambda self, *_: _iteration(self.save_call.what))


def _norms_of_sequences(module: Any) -> None:
    """Sequence parallelism needs of a norm only the mark by which Megatron adds the gradients of its ranks."""
    import copy

    make = module.WrappedTorchNorm.__new__

    def make_marked(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        norm = make(cls, alone, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    module.WrappedTorchNorm.__new__ = make_marked


def _latent_core(module: Any) -> None:
    """Latent attention gives its core sizes that Megatron's own one has no arguments for."""
    make = module.DotProductAttention.__init__

    def make_of_sizes(self: Any, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if v_channels:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    module.DotProductAttention.__init__ = make_of_sizes


def _latent_without_engine(module: Any) -> None:
    """Latent attention takes what stands in for Transformer Engine for the real one."""
    module.HAVE_TE = False


def _tables_on_cpu(module: Any) -> None:
    """YaRN makes its tables of positions on a device that it asks for by number."""
    make = module.YarnRotaryEmbedding.__init__

    def make_here(self: Any, *args: Any, use_cpu_initialization: bool = False, **kwargs: Any) -> None:
        make(self, *args, use_cpu_initialization=True, **kwargs)

    module.YarnRotaryEmbedding.__init__ = make_here


_AFTER_IMPORT: dict[str, Callable[[Any], None]] = {
    "megatron.core.datasets.utils": _without_build,
    "megatron.legacy.fused_kernels": _without_build,
    "megatron.core.transformer.moe.moe_utils": _without_engine,
    "megatron.core.transformer.moe.token_dispatcher": _splits_are_numbers,
    "megatron.core.transformer.torch_norm": _norms_of_sequences,
    "megatron.core.transformer.dot_product_attention": _latent_core,
    "megatron.core.transformer.multi_latent_attention": _latent_without_engine,
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding": _tables_on_cpu,
    "megatron.core.optimizer.distrib_optimizer": _loads_float32,
    "megatron.training.training": _compute_logits if "LAUNCH_LOGITS" in os.environ else _record_losses,
    "megatron.core.dist_checkpointing.strategies.torch": _record_strategies,
    "mcore_ckpt.megatron.strategy": _record_strategies,
}


class _AroundImport(MetaPathFinder):
    """Calls `_pretend_cuda` before `megatron.core` is imported, and `_AFTER_IMPORT` after the modules that it names."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname == "megatron.core":
            _pretend_cuda()
        if fullname not in _AFTER_IMPORT:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: Any) -> None:
                execute(module)
                _AFTER_IMPORT[fullname](module)

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _AroundImport())
