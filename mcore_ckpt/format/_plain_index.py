"""A look through the pickle of an index before the machine in C gets it: nothing in it may nest, copy or hash without
end.

`pickle.Unpickler` reads the index of 20,000 tensors ten times as fast as the machine of `_pickle_machine.py`, and has
none of its limits. So those indexes go to it of which a regular expression has seen, in about the time that unpickling
takes, that they are built as every writer builds them:

- tuples hold ints, texts and references to what was memoized before, and are hardly ever tuples of tuples: what each
  may take to hash is added up, by the numbers that memoized tuples have; their ints are from 0 to 2**31 - 1, since of
  others, and of floats, very many tuples with one hash are found at once, which would be compared with each other as
  keys of a dict;
- calls have ints or one text as arguments, or are of a path; instances are made without any;
- state is set from a dict or tuple that was made right there, and dicts and lists are filled where they were made.

To look no further than that, it has to know the boundaries of all opcodes and the number of each memoized tuple. Bytes
0x94 (MEMOIZE) in a stretch of opcodes are counted at once, since arguments with such a byte are taken one by one. What
does not fit is no verdict: the other machine decides.
"""

from __future__ import annotations

import functools
import re

_MEMOIZE, _MARK, _GET, _LONG_GET, _PUT, _LONG_PUT, _FRAME = 0x94, 0x28, 0x68, 0x6A, 0x71, 0x72, 0x95
# What hashing a memoized tuple may take that is not known to take more: shapes of 64 axes are the longest.
_USUAL_WEIGHT = 64
_MAX_WEIGHT = 1024
_MAX_ITEMS = 255
# Longer ints, as keys of a dict, may all have one hash.
_MAX_INT_BYTES = 8
# Longer texts, as keys of a dict, take long to compare with one that is the same.
_MAX_TEXT_BYTES = 4096
# The items of a tuple are looked for in so many stretches of opcodes before it, of at most so many opcodes each.
_STRETCHES = 3
_STRETCH_OPCODES = 200


def _lengths(stop: int, suffix: bytes = b"") -> bytes:
    """A length of less than `stop` in one byte, `suffix`, and as many bytes other than MEMOIZE."""
    return b"|".join(re.escape(bytes((size,))) + suffix + b"[^\x94]{%d}" % size for size in range(stop))


@functools.cache  # compiled on first use, which takes milliseconds
def _stretch(puts: bool, high_byte: int, higher_byte: int) -> re.Pattern[bytes]:
    """As many usual opcodes as possible, none with a byte 0x94 in its argument. `puts`: some numbers in the memo are
    explicit; their third and fourth bytes are at most `high_byte`, `higher_byte`.
    """
    put = b"|q[^\x94]|r[^\x94]{2}(?!\x94)[\\x00-\\x%02x](?!\x94)[\\x00-\\x%02x]" % (high_byte, higher_byte)
    part = {
        b"m": b"(?:\x94%b)?" % (put if puts else b""),
        b"mp": b"(?:(?:\x94%b)0?)?" % (put if puts else b""),  # names are memoized, and perhaps popped
        b"int": b"(?:K[^\x94]|M[^\x94]{2}|J[^\x94]{4}|\x8a(?:%b))" % _lengths(_MAX_INT_BYTES + 1),
        b"small": b"(?:K[^\x94]|M[^\x94]{2}|J[^\x94]{3}(?!\x94)[\x00-\x7f])",
        b"get": b"(?:h[^\x94]|j[^\x94]{4})",
        b"text": b"(?:\x8c(?:%b)|X(?:%b))" % (_lengths(128), _lengths(128, b"\0\0\0")),
        b"name": b"(?:\x8c(?:%b))" % _lengths(40),
    }
    part[b"ints"] = b"(?:%(small)b(?:\x85|%(small)b(?:\x86|%(small)b\x87))|\\((?:%(small)b){0,64}t)" % part
    opcodes = (
        # The most frequent first, in forms that begin with one byte: what does not is left out by that alone.
        b"h[^\x94]",
        b"j[^\x94]{4}",
        b"K[^\x94]K[^\x94]\x86%(m)b(?:\x85%(m)bR%(m)b)?",
        b"\\)\x81%(m)b",
        b"[}\\]]%(m)b\\(?",
        b"u(?:b%(mp)b|\\()?",
        # A shape, or a tuple of ints that something is called with.
        b"%(ints)b%(m)b(?:(?:\x85%(m)b)?R%(m)b)?",
        b"%(int)b",
        b"\\)(?:\x81%(m)b|(?:\x85%(m)b)?R%(m)b)?",
        b"%(text)b(?:%(m)b\x85%(m)bR%(m)b|%(mp)b)",
        b"\x93%(mp)b",
        b"e\\(?|[aN\x88\x89]|s(?!b)|G[^\x94]{8}",
        # The state of a tensor's properties, whose stand-in takes no tuple in it but one of ints behind the rest.
        (
            b"\\((?:%(get)b|[\x88\x89N]|%(name)b%(m)b|(?:%(small)b|%(name)b%(m)b)\x85%(m)bR%(m)b|\x93%(m)b){1,24}"
            b"(?:\\)|%(ints)b%(m)b)?t%(m)bb%(mp)b"
        ),
    )
    return re.compile(b"(?:%b){1,%d}" % (b"|".join(opcodes) % part, _STRETCH_OPCODES), re.DOTALL)


# Bytes of the argument of each opcode that a stretch may consist of; those with a length before them are negative.
_ARGUMENT_BYTES = dict.fromkeys(b"()}]tNRabesu0\x81\x85\x86\x87\x88\x89\x93\x94", 0) | {
    **dict.fromkeys(b"hKq\x80", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"jJr", 4),
    **dict.fromkeys(b"G\x95", 8),
    **dict.fromkeys(b"\x8c\x8a", -1),
    **dict.fromkeys(b"X", -4),
}
_ITEMS = frozenset(b"hjKMJNGX\x8c\x8a\x88\x89")
_TEXTS = frozenset(b"X\x8c")
_PLAINLY_NUMBERED = _TEXTS | frozenset(b"}]")
_ALONE = _ITEMS | frozenset(b"\x80\x95")


def plainly_built(data: bytes) -> bool:
    """Whether the machine in C may unpickle `data`; False if that is not evident."""
    try:
        return data[:1] == b"\x80" and _Scan(data).through()
    except (IndexError, KeyError):  # an opcode or int that no writer uses, or the end
        return False


class _Scan:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._memoized = 0  # objects so far, as long as none has an explicit number
        self._puts = False
        self._weights: dict[int, int] = {}  # of memoized tuples that take more than others, by number
        self._starts: list[int] = []  # of stretches since the last tuple with references

    def through(self) -> bool:
        data, starts = self._data, self._starts
        size = len(data)
        numbers = (255, min(size >> 24, 255)) if size >> 24 else (size >> 16, 0)
        match = _stretch(False, 0, 0).match
        at = 0
        while True:
            found = match(data, at)
            if found is not None:
                start, at = at, found.end()
                self._memoized += data.count(b"\x94", start, at)
                starts.append(start)
                if len(starts) > 2 * _STRETCHES:
                    del starts[:-_STRETCHES]
            opcode = data[at]
            if opcode == 0x2E:  # STOP
                return True
            if opcode == _MARK and found is not None and at - start >= _STRETCH_OPCODES:
                continue  # the stretch may have ended here because it was long enough
            if opcode == _MARK or 0x85 <= opcode <= 0x87:
                at = self._tuple(at)
                if not at:
                    return False
                starts.clear()
            elif opcode in (_PUT, _LONG_PUT) and starts:
                if not self._puts:
                    self._puts = True
                    match = _stretch(True, *numbers).match
                numbered = data[self._last_start(starts[-1], at)]
                if numbered not in _PLAINLY_NUMBERED:
                    return False
                at = self._numbered(at, 0)
                if not at:
                    return False
                if numbered not in _TEXTS and data[at] == _MARK:  # to fill the new list or dict
                    at += 1
                starts.append(at)
            elif opcode in _ALONE:
                starts.append(at)
                at = self._end_of(at)
                if data[at : at + 1] == b"\x94" and opcode in _TEXTS:
                    self._memoized += 1
                    at += 1
            elif found is None:
                return False

    def _end_of(self, at: int) -> int:
        """Where the opcode at `at` ends."""
        argument_bytes = _ARGUMENT_BYTES[self._data[at]]
        at += 1
        if argument_bytes < 0:
            length_at, at = at, at - argument_bytes
            argument_bytes = int.from_bytes(self._data[length_at:at], "little")
            if argument_bytes > (_MAX_INT_BYTES if self._data[length_at - 1] == 0x8A else _MAX_TEXT_BYTES):
                raise IndexError(at)
        at += argument_bytes
        if at > len(self._data):
            raise IndexError(at)
        return at

    def _last_start(self, start: int, stop: int) -> int:
        """Where the last opcode before `stop` starts."""
        while (following := self._end_of(start)) < stop:
            start = following
        return start

    def _tuple(self, at: int) -> int:
        """Where a tuple with references at `at`, and the call that it is the argument of, ends; 0 if it is not
        usual.
        """
        data = self._data
        opcode = data[at]
        if opcode == _MARK:
            items: list[int] = []
            at += 1
            while (data[at] in _ITEMS or data[at] == _FRAME) and len(items) <= _MAX_ITEMS:
                if data[at] != _FRAME:
                    items.append(at)
                at = self._memoized_text(self._end_of(at))
            if data[at] != 0x74:  # TUPLE
                return 0
        else:
            # Mostly the last stretch has them all; those before it are looked through only if it has not.
            for start in reversed(self._starts[-_STRETCHES:]):
                items = self._last_items(start, at)[0x84 - opcode :]
                if len(items) == opcode - 0x84:
                    break
            else:
                return 0
        at += 1
        weight = len(items)
        for item in items:
            kind = data[item]
            if kind in (0x8A, 0x47) or (kind == 0x4A and data[item + 4] >= 0x80):  # LONG1, BINFLOAT, BININT below zero
                return 0
            if kind in (_GET, _LONG_GET):
                number = int.from_bytes(data[item + 1 : item + (2 if kind == _GET else 5)], "little")
                weight += self._weights.get(number, _USUAL_WEIGHT)
        if weight > _MAX_WEIGHT:
            return 0
        at = self._numbered(at, weight)
        if at and data[at] == 0x85:  # the arguments of a shape
            at = self._numbered(at + 1, weight + 1)
            return self._numbered(at + 1, weight) if at and data[at] == 0x52 else 0
        if at and data[at] == 0x52:  # a path is made of it
            return self._numbered(at + 1, weight) if len(items) > 1 else 0
        if at and opcode == _MARK and data[at] == 0x62:  # the state of a tensor's properties
            return at + 1
        return at

    def _last_items(self, start: int, stop: int) -> list[int]:
        """Where what lies on the stack above everything but items starts, of the opcodes between `start` and `stop`."""
        items: list[int] = []
        data, at = self._data, start
        while at < stop:
            kind = data[at]
            if kind in _ITEMS:
                items.append(at)
            elif kind not in (_MEMOIZE, _PUT, _LONG_PUT, _FRAME):
                items.clear()
            at = self._end_of(at)
        return items if at == stop else []

    def _memoized_text(self, at: int) -> int:
        """After what numbers an item of a tuple."""
        if self._data[at] == _MEMOIZE:
            self._memoized += 1
            return at + 1
        if self._puts and self._data[at] in (_PUT, _LONG_PUT):
            return self._numbered(at, 0)
        return at

    def _numbered(self, at: int, weight: int) -> int:
        """After what numbers the object that has been made, if it is numbered; 0 if its number is not known."""
        kind = self._data[at]
        if kind == _MEMOIZE:
            if weight > _USUAL_WEIGHT:
                if self._puts:
                    return 0
                self._weights[self._memoized] = weight
            self._memoized += 1
            return at + 1
        if kind in (_PUT, _LONG_PUT) and self._puts:
            stop = at + (2 if kind == _PUT else 5)
            number = int.from_bytes(self._data[at + 1 : stop], "little")
            if number > len(self._data):
                return 0
            self._weights[number] = max(weight, self._weights.get(number, 0))
            return stop
        return at
