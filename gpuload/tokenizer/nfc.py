"""Tables that bring text into Unicode's normal form C (NFC), after Unicode Standard Annex 15.

NFC decomposes a text, puts combining marks into canonical order, and composes. Most text is in NFC already, and almost
all other text differs by one of three changes, which the kernels make (`normal_form.cu`):

- a code point that never occurs in NFC is replaced by its own normal form;
- a mark is composed with the letter before it: `e` followed by an acute accent becomes é. Some marks are vowel signs or
  the parts of Korean syllables, which compose by a rule;
- marks that do not compose are sorted by their classes.

Texts that need more fall back to the tokenizer object. So do texts with code points that are unassigned in Unicode 14,
as versions of Unicode may differ on them, and with those on which the normalizer of `tokenizers`, which is built for an
older version (9.0 in 0.23), differs from Python's: `normalized_otherwise` asks it.

Why the result is NFC: replacing a part of a text by its normal form does not change the normal form of the whole. Let a
letter be followed by marks that do not compose with it, and then by another mark. Marks of different classes may be
exchanged, so if no mark before has its class, this mark may as well follow the letter: what becomes of it depends on
the pair alone. If the pair is in NFC, the mark stays. If the pair becomes one character, that replaces the letter. The
marks before do not compose with this one either if their classes are lower, because in canonical order they come before
the part that is new. Otherwise they might, and the text falls back. So it does if the pair becomes other characters: é
with a dot below is ẹ with an acute accent.
"""

import unicodedata
from functools import lru_cache
from importlib.metadata import version

import numpy as np
import numpy.typing as npt

from gpuload.tokenizer.classes import CODE_POINTS, ClassMap
from gpuload.tokenizer.hash_tables import fill, hash_pairs, pair_keys
from gpuload.tokenizer.tables import cached
from gpuload.tokenizer.unassigned import unassigned

# The value of a code point is ORDER | COMPOSES for a mark, one of the others, or 0.
ORDER = 63  # the rank of its canonical combining class among all classes; 0 for class 0, that is, not reordered
COMPOSES = 64  # it composes with some character before it
DECOMPOSES = 128  # it does not occur in NFC, and its normal form is in the hash table
NEVER = 255  # other code points that do not occur in NFC, and those on which versions of Unicode may differ
_JAMO = [*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)]  # Korean vowels and final consonants
_RESULT_BITS = 21
_INERT = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xD800, 0xF8FF), (0x20000, 0x2A6DF), (0xF0000, 0x10FFFF))
"""Ranges of code points that no normal form changes: Han characters, surrogates, and areas of private use."""


@lru_cache(maxsize=1)
def nfc_tables() -> tuple[ClassMap, npt.NDArray[np.uint64]]:
    """Build the tables.

    Returns:
        The value of every code point (see above). And a hash table of pairs of code points that are not in NFC, except
        Korean ones. A slot is first (21 bits), second (21 bits) and the code point that they become (21 bits), 0 if
        they become several. What a code point c with the value `DECOMPOSES` becomes is stored as the pairs (0, c) and,
        if it becomes two code points, (1, c).
    """
    values = np.zeros(CODE_POINTS, np.uint8)
    for start, end in unassigned():
        values[start : end + 1] = NEVER
    known = np.flatnonzero(values == 0).tolist()
    values[[*normalized_otherwise()]] = NEVER
    values[[c for c in known if not unicodedata.is_normalized("NFC", chr(c))]] = NEVER
    classes = {c: order for c in known if values[c] != NEVER and (order := unicodedata.combining(chr(c)))}
    place = {order: place for place, order in enumerate(sorted(set(classes.values())), 1)}
    values[list(classes)] |= np.array([place[order] for order in classes.values()], np.uint8)

    made = [(c, parts) for c in known if values[c] != NEVER and (parts := _made_of(chr(c)))]
    letters = {c for c, _ in made} | {parts[0] for _, parts in made}
    marks = {parts[1] for _, parts in made}
    values[[*marks, *_JAMO]] |= COMPOSES
    # Which of all candidates compose, Python's unicodedata decides.
    pairs = [
        (first, second, _only(chr(first) + chr(second)))
        for first in sorted(letters)
        for second in sorted(marks)
        if not unicodedata.is_normalized("NFC", chr(first) + chr(second))
    ]
    for c in known:
        form = [ord(part) for part in unicodedata.normalize("NFC", chr(c))]
        if form != [c] and _replaceable(values[form].tolist()) and _same_nfc(chr(c)):
            values[c] = DECOMPOSES
            pairs += [(number, c, part) for number, part in enumerate(form)]
    first, second, result = np.array(pairs, np.int64).T
    keys = pair_keys(first, second)
    return ClassMap.from_classes(values), fill((keys << _RESULT_BITS | result).astype(np.uint64), hash_pairs(keys))


@lru_cache(maxsize=1)
def normalized_otherwise() -> tuple[int, ...]:
    """The code points of Unicode 14 that the normalizer of `tokenizers` treats otherwise than Python's unicodedata.

    On texts without them both agree. Two properties decide what becomes of a text, and a new version of Unicode changes
    neither for code points that it had before. Where the normalizer does not know

    - the class of a mark, it does not exchange the mark with others;
    - a decomposition, it leaves the code point as it is, and does not compose the parts. At least one part is as new as
      the composition, which NFC would exclude otherwise. All parts newer than Unicode 3.2 are among the result.

    Asking takes 25 ms, so the answer is cached on disk.
    """
    content = f"1 {version('tokenizers')} {unicodedata.unidata_version}"
    answer = cached("nfc", content, lambda: {"code_points": np.array(_ask(), np.int64)})
    return tuple(answer["code_points"].tolist())


def asked_characters() -> list[str]:
    """The characters of Unicode 14 on which libraries may differ: all but those that no normal form changes."""
    known = np.ones(CODE_POINTS, np.bool_)
    for start, end in [*unassigned(), *_INERT]:
        known[start : end + 1] = False
    return [*map(chr, np.flatnonzero(known).tolist())]


def _ask() -> list[int]:
    characters = asked_characters()
    found = {c for c in characters if (order := unicodedata.combining(c)) and not _same_nfc(_with_mark(c, order))}
    for c in characters:
        if _made_of(c):
            parts = unicodedata.normalize("NFD", c)
            if not _same_nfc(c) or not _same_nfc(parts):
                found.update(c, (part for part in parts if unicodedata.ucd_3_2_0.category(part) == "Cn"))
    return sorted(map(ord, found))


def _made_of(character: str) -> list[int]:
    """The canonical decomposition of a character, empty if it has none."""
    parts = unicodedata.decomposition(character).split()
    return [] if not parts or parts[0].startswith("<") else [int(part, 16) for part in parts]


def _same_nfc(text: str) -> bool:
    """Whether the normalizer of `tokenizers` and Python's unicodedata agree on a text."""
    from tokenizers import normalizers

    return bool(normalizers.NFC().normalize_str(text) == unicodedata.normalize("NFC", text))


def _with_mark(mark: str, order: int) -> str:
    """A letter, a mark of this combining class, and another one: NFC exchanges the marks if it knows the class."""
    return f"q{mark}\u0316" if order > 220 else f"q\u0301{mark}"


def _only(pair: str) -> int:
    """The code point that a pair becomes; 0 if it becomes several, or if that is not certain."""
    form = unicodedata.normalize("NFC", pair)
    return ord(form) if len(form) == 1 and _same_nfc(pair) else 0


def _replaceable(values: list[int]) -> bool:
    """Whether kernels can replace a code point by others with these values: a letter, or a letter and a combining
    mark."""
    return values == [0] or (len(values) == 2 and values[0] == 0 and values[1] & ORDER > 0)
