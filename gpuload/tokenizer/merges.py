"""Vocabulary and merges as flat arrays, for look-up in constant time on a device.

Two hash tables with open addressing and linear probing, sizes powers of two, at most half full:
- pair of ids → rank. A slot is one 64-bit word: left id (21 bits), right id (21 bits), rank (20 bits); a look-up is one
  load where nothing collides. What the pair becomes is `merged[rank]`.
- bytes of a piece → vocabulary entry. A slot is a 32-bit tag of the hash and the entry's number; bytes are compared.

Only entries that merging really reaches are in the second table (the others are added tokens that stand in the
vocabulary too, and what a trainer left behind), unless the model takes any entry. They are found by merging every entry
once.

`merge` merges many pieces at once, round by round, and is the definition that kernels are tested against.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuload.tokenizer.spec import BpeSpec, byte_letters
from gpuload.tokenizer.tables import kept

_VERSION = 1  # of the tables' layout and hashes
EMPTY = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
NO_RANK = 1 << 20  # above every rank
_ID_BITS, _RANK_BITS = 21, 20
# Odd constants for multiplicative hashing: the golden ratio's fraction and one of splitmix64's (Steele et al., 2014).
_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)
_MIX = np.uint64(0xBF58_476D_1CE4_E5B9)
_BYTE_STEP = np.uint64(0x100_0000_01B3)  # FNV's prime

Ids = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MergeTables:
    """A vocabulary and its merges.

    Attributes:
        pairs: (2^k,) uint64, pair → rank.
        merged: (merges,) int32, rank → id.
        byte_ids: (256,) int32, the id of each byte alone; -1 for a byte that has none and is dropped.
        words: (2^j,) uint64, tag and number of an entry.
        word_bytes, word_offsets: the entries' bytes, (entries + 1,) int32 offsets.
        word_ids: (entries,) int32.
    """

    pairs: npt.NDArray[np.uint64]
    merged: Ids
    byte_ids: Ids
    words: npt.NDArray[np.uint64]
    word_bytes: Bytes
    word_offsets: Ids
    word_ids: Ids

    @property
    def nbytes(self) -> int:
        return sum(int(getattr(self, field.name).nbytes) for field in fields(self))


def merge_tables(spec: BpeSpec) -> MergeTables:
    """The tables of a tokenizer, from the user's cache where they have been built before."""

    def build() -> dict[str, Any]:
        tables = build_tables(spec)
        return {field.name: getattr(tables, field.name) for field in fields(tables)}

    return MergeTables(**kept("merges", f"{_VERSION} {spec.digest}", build))


def build_tables(spec: BpeSpec) -> MergeTables:
    """The same, built."""
    flat, offsets, ids = _entries(spec)
    lengths = np.diff(offsets)
    byte_ids = np.full(256, -1, np.int32)
    single = lengths == 1
    byte_ids[flat[offsets[:-1][single]]] = ids[single]
    tables = without_words(*pair_table(spec), byte_ids)
    if not spec.ignore_merges:
        reached, reached_offsets = merge(tables, flat, offsets)
        alone = np.flatnonzero(np.diff(reached_offsets) == 1)
        usable = alone[reached[reached_offsets[alone]] == ids[alone]]
        flat, offsets, ids = _take(flat, offsets, usable), _offsets(lengths[usable]), ids[usable]
    return with_words(tables, flat, offsets, ids)


def without_words(pairs: npt.NDArray[np.uint64], merged: Ids, byte_ids: Ids) -> MergeTables:
    """Tables to find out with which words are in reach."""
    none, nothing = np.zeros(0, np.int32), np.zeros(0, np.uint8)
    return MergeTables(pairs, merged, byte_ids, np.full(1, EMPTY), nothing, np.zeros(1, np.int32), none)


def with_words(tables: MergeTables, flat: Bytes, offsets: Offsets, ids: Ids) -> MergeTables:
    """The same tables with words: their bytes, (n + 1,) offsets and (n,) ids."""
    words = _word_table(flat, offsets)
    return replace(tables, words=words, word_bytes=flat, word_offsets=offsets.astype(np.int32), word_ids=ids)


def _entries(spec: BpeSpec) -> tuple[Bytes, Offsets, Ids]:
    """The vocabulary as bytes. Entries with letters outside ByteLevel's alphabet can come from no text: left out."""
    entries = [entry for entry in spec.vocab if entry]
    letters = np.frombuffer("".join(entries).encode("utf-32-le", "surrogatepass"), np.uint32)
    lengths = np.fromiter(map(len, entries), np.int64, len(entries))
    alphabet = np.full(0x110000, -1, np.int16)
    alphabet[[ord(letter) for letter in byte_letters()]] = np.arange(256)
    flat = alphabet[letters]
    offsets = _offsets(lengths)
    foreign = np.zeros(len(flat) + 1, np.int64)
    np.cumsum(flat < 0, out=foreign[1:])
    kept_entries = np.flatnonzero(foreign[offsets[1:]] == foreign[offsets[:-1]])
    ids = np.fromiter((spec.vocab[entry] for entry in entries), np.int32, len(entries))
    return (
        _take(flat, offsets, kept_entries).astype(np.uint8),
        _offsets(lengths[kept_entries]),
        ids[kept_entries],
    )


def pair_table(spec: BpeSpec) -> tuple[npt.NDArray[np.uint64], Ids]:
    count = len(spec.merges)
    left = np.fromiter((spec.vocab[a] for a, _ in spec.merges), np.int64, count)
    right = np.fromiter((spec.vocab[b] for _, b in spec.merges), np.int64, count)
    merged = np.fromiter((spec.vocab[a + b] for a, b in spec.merges), np.int32, count)
    rank = np.arange(count, dtype=np.int64)
    keys = left << _ID_BITS | right
    # A pair that is listed twice has the rank of its last place, as in `tokenizers`.
    _, from_end = np.unique(keys[::-1], return_index=True)
    once = np.sort(count - 1 - from_end)
    slots = (keys[once] << _RANK_BITS | rank[once]).astype(np.uint64)
    return fill(slots, hash_pairs(keys[once])), merged


def hash_pairs(keys: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """(n,) left id << 21 | right id → (n,) hashes; a slot is the hash's low bits."""
    mixed = keys.astype(np.uint64) * _GOLDEN
    return (mixed ^ (mixed >> np.uint64(32))) * _MIX >> np.uint64(32)


def look_up_pairs(tables: MergeTables, left: npt.NDArray[Any], right: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """(n,) ranks of (n,) pairs of ids, NO_RANK where they do not merge."""
    keys = left.astype(np.int64) << _ID_BITS | right
    ranks = np.full(len(keys), NO_RANK, np.int64)
    mask = np.uint64(len(tables.pairs) - 1)
    slots = hash_pairs(keys) & mask
    pending = np.arange(len(keys))
    while len(pending):
        found = tables.pairs[slots]
        hit = found >> np.uint64(_RANK_BITS) == keys[pending].astype(np.uint64)
        ranks[pending[hit]] = (found[hit] & np.uint64(NO_RANK - 1)).astype(np.int64)
        going = ~hit & (found != EMPTY)
        pending, slots = pending[going], (slots[going] + np.uint64(1)) & mask
    return ranks


def hash_bytes(flat: Bytes, offsets: Offsets) -> npt.NDArray[np.uint64]:
    """(n,) hashes of n pieces: FNV-1a over the bytes, 64 bits, mixed once more so that both ends are good."""
    lengths = np.diff(offsets)
    by_length = np.argsort(-lengths, kind="stable")
    going = np.searchsorted(-lengths[by_length], -np.arange(1, int(lengths.max(initial=0)) + 1), side="right")
    hashes = np.full(len(lengths), 0xCBF2_9CE4_8422_2325, np.uint64)
    for place, count in enumerate(going):
        rows = by_length[:count]
        hashes[rows] = (hashes[rows] ^ flat[offsets[rows] + place]) * _BYTE_STEP
    mixed = (hashes ^ (hashes >> np.uint64(32))) * _MIX
    return mixed ^ (mixed >> np.uint64(29))


def _word_table(flat: Bytes, offsets: Offsets) -> npt.NDArray[np.uint64]:
    hashes = hash_bytes(flat, offsets)
    number = np.arange(len(hashes), dtype=np.uint64)
    return fill((hashes >> np.uint64(32) << np.uint64(32)) | number, hashes)


def look_up_words(tables: MergeTables, flat: Bytes, offsets: Offsets) -> npt.NDArray[np.int64]:
    """(n,) ids of n pieces, -1 where a piece is no entry that may be used. Bytes decide, not hashes."""
    hashes = hash_bytes(flat, offsets)
    lengths = np.diff(offsets)
    ids = np.full(len(hashes), -1, np.int64)
    mask = np.uint64(len(tables.words) - 1)
    slots = hashes & mask
    pending = np.flatnonzero(lengths)
    slots = slots[pending]
    while len(pending):
        found = tables.words[slots]
        going = found != EMPTY
        alike = np.flatnonzero(going & (found >> np.uint64(32) == hashes[pending] >> np.uint64(32)))
        entries = (found[alike] & np.uint64(0xFFFF_FFFF)).astype(np.int64)
        same = _same_bytes(tables, entries, flat, offsets, pending[alike])
        ids[pending[alike[same]]] = tables.word_ids[entries[same]]
        going[alike[same]] = False
        pending, slots = pending[going], (slots[going] + np.uint64(1)) & mask
    return ids


def _same_bytes(
    tables: MergeTables, entries: npt.NDArray[Any], flat: Bytes, offsets: Offsets, rows: npt.NDArray[Any]
) -> npt.NDArray[np.bool_]:
    starts, ends = tables.word_offsets[entries], tables.word_offsets[entries + 1]
    lengths = offsets[rows + 1] - offsets[rows]
    same: npt.NDArray[np.bool_] = ends - starts == lengths
    for number in np.flatnonzero(same):
        start = offsets[rows[number]]
        ours = flat[start : start + lengths[number]]
        same[number] = ours.tobytes() == tables.word_bytes[starts[number] : ends[number]].tobytes()
    return same


def fill(values: npt.NDArray[np.uint64], hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A table of `values` at their hashes' slots, the next free one where that is taken; all keys are different."""
    table = np.full(1 << max(1, (2 * len(values) - 1).bit_length()), EMPTY, np.uint64)
    mask = np.uint64(len(table) - 1)
    slots = hashes & mask
    while len(values):
        free = np.flatnonzero(table[slots] == EMPTY)
        taken, first = np.unique(slots[free], return_index=True)  # the first of those that want the same slot
        table[taken] = values[free[first]]
        left = np.ones(len(values), np.bool_)
        left[free[first]] = False
        values, slots = values[left], (slots[left] + np.uint64(1)) & mask
    return table


def merge(tables: MergeTables, flat: Bytes, offsets: Offsets) -> tuple[Ids, Offsets]:
    """Byte-pair merging of n pieces: in each, the pair of lowest rank, the leftmost of equals, until none is left.

    All pieces at once: each round makes one merge in every piece that still has one.

    Args:
        flat, offsets: the pieces' bytes, and (n + 1,) where they begin.

    Returns:
        ids and (n + 1,) offsets.
    """
    symbols = tables.byte_ids[flat].astype(np.int64)
    piece = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return merge_symbols(tables, symbols[symbols >= 0], piece[symbols >= 0], len(offsets) - 1)


def merge_symbols(
    tables: MergeTables, symbols: npt.NDArray[Any], piece: npt.NDArray[Any], count: int
) -> tuple[Ids, Offsets]:
    """The same for pieces given as (m,) ids to begin with and (m,) ascending numbers of their pieces, of `count`."""
    done: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
    ranks = _ranks(tables, symbols, piece)
    while len(symbols):
        starts = np.flatnonzero(np.diff(piece, prepend=-1))
        lengths = np.diff(starts, append=len(piece))
        # A rank and its place in one number: the lowest is the leftmost of the lowest rank.
        best = np.minimum.reduceat(ranks << 32 | np.arange(len(ranks)), starts)
        goes_on = best >> 32 < NO_RANK
        if not goes_on.all():
            stay = np.repeat(goes_on, lengths)
            done.append((symbols[~stay], piece[~stay]))
            shift = np.cumsum(~stay)
            places = (best & 0xFFFF_FFFF)[goes_on]
            places -= shift[places]
            best_ranks = (best >> 32)[goes_on]
            symbols, piece, ranks = symbols[stay], piece[stay], ranks[stay]
        else:
            places, best_ranks = best & 0xFFFF_FFFF, best >> 32
        symbols[places] = tables.merged[best_ranks]
        left = np.ones(len(symbols), np.bool_)
        left[places + 1] = False
        symbols, piece, ranks = symbols[left], piece[left], ranks[left]
        places -= np.arange(len(places))  # one symbol fewer in each piece before
        touched = np.concatenate([places, places[places > 0] - 1])
        ranks[touched] = _ranks_at(tables, symbols, piece, touched)
    if not done:
        return np.zeros(0, np.int32), np.zeros(count + 1, np.int64)
    symbols, piece = (np.concatenate(parts) for parts in zip(*done, strict=True))
    order = np.argsort(piece, kind="stable")
    return symbols[order].astype(np.int32), _offsets(np.bincount(piece, minlength=count))


def _ranks(tables: MergeTables, symbols: npt.NDArray[Any], piece: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return _ranks_at(tables, symbols, piece, np.arange(len(symbols)))


def _ranks_at(
    tables: MergeTables, symbols: npt.NDArray[Any], piece: npt.NDArray[Any], places: npt.NDArray[Any]
) -> npt.NDArray[np.int64]:
    """The rank of the pair that begins at each place, NO_RANK at a piece's last symbol."""
    following = np.minimum(places + 1, len(symbols) - 1)
    ranks = look_up_pairs(tables, symbols[places], symbols[following])
    ranks[(following == places) | (piece[following] != piece[places])] = NO_RANK
    return ranks


def _offsets(lengths: npt.NDArray[Any]) -> Offsets:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _take(flat: npt.NDArray[Any], offsets: Offsets, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The values of some rows, one after the other."""
    lengths = offsets[rows + 1] - offsets[rows]
    starts = _offsets(lengths)
    taken: npt.NDArray[Any] = flat[np.arange(starts[-1]) + np.repeat(offsets[rows] - starts[:-1], lengths)]
    return taken
