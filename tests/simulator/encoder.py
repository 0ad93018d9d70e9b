"""The reference implementation, in plain Python, of the device's encoder: short, slow, and tested against `tokenizers`.

It runs the tables of a `CompiledTokenizer` exactly as the kernels do, which are tested against it:

1. Added tokens are found that are searched for in the original text: at the leftmost position, the longest one.
2. If the tokenizer normalizes to NFC, text between them is normalized. Some texts fall back to the tokenizer object.
3. Added tokens are found that are searched for in normalized text. The rest is split into pre-tokens by the splitter.
   With byte fallback, it is cut where no merge can cross.
4. A pre-token that is a vocabulary entry becomes that entry (whole-word look-up). The others are merged.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import normalizers

from gpuload.tokenizer import fallback
from gpuload.tokenizer.compiled import CompiledTokenizer
from gpuload.tokenizer.fallback import FallbackTables, code_points
from gpuload.tokenizer.hash_tables import EMPTY, SHORT, hash_bytes, hash_pairs, hash_words, padded_words, pair_keys
from gpuload.tokenizer.merges import Bytes, MergeTables, Offsets, merge
from gpuload.tokenizer.nfc import COMPOSES, DECOMPOSES, NEVER, ORDER, nfc_tables
from gpuload.tokenizer.spec import WHITE_SPACE, AddedToken, Keep
from gpuload.tokenizer.splitter import DEAD, MATCH_BEFORE, START, STATE, Splitter

Section = str | int  # text, or the id of an added token


def encode(tokenizer: CompiledTokenizer, text: str) -> list[int] | None:
    """Encode a text without adding special tokens; None if it falls back to the tokenizer object."""
    parts = cut(tokenizer, text)
    if parts is None:
        return None
    tables = tokenizer.tables
    words = [part.encode() for part in parts if isinstance(part, str)]
    base = tables.base if isinstance(tables, FallbackTables) else tables
    whole = look_up_words(base, *_flat(words))
    rest = [words[number] for number in np.flatnonzero(whole < 0)]
    if isinstance(tables, FallbackTables):
        merged, bounds = fallback.merge(tables, [word.decode() for word in rest])
    else:
        merged, bounds = merge(tables, *_flat(rest))
    entries, merges = iter(whole.tolist()), iter(np.split(merged, bounds[1:-1]) if rest else [])
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        else:
            entry = next(entries)
            ids += next(merges).tolist() if entry < 0 else [entry]
    return ids


def _flat(words: list[bytes]) -> tuple[Bytes, Offsets]:
    return np.frombuffer(b"".join(words), np.uint8), np.cumsum([0, *map(len, words)])


# Step 2: normal form C.

MOST_MARKS = 32
"""A text with more marks in a row falls back."""


def to_nfc(text: str) -> str | None:
    """Return a text in NFC; None if it falls back. `gpuload.tokenizer.nfc` says why the result is NFC."""
    if text.isascii():
        return text
    values = nfc_tables()[0].of(code_points(text)).tolist()
    done: list[str] = []
    letter, staying, marks = "", list[tuple[int, str]](), 0  # marks that stay, with their classes
    first_class = last = 0  # of a mark that is the first code point, and the highest one of marks that stay
    for character, value in zip(text, values, strict=True):
        if value == NEVER:
            return None
        order = value & ORDER
        if letter and 0 < value < DECOMPOSES:
            marks += 1
            blocked = last != 0 if order == 0 else last == order
            made = _composed(letter, character) if value & COMPOSES and not blocked else None
            out_of_order = 0 < order < last
            if marks > MOST_MARKS or made == "" or (out_of_order and (made or first_class)):
                return None
            if made:
                letter = made
                continue
            if order:
                staying, last = [*staying, (order, character)], max(last, order)
                continue
        else:
            marks = 0
        done += letter, *(mark for _, mark in sorted(staying, key=itemgetter(0)))
        letter, staying, first_class = character, [], order
        if value == DECOMPOSES:
            form = unicodedata.normalize("NFC", character)
            letter, classes = form[0], nfc_tables()[0].of(code_points(form[1:])).tolist()
            staying = [(value & ORDER, mark) for value, mark in zip(classes, form[1:], strict=True)]
            first_class = staying[0][0] if staying else 0
        last = first_class
    return "".join([*done, letter, *(mark for _, mark in sorted(staying, key=itemgetter(0)))])


def _composed(letter: str, mark: str) -> str | None:
    """What a letter and a mark become, None if they are in NFC, and an empty text if they become several characters,
    or if versions of Unicode differ."""
    pair = letter + mark
    form = unicodedata.normalize("NFC", pair)
    if form == pair:
        return None
    return form if len(form) == 1 and normalizers.NFC().normalize_str(pair) == form else ""


# Steps 1 and 3: added tokens and pre-tokens.


def cut(tokenizer: CompiledTokenizer, text: str) -> list[Section] | None:
    """Return the pre-tokens of a text with the added tokens between them; None if it falls back."""
    spec = tokenizer.spec
    sections = _cut_at_added(spec.added, False, [text])
    if spec.nfc:
        normalized = [section if isinstance(section, int) else to_nfc(section) for section in sections]
        if None in normalized:
            return None
        sections = [section for section in normalized if section is not None]
    sections = _cut_at_added(spec.added, True, sections)
    # Only at the start can a section be text that nothing precedes.
    return [part for number, section in enumerate(sections) for part in _cut_section(tokenizer, section, number == 0)]


def _cut_at_added(tokens: Iterable[AddedToken], normalized: bool, sections: list[Section]) -> list[Section]:
    """Cut all sections at the added tokens of one pass."""
    added = {token.content: token for token in tokens if token.normalized == normalized}
    return [part for section in sections for part in _cut_one(added, section)] if added else sections


def _cut_one(added: dict[str, AddedToken], section: Section) -> Iterator[Section]:
    if isinstance(section, int):
        yield section
        return
    start = 0
    for match in _finder(tuple(added)).finditer(section):
        token = added[match[0]]
        before, after = match.span()
        if token.lstrip:
            before = max(start, len(section[:before].rstrip(WHITE_SPACE)))
        if token.rstrip:
            after = len(section) - len(section[after:].lstrip(WHITE_SPACE))
        if start < before:
            yield section[start:before]
        yield token.id
        start = after
    if start < len(section):
        yield section[start:]


@lru_cache(maxsize=16)
def _finder(contents: tuple[str, ...]) -> re.Pattern[str]:
    # Python's alternation takes the first option that matches: longest first.
    return re.compile("|".join(re.escape(content) for content in sorted(contents, key=len, reverse=True)))


def _cut_section(tokenizer: CompiledTokenizer, section: Section, is_first: bool) -> list[Section]:
    if isinstance(section, int):
        return [section]
    if not section:
        return []
    spec = tokenizer.spec
    if spec.prefix_space and not section.startswith(" "):
        section = " " + section
    if isinstance(tokenizer.tables, FallbackTables):
        assert spec.fallback
        how, section = spec.fallback, section.replace(" ", spec.fallback.space)
        if (is_first or not how.first_only) and not (how.unless_space and section.startswith(how.space)):
            section = how.prefix + section
        return [*cut_characters(tokenizer.tables, section)]
    return [section[start:end] for start, end in pre_tokens(tokenizer.splitter, section)]


def pre_tokens(splitter: Splitter, text: str) -> list[tuple[int, int]]:
    """Return the pre-tokens of a text as (start, end) in code points."""
    classes = splitter.classes.of(np.frombuffer(text.encode("utf-32-le"), np.uint32)).tolist()
    found = [(0, len(text))] if text else []
    for stage in splitter.stages:
        table = stage.table.tolist()
        found = [part for start, end in found for part in split(table, stage.keep, classes, start, end)]
    return found


def split(table: list[list[int]], keep: Keep, classes: list[int], start: int, end: int) -> list[tuple[int, int]]:
    """Apply one stage to the code points from `start` to `end`, given by their classes."""
    found = []
    gap = place = start  # the start of the current gap, and where a match is tried
    after_last = len(table[0]) - 1
    while place < end:
        # Run the DFA until no thread is left. The last match found has the highest priority.
        state, at, matched = START, place, -1
        while state != DEAD:
            step = table[state][classes[at] if at < end else after_last]
            if step & MATCH_BEFORE:
                matched = at
            state = step & STATE
            at += 1
        if matched < 0:
            place += 1
            continue
        if gap < place and keep != "matches":
            found.append((gap, place))
        if keep != "gaps":
            found.append((place, matched))
        gap = place = matched
    if gap < end and keep != "matches":
        found.append((gap, end))
    return found


def cut_characters(tables: FallbackTables, text: str) -> list[str]:
    """Cut a normalized text where no merge can cross; see `gpuload.tokenizer.fallback`."""
    if not text:
        return []
    points = code_points(text)
    keys = pair_keys(points[:-1], points[1:])
    cuts = (np.flatnonzero(~contains(tables.adjacent, keys)) + 1).tolist()
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def contains(table: npt.NDArray[np.uint64], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return whether each of (n,) pair keys is in a hash set."""
    wanted = keys.astype(np.uint64)
    inside = np.zeros(len(keys), np.bool_)
    mask = np.uint64(len(table) - 1)
    slots = hash_pairs(keys) & mask
    pending = np.arange(len(keys))
    while len(pending):
        found = table[slots]
        hit = found == wanted[pending]
        inside[pending[hit]] = True
        going = ~hit & (found != EMPTY)
        pending, slots = pending[going], (slots[going] + np.uint64(1)) & mask
    return inside


# Step 4: whole words. Merging is `gpuload.tokenizer.merges.merge`, which also builds the tables.


def look_up_words(tables: MergeTables, flat: Bytes, offsets: Offsets) -> npt.NDArray[np.int64]:
    """Return the (n,) ids of n pre-tokens, -1 for those that are not a usable entry. Equal hashes are not enough: bytes
    are compared."""
    lengths = np.diff(offsets)
    ids = np.full(len(lengths), -1, np.int64)
    for find, rows in (
        (_short_words, np.flatnonzero((lengths > 0) & (lengths <= SHORT))),
        (_long_words, np.flatnonzero(lengths > SHORT)),
    ):
        words = [flat[offsets[row] : offsets[row + 1]].tobytes() for row in rows]
        ids[rows] = find(tables, *_flat(words))
    return ids


def _short_words(tables: MergeTables, flat: Bytes, offsets: Offsets) -> npt.NDArray[np.int64]:
    words, lengths = padded_words(flat, offsets), np.diff(offsets)
    ids = np.full(len(lengths), -1, np.int64)
    mask = np.uint64(len(tables.words) - 1)
    pending, slots = np.arange(len(lengths)), hash_words(words) & mask
    while len(pending):
        found = tables.words[slots]
        same = (found[:, :2] == words[pending]).all(axis=1) & (found[:, 2] == lengths[pending].astype(np.uint64))
        ids[pending[same]] = found[same, 3].astype(np.int64)
        going = ~same & (found[:, 2] != 0)
        pending, slots = pending[going], (slots[going] + np.uint64(1)) & mask
    return ids


def _long_words(tables: MergeTables, flat: Bytes, offsets: Offsets) -> npt.NDArray[np.int64]:
    hashes = hash_bytes(flat, offsets)
    ids = np.full(len(hashes), -1, np.int64)
    mask = np.uint64(len(tables.long_words) - 1)
    pending, slots = np.arange(len(hashes)), hashes & mask
    while len(pending):
        found = tables.long_words[slots]
        going = found != EMPTY
        alike = np.flatnonzero(going & (found >> np.uint64(32) == hashes[pending] >> np.uint64(32)))
        entries = (found[alike] & np.uint64(0xFFFF_FFFF)).astype(np.int64)
        same = _same_bytes(tables, entries, flat, offsets, pending[alike])
        ids[pending[alike[same]]] = tables.long_ids[entries[same]]
        going[alike[same]] = False
        pending, slots = pending[going], (slots[going] + np.uint64(1)) & mask
    return ids


def _same_bytes(
    tables: MergeTables, entries: npt.NDArray[Any], flat: Bytes, offsets: Offsets, rows: npt.NDArray[Any]
) -> npt.NDArray[np.bool_]:
    starts, ends = tables.long_offsets[entries], tables.long_offsets[entries + 1]
    lengths = offsets[rows + 1] - offsets[rows]
    same: npt.NDArray[np.bool_] = ends - starts == lengths
    for number in np.flatnonzero(same):
        start = offsets[rows[number]]
        word = flat[start : start + lengths[number]]
        same[number] = word.tobytes() == tables.long_bytes[starts[number] : ends[number]].tobytes()
    return same
