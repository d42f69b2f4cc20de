"""Along which axis a tensor is divided: who says so, in which order, and whether it is a guess."""

from __future__ import annotations

import pytest

from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.reshard.options import parse_partition_rules
from mcore_ckpt.reshard.partition import Partition, Partitioner, divide

pytestmark = pytest.mark.quick

ITEM = StoredItem("__0_0.distcp", 0, 1)


def entry(
    fqn: str, shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] | None = None
) -> TensorEntry:
    boxes = boxes or [((0,) * len(shape), shape)]
    return TensorEntry(fqn, "bfloat16", shape, tuple(StoredChunk(o, s, ITEM) for o, s in boxes))


def index(*entries: TensorEntry) -> CheckpointIndex:
    return CheckpointIndex("ckpt", {found.fqn: found for found in entries}, {})


def halves(fqn: str, shape: tuple[int, ...], axis: int, count: int = 2) -> TensorEntry:
    step = shape[axis] // count
    sizes = tuple(step if n == axis else size for n, size in enumerate(shape))
    return entry(
        fqn, shape, [(tuple(k * step if n == axis else 0 for n in range(len(shape))), sizes) for k in range(count)]
    )


LAYER = "decoder.layers.0."


def test_arguments_tell_where_the_second_layer_does_not() -> None:
    first = entry(LAYER + "mlp.linear_fc1.weight", (128, 32))
    assert Partitioner(index(first), arguments={"swiglu": True}).decide(first.fqn).parts == 2
    alone = Partitioner(index(first)).decide(first.fqn)
    assert alone.guess
    assert "halves" in alone.note


def test_rules_then_grid_then_table() -> None:
    key = LAYER + "self_attention.linear_proj.weight"
    whole, rows = entry(key, (32, 32)), halves(key, (32, 32), 0)
    rules = parse_partition_rules(f"{key}$ whole", "rules")
    assert Partitioner(index(rows), rules=rules).decide(key).axis is None
    assert Partitioner(index(rows)).decide(key).axis == 0
    assert Partitioner(index(whole)).decide(key).decider == "table"


def test_rules() -> None:
    rules = parse_partition_rules("# comment\nfoo\\.weight$  -1\nfc1 0 x2  # halves\n\nbar whole\n", "rules")
    found = Partitioner(index(entry("foo.weight", (4, 8)), entry("fc1.w", (8,)), entry("bar", (8,))), rules=rules)
    assert found.decide("foo.weight") == Partition(1, 1, False, "rules")
    assert found.decide("fc1.w") == Partition(0, 2, False, "rules")
    assert found.decide("bar") == Partition(None, 1, False, "rules")


@pytest.mark.parametrize("line", ["a b", "( 0", "a 0 x0"])
def test_bad_rules_name_file_and_line(line: str) -> None:
    with pytest.raises(OptionError, match=r"my\.rules, line 2"):
        parse_partition_rules(f"fine 0\n{line}\n", "my.rules")


def test_a_rule_for_an_axis_that_is_not_there() -> None:
    with pytest.raises(OptionError, match="axis 2"):
        Partitioner(index(entry("a", (4, 8))), rules=parse_partition_rules("a 2", "r")).decide("a")


def test_vocabulary_ends_where_the_padded_parts_end() -> None:
    boxes = divide("embedding.word_embeddings.weight", (10, 4), Partition(0), 4, vocabulary=16)
    assert [(box.offsets[0], box.sizes[0]) for box in boxes] == [(0, 4), (4, 4), (8, 2)]
