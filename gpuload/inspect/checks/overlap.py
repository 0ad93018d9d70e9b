"""Prompts that are the same elsewhere, or in large part: digests of whole prompts, and 8-grams of their words.

A word is a run of letters and digits, in lower case; a character of Chinese, Japanese or Korean is a word by itself.
8-grams are numbers, and prompts are compared by sorting and joining these. 8-grams that many prompts of a data set have
are its instructions, not its questions, and do not count.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import offsets_of, ranges

GRAM = 8
SHARE = 0.5  # of a prompt's 8-grams that are in one other prompt
COMMON = 16  # 8-grams that more prompts of a data set have do not count
Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))
_BLOCK = 1 << 22  # bytes of text whose powers are held at a time

_WORD = np.zeros(256, np.bool_)
_WORD[[*b"abcdefghijklmnopqrstuvwxyz0123456789"]] = True
_WORD[0x80:] = True


def digests(texts: pa.LargeStringArray) -> Ints:
    """(n,) a number for each text, without the white space around it."""
    stripped = pc.utf8_trim_whitespace(texts).cast(pa.large_binary())
    whole = b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in stripped.to_pylist())
    return np.frombuffer(whole, np.int64)


@dataclass(frozen=True, eq=False)
class Grams:
    """The 8-grams of n prompts, each once for a prompt."""

    grams: Hashes  # (g,) uint64
    prompts: Ints  # (g,) int64, the prompt of each
    count: int  # n

    @staticmethod
    def of(texts: pa.LargeStringArray) -> "Grams":
        """The 8-grams of (n,) texts."""
        return Grams.joined([_grams(part) for part in _blocks(pc.utf8_lower(texts))])

    @staticmethod
    def joined(parts: list["Grams"]) -> "Grams":
        """The prompts of all parts, one after the other."""
        starts = np.cumsum([0, *(each.count for each in parts)])
        return Grams(
            np.concatenate([np.zeros(0, np.uint64), *(each.grams for each in parts)]),
            np.concatenate([np.zeros(0, np.int64), *(e.prompts + s for e, s in zip(parts, starts, strict=False))]),
            sum(each.count for each in parts),
        )

    def distinctive(self) -> "Grams":
        """Without 8-grams that many prompts have."""
        ordered = np.sort(self.grams)
        common = np.unique(ordered[COMMON:][ordered[COMMON:] == ordered[: len(ordered) - COMMON]])
        if not len(common):
            return self
        keep = common[np.minimum(np.searchsorted(common, self.grams), len(common) - 1)] != self.grams
        return Grams(self.grams[keep], self.prompts[keep], self.count)

    def select(self, prompts: npt.NDArray[np.bool_]) -> "Grams":
        """Those of some prompts, with the same numbers, by a mask (n,)."""
        keep = prompts[self.prompts]
        return Grams(self.grams[keep], self.prompts[keep], self.count)


def overlapping(ours: Grams, others: Grams) -> tuple[Ints, Ints, npt.NDArray[np.float64]]:
    """Prompts of which a large part is in one other prompt. Both come without common 8-grams.

    Returns:
        (k,) the numbers of these prompts, ascending; of each, the other prompt that has most of it; and the share of
        its 8-grams that this one has.
    """
    order, mine = np.argsort(others.grams, kind="stable"), np.argsort(ours.grams, kind="stable")
    wanted, given = ours.grams[mine], others.grams[order]  # both sorted: neighbours in memory are looked up in turn
    low = np.searchsorted(given, wanted, side="left")
    count = np.searchsorted(given, wanted, side="right") - low
    prompt = np.repeat(ours.prompts[mine], count)
    other = others.prompts[order[ranges(low, count, offsets_of(count))]]
    pairs, shared = np.unique(prompt * max(others.count, 1) + other, return_counts=True)
    prompt, other = np.divmod(pairs, max(others.count, 1))
    share = shared / np.bincount(ours.prompts, minlength=ours.count)[prompt]
    kept = np.flatnonzero(share >= SHARE)
    kept = kept[np.lexsort((-share[kept], prompt[kept]))]
    kept = kept[np.unique(prompt[kept], return_index=True)[1]]
    return prompt[kept], other[kept], share[kept]


def _bounds(texts: pa.LargeStringArray) -> Ints:
    """(n + 1,) where each text begins in the bytes of the array."""
    return np.frombuffer(texts.buffers()[1], np.int64)[texts.offset : texts.offset + len(texts) + 1]


def _blocks(texts: pa.LargeStringArray) -> list[pa.LargeStringArray]:
    bounds = _bounds(texts)
    parts, low = [], 0
    while low < len(texts):
        high = max(low + 1, int(np.searchsorted(bounds, bounds[low] + _BLOCK, side="right")) - 1)
        parts.append(texts.slice(low, high - low))
        low = high
    return parts


def _grams(texts: pa.LargeStringArray) -> Grams:
    """The 8-grams of some texts in lower case."""
    bounds = _bounds(texts)
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8)[bounds[0] : bounds[-1]]
    bounds = bounds - bounds[0]
    begin, end = _words(data, bounds)
    hashes = _hashes(data, begin, end)
    prompt = np.searchsorted(bounds, begin, side="right") - 1
    grams = np.zeros(max(0, len(hashes) - GRAM + 1), np.uint64)
    for place in range(GRAM):
        grams = _mixed(grams + hashes[place : place + len(grams)])
    inside = prompt[: len(grams)] == prompt[GRAM - 1 :]
    prompt, grams = prompt[: len(grams)][inside], grams[inside]
    _, first = np.unique(grams ^ _mixed(prompt.astype(np.uint64)), return_index=True)
    return Grams(grams[first], prompt[first], len(texts))


def _words(data: npt.NDArray[np.uint8], bounds: Ints) -> tuple[Ints, Ints]:
    """Where words begin and end in `data`, the bytes of all texts, each of which begins at one of `bounds` (n + 1,)."""
    word = _WORD[data]
    # Punctuation of U+2000 to U+206F and U+3000 to U+303F, and full-width signs, separate words, too.
    lead, second, third = data, _shifted(data, 1), _shifted(data, 2)
    separates = (lead == 0xE2) & (second == 0x80) | (lead == 0xE3) & (second == 0x80)
    separates |= (lead == 0xEF) & (second == 0xBC) & (third < 0x90)
    for back in range(3):
        word[np.flatnonzero(separates) + back] = False
    single = (lead >= 0xE3) & (lead <= 0xED) & word  # in UTF-8, scripts without spaces between words
    starts = word.copy()
    starts[1:] &= ~word[:-1]
    starts |= single
    after = np.flatnonzero(single) + 3
    after = after[after < len(data)]
    starts[after] |= word[after]
    texts = bounds[:-1][bounds[:-1] < len(data)]
    starts[texts] |= word[texts]
    begin = np.flatnonzero(starts)
    stops = np.append(np.flatnonzero(~word | starts), len(data))
    end = stops[np.searchsorted(stops, begin, side="right")]
    return begin, np.minimum(end, bounds[np.searchsorted(bounds, begin, side="right")])


def _shifted(data: npt.NDArray[np.uint8], by: int) -> npt.NDArray[np.uint8]:
    made = np.zeros_like(data)
    made[: len(data) - by] = data[by:]
    return made


def _hashes(data: npt.NDArray[np.uint8], begin: Ints, end: Ints) -> Hashes:
    """A number for each word: a polynomial of its bytes, modulo 2^64, by sums over all bytes."""
    if not len(begin):
        return np.zeros(0, np.uint64)
    powers = np.full(len(data) + 1, _BASE)
    powers[0] = 1
    powers = np.cumprod(powers)
    inverse = np.full(len(data) + 1, _INVERSE)
    inverse[0] = 1
    inverse = np.cumprod(inverse)
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum((data.astype(np.uint64) + 1) * powers[:-1], out=sums[1:])
    return _mixed((sums[end] - sums[begin]) * inverse[begin] + (end - begin).astype(np.uint64))


def _mixed(values: Hashes) -> Hashes:
    """Numbers whose bits all depend on all bits of the given ones (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
