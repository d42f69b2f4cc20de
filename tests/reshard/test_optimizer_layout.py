"""The optimizer's state in a layout that any launch loads: each element where its parameter is, and nothing guessed."""

import warnings
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex
from mcore_ckpt.format.metadata_read import read_index
from mcore_ckpt.format.metadata_write import encode_metadata
from mcore_ckpt.reshard import parameter_orders, rewriting
from mcore_ckpt.reshard.parameter_orders import FlatParameter, ParameterBox
from mcore_ckpt.reshard.reshard import reshard_checkpoint
from mcore_ckpt.tools.checkpoint import open_checkpoint
from mcore_ckpt.tools.verify import verify_checkpoint
from tests.support.command import output_of, refusal_of
from tests.support.model_like import read_all
from tests.support.processes import in_child
from tests.support.stored_layouts import StoredTensor, part, whole, write_checkpoint

STATES = ("param", "exp_avg", "exp_avg_sq")
TENSOR_RANKS = 2
GROUP = "optimizer.distributed.dp_group_idx_{}"
BUFFER = GROUP + ".gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_{}.{}"
SETTINGS = {"param_groups": [{"lr": 0.25, "betas": (0.9, 0.95), "step": 7, "wd_mult": 1.0}]}
# What an older job has left of each parameter, by buffer, dtypes and bucket.
LEAKED = {0: {(torch.bfloat16, torch.float32): [[{"step": 7}, {"step": 7}], [{"step": 7}]]}}
SCALER = {"scale": torch.full((1,), 512.0), "growth_tracker": 3}


def ordered(rank: int) -> list[tuple[FlatParameter, bool]]:
    """What a tensor parallel rank holds, in the order of its buffer, and whether a bucket ends behind it."""

    def parameter(name: str, is_copy: bool, *boxes: tuple[str, Box, int]) -> FlatParameter:
        found = tuple(ParameterBox(key, tuple(SHAPES[key]), box, first) for key, box, first in boxes)
        numel = sum(torch.Size(box.sizes).numel() for _, box, _ in boxes)
        return FlatParameter(name, numel, is_copy, found)

    rows = Box((0, 0), (7, 5)) if rank == 0 else Box((7, 0), (7, 5))
    gated = [
        parameter(
            f"layers.{layer}.fc1",
            False,
            ("layers.fc1", Box((layer, rank * 3, 0), (1, 3, 9)), 0),
            ("layers.fc1", Box((layer, 6 + rank * 3, 0), (1, 3, 9)), 27),
        )
        for layer in (1, 0)
    ]
    norm = parameter("norm", rank > 0, ("norm", Box((0,), (70,)), 0))
    return [
        (norm, False),
        (gated[0], True),
        (gated[1], False),
        (parameter("embedding", False, ("embedding", rows, 0)), True),
    ]


SHAPES = {"layers.fc1": torch.Size((2, 12, 9)), "norm": torch.Size((70,)), "embedding": torch.Size((14, 5))}


@dataclass(frozen=True)
class Saved:
    """A checkpoint with flat buckets, and what it is made of: tensors by state and key."""

    path: Path
    model: dict[str, torch.Tensor]
    states: dict[str, dict[str, torch.Tensor]]


def saved_with_buckets(path: Path, swap: bool = False) -> Saved:
    torch.manual_seed(3)
    states = {state: {key: torch.randn(shape) for key, shape in SHAPES.items()} for state in STATES}
    model = {key: tensor.bfloat16() for key, tensor in states["param"].items()}
    tensors = {key: whole(tensor) for key, tensor in model.items()}
    objects: dict[str, Any] = {}
    for rank in range(TENSOR_RANKS):
        buckets: list[dict[str, torch.Tensor]] = [{state: torch.zeros(0) for state in STATES}]
        rows = ordered(rank)
        if swap:  # two parameters of the same size
            (first, end), (second, other_end) = rows[1], rows[2]
            rows[1:3] = [(second, end), (first, other_end)]
        for parameter, ends in rows:
            for state in STATES:
                flat = buckets[-1][state]
                padding = torch.full((-len(flat) % 64,), 9.0)
                values = [part(states[state][box.key], box.box).reshape(-1) for box in parameter.boxes]
                buckets[-1][state] = torch.cat([flat, padding, *values])
            if ends:
                buckets.append({state: torch.zeros(0) for state in STATES})
        for number, bucket in enumerate(buckets[:-1]):
            for state, flat in bucket.items():
                # Chunks that hold a part of a parameter, parts of two, and some of the padding.
                cuts = sorted({0, 50, 64, 100, 150, 182, len(flat)} & set(range(len(flat) + 1)))
                boxes = [Box((a,), (b - a,)) for a, b in pairwise(cuts)]
                tensors[BUFFER.format(rank, number, state)] = StoredTensor(flat, boxes)
        sizes = {"per_bucket_numel": [], "per_bucket_numel_unpadded": []}
        for name, value in {"optimizer": SETTINGS, "grad_scaler": SCALER, **sizes}.items():
            objects[f"{GROUP.format(rank)}.{name}/shard_0_1"] = [value]
    objects["rng_state/shard_0_1"] = ["kept"]
    write_checkpoint(path, tensors, objects, files=2)
    common = {
        "args": Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1, swiglu=True),
        "iteration": 7,
        "weights": torch.ones(3),
        "optimizer": {"param_state_sharding_type": "dp_reshardable", "param_state": LEAKED},
        "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable", "chained_optim_avoid_prefix": True},
    }
    torch.save(common, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return Saved(path, model, states)


@pytest.fixture
def known_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the model that megatron-core builds."""
    orders = {(False, rank): [[parameter for parameter, _ in ordered(rank)]] for rank in range(TENSOR_RANKS)}
    monkeypatch.setattr(rewriting, "parameter_orders", lambda *_: orders)


def expected_of(saved: Saved) -> dict[str, torch.Tensor]:
    found = {f"optimizer.state.{state}.{key}": t for state, of in saved.states.items() for key, t in of.items()}
    return {**saved.model, **found}


@pytest.mark.usefixtures("known_order")
@pytest.mark.parametrize("layout", [{}, {"tp": 1, "pp": 1}, {"tp": 4, "allow_whole": True}], ids=str)
def test_buckets_become_tensors_of_the_parameters_shapes(tmp_path: Path, layout: dict[str, Any]) -> None:
    saved = saved_with_buckets(tmp_path / "saved")
    reshard_checkpoint(saved.path, tmp_path / "made", optimizer_layout="fully_reshardable", **layout)
    made = read_all(tmp_path / "made")
    expected = expected_of(saved)
    assert made.keys() == expected.keys()
    assert [key for key, tensor in expected.items() if not torch.equal(made[key], tensor)] == []
    assert verify_checkpoint(tmp_path / "made").whole
    with open_checkpoint(tmp_path / "made") as checkpoint:
        assert checkpoint.summary.optimizer == "fully_reshardable"
        assert list(checkpoint.objects) == ["rng_state/shard_0_1"]
        common = checkpoint.common_state()
    before = torch.load(saved.path / "common.pt", weights_only=False)
    stock = torch.load(tmp_path / "made" / "common.pt", weights_only=False)
    assert torch.equal(stock["optimizer"]["grad_scaler"]["scale"], SCALER["scale"])
    assert common["args"] == before["args"]
    assert torch.equal(common["weights"], before["weights"])
    assert common["iteration"] == 7
    scaler = common["optimizer"].pop("grad_scaler")
    assert torch.equal(scaler["scale"], SCALER["scale"])
    assert scaler["growth_tracker"] == 3
    assert common["optimizer"] == {"optimizer": SETTINGS, "param_state_sharding_type": "fully_reshardable"}
    assert common["content_metadata"] == {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }


@pytest.mark.usefixtures("known_order")
def test_the_command_shows_what_becomes_of_buckets(tmp_path: Path) -> None:
    saved = saved_with_buckets(tmp_path / "saved")
    arguments = ["reshard", str(saved.path), str(tmp_path / "made"), "--optimizer-layout", "fully_reshardable"]
    shown = output_of(*arguments, "--dry-run")
    assert "optimizer.state.exp_avg.layers.fc1" in shown
    assert "12 flat buckets become 9 tensors" in shown
    assert list(tmp_path.iterdir()) == [saved.path]
    assert "not both" in refusal_of(*arguments, "--drop-optimizer")


@pytest.mark.usefixtures("known_order")
def test_another_order_than_the_models_is_found_out_before_anything_is_written(tmp_path: Path) -> None:
    saved = saved_with_buckets(tmp_path / "saved", swap=True)
    with pytest.raises(CorruptCheckpointError, match=r"should be those of layers\.fc1 at \[1, 0, 0\], and are others"):
        reshard_checkpoint(saved.path, tmp_path / "made", optimizer_layout="fully_reshardable")
    assert list(tmp_path.iterdir()) == [saved.path]


@pytest.mark.usefixtures("known_order")
def test_another_model_than_the_one_that_was_saved_is_refused(tmp_path: Path) -> None:
    saved = saved_with_buckets(tmp_path / "saved")
    rewriting.parameter_orders({})[False, 0][0].pop()
    with pytest.raises(CorruptCheckpointError, match="3 parameters of the model end at element"):
        reshard_checkpoint(saved.path, tmp_path / "made", optimizer_layout="fully_reshardable")
    assert list(tmp_path.iterdir()) == [saved.path]


def test_a_model_with_experts_is_built_without_a_gpu() -> None:
    arguments = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "padded_vocab_size": 9, "num_experts": 2}
    request = {"arguments": {**arguments, "moe_token_dispatcher_type": "alltoall"}, "metadata": {}}

    def build() -> dict[tuple[bool, int], list[int]]:
        warnings.simplefilter("ignore")
        found = parameter_orders.all_groups(request)
        return {key: [len(chunk) for chunk in chunks] for key, chunks in found.items()}

    assert in_child(build) == str({(False, 0): [40]})


def test_layers_of_transformer_engine_have_norms_of_their_own() -> None:
    layer, stacked = "decoder.layers.1.", "decoder.layers."
    names = [
        (f"{layer}input_layernorm.weight", f"{stacked}self_attention.linear_qkv.layer_norm_weight"),
        (f"{layer}self_attention.linear_proj.weight", f"{stacked}self_attention.linear_proj.weight"),
        (f"{layer}self_attention.linear_qkv.weight", f"{stacked}self_attention.linear_qkv.weight"),
        (f"{layer}pre_mlp_layernorm.weight", f"{stacked}mlp.linear_fc1.layer_norm_weight"),
        (f"{layer}mlp.linear_fc1.weight", f"{stacked}mlp.linear_fc1.weight"),
    ]
    box = Box((0,), (1,))
    rows = [(FlatParameter(name, 1, False, (ParameterBox(key, (1,), box, 0),)), False) for name, key in names]
    reordered = [row.name for row, _ in parameter_orders._as_transformer_engine(rows, False)]
    # As Transformer Engine registers them: LayerNormLinear its norm, then its own.
    assert reordered == [names[at][0] for at in (1, 0, 2, 3, 4)]


# --- stretches of flattened parameters


def saved_with_stretches(path: Path, common: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """As megatron-core 0.12 to 0.14 keeps the state of a parameter `[8, 6]` of two tensor parallel ranks."""
    torch.manual_seed(5)
    weight = torch.randn(8, 6)
    states = {"fp32_param": weight, "exp_avg": torch.randn(8, 6), "exp_avg_sq": torch.randn(8, 6)}
    tensors = {"linear.weight": whole(weight.bfloat16())}
    for state, tensor in states.items():
        boxes = [Box((rank, 0, a), (1, 1, b - a)) for rank in range(2) for a, b in ((0, 5), (5, 15), (15, 24))]
        if state == "exp_avg_sq":  # slices that have become one chunk since
            boxes = [Box((0, 0, 0), (2, 1, 24))]
        tensors[f"optimizer.state.{state}.linear.weight"] = StoredTensor(tensor.reshape(2, 1, 24), boxes)
    index: CheckpointIndex = write_checkpoint(path, tensors)
    for state in states:
        index.mcore_data[f"optimizer.state.{state}.linear.weight"] = {"nd_reformulated_orig_global_shape": (8, 6)}
    (path / ".metadata").write_bytes(encode_metadata(index))
    torch.save(common, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return {
        "linear.weight": weight.bfloat16(),
        "optimizer.state.param.linear.weight": weight,
        "optimizer.state.exp_avg.linear.weight": states["exp_avg"],
        "optimizer.state.exp_avg_sq.linear.weight": states["exp_avg_sq"],
    }


def test_stretches_become_tensors_of_the_parameters_shapes(tmp_path: Path) -> None:
    optimizer = {"optimizer": SETTINGS, "param_state_sharding_type": "fully_sharded_model_space"}
    expected = saved_with_stretches(tmp_path / "saved", {"iteration": 3, "optimizer": {0: optimizer, 1: optimizer}})
    options = {"tp": 1, "pp": 1, "optimizer_layout": "fully_reshardable"}
    reshard_checkpoint(tmp_path / "saved", tmp_path / "made", **options)
    made = read_all(tmp_path / "made")
    assert made.keys() == expected.keys()
    assert [key for key, tensor in expected.items() if not torch.equal(made[key], tensor)] == []
    index = read_index(tmp_path / "made")
    assert index.mcore_data == {}
    with open_checkpoint(tmp_path / "made") as checkpoint:
        common = checkpoint.common_state()
    changed = {"optimizer": SETTINGS, "param_state_sharding_type": "fully_reshardable"}
    assert common["optimizer"] == {0: changed, 1: changed}
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"


def test_what_cannot_be_converted_is_refused_by_name(tmp_path: Path) -> None:
    options = {"tp": 1, "pp": 1, "optimizer_layout": "fully_reshardable"}
    write_checkpoint(tmp_path / "model", {"linear.weight": whole(torch.ones(2, 2))})
    with pytest.raises(OptionError, match="holds no optimizer state"):
        reshard_checkpoint(tmp_path / "model", tmp_path / "made", **options)
    saved_with_stretches(tmp_path / "unknown", {"optimizer": {"saved": [Fraction(1, 3)]}})
    with pytest.raises(OptionError, match=r"fractions\.Fraction, a class that is not known"):
        reshard_checkpoint(tmp_path / "unknown", tmp_path / "made", **options)
    gathered = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.optimizer_state"
    write_checkpoint(tmp_path / "gathered", {"linear.weight": whole(torch.ones(2, 2)), gathered: whole(torch.ones(4))})
    with pytest.raises(OptionError, match="'dp_zero_gather_scatter'; expected dp_reshardable"):
        reshard_checkpoint(tmp_path / "gathered", tmp_path / "made", **options)
