"""Tables for a quick check of Unicode's normal form C (NFC), after Unicode Standard Annex 15, section 9.

A text is not in NFC if it contains

- a code point that never occurs in NFC,
- combining marks that are not in canonical order, or
- a character that composes with one before it: `e` followed by an acute accent is not in NFC, because é exists; `q`
  followed by the accent is.

The annex's quick check answers "maybe" for every accent. This one looks up the pair and so decides most cases. A few
thousand pairs compose, and the parts of Korean syllables, which compose by a rule (see `nfc.cu`).

The check may say "not surely NFC" of a text that is, never the other way round. Such texts fall back to the tokenizer
object.
"""

import unicodedata
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from gpuload.tokenizer.classes import CODE_POINTS, ClassMap
from gpuload.tokenizer.hash_tables import fill, hash_pairs, pair_keys
from gpuload.tokenizer.unassigned import UNASSIGNED

# The value of a code point is ORDER | COMPOSES, or NEVER.
ORDER = 63  # the rank of its canonical combining class among all classes; 0 for class 0, that is, not reordered
COMPOSES = 64  # it composes with some character before it
NEVER = 255  # it does not occur in NFC, or versions of Unicode may differ on it
_JAMO = [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)]  # Korean vowels and final consonants


@lru_cache(maxsize=1)
def nfc_tables() -> tuple[ClassMap, npt.NDArray[np.uint64]]:
    """Build the tables.

    Returns:
        The value of every code point (see above); code points that are unassigned in Unicode 14 are `NEVER`.
        And a hash set of `pair_keys(first, second)`, for all pairs of code points that are not in NFC because the
        second composes with the first or with a part of its decomposition, except Korean ones.
    """
    values = np.zeros(CODE_POINTS, np.uint8)
    for span in UNASSIGNED.split():
        start, _, end = span.partition("-")
        values[int(start, 16) : int(end or start, 16) + 1] = NEVER
    known = np.flatnonzero(values == 0).tolist()
    values[[c for c in known if not unicodedata.is_normalized("NFC", chr(c))]] = NEVER
    classes = {c: order for c in known if (order := unicodedata.combining(chr(c)))}
    place = {order: place for place, order in enumerate(sorted(set(classes.values())), 1)}
    values[list(classes)] |= np.array([place[order] for order in classes.values()], np.uint8)

    made = [(c, parts) for c in known if values[c] != NEVER and (parts := _made_of(chr(c)))]
    letters = {c for c, _ in made} | {parts[0] for _, parts in made}
    marks = {parts[1] for _, parts in made}
    values[[*marks, *_JAMO]] |= COMPOSES
    # Which of all candidates compose, Python's unicodedata decides.
    pairs = [
        (first, second)
        for first in letters
        for second in marks
        if not unicodedata.is_normalized("NFC", chr(first) + chr(second))
    ]
    first, second = np.array(pairs, np.int64).T
    keys = np.unique(pair_keys(first, second))
    return ClassMap.from_classes(values), fill(keys.astype(np.uint64), hash_pairs(keys))


def _made_of(character: str) -> list[int]:
    """The canonical decomposition of a character, empty if it has none."""
    parts = unicodedata.decomposition(character).split()
    return [] if not parts or parts[0].startswith("<") else [int(part, 16) for part in parts]
