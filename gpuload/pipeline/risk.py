"""Prompts on which a fast path is most likely to be wrong, for `verify="sample"`.

Fast paths fail on rare text: characters that the normalizer changes, text of added tokens inside a prompt, combining
marks, unusual white space, numerals, control characters. `RiskFinder` looks for them in a bounded number of candidates,
and puts the rows with the rarest findings first.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence, Set
from functools import cache
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrow import as_arrow, as_numpy, fill_null
from gpuload.core.backends import state
from gpuload.reference.reference import Reference

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
Ints = np.ndarray[Any, np.dtype[np.int64]]

# In RE2's syntax; each pattern is one kind of risk. Arrow compiles a pattern at every call, and would need milliseconds
# for Unicode's own classes, so these are ranges of code points.
_MARKS = (
    r"[\x{300}-\x{36f}\x{483}-\x{489}\x{591}-\x{5c7}\x{610}-\x{61a}\x{64b}-\x{65f}\x{6d6}-\x{6ed}\x{711}-\x{74a}"
    r"\x{900}-\x{903}\x{93a}-\x{94f}\x{981}-\x{983}\x{9bc}-\x{9d7}\x{a01}-\x{a03}\x{a3c}-\x{a51}\x{abc}-\x{acd}"
    r"\x{b3c}-\x{b57}\x{bbe}-\x{bcd}\x{c3e}-\x{c56}\x{cbc}-\x{cd6}\x{d3b}-\x{d4d}\x{dca}-\x{ddf}\x{e31}-\x{e3a}"
    r"\x{e47}-\x{e4e}\x{eb1}-\x{ecd}\x{f71}-\x{f84}\x{102b}-\x{103e}\x{135d}-\x{135f}\x{17b4}-\x{17d3}\x{1ab0}-\x{1aff}"
    r"\x{1dc0}-\x{1dff}\x{20d0}-\x{20f0}\x{302a}-\x{302f}\x{3099}\x{309a}\x{fe00}-\x{fe0f}\x{fe20}-\x{fe2f}]"
)
_NUMERALS = (
    r"[\x{b2}\x{b3}\x{b9}\x{bc}-\x{be}\x{660}-\x{669}\x{6f0}-\x{6f9}\x{966}-\x{96f}\x{9e6}-\x{9ef}\x{a66}-\x{a6f}"
    r"\x{ae6}-\x{aef}\x{be6}-\x{bf2}\x{e50}-\x{e59}\x{1040}-\x{1049}\x{17e0}-\x{17e9}\x{2070}-\x{2079}\x{2080}-\x{2089}"
    r"\x{2150}-\x{2189}\x{2460}-\x{249b}\x{2776}-\x{2793}\x{3007}\x{3021}-\x{3029}\x{ff10}-\x{ff19}]"
)
_SPACES_AND_CONTROLS = (
    r"[\x00-\x08\x0b-\x1f\x7f-\x{a0}\x{ad}\x{61c}\x{1680}\x{180e}\x{2000}-\x{200f}\x{2028}-\x{202f}\x{205f}-\x{206f}"
    r"\x{3000}\x{feff}\x{fff9}-\x{fffd}]"
)
_WIDE = r"[^\x00-\x7f]"
# Two white spaces before a digit: pre-tokenizers that separate digits treat such white space differently.
_PATTERNS = (_MARKS, _NUMERALS, _SPACES_AND_CONTROLS, r"\s\s+[0-9]", r"[\x{10000}-\x{10ffff}]", _WIDE)
_LARGE = 64 << 10  # bytes; below, compiling the patterns takes longer than the search
_MOST_PREFIXES = 200
_SEARCHED_ROWS = 4096  # texts that are searched for marks at a time


class RiskFinder:
    """Ranks prompts by what this tokenizer makes risky.

    Args:
        reference: the tokenizer; its added tokens and its normalizer are read.
    """

    def __init__(self, reference: Reference):
        backend = reference.backend
        forms = re.findall(r"'type': '(NFK?[CD])'", str(state(backend, "normalizer"))) if backend is not None else []
        self._forms = cast(list[Form], sorted(set(forms)))
        added = _prefixes(reference.special_texts())
        self._patterns = [*_PATTERNS, *([added] if added else [])]
        self._any = "|".join(f"(?:{pattern})" for pattern in self._patterns)
        self._marks: set[str] = set()  # in texts that were found by `new_marks`
        self._other_marks = ""  # a pattern for all others; made when it is needed, in milliseconds

    def rank(self, prompts: pa.Array, rng: np.random.Generator) -> Ints:
        """(n,) prompts → their numbers, the riskiest first; prompts without risks are at the end, in random order.

        The kinds of risk take turns, the rarest first, and each gives the prompt that has the rarest other risks too.
        """
        kinds = [kind for kind in self._kinds(prompts) if kind.any()]
        kinds.sort(key=np.count_nonzero)
        shuffled = rng.permutation(len(prompts))
        score = sum((kind / np.count_nonzero(kind) for kind in kinds), np.zeros(len(prompts)))
        ordered = shuffled[np.argsort(-score[shuffled], kind="stable")]
        turns = [iter(ordered[kind[ordered]].tolist()) for kind in kinds]
        ranked = dict.fromkeys(in_turn(turns))
        return np.array([*ranked, *(row for row in ordered.tolist() if row not in ranked)], np.int64)

    def new_marks(
        self, prompts: pa.Array, usable: np.ndarray[Any, np.dtype[np.bool_]], most: int, over: Callable[[], bool]
    ) -> list[int]:
        """The rows with a combining mark that no row found before had, in a text that the normalizer changes.

        Libraries normalize by the tables of different versions of Unicode, which differ in single marks.

        Args:
            prompts: n prompts.
            usable: (n,) bool, the rows to look at.
            most: how many rows to return.
            over: whether the time to search is over.
        """
        found: dict[int, None] = {}
        for texts, rows in _texts(prompts, np.arange(len(prompts))) if self._forms else ():
            wide = np.flatnonzero(~as_numpy(fill_null(pc.string_is_ascii(texts), True)))
            for start in range(0, len(wide), _SEARCHED_ROWS):
                if over() or len(found) >= most:
                    return list(found)
                some = wide[start : start + _SEARCHED_ROWS]
                some = some[usable[rows[some]]]
                if texts.take(as_arrow(some)).nbytes > _LARGE:
                    self._other_marks = self._other_marks or _pattern_of(_combining() - self._marks)
                    some = some[_matches(texts.take(as_arrow(some)), self._other_marks)]
                found_texts = texts.take(as_arrow(some)).cast(pa.large_binary()).to_pylist()
                for row, text in zip(rows[some].tolist(), found_texts, strict=True):
                    if len(found) < most and self._has_new_marks(text.decode(errors="replace")):
                        found[row] = None
        return list(found)

    def _has_new_marks(self, text: str) -> bool:
        """Whether the normalizer changes a text with marks that no such text before had."""
        if all(unicodedata.is_normalized(form, text) for form in self._forms):
            return False
        marks = {character for character in text if unicodedata.combining(character)} - self._marks
        if marks:
            self._marks |= marks
            self._other_marks = ""
        return bool(marks)

    def _kinds(self, prompts: pa.Array) -> Iterator[np.ndarray[Any, np.dtype[np.bool_]]]:
        """For each kind of risk, (n,) bool: which prompts have it."""
        found = np.zeros((len(self._patterns) + len(self._forms), len(prompts)), bool)
        by_pattern, by_form = np.split(found, [len(self._patterns)])
        parts = list(_texts(prompts, np.arange(len(prompts))))
        if parts:
            texts = pa.concat_arrays([part for part, _ in parts])
            rows = np.concatenate([numbers for _, numbers in parts])
            at = np.arange(len(texts))
            if texts.nbytes > _LARGE:  # one pass for all patterns first: few texts have any of them
                at = np.flatnonzero(_matches(texts, self._any))
            some = texts.take(as_arrow(at))
            for kind, pattern in zip(by_pattern, self._patterns, strict=True):
                kind[rows[at[_matches(some, pattern)]]] = True
            # Normalization changes only characters outside ASCII.
            at = np.flatnonzero(_matches(texts, _WIDE)) if self._forms else at[:0]
            some = texts.take(as_arrow(at)).to_pylist()
            for kind, form in zip(by_form, self._forms, strict=True):
                changed = np.array([not unicodedata.is_normalized(form, text) for text in some], bool)
                kind[rows[at[changed]]] = True
        yield from found


@cache
def _combining() -> frozenset[str]:
    """All combining marks."""
    return frozenset(filter(unicodedata.combining, map(chr, range(0x300, 0x1F000))))


def _pattern_of(characters: Set[str]) -> str:
    """A pattern for single characters, as ranges of code points."""
    codes = np.array(sorted(map(ord, characters)), np.int64)
    first = np.flatnonzero(np.diff(codes, prepend=-1) > 1)
    last = np.append(first[1:], len(codes)) - 1
    ranges = zip(codes[first].tolist(), codes[last].tolist(), strict=True)
    return "[" + "".join(rf"\x{{{low:x}}}-\x{{{high:x}}}" for low, high in ranges) + "]"


def _matches(texts: pa.LargeStringArray, pattern: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return as_numpy(fill_null(pc.match_substring_regex(texts, pattern), False))


def _texts(column: pa.Array, rows: Ints) -> Iterator[tuple[pa.LargeStringArray, Ints]]:
    """All strings in a nested column, and for each the number of its row.

    Args:
        column: (k,) values.
        rows: (k,) the row of each value.
    """
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        yield from _texts(column.storage, rows)
    elif pa.types.is_dictionary(kind):
        yield from _texts(column.dictionary_decode(), rows)
    elif pa.types.is_struct(kind):
        for field in column.flatten():
            yield from _texts(field, rows)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield from _texts(column.flatten(), rows[as_numpy(pc.list_parent_indices(column))])
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
        yield column.cast(pa.large_string()), rows


def in_turn(parts: Sequence[Iterator[int]]) -> Iterator[int]:
    """One item of each iterator, then the next of each, until all are exhausted."""
    while parts:
        kept = []
        for part in parts:
            for item in part:
                yield item
                kept.append(part)
                break
        parts = kept


def _prefixes(tokens: Sequence[str]) -> str:
    """A pattern for texts in which one of the tokens may begin, in either case: by their first characters, so that
    thousands of tokens make a small pattern. Empty without tokens."""
    for length in (4, 3, 2, 1):
        starts = {_start(token, length) for token in tokens if token}
        if len(starts) <= _MOST_PREFIXES:
            break
    return "(?i)" + "|".join(sorted(starts)) if starts else ""


def _start(token: str, length: int) -> str:
    """The first characters of a token, escaped for RE2; only ASCII ones, if it begins with one: an accented letter may
    be written in two ways."""
    ascii_part = re.match(r"[\x00-\x7f]*", token)
    start = (ascii_part.group() if ascii_part else "")[:length] or token[:1]
    return "".join(rf"\x{{{ord(character):x}}}" for character in start)
