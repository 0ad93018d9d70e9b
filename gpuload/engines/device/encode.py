"""Texts to ids by kernels: a compiled tokenizer in device memory, on NumPy or CuPy arrays.

    encoder = DeviceEncoder(kernels, compile_spec(spec))
    ids, left = encoder.encode(data, offsets)          # rows that are left are for the reference

Texts are cut into pieces (`pieces.py`), and these become ids (`bpe.py`). Both work on a chunk of whole texts at a time:
what they take beside the ids is bounded by the chunk, not by the column.
"""

import itertools

import numpy as np

from gpuload.arrays import Array, Ragged
from gpuload.engines.device.bpe import Merger
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.pretokenize import PieceMaker
from gpuload.tokenizer.compiled import CompiledTokenizer

CHUNK_BYTES = 64 << 20
"""Text at a time. Enough for every thread of a GPU to have work, and little beside its memory."""

LEAST_CHUNK = 1 << 20
"""Who has no memory for so little has none to go on with."""

LONGEST_TEXT = 256 << 20
"""Bytes of a text that is encoded on the device: what is counted in 32 bits must have room for what becomes of it."""


class DeviceEncoder:
    """A tokenizer, no special tokens added, as `twin.encode` does it. Tables are copied to the device once.

    Args:
        kernels: for the device.
        twin: the tokenizer's tables.
        chunk_bytes: about how much text is encoded at a time, more where one text is longer.

    Attributes:
        chunk_bytes: the same, for whoever runs out of memory.
        nbytes: of the vocabulary and its merges in device memory; the splitter's tables are small beside them.
    """

    def __init__(self, kernels: Kernels, twin: CompiledTokenizer, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._kernels, self.chunk_bytes = kernels, chunk_bytes
        self._maker, self._merger = PieceMaker(kernels, twin), Merger(kernels, twin.tables)
        self.nbytes = self._merger.nbytes

    def encode(self, data: Array, offsets: Array) -> tuple[Ragged, Array]:
        """The ids of n texts.

        Args:
            data: uint8, UTF-8, in device memory; text i is data[offsets[i] : offsets[i + 1]].
            offsets: (n + 1,) int64, ascending, there too.

        Returns:
            n rows of ids, in device memory; and (n,) bool, there too, texts that are for the reference: they have no
            ids.
        """
        xp = self._kernels.xp
        parts, left = [], []
        huge = set(xp.flatnonzero(offsets[1:] - offsets[:-1] > LONGEST_TEXT).tolist())
        for low, high in itertools.pairwise(self._cuts(offsets, huge)):
            if low in huge:
                part = Ragged(xp.zeros(0, np.int32), xp.zeros(2, np.int64)), xp.ones(1, bool)
            else:
                part = self._merger.ids(self._maker.pieces(data, offsets[low : high + 1]))
            parts.append(part[0])
            left.append(part[1])
        if not parts:
            return Ragged(xp.zeros(0, np.int32), xp.zeros(1, np.int64)), xp.zeros(0, bool)
        if len(parts) == 1:
            return parts[0], left[0]
        return Ragged.concatenate(parts), xp.concatenate(left)

    def _cuts(self, offsets: Array, huge: set[int]) -> list[int]:
        """Where chunks begin, and the end: numbers of texts. A huge one is a chunk of its own."""
        low, high, rows = int(offsets[0]), int(offsets[-1]), len(offsets) - 1
        marks = self._kernels.xp.arange(low + self.chunk_bytes, high, self.chunk_bytes)
        # The text in which a mark lies, so never an empty one.
        cuts = (self._kernels.xp.searchsorted(offsets, marks, side="right") - 1).tolist()
        return sorted({0, rows, *cuts, *huge, *(row + 1 for row in huge)})
