"""Launches whose saves fail or are killed: the tracker names a whole checkpoint; the next launch goes on from it."""

from pathlib import Path

import pytest

from tests.launch.pretrain import Launched, launch, tracked_iteration
from tests.launch.variants import ASYNC, Variant, assert_whole, command_line, environment, trained

pytestmark = pytest.mark.slow

ASYNCHRONOUS = Variant("killed", (*ASYNC, "--use-distributed-optimizer"), interval=1)


def _run(checkpoints: Path, place: Path, kill: str = "") -> Launched:
    """A launch as a scheduler repeats it: it goes on from what is there, and saves to where that is."""
    options = {**environment("ours", ASYNCHRONOUS, place), "LAUNCH_KILL": kill}
    folders = ["--save", str(checkpoints), "--load", str(checkpoints), "--save-interval", "1"]
    arguments = [*command_line("ours", ASYNCHRONOUS), *folders]
    return launch("ours", 2, arguments, place, options, expected_exit=None if kill else 0)


def _assert_goes_on(run: Launched, launches: Path, after: int) -> None:
    reference, _ = trained("ours", ASYNCHRONOUS, launches)
    assert run.losses == {iteration: loss for iteration, loss in reference.losses.items() if iteration > after}


def _iterations(checkpoints: Path) -> dict[int, Path]:
    return {int(path.name.removeprefix("iter_")): path for path in checkpoints.glob("iter_*")}


@pytest.mark.parametrize(
    ("kill", "published"),
    [
        ("1:TorchDistSaveStrategy.async_save:4", False),
        ("1:_Commit.__call__:4", True),
    ],
)
def test_a_rank_killed_in_an_async_save(kill: str, published: bool, launches: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    killed = _run(checkpoints, tmp_path / "killed", kill)
    assert "SIGKILL" in killed.log
    tracked = tracked_iteration(checkpoints)
    assert tracked is not None
    assert 1 <= tracked <= 4
    assert tracked < 4 or published
    assert_whole(checkpoints / f"iter_{tracked:07d}")
    for path in _iterations(checkpoints).values():
        if (path / ".metadata").exists():
            assert_whole(path)
    assert published == (checkpoints / "iter_0000004" / ".metadata").exists()

    again = _run(checkpoints, tmp_path / "again")
    assert f"at iteration {tracked}" in again.log
    _assert_goes_on(again, launches, after=tracked)
    assert tracked_iteration(checkpoints) == 6
    for path in _iterations(checkpoints).values():
        assert_whole(path)
