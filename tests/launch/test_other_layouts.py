"""A launch that goes on under another division of the model than the one that saved; in a directory, or in an object
store through NVIDIA's multi-storage client (`--enable-msc`).
"""

from pathlib import Path

import pytest

from mcore_ckpt.tools.runs import list_run
from tests.launch.pretrain import megatron_lm
from tests.launch.variants import ASYNC, Variant, assert_ours_ran, assert_whole, resumed, trained
from tests.support.object_server import S3Directory

pytestmark = pytest.mark.slow

_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
# Without dropout: its random numbers depend on the layout. The last of two equal arguments counts.
_NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
RESHARDABLE = Variant(
    "fully-reshardable",
    (*ASYNC, *_NO_DROPOUT, "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable", _TP, "2"),
)
DATA_PARALLEL = Variant("dp-reshardable", (*ASYNC, *_NO_DROPOUT, "--use-distributed-optimizer"))
LAYOUTS = {
    "pp2": (RESHARDABLE, 2, (_TP, "1", _PP, "2")),
    "tp2-pp2": (RESHARDABLE, 4, (_TP, "2", _PP, "2")),
    "dp4": (DATA_PARALLEL, 4, ("--ckpt-fully-parallel-load",)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_goes_on_under_another_layout(name: str, launches: Path) -> None:
    variant, ranks, layout = LAYOUTS[name]
    ours, our_checkpoints = trained("ours", variant, launches)
    stock, stock_checkpoints = trained("stock", variant, launches)
    assert ours.losses == stock.losses
    later = {iteration: loss for iteration, loss in ours.losses.items() if iteration > 3}

    places = {side: launches / f"{variant.name}-{name}-{side}" for side in ("ours", "from-stock", "by-stock")}
    on = resumed("ours", variant, our_checkpoints, places["ours"], ranks, layout)
    by_stock = resumed("stock", variant, our_checkpoints, places["by-stock"], ranks, layout)
    assert_ours_ran(on, variant, places["ours"], loaded=True)
    # Another layout adds in another order: the same to the last bits, and for all who load to the very last.
    assert on.losses == pytest.approx(later, rel=2e-6)
    assert by_stock.losses == on.losses
    if name == "pp2":
        from_stock = resumed("ours", variant, stock_checkpoints, places["from-stock"], ranks, layout)
        assert from_stock.losses == on.losses


def test_goes_on_in_an_object_store(msc_profile: str, s3_directory: S3Directory, launches: Path) -> None:
    """Saved by either at TP 2, loaded by the other at PP 2; all paths are URLs of the client's profile."""
    # To 0.16 Megatron uses the client wherever it is installed, and has no such argument.
    asked = "'--enable-msc'" in (megatron_lm() / "megatron/training/arguments.py").read_text()
    variant = Variant(
        "store", (*RESHARDABLE.arguments, *(["--enable-msc"] if asked else [])), store=f"{msc_profile}/run"
    )
    ours, our_checkpoints = trained("ours", variant, launches)
    assert_ours_ran(ours, variant, launches / "store-ours", loaded=False)
    listed = list_run(our_checkpoints)
    assert (listed.tracked, listed.tracker_problem) == ("iter_0000006", None)
    assert [found.checkpoint.name for found in listed.checkpoints] == ["iter_0000003", "iter_0000006"]
    assert_whole(our_checkpoints / "iter_0000003")
    stock, stock_checkpoints = trained("stock", variant, launches)
    assert ours.losses == stock.losses, "saving must not change training"

    later = {iteration: loss for iteration, loss in ours.losses.items() if iteration > 3}
    on = resumed("ours", variant, our_checkpoints, launches / "store-on")
    assert on.losses == later
    assert_ours_ran(on, variant, launches / "store-on", loaded=True)
    by_stock = resumed("stock", variant, our_checkpoints, launches / "store-by-stock", layout=LAYOUTS["pp2"][2])
    assert not any("mcore_ckpt" in used for used in by_stock.strategies())
    from_stock = resumed("ours", variant, stock_checkpoints, launches / "store-from-stock", layout=LAYOUTS["pp2"][2])
    assert_ours_ran(from_stock, variant, launches / "store-from-stock", loaded=True)
    # Another layout adds in another order.
    assert by_stock.losses == pytest.approx(later, rel=2e-6)
    assert from_stock.losses == by_stock.losses
    assert not list(launches.rglob("msc:*")), "a folder of that name was made in a working directory"
