"""The checkpoint code of frameworks, from their own packages, on two gloo ranks: with mcore_ckpt and without.

`make test-frameworks` installs what it needs. `test_bridge.py` of `tests/launch` has Megatron-Bridge.
"""

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from mcore_ckpt.tools.diff import diff_checkpoints
from tests.launch.pretrain import Launched, Side, launch
from tests.launch.variants import assert_whole

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(1200)]
_HAS_312 = sys.version_info >= (3, 12)
_JOB = Path(__file__).with_name("job.py")


@dataclass(frozen=True)
class Framework:
    """How a framework saves.

    Attributes:
        name: of its module `with_*.py`.
        packages: folders of its packages.
        parts: the directories of a checkpoint, by its step.
        killed_at: part of the path of the directory whose commit rank 1 does not survive, of step 4.
        asynchronous: fields for saves that are; None: under this Megatron it fails at them, without mcore_ckpt, too.
        fields: further ones of all jobs.
        after_kill: further ones of the job that resumes when an asynchronous save was killed.
        certificates: with how many a load ends.
        brings_megatron: its first folder has the Megatron-Core that it asks for.
    """

    name: str
    packages: Mapping[Side, tuple[str, ...]]
    parts: tuple[str, ...]
    killed_at: str
    asynchronous: tuple[str, ...] | None = ("async_save=true",)
    fields: Mapping[Side, tuple[str, ...]] = field(default_factory=dict, hash=False)
    after_kill: tuple[str, ...] = ()
    certificates: int = 1
    brings_megatron: bool = False

    def __str__(self) -> str:
        return self.name

    def train(
        self,
        side: Side,
        run: Path,
        place: Path,
        *fields: str,
        steps: int = 6,
        environment: Mapping[str, str] | None = None,
        expected_exit: int | None = 0,
    ) -> Launched:
        """Train to that step, with fields of `job.py` and of the framework."""
        folders = [Path(os.environ["FRAMEWORKS_PATH"]) / package for package in self.packages[side]]
        assert all(folder.is_dir() for folder in folders), f"run `make test-frameworks`: {folders} must be there"
        fields += self.fields.get(side, ())
        return launch(
            side,
            2,
            [self.name, str(run), str(steps), *fields],
            place,
            {
                "FRAMEWORK_PATH": ":".join(map(str, folders)),
                **({"MEGATRON_LM_PATH": str(folders[0])} if self.brings_megatron else {}),
                "PYTORCH_JIT": "0",  # which compiles no function of a module that poses as CUDA's
                "MCORE_CKPT_CERTIFY": "raise",
                **(environment or {}),
            },
            expected_exit,
            tree=_JOB,
        )

    def checkpoints(self, run: Path, step: int) -> list[Path]:
        """The directories of the checkpoint of that step."""
        return [run / part.format(step) for part in self.parts]


def _of_both(*one: str) -> Mapping[Side, tuple[str, ...]]:
    return {"stock": one, "ours": one}


VERL = Framework(
    "verl",
    _of_both("verl"),
    tuple(f"global_step_{{}}/actor/{part}/dist_ckpt" for part in ("model", "optimizer", "extra")),
    killed_at="global_step_4/actor/optimizer",
    # It imports the queue of `strategies.base`, which Megatron from 0.17 on, of Python 3.12, has not.
    asynchronous=None if _HAS_312 else ("async_save=true",),
    fields={"stock": ("one_by_one=true",)},  # a load of all at once fails there
    certificates=3,
)
SWIFT = Framework(
    "swift",
    _of_both("ms-swift"),
    ("checkpoint-{0}/iter_000000{0}",),
    killed_at="iter_0000004",
)
LORA = replace(SWIFT, name="lora")
TITAN = Framework(
    "titan",
    _of_both("torchtitan"),
    ("checkpoint/step-{}",),
    killed_at="checkpoint/step-4",
    asynchronous=("mode=async",),
)
SKYRL = Framework(
    "skyrl",
    {"stock": ("skyrl", "nvrx"), "ours": ("skyrl",)},
    ("global_step_{}/policy",),
    killed_at="global_step_4",
    fields=_of_both("dropout=0"),  # it saves no states of the generators of parallel ranks
    after_kill=("resume=2",),  # its tracker file names a save that was scheduled
)
AREAL = Framework("areal", _of_both("areal"), ("step_{}",), killed_at="step_4", certificates=0, brings_megatron=True)
FRAMEWORKS = (VERL, SWIFT, LORA, TITAN, *((SKYRL, AREAL) if _HAS_312 else ()))  # the least that these two take


def _begun_at(job: Launched) -> int:
    (step,) = set(re.findall(r"begins at step (\d+)", job.log))
    return int(step)


def _certified(job: Launched) -> list[str]:
    """What was compared, by each certificate."""
    found = re.findall(r"resumed from \S+ as saved: (\d+ tensors, \d+ objects)", job.log)
    assert "0 tensors, 0 objects" not in found
    return found


@dataclass(frozen=True)
class NeverEnded:
    """Losses and checkpoints of a job of the framework with stock Megatron."""

    framework: Framework
    losses: dict[int, float]
    run: Path

    def assert_resumed(self, job: Launched, run: Path, began: int) -> None:
        """A job has resumed at that step, and its last checkpoint is, bit for bit, that of the job that never ended."""
        assert _begun_at(job) == began
        assert job.losses == {step: loss for step, loss in self.losses.items() if step > began}
        checkpoints = self.framework.checkpoints
        for checkpoint, other in zip(checkpoints(run, 6), checkpoints(self.run, 6), strict=True):
            assert_whole(checkpoint)
            report = diff_checkpoints(checkpoint, other)
            if {one.name for one in report.common_values} == {"async_save"}:  # of the arguments, which ms-swift saves
                objects = tuple(key for key in report.objects_differ if not key.startswith("common_state/"))
                report = replace(report, common_differs=(), common_values=(), objects_differ=objects)
            assert report.identical


@pytest.fixture(scope="module", params=FRAMEWORKS, ids=str)
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NeverEnded:
    place = tmp_path_factory.mktemp("stock")
    job = request.param.train("stock", place / "run", place / "log")
    assert sorted(job.losses) == [1, 2, 3, 4, 5, 6]
    return NeverEnded(request.param, job.losses, place / "run")


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "asynchronous"])
def test_killed_in_mid_save_and_resumed(is_async: bool, stock: NeverEnded, tmp_path: Path) -> None:
    framework, run = stock.framework, tmp_path / "run"
    fields = framework.asynchronous if is_async else ()
    if fields is None:
        failed = framework.train("stock", run, tmp_path / "failed", "async_save=true", expected_exit=None)
        assert "from megatron.core.dist_checkpointing.strategies.base import async_calls" in failed.log
        return
    killed = framework.train(
        "ours", run, tmp_path / "killed", *fields, f"die={framework.killed_at}", expected_exit=None
    )
    assert "SIGKILL" in killed.log
    again = framework.train("ours", run, tmp_path / "again", *fields, *(framework.after_kill if is_async else ()))
    stock.assert_resumed(again, run, 2)
    assert len(_certified(again)) == framework.certificates


def test_each_resumes_what_the_other_has_saved(stock: NeverEnded, tmp_path: Path) -> None:
    framework = stock.framework
    sides: tuple[Side, Side] = ("stock", "ours")
    for first, second in (sides, sides[::-1]):
        run = tmp_path / f"{first}-{second}"
        fields = framework.asynchronous or () if first == "ours" else ()
        framework.train(first, run, tmp_path / f"{run.name}-first", *fields, steps=4)
        resumed = framework.train(second, run, tmp_path / f"{run.name}-second")
        stock.assert_resumed(resumed, run, 4)


def test_verl_resumes_with_another_tensor_parallelism_without_random_states(tmp_path: Path) -> None:
    """The optimizer's state is stored as verl stores it unless told otherwise, which stock cannot divide again."""
    run, without_random_states = tmp_path / "run", "load=[model,optimizer]"
    VERL.train("ours", run, tmp_path / "saved", steps=2)
    refused = VERL.train("ours", run, tmp_path / "refused", "tensor=2", steps=4, expected_exit=None)
    assert re.search("MissingKeyError: .*rng_state.*verl: no `extra` in load_contents", refused.log)
    resumed = VERL.train("ours", run, tmp_path / "resumed", "tensor=2", without_random_states, steps=4)
    assert _begun_at(resumed) == 2


@pytest.mark.parametrize(
    ("framework", "fields"),
    [(SWIFT, ("fully_reshardable=true",)), *([(SKYRL, ())] if _HAS_312 else [])],
    ids=str,
)
def test_resumes_with_another_tensor_parallelism(framework: Framework, fields: tuple[str, ...], tmp_path: Path) -> None:
    """ms-swift refuses other checkpoints than `fully_reshardable` ones by itself."""
    run = tmp_path / "run"
    framework.train("ours", run, tmp_path / "saved", *fields, steps=2)
    resumed = framework.train("ours", run, tmp_path / "resumed", *fields, "tensor=2", steps=4)
    assert _begun_at(resumed) == 2
    assert len(_certified(resumed)) == 1


def test_a_base_that_swift_loads_below_adapters_for_one_data_parallel_rank_alone_is_named(tmp_path: Path) -> None:
    """Of what adapters lie on, ms-swift 4.6.0 drops what another rank has read for this one; stock says nothing."""
    SWIFT.train("ours", tmp_path / "base", tmp_path / "saved", steps=2)
    base = f"base={tmp_path}/base/checkpoint-2"
    refused = LORA.train("ours", tmp_path / "refused", tmp_path / "two", base, steps=1, expected_exit=None)
    (differences,) = set(re.findall(r"NOT as saved: .*", refused.log))
    assert {*re.findall(r"tensor \S+?([a-z_]+)\.\w+\[.*? on rank (\d)", differences)} == {
        ("linear_proj", "0"),
        ("linear_proj", "1"),
    }
    loaded = LORA.train("ours", tmp_path / "loaded", tmp_path / "one", base, "tensor=2", steps=1)
    assert len(_certified(loaded)) == 1


# Where verl has asynchronous saves.
_ASYNCHRONOUS = pytest.mark.parametrize("stock", [VERL if VERL.asynchronous else SWIFT], ids=str, indirect=True)


@_ASYNCHRONOUS
def test_saves_that_are_finalized_late_are_published_then(stock: NeverEnded, tmp_path: Path) -> None:
    """Those of verl are three requests each, all of which are in flight until then."""
    framework, run = stock.framework, tmp_path / "run"
    job = framework.train("ours", run, tmp_path / "log", *(framework.asynchronous or ()), "late=true")
    stock.assert_resumed(job, run, 0)
    for checkpoint in (*framework.checkpoints(run, 2), *framework.checkpoints(run, 4)):
        assert_whole(checkpoint)


@_ASYNCHRONOUS
def test_a_writer_process_that_is_killed_costs_one_save(stock: NeverEnded, tmp_path: Path) -> None:
    framework, run = stock.framework, tmp_path / "run"
    fields = framework.asynchronous or ()
    killed = framework.train("ours", run, tmp_path / "killed", *fields, "kill_writer=4", expected_exit=None)
    assert "WriterDiedError" in killed.log
    again = framework.train("ours", run, tmp_path / "again", *fields, *framework.after_kill)
    stock.assert_resumed(again, run, 2)
