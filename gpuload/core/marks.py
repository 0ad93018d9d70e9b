"""A token: an id and its marks, in one int32.

A row is tokenized once, and passes through caches, filters and stores. Whether a token has loss, and to which sequence
of a pair it belongs, travels in the same number: in bits that no id reaches. What reads tokens separates them with
`split`.

    LOSS       an answer, or the completion of a prompt
    CHOSEN     what only the chosen sequence of a pair has
    REJECTED   what only the rejected one has
    WEIGHT     the number of the weight of its loss, in the list of a dataset; 0 for the weight 1

A pair is one row: what both sequences begin with, then the rest of the chosen one, then the rest of the rejected one.
So its prompt is stored once.

    prompt  chosen|CHOSEN|LOSS  rejected|REJECTED|LOSS

The two sequences may share less than a prompt: `CHOSEN` or `REJECTED` without `LOSS` is then the end of a prompt that
is encoded otherwise in one of them. Pairs for reward models have no prompts, and share as many ids as they can.
"""

from typing import Any

import numpy as np

from gpuload.core.arrays import Array, Ragged, appended, array_module, marked_before, offsets_of, selected, stretches
from gpuload.core.options import Truncation

LOSS = np.int32(1 << 30)  # the bit of tokens with loss
CHOSEN = np.int32(1 << 29)  # the bit of tokens that only the chosen sequence of a pair has
REJECTED = np.int32(1 << 28)  # the bit of tokens that only the rejected sequence of a pair has
_WEIGHT_SHIFT, MOST_WEIGHTS = 21, 127
"""Ids have fewer than 2^21 values, and 7 bits are left. A dataset has at most so many weights other than 0 and 1."""

WEIGHT = np.int32(MOST_WEIGHTS << _WEIGHT_SHIFT)

IDS = np.int32((1 << _WEIGHT_SHIFT) - 1)  # the bits of ids


def loss_bits(number: Array | int) -> Any:
    """The bits of tokens with loss, int32. Numbers of weights count from 1 in the list of weights; 0 is the weight
    1."""
    return LOSS | np.int32(1 << _WEIGHT_SHIFT) * number


def loss_weights(tokens: Ragged, table: Array) -> np.ndarray[Any, Any]:
    """The weight of the loss of each token, float32, 0 where there is none; `table` has that of each number."""
    return np.where(tokens.values & LOSS, table[(tokens.values & WEIGHT) >> _WEIGHT_SHIFT], np.float32(0))


def with_loss(ids: Ragged, mask: Array) -> Ragged:
    """Ids without bits, with the bit of loss where a mask says so, which has one bool per id."""
    return Ragged(ids.values | mask * LOSS, ids.offsets)


def with_loss_from(ids: Ragged, begin: Array) -> Ragged:
    """Ids of n rows without bits, with the bit of loss from some place of each row on: `begin`, (n,)."""
    return with_loss(ids, stretches(begin, ids.lengths - begin))


def split(tokens: Ragged) -> tuple[Ragged, Ragged]:
    """Ids without any bits, int32, and which of them have loss, bool."""
    return Ragged(tokens.values & IDS, tokens.offsets), Ragged((tokens.values & LOSS) != 0, tokens.offsets)


def loss_tokens(tokens: Ragged, limit: int | None = None, side: Truncation = "right") -> Array:
    """(n,) int64: how many tokens of each row have loss; in the memory of the rows.

    With a limit, rows count as truncated to so many tokens, on the "left" or on the "right" side.
    """
    begin, end = tokens.offsets[:-1], tokens.offsets[1:]
    if limit is not None:  # truncated rows would need more memory than a sum
        kept = array_module(begin).minimum(tokens.lengths, limit)
        begin, end = (end - kept, end) if side == "left" else (begin, begin + kept)
    begin, end = marked_before((tokens.values & LOSS) != 0, begin, end)
    return end - begin


def paired(chosen: Ragged, rejected: Ragged, shared: Array) -> Ragged:
    """Rows with both sequences, which have bits of loss; their first `shared` (n,) tokens are equal and stored once."""
    own = stretches(shared, chosen.lengths - shared)
    more = rejected.lengths - shared
    rest = rejected.values[stretches(shared, more)]
    first = Ragged(chosen.values | own * CHOSEN, chosen.offsets)
    return appended(first, Ragged(rest | REJECTED, offsets_of(more)))


def sequence(pairs: Ragged, other: np.int32) -> Ragged:
    """One of the two sequences of each pair, with the bit of loss; `other`, `CHOSEN` or `REJECTED`, is not wanted."""
    kept = selected(pairs, (pairs.values & other) == 0)
    return Ragged(kept.values & (IDS | LOSS), kept.offsets)
