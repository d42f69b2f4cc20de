"""Loads into quantized tensors, and what Megatron's versions hand to the strategies.

Transformer Engine is not to be had without a GPU; `Quantized` stands in for its `QuantizedTensor`: it looks like a wide
tensor, has no memory of that width, and `copy_` quantizes.
"""

import inspect
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, fp8_utils
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

from mcore_ckpt import LoadError, TorchDistLoadStrategy, TorchDistSaveStrategy
from mcore_ckpt.megatron import strategy as strategies
from mcore_ckpt.megatron.versions import megatron_version, stock_class
from tests.support.gloo_ranks import on_ranks
from tests.support.kept_log import kept_log

ROWS, COLUMNS, COUNT = 64, 96, 10


class Quantized(torch.Tensor):
    """One byte for each element and a scale, that looks like bfloat16."""

    @staticmethod
    def __new__(cls, rows: int, columns: int) -> "Quantized":
        return torch.Tensor._make_wrapper_subclass(cls, (rows, columns), dtype=torch.bfloat16)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, rows: int, columns: int) -> None:
        self.codes = torch.zeros(rows, columns, dtype=torch.int8)
        self.scale = 1.0
        self._quantizer = SimpleNamespace(amax=torch.tensor([3.0]))
        self.fills = 0
        self.peak_bytes = 0

    sources: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            assert type(source) is torch.Tensor, "a wide tensor is to be quantized"
            cls.sources.add(source)
            target.peak_bytes = sum(wide.nbytes for wide in cls.sources)
            target.scale = float(source.abs().max()) / 127 or 1.0
            target.codes = (source.float() / target.scale).round().to(torch.int8)
            target._quantizer.amax.fill_(float(source.abs().max()))
            target.fills += 1
            return target
        raise NotImplementedError(f"{func} is not to be called of a quantized tensor")

    def wide(self) -> torch.Tensor:
        return self.codes.float() * self.scale


def values(i: int) -> torch.Tensor:
    return ((torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) * (i + 7)) % 251 - 125).to(torch.bfloat16)


def sharded(key: str, data: Any, part: int, parts: int) -> Any:
    return ShardedTensor.from_rank_offsets(key, data, (0, part, parts))


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    step = float(expected.abs().max()) / 127
    return bool(((found - expected.float()).abs() <= step * 0.51).all())


def targets_and_state(rank: int, world: int) -> tuple[list[Quantized], dict[str, Any]]:
    targets = [Quantized(ROWS // world, COLUMNS) for _ in range(COUNT)]
    state: dict[str, Any] = {f"w{i}": sharded(f"w{i}", target, rank, world) for i, target in enumerate(targets)}
    state["bias"] = sharded("bias", torch.zeros(8 // world, 1), rank, world)
    return targets, state


@on_ranks(2)
def test_quantized_tensors_are_filled_in_place_by_way_of_few_wide_ones(rank: int, tmp_path: Path) -> None:
    world = dist.get_world_size()
    pieces = [2 * rank, 2 * rank + 1]  # two boxes are stored for each that is wanted
    saved: dict[str, Any] = {
        f"{i}.{piece}": sharded(f"w{i}", values(i).chunk(2 * world)[piece], piece, 2 * world)
        for i in range(COUNT)
        for piece in pieces
    }
    saved["bias"] = sharded("bias", torch.arange(8.0).view(8, 1).chunk(world)[rank], rank, world)
    dist_checkpointing.save(saved, str(tmp_path), TorchDistSaveStrategy())

    # Megatron takes `Quantized` for Transformer Engine's class.
    for name in ("HAVE_TE_FP8_TENSOR_CLASS", "HAVE_TE_FLOAT8TENSOR"):
        setattr(fp8_utils, name, True)
    for name in ("FP8_TENSOR_CLASS", "Float8Tensor"):
        setattr(fp8_utils, name, Quantized)
    one_bytes = ROWS // world * COLUMNS * 2
    strategies._SCRATCH_BYTES = 3 * one_bytes  # type: ignore[misc]
    for wrapped in (False, True):
        targets, state = targets_and_state(rank, world)
        bias = state["bias"].data
        strategy: Any = TorchDistLoadStrategy()
        if wrapped:  # each rank wants something else, so that nothing is exchanged
            strategy = FullyParallelLoadStrategyWrapper(strategy)
        if megatron_version() >= (0, 19):
            assert strategy.stream_ckpt_dequant
            loaded = dist_checkpointing.load(state, str(tmp_path), strategy)
        else:  # there Megatron's `load` makes wide copies first
            loaded = strategy.load(state, tmp_path)
        for i, target in enumerate(targets):
            assert loaded[f"w{i}"] is target, "it is to be filled in place"
            assert target.fills == 1
            assert close(target.wide(), values(i).chunk(world)[rank])
            assert target._quantizer.amax.item() == 3.0, "the running maximum is training's"
        assert torch.equal(bias, torch.arange(8.0).view(8, 1).chunk(world)[rank])
        assert one_bytes <= max(target.peak_bytes for target in targets) <= 3 * one_bytes

    targets, state = targets_and_state(rank, world)
    state["w1"].key = "another"
    with pytest.raises(LoadError, match="another"):
        TorchDistLoadStrategy().load(state, tmp_path)


@on_ranks(1)
def test_every_argument_of_this_megatron_is_known_and_others_are_named(rank: int) -> None:
    """Runs with each supported version, in the matrix."""
    pairs = {
        "TorchDistSaveShardedStrategy": TorchDistSaveStrategy,
        "TorchDistLoadShardedStrategy": TorchDistLoadStrategy,
    }
    for stock_name, ours in pairs.items():
        stock = stock_class(stock_name)
        for name in ("__init__", "save", "async_save", "load", "load_tensors_metadata", "remove_sharded_tensors"):
            if name not in vars(stock):
                continue
            theirs = list(inspect.signature(vars(stock)[name]).parameters)
            known = inspect.signature(getattr(ours, name)).parameters
            positional = [key for key, one in known.items() if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
            assert positional[: len(theirs)] == theirs, f"{stock_name}.{name}: each has to mean the same"
        with kept_log() as said:
            ours(from_the_future=1)
        assert "does not know the argument 'from_the_future' of megatron-core" in said[0]
    with kept_log() as said:
        TorchDistLoadStrategy(True, False, "name")
        TorchDistSaveStrategy("torch_dist", 1, True, 2, True, None, True)
    assert said == []
