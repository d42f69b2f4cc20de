"""Launches that save into and load from an object store, through NVIDIA's multi-storage client (`--enable-msc`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_ckpt.tools.runs import list_run
from tests.launch.pretrain import megatron_lm
from tests.launch.test_other_layouts import RESHARDABLE
from tests.launch.variants import Variant, assert_ours_ran, assert_whole, resumed, trained
from tests.support.object_server import S3Directory

pytestmark = pytest.mark.slow

_PIPELINE = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "2")


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
    by_stock = resumed("stock", variant, our_checkpoints, launches / "store-by-stock", layout=_PIPELINE)
    assert not any("mcore_ckpt" in used for used in by_stock.strategies())
    from_stock = resumed("ours", variant, stock_checkpoints, launches / "store-from-stock", layout=_PIPELINE)
    assert_ours_ran(from_stock, variant, launches / "store-from-stock", loaded=True)
    # Another layout adds in another order.
    assert by_stock.losses == pytest.approx(later, rel=2e-6)
    assert from_stock.losses == by_stock.losses
    assert not list(launches.rglob("msc:*")), "a folder of that name was made in a working directory"
