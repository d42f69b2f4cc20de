"""Along which axis a tensor is divided: who says so, in which order, and whether it is a guess."""

from __future__ import annotations

import pytest

from mcore_ckpt.core.boxes import Box
from mcore_ckpt.core.errors import OptionError
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.reshard.options import parse_partition_rules
from mcore_ckpt.reshard.partition import Partition, Partitioner, divide

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


class TestTable:
    """A source in one piece: only names and shapes tell."""

    @pytest.mark.parametrize(("rows", "parts"), [(128, 2), (64, 1)], ids=["gated", "plain"])
    def test_a_gated_first_layer_is_two_halves(self, rows: int, parts: int) -> None:
        first, second = (
            entry(LAYER + "mlp.linear_fc1.weight", (rows, 32)),
            entry(LAYER + "mlp.linear_fc2.weight", (32, 64)),
        )
        assert Partitioner(index(first, second)).decide(first.fqn).parts == parts

    def test_arguments_tell_where_the_second_layer_does_not(self) -> None:
        first = entry(LAYER + "mlp.linear_fc1.weight", (128, 32))
        assert Partitioner(index(first), arguments={"swiglu": True}).decide(first.fqn).parts == 2
        alone = Partitioner(index(first)).decide(first.fqn)
        assert alone.guess
        assert "halves" in alone.note

    def test_unknown_tensors_stay_whole_and_say_so(self) -> None:
        found = Partitioner(index(entry("something.else", (64, 32)))).decide("something.else")
        assert (found.axis, found.decider, found.guess) == (None, "whole", True)


PROJ = halves(LAYER + "self_attention.linear_proj.weight", (32, 32), 1)
STACKED = "decoder.layers.mlp.experts.experts.linear_fc2.weight"


@pytest.mark.parametrize(
    ("asked", "others", "expected"),
    [
        (PROJ, [], Partition(1, decider="grid")),
        (entry("my.own.weight", (8, 8)), [PROJ], Partition(None, decider="grid")),  # others are divided
        (halves(LAYER + "mlp.linear_fc1.weight", (128, 32), 0), [], Partition(0, 2, decider="grid")),  # one rank
        (
            entry(STACKED, (2, 2, 8, 16), [((n, e, 0, 0), (1, 1, 8, 16)) for n in range(2) for e in range(2)]),
            [],
            Partition(3, expert=True, decider="table", guess=True),
        ),
        (entry(f"optimizer.state.exp_avg.{PROJ.fqn}", (32, 32)), [PROJ], Partition(1, decider="grid")),
    ],
    ids=["divided", "replicated", "halves", "stacked", "state"],
)
def test_the_sources_own_chunks_are_no_guess(
    asked: TensorEntry, others: list[TensorEntry], expected: Partition
) -> None:
    assert Partitioner(index(asked, *others)).decide(asked.fqn) == expected


class TestOrder:
    def test_rules_then_grid_then_table(self) -> None:
        key = LAYER + "self_attention.linear_proj.weight"
        whole, rows = entry(key, (32, 32)), halves(key, (32, 32), 0)
        rules = parse_partition_rules(f"{key}$ whole", "rules")
        assert Partitioner(index(rows), rules=rules).decide(key).axis is None
        assert Partitioner(index(rows)).decide(key).axis == 0
        assert Partitioner(index(whole)).decide(key).decider == "table"

    def test_rules(self) -> None:
        rules = parse_partition_rules("# comment\nfoo\\.weight$  -1\nfc1 0 x2  # halves\n\nbar whole\n", "rules")
        found = Partitioner(index(entry("foo.weight", (4, 8)), entry("fc1.w", (8,)), entry("bar", (8,))), rules=rules)
        assert found.decide("foo.weight") == Partition(1, 1, False, "rules")
        assert found.decide("fc1.w") == Partition(0, 2, False, "rules")
        assert found.decide("bar") == Partition(None, 1, False, "rules")

    @pytest.mark.parametrize("line", ["a b", "( 0", "a 0 x0"])
    def test_bad_rules_name_file_and_line(self, line: str) -> None:
        with pytest.raises(OptionError, match=r"my\.rules, line 2"):
            parse_partition_rules(f"fine 0\n{line}\n", "my.rules")

    def test_a_rule_for_an_axis_that_is_not_there(self) -> None:
        with pytest.raises(OptionError, match="axis 2"):
            Partitioner(index(entry("a", (4, 8))), rules=parse_partition_rules("a 2", "r")).decide("a")

    def test_flat_buckets_keep_their_chunks(self) -> None:
        key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(a, b).bucket_idx_0.exp_avg"
        flat = entry(key, (10,), [((0,), (3,)), ((3,), (7,))])
        found = Partitioner(index(flat)).decide(key)
        assert found.decider == "stored"
        assert divide(key, (10,), found, 4) == [Box((0,), (3,)), Box((3,), (7,))]


class TestDivide:
    def test_halves_are_divided_each_by_itself_and_what_does_not_divide_not_at_all(self) -> None:
        assert [box.offsets[0] for box in divide("a", (8, 2), Partition(0, 2), 2)] == [0, 2, 4, 6]
        assert divide("a", (7, 6), Partition(0), 2) == [Box((0, 0), (7, 6))]

    def test_stacked_axes_are_one_index_a_chunk(self) -> None:
        boxes = divide("decoder.layers.mlp.linear_fc2.weight", (4, 8, 8), Partition(2), 2)
        assert len(boxes) == 8
        assert all(box.sizes == (1, 8, 4) for box in boxes)

    def test_vocabulary_ends_where_the_padded_parts_end(self) -> None:
        boxes = divide("embedding.word_embeddings.weight", (10, 4), Partition(0), 4, vocabulary=16)
        assert [(box.offsets[0], box.sizes[0]) for box in boxes] == [(0, 4), (4, 4), (8, 2)]
