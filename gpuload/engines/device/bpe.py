"""Pieces of text to ids by kernels, over the tables of `tokenizer/merges.py`, on NumPy or CuPy arrays.

    1. a piece that is an entry of the vocabulary is that entry: one look-up by hash      (`words.cu`)
    2. the other pieces, most of them short, are sorted by length and merged              (`merges.cu`)
       so many at a time that their state takes at most twice the room of the text
    3. a prefix sum over the pieces' numbers of ids, and every id is written to its place

A piece of more than `LONGEST` bytes that is no entry would keep one thread busy for long: its text is left to the
reference, whose effort grows with the logarithm only.
"""

import itertools
from dataclasses import dataclass, fields

import numpy as np

from gpuload.arrays import Array, Ragged, array_module
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.pretokenize import Pieces
from gpuload.tokenizer.fallback import FallbackTables
from gpuload.tokenizer.merges import MergeTables

LONGEST = 4096
"""Bytes of a piece that is merged on the device."""

_LEAST_STATE = 16 << 20
_TO_MERGE = np.iinfo(np.int32).min  # these two are words.cu's
_WARP = 32


@dataclass(frozen=True, eq=False)
class _Merged:
    """The ids of some pieces that were merged.

    Attributes:
        pieces: (k,) int32, their numbers.
        offsets: (k + 1,) int32.
        ids: (offsets[-1],) int32.
    """

    pieces: Array
    offsets: Array
    ids: Array


class Merger:
    """A tokenizer's vocabulary and merges in device memory.

    Args:
        kernels: for the device.
        tables: of the tokenizer.

    Attributes:
        nbytes: of the tables.
    """

    def __init__(self, kernels: Kernels, tables: MergeTables | FallbackTables) -> None:
        self._kernels = kernels
        base = tables.base if isinstance(tables, FallbackTables) else tables
        self._tables = MergeTables(*(kernels.xp.asarray(getattr(base, field.name)) for field in fields(base)))
        self._longest_word = int(np.diff(base.word_offsets).max(initial=0))
        self._letters: tuple[Array, Array] | None = None
        if isinstance(tables, FallbackTables):
            self._letters = kernels.xp.asarray(tables.letter_pages), kernels.xp.asarray(tables.letter_blocks)
        self.nbytes = self._tables.nbytes + sum(int(array.nbytes) for array in self._letters or ())

    def ids(self, pieces: Pieces) -> tuple[Ragged, Array]:
        """The ids of every text.

        Returns:
            n rows of ids, in device memory; and (n,) bool, texts that are for the reference, which have no ids:
            those that `pieces` leaves, and those with a piece of more than `LONGEST` bytes that is no entry.
        """
        xp, run, threads = self._kernels.xp, self._kernels.run, self._kernels.threads
        one = self._whole_words(pieces)
        left, rest = self._within_reach(pieces, one)
        parts = self._merge(pieces, rest)
        for part in parts:
            one[part.pieces] = ~(part.offsets[1:] - part.offsets[:-1])
        offsets = _int32_offsets(xp.where(one < 0, ~one, 1))
        values = xp.empty(int(offsets[-1]), np.int32)
        run("write_words", threads(len(one)), len(one), one, offsets, values)
        for part in parts:
            count = len(part.pieces)
            run("write_merged", threads(count), count, part.pieces, part.offsets, part.ids, offsets, values)
        return Ragged(values, offsets[pieces.first].astype(np.int64)), left

    def _whole_words(self, pieces: Pieces) -> Array:
        """(m,) int32, what words.cu knows of each piece."""
        tables, count = self._tables, len(pieces.start)
        one = self._kernels.xp.empty(count, np.int32)
        self._kernels.run(
            "look_up_words", self._kernels.threads(count), count, pieces.data, pieces.start, pieces.length,
            tables.words, len(tables.words) - 1, tables.word_bytes, tables.word_offsets, tables.word_ids,
            self._longest_word, one,
        )  # fmt: skip
        return one

    def _within_reach(self, pieces: Pieces, one: Array) -> tuple[Array, Array]:
        """(n,) bool, texts for the reference, whose pieces are nothing in `one` from now on; and (k,) int32, the pieces
        to be merged, by length."""
        xp = self._kernels.xp
        rest = xp.flatnonzero(one == _TO_MERGE).astype(np.int32)
        left, absurd = pieces.left, rest[pieces.length[rest] > LONGEST]
        if len(absurd):
            texts = xp.unique(xp.searchsorted(pieces.first, absurd, side="right") - 1)
            left = left.copy()
            left[texts] = True
            self._kernels.run("drop_pieces", self._kernels.warps(len(texts)), len(texts), texts, pieces.first, one)
            rest = rest[one[rest] == _TO_MERGE]
        return left, rest[xp.argsort(pieces.length[rest], kind="stable")]

    def _merge(self, pieces: Pieces, rest: Array) -> list[_Merged]:
        """Merges pieces, given by their numbers and in order of length."""
        if not len(rest):
            return []
        xp = self._kernels.xp
        # Of each 32 pieces, the last is the longest. Its symbols and blocks have two words each, see merges.cu.
        last = xp.minimum(xp.arange(_WARP - 1, len(rest) + _WARP - 1, _WARP), len(rest) - 1)
        widest = pieces.length[rest[last]].astype(np.int64)
        groups = xp.zeros(len(last) + 1, np.int64)
        xp.cumsum(2 * _WARP * (widest + (widest + 31) // 32), out=groups[1:])
        words, most = int(groups[-1]), max(2 * len(pieces.data), _LEAST_STATE) // 4
        cuts = [0, *xp.searchsorted(groups, xp.arange(most, words, most)).tolist(), len(last)]
        return [
            self._merge_groups(pieces, rest[_WARP * low : _WARP * high], groups[low : high + 1] - groups[low])
            for low, high in itertools.pairwise(cuts)
            if low < high
        ]

    def _merge_groups(self, pieces: Pieces, rest: Array, groups: Array) -> _Merged:
        xp, tables, count = self._kernels.xp, self._tables, len(rest)
        run, threads = self._kernels.run, self._kernels.threads(count)
        state, size = xp.empty(int(groups[-1]), np.int32), xp.empty(count, np.int32)
        if self._letters is None:
            run(
                "lay_bytes", threads, count, rest, pieces.data, pieces.start, pieces.length, tables.byte_ids, groups,
                state, size,
            )  # fmt: skip
        else:
            run(
                "lay_letters", threads, count, rest, pieces.data, pieces.start, pieces.length, *self._letters,
                tables.byte_ids, groups, state, size,
            )  # fmt: skip
        run("merge_pieces", threads, count, tables.pairs, len(tables.pairs) - 1, tables.merged, groups, state, size)
        offsets = _int32_offsets(size)
        ids = xp.empty(int(offsets[-1]), np.int32)
        run("collect", threads, count, groups, state, offsets, ids)
        return _Merged(rest, offsets, ids)


def _int32_offsets(lengths: Array) -> Array:
    """`offsets_of` for numbers that stay below 2^31: as many ids as bytes at most."""
    xp = array_module(lengths)
    offsets = xp.zeros(len(lengths) + 1, np.int32)
    xp.cumsum(lengths, dtype=np.int32, out=offsets[1:])
    return offsets
