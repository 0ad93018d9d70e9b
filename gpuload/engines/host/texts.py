"""Operations on columns of text in NumPy: `protocol.TextOperations` of the host.

All operations except `replace` and the changes of case only move starts and lengths: no byte is copied until the
prompts are written, and then once (`gather`). `program.apply_operations` defines every operation; the tests compare the
two.
"""

import functools
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrow import as_arrow, as_numpy
from gpuload.engines.conversations import text_column
from gpuload.engines.protocol import TextColumn
from gpuload.template.probe import WHITE_SPACE
from gpuload.template.program import Operation, Predicate, apply_operations

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

_CUTS = frozenset(("before", "after", "before_last", "after_last", "removeprefix", "removesuffix"))
_BLOCK = 1 << 20  # bytes searched at a time: a block and its hits stay in the CPU's cache
_STRIP_ROUNDS = 64
_NEEDLES = 512  # strings in one regular expression


class HostTexts:
    """Operations on texts in host memory. An instance serves one column of prompts: it remembers where it has found
    which literal in which buffer."""

    xp: ModuleType = np

    def __init__(self) -> None:
        # (id of the buffer, literal) → the buffer, which must stay alive for its id to be valid, and the positions.
        self._found: dict[tuple[int, bytes], tuple[Bytes, Ints]] = {}

    @staticmethod
    def current() -> AbstractContextManager[Any]:
        return nullcontext()

    @staticmethod
    def bytes_at(texts: TextColumn, numbers: list[int]) -> list[bytes]:
        start, length = texts.start, texts.length
        return [texts.data[start[i] : start[i] + length[i]].tobytes() for i in numbers]

    @staticmethod
    def unsupported(operation: Operation) -> str | None:
        return None

    def operate(self, texts: TextColumn, operation: Operation) -> TextColumn:
        name, arguments = operation.name, operation.arguments
        start, end = texts.start, texts.start + texts.length
        if name in ("strip", "lstrip", "rstrip"):
            start, end = start.copy(), end.copy()
            characters = arguments[0] if arguments else WHITE_SPACE
            if name != "rstrip":
                _strip(texts.data, start, end, characters, right=False)
            if name != "lstrip":
                _strip(texts.data, start, end, characters, right=True)
        elif name in ("lower", "upper") or (name == "replace" and len(arguments) == 2):
            return _rewritten(texts, operation)
        elif name not in _CUTS:  # others are rare: one text after the other
            changed = [apply_operations(text, (operation,)) for text in as_arrow_texts(texts).to_pylist()]
            return text_column(as_arrow(changed, pa.large_string()))
        else:
            mark = arguments[0].encode()
            if name in ("removeprefix", "removesuffix"):
                hits = _with_affix(texts, mark, suffix=name == "removesuffix")
                at = start[hits] if name == "removeprefix" else end[hits] - len(mark)
            else:
                hits, at = (self.last if name.endswith("_last") else self._first)(texts, mark)
            if name in ("before", "before_last", "removesuffix"):
                end = end.copy()
                end[hits] = at
            else:
                start = start.copy()
                start[hits] = at + len(mark)
        return TextColumn(texts.data, start, end - start)

    def answer(self, texts: TextColumn, predicate: Predicate) -> Bools:
        value = predicate.value.encode("utf-8", "surrogatepass")
        if predicate.test == "empty" or not value:
            empty: Bools = texts.length == 0
            return empty if predicate.test in ("empty", "equals") else np.ones(len(texts), bool)
        if predicate.test == "contains":
            hits, _ = self._first(texts, value)
        elif predicate.test == "equals":
            hits = _with_affix(texts, value, suffix=False)
            hits = hits[texts.length[hits] == len(value)]
        elif predicate.test in ("startswith", "endswith"):
            hits = _with_affix(texts, value, suffix=predicate.test == "endswith")
        else:
            raise ValueError(f"unknown test {predicate.test!r}")
        answers = np.zeros(len(texts), bool)
        answers[hits] = True
        return answers

    @staticmethod
    def contains_any(texts: TextColumn, needles: Sequence[str]) -> Bools:
        found = np.zeros(len(texts), bool)
        by_start: dict[str, list[str]] = {}
        for needle in needles:
            by_start.setdefault(needle[0], []).append(re.escape(needle))
        # Arrow's regular expressions search for a first byte that all alternatives share at memory speed.
        column = as_arrow_texts(texts).cast(pa.large_binary()) if by_start else None
        for some in by_start.values():
            for low in range(0, len(some), _NEEDLES):
                hits = pc.match_substring_regex(column, "|".join(some[low : low + _NEEDLES]))
                found |= as_numpy(hits)
        return found

    @staticmethod
    def not_utf8(texts: TextColumn) -> Bools:
        bad = np.zeros(len(texts), bool)
        if not _is_utf8(texts):
            for i in range(len(texts)):
                try:
                    texts.data[texts.start[i] : texts.start[i] + texts.length[i]].tobytes().decode()
                except UnicodeDecodeError:
                    bad[i] = True
        return bad

    @staticmethod
    def distinct(texts: TextColumn) -> tuple[Ints, Ints, Bools]:
        # Arrow compares the bytes themselves, so that no text is ever in a wrong group.
        encoded = pc.dictionary_encode(as_arrow_texts(texts).cast(pa.large_binary()))
        group = as_numpy(encoded.indices).astype(np.int64)
        example = np.zeros(len(encoded.dictionary), np.int64)
        example[group[::-1]] = np.arange(len(texts))[::-1]  # the last assignment wins: each group's first text
        return example, group, np.zeros(len(texts), bool)

    @staticmethod
    def shape_hashes(first: Ints, count: Ints, code: Ints) -> Ints:
        # A row's hash is the sum of its messages' codes, each times a random number for its place in the row.
        message, place = _messages(first, count)
        factors = np.random.default_rng(0).integers(1, 1 << 63, int(count.max(initial=1)), dtype=np.uint64)
        mixed = (code[message] + 1).astype(np.uint64) * factors[place]
        sums = np.zeros(len(first), np.uint64)
        filled = np.flatnonzero(count)
        if len(filled):  # reduceat would give an empty row the value behind it
            sums[filled] = np.add.reduceat(mixed, (np.cumsum(count) - count)[filled])
        return sums.view(np.int64)

    @staticmethod
    def same_shapes(first: Ints, count: Ints, code: Ints, example: Ints) -> Bools:
        same = np.asarray(count == count[example])
        message, place = _messages(first, count)
        row = np.repeat(np.arange(len(first)), count)
        # Where the counts differ the example's message may lie behind its row, or behind the last message.
        other = np.minimum(np.repeat(first[example], count) + place, max(len(code) - 1, 0))
        same[row[code[message] != code[other]]] = False
        return same

    def _find(self, data: Bytes, literal: bytes) -> Ints:
        """Every position of a literal in a buffer, ascending; overlapping ones too."""
        key = (id(data), literal)
        if key not in self._found:
            self._found[key] = (data, _positions(data, literal))
        return self._found[key][1]

    def _first(self, texts: TextColumn, literal: bytes) -> tuple[Ints, Ints]:
        """The numbers of the texts that contain `literal`, and the position of its first occurrence in each."""
        where = self._find(texts.data, literal)
        if not len(where):
            return where, where
        following = np.searchsorted(where, texts.start)
        at = where[np.minimum(following, len(where) - 1)]
        inside = np.flatnonzero((following < len(where)) & (at + len(literal) <= texts.start + texts.length))
        return inside, at[inside]

    def last(self, texts: TextColumn, literal: bytes) -> tuple[Ints, Ints]:
        """The same for its last occurrence."""
        where = self._find(texts.data, literal)
        if not len(where):
            return where, where
        before = np.searchsorted(where, texts.start + texts.length - len(literal), side="right") - 1
        at = where[np.maximum(before, 0)]
        inside = np.flatnonzero((before >= 0) & (at >= texts.start))
        return inside, at[inside]


def _messages(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """The messages of all rows, row after row: each one's number among all messages, and its place in its row."""
    place = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(first, count) + place, place


def _positions(data: Bytes, literal: bytes) -> Ints:
    count = len(data) - len(literal) + 1
    if count <= 0:
        return np.empty(0, np.int64)
    # Search for the literal's rarest byte: NumPy compares one byte at many GB/s, and few candidates remain to check.
    sample = np.bincount(data[:: max(1, len(data) >> 16)], minlength=256)
    order = sorted(range(len(literal)), key=lambda i: sample[literal[i]])
    rare, parts = order[0], []
    for low in range(0, count, _BLOCK):
        block = data[low + rare : min(low + _BLOCK, count) + rare]
        hits = np.flatnonzero(block == literal[rare])
        hits += low
        for i in order[1:]:
            if not len(hits):
                break
            hits = hits[data[hits + i] == literal[i]]
        parts.append(hits)
    return np.concatenate(parts).astype(np.int64, copy=False)


def _with_affix(texts: TextColumn, affix: bytes, *, suffix: bool) -> Ints:
    """The numbers of the texts that start (or end) with `affix`."""
    hits = np.flatnonzero(texts.length >= len(affix))
    base = texts.start + texts.length - len(affix) if suffix else texts.start
    for i, byte in enumerate(affix):
        if not len(hits):
            break
        hits = hits[texts.data[base[hits] + i] == byte]
    return hits


def _is_utf8(texts: TextColumn) -> bool:
    """Whether all texts are valid; False also where only bytes outside every text are not."""
    data = texts.data
    if not len(data) or data.max() < 0x80:
        return True
    # If the whole buffer is valid and no text begins in the middle of a character, every text is valid.
    starts = texts.start[texts.length > 0]
    if (data[starts] & 0xC0 == 0x80).any():
        return False
    bounds = np.array([0, len(data)], np.int64)
    try:
        pa.LargeStringArray.from_buffers(1, pa.py_buffer(bounds), pa.py_buffer(data)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def as_arrow_texts(texts: TextColumn) -> pa.LargeStringArray:
    """The texts as an Arrow array: a view where they follow each other without gaps, else a copy."""
    end = texts.start + texts.length
    if len(texts) and bool((texts.start[1:] == end[:-1]).all()):
        offsets, data = np.append(texts.start, end[-1]), texts.data
    else:
        offsets, data = gather(texts.data, texts.start, end, np.arange(len(texts)))
    return pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(offsets), pa.py_buffer(data))


@dataclass(frozen=True, eq=False)
class _Characters:
    """Characters to strip.

    Attributes:
        single: (256,) bool, those of one byte.
        wide: size in bytes → the longer ones as sorted big-endian numbers.
        leads, tails: (256,) bool, the first and last bytes of the longer ones, which exclude most texts at once.
    """

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
    """Moves `start` (or `end`) in place past the characters at that side, one character of every text per round.

    UTF-8 is self-synchronizing: bytes at the side of a text that equal a character's encoding are that character.
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
    for i in active.tolist():  # long runs, text by text: a megabyte of blanks would take a million rounds
        text = data[start[i] : end[i]].tobytes().decode()
        if right:
            end[i] = start[i] + len(text.rstrip(characters).encode())
        else:
            start[i] = end[i] - len(text.lstrip(characters).encode())


def _rewritten(column: TextColumn, operation: Operation) -> TextColumn:
    texts = as_arrow_texts(column)
    if operation.name == "replace":
        old, new = operation.arguments
        return text_column(pc.replace_substring(texts, old, new))
    # Beyond ASCII, Python's own rules apply (one letter can become two, a final sigma): no library has the same ones.
    plain = pc.string_is_ascii(texts)
    changed = (pc.ascii_lower if operation.name == "lower" else pc.ascii_upper)(texts)
    if not pc.all(plain, min_count=0).as_py():
        other = pc.invert(plain)
        values = [getattr(text, operation.name)() for text in texts.filter(other).to_pylist()]
        changed = pc.replace_with_mask(changed, other, as_arrow(values, pa.large_string()))
    return text_column(changed)


def characters(texts: TextColumn) -> Ints:
    """(n,) how many characters each text has."""
    return as_numpy(pc.utf8_length(as_arrow_texts(texts)))


def gather(data: Bytes, start: Ints, end: Ints, which: Ints) -> tuple[Ints, Bytes]:
    """Copies the segments `data[start[i] : end[i]]` for i in `which`, one after the other.

    This is where prompts are written, so it is where the time goes. Arrow's `take` of binary values is the fastest
    gather of variable-sized segments on a CPU without native code of our own (7 ns per segment, memory speed for long
    ones). It reads value i from offsets i and i + 1 and nothing else. Segments in any order, overlapping or apart, are
    therefore every other value of an array whose offsets are start, end, start, end ...; the values in between are
    never read.

    Returns:
        offsets: (len(which) + 1,) int64.
        data: (offsets[-1],) uint8.
    """
    bounds = np.empty(2 * len(start) + 2, np.int64)
    bounds[0], bounds[-1] = 0, len(data)
    bounds[1:-1:2] = start
    bounds[2:-1:2] = end
    pieces = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    )
    taken = pieces.take(as_arrow(2 * which + 1))
    _, offsets, values = taken.buffers()
    return (
        np.frombuffer(offsets, np.int64)[: len(which) + 1] if len(which) else np.zeros(1, np.int64),
        np.empty(0, np.uint8) if values is None else np.frombuffer(values, np.uint8),
    )
