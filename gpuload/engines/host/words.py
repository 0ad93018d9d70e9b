"""Encoding by distinct words: texts are cut into words, and each different word is encoded once.

For small data, where building a faster encoder takes longer than all the rest of a load. Prompts repeat themselves: the
820,000 words of GSM8K in a chat template are 18,000 different ones.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.arrow import as_arrow, as_numpy, fill_null
from gpuload.engines.host.texts import Bytes, Ints
from gpuload.tokenizer.cuts import Bools, cut_places

EncodeColumn = Callable[[pa.LargeStringArray], Ragged]

_SLICE_BYTES = 1 << 18  # of texts that are cut at once: arrays that stay in the cache of a core

_MOST_KEPT = 1 << 25  # bytes of words whose ids are kept

_JOINED = 64  # words in a text: of longer ones, `tokenizers` takes longer for each word
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


class WordEncoder:
    """Encodes texts word by word, and each different word once: texts without nulls → their ids.

    Several threads may use it. It keeps the ids of the words that it has seen.

    Args:
        table: where texts can be cut, from `gpuload.tokenizer.cuts.cut_table`.
        encode: (k,) words → their ids; by all cores, so that one thread at a time does it.
        instead: bytes of words that were not seen before → what encodes the texts that have them; None for `encode`.
    """

    def __init__(
        self, table: Bools, encode: EncodeColumn, instead: Callable[[int], EncodeColumn | None] = lambda nbytes: None
    ):
        self._table, self._encode, self._instead = table, encode, instead
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Forgets all words, for a tokenizer whose vocabulary may be another one."""
        self._words, self._ids = as_arrow([], pa.large_string()), Ragged.from_lists([])

    def __call__(self, text: pa.LargeStringArray) -> Ragged:
        offsets, data = text_buffers(text)
        slices, low = [], 0
        while low < len(text):
            high = max(low + 1, int(np.searchsorted(offsets, offsets[low] + _SLICE_BYTES, side="right")) - 1)
            slices.append((offsets[low : high + 1], cut_places(self._table, data, offsets[low : high + 1])))
            low = high
        buffer = pa.py_buffer(data)
        words = [
            pa.LargeStringArray.from_buffers(len(places) - 1, pa.py_buffer(places), buffer) for _, places in slices
        ]
        # All chunks have one dictionary. Those without words are not among them.
        found = pa.chunked_array(words, pa.large_string()).dictionary_encode().chunks
        ids = self._ids_of(found[0].dictionary) if found else self._ids
        if not isinstance(ids, Ragged):
            return ids(text)
        numbers, parts = iter(found), []
        for starts, places in slices:
            of_words = ids.take(as_numpy(next(numbers).indices) if len(places) > 1 else places[1:])
            parts.append(Ragged(of_words.values, of_words.offsets[np.searchsorted(places, starts)]))
        return Ragged.concatenate(parts)

    def _ids_of(self, words: pa.LargeStringArray) -> Ragged | EncodeColumn:
        """The ids of different words, or what is to encode the texts that have them."""
        with self._lock:
            if self._words.nbytes > _MOST_KEPT:
                self.forget()
            found = pc.index_in(words, self._words)
            numbers, unknown = as_numpy(fill_null(found, 0)), as_numpy(pc.is_null(found))
            if unknown.any():
                new = words.filter(as_arrow(unknown))
                if (other := self._instead(new.nbytes)) is not None:
                    return other
                numbers = numbers.copy()
                numbers[unknown] = len(self._words) + np.arange(len(new))
                ids = Ragged.concatenate([self._ids, self._encode(new)])
                self._words, self._ids = pa.concat_arrays([self._words, new]), ids
            return self._ids.take(numbers)


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
        if not text or token.normalized or pc.any(pc.match_substring(words, text)).as_py():
            continue
        others = [other for other in contents if other != text]
        reaching = any(
            other.startswith(text) or text in other or any(text.startswith(other[at:]) for at in range(1, len(other)))
            for other in others
        )
        if not reaching:
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
    if len(ends) != len(words):  # something has changed the separators: these ids are of no use
        return encode(words)
    lengths = np.diff(ends, prepend=-1) - 1
    return Ragged(np.delete(ids, ends), offsets_of(lengths))
