"""Tables for BPE over characters with byte fallback and without a split regex (Llama 2, Gemma).

Such a tokenizer merges a whole text at once; a megabyte of text is one word. But the result of every merge is a
vocabulary entry. So if no entry that a merge produces contains two certain characters next to each other, no merge
crosses a boundary between them, and the text can be cut there without changing any id. `adjacent` is the set of all
pairs of characters that do occur in such entries.

After this cut all is as with byte-level BPE: whole-word look-ups, and merges for the rest. A character without an entry
becomes the entries of its UTF-8 bytes, which never merge.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuload.tokenizer import merges
from gpuload.tokenizer.classes import two_levels
from gpuload.tokenizer.hash_tables import fill, hash_pairs, pair_keys
from gpuload.tokenizer.merges import Ids, MergeTables, Offsets
from gpuload.tokenizer.spec import BpeSpec, byte_entries
from gpuload.tokenizer.tables import cached

_VERSION = 3  # of the tables' layout


@dataclass(frozen=True)
class FallbackTables:
    """A vocabulary of characters and its merges.

    Attributes:
        base: pairs and words as with byte-level BPE; words are UTF-8, and `byte_ids` those of the entries `<0x00>` to
            `<0xFF>`.
        letter_pages: (4352,) uint16.
        letter_blocks: (m, 256) int32. The entry of code point c has the id `letter_blocks[letter_pages[c >> 8], c &
            255]`, -1 if there is none.
        adjacent: (2^k,) uint64, hash set of `pair_keys(first, second)` for all pairs of code points that merges join.
    """

    base: MergeTables
    letter_pages: npt.NDArray[np.uint16]
    letter_blocks: Ids
    adjacent: npt.NDArray[np.uint64]


def fallback_tables(spec: BpeSpec) -> FallbackTables:
    """Return the tables of a tokenizer with byte fallback, from the cache if they have been built before."""

    def build() -> dict[str, Any]:
        tables = build_tables(spec)
        return vars(tables.base) | {name: array for name, array in vars(tables).items() if name != "base"}

    arrays = cached("fallback", f"{_VERSION} {spec.digest}", build)
    base = MergeTables(**{field.name: arrays.pop(field.name) for field in fields(MergeTables)})
    return FallbackTables(base, **arrays)


def build_tables(spec: BpeSpec) -> FallbackTables:
    """Build the tables of a tokenizer with byte fallback."""
    pairs, merged = merges.pair_table(spec)
    letters = np.full(0x110000, -1, np.int32)
    for entry, number in spec.vocab.items():
        if len(entry) == 1:
            letters[ord(entry)] = number
    pages, blocks = two_levels(letters)
    byte_ids = np.array([spec.vocab[entry] for entry in byte_entries()], np.int32)
    base = merges.without_words(pairs, merged, byte_ids)
    tables = FallbackTables(base, pages, blocks, _adjacent(spec))

    entries = [entry for entry in spec.vocab if entry]
    ids = np.fromiter((spec.vocab[entry] for entry in entries), np.int32, len(entries))
    reachable = merges.reachable_entries(*merge(tables, entries), ids)
    words = [entries[number].encode() for number in reachable]
    bounds = np.cumsum([0, *map(len, words)])
    base = merges.with_words(base, np.frombuffer(b"".join(words), np.uint8), bounds, ids[reachable])
    return FallbackTables(base, tables.letter_pages, tables.letter_blocks, tables.adjacent)


def _adjacent(spec: BpeSpec) -> npt.NDArray[np.uint64]:
    """The hash set of all pairs of neighbouring characters in the results of merges."""
    made = list(dict.fromkeys(left + right for left, right in spec.merges))
    points = code_points("".join(made))
    pairs = pair_keys(points[:-1], points[1:])
    within = np.ones(len(pairs), np.bool_)
    # The entries were joined into one string: drop the pair across each border of two of them.
    within[np.cumsum([len(entry) for entry in made], dtype=np.int64)[:-1] - 1] = False
    assert spec.fallback
    if spec.fallback.split:  # a pre-token begins at every space, so no merge joins one to what is before it
        within &= points[1:] != ord(spec.fallback.space)
    keys = np.unique(pairs[within])
    return fill(keys.astype(np.uint64), hash_pairs(keys))


def merge(tables: FallbackTables, words: Sequence[str]) -> tuple[Ids, Offsets]:
    """Apply byte-pair merging to n words, as `merges.merge` does.

    A word begins as the ids of its characters; a character without an entry, as the ids of its bytes.
    """
    points = code_points("".join(words))
    row = np.repeat(np.arange(len(words)), np.fromiter(map(len, words), np.int64, len(words)))
    symbols = tables.letter_blocks[tables.letter_pages[points >> 8], points & 255].astype(np.int64)
    unknown = np.flatnonzero(symbols < 0)
    if len(unknown):
        encoded = [chr(point).encode() for point in points[unknown]]
        widths = np.ones(len(symbols), np.int64)
        widths[unknown] = [len(character) for character in encoded]
        symbols, row = np.repeat(symbols, widths), np.repeat(row, widths)
        symbols[symbols < 0] = tables.base.byte_ids[np.frombuffer(b"".join(encoded), np.uint8)]
    return merges.merge_symbols(tables.base, symbols, row, len(words))


def code_points(text: str) -> npt.NDArray[np.int64]:
    """Return the (n,) code points of a text."""
    return np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.int64)
