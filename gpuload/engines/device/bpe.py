"""Turns pre-tokens into ids with kernels, using the tables of `gpuload.tokenizer.merges`, on NumPy or CuPy arrays.

    1. Whole words: a pre-token that is a vocabulary entry becomes that entry, by one look-up in a hash table
        (`words.cu`).
    2. The others, most of them short, are sorted by length and merged (`merges.cu`), as many at a time that their state
       takes at most twice the memory of the text.
    3. A prefix sum over the numbers of ids gives every pre-token its position in the result, and the ids are written.

Merging takes time quadratic in the length of a pre-token, in a single thread. So a text with a pre-token of more than
`LONGEST` bytes that is not an entry falls back to the tokenizer object, which uses a priority queue.
"""

import itertools
from dataclasses import dataclass, fields

import numpy as np

from gpuload.arrays import Array, Ragged, array_module
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.pretokenize import PreTokens
from gpuload.tokenizer.fallback import FallbackTables
from gpuload.tokenizer.merges import MergeTables

LONGEST = 4096
"""Maximum length in bytes of a pre-token that is merged on the device."""

_LEAST_STATE = 16 << 20  # bytes; the state of merging may always take this much
_TO_MERGE = np.iinfo(np.int32).min  # TO_MERGE of words.cu
_WARP = 32


@dataclass(frozen=True, eq=False)
class _Merged:
    """The ids of some pre-tokens that were merged.

    Attributes:
        numbers: (k,) int32, which pre-tokens.
        offsets: (k + 1,) int32, where the ids of each begin.
        ids: (offsets[-1],) int32.
    """

    numbers: Array
    offsets: Array
    ids: Array


class Merger:
    """Turns pre-tokens into ids. A tokenizer's vocabulary and merges are copied to the device once.

    Args:
        kernels: for the device.
        tables: vocabulary and merges.

    Attributes:
        nbytes: size of the tables in bytes.
    """

    def __init__(self, kernels: Kernels, tables: MergeTables | FallbackTables) -> None:
        self._kernels = kernels
        base = tables.base if isinstance(tables, FallbackTables) else tables
        self._tables = MergeTables(*(kernels.xp.asarray(getattr(base, field.name)) for field in fields(base)))
        self._longest_word = int(np.diff(base.long_offsets).max(initial=0))
        self._letters: tuple[Array, Array] | None = None
        if isinstance(tables, FallbackTables):
            self._letters = kernels.xp.asarray(tables.letter_pages), kernels.xp.asarray(tables.letter_blocks)
        self.nbytes = self._tables.nbytes + sum(int(array.nbytes) for array in self._letters or ())

    def ids(self, pre_tokens: PreTokens) -> tuple[Ragged, Array]:
        """Encode n texts.

        Returns:
            n rows of ids, and (n,) bool, texts that fall back to the tokenizer object, whose rows are empty: those of
            `pre_tokens.fallback`, and texts with a pre-token of more than `LONGEST` bytes that is not an entry.
        """
        xp, run, threads = self._kernels.xp, self._kernels.run, self._kernels.threads
        known = self._whole_words(pre_tokens)
        fallback, rest = self._too_long(pre_tokens, known)
        parts = self._merge(pre_tokens, rest)
        for part in parts:
            known[part.numbers] = ~(part.offsets[1:] - part.offsets[:-1])
        offsets = _int32_offsets(xp.where(known < 0, ~known, 1))
        values = xp.empty(int(offsets[-1]), np.int32)
        run("write_words", threads(len(known)), len(known), known, offsets, values)
        for part in parts:
            count = len(part.numbers)
            run("write_merged", threads(count), count, part.numbers, part.offsets, part.ids, offsets, values)
        return Ragged(values, offsets[pre_tokens.first].astype(np.int64)), fallback

    def _whole_words(self, pre_tokens: PreTokens) -> Array:
        """Look up all pre-tokens. Returns (m,) int32: the id, or ~(number of ids), see words.cu."""
        tables, count = self._tables, len(pre_tokens.start)
        known = self._kernels.xp.empty(count, np.int32)
        self._kernels.run(
            "look_up_words", self._kernels.threads(count), count, len(pre_tokens.data), pre_tokens.data,
            pre_tokens.start, pre_tokens.length, tables.words, len(tables.words) - 1, tables.long_words,
            len(tables.long_words) - 1, tables.long_bytes, tables.long_offsets, tables.long_ids, self._longest_word,
            known,
        )  # fmt: skip
        return known

    def _too_long(self, pre_tokens: PreTokens, known: Array) -> tuple[Array, Array]:
        """Find texts with pre-tokens that are too long to merge, and set their pre-tokens in `known` to no ids.

        Returns:
            (n,) bool, all texts that fall back; and (k,) int32, the pre-tokens to merge, sorted by length.
        """
        xp = self._kernels.xp
        rest = xp.flatnonzero(known == _TO_MERGE).astype(np.int32)
        fallback, too_long = pre_tokens.fallback, rest[pre_tokens.length[rest] > LONGEST]
        if len(too_long):
            texts = xp.unique(xp.searchsorted(pre_tokens.first, too_long, side="right") - 1)
            fallback = fallback.copy()
            fallback[texts] = True
            warps = self._kernels.warps(len(texts))
            self._kernels.run("drop_pretokens", warps, len(texts), texts, pre_tokens.first, known)
            rest = rest[known[rest] == _TO_MERGE]
        return fallback, rest[xp.argsort(pre_tokens.length[rest], kind="stable")]

    def _merge(self, pre_tokens: PreTokens, rest: Array) -> list[_Merged]:
        """Merge the pre-tokens `rest`, which are sorted by length, some groups of 32 at a time."""
        if not len(rest):
            return []
        xp = self._kernels.xp
        # The state of a group of 32 is as large as its longest pre-token needs, which is its last: 2 words for each
        # symbol and 2 for each block of 32 symbols, see merges.cu. The last group may have fewer than 32.
        last = xp.minimum(xp.arange(_WARP - 1, len(rest) + _WARP - 1, _WARP), len(rest) - 1)
        widest = pre_tokens.length[rest[last]].astype(np.int64)
        groups = xp.zeros(len(last) + 1, np.int64)
        xp.cumsum(2 * _WARP * (widest + (widest + 31) // 32), out=groups[1:])
        # Cut the list of groups so that no part needs more than `most` words (or is a single group).
        words, most = int(groups[-1]), max(2 * len(pre_tokens.data), _LEAST_STATE) // 4
        cuts = [0, *xp.searchsorted(groups, xp.arange(most, words, most)).tolist(), len(last)]
        return [
            self._merge_groups(pre_tokens, rest[_WARP * low : _WARP * high], groups[low : high + 1] - groups[low])
            for low, high in itertools.pairwise(cuts)
            if low < high
        ]

    def _merge_groups(self, pre_tokens: PreTokens, rest: Array, groups: Array) -> _Merged:
        """Merge some groups at once. `groups` says where the state of each begins."""
        xp, tables, count = self._kernels.xp, self._tables, len(rest)
        run, threads = self._kernels.run, self._kernels.threads(count)
        state, size = xp.empty(int(groups[-1]), np.int32), xp.empty(count, np.int32)
        where = rest, pre_tokens.data, pre_tokens.start, pre_tokens.length
        if self._letters is None:
            run("lay_bytes", threads, count, *where, tables.byte_ids, groups, state, size)
        else:
            run("lay_letters", threads, count, *where, *self._letters, tables.byte_ids, groups, state, size)
        run("merge_pretokens", threads, count, tables.pairs, len(tables.pairs) - 1, tables.merged, groups, state, size)
        offsets = _int32_offsets(size)
        ids = xp.empty(int(offsets[-1]), np.int32)
        run("collect", threads, count, groups, state, offsets, ids)
        return _Merged(rest, offsets, ids)


def _int32_offsets(lengths: Array) -> Array:
    """As `offsets_of`, in int32: there are at most as many ids as bytes, fewer than 2^31."""
    xp = array_module(lengths)
    offsets = xp.zeros(len(lengths) + 1, np.int32)
    xp.cumsum(lengths, dtype=np.int32, out=offsets[1:])
    return offsets
