"""Which tokens have loss: a bit of each id.

A conversation is tokenized once, and its ids pass through caches, filters and stores. Whether a token has loss belongs
to the token, so it travels in the same number: bit 30 of its int32, which no id reaches. What reads such ids separates
them with `split`.
"""

import numpy as np

from gpuload.arrays import Array, Ragged

LOSS = np.int32(1 << 30)
"""The bit of an id that says that the token has loss."""


def with_loss(ids: Ragged, mask: Array) -> Ragged:
    """Ids with their bits.

    Args:
        ids: n rows, without bits.
        mask: one bool per id.
    """
    return Ragged(np.where(mask, ids.values | LOSS, ids.values), ids.offsets)


def split(ids: Ragged) -> tuple[Ragged, Ragged]:
    """Ids without their bits, int32, and the bits, bool."""
    return Ragged(ids.values & ~LOSS, ids.offsets), Ragged((ids.values & LOSS) != 0, ids.offsets)


def without_loss(ids: Ragged) -> Array:
    """(n,) bool: rows of ids none of which has loss."""
    without = np.ones(len(ids), bool)
    filled = np.flatnonzero(ids.lengths)  # `reduceat` needs rows with at least one id; between them there is none
    if len(filled):
        without[filled] = np.bitwise_or.reduceat(ids.values, ids.offsets[filled]) & LOSS == 0
    return without
