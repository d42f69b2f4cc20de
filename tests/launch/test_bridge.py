"""The real `pretrain()` of Megatron-Bridge on two ranks, with the checkpoint manager named in its configuration.

`make test-bridge` (Python 3.12) installs what it needs. `tests/megatron/test_bridge.py` has a stand-in, with damage and
failed saves.
"""

import os
import re
from pathlib import Path

import pytest

from mcore_ckpt.tools.diff import diff_checkpoints
from tests.launch.pretrain import ROOT, SITE, Launched, launch, tracked_iteration
from tests.launch.variants import assert_whole

_PACKAGES = os.environ.get("MEGATRON_BRIDGE_PATH", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not _PACKAGES, reason="MEGATRON_BRIDGE_PATH names no folder with Megatron-Bridge"),
]
_MANAGER = "custom_manager_class=mcore_ckpt.bridge.CheckpointManager"
_SCRIPT = Path(__file__).with_name("bridge_pretrain.py")


def _pretrain(side: str, run: Path, place: Path, *fields: str, iterations: int = 6, **how: object) -> Launched:
    """Train to that iteration, saving every two. `fields` of Bridge's `CheckpointConfig`."""
    path = {"PYTHONPATH": f"{SITE}:{_PACKAGES}:{ROOT}", **how.pop("environment", {})}  # type: ignore[dict-item]
    arguments = [str(run), str(iterations), *fields]
    return launch(side, 2, arguments, place, path, tree=_SCRIPT, **how)  # type: ignore[arg-type]


def _losses(run: Launched) -> dict[int, str]:
    return {int(iteration): loss for iteration, loss in re.findall(r"iteration +(\d+)/.*lm loss: ([^ ]+)", run.log)}


@pytest.fixture(scope="module")
def never_ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], Path]:
    """Losses and checkpoints of a job of stock Bridge."""
    place = tmp_path_factory.mktemp("stock")
    losses = _losses(_pretrain("stock", place / "run", place / "log"))
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    return losses, place / "run"


def _assert_same_end(run: Path, other: Path) -> None:
    checkpoint = run / "iter_0000006"
    assert_whole(checkpoint)
    assert tracked_iteration(run) == 6
    assert diff_checkpoints(checkpoint, other / "iter_0000006").identical


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_killed_in_mid_save_and_resumed(
    is_async: bool, never_ended: tuple[dict[int, str], Path], tmp_path: Path
) -> None:
    losses, stock = never_ended
    run, fields = tmp_path / "run", (_MANAGER, f"async_save={str(is_async).lower()}", "most_recent_k=2")
    event = "TorchDistSaveStrategy." + ("async_save" if is_async else "save")
    kill = {"LAUNCH_KILL": f"1:{event}:4"}
    killed = _pretrain("ours", run, tmp_path / "killed", *fields, environment=kill, expected_exit=None)
    assert "SIGKILL" in killed.log
    tracked = tracked_iteration(run)
    assert tracked in (2, None if is_async else 2)
    again = _pretrain("ours", run, tmp_path / "again", *fields)
    assert _losses(again) == {at: loss for at, loss in losses.items() if at > (tracked or 0)}
    _assert_same_end(run, stock)
    assert sorted(path.name for path in run.glob("iter_*")) == ["iter_0000004", "iter_0000006"]


def test_each_resumes_what_the_other_has_saved(never_ended: tuple[dict[int, str], Path], tmp_path: Path) -> None:
    losses, stock = never_ended
    for first, second in (("stock", "ours"), ("ours", "stock")):
        run = tmp_path / f"{first}-{second}"
        fields = {"stock": (), "ours": (_MANAGER, "async_save=true")}
        _pretrain(first, run, tmp_path / f"{run.name}-first", *fields[first], iterations=4)
        resumed = _pretrain(second, run, tmp_path / f"{run.name}-second", *fields[second])
        assert _losses(resumed) == {at: loss for at, loss in losses.items() if at > 4}
        _assert_same_end(run, stock)
