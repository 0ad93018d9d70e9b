"""Prompts that are the same elsewhere, or in large part: digests of whole prompts, and 8-grams of their words.

A word is a run of letters and digits, in lower case; a character of Chinese, Japanese or Korean is a word by itself.
8-grams are numbers, and prompts are compared by sorting and joining these. 8-grams that many prompts of a data set have
are its instructions, not its questions, and do not count.
"""

import hashlib
import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import offsets_of, ranges
from gpuload.core.arrow import as_numpy, as_scalar

GRAM = 8
SHARE = 0.5  # of a prompt's 8-grams that are in one other prompt
COMMON = 16  # 8-grams that more prompts of a data set have do not count
Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

_BLOCK = 1 << 22  # bytes of text that are split into words at a time

# Punctuation of U+2000 to U+203F and U+3000 to U+303F, and full-width signs, separate words, too.
_BETWEEN = r"[^a-z0-9\x{80}-\x{1FFF}\x{2040}-\x{2FFF}\x{3040}-\x{FEFF}\x{FF10}-\x{10FFFF}]+"
_ALONE = r"[\x{3040}-\x{D7FF}]"  # scripts without spaces between words


def digests(texts: pa.LargeStringArray) -> Ints:
    """(n,) a number for each text, without the white space around it."""
    return _numbers(pc.utf8_trim_whitespace(texts))


def _numbers(texts: pa.LargeStringArray) -> Ints:
    bytes_of_texts = texts.cast(pa.large_binary()).to_pylist()
    return np.frombuffer(b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in bytes_of_texts), np.int64)


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
        common = np.unique(ordered[COMMON:][ordered[COMMON:] == ordered[: max(0, len(ordered) - COMMON)]])
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


def _blocks(texts: pa.LargeStringArray) -> list[pa.LargeStringArray]:
    block = np.cumsum(as_numpy(pc.binary_length(texts))) // _BLOCK
    bounds = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), len(texts)]
    return [texts.slice(low, high - low) for low, high in itertools.pairwise(bounds)]


def _grams(texts: pa.LargeStringArray) -> Grams:
    """The 8-grams of some texts in lower case."""
    lists = pc.split_pattern_regex(pc.replace_substring_regex(texts, _ALONE, r" \0 "), _BETWEEN)
    words, prompt = lists.flatten(), as_numpy(pc.list_parent_indices(lists))
    some = pc.not_equal(words, as_scalar("", words.type))
    words, prompt = words.filter(some).dictionary_encode(), prompt[as_numpy(some)]
    hashes = _numbers(words.dictionary).view(np.uint64)[as_numpy(words.indices)]
    grams = np.zeros(max(0, len(hashes) - GRAM + 1), np.uint64)
    for place in range(GRAM):
        grams = _mixed(grams + hashes[place : place + len(grams)])
    inside = prompt[: len(grams)] == prompt[GRAM - 1 :]
    prompt, grams = prompt[: len(grams)][inside], grams[inside]
    _, first = np.unique(grams ^ _mixed(prompt.astype(np.uint64)), return_index=True)
    return Grams(grams[first], prompt[first], len(texts))


def _mixed(values: Hashes) -> Hashes:
    """Numbers whose bits all depend on all bits of the given ones (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
