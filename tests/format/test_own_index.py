"""Indexes of our own are read off their bytes: to the same as by the unpickler, or not at all."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest

from mcore_ckpt.core.errors import CheckpointError, CorruptCheckpointError
from mcore_ckpt.format import metadata_read
from mcore_ckpt.format._own_index import own_index
from mcore_ckpt.format.index import (
    CheckpointIndex,
    ObjectEntry,
    PackedTensors,
    StoredChunk,
    StoredItem,
    TensorEntry,
    TensorForm,
)
from mcore_ckpt.format.metadata_read import DTYPE_NAMES, parse_index
from mcore_ckpt.format.metadata_write import MetadataEncoder
from mcore_ckpt.format.seal import MetadataSeal, SealedFile, seal_metadata, split_metadata

SAVE_ID = bytes(range(16))
DTYPES = {name: name for name in DTYPE_NAMES}


def sample(tensors: int = 300, objects: int = 20) -> dict[str, Any]:
    """What a save holds: shapes that are made and referred to, tensors of several chunks, numbers of every length."""
    entries, at, number = {}, 0, 0

    def item() -> StoredItem:
        nonlocal at, number
        length = 700 + number % 3 * 2**33
        at, number = at + length, number + 1
        return StoredItem(f"__{number % 2}_0.distcp", at - length, length, (), number)

    for n in range(tensors):
        rows, columns = 2 * (n % 7), n % 40 if n < tensors // 2 else 3
        shapes = {0: (), 1: (columns,), 2: (rows, columns), 3: (2**40, 2, n)}
        shape = shapes[n % 4]
        chunks = [StoredChunk((0,) * len(shape), shape, item())]
        if n % 4 == 2 and rows > 2:
            half = (rows // 2, columns)
            chunks = [StoredChunk((start, 0), half, item()) for start in (0, rows // 2)]
        dtype = ("float32", "bfloat16")[n % 2]
        entries[f"layer.{n}" + "x" * (n % 90)] = TensorEntry(
            f"layer.{n}" + "x" * (n % 90), dtype, shape, tuple(chunks), n % 5 == 0
        )
    found = {f"object.{n}/shard_0_1": ObjectEntry(f"object.{n}/shard_0_1", item()) for n in range(objects)}
    return {"tensors": entries, "objects": found}


def encoded(parts: dict[str, Any], plans: list[Any] | None = None) -> bytes:
    tensors, objects = parts["tensors"], parts["objects"]
    items = [chunk.item for entry in tensors.values() for chunk in entry.chunks]
    items += [entry.item for entry in objects.values()]
    seal = MetadataSeal(
        SAVE_ID,
        {item.file: SealedFile(2**62, 5, SAVE_ID) for item in items},
        array("I", [item.crc32 for item in items]),
        array("Q", [1]),
        array("I", [2]),
        array("I", [7, 8]),
    )
    encoder = MetadataEncoder(CheckpointIndex("", tensors, {}))
    return encoder.encode(objects, storage_meta={"save_id": SAVE_ID.hex()}, local_plans=plans, seal=seal)


def is_own(data: bytes) -> bool:
    pickle, seal = split_metadata(data, "a")
    assert seal is not None
    return own_index(pickle, seal.crcs, DTYPES) is not None


def unpickled(data: bytes, monkeypatch: pytest.MonkeyPatch) -> CheckpointIndex:
    with monkeypatch.context() as patch:
        patch.setattr(metadata_read, "own_index", lambda *_: None)
        return parse_index(data, "a")


@pytest.mark.parametrize("counts", [(300, 20), (0, 3), (3, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("plans", [None, [{"a plan": [1, 2]}]])
def test_it_is_what_the_unpickler_makes(
    counts: tuple[int, int], plans: list[Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = sample(*counts)
    if not sum(counts):
        data = seal_metadata(
            MetadataEncoder(CheckpointIndex("", {}, {})).encode({}, local_plans=plans),
            MetadataSeal(SAVE_ID, {}, array("I")),
        )
    else:
        data = encoded(parts, plans)
    assert is_own(data)
    index = parse_index(data, "a")
    assert index == unpickled(data, monkeypatch)
    assert list(index.tensors.items()) == list(parts["tensors"].items())
    assert list(index.objects.items()) == list(parts["objects"].items())
    assert index.has_local_plans == (plans is not None)


@pytest.mark.parametrize(
    ("key", "read_off"),
    [("\u0414", True), ("a\nb", True), ("", True), ("k" * 255, True), ("k" * 300, False), ("eub\x8c\x94", True)],
    ids=["another alphabet", "two lines", "empty", "longest", "length in four bytes", "like a separator"],
)
def test_unusual_keys_are_read_off_or_unpickled(key: str, read_off: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {}
    for n, name in enumerate(("before", key, "behind")):
        item = StoredItem("__0_0.distcp", 700 * n, 700, (), n)
        entries[name] = TensorEntry(name, "float32", (2,), (StoredChunk((0,), (2,), item),))
    stored = ObjectEntry("o", StoredItem("__0_0.distcp", 2800, 700, (), 9))
    data = encoded({"tensors": entries, "objects": {"o": stored}})
    assert is_own(data) is read_off
    assert parse_index(data, "a").tensors == entries
    assert parse_index(data, "a") == unpickled(data, monkeypatch)


def test_two_chunks_in_one_place_are_left_to_the_unpickler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal offsets that are pickled twice, as no writer does: they are one key of `storage_data`."""
    chunks = [StoredChunk((at, 0), (2, 3), StoredItem("__0_0.distcp", 700 * at, 700, (), 1)) for at in (2, 4)]
    entry = TensorEntry("w", "float32", (6, 3), tuple(chunks))
    data = encoded({"tensors": {"w": entry}, "objects": {}})
    assert is_own(data)
    pickle, seal = split_metadata(data, "a")
    assert seal is not None
    offsets = [b"(K\x02K\x00t", b"(K\x04K\x00t"]
    assert [pickle.count(offset) for offset in offsets] == [1, 1]
    changed = seal_metadata(pickle.replace(offsets[1], offsets[0]), seal)
    assert not is_own(changed)
    with pytest.raises(CheckpointError, match="each key and offset once"):
        parse_index(changed, "a")


def test_shapes_of_one_hash_are_refused_before_all_are_compared_with_all() -> None:
    modulus = 2**61 - 1  # of an int's hash
    starts = [tuple(modulus * (n >> axis & 1) for axis in range(5)) for n in range(1, 32)]
    assert len({hash(start) for start in starts}) == 1
    chunks = [
        StoredChunk(start, (1,) * 5, StoredItem("__0_0.distcp", 700 * n, 700, (), 1)) for n, start in enumerate(starts)
    ]
    few = encoded({"tensors": {"w": TensorEntry("w", "float32", (2**62,) * 5, tuple(chunks[:10]))}, "objects": {}})
    assert is_own(few)
    many = encoded({"tensors": {"w": TensorEntry("w", "float32", (2**62,) * 5, tuple(chunks))}, "objects": {}})
    assert not is_own(many)
    with pytest.raises(CorruptCheckpointError, match="differ in their hash"):
        parse_index(many, "a")


def test_columns_do_not_depend_on_hashes_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = sample(40, 0)["tensors"]

    def hashed(_: TensorForm) -> int:
        raise AssertionError("a form was hashed by its numbers")

    monkeypatch.setattr(TensorForm, "__hash__", hashed, raising=False)
    packed = PackedTensors.of(tensors)
    assert packed == tensors
    assert packed is not None
    assert len(set(map(id, packed.forms))) < len(packed)


def test_axes_that_cannot_be_multiplied_are_refused() -> None:
    shape = (0, 2**62, 2**62)
    item = StoredItem("__0_0.distcp", 0, 700, (), 1)
    entry = TensorEntry("w", "float32", shape, (StoredChunk((0,) * 3, shape, item),))
    data = encoded({"tensors": {"w": entry}, "objects": {"o": ObjectEntry("o", item._replace(offset=700))}})
    assert not is_own(data)
    with pytest.raises(CorruptCheckpointError, match="axes that can be multiplied"):
        parse_index(data, "a")


@pytest.mark.parametrize("name", ["state_dict_metadata", "storage_data"])
def test_what_is_set_again_behind_the_entries_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pickle, seal = split_metadata(encoded(sample(5, 2)), "a")
    assert seal is not None
    again = b"\x8c" + bytes([len(name)]) + name.encode() + b"}\x8c\x01wNs"
    changed = pickle[:-3] + again + pickle[-3:]
    changed = changed[:3] + (len(changed) - 11).to_bytes(8, "little") + changed[11:]
    data = seal_metadata(changed, seal)
    assert is_own(data)
    with pytest.raises(CheckpointError) as expected:
        unpickled(data, monkeypatch)
    with pytest.raises(CheckpointError) as got:
        parse_index(data, "a")
    assert str(got.value) == str(expected.value)


def test_entries_made_one_by_one_and_together_are_the_same() -> None:
    parts = sample()
    index = parse_index(encoded(parts), "a")
    one_by_one = {key: index.tensors[key] for key in reversed(list(index.tensors))}
    assert one_by_one == parts["tensors"]
    assert list(index.tensors.items()) == list(parts["tensors"].items())
    assert list(index.tensors.values()) == list(parts["tensors"].values())
    assert index.tensors["layer.2xx"] == parts["tensors"]["layer.2xx"]
    assert index.tensors.get("nowhere") is None
    assert "nowhere" not in index.tensors
    assert {**index.tensors} == parts["tensors"]


def test_changed_bytes_are_read_as_the_unpickler_reads_them_or_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    pickle, seal = split_metadata(encoded(sample(60, 6)), "a")
    assert seal is not None
    taken = 0
    for _ in range(500):
        changed = bytearray(pickle)
        for _ in range(chance.choice((1, 1, 2))):
            at = chance.randrange(11, len(changed))
            kind = chance.random()
            if kind < 0.5:
                changed[at] = chance.choice(
                    (chance.randrange(256), changed[at] ^ 1, changed[chance.randrange(len(changed))])
                )
            elif kind < 0.75:
                del changed[at : at + chance.choice((1, 2, 40))]
            else:
                start = chance.randrange(11, len(changed))
                changed[at:at] = changed[start : start + chance.choice((2, 7, 60))]
        changed[3:11] = (len(changed) - 11).to_bytes(8, "little")
        data = seal_metadata(bytes(changed), seal)
        if not is_own(data):
            continue
        taken += 1
        try:
            expected = unpickled(data, monkeypatch)
        except CheckpointError:
            with pytest.raises(CheckpointError):
                parse_index(data, "a")
        else:
            assert parse_index(data, "a") == expected
    assert taken > 50
