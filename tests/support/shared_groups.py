"""What makes real Megatron cheaper on few cores: groups that are made once, and no interpreter for a queue."""

import sys
from datetime import timedelta
from multiprocessing import get_context
from typing import Any


def share_groups(collective_deadline_s: float = 120.0) -> None:
    """Make one gloo group for each set of ranks, in this process, from now on.

    Megatron makes dozens for each layout, tests set up many layouts, and each group has threads and a connection to
    each member: without this, eight ranks bring a small machine to its knees.
    """
    import torch.distributed as dist

    new_group, destroy = dist.new_group, dist.destroy_process_group
    made: dict[Any, Any] = {}

    def shared_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        key = None if ranks is None else tuple(ranks)
        if key not in made:
            made[key] = new_group(ranks, timeout=timedelta(seconds=collective_deadline_s), backend="gloo")
        return made[key]

    def destroy_process_group(group: Any = None) -> None:
        if group is None:
            made.clear()
            destroy()

    replace_in_torch(new_group, shared_group)
    replace_in_torch(destroy, destroy_process_group)


def replace_in_torch(old: Any, new: Any) -> None:
    """Put another function into every module of torch.distributed that has the old one."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.distributed"):
            for name, value in list(vars(module).items()):
                if value is old:
                    setattr(module, name, new)


def fork_results_queue() -> None:
    """Let stock's writers answer through a forked process: the one that Megatron spawns imports torch on each rank."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = get_context("fork").Manager().Queue()
