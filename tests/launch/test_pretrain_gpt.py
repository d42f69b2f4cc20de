"""Megatron-LM's own `pretrain_gpt.py`, launched: it saves, ends, and goes on as if it had never ended.

Each variant is trained for six iterations with stock Megatron and with ours, saving on the way; new launches go on from
iteration 3, ours from what stock saved and the other way round, too. Their losses are equal to the last bit.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from mcore_ckpt.format.integrity import data_file_of
from tests.launch.pretrain import ROOT, launch, megatron_lm, tracked_iteration
from tests.launch.variants import ASYNC, Variant, assert_ours_ran, assert_whole, resumed, trained
from tests.support.shown_launches import shown_launches

pytestmark = pytest.mark.slow

_DISTRIBUTED = "--use-distributed-optimizer"
VARIANTS = [
    Variant("async", (*ASYNC, "--tensor-model-parallel-size", "2")),
    Variant("distributed-optimizer", (_DISTRIBUTED, "--no-ckpt-fully-parallel-save", "--bf16")),
    Variant("fully-parallel", (_DISTRIBUTED, "--ckpt-fully-parallel-save", "--ckpt-fully-parallel-load")),
    Variant(
        "constant-structure",
        (*ASYNC, _DISTRIBUTED, "--ckpt-fully-parallel-load", "--ckpt-assume-constant-structure"),
        interval=1,
    ),
    Variant(
        "pipeline-async-bf16",
        (*ASYNC, _DISTRIBUTED, "--pipeline-model-parallel-size", "2", "--bf16"),
        interval=1,
        options={"MCORE_CKPT_WRITER": "fork", "MCORE_CKPT_THREAD_COUNT": "1"},
        exchanged=False,
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_goes_on_as_if_it_had_never_ended(variant: Variant, launches: Path) -> None:
    stock, stock_checkpoints = trained("stock", variant, launches)
    ours, our_checkpoints = trained("ours", variant, launches)
    assert not any("mcore_ckpt" in used for used in stock.strategies())
    assert_ours_ran(ours, variant, our_checkpoints.parent, loaded=False)
    assert sorted(ours.losses) == [1, 2, 3, 4, 5, 6]
    assert ours.losses == stock.losses, "saving must not change training"
    assert tracked_iteration(our_checkpoints) == 6
    assert_whole(our_checkpoints / "iter_0000003")

    later = {iteration: loss for iteration, loss in ours.losses.items() if iteration > 3}
    places = {name: launches / f"{variant.name}-{name}" for name in ("ours-on", "ours-from-stock", "stock-from-ours")}
    on = resumed("ours", variant, our_checkpoints, places["ours-on"])
    assert on.losses == later
    assert_ours_ran(on, variant, places["ours-on"], loaded=True)
    if variant.exchanged:
        from_stock = resumed("ours", variant, stock_checkpoints, places["ours-from-stock"])
        assert from_stock.losses == later
        assert_ours_ran(from_stock, variant, places["ours-from-stock"], loaded=True)
        by_stock = resumed("stock", variant, our_checkpoints, places["stock-from-ours"])
        assert by_stock.losses == later
        assert not any("mcore_ckpt" in used for used in by_stock.strategies())

    if "MCORE_CKPT_THREAD_COUNT" in variant.options:
        files = sorted(path.name for path in (our_checkpoints / "iter_0000003").glob("*.distcp"))
        assert [data_file_of(file)[:2] for file in files] == [(0, 0), (1, 0)]
    if variant.keeps_structure:
        saves = [event for event in ours.events[0] if event["event"] == "TorchDistSaveStrategy.async_save"]
        assert all(event["use_cached_ckpt_structure"] for event in saves)
        assert [event["validated_cache_reuse"] for event in saves] == [False, True, True, True, True, True]


def test_each_rank_of_a_job_with_experts_gets_its_own_random_states_back(launches: Path) -> None:
    """Later than 0.16 Megatron-LM describes those of data-parallel ranks as replicas, which here they are not."""
    arguments = "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather"
    variant = Variant("experts", (*arguments.split(), "--disable-bias-linear", _DISTRIBUTED, "--bf16"))
    run, checkpoints = trained("ours", variant, launches)
    if "ep_size > 1" not in (megatron_lm() / "megatron/training/checkpointing.py").read_text():
        assert "hold a replica: rng_state/shard_0.0_1.1 on ranks 1. What other ranks hold is kept" in run.log
    certified = replace(variant, options={"MCORE_CKPT_CERTIFY": "raise"})
    on = resumed("ours", certified, checkpoints, launches / "experts-on")
    assert "resumed from iter_0000003 as saved: " in on.log
    assert on.losses == {iteration: loss for iteration, loss in run.losses.items() if iteration > 3}


def test_the_launch_that_pages_show_saves_while_training_goes_on(launches: Path) -> None:
    """The line as it stands, with a model and a directory in the place of its dots."""
    pages = [(ROOT / page).read_text() for page in ("README.md", "docs/index.md", "docs/guides/try.md")]
    shown, *others = [words for page in pages for words in shown_launches(page) if "--async-save" in words]
    assert [words[: words.index("pretrain_gpt.py")] for words in others] == [
        shown[: shown.index("pretrain_gpt.py")]
    ] * 2
    script = shown.index("pretrain_gpt.py")
    assert shown[:script] == ["torchrun", "--nproc-per-node", "8", "-m", "mcore_ckpt.launch"]
    variant = Variant("shown", tuple(shown[script + 1 :]))
    assert variant.is_async
    run, checkpoints = trained("ours", variant, launches)
    assert_ours_ran(run, variant, checkpoints.parent, loaded=False)
    assert tracked_iteration(checkpoints) == 6
    assert_whole(checkpoints / "iter_0000006")


def test_a_job_that_is_preempted_saves_and_is_resumed(launches: Path) -> None:
    """As guides/slurm.md and guides/kubernetes.md have it: SIGTERM to `torchrun`, which passes it on."""
    place = launches / "preempted"
    checkpoints = place / "checkpoints"
    saving = (*ASYNC, "--save", str(checkpoints), "--save-interval", "100000", "--exit-signal-handler")
    arguments = [*saving, "--train-iters", "100000"]
    patience = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "250"}  # as the guides say
    run = launch("ours", 2, arguments, place / "run", patience, expected_exit=None, terminated_at=3)
    assert "exiting program after receiving SIGTERM" in run.log
    saved = tracked_iteration(checkpoints)
    assert saved is not None
    assert saved >= 3
    assert run.strategies() == {"mcore_ckpt.async_save"}
    assert_whole(checkpoints / f"iter_{saved:07d}")
    more = [*ASYNC, "--load", str(checkpoints), "--train-iters", "100000", "--exit-interval", str(saved + 1)]
    resumed_run = launch("ours", 2, more, place / "resumed")
    assert sorted(resumed_run.losses) == [saved + 1]
