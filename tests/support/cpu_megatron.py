"""Let Megatron-Core run on a machine without a GPU, for tests and the demo only.

Megatron's optimizers, gradient buffers and schedules say "cuda" and "nccl" outright. `pretend_cuda()` makes "cuda"
another name for the CPU and "nccl" another name for gloo, in this process: no tensor ever is on a GPU, although
`torch.cuda.is_available()` says so. Code under test that decides by `tensor.device` is not deceived, and code that
decides by `is_available()` is found out.

Call it before anything of Megatron is imported: megatron-core looks for Apex and grouped_gemm when it is imported, and
gets the plain ones below (its `DistributedOptimizer` cannot load with the optimizers of torch, and its `GroupedMLP`
does not exist without grouped_gemm).
"""

import contextlib
import functools
import logging
import os
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_CPU = torch.device("cpu")
_FACTORIES = (
    "arange as_tensor empty empty_like empty_strided eye full full_like linspace ones ones_like rand rand_like randint "
    "randn randn_like randperm tensor zeros zeros_like"
).split()
_TENSOR_FACTORIES = "new_empty new_full new_ones new_tensor new_zeros".split()
_CUDA_NO_OPS = (
    "_lazy_init check_error empty_cache init ipc_collect reset_peak_memory_stats set_device set_stream synchronize"
).split()
_CUDA_ZEROS = (
    "current_device max_memory_allocated max_memory_reserved memory_allocated memory_reserved utilization"
).split()


def pretend_cuda() -> None:
    """Make "cuda" mean the CPU and "nccl" mean gloo in this process; a second call changes nothing."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if "apex.optimizers" in sys.modules:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("pretend_cuda() has to come before the first import of megatron.core")
    _replace_devices()
    _replace_torch_cuda()
    _replace_collectives()
    _replace(torch, "compile", lambda model=None, **_: (lambda function: function) if model is None else model)
    apex_optimizers = types.ModuleType("apex.optimizers")
    _replace(apex_optimizers, "FusedAdam", FusedAdam)
    _replace(apex_optimizers, "FusedSGD", torch.optim.SGD)
    sys.modules["apex.optimizers"] = apex_optimizers
    grouped_gemm = types.ModuleType("grouped_gemm")
    _replace(grouped_gemm, "ops", types.SimpleNamespace(gmm=_grouped_matmul))
    sys.modules["grouped_gemm"] = grouped_gemm


def _grouped_matmul(rows: Any, weights: Any, rows_per_group: Any, trans_b: bool = False) -> Any:
    """Multiply each group of rows `[rows_of_g, k]` by its own matrix `weights[g]`, `[k, n]` (`[n, k]` if `trans_b`)."""
    parts = torch.split(rows, [int(count) for count in rows_per_group])
    return torch.cat([part @ (weight.t() if trans_b else weight) for part, weight in zip(parts, weights, strict=True)])


class FusedAdam(torch.optim.Optimizer):
    """Adam with decoupled weight decay that, as Apex's does, keeps `step` in the parameter group."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                # Megatron-FSDP gives no gradient to a rank that has nothing of a parameter, and asks for its state.
                if param.grad is None and not hasattr(param, "_local_tensor"):
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param, dtype=torch.float32)
                    state["exp_avg_sq"] = torch.zeros_like(param, dtype=torch.float32)
                if param.grad is None:
                    continue
                grad = param.grad.float()
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** group["step"])
                scale = (state["exp_avg_sq"] / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                update = mean / scale + group["weight_decay"] * param.float()
                param.add_(update.to(param.dtype), alpha=-float(group["lr"]))


def _replace(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with every `device=` that means CUDA replaced by the CPU."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call


def _replace_devices() -> None:
    for name in _FACTORIES:
        _replace(torch, name, _on_cpu(getattr(torch, name)))
    for name in _TENSOR_FACTORIES:
        _replace(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    for owner in (torch.Tensor, torch.nn.Module):
        move = _on_cpu(owner.to)

        def to(self: Any, *args: Any, _move: Callable[..., Any] = move, **kwargs: Any) -> Any:
            # `to(other_tensor)` and `to(dtype)` pass through: only devices and bare device numbers mean CUDA.
            return _move(self, *((_CPU, *args[1:]) if args and _is_cuda(args[0]) else args), **kwargs)

        _replace(owner, "to", to)
        _replace(owner, "cuda", lambda self, *_, **__: self)
    _replace(torch.Tensor, "pin_memory", lambda self, *_, **__: self)
    _replace(torch.Tensor, "record_stream", lambda *_, **__: None)

    tensor_type = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizers sort parameters by the string "torch.cuda.HalfTensor" and its like.
        if args or kwargs:
            return tensor_type(self, *args, **kwargs)
        return tensor_type(self).replace("torch.", "torch.cuda.", 1)

    _replace(torch.Tensor, "type", type_name)


class _Stream:
    """A stream and an event in one: there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0
        self.device = _CPU

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def record_event(self, event: Any = None) -> Any:
        return event or _Stream()

    def record(self, *_: Any) -> None:
        """Nothing to record."""

    def query(self) -> bool:
        return True

    wait = wait_stream = wait_event = synchronize = record


def _replace_torch_cuda() -> None:
    cuda = torch.cuda
    stream = _Stream()
    generator = torch.default_generator
    replacements: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_, **__: (9, 0),
        "get_device_name": lambda *_, **__: "the CPU by another name",
        "get_device_properties": lambda *_, **__: types.SimpleNamespace(
            name="cpu", major=9, minor=0, total_memory=1 << 34, multi_processor_count=1
        ),
        "mem_get_info": lambda *_, **__: (1 << 34, 1 << 34),
        "memory_stats": lambda *_, **__: Counter(),
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *_, **__: stream,
        "default_stream": lambda *_, **__: stream,
        "stream": lambda *_, **__: contextlib.nullcontext(),
        "device": lambda *_, **__: contextlib.nullcontext(),
        "default_generators": (generator,),
        "manual_seed": lambda seed: generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)),
        "initial_seed": lambda: generator.initial_seed(),
        "get_rng_state": lambda *_, **__: generator.get_state(),
        "set_rng_state": lambda state, *_, **__: generator.set_state(state),
        "_lazy_call": lambda call, **_: call(),
    }
    replacements.update({name: lambda *_, **__: None for name in _CUDA_NO_OPS})
    replacements.update({name: lambda *_, **__: 0 for name in _CUDA_ZEROS})
    for name, value in replacements.items():
        for module in (cuda, cuda.random, cuda.memory):
            if hasattr(module, name):
                _replace(module, name, value)
    for name in "Float Double Half BFloat16 Int Long Byte Bool".split():
        _replace(cuda, name + "Tensor", getattr(torch, name + "Tensor"))
    for name in "range_push range_pop mark".split():
        _replace(cuda.nvtx, name, lambda *_, **__: None)
    # Under torch's decorator each of these imports torch._dynamo on first use, seconds for nothing.
    for name in "add_param_group load_state_dict state_dict".split():
        decorated = vars(torch.optim.Optimizer)[name]
        _replace(torch.optim.Optimizer, name, getattr(decorated, "__wrapped__", decorated))
    # Megatron watches that the CPU's generator does not change where the GPU's is meant: here they are the same.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    # Otherwise torch asks the driver whether a graph is being captured, at every step of every optimizer.
    _replace(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda *_: None)
    _replace(torch.optim.Optimizer, "_cuda_graph_capture_health_check", lambda *_: None)


def _replace_collectives() -> None:
    new_group, barrier, all_gather = dist.new_group, dist.barrier, dist.all_gather

    def gloo_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *_: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return new_group(ranks, timeout=timeout, backend="gloo", **kwargs)

    def gloo_barrier(group: Any = None, async_op: bool = False, **_: Any) -> Any:
        return barrier(group=group, async_op=async_op)

    def gloo_all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        sizes = [part.numel() for part in tensor_list]
        if async_op or len(set(sizes)) == 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        # NCCL gathers tensors of different lengths, which the layer-wise optimizer relies on.
        padded = tensor.new_zeros(max(sizes))
        padded[: tensor.numel()] = tensor.flatten()
        gathered = [torch.empty_like(padded) for _ in sizes]
        all_gather(gathered, padded, group=group)
        for part, received, size in zip(tensor_list, gathered, sizes, strict=True):
            part.copy_(received[:size].view_as(part))
        return None

    replaced = (
        (new_group, gloo_group, "new_group"),
        (barrier, gloo_barrier, "barrier"),
        (all_gather, gloo_all_gather, "all_gather"),
    )
    for old, new, name in replaced:
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").startswith("torch.distributed") and vars(module).get(name) is old:
                _replace(module, name, new)
