"""What `megatron.training.checkpointing` of Megatron-LM does, by its names and in its order, without all else.

The wheel has `megatron.core` alone. With this folder on the path a test imports it as a job imports that of a checkout.
"""

import random
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.rerun_state_machine import get_rerun_state_machine

AFTERWARDS: list[Callable[[], None]] = []
"""Called where the training code's own steps after a load have run: faults."""
OPERATIONS: dict[str, int] = {}
"""As "done" how many floating point operations it says were done, if not as many as were saved."""


def get_rng_state() -> Any:
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    tensor, pipeline = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    sizes = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", [state], sizes, (pipeline, tensor), replica_id=replica)


def generate_state_dict(
    args: Any,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    rng_state: Any,
    iteration: int | None = None,
    optim_sd_kwargs: Any = None,
    rerun_state: Any = None,
) -> dict[str, Any]:
    state: dict[str, Any] = {"args": args, "model": model[0].module.sharded_state_dict()}
    if iteration is not None:
        state["iteration"] = iteration
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], **optim_sd_kwargs)
        state["opt_param_scheduler"] = opt_param_scheduler.state_dict()
    if rng_state is not None:
        state["rng_state"] = rng_state
    if rerun_state:
        state["rerun_state_machine"] = rerun_state
    return state


def save_checkpoint(
    iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any, args: Namespace, path: str
) -> None:
    options = {"metadata": args.metadata}
    rerun = get_rerun_state_machine().state_dict(None, args.ckpt_format)
    state = generate_state_dict(
        *(args, model, optimizer, opt_param_scheduler, get_rng_state(), iteration),
        optim_sd_kwargs=options,
        rerun_state=rerun,
    )
    state["num_floating_point_operations_so_far"] = 100
    dist_checkpointing.save(state, path)


def load_checkpoint(
    ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, args: Namespace, path: str
) -> tuple[int, int]:
    options = {"metadata": args.metadata, "is_loading": True}
    is_new = args.finetune or getattr(args, "is_base", False)  # as ms-swift loads a base of adapters
    with_optimizer = not is_new and not args.no_load_optim
    with_states = not is_new and not args.no_load_rng
    common, machine = dist_checkpointing.load_common_state_dict(path), get_rerun_state_machine()
    is_pending = not is_new and machine.validate_state_dict(common.get("rerun_state_machine"))
    wanted = generate_state_dict(
        args,
        ddp_model,
        optimizer if with_optimizer else None,
        opt_param_scheduler,
        get_rng_state() if with_states else None,
        optim_sd_kwargs=options,
        rerun_state=machine.state_dict(None, args.ckpt_format, force=True) if is_pending else None,
    )
    state = dist_checkpointing.load(wanted, path)
    if not is_new:
        args.consumed_train_samples = state["args"].consumed_train_samples
    ddp_model[0].module.load_state_dict(state["model"])
    if with_optimizer:
        optimizer.load_state_dict(state["optimizer"])
        opt_param_scheduler.load_state_dict(state["opt_param_scheduler"])
    else:
        optimizer.reload_model_params()
    if is_pending:
        machine.load_state_dict(state["rerun_state_machine"])
    if with_states:
        states = state["rng_state"][0]
        random.setstate(states["random_rng_state"])
        numpy.random.set_state(states["np_rng_state"])
        torch.set_rng_state(states["torch_rng_state"])
        tensor_parallel.get_cuda_rng_tracker().set_states(states["rng_tracker_states"])
    for fault in AFTERWARDS:
        fault()
    operations = OPERATIONS.get("done", common["num_floating_point_operations_so_far"])
    return (0 if is_new else state["iteration"]), operations
