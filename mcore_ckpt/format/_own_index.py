"""The tensors and objects of an index that this package wrote, read off the bytes without making the objects that they
stand for.

`metadata_write` emits every entry from the same few pieces, so that a split at these takes 20,000 tensors apart in a
tenth of the time that it takes to look through their pickle, unpickle it and check what came out. What the entries
refer to by memo number is held against the numbers that the things have, so that what is read here is what an unpickler
would make of the same bytes (what is set once more, behind them, is for the caller to see). All of the bytes have to
fit; whatever does not (another writer, keys of more than 255 bytes, transforms) is no verdict: None is returned, and
the whole pickle is read as anybody's.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import struct
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain, compress, repeat
from typing import Final, NamedTuple

from mcore_ckpt.format._own_pickle import memo_get, named_classes
from mcore_ckpt.format.index import ObjectEntry, PackedTensors, StoredItem, StoredPlaces, TensorForm

__all__ = ["OwnIndex", "own_index"]

_HEAD_BYTES: Final = 11  # PROTO and FRAME
_MAX_OFFSET: Final = 2**63 - 1
_MAX_AXES: Final = 64
# Chosen for it, very many shapes would have one hash, and each be compared with all others.
_MAX_SHAPES_OF_ONE_HASH: Final = 16
_BININT, _BININT1, _LONG1, _GET, _LONG_GET, _SHORT_TEXT = b"JK\x8ahj\x8c"
_BYTES: Final = frozenset((_BININT1, _GET))
_LONG1_LENGTHS: Final = frozenset((b"\x05", b"\x06", b"\x07", b"\x08"))
# How struct calls the numbers of these.
_WIDTHS: Final = {_BININT: "i", _BININT1: "B", _GET: "B", _LONG_GET: "I"}


class OwnIndex(NamedTuple):
    """What the entries of a pickled index say.

    Attributes:
        tensors, objects: by key, in the order of the file.
        items: how many there are of both.
        files: names that occur in it, as they are: nobody has looked at them.
        rest: the same pickle without any entries.
    """

    tensors: PackedTensors
    objects: dict[str, ObjectEntry]
    items: int
    files: tuple[str, ...]
    rest: bytes


class _Patterns(NamedTuple):
    """How the bytes of an index look.

    Attributes:
        start: what the pickle begins with, behind its frame.
        properties: a dtype that is memoized: its name, and whether gradients are required.
        file: a file name that is memoized.
        open: from the last file name to the first entry.
        between: from the last entry to the first place.
        after: what follows the last place.
        described: what stands between the key of a tensor and the reference to its dtype.
        size: what stands between that and the shape.
        chunks: what stands between the shape and the chunks.
        chunk: what each chunk begins with; its offsets follow.
        sizes: what stands between these and its sizes.
        made: what a shape begins with that is made, not referred to.
        objects: of an object its key; what is none.
        place: what each place begins with.
        chunk_place: of a chunk what refers to its key, its number, what refers to its offsets and file; offset, length.
        object_place: of an object what refers to its key, its file, offset, length.
    """

    start: bytes
    properties: re.Pattern[bytes]
    file: re.Pattern[bytes]
    open: bytes
    between: bytes
    after: bytes
    described: bytes
    size: bytes
    chunks: bytes
    chunk: bytes
    sizes: bytes
    made: bytes
    objects: re.Pattern[bytes]
    place: bytes
    chunk_place: re.Pattern[bytes]
    object_place: re.Pattern[bytes]


# From the last chunk of a tensor to the key of the next one, whose length follows.
_NEXT_KEY: Final = b"eub\x8c"
# What a chunk ends with, and what a shape does that is made.
_CHUNK_END: Final = b"ub"
_MADE_END: Final = b"t\x85R\x94"


@functools.cache  # compiled on first use, which takes milliseconds
def _patterns() -> _Patterns:
    start, gets = named_classes()
    get = {name: re.escape(value) for name, value in gets.items()}

    def instance(name: str, gets: Mapping[str, bytes], opened: bytes = b")\x81}(") -> bytes:
        return gets[name] + opened

    def compiled(pattern: bytes) -> re.Pattern[bytes]:
        return re.compile(pattern, re.DOTALL)

    reference = b"(h.|j.{4})"
    number = rb"(K.|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
    text = b"\x8c(.[^\x94]*)"  # with its length before it; without bytes like MEMOIZE, so that its end is evident
    info = b"ub" + instance("_StorageInfo", get, rb"\)\x81\}\(") + get["relative_path"]
    at = b"%b%b%b%bub" % (get["offset"], number, get["length"], number)
    chunk_place = b"%b%b%b%b%b" % (reference, get["index"], number, get["offset"], reference)
    properties = (
        rb"%b\)\x81\(\x8c\x05torch\x8c(.\w{1,30})\x93%b\x8c\x0dtorch\.strided\x85R([\x88\x89])%bK\x00\x85R\x89tb\x940"
    )
    return _Patterns(
        start,
        compiled(properties % (get["TensorProperties"], get["_get_layout"], get["_MEM_FORMAT_ENCODING"])),
        compiled(text + b"\x940"),
        gets["Metadata"] + b")\x81}(\x8c\x0cplanner_dataN\x8c\x13state_dict_metadata}(",
        b"u\x8c\x0cstorage_data}(",
        b"u\x8c\x0cstorage_meta",
        b"\x94" + instance("TensorStorageMetadata", gets) + gets["properties"],
        gets["size"],
        gets["chunks"] + b"](",
        instance("ChunkStorageMetadata", gets) + gets["offsets"],
        gets["sizes"],
        gets["Size"] + b"(",
        compiled(rb"%b\x94%b\)\x81|(.+)" % (text, get["BytesStorageMetadata"])),
        instance("MetadataIndex", gets) + gets["fqn"],
        compiled(chunk_place + info + reference + at),
        compiled(rb"%b%bN%b(\x8c.[^\x94]*\x94|h.|j.{4})%b" % (reference, get["index"], info, at)),
    )


class _NotOwnError(Exception):
    """Something does not fit."""


def own_index(data: bytes, sums: Sequence[int], dtypes: Mapping[str, str]) -> OwnIndex | None:
    """Take the entries of an index out of its pickle.

    Args:
        data: the pickle.
        sums: the CRC-32 of each item, in the order of `storage_data`.
        dtypes: names that a dtype may have, each mapped to itself.

    Returns:
        What they say; every number in it is a length or offset that can be, and every box lies in its tensor. None if
        it cannot be read off like that.
    """
    try:
        return _read(data, sums, dtypes)
    except _NotOwnError:
        return None


def _read(data: bytes, sums: Sequence[int], dtypes: Mapping[str, str]) -> OwnIndex:
    form = _patterns()
    if not data.startswith(form.start, _HEAD_BYTES) or data[:3] != b"\x80\x04\x95":
        raise _NotOwnError
    at = _HEAD_BYTES + len(form.start)
    memoized = len(named_classes()[1])
    kinds: dict[bytes, tuple[str, bool]] = {}
    while (found := form.properties.match(data, at)) is not None:
        dtype = dtypes.get(_texts([found[1]])[0])
        if dtype is None:
            raise _NotOwnError
        kinds[memo_get(memoized)] = dtype, found[2] == b"\x88"
        memoized, at = memoized + 1, found.end()
    files: dict[int, str] = {}
    while (found := form.file.match(data, at)) is not None:
        files[memoized] = _texts([found[1]])[0]
        memoized, at = memoized + 1, found.end()
    entries_at = at + len(form.open)
    places_at = data.find(form.between, entries_at) + len(form.between)
    after = data.find(form.after, places_at)
    if not data.startswith(form.open, at) or places_at < entries_at or after < 0:
        raise _NotOwnError
    keys, rows, object_keys = _entries(data[entries_at : places_at - len(form.between)], form)
    places = data[places_at:after].split(form.place)
    if places.pop(0) or len(places) != len(sums):
        raise _NotOwnError

    shapes = _Shapes(form, memoized, kinds)
    parts = shapes.of(rows)
    counts = [len(part.offset_gets) for part in parts]
    chunk_count = sum(counts)
    if chunk_count > len(places):
        raise _NotOwnError
    fqn_gets, numbers, offset_gets, file_gets, offsets, lengths = _numbers_of(places[:chunk_count], form.chunk_place)
    if (
        fqn_gets != list(chain.from_iterable(map(repeat, shapes.keys, counts)))
        or numbers != list(chain.from_iterable(map(range, counts)))
        or offset_gets != list(chain.from_iterable(part.offset_gets for part in parts))
    ):
        raise _NotOwnError
    if not files.keys() >= set(file_gets):
        raise _NotOwnError
    own_files = list(dict.fromkeys(files.values()))
    numbers_of_files = dict(zip(own_files, range(len(own_files)), strict=True))
    number_of = {get: numbers_of_files[name] for get, name in files.items()}
    _check_places(offsets, lengths)
    places_of_chunks = StoredPlaces(
        own_files,
        array("I", map(number_of.__getitem__, file_gets)),
        array("q", offsets),
        array("q", lengths),
        array("I", sums[:chunk_count]),
    )
    objects = _objects(object_keys, places[chunk_count:], shapes.memoized, files, sums[chunk_count:], form)
    tensors = PackedTensors(_keys(keys), [part.form for part in parts], places_of_chunks)
    if len(tensors) != len(keys) or tensors.keys() & objects.keys():
        raise _NotOwnError
    body = b"".join((data[_HEAD_BYTES:entries_at], form.between, data[after:]))
    rest = data[:3] + struct.pack("<Q", len(body)) + body
    used = dict.fromkeys(own_files) | dict.fromkeys(entry.item.file for entry in objects.values())
    return OwnIndex(tensors, objects, len(places), tuple(used), rest)


def _entries(data: bytes, form: _Patterns) -> tuple[list[bytes], list[bytes], list[bytes]]:
    """Keys of the tensors, what follows each of them, and keys of the objects."""
    first, *pieces = data.split(form.described)
    if not pieces:
        return [], [], _object_keys(first, form)
    if first[:1] != _NEXT_KEY[-1:]:
        raise _NotOwnError
    # Between two of these stand the rest of one tensor, and the key of the next.
    split = [piece.rpartition(_NEXT_KEY) for piece in pieces[:-1]]
    if not all(end for _, end, _ in split):
        raise _NotOwnError
    last, end, objects = (pieces[-1] + _NEXT_KEY[-1:]).partition(_NEXT_KEY)
    if not end:
        raise _NotOwnError
    keys = [first[1:], *(key for _, _, key in split)]
    rows = [row for row, _, _ in split]
    return keys, [*rows, last], _object_keys(_NEXT_KEY[-1:] + objects[:-1] if objects else b"", form)


def _object_keys(data: bytes, form: _Patterns) -> list[bytes]:
    found = form.objects.findall(data)
    if found and found[-1][1]:
        raise _NotOwnError
    return [key for key, _ in found]


def _keys(texts: list[bytes]) -> list[str]:
    """As `_texts`, of tens of thousands."""
    lengths = [len(text) - 1 for text in texts]
    bodies = b"\n".join([text[1:] for text in texts])
    if bodies.count(b"\n") >= len(texts) or not all(texts) or [text[0] for text in texts] != lengths:
        return _texts(texts)
    return _decoded(bodies).split("\n") if texts else []


def _texts(texts: list[bytes]) -> list[str]:
    """Texts that have their length in a byte before them."""
    if not all(texts) or [text[0] + 1 for text in texts] != list(map(len, texts)):
        raise _NotOwnError
    return [_decoded(text[1:]) for text in texts]


def _decoded(text: bytes) -> str:
    try:
        return text.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise _NotOwnError from None


def _numbers_of(rows: list[bytes], pattern: re.Pattern[bytes]) -> list[list[int]]:
    """The numbers in rows of bytes, by column: of each group of `pattern`, which all rows match.

    Nearly all rows are alike but for the numbers themselves. Those of one length are held against the first of them, a
    byte of all rows at a time, and their numbers taken out together; where that fails, each is looked at by itself.
    """
    if not rows:
        return [[] for _ in range(pattern.groups)]
    lengths = list(map(len, rows))
    found = {
        length: iter(_numbers_of_alike(list(compress(rows, map(length.__eq__, lengths))), pattern))
        for length in set(lengths)
    }
    return list(map(list, zip(*map(next, map(found.__getitem__, lengths)), strict=True)))


def _numbers_of_alike(rows: list[bytes], pattern: re.Pattern[bytes]) -> list[tuple[int, ...]]:
    first, joined, count = rows[0], b"".join(rows), len(rows)
    match = pattern.fullmatch(first)
    if match is None:
        raise _NotOwnError
    form, long, at = "<", [], 0
    constant: list[int] = []
    for group in range(1, pattern.groups + 1):
        start, stop = match.span(group)
        start += 2 if first[start] == _LONG1 else 1
        width = _WIDTHS.get(first[match.start(group)], f"{stop - start}s")
        if width.endswith("s"):
            long.append(group - 1)
        form += f"{start - at}x{width}"
        constant += range(at, start)
        at = stop
    form += f"{len(first) - at}x"
    constant += range(at, len(first))
    if any(joined[at :: len(first)] != first[at : at + 1] * count for at in constant):
        return [_numbers_of_one(row, pattern) for row in rows]
    numbers = list(struct.iter_unpack(form, joined))
    if long:
        columns = list(zip(*numbers, strict=True))
        for column in long:
            columns[column] = tuple([int.from_bytes(value, "little", signed=True) for value in columns[column]])
        numbers = list(zip(*columns, strict=True))
    return numbers


def _numbers_of_one(row: bytes, pattern: re.Pattern[bytes]) -> tuple[int, ...]:
    match = pattern.fullmatch(row)
    if match is None:
        raise _NotOwnError
    return tuple(map(_integer, match.groups()))


def _integer(token: bytes) -> int:
    """An int that is pickled so, or the number of what is referred to."""
    if token[0] in _BYTES:
        return token[1]
    return int.from_bytes(token[2:] if token[0] == _LONG1 else token[1:], "little", signed=token[0] != _LONG_GET)


def _integers(tokens: bytes) -> tuple[int, ...]:
    """The ints that are pickled so, one after the other; none is negative."""
    at, values = 0, []
    while at < len(tokens):
        code = tokens[at]
        if code == _BININT1:
            stop = at + 2
        elif code == _BININT:
            stop = at + 5
        elif code == _LONG1 and tokens[at + 1 : at + 2] in _LONG1_LENGTHS:
            stop = at + 2 + tokens[at + 1]
        else:
            raise _NotOwnError
        if stop > len(tokens):
            raise _NotOwnError
        values.append(_integer(tokens[at:stop]))
        at = stop
    if values and min(values) < 0:
        raise _NotOwnError
    return tuple(values)


def _check_places(offsets: list[int], lengths: list[int]) -> None:
    if offsets and (min(offsets) < 0 or min(lengths) < 0 or max(map(operator.add, offsets, lengths)) > _MAX_OFFSET):
        raise _NotOwnError


def _objects(
    keys: list[bytes],
    places: list[bytes],
    memoized: int,
    files: dict[int, str],
    sums: Sequence[int],
    form: _Patterns,
) -> dict[str, ObjectEntry]:
    """Objects by key; new files are added to `files`."""
    found = [match.groups() for match in map(form.object_place.fullmatch, places) if match]
    if len(found) != len(keys) or [_integer(row[0]) for row in found] != list(range(memoized, memoized + len(keys))):
        raise _NotOwnError
    memoized += len(keys)
    files = dict(files)
    names = []
    for _, file, _, _ in found:
        if file[0] == _SHORT_TEXT:
            number, memoized = memoized, memoized + 1
            files[number] = _texts([file[1:-1]])[0]
        else:
            number = _integer(file)
        if number not in files:
            raise _NotOwnError
        names.append(files[number])
    offsets, lengths = ([_integer(row[column]) for row in found] for column in (2, 3))
    _check_places(offsets, lengths)
    items = map(StoredItem, names, offsets, lengths, repeat(()), sums)
    objects = {fqn: ObjectEntry(fqn, item) for fqn, item in zip(_texts(keys), items, strict=True)}
    if len(objects) != len(keys):
        raise _NotOwnError
    return objects


class _Parts(NamedTuple):
    """What follows the key of a tensor.

    Attributes:
        form: all of it but what follows.
        offset_gets: number of the thing that the offsets of each chunk are.
    """

    form: TensorForm
    offset_gets: tuple[int, ...]


class _Shapes:
    """Shapes and chunks of one tensor after the other; most are like those of another one.

    Args:
        form: how it looks.
        memoized: how many things have a number so far.
        kinds: what a reference to a dtype stands for.

    Attributes:
        keys: number of the key of each tensor so far.
        memoized: see there.
    """

    def __init__(self, form: _Patterns, memoized: int, kinds: Mapping[bytes, tuple[str, bool]]) -> None:
        self._form = form
        self._kinds = kinds
        self._sizes: dict[bytes, tuple[tuple[int, ...], int]] = {}
        self._by_hash: dict[int, list[tuple[int, ...]]] = {}
        self._known: dict[bytes, _Parts] = {}
        self.keys: list[int] = []
        self.memoized = memoized

    def of(self, rows: list[bytes]) -> list[_Parts]:
        found = []
        known, keys, memoized = self._known, self.keys, self.memoized
        for row in rows:
            keys.append(memoized)
            memoized += 1
            like = known.get(row)
            if like is None:
                self.memoized = memoized
                like = self._parsed(row)
                memoized = self.memoized
            found.append(like)
        self.memoized = memoized
        return found

    def _parsed(self, row: bytes) -> _Parts:
        form = self._form
        head, *chunks = row.split(form.chunk)
        kind_get, separator, size = head.partition(form.size)
        kind = self._kinds.get(kind_get)
        if kind is None or not separator or not size.endswith(form.chunks):
            raise _NotOwnError
        shape, number = self._size(size[: -len(form.chunks)])
        if 0 in shape and math.prod(filter(None, shape)) > _MAX_OFFSET:  # axes that cannot be multiplied
            raise _NotOwnError
        starts, lengths, numbers = [], [], []
        # The same as it looks where all of its shapes are referred to, as in most of the tensors that are like it.
        again = [kind_get, form.size, memo_get(number), form.chunks]
        for chunk in chunks:
            start, separator, size = chunk.partition(form.sizes)
            if not separator or not size.endswith(_CHUNK_END):
                raise _NotOwnError
            offsets, number = self._size(start)
            sizes, size_number = self._size(size[: -len(_CHUNK_END)])
            again += form.chunk, memo_get(number), form.sizes, memo_get(size_number), _CHUNK_END
            starts.append(offsets)
            lengths.append(sizes)
            numbers.append(number)
            if not len(shape) == len(offsets) == len(sizes):
                raise _NotOwnError
            for first, count, whole in zip(offsets, sizes, shape, strict=True):
                if first + count > whole:
                    raise _NotOwnError
        if len(set(starts)) != len(starts):  # two chunks that are one in `storage_data`
            raise _NotOwnError
        parts = _Parts(TensorForm(*kind, shape, tuple(starts), tuple(lengths)), tuple(numbers))
        self._known[b"".join(again)] = parts
        return parts

    def _size(self, token: bytes) -> tuple[tuple[int, ...], int]:
        """A shape, and its number."""
        known = self._sizes.get(token)
        if known is not None:
            return known
        made, number = self._form.made, self.memoized
        if not token.startswith(made) or not token.endswith(_MADE_END):
            raise _NotOwnError
        sizes = _integers(token[len(made) : -len(_MADE_END)])
        same = self._by_hash.setdefault(hash(sizes), [])
        if sizes not in same:
            same.append(sizes)
        if len(sizes) > _MAX_AXES or len(same) > _MAX_SHAPES_OF_ONE_HASH:
            raise _NotOwnError
        self.memoized += 1
        self._sizes[memo_get(number)] = sizes, number
        return sizes, number
