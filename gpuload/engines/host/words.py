"""Encoding by distinct words: texts are cut into words, and each different word is encoded once.

For small data, where building a faster encoder takes longer than all the rest of a load. Prompts repeat themselves: the
820,000 words of GSM8K in a chat template are 18,000 different ones.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.arrow import as_arrow, as_numpy
from gpuload.engines.host.texts import Bytes, Ints
from gpuload.tokenizer.cuts import Bools, cut_places

EncodeColumn = Callable[[pa.LargeStringArray], Ragged]

_SLICE_BYTES = 1 << 18  # of texts that are cut at once: arrays that stay in the cache of a core

_JOINED = 256  # words in a text
_CANDIDATES = 16  # added tokens that are tried as separators


def text_buffers(text: pa.LargeStringArray) -> tuple[Ints, Bytes]:
    """Where each of n texts begins, and the last one ends, (n + 1,); and the bytes that these places are in."""
    _, offsets, data = text.buffers()
    if not len(text):  # it may have no buffers
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    return (
        np.frombuffer(offsets, np.int64)[text.offset : text.offset + len(text) + 1],
        np.frombuffer(data or b"", np.uint8),
    )


def by_words(
    table: Bools, encode: EncodeColumn, instead: Callable[[int], EncodeColumn | None] = lambda nbytes: None
) -> EncodeColumn:
    """What encodes texts word by word.

    Args:
        table: where texts can be cut, from `gpuload.tokenizer.cuts.cut_table`.
        encode: (k,) words → their ids.
        instead: bytes of the different words of some texts → what encodes these texts as they are; None for `encode`.

    Returns:
        (n,) texts without nulls → their ids.
    """

    def encode_texts(text: pa.LargeStringArray) -> Ragged:
        offsets, data = text_buffers(text)
        slices, low = [], 0
        while low < len(text):
            high = max(low + 1, int(np.searchsorted(offsets, offsets[low] + _SLICE_BYTES, side="right")) - 1)
            slices.append((offsets[low : high + 1], cut_places(table, data, offsets[low : high + 1])))
            low = high
        buffer = pa.py_buffer(data)
        words = [
            pa.LargeStringArray.from_buffers(len(places) - 1, pa.py_buffer(places), buffer) for _, places in slices
        ]
        # All chunks have one dictionary. Those without words are not among them.
        found = pa.chunked_array(words, pa.large_string()).dictionary_encode().chunks
        ids = Ragged.from_lists([])
        if found:
            different = found[0].dictionary
            if (other := instead(different.nbytes)) is not None:
                return other(text)
            ids = encode(different)
        numbers, parts = iter(found), []
        for starts, places in slices:
            of_words = ids.take(as_numpy(next(numbers).indices) if len(places) > 1 else places[1:])
            parts.append(Ragged(of_words.values, of_words.offsets[np.searchsorted(places, starts)]))
        return Ragged.concatenate(parts)

    return encode_texts


def separator_of(added: Mapping[int, Any], words: pa.LargeStringArray) -> tuple[int, str] | None:
    """The id and the text of an added token that separates words: what is between two of them is encoded by itself.

    It must not be in any of the words. And no other token may reach across its beginning: tokens are found from left to
    right, and of those that begin at one place the longest one.

    Args:
        added: id → `tokenizers.AddedToken`, none of which strips white space or must be a single word.
    """
    contents = [token.content for token in added.values()]
    for number, token in list(added.items())[:_CANDIDATES]:
        text = token.content
        others = [other for other in contents if other != text]
        reaching = any(
            other.startswith(text) or text in other or any(text.startswith(other[at:]) for at in range(1, len(other)))
            for other in others
        )
        if text and not token.normalized and not reaching and not pc.any(pc.match_substring(words, text)).as_py():
            return number, text
    return None


def encode_joined(words: pa.LargeStringArray, separator: tuple[int, str], encode: EncodeColumn) -> Ragged:
    """Encodes words in a few long texts, with a separator after each of them: in a third of the time.

    Args:
        separator: from `separator_of`.
        encode: (k,) texts → their ids.
    """
    number, mark = separator
    texts = [mark.join([*words[low : low + _JOINED].to_pylist(), ""]) for low in range(0, len(words), _JOINED)]
    ids = encode(as_arrow(texts, pa.large_string())).values
    ends = np.flatnonzero(ids == number)
    assert len(ends) == len(words), "a separator is missing"
    lengths = np.diff(ends, prepend=-1) - 1
    return Ragged(np.delete(ids, ends), offsets_of(lengths))
