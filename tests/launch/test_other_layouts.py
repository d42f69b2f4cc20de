"""A launch that goes on under another division of the model than the one that saved; in a directory, or in an object
store through NVIDIA's multi-storage client (`--enable-msc`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

import mcore_ckpt
from mcore_ckpt.tools.runs import list_run
from tests.launch.pretrain import Side, launch, megatron_lm
from tests.launch.variants import ASYNC, Variant, assert_ours_ran, assert_whole, command_line, resumed, trained
from tests.support.object_server import S3Directory

pytestmark = pytest.mark.slow

SIDES: tuple[Side, ...] = ("stock", "ours")
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


# Small buckets, cut between parameters, and parameters cut between data parallel ranks.
BUCKETS = Variant(
    "small-buckets",
    (
        *(*ASYNC, *_NO_DROPOUT, "--bf16", "--swiglu"),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "15000"),
    ),
)


def test_flat_buckets_go_on_when_they_are_made_reshardable(launches: Path) -> None:
    """At the layout of the save, with tied embeddings, as if nothing had been, and under another as well."""
    place, saved = launches / "buckets", (_PP, "2")
    saving = ["--save", str(place / "saved"), "--save-interval", "3"]
    never_stopped = launch("ours", 4, [*command_line("ours", BUCKETS), *saved, *saving], place / "run")
    later = {iteration: loss for iteration, loss in never_stopped.losses.items() if iteration > 3}
    made = place / "made" / "iter_0000003"
    mcore_ckpt.reshard_checkpoint(place / "saved" / "iter_0000003", made, optimizer_layout="fully_reshardable")
    for side in SIDES:
        on = resumed(side, BUCKETS, made.parent, place / side, 4, saved)
        assert on.losses == later
    elsewhere = resumed("stock", BUCKETS, made.parent, place / "elsewhere", 2)
    assert elsewhere.losses == pytest.approx(later, rel=1e-4)  # bfloat16, added in another order


# Saved under, resumed under; what replaces arguments there. Both have tied embeddings.
DIVISIONS = {
    "tp2-pp2-to-half": (4, (_TP, "2", _PP, "2"), 2, ()),
    "experts-1-to-2": (2, (), 2, ("--expert-model-parallel-size", "2", "--no-load-rng")),
    "experts-2-to-1": (2, ("--expert-model-parallel-size", "2"), 2, ("--no-load-rng",)),
}
_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --disable-bias-linear".split()


@pytest.mark.parametrize("name", DIVISIONS)
def test_what_is_saved_by_default_resumes_under_any_division(name: str, launches: Path) -> None:
    ranks, saved, resuming, layout = DIVISIONS[name]
    experts = _EXPERTS if name.startswith("experts") else []
    arguments = [*_NO_DROPOUT, *experts, "--use-distributed-optimizer", "--swiglu"]
    place = launches / f"any-{name}"
    saving = ["--save", str(place / "saved"), "--save-interval", "3"]
    never_stopped = launch("ours", ranks, [*arguments, *saved, *saving], place / "run")
    later = {iteration: loss for iteration, loss in never_stopped.losses.items() if iteration > 3}
    loading = ["--load", str(place / "saved"), "--ckpt-step", "3"]
    on = launch("ours", resuming, [*arguments, *layout, *loading], place / "on")
    assert on.losses == pytest.approx(later, rel=2e-6)  # added in another order
    (line,) = [line for line in on.log.splitlines() if "resumed from iter_0000003" in line]
    assert " as saved: " in line
    assert "that no rank holds" not in line
    if not experts:
        refused = launch("stock", resuming, [*arguments, *layout, *loading], place / "stock", expected_exit=None)
        assert "(TP, PP) mismatch after resume" in refused.log


def test_flat_buckets_without_tables_are_refused_with_the_command_that_converts_them(launches: Path) -> None:
    """Of Megatron-Core itself, under another tensor parallel size; ours says so as stock does, and trains nothing."""
    _, checkpoints = trained("stock", DATA_PARALLEL, launches)
    for side in SIDES:
        arguments = [*command_line(side, DATA_PARALLEL), _TP, "2", "--load", str(checkpoints), "--ckpt-step", "3"]
        refused = launch(side, 2, arguments, launches / f"refused-{side}", expected_exit=None)
        assert "(TP, PP) mismatch after resume" in refused.log
        assert (f"mcore-ckpt reshard {checkpoints}/iter_0000003 " in refused.log) == (side == "ours")
        assert not refused.named("loss")


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
