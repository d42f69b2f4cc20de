"""What the launches are: variants of one training, run to its end or gone on with, and what must be true of each."""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mcore_ckpt.core.options import checkpoint_path
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.launch.pretrain import Launched, Side, launch, megatron_lm

ASYNC = ("--async-save", "--use-persistent-ckpt-worker")
_KEEPS_STRUCTURE = "--ckpt-assume-constant-structure"


@dataclass(frozen=True)
class Variant:
    """Arguments of a training of six iterations on two ranks, and what they ought to bring about."""

    name: str
    arguments: tuple[str, ...] = ()  # beside those of all launches
    interval: int = 3  # iterations from save to save
    options: dict[str, str] = field(default_factory=dict, hash=False)  # `MCORE_CKPT_*` variables
    exchanged: bool = True  # stock goes on from what ours saved, and ours from what stock saved, too
    store: str | None = None  # URL below which all launches save; None for directories of their own

    @property
    def is_async(self) -> bool:
        return "--async-save" in self.arguments

    @property
    def keeps_structure(self) -> bool:
        return _KEEPS_STRUCTURE in self.arguments


@cache
def _has_async_strategies() -> bool:
    """Whether this Megatron has `--async-strategy`: 0.16 has not."""
    return "--async-strategy" in (megatron_lm() / "megatron/training/arguments.py").read_text() or (
        "async_strategy" in (megatron_lm() / "megatron/training/async_utils.py").read_text()
    )


def command_line(side: Side, variant: Variant) -> list[str]:
    """The variant's arguments. Stock needs nvidia-resiliency-ext for its default strategy; ours serves it without."""
    other_strategy = side == "stock" and variant.is_async and _has_async_strategies()
    return [*variant.arguments, *(("--async-strategy", "mcore") if other_strategy else ())]


def _checkpoints(variant: Variant, place: Path) -> Path:
    return place / "checkpoints" if variant.store is None else checkpoint_path(f"{variant.store}/{place.name}")


def environment(side: Side, variant: Variant, place: Path) -> dict[str, str]:
    """The variant's options; the traces of its saves go to `place / "traces"`."""
    return {**variant.options, "MCORE_CKPT_TRACE_PATH": str(place / "traces")} if side == "ours" else {}


@cache
def trained(side: Side, variant: Variant, folder: Path) -> tuple[Launched, Path]:
    """The launch that never stops, and where it saved; made once for each side, variant and folder."""
    place = folder / f"{variant.name}-{side}"
    arguments = command_line(side, variant)
    if side == "stock":
        # Its async saves copy no CPU tensor: what they store of a state that training goes on to change is luck.
        arguments = [argument for argument in arguments if argument not in ASYNC]
    checkpoints = _checkpoints(variant, place)
    saving = ["--save", str(checkpoints), "--save-interval", str(variant.interval)]
    run = launch(side, 2, [*arguments, *saving], place / "run", environment(side, variant, place))
    return run, checkpoints


def resumed(
    side: Side, variant: Variant, checkpoints: Path, place: Path, ranks: int = 2, layout: tuple[str, ...] = ()
) -> Launched:
    """A new launch that goes on from iteration 3, and saves under `place`; `layout`: arguments that replace those of
    the variant that say how the model is divided.
    """
    arguments = [*command_line(side, variant), *layout, "--load", str(checkpoints), "--ckpt-step", "3"]
    if side == "stock" and _has_async_strategies():
        # It needs nvidia-resiliency-ext: the launch does not hand `--async-strategy mcore` on to the load.
        arguments = [argument for argument in arguments if argument != _KEEPS_STRUCTURE]
    arguments += ["--save", str(_checkpoints(variant, place)), "--save-interval", str(variant.interval)]
    return launch(side, ranks, arguments, place / "run", environment(side, variant, place))


def assert_ours_ran(run: Launched, variant: Variant, place: Path, *, loaded: bool) -> None:
    """Our strategies did it, said so once, and saved beside the training if they were asked to."""
    saving = "async_save" if variant.is_async else "save"
    assert run.strategies() == {f"mcore_ckpt.{saving}", *(["mcore_ckpt.load"] if loaded else [])}
    announced = [line for line in run.log.splitlines() if "are in force for megatron-core" in line]
    assert len(announced) == 1, announced
    assert "TorchDistSaveStrategy and TorchDistLoadStrategy" in announced[0]
    saves = {event["iteration"] for event in run.named(f"TorchDistSaveStrategy.{saving}")}
    assert max(saves) == 6
    for iteration in saves:
        trace = json.loads((place / "traces" / f"iter_{iteration:07d}_rank0.trace.json").read_text())["traceEvents"]
        by_writer = [event for event in trace if event["ph"] == "X" and event["tid"] == 1]
        assert [bool(event["args"]["files"]) for event in by_writer] == [True] * variant.is_async, trace
    if variant.is_async:
        for rank in run.events:
            assert {event["iteration"] for event in rank if event["event"] == "_Commit.__call__"} == saves


def assert_whole(checkpoint: Path) -> None:
    report = verify_checkpoint(checkpoint)
    assert report.whole, [problem.message for problem in report.problems[:5]]
