"""What a launch has saved with `--ckpt-format torch`, as `torch_dist` and back: its training goes on the same.

Losses are equal to the last bit, with stock's strategies and with ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mcore_ckpt.convert.exchange import export_legacy, import_legacy
from tests.launch.pretrain import launch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_DISTRIBUTED = "--use-distributed-optimizer"


@pytest.mark.parametrize(
    ("tp", "pp", "arguments"),
    [
        (2, 1, ["--swiglu", "--bf16", _DISTRIBUTED, "--untie-embeddings-and-output-weights"]),
        (1, 2, ["--bf16", _DISTRIBUTED]),
        (2, 1, []),
    ],
    ids=["tp2-distributed", "pp2-distributed", "tp2-float32"],
)
def test_training_goes_on_from_what_was_converted(tp: int, pp: int, arguments: list[str], launches: Path) -> None:
    place = launches / f"legacy-{tp}-{pp}-{len(arguments)}"
    arguments = [*arguments, _TP, str(tp), _PP, str(pp)]
    old = [*arguments, "--ckpt-format", "torch"]
    whole = launch("stock", 2, [*old, "--save", str(place / "saved"), "--save-interval", "3"], place / "run")
    later = {iteration: loss for iteration, loss in whole.losses.items() if iteration > 3}
    assert sorted(later) == [4, 5, 6]

    converted, back = place / "converted", place / "back"
    report = import_legacy(place / "saved" / "iter_0000003", converted / "iter_0000003")
    assert not report.left_out
    export_legacy(converted / "iter_0000003", back / "iter_0000003", tp=tp, pp=pp)
    for folder in (converted, back):
        (folder / "latest_checkpointed_iteration.txt").write_text("3")

    for side in ("stock", "ours"):
        on = launch(side, 2, [*arguments, "--load", str(converted)], place / f"on-{side}")
        assert on.losses == later, side
    again = launch("stock", 2, [*old, "--load", str(back)], place / "on-old")
    assert again.losses == later
