"""One fingerprint of one model: in memory under any layout, stored, resharded, exported and imported again."""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt import (
    checkpoint_fingerprint,
    diff_checkpoints,
    export_checkpoint,
    import_checkpoint,
    open_checkpoint,
    reshard_checkpoint,
)
from mcore_ckpt.commands.cli import main
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.tools.diff import model_and_optimizer
from tests.support.gloo_ranks import run_pretending_ranks, run_ranks
from tests.support.hf_models import SMALL, HfCase, make_hf_model
from tests.support.models import GATED, Parallel, build_training
from tests.support.shared_groups import share_groups

Found = dict[str, Any]
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def _prepared() -> Any:
    warnings.simplefilter("ignore")  # of Megatron and torch about themselves
    from tests.support.cpu_megatron import pretend_cuda

    pretend_cuda()
    share_groups()
    from megatron.core import dist_checkpointing

    import mcore_ckpt

    mcore_ckpt.install()
    return dist_checkpointing


def _taken(state: Any) -> Any:
    """The fingerprint with names, which is the same without."""
    from mcore_ckpt import fingerprint

    named, total = fingerprint(state, names=True), fingerprint(state)
    assert named.total == total.total
    assert total.tensors is None
    return named


def train_and_save(rank: int, path: Path) -> Any:
    dist_checkpointing = _prepared()
    training = build_training(GATED, Parallel(), seed=1)
    training.train(2)
    before = _taken(training.sharded_state_dict())
    dist_checkpointing.save(training.sharded_state_dict(), str(path))
    assert _taken(training.sharded_state_dict()).total == before.total
    training.train(1)
    assert _taken(training.sharded_state_dict()).total != before.total
    return before


def load_and_take(rank: int, path: Path, layouts: dict[str, Parallel]) -> dict[str, Found]:
    """The fingerprint after a load under each layout; and what is said of faults that only the last rank has."""
    dist_checkpointing = _prepared()
    last = torch.distributed.get_world_size() - 1
    found = {}
    for name, layout in layouts.items():
        training = build_training(GATED, layout, seed=9)
        training.load(dist_checkpointing.load(training.sharded_state_dict(is_loading=True), str(path)))
        loaded = _taken(training.sharded_state_dict())
        found[name] = {"loaded": loaded}
        parameters = dict(training.model[0].module.named_parameters())
        key = next(key for key in parameters if key.endswith("linear_fc2.weight"))
        weight, norm = parameters[key], parameters[key.replace("mlp.linear_fc2.weight", "input_layernorm.weight")]
        if rank == last:
            weight.data.view(-1)[3].mul_(-1)  # one bit
        found[name]["flipped"] = loaded.differing(_taken(training.sharded_state_dict())), key
        if rank == last:
            weight.data.view(-1)[3].mul_(-1)
        if layout.tensor == 2:
            parts = [torch.empty_like(weight.data, dtype=torch.float32) for _ in range(2)]
            torch.distributed.all_gather(parts, weight.data.float())
            mine = weight.data.clone()
            weight.data.copy_(parts[1 - rank])
            found[name]["swapped"] = loaded.differing(_taken(training.sharded_state_dict()))
            weight.data.copy_(mine)
        if layout.pipeline == 1:  # all ranks have a replica
            held = norm.data.clone()
            if rank == last:
                norm.data[0] += 1
            diverged = _taken(training.sharded_state_dict())
            found[name]["diverged"] = diverged.total == loaded.total, [str(one) for one in diverged.diverged]
            norm.data.copy_(held)
        assert _taken(training.sharded_state_dict()) == loaded
    return found


def crcs_of(state: Any) -> dict[str, int]:
    return {key: tensor.crc32 for key, tensor in state.tensors.items()}


def test_a_gpt_has_one_fingerprint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    (trained,) = run_pretending_ranks(train_and_save, 1, saved)
    stored = checkpoint_fingerprint(saved)
    assert stored == trained
    assert main(["verify", str(saved), "--state", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    model, optimizer = model_and_optimizer(stored)
    totals = {"total": stored.total, "model": model.total, "optimizer": optimizer.total}
    assert document["state"] == {**totals, "not_as_saved": []}
    assert main(["verify", str(saved), "--expect-state", model.total.upper()]) == 0
    assert main(["verify", str(saved), "--expect-state", "0" * 32]) == 1

    resharded = {}
    for layout in (Parallel(tensor=2), Parallel(pipeline=2)):
        target = resharded[layout] = tmp_path / f"{layout}"
        reshard_checkpoint(saved, target, tp=layout.tensor, pp=layout.pipeline)
        assert checkpoint_fingerprint(target) == stored
        assert read_index(target).fingerprints == crcs_of(stored)  # carried, all of them
        report = diff_checkpoints(saved, target, state=True)
        assert report.identical
        assert report.read_bytes == 0

    layouts = {"dp": Parallel(), "tp": Parallel(tensor=2), "pp": Parallel(pipeline=2)}
    source = resharded[Parallel(tensor=2)]
    for by_rank in run_pretending_ranks(load_and_take, 2, source, layouts, deadline_s=300):
        for name, found in by_rank.items():
            assert found["loaded"] == stored, name
            _check_faults(found, name)


def _check_faults(found: Found, name: str) -> None:
    flipped, key = found["flipped"]
    if name == "dp":  # the last rank's replica is not the one that is saved
        assert flipped == []
    elif name == "tp":
        assert [one.rpartition("layers.")[2].rpartition("mlp")[2] for one in flipped] == [".linear_fc2.weight"], key
    else:
        assert len(flipped) == 1
        assert flipped[0].endswith("mlp.linear_fc2.weight")
    if "swapped" in found:
        assert len(found["swapped"]) == 1
        assert found["swapped"][0].endswith("mlp.linear_fc2.weight")
    if "diverged" in found:
        same_total, named = found["diverged"]
        assert same_total
        (said,) = named
        assert "layer_norm_weight: " in said or "layernorm.weight: " in said
        assert ": ranks 1 hold other bits than rank 0 in the slice" in said


@dataclass(frozen=True)
class Load:
    """A load in which the last rank may put bytes elsewhere, behind Megatron's wrapper or not."""

    layout: Parallel
    prove: str = "always"
    wrapped: bool = False
    fault: str = "none"


def load_proven(rank: int, path: Path, loads: list[Load]) -> list[tuple[list[str], str | None]]:
    """What this rank logs of each proof, and its error."""
    dist_checkpointing = _prepared()
    return [_load_proven(rank, path, dist_checkpointing, load) for load in loads]


def _load_proven(rank: int, path: Path, dist_checkpointing: Any, case: Load) -> tuple[list[str], str | None]:
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    from mcore_ckpt import LoadError, LoadOptions, TorchDistLoadStrategy
    from mcore_ckpt.state.shards import leaves

    class Faulty(TorchDistLoadStrategy):  # type: ignore[misc]
        def load(self, state: Any, *args: Any, **kwargs: Any) -> Any:
            loaded = super().load(state, *args, **kwargs)
            fc2 = "decoder.layers.mlp.linear_fc2.weight"
            mine = [leaf.data.detach() for leaf in leaves(state) if leaf.key == fc2]
            if rank == torch.distributed.get_world_size() - 1 and case.fault == "flip":
                mine[0].view(-1)[7].mul_(-1)
            if rank == torch.distributed.get_world_size() - 1 and case.fault == "swap":
                first, second = (one.clone() for one in mine[:2])
                mine[0].copy_(second)
                mine[1].copy_(first)
            return loaded

    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mcore_ckpt")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    training = build_training(GATED, case.layout, seed=9)
    strategy: Any = Faulty(options=LoadOptions(prove=case.prove))  # type: ignore[arg-type]
    if case.wrapped:
        strategy = FullyParallelLoadStrategyWrapper(strategy)
    said = None
    try:
        training.load(dist_checkpointing.load(training.sharded_state_dict(is_loading=True), str(path), strategy))
    except LoadError as error:
        said = str(error)
    logger.removeHandler(handler)
    return [line for line in lines if "state proven" in line or "not proven" in line], said


def test_a_load_is_proven_or_says_which_tensors_differ(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    run_pretending_ranks(train_and_save, 1, tmp_path / "saved")
    source = tmp_path / "tp2"
    reshard_checkpoint(tmp_path / "saved", source, tp=2, pp=1)
    total = checkpoint_fingerprint(source).total
    tp, pp = Parallel(tensor=2), Parallel(pipeline=2)
    sound = [Load(tp), Load(pp, wrapped=True), Load(Parallel(), wrapped=True)]
    others = [Load(tp, "sample"), Load(tp, "off", fault="flip")]
    faulty = [Load(tp, fault="flip"), Load(pp, fault="flip"), Load(pp, fault="swap")]
    first, second = run_pretending_ranks(load_proven, 2, source, [*sound, *others, *faulty], deadline_s=300)
    for _ in sound:
        assert first.pop(0) == ([f"{source}: state proven: {total} on 2 ranks"], None)
        assert second.pop(0) == ([], None)
    ((alone, _),) = run_pretending_ranks(load_proven, 1, source, [Load(Parallel())], deadline_s=300)[0]
    assert alone == [f"{source}: state proven: {total} on 1 rank"]
    ([line], said), off = first[:2]
    # Which tensors depends on the save: of 48 it may be none.
    assert line.endswith("(one tensor in 16) on 2 ranks")
    assert total not in line
    assert said is None
    assert off == second[1] == ([], None)
    for lines, said in (*first[2:], *second[2:]):
        assert lines == []
        assert "1 of 48 tensors in memory are not what is stored: decoder.layers.mlp.linear_fc2.weight" in str(said)


def hf_in_memory(rank: int, path: Path, parallel: Parallel) -> Any:
    dist_checkpointing = _prepared()
    from tests.support.hf_models import build_from_arguments

    model = build_from_arguments(dist_checkpointing.load_common_state_dict(str(path))["args"], parallel)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(path))
    model.load_state_dict(loaded["model"])
    return _taken(model.sharded_state_dict())


def fsdp_in_memory(rank: int, tensors: dict[str, torch.Tensor]) -> Any:
    """The same tensors as parameters that FSDP2 divides among the ranks."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = torch.nn.ParameterDict({key.replace(".", "/"): torch.nn.Parameter(one) for key, one in tensors.items()})
    fully_shard(model, mesh=mesh)
    return _taken({key.replace("/", "."): one for key, one in get_model_state_dict(model).items()})


def test_one_model_has_one_fingerprint_wherever_it_is(tmp_path: Path) -> None:
    """Dense layers and experts: under each division, FSDP2 among them, resharded, exported and imported."""
    case = HfCase("mixtral", "MixtralConfig", {**SMALL, "vocab_size": 512, "num_key_value_heads": 4, **_EXPERTS})
    make_hf_model(case, tmp_path / "hf")
    imported: dict[str, Any] = {"kind": "hf", "transformer_impl": "local"}
    import_checkpoint(tmp_path / "hf", tmp_path / "saved", **imported)
    stored = checkpoint_fingerprint(tmp_path / "saved")
    for world, parallel in (
        (2, Parallel(tensor=2)),
        (4, Parallel(pipeline=2, expert=2)),
    ):
        for found in run_pretending_ranks(hf_in_memory, world, tmp_path / "saved", parallel):
            assert found == stored, parallel
    with open_checkpoint(tmp_path / "saved") as checkpoint:
        tensors = {key: checkpoint[key][...].clone() for key in checkpoint.tensors}
    for found in run_ranks(fsdp_in_memory, 4, tensors):
        assert found == stored
    resharded = {}
    for name, layout in {"tp4": {"tp": 4}, "pp2 ep2": {"pp": 2, "ep": 2}}.items():
        resharded[name] = tmp_path / name
        reshard_checkpoint(tmp_path / "saved", resharded[name], **{"tp": 1, "pp": 1, **layout})
        export_checkpoint(resharded[name], tmp_path / f"{name}-hf", to="hf")
        resharded[f"{name}-back"] = tmp_path / f"{name}-back"
        import_checkpoint(tmp_path / f"{name}-hf", resharded[f"{name}-back"], **imported, **layout)
    for name, path in resharded.items():
        assert checkpoint_fingerprint(path) == stored, name
        assert read_index(path).fingerprints == crcs_of(stored), name
