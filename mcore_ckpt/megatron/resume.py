"""The certificate at the end of Megatron-LM's `load_checkpoint`, as `LoadOptions.certify` asks.

The calls by which a resume makes its state dict are noted, and made again when all has been loaded. `certificate.py`
compares; it is imported then, so a job that loads nothing does not have it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from mcore_ckpt.core.errors import CheckpointError, LoadError
from mcore_ckpt.core.ranks import without_modes
from mcore_ckpt.megatron._versions import patches
from mcore_ckpt.megatron.calls import MegatronLoad, MegatronResume, current_resume, in_progress, metadata_version
from mcore_ckpt.megatron.flat_buckets import OPTIMIZER, change_optimizer
from mcore_ckpt.megatron.other_division import FLAT_BUCKETS, SHARDING_TYPE, with_own_ranges
from mcore_ckpt.megatron.serialization import TRAINING, tell_uncertified


def change_when_imported() -> None:
    """Let Megatron-LM's `load_checkpoint` end with a certificate, and the distributed optimizer say what lies where in
    its buckets: now, or when their modules have been imported.
    """
    _change_modules()
    if _AfterImport not in sys.meta_path:
        sys.meta_path.insert(0, _AfterImport)


class _AfterImport:
    """Finds nothing by itself. Asked for one of the modules, it changes that when it has been imported; where another
    finder was asked first, it does so at the next import of any module.
    """

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """As of `importlib.abc.MetaPathFinder`."""
        if not patches.replaced():
            return None
        _change_modules()
        if name not in (TRAINING, OPTIMIZER):
            return None
        others = (getattr(finder, "find_spec", None) for finder in sys.meta_path[sys.meta_path.index(cls) + 1 :])
        spec = next(filter(None, (find(name, path, target) for find in others if find)), None)
        loader: Any = getattr(spec, "loader", None)
        if (execute := getattr(loader, "exec_module", None)) is not None:

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                _change_modules()

            loader.exec_module = execute_and_change
        return spec


def _change_modules() -> None:
    _certify_module()
    change_optimizer()


def _certify_module() -> None:
    """Replace Megatron's functions, if they are there by now and have not been replaced yet."""
    module: Any = sys.modules.get(TRAINING)
    names = "get_rng_state", "generate_state_dict", "load_checkpoint"
    if f"{TRAINING}.load_checkpoint" in patches.replaced() or not all(hasattr(module, name) for name in names):
        return
    stock = {name: getattr(module, name) for name in names}
    for name in names[:2]:
        patches.replace(module, name, _noting(name, stock[name]))
    patches.replace(module, names[2], _certified(stock))
    for other in list(sys.modules.values()):  # Megatron's own, where its module has another by now
        held: Any = getattr(other, "__dict__", {}).get(names[2])
        if getattr(held, "__globals__", None) is vars(module):
            patches.replace(other, names[2], _certified({**stock, names[2]: held}))


def _noting(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (resume := current_resume()) is not None:
            resume.arguments[name] = args, kwargs
        return stock(*args, **kwargs)

    return call


def _certified(stock: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    @functools.wraps(stock["load_checkpoint"])
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        if current_resume() is not None:  # a third-party function, which is certified, has called it
            return stock["load_checkpoint"](*args, **kwargs)
        with in_progress(MegatronResume()) as resume:
            result = stock["load_checkpoint"](*args, **kwargs)
        if (load := resume.load) is not None:
            _certify_resume(stock, load, resume.arguments, kwargs.get("optimizer", *args[1:2]), *result[:2])
        return result

    return load_checkpoint


@without_modes()
def _certify_resume(
    stock: Mapping[str, Callable[..., Any]],
    load: MegatronLoad,
    arguments: Mapping[str, tuple[Any, Any]],
    optimizer: Any,
    iteration: int,
    operations: Any,
) -> None:
    from mcore_ckpt.megatron.certificate import certify

    directory, options = load.directory, load.options
    if "generate_state_dict" not in arguments:
        return tell_uncertified(directory, options, f"`generate_state_dict` of {TRAINING} has been replaced")
    args, kwargs = arguments["generate_state_dict"]
    call = inspect.signature(stock["generate_state_dict"]).bind(*args, **kwargs)
    call.apply_defaults()
    given, job = call.arguments, call.arguments["args"]
    flags = [name for name in ("finetune", "no_load_optim", "no_load_rng") if getattr(job, name)]
    reasons = [f"--{name.replace('_', '-')}" for name in flags]
    reader = load.filled_by
    has_random = reader is None or any("rng_state/" in key for key in reader.index.objects)
    if given["rng_state"] is None and has_random and not reasons:
        reasons.append("random states of another layout")
    make_state = partial(_state_as_resumed, stock, load, arguments, call, iteration, operations)
    try:
        certify(
            make_state,
            directory,
            optimizer,
            process_group=load.process_group,
            options=options,
            reasons=reasons,
            reader=reader,
            handed_out=load.change_common,
        )
    except CheckpointError as error:
        if options.certify == "raise":
            raise
        tell_uncertified(directory, options, error)
    return None


def _state_as_resumed(
    stock: Mapping[str, Callable[..., Any]],
    load: MegatronLoad,
    arguments: Mapping[str, tuple[Any, Any]],
    call: inspect.BoundArguments,
    iteration: int,
    operations: Any,
) -> Any:
    """The state dict that `call` makes of the job as it has been resumed."""
    given, job = call.arguments, call.arguments["args"]
    if given["rng_state"] is not None:
        again, named = arguments["get_rng_state"]
        given["rng_state"] = stock["get_rng_state"](*again, **named)
    # As for a save: on its way to a load, an optimizer gives itself states of zeros.
    given["optim_sd_kwargs"] = {**(given["optim_sd_kwargs"] or {}), "is_loading": False}
    if load.change_common is not None:  # nor is anything gathered: each rank has its own ranges
        metadata = {**(given["optim_sd_kwargs"].get("metadata") or {}), SHARDING_TYPE: FLAT_BUCKETS}
        given["optim_sd_kwargs"]["metadata"] = metadata
    if given["rerun_state"]:  # a rerun is pending
        machine = sys.modules[TRAINING].get_rerun_state_machine()
        given["rerun_state"] = machine.state_dict(None, job.ckpt_format, force=True)
        # What it gives the iterators when there are some.
        given["rerun_state"]["sharded"].data["data_iterator_checkpoints"] = machine.data_iterator_checkpoints
    given.update(iteration=iteration)
    state = stock["generate_state_dict"](*call.args, **call.kwargs)
    state["num_floating_point_operations_so_far"] = operations
    if metadata_version(load.directory) != load.version:  # (not earlier: Megatron gathers, with all ranks or none)
        raise LoadError(f"{load.directory} was replaced while it was loaded")
    if job.finetune or load.directory.name == "release" or getattr(job, "override_ckpt_iteration", None) is not None:
        del state["args"], state["iteration"]
    return state if load.change_common is None else with_own_ranges(state)
