"""Views of stored tensors: every element from its place, each stored byte compared with its checksum, read once."""

import random
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from mcore_ckpt.core.boxes import Box, intersect
from mcore_ckpt.core.crc import crc32
from mcore_ckpt.core.errors import ChecksumError, CorruptCheckpointError, OptionError
from mcore_ckpt.format.index import CheckpointIndex, StoredChunk, StoredItem, TensorEntry
from mcore_ckpt.reshard import view as reshard_view
from mcore_ckpt.reshard.options import parse_partition_rules
from mcore_ckpt.reshard.partition import Partition, Partitioner, divide
from mcore_ckpt.reshard.view import Part, TensorView, ViewPayloads
from mcore_ckpt.tools.payloads import StoredPayloads
from tests.support.local_files import flip
from tests.support.model_like import assert_same
from tests.support.stored_layouts import StoredTensor, write_checkpoint

pytestmark = pytest.mark.quick


def random_cut(generator: random.Random, size: int) -> list[tuple[int, int]]:
    """An axis divided into a few `(offset, size)`."""
    cuts = sorted({0, size, *(generator.randrange(size + 1) for _ in range(2))})
    return [(first, last - first) for first, last in pairwise(cuts)]


def random_boxes(generator: random.Random, shape: tuple[int, ...]) -> list[Box]:
    boxes = [Box((), ())]
    for size in shape:
        boxes = [
            Box((*box.offsets, first), (*box.sizes, count))
            for box in boxes
            for first, count in random_cut(generator, size)
        ]
    return boxes


class RandomView(NamedTuple):
    """A view of slices of one stored tensor, one after another along an axis; what it holds, and of which slices."""

    view: TensorView
    expected: torch.Tensor
    stored: list[Box]


def random_view(generator: random.Random, key: str, values: torch.Tensor) -> RandomView:
    axes = list(range(values.dim()))
    if generator.random() < 0.5:
        generator.shuffle(axes)
    rest = tuple(values.shape[axis] for axis in axes[1:])
    pairs = [(n - values.dim(), axis - values.dim()) for n, axis in enumerate(axes)]
    found, parts, stored, rows = [], [], [], 0

    def place(count: int) -> Box:
        return Box((rows, *(0 for _ in rest)), (count, *rest))

    for first, count in random_cut(generator, values.shape[axes[0]]):
        if generator.random() < 0.3:
            continue
        offsets, sizes = [0] * values.dim(), list(values.shape)
        offsets[axes[0]], sizes[axes[0]] = first, count
        stored.append(Box(tuple(offsets), tuple(sizes)))
        parts.append(Part(place(count), key, stored[-1], pairs))
        found.append(values.narrow(axes[0], first, count).permute(axes))
        rows += count
    zeros = generator.randrange(1, 3)
    parts.append(Part(place(zeros), None))
    found.append(torch.zeros(zeros, *rest, dtype=values.dtype))
    dtype = str(values.dtype).removeprefix("torch.")
    return RandomView(TensorView((rows + zeros, *rest), parts, dtype), torch.cat(found), stored)


def read_tensor(payloads: StoredPayloads, key: str, generator: random.Random, dtype: torch.dtype) -> torch.Tensor:
    """All of a view's tensor, read in parts of random lengths as a target reads it."""
    entry = payloads.index.tensors[key]
    out = torch.zeros(entry.shape, dtype=dtype)
    for chunk in entry.chunks:
        payload = payloads.locate(entry, chunk)
        content = memoryview(bytearray(payload.nbytes))
        at = 0
        while at < len(content):
            stop = min(len(content), at + generator.randrange(1, 40))
            payloads.read_into(payload, at, content[at:stop])
            at = stop
        payloads.was_read(entry, chunk, crc32(content))
        if content:
            where = tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))
            out[where] = torch.frombuffer(content, dtype=dtype).view(chunk.sizes)
    return out


@pytest.mark.parametrize("seed", range(8))
def test_every_element_comes_from_its_place(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(seed)
    torch.manual_seed(seed)
    if seed % 2:
        monkeypatch.setattr(reshard_view, "_COMPLETE_BYTES", 64)
    stored = {}
    for n in range(4):
        shape = tuple(generator.randrange(1, 9) for _ in range(generator.randrange(1, 4)))
        values = torch.randint(-1000, 1000, shape).to(generator.choice([torch.float32, torch.bfloat16, torch.int64]))
        stored[f"t{n}"] = StoredTensor(values, random_boxes(generator, shape))
    index = write_checkpoint(tmp_path, stored, files=2)
    views = {key: random_view(generator, key, tensor) for key, (tensor, _) in stored.items()}

    def read_everything() -> dict[str, torch.Tensor]:
        with ViewPayloads(StoredPayloads(index), {f"of {key}": view.view for key, view in views.items()}) as payloads:
            dtypes = {key: view.expected.dtype for key, view in views.items()}
            found = {key: read_tensor(payloads, f"of {key}", generator, dtype) for key, dtype in dtypes.items()}
            payloads.check_rest()
            return found

    assert_same(read_everything(), {key: view.expected for key, view in views.items()})
    # A byte of a stored chunk that the view has an element of is compared with its checksum, whether it is read or not.
    for key, view in views.items():
        for chunk in index.tensors[key].chunks:
            box = Box(chunk.offsets, chunk.sizes)
            if not any(intersect(box, other) for other in view.stored):
                continue
            with StoredPayloads(index) as plain:
                payload = plain.locate(index.tensors[key], chunk)
            at = payload.offset + generator.randrange(payload.nbytes)
            flip(tmp_path / payload.file, at)
            with pytest.raises(ChecksumError, match="was damaged after"):
                read_everything()
            flip(tmp_path / payload.file, at)


def test_a_view_with_an_element_that_is_not_stored_is_refused(tmp_path: Path) -> None:
    index = write_checkpoint(tmp_path, {"t": StoredTensor(torch.ones(3, 4), [Box((0, 0), (3, 3))])})
    everything = Box((0, 0), (3, 4))
    with pytest.raises(CorruptCheckpointError, match="do not make it up"):
        ViewPayloads(StoredPayloads(index), {"v": TensorView((3, 4), [Part(everything, "t", everything)])})


# --- how a parameter is divided ---------------------------------------------------------------------------------------

ITEM = StoredItem("__0_0.distcp", 0, 1)


def entry(
    fqn: str, shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] | None = None
) -> TensorEntry:
    boxes = boxes or [((0,) * len(shape), shape)]
    return TensorEntry(fqn, "bfloat16", shape, tuple(StoredChunk(o, s, ITEM) for o, s in boxes))


def index(*entries: TensorEntry) -> CheckpointIndex:
    return CheckpointIndex("ckpt", {found.fqn: found for found in entries}, {})


def halves(fqn: str, shape: tuple[int, ...], axis: int) -> TensorEntry:
    step = shape[axis] // 2
    sizes = tuple(step if n == axis else size for n, size in enumerate(shape))
    return entry(fqn, shape, [(tuple(k * step if n == axis else 0 for n in range(len(shape))), sizes) for k in (0, 1)])


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
