"""Turns pre-tokens into ids with kernels, using the tables of `gpuload.tokenizer.merges`, on NumPy or CuPy arrays.

    1. Whole words: a pre-token that is a vocabulary entry becomes that entry, by one look-up in a hash table
        (`words.cu`).
    2. The others are merged (`merges.cu`). Of those with equal bytes only one is merged. They are sorted by length; a
        kernel for each range of lengths writes their ids to an array with a place for each byte of text.
    3. A prefix sum over the numbers of ids gives every pre-token its position in the result, and the ids are written.

Merging takes time quadratic in the length of a pre-token, and its state is in a block's shared memory. So a text with a
pre-token of more than `LONGEST` bytes that is not an entry falls back to the tokenizer object, which uses a priority
queue.
"""

import itertools
from dataclasses import fields

import numpy as np

from gpuload.arrays import Array, Ragged, array_module
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.pretokenize import PreTokens
from gpuload.tokenizer.fallback import FallbackTables
from gpuload.tokenizer.merges import MergeTables

LONGEST = 4096
"""Maximum length in bytes of a pre-token that is merged on the device."""

_SHORT, _MIDDLE, _LONG = 24, 64, 256  # maximum lengths of the kernels of merges.cu
_TO_MERGE = np.iinfo(np.int32).min  # TO_MERGE of words.cu


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
        self._by_letter = isinstance(tables, FallbackTables)
        letters = np.zeros(0, np.uint16), np.zeros(0, np.int32)
        if isinstance(tables, FallbackTables):
            letters = tables.letter_pages, tables.letter_blocks
        self._letters = tuple(map(kernels.xp.asarray, letters))
        self.nbytes = self._tables.nbytes + sum(int(array.nbytes) for array in self._letters)

    def ids(self, pre_tokens: PreTokens) -> tuple[Ragged, Array]:
        """Encode n texts.

        Returns:
            n rows of ids, and (n,) bool, texts that fall back to the tokenizer object, whose rows are empty: those of
            `pre_tokens.fallback`, and texts with a pre-token of more than `LONGEST` bytes that is not an entry.
        """
        xp, run, threads = self._kernels.xp, self._kernels.run, self._kernels.threads
        known = self._whole_words(pre_tokens)
        fallback, rest = self._too_long(pre_tokens, known)
        original = self._originals(pre_tokens, rest)
        merged = self._merge(pre_tokens, rest[original == rest], known)
        known[rest] = known[original]
        offsets = _int32_offsets(xp.where(known < 0, ~known, 1))
        values = xp.empty(int(offsets[-1]), np.int32)
        run("write_words", threads(len(known)), len(known), known, offsets, values)
        count = len(rest)
        run("write_merged", threads(4 * count), count, rest, original, pre_tokens.start, merged, offsets, values)
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
            (n,) bool, all texts that fall back; and (k,) int32, the pre-tokens to merge.
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
        return fallback, rest

    def _originals(self, pre_tokens: PreTokens, rest: Array) -> Array:
        """For each of (k,) pre-tokens, one of them with the same bytes, the same one for all that are equal."""
        xp, count = self._kernels.xp, len(rest)
        table = xp.full(1 << (2 * count).bit_length(), -1, np.int32)
        original = xp.empty(count, np.int32)
        self._kernels.run(
            "find_equal", self._kernels.threads(count), count, rest, pre_tokens.data, pre_tokens.start,
            pre_tokens.length, len(table) - 1, table, original,
        )  # fmt: skip
        return original

    def _merge(self, pre_tokens: PreTokens, some: Array, known: Array) -> Array:
        """Merge some pre-tokens, and write the numbers of their ids to `known`.

        Returns:
            int32, the ids: those of pre-token j begin at `pre_tokens.start[j]`.
        """
        xp, kernels, tables = self._kernels.xp, self._kernels, self._tables
        if not len(some):
            return xp.empty(0, np.int32)
        ids = xp.empty(len(pre_tokens.data), np.int32)
        # The longest first: they take the longest. Threads of a warp get pre-tokens of about the same length.
        some = some[xp.argsort(-pre_tokens.length[some], kind="stable")]
        limits = -xp.asarray([_LONG, _MIDDLE, _SHORT])
        cuts = xp.searchsorted(-pre_tokens.length[some], limits).tolist()
        ways = (
            ("merge_longest", kernels.blocks),
            ("merge_long", kernels.warps),
            ("merge_middle", lambda items: 4 * items),
            ("merge_short", kernels.threads),
        )
        for (name, threads), (low, high) in zip(ways, itertools.pairwise([0, *cuts, len(some)]), strict=True):
            kernels.run(
                name, threads(high - low), high - low, some[low:high], pre_tokens.data, pre_tokens.start,
                pre_tokens.length, self._by_letter, *self._letters, tables.byte_ids, tables.pairs,
                len(tables.pairs) - 1, tables.merged, ids, known,
            )  # fmt: skip
        return ids


def _int32_offsets(lengths: Array) -> Array:
    """As `offsets_of`, in int32: there are at most as many ids as bytes, fewer than 2^31."""
    xp = array_module(lengths)
    offsets = xp.zeros(len(lengths) + 1, np.int32)
    xp.cumsum(lengths, dtype=np.int32, out=offsets[1:])
    return offsets
