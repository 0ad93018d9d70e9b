"""Encodes texts with kernels: a compiled tokenizer in device memory, on NumPy or CuPy arrays.

    encoder = DeviceEncoder(kernels, compile_spec(spec))
    ids, fallback = encoder.encode(data, offsets)      # rows in `fallback` have to be encoded by the tokenizer object

Texts are split into pre-tokens (`pretokenize.py`), which become ids (`bpe.py`). Both steps work on a chunk of whole
texts at a time, so the memory they need in addition to the ids is bounded by the chunk, not by the column.
"""

import itertools

import numpy as np

from gpuload.arrays import Array, Ragged
from gpuload.engines.device.bpe import Merger
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.pretokenize import PreTokenizer
from gpuload.tokenizer.compiled import CompiledTokenizer

CHUNK_BYTES = 64 << 20
"""Bytes of text encoded at a time: enough work for every thread of a GPU, and small compared with its memory."""

LEAST_CHUNK = 1 << 20
"""Chunks are not made smaller than this when memory runs out."""

LONGEST_TEXT = 256 << 20
"""Texts of more bytes fall back. Positions are int32, also in rewritten text, which can be several times longer."""


class DeviceEncoder:
    """Encodes texts without adding special tokens, as `gpuload.testing.encoder.encode` does.

    The tokenizer's tables are copied to the device once.

    Args:
        kernels: for the device.
        tokenizer: the tokenizer's tables.
        chunk_bytes: about how many bytes of text are encoded at a time; more if a single text is longer.

    Attributes:
        chunk_bytes: as above; callers lower it when memory runs out.
        nbytes: size of vocabulary and merges in device memory. (The splitter's tables are small in comparison.)
    """

    def __init__(self, kernels: Kernels, tokenizer: CompiledTokenizer, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._kernels, self.chunk_bytes = kernels, chunk_bytes
        self._pretokenizer, self._merger = PreTokenizer(kernels, tokenizer), Merger(kernels, tokenizer.tables)
        self.nbytes = self._merger.nbytes

    def encode(self, data: Array, offsets: Array) -> tuple[Ragged, Array]:
        """Encode n texts.

        Args:
            data: uint8, UTF-8, in device memory; text i is data[offsets[i] : offsets[i + 1]].
            offsets: (n + 1,) int64, ascending, in device memory.

        Returns:
            n rows of ids, and (n,) bool, texts that fall back to the tokenizer object, whose rows are empty; both in
            device memory.
        """
        xp = self._kernels.xp
        parts, fallback = [], []
        huge = set(xp.flatnonzero(offsets[1:] - offsets[:-1] > LONGEST_TEXT).tolist())
        for low, high in itertools.pairwise(self._cuts(offsets, huge)):
            if low in huge:
                part = Ragged(xp.zeros(0, np.int32), xp.zeros(2, np.int64)), xp.ones(1, bool)
            else:
                part = self._merger.ids(self._pretokenizer.pre_tokens(data, offsets[low : high + 1]))
            parts.append(part[0])
            fallback.append(part[1])
        if not parts:
            return Ragged(xp.zeros(0, np.int32), xp.zeros(1, np.int64)), xp.zeros(0, bool)
        if len(parts) == 1:
            return parts[0], fallback[0]
        return Ragged.concatenate(parts), xp.concatenate(fallback)

    def _cuts(self, offsets: Array, huge: set[int]) -> list[int]:
        """Return the texts with which chunks begin, and n. Every text in `huge` is a chunk of its own."""
        low, high, rows = int(offsets[0]), int(offsets[-1]), len(offsets) - 1
        marks = self._kernels.xp.arange(low + self.chunk_bytes, high, self.chunk_bytes)
        # The text that contains each mark: side="right" skips empty texts, which begin at the same offset.
        cuts = (self._kernels.xp.searchsorted(offsets, marks, side="right") - 1).tolist()
        return sorted({0, rows, *cuts, *huge, *(row + 1 for row in huge)})
