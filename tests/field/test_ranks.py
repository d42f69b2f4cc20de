"""Reports of what ranks hold differently and tell each other: formats of the optimizer's state, plans. Two ranks."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from mcore_ckpt import LoadOptions, certify
from tests.support.gloo_ranks import MEGATRON, StandingRanks, made, standing_ranks
from tests.support.models import DENSE, ModelShape, Parallel, build_training
from tests.support.shared_groups import fork_results_queue, share_groups
from tests.support.state_compare import differing, read_state, write_state
from tests.support.stock import stock_loads

pytestmark = stock_loads


@pytest.fixture(scope="module")
def ranks() -> Iterator[StandingRanks]:
    with standing_ranks(2, preload=MEGATRON) as standing:
        yield standing


def megatron(ours: bool) -> Any:
    warnings.simplefilter("ignore")  # of Megatron and torch about themselves
    import mcore_ckpt

    share_groups()
    mcore_ckpt.uninstall()
    if ours:
        mcore_ckpt.install()
    else:
        fork_results_queue()
    from megatron.core import dist_checkpointing

    return dist_checkpointing


# --- formats of the optimizer's state ---------------------------------------------------------------------------------


UNEVEN = replace(DENSE, vocabulary=4096, tied=True)  # the second rank's half lies in the embedding


def save_buckets(rank: int, directory: Path, shape: ModelShape, layout: Parallel, leaked: bool) -> None:
    training = build_training(shape, layout, seed=1)
    training.train(2)
    write_state(directory / "saved", rank, training.sharded_state_dict())
    state = training.sharded_state_dict(flat_buckets=True)
    for buckets in state["optimizer"]["param_state"][0].values() if leaked else ():
        for parameter in (one for bucket in buckets for one in bucket):
            parameter["step"] = 2  # which is common state: of rank 0 alone, a list as long as that rank has parameters
    megatron(True).save(state, made(directory / "checkpoint"))


def load_buckets(rank: int, directory: Path, shape: ModelShape, layout: Parallel, ours: bool) -> str:
    """The error, if there is one. Where one rank alone raises it, the other would wait for it, and does not begin."""
    dist_checkpointing = megatron(ours)
    training = build_training(shape, layout, seed=9)
    wanted = training.sharded_state_dict(is_loading=True, flat_buckets=True)
    if shape == UNEVEN and not ours and rank == 0:
        return ""
    try:
        training.load(dist_checkpointing.load(wanted, str(directory / "checkpoint"), validate_access_integrity=False))
    except (ValueError, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"
    write_state(directory / "loaded", rank, training.sharded_state_dict())
    return ""


@pytest.mark.field("radixark/Megatron-LM#66", "absent")
@pytest.mark.field("modelscope/ms-swift#8240", "absent")
def test_ranks_with_other_numbers_of_parameters_cannot_resume(ranks: StandingRanks, tmp_path: Path) -> None:
    """With experts, or an embedding much larger than the norms."""
    ranks.values(save_buckets, tmp_path, UNEVEN, Parallel(), True)
    _, said = ranks.values(load_buckets, tmp_path, UNEVEN, Parallel(), False)
    assert "ValueError: Cannot merge two lists with different lengths" in said
    assert ranks.values(load_buckets, tmp_path, UNEVEN, Parallel(), True) == ["", ""]
    assert differing(read_state(tmp_path / "saved"), read_state(tmp_path / "loaded")) == []


@pytest.mark.field("NVIDIA/Megatron-LM#1517", "absent")
def test_a_default_save_cannot_resume_under_other_sizes(ranks: StandingRanks, tmp_path: Path) -> None:
    ranks.values(save_buckets, tmp_path, DENSE, Parallel(tensor=2), False)
    assert all(
        "hape mismatch" in said for said in ranks.values(load_buckets, tmp_path, DENSE, Parallel(pipeline=2), False)
    )
    assert ranks.values(load_buckets, tmp_path, DENSE, Parallel(pipeline=2), True) == ["", ""]
    assert differing(read_state(tmp_path / "saved"), read_state(tmp_path / "loaded")) == []


def save_by_default(rank: int, path: Path, ours: bool) -> str:
    dist_checkpointing = megatron(ours)
    training = build_training(DENSE, Parallel(), seed=1)
    training.train(1)
    model = training.model[0].module.sharded_state_dict()
    with pytest.raises(dist_checkpointing.core.CheckpointingException) as caught:
        dist_checkpointing.save({"optimizer": training.optimizer.sharded_state_dict(model)}, made(path))
    return str(caught.value)


@pytest.mark.field("areal-project/AReaL#1341", "present")
def test_a_save_in_the_cores_default_format_is_refused(ranks: StandingRanks, tmp_path: Path) -> None:
    """Megatron-Core refuses what its own function gives, before a strategy is called."""
    for ours in (False, True):
        for said in ranks.values(save_by_default, tmp_path / str(ours), ours):
            assert "flattened_range is not supported" in said


# --- what lies beside it ----------------------------------------------------------------------------------------------


def save_with_loader(rank: int, path: Path) -> None:
    dist_checkpointing = megatron(True)
    training = build_training(DENSE, Parallel(), seed=1)
    training.train(1)
    dist_checkpointing.save(training.sharded_state_dict(), made(path))
    torch.save({"position": 100 + rank}, Path(made(path / "energon")) / f"train_dataloader_dprank{rank:03d}.pt")


def resume_with_loader(rank: int, path: Path, ours: bool) -> tuple[int, str]:
    """Of one data-parallel rank, as Energon's loader does it."""
    dist_checkpointing = megatron(ours)
    training = build_training(DENSE, Parallel(tensor=2), seed=9)
    training.load(dist_checkpointing.load(training.sharded_state_dict(is_loading=True), str(path)))
    position = torch.load(path / "energon" / "train_dataloader_dprank000.pt")["position"]
    found = certify(training.sharded_state_dict, path, training.optimizer, options=LoadOptions(certify="warn"))
    return position, str(found)


@pytest.mark.field("NVIDIA-NeMo/Megatron-Bridge#5637", "present", silent=True)
def test_with_fewer_data_parallel_ranks_positions_in_the_data_are_lost(ranks: StandingRanks, tmp_path: Path) -> None:
    """A folder next to the data files belongs to no index: the certificate is of the state dict."""
    ranks.values(save_with_loader, tmp_path / "c")
    for ours in (False, True):
        for position, said in ranks.values(resume_with_loader, tmp_path / "c", ours):
            assert position == 100
            assert "as saved: " in said
            assert "NOT" not in said
            assert "energon" not in said


# --- what ranks tell each other ---------------------------------------------------------------------------------------


def save_three_times(rank: int, path: Path, ours: bool) -> tuple[int, int]:
    """Bytes of plans and results that this rank has sent in the last of three saves: over the job's own group, which
    says that NCCL serves it, and over others.
    """
    dist_checkpointing = megatron(ours)
    from torch.distributed import distributed_c10d as c10d

    from mcore_ckpt.core.ranks import RankGroup

    sent = {True: 0, False: 0}
    pack, send, backend = c10d._object_to_tensor, RankGroup._send, dist.get_backend_config

    def packed(value: Any, device: Any, group: Any) -> Any:
        made = pack(value, device, group)
        sent[group in (None, dist.group.WORLD)] += int(made[1])
        return made

    def sends(self: Any, to: int, content: bytes, *more: Any) -> None:
        sent[self._group is dist.group.WORLD] += len(content)
        send(self, to, content, *more)

    shard = dist_checkpointing.ShardedTensor.from_rank_offsets
    state = {f"w{n}": shard(f"w{n}", torch.ones(4, 8), (0, rank, 2)) for n in range(500)}
    is_nccl = mock.patch.object(
        dist, "get_backend_config", lambda group=None: "cuda:nccl" if group is dist.group.WORLD else backend(group)
    )
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy

    strategy = get_default_save_sharded_strategy("torch_dist")
    strategy.use_cached_ckpt_structure = True
    with is_nccl, mock.patch.object(c10d, "_object_to_tensor", packed), mock.patch.object(RankGroup, "_send", sends):
        for number in range(3):
            sent.update({True: 0, False: 0})
            dist_checkpointing.save(state, made(path / str(number)), strategy)
    return sent[True], sent[False]


@pytest.mark.field("radixark/Megatron-LM#62", "absent")
@pytest.mark.field("NVIDIA/nvidia-resiliency-ext#359", "absent")
def test_plans_travel_over_nccl_at_each_save(ranks: StandingRanks, tmp_path: Path) -> None:
    """Through memory of the GPUs, which the coordinator keeps."""
    stock, ours = (ranks.values(save_three_times, tmp_path / str(ours), ours) for ours in (False, True))
    for (of_job, _), (none, by_gloo) in zip(stock, ours, strict=True):
        assert none == 0
        assert by_gloo < of_job / 10
