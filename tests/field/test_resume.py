"""Reports of resumes: a job that goes on from another state than the one it saved, and says nothing.

Two data-parallel ranks train a small model, save it, and build the model again from another seed, as a restart does.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.gloo_ranks import MEGATRON, StandingRanks, made, standing_ranks
from tests.support.models import DENSE, ModelShape, Parallel
from tests.support.resumed_job import Job
from tests.support.stock import stock_loads

pytestmark = stock_loads

OFFLOADED = replace(DENSE, offload="fp32")
PRECISION_AWARE = replace(DENSE, offload="bfloat16")
LAYER_WISE = replace(DENSE, layer_wise=True)
STEP = 0.01  # the learning rate: about what a step of Adam changes a weight by
ENVIRONMENT = {"MCORE_CKPT_CERTIFY": "warn", "MCORE_CKPT_ALLOWED_CLASSES": "tests.support.cpu_megatron.FusedAdam"}


class Resumed(NamedTuple):
    """What one rank sees of a resume.

    Attributes:
        log: what it says.
        change: the most that the step after it changes a weight by.
        steps: that the optimizer says were taken, after the load.
        weights: a sum over the weights, after the load.
        moments: a sum over the optimizer's moments, after the load.
    """

    log: str
    change: float
    steps: int
    weights: float
    moments: float


@contextmanager
def offloading() -> Iterator[None]:
    """The optimizer that is offloaded takes all parameters for those of a GPU, and Transformer Engine for new."""
    from megatron.core.optimizer import optimizer_config
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def divide_as_on_gpu(self: Any, fraction: float) -> Any:
        given = {id(one) for group in self.param_groups for one in group["params"]}
        is_cuda = property(lambda tensor: id(tensor) in given)
        with (
            mock.patch.object(torch.Tensor, "is_cuda", is_cuda, create=True),
            mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        ):
            return divide(self, fraction)

    with (
        mock.patch.object(HybridDeviceOptimizer, "_get_sub_optimizer_param_groups", divide_as_on_gpu),
        mock.patch.object(optimizer_config, "is_te_min_version", return_value=True),
    ):
        yield


def job_of(shape: ModelShape, ours: bool, seed: int, **flags: Any) -> Job:
    import mcore_ckpt

    mcore_ckpt.uninstall()
    with offloading():
        return Job(shape, Parallel(), seed, ours, **flags)


def save(rank: int, path: Path, shape: ModelShape) -> None:
    job = job_of(shape, True, 1)
    made(path)
    with offloading():
        job.save(path)


def resume(
    rank: int, path: Path, shape: ModelShape, ours: bool, bug: Callable[[Job], Any], flags: dict[str, Any]
) -> Resumed:
    """`bug`: as long as it lasts, the job has it."""
    job = job_of(shape, ours, 9, **flags)
    with offloading(), bug(job):
        lines = job.resume(path)
        weights = {name: one.detach().float().clone() for name, one in job.training.model[0].named_parameters()}
        inner = [one.optimizer for one in job.training.optimizer.chained_optimizers]
        states = [state for one in inner for state in one.state.values()]
        counted = [one for one in (*states, *(group for one in inner for group in one.param_groups)) if "step" in one]
        seen = {
            "steps": int(counted[0]["step"]) if counted else 0,
            "weights": sum(float(one.abs().sum()) for one in weights.values()),
            "moments": sum(float(state["exp_avg"].abs().sum()) for state in states if "exp_avg" in state),
        }
        job.training.train(1)
    now = {name: one.detach().float() for name, one in job.training.model[0].named_parameters()}
    change = max(float((now[name] - one).abs().max()) for name, one in weights.items())
    return Resumed("".join(lines), change, **seen)


@pytest.fixture(scope="module")
def ranks() -> Iterator[StandingRanks]:
    with standing_ranks(2, preload=MEGATRON, environment=ENVIRONMENT) as standing:
        yield standing


@pytest.fixture(scope="module")
def saved(ranks: StandingRanks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelShape], Path]:
    run, done = tmp_path_factory.mktemp("run"), dict[ModelShape, Path]()

    def path_of(shape: ModelShape) -> Path:
        if shape not in done:
            done[shape] = run / str(len(done)) / "iter_0000002"
            ranks.values(save, done[shape], shape)
        return done[shape]

    return path_of


@pytest.fixture
def both(ranks: StandingRanks, saved: Any) -> Callable[..., tuple[list[Resumed], list[Resumed]]]:
    """Resumes of both ranks with stock, and with this package."""

    def resumed(shape: ModelShape, bug: Any = nullcontext, **flags: Any) -> Any:
        path = saved(shape)
        return tuple(ranks.values(resume, path, shape, ours, bug, flags) for ours in (False, True))

    return resumed


def test_a_resume_without_a_fault_is_as_saved(both: Any) -> None:
    stock, ours = both(DENSE)
    assert "resumed from iter_0000002 as saved: " in ours[0].log
    assert "not compared" not in ours[0].log
    assert not stock[0].log
    for one in (*stock, *ours):
        assert one.change < 2 * STEP
        assert one.steps == 2


def without_reload(job: Job) -> Any:
    return mock.patch.object(type(job.training.optimizer), "reload_model_params")


@pytest.mark.field("NovaSky-AI/SkyRL#2149", "found", silent=True)
def test_a_load_of_weights_alone_is_undone_by_the_first_step(both: Any) -> None:
    """The masters stay as they were initialized: the step copies them over what was loaded."""
    stock, ours = both(DENSE, without_reload, no_load_optim=True)
    assert all(one.change > 5 * STEP for one in stock)
    assert "NOT as saved: " in ours[0].log
    assert " weight output_layer.weight[element 0] on rank 0: expected " in ours[0].log
    assert " of its master, got " in ours[0].log


@pytest.mark.field("NVIDIA/Megatron-LM#5071", "found", silent=True)
@pytest.mark.field("NVIDIA-NeMo/RL#2371", "found", silent=True)
def test_an_offloaded_optimizer_fine_tunes_random_weights(both: Any) -> None:
    """Its copies on the host are never told of the weights that were loaded."""
    stock, ours = both(OFFLOADED, finetune=True)
    assert all(one.change > 5 * STEP for one in stock)
    assert "NOT as saved: " in ours[0].log
    assert " of its master, got " in ours[0].log


def keeps_masters(job: Job) -> Any:
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    take = HybridDeviceOptimizer._sync_hdo_state_to_sub_optimizers
    first: dict[Any, torch.Tensor] = {}

    def take_all_but_masters(self: Any) -> None:
        for weight, master in self.param_to_fp32_param.items():
            first.setdefault(weight, master.clone())
        take(self)
        for weight, master in self.param_to_fp32_param.items():
            master.copy_(first[weight])

    return mock.patch.object(HybridDeviceOptimizer, "_sync_hdo_state_to_sub_optimizers", take_all_but_masters)


@pytest.mark.field("NVIDIA/Megatron-LM#1842", "found", silent=True)
def test_an_offloaded_optimizer_steps_from_masters_that_were_not_loaded(both: Any) -> None:
    """The loss was 0.31 when it saved, and 10 when it resumed."""
    stock, ours = both(PRECISION_AWARE, keeps_masters)
    assert all(one.change > 5 * STEP for one in stock)
    assert "NOT as saved: " in ours[0].log
    assert " of its master, got " in ours[0].log


@pytest.mark.field("NovaSky-AI/SkyRL#1403", "found", silent=True)
@pytest.mark.field("radixark/Megatron-LM#69", "found", silent=True)
def test_an_offloaded_optimizer_counts_its_steps_anew(both: Any) -> None:
    """Adam corrects its moments as if they were those of a first step."""
    stock, ours = both(PRECISION_AWARE)
    assert all(one.steps == 1 for one in stock)
    assert re.search(r"NOT as saved: .*\['param_groups'\]\[0\]\['step'\] on rank 0: expected 2, got 1", ours[0].log)


@pytest.mark.field("NovaSky-AI/SkyRL#1401", "present")
def test_an_offloaded_optimizer_cannot_be_loaded(ranks: StandingRanks, saved: Any) -> None:
    """Megatron looks its FP32 masters up as if they were copies of something else, before anything is read."""
    for ours in (False, True):
        for one in ranks.call(resume, saved(OFFLOADED), OFFLOADED, ours, nullcontext, {}):
            assert isinstance(one.error, KeyError)


@contextmanager
def ungathered(job: Job) -> Iterator[None]:
    """Weights come from masters, which each rank has of its own parameters, and no rank gathers those of others."""
    optimizer = job.training.optimizer
    own = {id(one) for one in optimizer.dp_cp_params_list[dist.get_rank()]}
    others = [(one, one.detach().clone()) for one in job.training.model[0].parameters() if id(one) not in own]
    load_state_dict = optimizer.load_state_dict

    def load(state: Any) -> None:
        load_state_dict(state)
        for weight, before in others:
            weight.data.copy_(before)

    with mock.patch.object(optimizer, "load_state_dict", load):
        yield


@pytest.mark.field("NVIDIA/Megatron-LM#6920", "found", silent=True)
def test_ranks_of_a_layer_wise_optimizer_resume_different_models(both: Any) -> None:
    """With Muon. The loss curve looks normal."""
    (first, second), ours = both(LAYER_WISE, ungathered)
    assert first.weights != second.weights
    assert re.search(r"NOT as saved: .* tensor \S+\.weight\[.*\].* on rank \d: expected ", ours[0].log)


@contextmanager
def without_moments(job: Job) -> Iterator[None]:
    """The load asks for what an optimizer has that has taken no step."""
    (optimizer,) = job.training.optimizer.chained_optimizers
    describe = optimizer.sharded_state_dict

    def describe_as_for_a_save(model: Any, is_loading: bool = False, **named: Any) -> Any:
        return describe(model, **named)

    with mock.patch.object(optimizer, "sharded_state_dict", describe_as_for_a_save):
        yield


@pytest.mark.field("areal-project/AReaL#1468", "found", silent=True)
def test_a_load_drops_the_moments(both: Any) -> None:
    stock, ours = both(DENSE, without_moments)
    assert all(one.moments == 0 for one in stock)
    assert re.search(r"not compared: 2 tensors \(not requested: .*\.exp_avg, .*\.exp_avg_sq\)$", ours[0].log)
