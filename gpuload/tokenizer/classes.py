"""Code points partitioned into classes: two code points are in one class where a pattern cannot tell them apart.

Which code points `\\p{L}` or `(?i:s)` means depends on the engine and its version of Unicode, so the engine itself is
asked, once per class over all code points, and the answer is kept on disk. (Python's `regex` disagrees with it on
17,480 code points.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuload.tokenizer.regex import Ahead, Alternate, Atom, Concat, Node, Repeat, UnsupportedRegexError, nullable
from gpuload.tokenizer.tables import kept

CODE_POINTS = 0x110000
NUMERIC = Atom("Digits")  # Rust's char::is_numeric, which no regex names
_CHUNK = 1024  # the engine is asked about so many at a time


@dataclass(frozen=True)
class ClassMap:
    """code point c → class `blocks[pages[c >> 8], c & 255]`.

    Attributes:
        pages: (4352,) uint16.
        blocks: (m, 256) uint8, every different page once.
        count: classes are 0 .. count - 1.
    """

    pages: npt.NDArray[np.uint16]
    blocks: npt.NDArray[np.uint8]
    count: int

    @property
    def nbytes(self) -> int:
        return int(self.pages.nbytes + self.blocks.nbytes)

    def of(self, code_points: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """The classes of (n,) code points."""
        found: npt.NDArray[np.uint8] = self.blocks[self.pages[code_points >> 8], code_points & 255]
        return found

    @staticmethod
    def from_classes(classes: npt.NDArray[np.uint8]) -> "ClassMap":
        """From a (0x110000,) array of class numbers."""
        different: dict[bytes, int] = {}
        pages = [different.setdefault(page.tobytes(), len(different)) for page in classes.reshape(-1, 256)]
        blocks = np.frombuffer(b"".join(different), np.uint8).reshape(-1, 256)
        return ClassMap(np.array(pages, np.uint16), blocks, int(blocks.max()) + 1)


def changes(atom: Atom) -> npt.NDArray[np.int64]:
    """The code points at which a class begins and ends, in turn; surrogates, which no text has, are in none."""
    text = f"(?i:{atom.text})" if atom.ignore_case else atom.text
    content = f"1 {version('tokenizers')} {atom == NUMERIC} {text}"
    answer = kept("class", content, lambda: {"changes": np.flatnonzero(np.diff(_ask(atom, text), prepend=False))})
    return np.asarray(answer["changes"], np.int64)


def _ask(atom: Atom, text: str) -> npt.NDArray[np.bool_]:
    from tokenizers import Regex, normalizers, pre_tokenizers

    inside = np.zeros(CODE_POINTS, np.bool_)
    erase = None if atom == NUMERIC else normalizers.Replace(Regex(text), "")
    for start in range(0, CODE_POINTS, _CHUNK):
        if 0xD800 <= start < 0xE000:
            continue
        chunk = "".join(map(chr, range(start, start + _CHUNK)))
        if erase is None:
            pieces = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(chunk)
            # A numeral is a piece of its own; so may be another character between two of them.
            numerals = [c for c, _ in pieces if len(c) == 1 and _is_numeral(c)]
            inside[[ord(c) for c in numerals]] = True
        else:
            inside[start : start + _CHUNK] = True
            inside[[ord(c) for c in erase.normalize_str(chunk)]] = False
    return inside


def _is_numeral(character: str) -> bool:
    from tokenizers import pre_tokenizers

    return len(pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(character * 2)) == 2


def partition(atoms: Sequence[Atom]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """The coarsest classes that every atom is a union of.

    Returns:
        (0x110000,) class numbers, and (number of classes, number of atoms) whether the class is in the atom.

    Raises:
        UnsupportedRegexError: there are more than 62 atoms or more than 255 classes.
    """
    if len(atoms) > 62:
        raise UnsupportedRegexError("more than 62 different classes")
    edges = [changes(atom) for atom in atoms]
    starts = np.unique(np.concatenate([np.zeros(1, np.int64), *edges]))  # of spans that no atom tells apart
    signature = np.zeros(len(starts), np.int64)
    for bit, edge in enumerate(edges):
        signature |= (np.searchsorted(edge, starts, side="right") % 2) << bit
    signatures, classes = np.unique(signature, return_inverse=True)
    if len(signatures) > 255:
        raise UnsupportedRegexError("more than 255 classes of code points")
    inside = (signatures[:, None] >> np.arange(len(atoms))) & 1 == 1
    return np.repeat(classes.astype(np.uint8), np.diff(starts, append=CODE_POINTS)), inside


@lru_cache(maxsize=1)
def _long_folds() -> tuple[str, ...]:
    """What single characters become where case folding makes several of one (ß → ss)."""
    folds = (chr(c).casefold() for c in range(CODE_POINTS) if not 0xD800 <= c < 0xE000)
    return tuple(sorted({fold for fold in folds if len(fold) > 1}))


def check_folding(node: Node) -> None:
    """Rejects case-insensitive text that one character could match where several are written, or the other way round:
    `(?i:ss)` takes ß, and a DFA over single code points would not.

    Raises:
        UnsupportedRegexError: it names the text.
    """
    pairs = {fold[:2] for fold in _long_folds()}
    _edges(node, pairs)


def _edges(node: Node, pairs: set[str]) -> tuple[set[str], set[str]]:
    """The folded literals with which case-insensitive text can begin and end."""
    match node:
        case Atom():
            if not node.ignore_case:
                return set(), set()
            _check_alone(node)
            folded = {node.literal.casefold()} if node.literal else set()
            return folded, folded
        case Ahead():
            _edges(node.atom, pairs)
            return set(), set()
        case Alternate(options):
            edges = [_edges(option, pairs) for option in options]
            return set().union(*(a for a, _ in edges)), set().union(*(b for _, b in edges))
        case Repeat(body, _, most, _):
            first, last = _edges(body, pairs)
            if most != 1:
                _check_pairs(last, first, pairs)
            return first, last
        case Concat(parts):
            begins: set[str] = set()
            ends: set[str] = set()
            open_start = True
            for part in parts:
                first, last = _edges(part, pairs)
                _check_pairs(ends, first, pairs)
                if open_start:
                    begins |= first
                    open_start = nullable(part)
                ends = last | ends if nullable(part) else last
            return begins, ends


def _check_pairs(ends: set[str], begins: set[str], pairs: set[str]) -> None:
    for pair in (a + b for a in ends for b in begins):
        if pair in pairs:
            raise UnsupportedRegexError(f"the case-insensitive text {pair!r}, for which one character can stand")


def _check_alone(atom: Atom) -> None:
    from tokenizers import Regex, normalizers

    erase = normalizers.Replace(Regex(f"(?i:{atom.text})"), "|")
    for fold in _long_folds():
        if erase.normalize_str(fold) == "|":
            raise UnsupportedRegexError(f"the case-insensitive {atom.text}, for which {fold!r} can stand")
