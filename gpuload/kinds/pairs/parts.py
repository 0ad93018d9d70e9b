"""The parts of a row of preference data: bits of its ids.

A pair is one row of ids: what both sequences begin with, then the rest of the chosen one, then the rest of the rejected
one. Which of them a token belongs to, and whether it is part of a completion, is in bits of its int32 that no id
reaches. So a pair passes through caches, filters and stores as any other row does, and its prompt is stored once.

    prompt  chosen|COMPLETION  rejected|COMPLETION      a pair for DPO
    prompt  completion|COMPLETION                       a row for KTO

The two sequences may share less than a prompt: `CHOSEN` or `REJECTED` without `COMPLETION` is the end of a prompt that
is encoded otherwise in one of them. Pairs for reward models have no prompts, and share as many ids as they can.
"""

from typing import Any

import numpy as np

from gpuload.core.arrays import Array, Ragged, count_in_rows, offsets_of, ranges, stretches

CHOSEN = np.int32(1 << 30)
"""The bit of tokens that only the chosen sequence has."""

REJECTED = np.int32(1 << 29)
"""The bit of tokens that only the rejected sequence has."""

COMPLETION = np.int32(1 << 28)
"""The bit of tokens of a completion."""

_IDS = ~(CHOSEN | REJECTED | COMPLETION)

_PARTS = np.arange(8, dtype=np.int32) << 28
"""All combinations of these bits."""

Ints = np.ndarray[Any, np.dtype[np.int64]]


def with_completion(ids: Ragged, begin: Ints) -> Ragged:
    """Ids with the bit of completions.

    Args:
        ids: n rows, without bits.
        begin: (n,) how many tokens of each row are its prompt.
    """
    completion = stretches(begin, ids.lengths - begin)
    return Ragged(ids.values | completion * COMPLETION, ids.offsets)


def paired(chosen: Ragged, rejected: Ragged, shared: Ints) -> Ragged:
    """Rows with the parts of both sequences.

    Args:
        chosen, rejected: n rows each, with the bit of completions.
        shared: (n,) how many tokens of both are stored once; these are equal.
    """
    own = stretches(shared, chosen.lengths - shared)
    more = rejected.lengths - shared
    rest = rejected.values[stretches(shared, more)]
    first = Ragged(chosen.values | own * CHOSEN, chosen.offsets)
    return appended(first, Ragged(rest | REJECTED, offsets_of(more)))


def appended(rows: Ragged, more: Ragged) -> Ragged:
    """(n,) rows, each followed by the row of the same number of others."""
    offsets = offsets_of(rows.lengths + more.lengths)
    values = np.empty(int(offsets[-1]), np.int32)
    others = stretches(rows.lengths, more.lengths)
    values[~others], values[others] = rows.values, more.values
    return Ragged(values, offsets)


def sequence(rows: Ragged, other: np.int32) -> Ragged:
    """One of the two sequences of each row, with the bit of completions.

    Args:
        rows: n rows with bits.
        other: `CHOSEN` or `REJECTED`: the sequence that is not wanted.
    """
    kept = selected(rows, (rows.values & other) == 0)
    return Ragged(kept.values & (_IDS | COMPLETION), kept.offsets)


def split(ids: Ragged) -> tuple[Ragged, Ragged]:
    """Ids without bits, int32, and which of them are of a completion, bool."""
    return Ragged(ids.values & _IDS, ids.offsets), Ragged((ids.values & COMPLETION) != 0, ids.offsets)


def selected(rows: Ragged, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Ragged:
    """Some ids of each row.

    Args:
        mask: one bool per id.
    """
    return Ragged(rows.values[mask], offsets_of(count_in_rows(mask, rows.offsets)))


def counts(rows: Ragged) -> tuple[Array, Array, Array]:
    """How many ids of each row have `CHOSEN`, `REJECTED` and `COMPLETION`: (n,) each, in the memory of the rows."""
    bits = (CHOSEN, REJECTED, COMPLETION)
    if isinstance(rows.values, np.ndarray):
        sizes = _sizes(rows)
        chosen, rejected, completion = (sizes[:, _PARTS & bit != 0].sum(axis=1) for bit in bits)
    else:
        chosen, rejected, completion = (count_in_rows((rows.values & bit) != 0, rows.offsets) for bit in bits)
    return chosen, rejected, completion


def completion_tokens(rows: Ragged, other: np.int32) -> Array:
    """(n,) int64: how many tokens of a completion one of the two sequences of each row has; in the memory of the rows.

    Args:
        rows: n rows with bits.
        other: `CHOSEN` or `REJECTED`: the sequence that is not wanted; 0 for rows that are not pairs.
    """
    if isinstance(rows.values, np.ndarray):
        wanted = _PARTS & (COMPLETION | other) == COMPLETION
        return _sizes(rows)[:, wanted].sum(axis=1)
    return count_in_rows((rows.values & (COMPLETION | other)) == COMPLETION, rows.offsets)


def _sizes(rows: Ragged) -> np.ndarray[Any, np.dtype[np.int64]]:
    """(n, 8): how many ids of each row have which bits, `_PARTS`.

    Parts are runs of ids, so only where these begin is counted: ids are read once, and not once for each bit.

    Args:
        rows: n rows with bits in host memory.
    """
    part = rows.values >> 28
    begins = np.ones(len(part), bool)
    np.not_equal(part[1:], part[:-1], out=begins[1:])
    begins[rows.offsets[:-1][rows.lengths > 0]] = True
    starts = np.flatnonzero(begins)
    row = np.searchsorted(rows.offsets, starts, side="right") - 1
    lengths = np.diff(starts, append=len(part))
    # Sums of float64 are exact up to 2^53.
    sizes = np.bincount(row * 8 + part[starts], lengths, len(rows) * 8)
    return sizes.astype(np.int64).reshape(-1, 8)


def equal_pairs(rows: Ragged) -> int:
    """The number of pairs whose two sequences are equal.

    Args:
        rows: n pairs.
    """
    chosen, rejected, _ = counts(rows)
    same = np.flatnonzero(chosen == rejected)
    size, end = chosen[same], rows.offsets[1:][same]
    bounds = offsets_of(size)
    one, other = (rows.values[ranges(end - k * size, size, bounds)] & _IDS for k in (2, 1))
    return int((count_in_rows(one != other, bounds) == 0).sum())
