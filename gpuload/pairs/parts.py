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

from gpuload.arrays import Array, Ragged, count_in_rows, offsets_of, ranges

CHOSEN = np.int32(1 << 30)
"""The bit of tokens that only the chosen sequence has."""

REJECTED = np.int32(1 << 29)
"""The bit of tokens that only the rejected sequence has."""

COMPLETION = np.int32(1 << 28)
"""The bit of tokens of a completion."""

_IDS = ~(CHOSEN | REJECTED | COMPLETION)

Ints = np.ndarray[Any, np.dtype[np.int64]]


def with_completion(ids: Ragged, begin: Ints) -> Ragged:
    """Ids with the bit of completions.

    Args:
        ids: n rows, without bits.
        begin: (n,) how many tokens of each row are its prompt.
    """
    completion = ids.positions >= np.repeat(begin, ids.lengths)
    return Ragged(np.where(completion, ids.values | COMPLETION, ids.values), ids.offsets)


def paired(chosen: Ragged, rejected: Ragged, shared: Ints) -> Ragged:
    """Rows with the parts of both sequences.

    Args:
        chosen, rejected: n rows each, with the bit of completions.
        shared: (n,) how many tokens of both are stored once; these are equal.
    """
    own = chosen.positions >= np.repeat(shared, chosen.lengths)
    rest = selected(rejected, rejected.positions >= np.repeat(shared, rejected.lengths))
    first = Ragged(np.where(own, chosen.values | CHOSEN, chosen.values), chosen.offsets)
    return appended(first, Ragged(rest.values | REJECTED, rest.offsets))


def appended(rows: Ragged, more: Ragged) -> Ragged:
    """(n,) rows, each followed by the row of the same number of others."""
    offsets = offsets_of(rows.lengths + more.lengths)
    values = np.empty(int(offsets[-1]), np.int32)
    place = ranges(offsets[:-1], rows.lengths, rows.offsets)
    others = np.ones(len(values), bool)  # the other places, in the order of rows
    others[place] = False
    values[place], values[others] = rows.values, more.values
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
    masks = ((rows.values & bit) != 0 for bit in (CHOSEN, REJECTED, COMPLETION))
    chosen, rejected, completion = (count_in_rows(mask, rows.offsets) for mask in masks)
    return chosen, rejected, completion


def completion_tokens(rows: Ragged, other: np.int32) -> Array:
    """(n,) int64: how many tokens of a completion one of the two sequences of each row has; in the memory of the rows.

    Args:
        rows: n rows with bits.
        other: `CHOSEN` or `REJECTED`: the sequence that is not wanted; 0 for rows that are not pairs.
    """
    return count_in_rows((rows.values & (COMPLETION | other)) == COMPLETION, rows.offsets)


def equal_pairs(rows: Ragged) -> int:
    """The number of pairs whose two sequences are equal.

    Args:
        rows: n pairs.
    """
    chosen, rejected = (selected(rows, (rows.values & bit) != 0) for bit in (CHOSEN, REJECTED))
    same = np.flatnonzero(chosen.lengths == rejected.lengths)
    one, other = chosen.take(same), rejected.take(same)
    differ = selected(one, (one.values & _IDS) != (other.values & _IDS)).lengths
    return int((differ == 0).sum())
