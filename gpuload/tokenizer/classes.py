"""Partitions all code points into classes. Two code points are in one class if the split regexes cannot distinguish
them.

Which code points `\\p{L}` or `(?i:s)` contains depends on the regex engine and its version of Unicode. So the engine of
`tokenizers` itself is asked, once for every such atom and over all code points, and its answer is cached on disk.
(Python's `regex` gives another answer for 17,480 code points.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuload.tokenizer.regex import Ahead, Alternate, Atom, Concat, Node, Repeat, UnsupportedRegexError, nullable
from gpuload.tokenizer.tables import cached

CODE_POINTS = 0x110000
NUMERIC = Atom("Digits")  # Rust's char::is_numeric, used by the Digits pre-tokenizer; no regex is equivalent to it
_CHUNK = 1024  # code points per call of the engine


@dataclass(frozen=True)
class ClassMap:
    """The class of every code point, as a two-level table: the class of c is `blocks[pages[c >> 8], c & 255]`.

    Most of the 4352 pages of 256 code points are equal, so the table has some tens of kilobytes instead of 1.1 MB.
    """

    pages: npt.NDArray[np.uint16]  # (4352,) uint16, the block of each page
    blocks: npt.NDArray[np.uint8]  # (m, 256) uint8, every distinct page once
    count: int  # number of classes; classes are 0 to count - 1

    def of(self, code_points: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        """Return the (n,) classes of (n,) code points."""
        found: npt.NDArray[np.uint8] = self.blocks[self.pages[code_points >> 8], code_points & 255]
        return found

    @staticmethod
    def from_classes(classes: npt.NDArray[np.uint8]) -> "ClassMap":
        """Build the table from (0x110000,) class numbers."""
        pages, blocks = two_levels(classes)
        return ClassMap(pages, blocks, int(blocks.max()) + 1)


def two_levels(values: npt.NDArray[Any]) -> tuple[npt.NDArray[np.uint16], npt.NDArray[Any]]:
    """(4352,) pages and (m, 256) blocks of a value for each code point: every distinct page of 256 is stored once."""
    different: dict[bytes, int] = {}
    pages = [different.setdefault(page.tobytes(), len(different)) for page in values.reshape(-1, 256)]
    return np.array(pages, np.uint16), np.frombuffer(b"".join(different), values.dtype).reshape(-1, 256)


def changes(atom: Atom) -> npt.NDArray[np.int64]:
    """Return the code points at which an atom's set of code points begins, ends, begins and so on.

    Surrogates, which no text contains, are never in the set.
    """
    text = f"(?i:{atom.text})" if atom.ignore_case else atom.text
    content = f"1 {version('tokenizers')} {atom == NUMERIC} {text}"
    answer = cached("class", content, lambda: {"changes": np.flatnonzero(np.diff(_ask(atom, text), prepend=False))})
    return np.asarray(answer["changes"], np.int64)


def _ask(atom: Atom, text: str) -> npt.NDArray[np.bool_]:
    """Ask `tokenizers` which code points match an atom: replace matches by nothing, and see what remains."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    inside = np.zeros(CODE_POINTS, np.bool_)
    erase = None if atom == NUMERIC else normalizers.Replace(Regex(text), "")
    for start in range(0, CODE_POINTS, _CHUNK):
        if 0xD800 <= start < 0xE000:
            continue
        chunk = "".join(map(chr, range(start, start + _CHUNK)))
        if erase is None:
            pre_tokens = pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(chunk)
            # Every numeral becomes a pre-token of one character. So may another character between two numerals, hence
            # the second test.
            numerals = [c for c, _ in pre_tokens if len(c) == 1 and _is_numeral(c)]
            inside[[ord(c) for c in numerals]] = True
        else:
            inside[start : start + _CHUNK] = True
            inside[[ord(c) for c in erase.normalize_str(chunk)]] = False
    return inside


def _is_numeral(character: str) -> bool:
    from tokenizers import pre_tokenizers

    return len(pre_tokenizers.Digits(individual_digits=True).pre_tokenize_str(character * 2)) == 2


def partition(atoms: Sequence[Atom]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """Compute the coarsest partition of all code points such that every atom is a union of classes.

    Returns:
        (0x110000,) uint8 class numbers, and (classes, atoms) bool, whether a class is contained in an atom.

    Raises:
        UnsupportedRegexError: there are more than 62 atoms (the bits of a signature) or 255 classes (uint8).
    """
    if len(atoms) > 62:
        raise UnsupportedRegexError("more than 62 different character classes")
    edges = [changes(atom) for atom in atoms]
    # Between two neighbouring edges of any atoms, all code points are equal. The signature of such a span has bit k set
    # if atom k contains it: searchsorted counts the atom's edges up to the span's start, an odd number inside.
    starts = np.unique(np.concatenate([np.zeros(1, np.int64), *edges]))
    signature = np.zeros(len(starts), np.int64)
    for bit, edge in enumerate(edges):
        signature |= (np.searchsorted(edge, starts, side="right") % 2) << bit
    signatures, classes = np.unique(signature, return_inverse=True)
    if len(signatures) > 255:
        raise UnsupportedRegexError("its character classes divide Unicode into more than 255 parts")
    inside = (signatures[:, None] >> np.arange(len(atoms))) & 1 == 1
    return np.repeat(classes.astype(np.uint8), np.diff(starts, append=CODE_POINTS)), inside


@lru_cache(maxsize=1)
def _long_folds() -> tuple[str, ...]:
    """All case foldings of one character to several (ß → ss)."""
    folds = (chr(c).casefold() for c in range(CODE_POINTS) if not 0xD800 <= c < 0xE000)
    return tuple(sorted({fold for fold in folds if len(fold) > 1}))


def check_folding(node: Node) -> None:
    """Check that case-insensitive parts of a pattern can be matched code point by code point.

    The engine uses full case folding, where one character can match several: `(?i:ss)` matches ß. A DFA over single
    code points cannot do that.

    Raises:
        UnsupportedRegexError: such a match is possible; the message names the text.
    """
    pairs = {fold[:2] for fold in _long_folds()}
    _edges(node, pairs)


def _edges(node: Node, pairs: set[str]) -> tuple[set[str], set[str]]:
    """Return the folded literals with which case-insensitive text can begin, and those with which it can end.

    Where one part can end and the next begin with two characters that are the folding of one, it raises.
    """
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
            raise UnsupportedRegexError(f"the case-insensitive text {pair!r}, which a single character can match")


def _check_alone(atom: Atom) -> None:
    from tokenizers import Regex, normalizers

    erase = normalizers.Replace(Regex(f"(?i:{atom.text})"), "|")
    for fold in _long_folds():
        if erase.normalize_str(fold) == "|":
            raise UnsupportedRegexError(f"the case-insensitive {atom.text}, which {fold!r} can match")
