"""BPE over characters that falls back to bytes, without a split regex (Llama-2, Gemma): pieces and tables.

Such a tokenizer merges a whole text at once, a megabyte as one word. But every merge makes a vocabulary entry, so where
no entry that a merge makes has two characters next to each other, no merge ever crosses the boundary between them, and
the text may be cut there without changing any id. From there on all is as with byte-level BPE: whole words by hash,
merges for the rest. A character that is no entry becomes its UTF-8 bytes, which never merge.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuload.tokenizer import merges
from gpuload.tokenizer.merges import Ids, MergeTables, Offsets
from gpuload.tokenizer.spec import BpeSpec, byte_entries
from gpuload.tokenizer.tables import kept

_VERSION = 1  # of the tables' layout
_CODE_POINT_BITS = 21


@dataclass(frozen=True)
class FallbackTables:
    """A vocabulary of characters and its merges.

    Attributes:
        base: pairs and words as with byte-level BPE; the words are UTF-8, `byte_ids` those of the entries `<0x00>` ...
        letter_pages, letter_blocks: code point c → id of its entry, `letter_blocks[letter_pages[c >> 8], c & 255]`,
            -1 where it has none; (4352,) uint16 and (m, 256) int32.
        adjacent: (2^k,) uint64 hash set of first code point << 21 | second, for all that merges bring side by side.
    """

    base: MergeTables
    letter_pages: npt.NDArray[np.uint16]
    letter_blocks: Ids
    adjacent: npt.NDArray[np.uint64]

    @property
    def nbytes(self) -> int:
        own = (self.letter_pages, self.letter_blocks, self.adjacent)
        return self.base.nbytes + sum(int(array.nbytes) for array in own)


def fallback_tables(spec: BpeSpec) -> FallbackTables:
    """The tables of a tokenizer, from the user's cache where they have been built before."""
    names = ("letter_pages", "letter_blocks", "adjacent")

    def build() -> dict[str, Any]:
        tables = build_tables(spec)
        of_base = {field.name: getattr(tables.base, field.name) for field in fields(MergeTables)}
        return of_base | {name: getattr(tables, name) for name in names}

    arrays = kept("fallback", f"{_VERSION} {spec.digest}", build)
    return FallbackTables(
        MergeTables(**{field.name: arrays[field.name] for field in fields(MergeTables)}),
        **{name: arrays[name] for name in names},
    )


def build_tables(spec: BpeSpec) -> FallbackTables:
    """The same, built."""
    pairs, merged = merges.pair_table(spec)
    letters = np.full(0x110000, -1, np.int32)
    for entry, number in spec.vocab.items():
        if len(entry) == 1:
            letters[ord(entry)] = number
    different: dict[bytes, int] = {}
    pages = [different.setdefault(page.tobytes(), len(different)) for page in letters.reshape(-1, 256)]
    blocks = np.frombuffer(b"".join(different), np.int32).reshape(-1, 256)
    byte_ids = np.array([spec.vocab[entry] for entry in byte_entries()], np.int32)
    base = merges.without_words(pairs, merged, byte_ids)
    tables = FallbackTables(base, np.array(pages, np.uint16), blocks, _adjacent(spec))

    entries = [entry for entry in spec.vocab if entry]
    ids = np.fromiter((spec.vocab[entry] for entry in entries), np.int32, len(entries))
    reached, offsets = merge(tables, entries)
    alone = np.flatnonzero(np.diff(offsets) == 1)
    usable = alone[reached[offsets[alone]] == ids[alone]]
    words = [entries[number].encode() for number in usable]
    bounds = np.cumsum([0, *map(len, words)])
    base = merges.with_words(base, np.frombuffer(b"".join(words), np.uint8), bounds, ids[usable])
    return FallbackTables(base, tables.letter_pages, tables.letter_blocks, tables.adjacent)


def _adjacent(spec: BpeSpec) -> npt.NDArray[np.uint64]:
    made = list(dict.fromkeys(left + right for left, right in spec.merges))
    code_points = _code_points("".join(made))
    pairs = code_points[:-1] << _CODE_POINT_BITS | code_points[1:]
    within = np.ones(len(pairs), np.bool_)
    within[np.cumsum([len(entry) for entry in made], dtype=np.int64)[:-1] - 1] = False  # from one entry to the next
    keys = np.unique(pairs[within])
    return merges.fill(keys.astype(np.uint64), merges.hash_pairs(keys))


def pieces(tables: FallbackTables, text: str) -> list[str]:
    """A text, normalized, cut where no merge can cross."""
    if not text:
        return []
    code_points = _code_points(text)
    keys = code_points[:-1] << _CODE_POINT_BITS | code_points[1:]
    cuts = (np.flatnonzero(~_contains(tables.adjacent, keys)) + 1).tolist()
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _contains(table: npt.NDArray[np.uint64], keys: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    wanted = keys.astype(np.uint64)
    inside = np.zeros(len(keys), np.bool_)
    mask = np.uint64(len(table) - 1)
    slots = merges.hash_pairs(keys) & mask
    pending = np.arange(len(keys))
    while len(pending):
        found = table[slots]
        hit = found == wanted[pending]
        inside[pending[hit]] = True
        going = ~hit & (found != merges.EMPTY)
        pending, slots = pending[going], (slots[going] + np.uint64(1)) & mask
    return inside


def merge(tables: FallbackTables, words: Sequence[str]) -> tuple[Ids, Offsets]:
    """As `merges.merge`, of n words that begin as characters, or as bytes where those have no entry."""
    code_points = _code_points("".join(words))
    piece = np.repeat(np.arange(len(words)), np.fromiter(map(len, words), np.int64, len(words)))
    symbols = tables.letter_blocks[tables.letter_pages[code_points >> 8], code_points & 255].astype(np.int64)
    strangers = np.flatnonzero(symbols < 0)
    if len(strangers):
        encoded = [chr(code_point).encode() for code_point in code_points[strangers]]
        widths = np.ones(len(symbols), np.int64)
        widths[strangers] = [len(one) for one in encoded]
        symbols, piece = np.repeat(symbols, widths), np.repeat(piece, widths)
        symbols[symbols < 0] = tables.base.byte_ids[np.frombuffer(b"".join(encoded), np.uint8)]
    return merges.merge_symbols(tables.base, symbols, piece, len(words))


def _code_points(text: str) -> npt.NDArray[np.int64]:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.int64)
