"""Encoding by distinct words: texts are cut into words, and each different word is encoded once.

For small data, where building a faster encoder takes longer than all the rest of a load. Prompts repeat themselves: the
820,000 words of GSM8K in a chat template are 18,000 different ones.
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged
from gpuload.core.arrow import as_numpy
from gpuload.engines.host.texts import Bytes, Ints
from gpuload.tokenizer.cuts import Bools, cut_places

Encode = Callable[[pa.LargeStringArray], Ragged]

_SLICE_BYTES = 1 << 24  # of texts that are cut at once; the arrays for it take some ten times as much memory


def text_buffers(text: pa.LargeStringArray) -> tuple[Ints, Bytes]:
    """Where each of n texts begins, and the last one ends, (n + 1,); and the bytes that these places are in."""
    _, offsets, data = text.buffers()
    if not len(text):  # it may have no buffers
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    return (
        np.frombuffer(offsets, np.int64)[text.offset : text.offset + len(text) + 1],
        np.frombuffer(data or b"", np.uint8),
    )


def by_words(table: Bools, encode: Encode) -> Encode:
    """What encodes texts word by word.

    Args:
        table: where texts can be cut, from `gpuload.tokenizer.cuts.cut_table`.
        encode: (k,) words → their ids.

    Returns:
        (n,) texts without nulls → their ids.
    """

    def encode_texts(text: pa.LargeStringArray) -> Ragged:
        parts, low = [Ragged.from_lists([])], 0
        offsets, data = text_buffers(text)
        while low < len(text):
            high = max(low + 1, int(np.searchsorted(offsets, offsets[low] + _SLICE_BYTES, side="right")) - 1)
            parts.append(encoded(data, offsets[low : high + 1]))
            low = high
        return Ragged.concatenate(parts)

    def encoded(data: Bytes, offsets: Ints) -> Ragged:
        places = cut_places(table, data, offsets)
        words = pa.LargeStringArray.from_buffers(len(places) - 1, pa.py_buffer(places), pa.py_buffer(data))
        different = words.dictionary_encode()
        ids = encode(different.dictionary).take(as_numpy(different.indices))
        return Ragged(ids.values, ids.offsets[np.searchsorted(places, offsets)])

    return encode_texts
