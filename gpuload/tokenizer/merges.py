"""Vocabulary and merges of a byte-level BPE tokenizer as flat arrays, with look-ups in constant time.

Three hash tables (see `hash_tables.py`):

- pair of ids → rank. A slot is one 64-bit word: left id (21 bits), right id (21 bits), rank (20 bits). The id that the
  pair becomes is `merged[rank]`.
- bytes of a pre-token of at most 16 bytes → id, for whole-word look-ups. A slot is four 64-bit words: 16 bytes, padded
  with zeros; their number, 0 in an empty slot; and the id. These are the 32 bytes that a GPU reads at once from memory,
  so most look-ups are one read. Ids are about in the order of frequency, and entries are stored in the order of their
  ids, so the most frequent words have the slots of their hashes.
- bytes of a longer pre-token → vocabulary entry. A slot is 32 bits of the hash and the entry's number.

A whole-word look-up must give the same id as merging. So these tables contain only entries that merging their own bytes
really produces, which is tested once for every entry when the tables are built. Others are added tokens that are also
in the vocabulary, and entries that the trainer left behind. With `ignore_merges` all entries are in the tables.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gpuload.core.arrays import Ragged, offsets_of
from gpuload.tokenizer.hash_tables import (
    EMPTY,
    SHORT,
    fill,
    hash_bytes,
    hash_pairs,
    hash_words,
    padded_words,
    pair_keys,
)
from gpuload.tokenizer.spec import BpeSpec, byte_letters
from gpuload.tokenizer.tables import cached

_VERSION = 3  # of the layout and the hash functions: change it with them
_RANK_BITS = 20
NO_RANK = 1 << _RANK_BITS  # for pairs that do not merge; higher than every rank

Ids = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MergeTables:
    """A vocabulary and its merges."""

    pairs: npt.NDArray[np.uint64]  # (2^k,) uint64, hash table pair → rank
    merged: Ids  # (merges,) int32, rank → id
    byte_ids: Ids  # (256,) int32, the id of each single byte; -1 for a byte without an entry, which is dropped
    words: npt.NDArray[np.uint64]  # (2^j, 4) uint64, hash table bytes → id of entries of at most 16 bytes
    long_words: npt.NDArray[np.uint64]  # (2^i,) uint64, hash table bytes → number of a longer entry
    long_bytes: Bytes  # uint8, the longer entries' bytes, end to end
    long_offsets: Ids  # (entries + 1,) int32, where each longer entry begins in `long_bytes`
    long_ids: Ids  # (entries,) int32


def merge_tables(spec: BpeSpec) -> MergeTables:
    """Return the tables of a byte-level tokenizer, from the cache if they have been built before."""
    return MergeTables(**cached("merges", f"{_VERSION} {spec.digest}", lambda: vars(build_tables(spec))))


def build_tables(spec: BpeSpec) -> MergeTables:
    """Build the tables of a byte-level tokenizer."""
    flat, offsets, ids = _entries(spec)
    lengths = np.diff(offsets)
    byte_ids = np.full(256, -1, np.int32)
    single = lengths == 1
    byte_ids[flat[offsets[:-1][single]]] = ids[single]
    tables = without_words(*pair_table(spec), byte_ids)
    if not spec.ignore_merges:
        reachable = reachable_entries(*merge(tables, flat, offsets), ids)
        taken = Ragged(flat, offsets).take(reachable)
        flat, offsets, ids = taken.values, taken.offsets, ids[reachable]
    return with_words(tables, flat, offsets, ids)


def reachable_entries(merged: Ids, offsets: Offsets, ids: Ids) -> npt.NDArray[np.int64]:
    """Return the numbers of the entries that merging produces.

    Args:
        merged, offsets: what merging made of each entry's text.
        ids: (n,) the entries' own ids.
    """
    alone = np.flatnonzero(np.diff(offsets) == 1)
    reachable: npt.NDArray[np.int64] = alone[merged[offsets[alone]] == ids[alone]]
    return reachable


def without_words(pairs: npt.NDArray[np.uint64], merged: Ids, byte_ids: Ids) -> MergeTables:
    """Return tables with no words, enough to merge with."""
    none, nothing = np.zeros(0, np.int32), np.zeros(0, np.uint8)
    words, long_words = np.zeros((1, 4), np.uint64), np.full(1, EMPTY)
    return MergeTables(pairs, merged, byte_ids, words, long_words, nothing, np.zeros(1, np.int32), none)


def with_words(tables: MergeTables, flat: Bytes, offsets: Offsets, ids: Ids) -> MergeTables:
    """Return the tables with words added.

    Args:
        tables: without words.
        flat, offsets: the words' bytes end to end, and (n + 1,) where each begins.
        ids: (n,) their ids.
    """
    long = np.flatnonzero(np.diff(offsets) > SHORT)
    entries = Ragged(flat, offsets).take(long)
    hashes = hash_bytes(entries.values, entries.offsets)
    number = np.arange(len(hashes), dtype=np.uint64)
    tag = hashes >> np.uint64(32) << np.uint64(32)  # the half of the hash that does not select the slot
    return replace(
        tables,
        words=_short_words(flat, offsets, ids),
        long_words=fill(tag | number, hashes),
        long_bytes=entries.values,
        long_offsets=entries.offsets.astype(np.int32),
        long_ids=ids[long],
    )


def _short_words(flat: Bytes, offsets: Offsets, ids: Ids) -> npt.NDArray[np.uint64]:
    """Build the hash table of all words of at most `SHORT` bytes."""
    lengths = np.diff(offsets)
    short = np.flatnonzero(lengths <= SHORT)
    short = short[np.argsort(ids[short], kind="stable")]
    entries = Ragged(flat, offsets).take(short)
    keys = padded_words(entries.values, entries.offsets)
    number = fill(np.arange(len(short), dtype=np.uint64), hash_words(keys))  # of the word in each slot
    used = np.flatnonzero(number != EMPTY)
    which = number[used].astype(np.int64)
    words = np.zeros((len(number), 4), np.uint64)
    words[used, :2], words[used, 2], words[used, 3] = keys[which], lengths[short][which], ids[short][which]
    return words


def _entries(spec: BpeSpec) -> tuple[Bytes, Offsets, Ids]:
    """The vocabulary as bytes, offsets and ids, without entries that contain letters outside ByteLevel's alphabet.

    ByteLevel never produces such letters, so no text can become one of these entries.
    """
    entries = [entry for entry in spec.vocab if entry]
    letters = np.frombuffer("".join(entries).encode("utf-32-le", "surrogatepass"), np.uint32)
    lengths = np.fromiter(map(len, entries), np.int64, len(entries))
    alphabet = np.full(0x110000, -1, np.int16)
    alphabet[[ord(letter) for letter in byte_letters()]] = np.arange(256)
    flat = alphabet[letters]
    offsets = offsets_of(lengths)
    # foreign[i]: number of foreign letters before letter i. An entry has none if it is equal at its start and end.
    foreign = np.zeros(len(flat) + 1, np.int64)
    np.cumsum(flat < 0, out=foreign[1:])
    usable = np.flatnonzero(foreign[offsets[1:]] == foreign[offsets[:-1]])
    ids = np.fromiter((spec.vocab[entry] for entry in entries), np.int32, len(entries))
    taken = Ragged(flat, offsets).take(usable)
    return taken.values.astype(np.uint8), taken.offsets, ids[usable]


def pair_table(spec: BpeSpec) -> tuple[npt.NDArray[np.uint64], Ids]:
    """Build the hash table of all merges.

    Returns:
        The table pair → rank, and (merges,) int32 rank → id.
    """
    count = len(spec.merges)
    left = np.fromiter((spec.vocab[a] for a, _ in spec.merges), np.int64, count)
    right = np.fromiter((spec.vocab[b] for _, b in spec.merges), np.int64, count)
    merged = np.fromiter((spec.vocab[a + b] for a, b in spec.merges), np.int32, count)
    rank = np.arange(count, dtype=np.int64)
    keys = pair_keys(left, right)
    # If a pair is listed twice, its last position is its rank, as in `tokenizers`.
    _, from_end = np.unique(keys[::-1], return_index=True)
    last = np.sort(count - 1 - from_end)
    slots = (keys[last] << _RANK_BITS | rank[last]).astype(np.uint64)
    return fill(slots, hash_pairs(keys[last])), merged


def look_up_pairs(tables: MergeTables, left: npt.NDArray[Any], right: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return (n,) ranks of (n,) pairs of ids, `NO_RANK` for pairs that do not merge."""
    keys = pair_keys(left, right)
    ranks = np.full(len(keys), NO_RANK, np.int64)
    mask = np.uint64(len(tables.pairs) - 1)
    slots = hash_pairs(keys) & mask
    pending = np.arange(len(keys))
    while len(pending):  # one probe of every pending pair per round
        found = tables.pairs[slots]
        hit = found >> np.uint64(_RANK_BITS) == keys[pending].astype(np.uint64)
        ranks[pending[hit]] = (found[hit] & np.uint64(NO_RANK - 1)).astype(np.int64)
        going = ~hit & (found != EMPTY)
        pending, slots = pending[going], (slots[going] + np.uint64(1)) & mask
    return ranks


def merge(tables: MergeTables, flat: Bytes, offsets: Offsets) -> tuple[Ids, Offsets]:
    """Apply byte-pair merging to n pre-tokens.

    In each pre-token, the pair of lowest rank is merged, the leftmost of equal ones, until no pair merges.

    Args:
        flat, offsets: the pre-tokens' bytes end to end, and (n + 1,) where each begins.

    Returns:
        The ids of all pre-tokens end to end, and (n + 1,) where each begins.
    """
    symbols = tables.byte_ids[flat].astype(np.int64)
    row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return merge_symbols(tables, symbols[symbols >= 0], row[symbols >= 0], len(offsets) - 1)


def merge_symbols(
    tables: MergeTables, symbols: npt.NDArray[Any], row: npt.NDArray[Any], count: int
) -> tuple[Ids, Offsets]:
    """Apply byte-pair merging to pre-tokens that are given as ids.

    Vectorized over the pre-tokens: each round makes one merge in every pre-token that still has a pair to merge.

    Args:
        symbols: (m,) the ids of all pre-tokens before the first merge, end to end.
        row: (m,) the number of the pre-token that each id belongs to, ascending.
        count: number of pre-tokens.

    Returns:
        As `merge`.
    """
    done: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
    ranks = _ranks_at(tables, symbols, row, np.arange(len(symbols)))  # of the pair that begins at each symbol
    while len(symbols):
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        lengths = np.diff(starts, append=len(row))
        # Rank and position in one number: its minimum is the leftmost pair of the lowest rank.
        best = np.minimum.reduceat(ranks << 32 | np.arange(len(ranks)), starts)
        goes_on = best >> 32 < NO_RANK
        if not goes_on.all():  # set finished pre-tokens aside
            stay = np.repeat(goes_on, lengths)
            done.append((symbols[~stay], row[~stay]))
            removed = np.cumsum(~stay)
            places = (best & 0xFFFF_FFFF)[goes_on]
            places -= removed[places]
            best_ranks = (best >> 32)[goes_on]
            symbols, row, ranks = symbols[stay], row[stay], ranks[stay]
        else:
            places, best_ranks = best & 0xFFFF_FFFF, best >> 32
        symbols[places] = tables.merged[best_ranks]
        remaining = np.ones(len(symbols), np.bool_)
        remaining[places + 1] = False
        symbols, row, ranks = symbols[remaining], row[remaining], ranks[remaining]
        places -= np.arange(len(places))  # every pre-token before has lost one symbol
        # Only the ranks of the merged symbol and of the one before it change.
        touched = np.concatenate([places, places[places > 0] - 1])
        ranks[touched] = _ranks_at(tables, symbols, row, touched)
    if not done:
        return np.zeros(0, np.int32), np.zeros(count + 1, np.int64)
    symbols, row = (np.concatenate(parts) for parts in zip(*done, strict=True))
    order = np.argsort(row, kind="stable")
    return symbols[order].astype(np.int32), offsets_of(np.bincount(row, minlength=count))


def _ranks_at(
    tables: MergeTables, symbols: npt.NDArray[Any], row: npt.NDArray[Any], places: npt.NDArray[Any]
) -> npt.NDArray[np.int64]:
    """The rank of the pair that begins at each of `places`; NO_RANK at a pre-token's last symbol."""
    following = np.minimum(places + 1, len(symbols) - 1)
    ranks = look_up_pairs(tables, symbols[places], symbols[following])
    ranks[(following == places) | (row[following] != row[places])] = NO_RANK
    return ranks
