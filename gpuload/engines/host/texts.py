"""The operations and predicates of a compiled template on whole columns of text, in NumPy.

A column is UTF-8 bytes in one buffer with a start and a length per text. All operations but `replace` and the change of
case only move starts and lengths: no byte is copied until the prompts themselves are written, and then once (`gather`).
The definition of every operation is `program.apply_operations`; tests hold the two against each other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.template.probe import WHITE_SPACE
from gpuload.template.program import Operation, Predicate

__all__ = ["Bools", "Buffer", "Bytes", "Ints", "Strings", "answer", "gather", "operate", "strings_of"]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

_BLOCK = 1 << 20
_STRIP_ROUNDS = 64


@dataclass(eq=False)
class Buffer:
    """Bytes that many texts lie in, and where in it things were found already."""

    data: Bytes
    found: dict[bytes, Ints] = field(default_factory=dict)

    def find(self, needle: bytes) -> Ints:
        """Every position of `needle`, ascending (overlapping ones too)."""
        if needle not in self.found:
            self.found[needle] = _positions(self.data, needle)
        return self.found[needle]


@dataclass(frozen=True, eq=False)
class Strings:
    """A column of texts: text i is `buffer.data[start[i] : start[i] + length[i]]`."""

    buffer: Buffer
    start: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.start)

    def text(self, i: int) -> str:
        """Text i."""
        return self.bytes(i).decode()

    def bytes(self, i: int) -> bytes:
        """The bytes of text i."""
        return self.buffer.data[self.start[i] : self.start[i] + self.length[i]].tobytes()

    def arrow(self) -> pa.LargeStringArray:
        """The same texts as an Arrow array of their own."""
        offsets, data = gather(self.buffer.data, self.start, self.start + self.length, np.arange(len(self)))
        return pa.LargeStringArray.from_buffers(len(self), pa.py_buffer(offsets), pa.py_buffer(data))


def strings_of(array: pa.LargeStringArray) -> Strings:
    """A view of an Arrow array (no copy). A null is an empty text."""
    _, offsets, data = array.buffers()
    if not len(array):
        return Strings(Buffer(np.empty(0, np.uint8)), np.empty(0, np.int64), np.empty(0, np.int64))
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    used = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]
    start, length = bounds[:-1] - bounds[0], np.diff(bounds)
    if array.null_count:
        length = np.where(_mask(array.is_valid()), length, 0)
    return Strings(Buffer(used), start, length)


def _mask(array: pa.BooleanArray) -> Bools:
    return np.asarray(array.to_numpy(zero_copy_only=False), bool)


def _positions(data: Bytes, needle: bytes) -> Ints:
    count = len(data) - len(needle) + 1
    if count <= 0:
        return np.empty(0, np.int64)
    # Look for the needle's rarest byte: NumPy compares one byte at many GB/s, and few candidates are left to check.
    sample = np.bincount(data[:: max(1, len(data) >> 16)], minlength=256)
    order = sorted(range(len(needle)), key=lambda i: sample[needle[i]])
    rare, parts = order[0], []
    for low in range(0, count, _BLOCK):
        block = data[low + rare : min(low + _BLOCK, count) + rare]
        hits = np.flatnonzero(block == needle[rare])
        hits += low
        for i in order[1:]:
            if not len(hits):
                break
            hits = hits[data[hits + i] == needle[i]]
        parts.append(hits)
    return np.concatenate(parts).astype(np.int64, copy=False)


def _first(strings: Strings, needle: bytes) -> tuple[Ints, Ints]:
    """Indices of the texts that contain `needle`, and the position of its first occurrence in each."""
    where = strings.buffer.find(needle)
    if not len(where):
        return where, where
    next_ = np.searchsorted(where, strings.start)
    at = where[np.minimum(next_, len(where) - 1)]
    inside = np.flatnonzero((next_ < len(where)) & (at + len(needle) <= strings.start + strings.length))
    return inside, at[inside]


def _last(strings: Strings, needle: bytes) -> tuple[Ints, Ints]:
    """The same for its last occurrence."""
    where = strings.buffer.find(needle)
    if not len(where):
        return where, where
    before = np.searchsorted(where, strings.start + strings.length - len(needle), side="right") - 1
    at = where[np.maximum(before, 0)]
    inside = np.flatnonzero((before >= 0) & (at >= strings.start))
    return inside, at[inside]


def _at_end(strings: Strings, affix: bytes, *, suffix: bool) -> Ints:
    """Indices of the texts that start (or end) with `affix`."""
    hits = np.flatnonzero(strings.length >= len(affix))
    base = strings.start + strings.length - len(affix) if suffix else strings.start
    for i, byte in enumerate(affix):
        if not len(hits):
            break
        hits = hits[strings.buffer.data[base[hits] + i] == byte]
    return hits


def answer(strings: Strings, predicate: Predicate) -> Bools:
    """The answer to `predicate`'s test for every text (its operations are already applied)."""
    value = predicate.value.encode("utf-8", "surrogatepass")
    if predicate.test == "empty" or not value:
        empty = strings.length == 0
        return empty if predicate.test in ("empty", "equals") else np.ones(len(strings), bool)
    if predicate.test == "contains":
        hits, _ = _first(strings, value)
    elif predicate.test == "equals":
        hits = _at_end(strings, value, suffix=False)
        hits = hits[strings.length[hits] == len(value)]
    elif predicate.test in ("startswith", "endswith"):
        hits = _at_end(strings, value, suffix=predicate.test == "endswith")
    else:
        raise ValueError(f"unknown test {predicate.test!r}")
    answers = np.zeros(len(strings), bool)
    answers[hits] = True
    return answers


def operate(strings: Strings, operation: Operation) -> Strings:
    """Every text after one operation."""
    name, arguments = operation.name, operation.arguments
    start, end = strings.start, strings.start + strings.length
    if name in ("strip", "lstrip", "rstrip"):
        start, end = start.copy(), end.copy()
        characters = arguments[0] if arguments else WHITE_SPACE
        if name != "rstrip":
            _strip(strings.buffer.data, start, end, characters, right=False)
        if name != "lstrip":
            _strip(strings.buffer.data, start, end, characters, right=True)
    elif name in ("replace", "lower", "upper"):
        return _rewritten(strings, operation)
    else:
        mark = arguments[0].encode()
        if name in ("removeprefix", "removesuffix"):
            hits = _at_end(strings, mark, suffix=name == "removesuffix")
            at = start[hits] if name == "removeprefix" else end[hits] - len(mark)
        else:
            hits, at = (_last if name.endswith("_last") else _first)(strings, mark)
        if name in ("before", "before_last", "removesuffix"):
            end = end.copy()
            end[hits] = at
        elif name in ("after", "after_last", "removeprefix"):
            start = start.copy()
            start[hits] = at + len(mark)
        else:
            raise ValueError(f"unknown operation {name!r}")
    return Strings(strings.buffer, start, end - start)


@dataclass(frozen=True, eq=False)
class _Characters:
    """Characters to strip: a table of those of one byte, the others as sorted big-endian numbers by their size in
    bytes, and tables of the first and last bytes of those others, which rule nearly every text out at once."""

    single: Bools
    wide: dict[int, Ints]
    leads: Bools
    tails: Bools


@functools.lru_cache(maxsize=64)
def _characters(characters: str) -> _Characters:
    single, leads, tails = (np.zeros(256, bool) for _ in range(3))
    wide: dict[int, list[int]] = {}
    for character in characters:
        code = character.encode("utf-8", "surrogatepass")
        if len(code) == 1:
            single[code[0]] = True
        else:
            leads[code[0]] = tails[code[-1]] = True
            wide.setdefault(len(code), []).append(int.from_bytes(code, "big"))
    return _Characters(
        single, {size: np.unique(np.array(codes, np.int64)) for size, codes in wide.items()}, leads, tails
    )


def _strip(data: Bytes, start: Ints, end: Ints, characters: str, *, right: bool) -> None:
    """Move `start` (or `end`) in place past the characters at that side, one character of every text a round.

    UTF-8 is self-synchronizing: bytes at a text's side that equal a character's encoding are that character.
    """
    known = _characters(characters)
    active = np.flatnonzero(end > start)
    for _ in range(_STRIP_ROUNDS):
        if not len(active):
            return
        byte = data[end[active] - 1 if right else start[active]]
        step = known.single[byte].astype(np.int64)
        maybe = np.flatnonzero((known.tails if right else known.leads)[byte])
        for size, codes in known.wide.items() if len(maybe) else ():
            fits = maybe[end[active[maybe]] - start[active[maybe]] >= size]
            at = end[active[fits]] - size if right else start[active[fits]]
            code = np.zeros(len(fits), np.int64)
            for i in range(size):
                code = code << 8 | data[at + i]
            step[fits[np.isin(code, codes)]] = size
        moving = np.flatnonzero(step)
        active, step = active[moving], step[moving]
        if right:
            end[active] -= step
        else:
            start[active] += step
        active = active[start[active] < end[active]]
    for i in active.tolist():  # a long run: one text at a time, or a megabyte of blanks would take a million rounds
        text = data[start[i] : end[i]].tobytes().decode()
        if right:
            end[i] = start[i] + len(text.rstrip(characters).encode())
        else:
            start[i] = end[i] - len(text.lstrip(characters).encode())


def _rewritten(strings: Strings, operation: Operation) -> Strings:
    texts = strings.arrow()
    if operation.name == "replace":
        old, new = operation.arguments
        return strings_of(pc.replace_substring(texts, old, new))
    # Beyond ASCII Python's own rules hold (one letter can become two, a final sigma), and no library has the same ones.
    plain = pc.string_is_ascii(texts)
    changed = (pc.ascii_lower if operation.name == "lower" else pc.ascii_upper)(texts)
    if not pc.all(plain, min_count=0).as_py():
        other = pc.invert(plain)
        values = [getattr(text, operation.name)() for text in texts.filter(other).to_pylist()]
        changed = pc.replace_with_mask(changed, other, pa.array(values, pa.large_string()))
    return strings_of(changed)


def gather(data: Bytes, start: Ints, end: Ints, which: Ints) -> tuple[Ints, Bytes]:
    """The pieces `data[start[i] : end[i]]` for i in `which`, one after the other.

    Returns:
        offsets (one more than pieces), and the bytes.

    This is where prompts are written, so it is where the time goes. Arrow's `take` of binary values is the fastest
    gather of variable-sized pieces there is on a CPU without code of one's own (7 ns a piece, at memory speed for long
    ones). It reads value i from offsets i and i + 1 and nothing between, so pieces in any order, overlapping or apart,
    are every other value of an array whose offsets are start, end, start, end ... The values in between are never read.
    """
    bounds = np.empty(2 * len(start) + 2, np.int64)
    bounds[0], bounds[-1] = 0, len(data)
    bounds[1:-1:2] = start
    bounds[2:-1:2] = end
    pieces = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    )
    taken = pieces.take(pa.array(2 * which + 1))
    _, offsets, values = taken.buffers()
    return (
        np.frombuffer(offsets, np.int64)[: len(which) + 1] if len(which) else np.zeros(1, np.int64),
        np.empty(0, np.uint8) if values is None else np.frombuffer(values, np.uint8),
    )
