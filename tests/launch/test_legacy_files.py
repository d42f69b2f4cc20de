"""What a launch has saved with `--ckpt-format torch`, as `torch_dist`, and the model in such files again.

Launches resume from the first with losses that are equal to the last bit, with stock's strategies and with ours.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt.models.conversions import export_checkpoint, import_checkpoint
from mcore_ckpt.tools.diff import diff_checkpoints
from tests.launch.pretrain import launch

pytestmark = pytest.mark.slow

_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_DISTRIBUTED = "--use-distributed-optimizer"
_EXPERTS = ["--num-experts", "4", "--moe-router-topk", "2", "--moe-router-load-balancing-type", "none"]
_EXPERTS += ["--expert-model-parallel-size", "2", "--disable-bias-linear"]


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "arguments"),
    [
        (2, 1, 1, ["--swiglu", "--bf16", _DISTRIBUTED, "--untie-embeddings-and-output-weights"]),
        (1, 2, 1, []),
        (1, 1, 2, [*_EXPERTS, "--bf16", _DISTRIBUTED]),
    ],
    ids=["tp2-distributed", "pp2-float32", "ep2-distributed"],
)
def test_training_resumes_from_what_was_imported(
    tp: int, pp: int, ep: int, arguments: list[str], launches: Path
) -> None:
    place = launches / f"legacy-{tp}-{pp}-{ep}-{len(arguments)}"
    arguments = [*arguments, _TP, str(tp), _PP, str(pp)]
    old = [*arguments, "--ckpt-format", "torch"]
    whole = launch("stock", 2, [*old, "--save", str(place / "saved"), "--save-interval", "3"], place / "run")
    later = {iteration: loss for iteration, loss in whole.losses.items() if iteration > 3}
    assert sorted(later) == [4, 5, 6]

    converted = place / "converted"
    report = import_checkpoint(place / "saved" / "iter_0000003", converted / "iter_0000003", kind="megatron-legacy")
    assert not report.left_out
    for side in ("stock", "ours"):
        on = launch(side, 2, [*arguments, "--load", str(converted)], place / f"on-{side}")
        assert on.losses == later, side
    sizes = {"tp": tp, "pp": pp, "ep": ep}
    _assert_stock_loads_the_model(converted / "iter_0000003", place / "back", arguments, sizes)


def _assert_stock_loads_the_model(checkpoint: Path, place: Path, arguments: list[str], sizes: dict[str, int]) -> None:
    """Export the model, have stock load the files and save what it has loaded as `torch_dist`, and compare."""
    export_checkpoint(checkpoint, place / "iter_0000003", to="megatron-legacy", **sizes)
    (place / "latest_checkpointed_iteration.txt").write_text("3")
    converting = ["--ckpt-format", "torch", "--load", str(place), "--no-load-optim", "--no-save-optim"]
    converting += ["--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", str(place / "again")]
    launch("stock", 2, [*arguments, "--override-opt_param-scheduler", *converting], place / "convert")
    (made,) = (place / "again").rglob("iter_0000003")
    difference = diff_checkpoints(checkpoint, made)
    assert len(difference.tensors) > 10
    assert all(tensor.same for tensor in difference.tensors)
    assert not difference.only_in_b
    assert all(key.startswith(("optimizer.", "chained_")) for key in difference.only_in_a)
