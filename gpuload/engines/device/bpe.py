"""Turns pre-tokens into ids with kernels, using the tables of `gpuload.tokenizer.merges`, on NumPy or CuPy arrays.

Most pre-tokens are vocabulary entries and have been looked up (`pretokenize.py`). The others are merged:

    1. Of those with equal bytes only one is merged. These are listed by bins of their lengths    (`kernels/ids.cu`)
    2. A kernel for each range of lengths merges them. Each has a place for an id per byte      (`kernels/merges.cu`)
    3. The ids of all pre-tokens are written, after a prefix sum over their numbers               (`kernels/ids.cu`)

Merging takes time quadratic in the length of a pre-token, and its state is in a block's shared memory. So a text with a
pre-token of more than `LONGEST` bytes that is not an entry falls back to the tokenizer object, which uses a priority
queue.

The kernels know how many pre-tokens there are of each length; the host does not. It waits once, for the number of ids.
"""

from dataclasses import fields

import numpy as np

from gpuload.core.arrays import Array
from gpuload.engines.device.kernels import BLOCK, Kernels
from gpuload.engines.device.pretokenize import PreTokens, Words
from gpuload.engines.device.shared import OnDevice
from gpuload.tokenizer.fallback import FallbackTables
from gpuload.tokenizer.merges import MergeTables

LONGEST = 4096  # maximum length in bytes of a pre-token that is merged on the device
_BINS = 32  # BINS of merges.cu
_LISTED = 4  # LISTED of ids.cu


class Merger(OnDevice):
    """Turns pre-tokens into ids. A tokenizer's vocabulary and merges are copied to the device once; `words` is the
    vocabulary, for `PreTokenizer`."""

    def __init__(self, kernels: Kernels, tables: MergeTables | FallbackTables) -> None:
        self._kernels = kernels
        base = tables.base if isinstance(tables, FallbackTables) else tables
        there = MergeTables(*(kernels.xp.asarray(getattr(base, field.name)) for field in fields(base)))
        letters = np.zeros(0, np.uint16), np.zeros(0, np.int32)
        if isinstance(tables, FallbackTables):
            letters = tables.letter_pages, tables.letter_blocks
        on_device = tuple(map(kernels.xp.asarray, letters))
        self.words: Words = (
            there.words, len(there.words) - 1, there.long_words, len(there.long_words) - 1, there.long_bytes,
            there.long_offsets, there.long_ids, int(np.diff(base.long_offsets).max(initial=0)),
        )  # fmt: skip
        self._merges = (
            isinstance(tables, FallbackTables), *on_device, there.byte_ids, there.pairs, len(there.pairs) - 1,
            there.merged,
        )  # fmt: skip

    def ids(self, pre_tokens: PreTokens, fallback: Array, offsets: Array, more: int) -> Array:
        """Encode n texts.

        Args:
            pre_tokens: of the texts; those of texts that fall back are changed.
            fallback: (n,) bool, set for texts with a pre-token of more than `LONGEST` bytes that is not an entry. They
                have no ids.
            offsets: (n + 1,) int64, becomes where the ids of each text begin, plus `more`.
            more: as above.

        Returns:
            int32, all ids.
        """
        kernels, xp, known = self._kernels, self._kernels.xp, pre_tokens.known
        if pre_tokens.too_long:
            kernels.run(
                "drop_texts", kernels.warps(len(pre_tokens.start)), len(pre_tokens.start), pre_tokens.start,
                pre_tokens.length, len(fallback), pre_tokens.offsets, pre_tokens.base, pre_tokens.first, known,
                fallback,
            )  # fmt: skip
        tiles = max(1, -(-len(known) // (_LISTED * BLOCK)))
        state = xp.zeros(3 + tiles + _BINS, np.uint64)
        counts, bins = state[:2], state[2 + tiles :].view(np.int32)
        merged = self._merge(pre_tokens, bins)
        # At most one id for each entry, and for each byte of the others.
        ids = xp.empty(len(known) - len(pre_tokens.start) + pre_tokens.merge_bytes, np.int32)
        kernels.run(
            "write_ids", kernels.blocks(tiles), tiles, len(known), known, *merged, len(fallback), pre_tokens.first,
            more, offsets, state[2 : 2 + tiles], counts, ids,
        )  # fmt: skip
        return ids[: int(counts[1])]

    def _merge(self, pre_tokens: PreTokens, bins: Array) -> tuple[Array, Array, Array, Array]:
        """Merge k pre-tokens; `bins` are (2 * `_BINS` + 2,) int32, zeros.

        Returns:
            The original of each, the places of its ids, (k,) int32 the number of ids of each original, and the ids.
        """
        xp, kernels = self._kernels.xp, self._kernels
        data, start, length, count = pre_tokens.data, pre_tokens.start, pre_tokens.length, len(pre_tokens.start)
        original, to, made, number = (xp.empty(count, np.int32) for _ in range(4))
        ids = xp.empty(pre_tokens.merge_bytes, np.int32)
        if count:
            table = xp.full(1 << (2 * count).bit_length(), -1, np.int32)
            threads, (counts, taken, placed) = kernels.threads(count), (bins[:_BINS], bins[_BINS:-2], bins[-2:])
            kernels.run("find_equal", threads, count, data, start, length, len(table) - 1, table, original, counts)
            kernels.run("sort_by_length", threads, count, length, original, counts, taken, placed, number, to)
            for name, threads in (
                ("merge_longest", kernels.blocks(count)),
                ("merge_long", kernels.warps(count)),
                ("merge_middle", 4 * count),
                ("merge_short", kernels.threads(count)),
            ):
                kernels.run(
                    name, min(threads, kernels.resident), counts, number, data, start, length, to, *self._merges,
                    ids, made,
                )  # fmt: skip
        return original, to, made, ids
