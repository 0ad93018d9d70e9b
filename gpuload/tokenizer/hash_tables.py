"""Hash tables as NumPy arrays, which kernels can probe.

A table is a uint64 array of 2^k slots, at most half full, with open addressing and linear probing: a key whose slot is
taken is stored in the next free one, and a look-up ends at the key or at an empty slot. Keys have the same hash here
and in the kernels (`common.cuh`, `words.cu`):

- pairs of 21-bit numbers (token ids or code points), stored in the slot itself, so that a look-up without a collision
  is one load;
- byte strings of at most `SHORT` bytes, padded to two 64-bit words;
- byte strings of any length. A slot holds 32 bits of the hash and the number of an entry, whose bytes are compared.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

EMPTY = np.uint64(0xFFFF_FFFF_FFFF_FFFF)
SHORT = 16  # bytes of a string that is hashed as two words
PAIR_BITS = 21  # of each number of a pair: enough for ids below 2^21 and for code points
# Odd constants for multiplicative hashing: the golden ratio's fraction and one of splitmix64's (Steele et al., 2014).
_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)
_MIX = np.uint64(0xBF58_476D_1CE4_E5B9)
_FNV_BASIS, _FNV_PRIME = 0xCBF2_9CE4_8422_2325, np.uint64(0x100_0000_01B3)


def fill(values: npt.NDArray[np.uint64], hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Build a hash table.

    Args:
        values: (n,) the slots' contents; no two have the same key.
        hashes: (n,) their hashes; the low bits are the slot's number. Of values with the same slot, the first one in
            this order is stored there.

    Returns:
        (2^k,) uint64 with 2^k >= 2n; free slots are `EMPTY`.
    """
    table = np.full(1 << max(1, (2 * len(values) - 1).bit_length()), EMPTY, np.uint64)
    mask = np.uint64(len(table) - 1)
    slots = hashes & mask
    # Each round stores one value in every free slot that is wanted. The others move on to the next slot.
    while len(values):
        free = np.flatnonzero(table[slots] == EMPTY)
        taken, first = np.unique(slots[free], return_index=True)
        table[taken] = values[free[first]]
        waiting = np.ones(len(values), np.bool_)
        waiting[free[first]] = False
        values, slots = values[waiting], (slots[waiting] + np.uint64(1)) & mask
    return table


def pair_keys(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return (n,) keys of (n,) pairs of numbers below 2^21."""
    keys: npt.NDArray[np.int64] = left.astype(np.int64) << PAIR_BITS | right
    return keys


def hash_pairs(keys: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return (n,) hashes of (n,) `pair_keys`."""
    mixed = keys.astype(np.uint64) * _GOLDEN
    return (mixed ^ (mixed >> np.uint64(32))) * _MIX >> np.uint64(32)


def padded_words(flat: npt.NDArray[np.uint8], offsets: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return (n, 2) little-endian words: n byte strings of at most `SHORT` bytes, padded with zeros.

    Args:
        flat: the bytes of all strings, end to end.
        offsets: (n + 1,) string i is flat[offsets[i] : offsets[i + 1]].
    """
    lengths = np.diff(offsets)
    padded = np.zeros((len(lengths), SHORT), np.uint8)
    padded[np.arange(SHORT) < lengths[:, None]] = flat
    return padded.view("<u8").astype(np.uint64, copy=False)


def hash_words(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return (n,) hashes of (n, 2) `padded_words`."""
    return hash_pairs(words[:, 0] ^ (words[:, 1] * _MIX))


def hash_bytes(flat: npt.NDArray[np.uint8], offsets: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Return (n,) hashes of n byte strings: 64-bit FNV-1a, mixed so that both the high and the low bits are usable.

    Args:
        flat: the bytes of all strings, end to end.
        offsets: (n + 1,) string i is flat[offsets[i] : offsets[i + 1]].
    """
    lengths = np.diff(offsets)
    # Vectorized over the strings, one byte position per round: `longer[k]` strings have a byte k. They are the first
    # ones in order of descending length.
    by_length = np.argsort(-lengths, kind="stable")
    longer = np.searchsorted(-lengths[by_length], -np.arange(1, int(lengths.max(initial=0)) + 1), side="right")
    hashes = np.full(len(lengths), _FNV_BASIS, np.uint64)
    for position, count in enumerate(longer):
        rows = by_length[:count]
        hashes[rows] = (hashes[rows] ^ flat[offsets[rows] + position]) * _FNV_PRIME
    mixed = (hashes ^ (hashes >> np.uint64(32))) * _MIX
    return mixed ^ (mixed >> np.uint64(29))
