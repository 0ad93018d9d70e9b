"""Texts that a tokenizer brings into NFC, and spans of them, as its tokens have them.

The tokens of such a text lie end to end in its normal form, not in the text. A place in the text is a place in the
normal form where text before it and text behind it do not change each other: then both can be normalized alone. The
tokenizer aligns a character that does not change with itself, so its token is that of the same character there.
"""

import unicodedata
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpuload.core.arrow import as_arrow

Numbers = npt.NDArray[np.int64]


def in_normal_form(
    text: pa.LargeStringArray, rows: Numbers, start: Numbers, end: Numbers, normalize: Callable[[str], str]
) -> tuple[Numbers, pa.LargeStringArray, Numbers, Numbers]:
    """Normalizes texts with spans.

    Args:
        text: n texts, none of them null.
        rows, start, end: (k,) spans of these texts, in ascending order, in bytes; between two characters.
        normalize: brings a text into NFC.

    Returns:
        (m,) the numbers of those of the texts whose spans begin and end between characters that no normal form changes,
        these texts normalized, and (k,) where the spans begin and end in them; those of the other texts are 0.
    """
    bounds = np.searchsorted(rows, np.arange(len(text) + 1)).tolist()
    numbers: list[int] = []
    normal: list[str] = []
    edges = np.zeros((2, len(rows)), np.int64)
    for number, raw in enumerate(text.cast(pa.large_binary()).to_pylist()):
        spans = slice(bounds[number], bounds[number + 1])
        places = {*start[spans].tolist(), *end[spans].tolist()}
        if all(_is_calm(raw, place) for place in places):
            cuts = sorted({0, *places, len(raw)})
            parts = [normalize(raw[low:high].decode()) for low, high in pairwise(cuts)]
            places_there = np.cumsum([0, *(len(part.encode()) for part in parts)])
            for side, edge in enumerate((start, end)):
                edges[side, spans] = places_there[np.searchsorted(cuts, edge[spans])]
            numbers.append(number)
            normal.append("".join(parts))
    return np.array(numbers, np.int64), as_arrow(normal, pa.large_string()), edges[0], edges[1]


def _is_calm(raw: bytes, place: int) -> bool:
    """Whether the character before a place of a text and the two behind it are `is_calm`. A character has at most four
    bytes."""
    before = raw[max(0, place - 4) : place].decode(errors="ignore")[-1:]
    behind = raw[place : place + 8].decode(errors="ignore")[:2]
    return all(map(is_calm, before + behind))


@lru_cache(maxsize=4096)
def is_calm(character: str) -> bool:
    """Whether no normal form changes a character, whatever comes before it; false if its category does not tell.

    Characters that are composed with those before them are marks, Korean vowels and consonants, and, outside of the
    basic plane, some letters.
    """
    code = ord(character)
    if code < 0x300:
        return True
    kinds = "LNPSZ" if code < 0x10000 or 0x20000 <= code < 0x2F800 else "NPSZ"
    known = unicodedata.category(character)[0] in kinds and not 0x1100 <= code < 0x1200
    return known and unicodedata.is_normalized("NFC", character)
