"""A launch goes on with the optimizer that an import has brought, with the losses of one that never ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import mcore_ckpt
from tests.launch.pretrain import launch

pytestmark = pytest.mark.slow

_ARGUMENTS = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --attention-dropout 0 --hidden-dropout 0"
_BATCH = 8
_OWN_NAMES = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


def _by_module(checkpoint: mcore_ckpt.Checkpoint, prefix: str) -> dict[str, torch.Tensor]:
    """Tensors whose keys begin so, layer by layer, under the names of Megatron's own modules."""
    found = {}
    for key in checkpoint.tensors:
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name.startswith("optimizer."):
            continue
        tensor = checkpoint[key][...]
        if not name.startswith("decoder.layers."):
            found[name] = tensor
            continue
        rest = name.removeprefix("decoder.layers.")
        for fused, own in _OWN_NAMES:
            rest = own + rest.removeprefix(fused) if rest.startswith(fused) else rest
        for number, layer in enumerate(tensor):
            if ".experts.experts." not in rest:
                found[f"decoder.layers.{number}.{rest}"] = layer.clone()
                continue
            before, after = rest.split(".experts.experts.")
            for expert, own in enumerate(layer):
                found[f"decoder.layers.{number}.{before}.experts.local_experts.{expert}.{after}"] = own.clone()
    return found


def _save_as_megatron_fsdp(source: Path, target: Path, *, with_schedule: bool) -> None:
    """The same training as `--ckpt-format fsdp_dtensor` keeps it; without a schedule, as others leave it."""
    with mcore_ckpt.open_checkpoint(source) as checkpoint:
        common = checkpoint.common_state()
        weights = _by_module(checkpoint, "")
        moments = {name: _by_module(checkpoint, f"optimizer.state.{name}.") for name in ("exp_avg", "exp_avg_sq")}
    settings = common["optimizer"]
    (group, *_) = settings.get(0, settings)["optimizer"]["param_groups"]
    meta = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "wd_mult", "step")}
    arguments = common["args"]
    state: dict[str, Any] = {
        "model": {f"module.{name}": tensor for name, tensor in weights.items()},
        "optimizer": {
            "state": {f"module.module.{name}": {key: moments[key][name] for key in moments} for name in weights},
            "param_to_group_meta": {f"module.module.{name}": dict(meta) for name in weights},
        },
        "args": arguments,
        "checkpoint_version": 3.0,
    }
    if with_schedule:
        state |= {"iteration": common["iteration"], "opt_param_scheduler": common["opt_param_scheduler"]}
        state["num_floating_point_operations_so_far"] = common["num_floating_point_operations_so_far"]
    else:
        for name in ("consumed_train_samples", "global_batch_size"):
            delattr(arguments, name)
    dcp.save(state, checkpoint_id=target)


def test_an_imported_optimizer_goes_on_as_if_it_had_never_stopped(launches: Path) -> None:
    place, arguments = launches / "imported-optimizer", _ARGUMENTS.split()
    whole = launch("stock", 2, [*arguments, "--save", str(place / "saved"), "--save-interval", "3"], place / "run")
    later = {iteration: loss for iteration, loss in whole.losses.items() if iteration > 3}
    assert sorted(later) == [4, 5, 6]
    for name, more in (("known", []), ("unknown", ["--override-opt_param-scheduler"])):
        _save_as_megatron_fsdp(place / "saved" / "iter_0000003", place / name, with_schedule=name == "known")
        report = mcore_ckpt.import_checkpoint(
            place / name,
            place / f"{name}-imported" / "iter_0000003",
            kind="dcp",
            global_batch_size=None if name == "known" else _BATCH,
        )
        assert any("--override-opt_param-scheduler" in note for note in report.notes) is (name == "unknown")
        for side in ("stock", "ours") if name == "known" else ("stock",):
            load = ["--load", str(place / f"{name}-imported"), *more]
            on = launch(side, 2, [*arguments, *load], place / f"{name}-{side}")  # type: ignore[arg-type]
            assert on.losses == later, (name, side)
