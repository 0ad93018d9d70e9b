"""Encodes texts with kernels: a compiled tokenizer in device memory, on NumPy or CuPy arrays.

    encoder = DeviceEncoder(kernels, compile_spec(spec))
    ids, fallback = encoder.encode(data, offsets)      # rows in `fallback` have to be encoded by the tokenizer object

Texts are split into pre-tokens (`pretokenize.py`), which become ids (`bpe.py`). Both steps work on a chunk of whole
texts at a time, so the memory they need in addition to the ids is bounded by the chunk, not by the column.
"""

import itertools

import numpy as np

from gpuload.core.arrays import Array, Ragged
from gpuload.engines.device.bpe import Merger
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.pretokenize import PreTokenizer
from gpuload.engines.device.shared import OnDevice
from gpuload.engines.device.texts import gather, replaced
from gpuload.tokenizer.compiled import CompiledTokenizer

CHUNK_BYTES = 256 << 20
"""Bytes of text encoded at a time: so much work that it hardly matters that the GPU is idle when the host waits for it,
twice per chunk. A chunk of English text needs 5 times its size in memory, any chunk at most 40 times."""

LEAST_CHUNK = 1 << 20  # chunks are not made smaller than this when memory runs out
LONGEST_TEXT = 256 << 20
"""Texts of more bytes fall back. Positions are int32, also in rewritten text, which can be several times longer."""

_Chunk = tuple[int, int, int, int]  # first text, text after the last, and where their bytes begin and end at the latest


class DeviceEncoder(OnDevice):
    """Encodes texts without adding special tokens, as `encode` of `tests/simulator/encoder.py` does.

    The tokenizer's tables are copied to the device once. About `chunk_bytes` of text are encoded at a time, more if a
    single text is longer; callers lower it when memory runs out.
    """

    def __init__(self, kernels: Kernels, tokenizer: CompiledTokenizer, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._kernels, self.chunk_bytes = kernels, chunk_bytes
        self._merger = Merger(kernels, tokenizer.tables)
        self._pretokenizer = PreTokenizer(kernels, tokenizer, self._merger.words)

    def again(self, kernels: Kernels) -> "DeviceEncoder":
        """Return an encoder with the same tables, for another load on the same device."""
        made = self.on(kernels)
        made.chunk_bytes = CHUNK_BYTES
        made._merger, made._pretokenizer = self._merger.on(kernels), self._pretokenizer.on(kernels)
        return made

    def encode(self, data: Array, offsets: Array) -> tuple[Ragged, Array]:
        """Encode n texts.

        Args:
            data: uint8, UTF-8, in device memory; text i is data[offsets[i] : offsets[i + 1]].
            offsets: (n + 1,) int64, ascending, in device memory.

        Returns:
            n rows of ids, and (n,) bool, texts that fall back to the tokenizer object, whose rows are empty; both in
            device memory.
        """
        xp, rows = self._kernels.xp, len(offsets) - 1
        fallback, ids_offsets = xp.zeros(rows, bool), xp.empty(rows + 1, np.int64)
        if not rows:
            return Ragged(xp.zeros(0, np.int32), xp.zeros(1, np.int64)), fallback
        parts: list[Array] = []
        more = 0  # ids before the chunk
        for low, high, begin, end in self._chunks(data, offsets):
            of_chunk = slice(low, high + 1)
            if high == low + 1 and end - begin > LONGEST_TEXT:
                fallback[low:high] = True
                ids_offsets[of_chunk] = more
                continue
            text = data[begin:end], offsets[of_chunk], begin
            parts.append(self._chunk_ids(*text, fallback[low:high], ids_offsets[of_chunk], more))
            more += len(parts[-1])
        if len(parts) == 1:
            return Ragged(parts[0], ids_offsets), fallback
        values = xp.empty(more, np.int32)
        while parts:
            more -= len(parts[-1])
            part = parts.pop()
            values[more : more + len(part)] = part
        return Ragged(values, ids_offsets), fallback

    def _chunk_ids(
        self, data: Array, offsets: Array, base: int, fallback: Array, ids_offsets: Array, more: int
    ) -> Array:
        """The ids of a chunk, int32. Fills `fallback` and `ids_offsets` as `Merger.ids` does."""
        kernels, xp = self._kernels, self._kernels.xp
        found = self._pretokenizer.pre_tokens(data, offsets, base, fallback)
        if found.normal:
            return self._merger.ids(found, fallback, ids_offsets, more)
        # The texts that may not be in NFC, mostly few, are copied and encoded by themselves.
        rows = xp.flatnonzero(fallback)
        fallback[rows] = False
        ids = Ragged(self._merger.ids(found, fallback, ids_offsets, 0), ids_offsets)
        del found
        start, refused, own_offsets = offsets[rows], xp.zeros(len(rows), bool), xp.empty(len(rows) + 1, np.int64)
        moved, own = gather(kernels, kernels.address(data) + start - base, offsets[rows + 1] - start)
        others = self._merger.ids(self._pretokenizer.by_passes(own, moved, 0, refused), refused, own_offsets, 0)
        fallback[rows] = refused
        whole = replaced(kernels, ids, rows, Ragged(others, own_offsets))
        ids_offsets[...] = whole.offsets + more
        return whole.values

    def _chunks(self, data: Array, offsets: Array) -> list[_Chunk]:
        """Divide texts into chunks. Every text that is too long is a chunk of its own. If all of `data` is one chunk,
        the host does not wait."""
        xp, size, rows = self._kernels.xp, min(self.chunk_bytes, LONGEST_TEXT), len(offsets) - 1
        if len(data) <= size:
            return [(0, rows, 0, len(data))]
        # The text that contains each mark: side="right" skips empty texts, which begin at the same offset. A text that
        # is too long contains one.
        marks = offsets[0] + xp.arange(size, len(data), size)
        cuts = xp.minimum(xp.searchsorted(offsets, marks, side="right") - 1, rows - 1)
        found = xp.concatenate([cuts, offsets[cuts], offsets[cuts + 1], offsets[:1], offsets[-1:]]).tolist()
        count = len(cuts)
        borders = {0: found[-2], rows: found[-1]}
        for text, begin, end in zip(found[:count], found[count : 2 * count], found[2 * count : 3 * count], strict=True):
            borders[text] = begin
            if end - begin > LONGEST_TEXT:
                borders[text + 1] = end
        pairs = itertools.pairwise(sorted(borders.items()))
        return [(low, high, begin, end) for (low, begin), (high, end) in pairs]
