"""Unicode's normal form C as tables, to tell which texts surely are in it (Unicode Standard Annex 15, section 9).

Three things put a text out of it: a code point that it never has, marks out of order, and a mark that would melt into
the letter before it. The last needs a closer look: é is for `e` and an accent, so those two side by side are not in
the form; `q` and an accent are. All pairs that melt are a few thousand, beside the parts of Korean syllables, which
melt by a rule.
"""

import unicodedata
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from gpuload.tokenizer.classes import CODE_POINTS, ClassMap
from gpuload.tokenizer.merges import fill, hash_pairs
from gpuload.tokenizer.unassigned import UNASSIGNED

ORDER = 63  # the place of a mark's combining class among all of them; 0 for what is no such mark
MELTS = 64  # it may melt into what is before it
NEVER = 255
CODE_POINT_BITS = 21
_JAMO = [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)]  # Korean vowels and final consonants


@lru_cache(maxsize=1)
def nfc_tables() -> tuple[ClassMap, npt.NDArray[np.uint64]]:
    """The tables.

    Returns:
        code point → ORDER and MELTS, or NEVER: also for the code points that Unicode 14 did not know, on which
        versions may differ;
        and a hash set (see `merges.fill`) of first << 21 | second, for all pairs where the second one melts into the
        first, or into what the first one is made of, but for Korean.
    """
    values = np.zeros(CODE_POINTS, np.uint8)
    for span in UNASSIGNED.split():
        first, _, last = span.partition("-")
        values[int(first, 16) : int(last or first, 16) + 1] = NEVER
    known = np.flatnonzero(values == 0).tolist()
    values[[c for c in known if not unicodedata.is_normalized("NFC", chr(c))]] = NEVER
    classes = {c: order for c in known if (order := unicodedata.combining(chr(c)))}
    place = {order: place for place, order in enumerate(sorted(set(classes.values())), 1)}
    values[list(classes)] |= np.array([place[order] for order in classes.values()], np.uint8)

    made = [(c, parts) for c in known if values[c] != NEVER and (parts := _made_of(chr(c)))]
    letters = {c for c, _ in made} | {parts[0] for _, parts in made}
    marks = {parts[1] for _, parts in made}
    values[[*marks, *_JAMO]] |= MELTS
    pairs = [
        first << CODE_POINT_BITS | second
        for first in letters
        for second in marks
        if not unicodedata.is_normalized("NFC", chr(first) + chr(second))
    ]
    keys = np.unique(np.array(pairs, np.int64))
    return ClassMap.from_classes(values), fill(keys.astype(np.uint64), hash_pairs(keys))


def _made_of(character: str) -> list[int]:
    parts = unicodedata.decomposition(character).split()
    return [] if not parts or parts[0].startswith("<") else [int(part, 16) for part in parts]
