"""The tensors and objects of an index that this package wrote, read off the bytes without making the objects that they
stand for.

`metadata_write` emits every entry from the same few pieces, so that two regular expressions take 20,000 tensors apart
in a fifth of the time that it takes to look through their pickle, unpickle it and check what came out. What the entries
refer to by memo number is held against the numbers that the things have, so that what is read here is what an unpickler
would make of the same bytes. All of the bytes have to fit; whatever does not (another writer, keys in other alphabets,
transforms) is no verdict: None is returned, and the whole pickle is read as anybody's.
"""

from __future__ import annotations

import functools
import operator
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice, repeat
from typing import Final, NamedTuple

from mcore_ckpt.format._own_pickle import integer, memo_get, named_classes
from mcore_ckpt.format.index import ObjectEntry, StoredChunk, StoredItem, TensorEntry

__all__ = ["OwnIndex", "own_index"]

_HEAD_BYTES: Final = 11  # PROTO and FRAME
_MAX_OFFSET: Final = 2**63 - 1
_MAX_AXES: Final = 64
_BININT, _BININT1, _SHORT_TEXT = b"JK\x8c"


class OwnIndex(NamedTuple):
    """What the entries of a pickled index say.

    Attributes:
        tensors, objects: by key, in the order of the file.
        items: where each lies, in the order of `storage_data`.
        files: names that occur in it, as they are: nobody has looked at them.
        rest: the same pickle without any entries.
    """

    tensors: dict[str, TensorEntry]
    objects: dict[str, ObjectEntry]
    items: list[StoredItem]
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
        entries: of a tensor key, dtype, and shape with chunks; of an object its key; what is neither.
        places: of a chunk key, number, offsets, file, offset, length; of an object key, file, offset, length; neither.
        size: a shape that is referred to, or the numbers of one that is made.
        number: an int.
        before_chunks, before_offsets, before_sizes, after_sizes: lengths of what stands between the shapes of a tensor.
    """

    start: bytes
    properties: re.Pattern[bytes]
    file: re.Pattern[bytes]
    open: bytes
    between: bytes
    after: bytes
    entries: re.Pattern[bytes]
    places: re.Pattern[bytes]
    size: re.Pattern[bytes]
    number: re.Pattern[bytes]
    before_chunks: int
    before_offsets: int
    before_sizes: int
    after_sizes: int


@functools.cache  # compiled on first use, which takes milliseconds
def _patterns() -> _Patterns:
    start, gets = named_classes()
    get = {name: re.escape(value) for name, value in gets.items()}

    def instance(name: str) -> bytes:
        return get[name] + rb"\)\x81\}\("

    def compiled(pattern: bytes) -> re.Pattern[bytes]:
        return re.compile(pattern, re.DOTALL)

    reference = b"(?:h.|j.{4})"
    number = rb"(?:K.|J.{4}|\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}))"
    text = b"\x8c(.[^\x94]*)"  # with its length before it; without bytes like MEMOIZE, so that its end is evident
    numbers = rb"%b\((?:%b){0,64}t\x85R\x94" % (get["Size"], number)
    size = b"(?:%b|%b)" % (numbers, reference)
    chunk = b"%b%b%b%b%bub" % (instance("ChunkStorageMetadata"), get["offsets"], size, get["sizes"], size)
    tensor = rb"%b\x94%b%b(%b)%b(%b%b\]\((?:%b)*)eub" % (
        *(text, instance("TensorStorageMetadata"), get["properties"], reference),
        *(get["size"], size, get["chunks"], chunk),
    )
    index = b"%b%b(%b)%b" % (instance("MetadataIndex"), get["fqn"], reference, get["index"])
    info, at = b"ub%b%b" % (instance("_StorageInfo"), get["relative_path"]), get["offset"]
    place = b"%b(%b)%b(%b)ub" % (at, number, get["length"], number)
    chunk_place = b"%b(%b)%b(%b)%b(%b)%b" % (index, number, at, reference, info, reference, place)
    object_place = b"%bN%b(%b|%b)%b" % (index, info, rb"\x8c.[^\x94]*\x94", reference, place)
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
        compiled(rb"%b|%b\x94%b\)\x81|(.+)" % (tensor, text, get["BytesStorageMetadata"])),
        compiled(b"%b|%b|(.+)" % (chunk_place, object_place)),
        compiled(rb"%b\(((?:%b)*)t\x85R\x94|(%b)" % (get["Size"], number, reference)),
        compiled(number),
        len(gets["chunks"] + b"]("),
        len(gets["ChunkStorageMetadata"] + b")\x81}(" + gets["offsets"]),
        len(gets["sizes"]),
        len(b"ub"),
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
    files: dict[bytes, str] = {}
    while (found := form.file.match(data, at)) is not None:
        files[memo_get(memoized)] = _texts([found[1]])[0]
        memoized, at = memoized + 1, found.end()
    entries_at = at + len(form.open)
    places_at = data.find(form.between, entries_at) + len(form.between)
    after = data.find(form.after, places_at)
    if not data.startswith(form.open, at) or places_at < entries_at or after < 0:
        raise _NotOwnError
    entries = form.entries.findall(data, entries_at, places_at - len(form.between))
    places = form.places.findall(data, places_at, after)
    if len(places) != len(sums) or (entries and entries[-1][-1]) or (places and places[-1][-1]):
        raise _NotOwnError
    keys = [row[0] for row in entries if row[0]]
    rows = entries[: len(keys)]
    object_keys = [row[3] for row in entries[len(keys) :]]
    if not all(keys[: len(rows)]) or not all(object_keys) or not all(row[0] for row in rows):
        raise _NotOwnError

    shapes = _Shapes(form, memoized)
    parts = shapes.of([row[2] for row in rows])
    chunk_count = sum(len(part.offsets) for part in parts)
    columns = list(zip(*places[:chunk_count], strict=True)) or [()] * 11
    if (
        list(columns[0]) != list(chain.from_iterable(map(repeat, shapes.keys, [len(part.offsets) for part in parts])))
        or list(columns[1]) != list(chain.from_iterable(part.numbers for part in parts))
        or list(columns[2]) != list(chain.from_iterable(part.offset_gets for part in parts))
    ):
        raise _NotOwnError
    try:
        names = [files[file] for file in columns[3]]
        described = [kinds[row[1]] for row in rows]
    except KeyError:
        raise _NotOwnError from None
    items = _items(names, _integers(columns[4]), _integers(columns[5]), sums[:chunk_count])
    objects = _objects(object_keys, places[chunk_count:], shapes.memoized, files, sums[chunk_count:])
    fqns = _texts(keys)
    fields = zip(
        *(fqns, [dtype for dtype, _ in described], [part.shape for part in parts]),
        *(_chunks(parts, items), [requires_grad for _, requires_grad in described]),
        strict=True,
    )
    tensors = dict(zip(fqns, map(_new_entry, fields), strict=True))
    if len(tensors) != len(fqns) or tensors.keys() & objects.keys():
        raise _NotOwnError
    items += [entry.item for entry in objects.values()]
    body = b"".join((data[_HEAD_BYTES:entries_at], form.between, data[after:]))
    rest = data[:3] + struct.pack("<Q", len(body)) + body
    used = dict.fromkeys(files.values()) | dict.fromkeys(item.file for item in items[chunk_count:])
    return OwnIndex(tensors, objects, items, tuple(used), rest)


# Made of rows without a call of a function of Python's for each.
_new_item = partial(tuple.__new__, StoredItem)
_new_chunk = partial(tuple.__new__, StoredChunk)
_new_entry = partial(tuple.__new__, TensorEntry)


def _chunks(parts: list[_Parts], items: list[StoredItem]) -> list[tuple[StoredChunk, ...]]:
    """The chunks of each tensor."""
    offsets = chain.from_iterable(part.offsets for part in parts)
    sizes = chain.from_iterable(part.sizes for part in parts)
    chunks: Iterator[StoredChunk] = map(_new_chunk, zip(offsets, sizes, items, strict=True))
    counts = {len(part.offsets) for part in parts}
    if len(counts) == 1 and 0 not in counts:
        return list(zip(*[chunks] * counts.pop(), strict=True))
    return [tuple(islice(chunks, len(part.offsets))) for part in parts]


def _texts(texts: list[bytes]) -> list[str]:
    """Texts that have their length in a byte before them."""
    lengths = [text[0] + 1 for text in texts]
    if list(map(len, texts)) != lengths:
        raise _NotOwnError
    try:
        return [text[1:].decode("utf-8", "surrogatepass") for text in texts]
    except UnicodeDecodeError:
        raise _NotOwnError from None


def _integers(tokens: Sequence[bytes]) -> list[int]:
    """The ints that are pickled so; none is negative."""
    usual = [token for token in tokens if token[0] == _BININT]
    values = list(chain.from_iterable(struct.iter_unpack("<xi", b"".join(usual))))
    if len(usual) < len(tokens):
        own = iter(values)
        values = [next(own) if token[0] == _BININT else _integer(token) for token in tokens]
    if values and min(values) < 0:
        raise _NotOwnError
    return values


def _integer(token: bytes) -> int:
    if token[0] == _BININT1:
        return token[1]
    return int.from_bytes(token[1:] if token[0] == _BININT else token[2:], "little", signed=True)


def _items(files: list[str], offsets: list[int], lengths: list[int], sums: Sequence[int]) -> list[StoredItem]:
    if files and max(map(operator.add, offsets, lengths)) > _MAX_OFFSET:
        raise _NotOwnError
    return list(map(_new_item, zip(files, offsets, lengths, repeat(()), sums)))


def _objects(
    keys: list[bytes], places: list[tuple[bytes, ...]], memoized: int, files: dict[bytes, str], sums: Sequence[int]
) -> dict[str, ObjectEntry]:
    """Objects by key; new files are added to `files`."""
    if [row[6] for row in places] != [memo_get(memoized + n) for n in range(len(keys))]:
        raise _NotOwnError
    memoized += len(keys)
    files = dict(files)
    names = []
    for row in places:
        token = row[7]
        if token[0] == _SHORT_TEXT:
            token, text = memo_get(memoized), token[1:-1]
            files[token] = _texts([text])[0]
            memoized += 1
        if token not in files:
            raise _NotOwnError
        names.append(files[token])
    items = _items(names, _integers([row[8] for row in places]), _integers([row[9] for row in places]), sums)
    objects = {fqn: ObjectEntry(fqn, item) for fqn, item in zip(_texts(keys), items, strict=True)}
    if len(objects) != len(keys):
        raise _NotOwnError
    return objects


class _Parts(NamedTuple):
    """Shape and chunks of a tensor.

    Attributes:
        shape: of the tensor.
        offsets, sizes: of each chunk.
        offset_gets: what refers to the offsets of each.
        numbers: of the chunks, as they are pickled.
        memoized: how many shapes are made in it.
    """

    shape: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    offset_gets: tuple[bytes, ...]
    numbers: tuple[bytes, ...]
    memoized: int


class _Shapes:
    """Shapes and chunks of one tensor after the other; most are like those of another one.

    Attributes:
        keys: what refers to the key of each tensor so far.
        memoized: how many things have a number so far.
    """

    def __init__(self, form: _Patterns, memoized: int) -> None:
        self._form = form
        self._sizes: dict[bytes, tuple[int, ...]] = {}
        self._known: dict[bytes, _Parts] = {}
        self.keys: list[bytes] = []
        self.memoized = memoized

    def of(self, parts: list[bytes]) -> list[_Parts]:
        found = []
        known, keys, memoized = self._known, self.keys, self.memoized
        for part in parts:
            keys.append(memo_get(memoized))
            memoized += 1
            like = known.get(part)
            if like is None:
                self.memoized = memoized
                like = self._parsed(part)
                memoized = self.memoized
                if not like.memoized:
                    known[part] = like
            found.append(like)
        self.memoized = memoized
        return found

    def _parsed(self, part: bytes) -> _Parts:
        form, before = self._form, self.memoized
        shape, _, at = self._size(part, 0)
        at += form.before_chunks
        starts, lengths, gets = [], [], []
        while at < len(part):
            offsets, get, at = self._size(part, at + form.before_offsets)
            sizes, _, at = self._size(part, at + form.before_sizes)
            at += form.after_sizes
            starts.append(offsets)
            lengths.append(sizes)
            gets.append(get)
            if not len(shape) == len(offsets) == len(sizes) or any(
                start + size > whole for start, size, whole in zip(offsets, sizes, shape, strict=True)
            ):
                raise _NotOwnError
        if len(set(starts)) != len(starts):  # two chunks that are one in `storage_data`
            raise _NotOwnError
        numbers = tuple(map(integer, range(len(gets))))
        return _Parts(shape, tuple(starts), tuple(lengths), tuple(gets), numbers, self.memoized - before)

    def _size(self, part: bytes, at: int) -> tuple[tuple[int, ...], bytes, int]:
        """A shape, what refers to it, and where it ends."""
        found = self._form.size.match(part, at)
        if found is None:
            raise _NotOwnError
        get = found[2]
        if get is None:
            get = memo_get(self.memoized)
            self._sizes[get] = tuple(_integers(self._form.number.findall(found[1])))
            self.memoized += 1
        sizes = self._sizes.get(get)
        if sizes is None or len(sizes) > _MAX_AXES:
            raise _NotOwnError
        return sizes, get, found.end()
