"""`mcore_ckpt/bridge.py` with a stand-in for Megatron-Bridge that follows the protocol and the files of 0.6.2."""

import shutil
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mcore_ckpt
from tests.support.processes import forked, until

pytest.importorskip("megatron.core", reason="what Megatron-Bridge saves through")


class DefaultCheckpointManager:
    """Saves in the order of Bridge: checkpoint, train state, its copy, tracker, configuration."""

    def __init__(self, checkpoint_config: Any) -> None:
        self.checkpoint_config = checkpoint_config

    def save(self, ctx: Any, callback_manager: Any) -> None:
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing import ShardedTensor

        config = ctx.state.cfg.checkpoint
        assert config.most_recent_k == -1, "Bridge would remove checkpoints itself"
        directory = Path(config.save) / f"iter_{ctx.state.step:07d}"
        directory.mkdir(parents=True, exist_ok=True)
        weight = ShardedTensor.from_rank_offsets("w", torch.full((8,), float(ctx.state.step)))
        dist_checkpointing.save({"w": weight}, str(directory))
        torch.save({"step": ctx.state.step}, directory / "train_state.pt")
        shutil.copy(directory / "train_state.pt", Path(config.save) / "latest_train_state.pt")
        (Path(config.save) / "latest_checkpointed_iteration.txt").write_text(str(ctx.state.step))
        (directory / "run_config.yaml").write_text("model: {}\n")


def _manager(run: Path, **config: Any) -> tuple[Any, Any]:
    """A manager of this package, and a function that saves a step."""
    for name in ("megatron.bridge", "megatron.bridge.training", "megatron.bridge.training.checkpointing"):
        sys.modules[name] = module = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name)  # type: ignore[assignment]  (for `find_spec`)
    module.DefaultCheckpointManager = DefaultCheckpointManager  # type: ignore[attr-defined]
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from mcore_ckpt.bridge import CheckpointManager

    settings = SimpleNamespace(save=str(run), load=str(run), **{"most_recent_k": -1, **config})
    manager = CheckpointManager(settings)

    def save(step: int) -> None:
        manager.save(SimpleNamespace(state=SimpleNamespace(step=step, cfg=SimpleNamespace(checkpoint=settings))), None)

    return manager, save


def _named(run: Path) -> tuple[int, int]:
    tracked = int((run / "latest_checkpointed_iteration.txt").read_text())
    return tracked, torch.load(run / "latest_train_state.pt")["step"]


@forked
def test_what_a_crash_between_the_side_files_has_left_is_passed_over(tmp_path: Path) -> None:
    def break_it(left: str, run: Path) -> int:
        """Returns the iteration to go on from."""
        last = run / "iter_0000002"
        if left == "no configuration":
            (last / "run_config.yaml").unlink()
        elif left == "an empty train state":
            (last / "train_state.pt").write_bytes(b"")
        elif left == "no data":
            next(last.glob("*.distcp")).unlink()
        elif left == "a state of the next":
            (run / "latest_checkpointed_iteration.txt").write_text("1")
        else:
            (run / "latest_checkpointed_iteration.txt").write_text("")
            return 2
        return 1

    _, save = _manager(tmp_path / "saved")
    save(1)
    save(2)
    for left in ("no configuration", "an empty train state", "no data", "a state of the next", "a torn tracker"):
        run = tmp_path / left
        shutil.copytree(tmp_path / "saved", run)
        expected = break_it(left, run)
        for _ in range(2):
            _manager(run)
            assert _named(run) == (expected, expected), left


@forked
def test_older_checkpoints_are_removed_and_never_the_newest_complete_one(tmp_path: Path) -> None:
    kept = {"iter_0000003", "iter_0000004"}
    manager, save = _manager(tmp_path, most_recent_k=2)
    for step in range(1, 5):
        save(step)
    until(lambda: {path.name for path in tmp_path.glob("iter_*")} == kept, within_s=90.0)
    assert manager.checkpoint_config.most_recent_k == 2


@pytest.mark.parametrize("on_failure", ["warn", "raise"])
@forked
def test_training_survives_a_failed_save_where_that_is_asked_for(
    on_failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCORE_CKPT_ON_FAILURE", on_failure)
    manager, save = _manager(tmp_path)
    save(1)
    (tmp_path / "iter_0000002" / ".metadata").mkdir(parents=True)
    if on_failure == "warn":
        save(2)
        assert manager.failed_saves == 1
    else:
        with pytest.raises(mcore_ckpt.CheckpointError):
            save(2)
    assert _named(tmp_path) == (1, 1)
