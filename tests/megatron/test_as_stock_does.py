"""What Megatron's own tests of `dist_checkpointing` ask of strategies, asked of stock and of ours: the same answers.

Each question is a function that returns something comparable: what was loaded, or which of Megatron's errors was
raised.
"""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException

from tests.support.gloo_ranks import made, run_megatron_ranks, run_stock_ranks
from tests.support.shared_groups import fork_results_queue
from tests.support.stock import stock_loads

pytestmark = pytest.mark.timeout(500)  # the ranks have their own, shorter deadline

LARGE = 300  # rows of 300 elements: not read with the small items


def whole(rows: int, columns: int = 300) -> torch.Tensor:
    return torch.arange(float(rows * columns)).view(rows, columns)


def part(key: str, tensor: torch.Tensor, rank: int, **more: Any) -> Any:
    """This rank's half of a tensor's rows."""
    return dist_checkpointing.ShardedTensor.from_rank_offsets(key, tensor.chunk(2)[rank], (0, rank, 2), **more)


def copy(key: str, tensor: torch.Tensor, rank: int, **more: Any) -> Any:
    return dist_checkpointing.ShardedTensor.from_rank_offsets(key, tensor, replica_id=rank, **more)


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns; "refused" for Megatron's error and for DCP's, which stock lets through."""
    try:
        return call()
    except (CheckpointingException, CheckpointException):
        return "refused"
    except Exception as error:  # noqa: BLE001  (which it is, is compared)
        return type(error).__name__


def plain(value: Any) -> Any:
    """Tensors as dtype and values."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def answers(rank: int, root: Path, ours: bool) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    if ours:
        import mcore_ckpt

        mcore_ckpt.install()
    else:
        fork_results_queue()
    from megatron.core import dist_checkpointing as dc
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.validation import StrictHandling

    # It raises on one rank only, for which stock leaves the others waiting.
    load_unchecked = partial(dc.load, validate_access_integrity=False)

    saved = made(root / "saved")
    state = {
        "small": part("small", whole(8, 5), rank),
        "large": part("large", whole(LARGE), rank),
        "copied": copy("copied", whole(3, 4).bfloat16(), rank),
        "counts": copy("counts", torch.arange(6), rank),
        "object": ShardedObject("object", {"rank": rank}, (2,), (rank,)),
        "step": 5,
    }
    dc.save(state, saved, content_metadata={"kind": "a test"})
    found: dict[str, Any] = {}

    def ask(name: str, call: Callable[[], Any]) -> None:
        found[name] = plain(outcome(call))
        dist.barrier()

    ask("common", lambda: dc.load_common_state_dict(saved)["step"])
    ask("content", lambda: dc.load_content_metadata(saved))
    ask("plain tensors", lambda: dict(sorted(dc.load_plain_tensors(saved).items())))
    ask(
        "tensors",
        lambda: {k: (v.global_shape, str(v.dtype)) for k, v in sorted(dc.load_tensors_metadata(saved).items())},
    )
    ask("nothing is wanted", lambda: load_unchecked({}, saved)["step"])
    ask("one of them", lambda: load_unchecked({"small": part("small", torch.zeros(8, 5), rank)}, saved))
    ask("object", lambda: load_unchecked({"o": ShardedObject("object", None, (2,), (rank,))}, saved)["o"])
    ask("other object", lambda: load_unchecked({"o": ShardedObject("object", None, (4,), (rank,))}, saved)["o"])
    for key, rows, columns in (("small", 8, 5), ("large", LARGE, 300)):
        for change in (-2, 2):
            shape = (rows + change, columns)
            ask(
                f"{key}, {change} rows",
                lambda key=key, shape=shape: load_unchecked({"t": part(key, torch.full(shape, -1.0), rank)}, saved),
            )
            ask(
                f"{key}, {change} rows, which is allowed",
                lambda key=key, shape=shape: load_unchecked(
                    {"t": part(key, torch.full(shape, -1.0), rank, allow_shape_mismatch=True)}, saved
                ),
            )
    for key, tensor in {
        "copied": torch.zeros(3, 4),
        "counts": torch.zeros(6),
        "small": torch.zeros(8, 5, dtype=torch.float64),
    }.items():
        make = part if key == "small" else copy
        ask(
            f"{key} in another dtype",
            lambda key=key, tensor=tensor, make=make: load_unchecked({"t": make(key, tensor, rank)}, saved),
        )

    for strict in StrictHandling:

        def load(strict: Any = strict) -> Any:
            wanted = {"small": part("small", torch.zeros(8, 5), rank), "missing": copy("missing", torch.zeros(2), rank)}
            loaded = load_unchecked(wanted, saved, strict=strict)
            if strict in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL):
                state, missing, unexpected = loaded
                return sorted(state), sorted(missing), sorted(key for key in unexpected if "common_state" not in key)
            return sorted(loaded)

        ask(f"strict {strict.name}", load)

    ask("a directory that is not there", lambda: load_unchecked({}, str(root / "nowhere")))
    ask("a directory that is no checkpoint", lambda: load_unchecked({}, made(root / "empty")))
    return found


@stock_loads
def test_ours_answers_as_stock_does(tmp_path: Path) -> None:
    stock = run_stock_ranks(answers, 2, tmp_path / "stock", False)
    ours = run_megatron_ranks(answers, 2, tmp_path / "ours", True)
    for rank in range(2):
        assert stock[rank].keys() == ours[rank].keys()
        different = {
            name: (stock[rank][name], ours[rank][name]) for name in stock[rank] if stock[rank][name] != ours[rank][name]
        }
        assert not different, rank
        # What Megatron's tests expect of stock, so that both are not wrong together.
        assert ours[rank]["common"] == 5
        assert ours[rank]["content"]["kind"] == "a test"
        assert ours[rank]["small, 2 rows"] == "refused"
        assert ours[rank]["strict RAISE_ALL"] == "refused"
