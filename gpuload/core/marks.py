"""Which tokens have loss: a bit of each id.

A conversation is tokenized once, and its ids pass through caches, filters and stores. Whether a token has loss belongs
to the token, so it travels in the same number: bit 30 of its int32, which no id reaches. What reads such ids separates
them with `split`.
"""

from typing import Any

import numpy as np

from gpuload.core.arrays import Array, Ragged, array_module, offsets_of, on_host
from gpuload.core.options import Truncation

LOSS = np.int32(1 << 30)
"""The bit of an id that says that the token has loss."""

Flags = np.ndarray[Any, np.dtype[np.bool_]]


def with_loss(ids: Ragged, mask: Array) -> Ragged:
    """Ids with their bits.

    Args:
        ids: n rows, without bits.
        mask: one bool per id.
    """
    return Ragged(ids.values | mask * LOSS, ids.offsets)


def split(ids: Ragged) -> tuple[Ragged, Ragged]:
    """Ids without their bits, int32, and the bits, bool."""
    return Ragged(ids.values & ~LOSS, ids.offsets), Ragged((ids.values & LOSS) != 0, ids.offsets)


def without_loss(ids: Ragged, limit: int | None = None, side: Truncation = "right") -> Flags:
    """(n,) bool in host memory: rows of ids none of which has loss.

    Args:
        ids: n rows with bits, in host or device memory.
        limit: rows count as truncated to so many ids; None: as they are.
        side: "left" or "right", which end is truncated.
    """
    if not isinstance(ids.values, np.ndarray):
        return _without_loss_there(ids, limit, side)
    if limit is not None:
        ids = ids.truncate(limit, side)
    without = np.ones(len(ids), np.bool_)
    filled = np.flatnonzero(ids.lengths)  # `reduceat` needs rows with at least one id; between them there is none
    if len(filled):
        without[filled] = np.bitwise_or.reduceat(ids.values, ids.offsets[filled]) & LOSS == 0
    return without


def _without_loss_there(ids: Ragged, limit: int | None, side: Truncation) -> Flags:
    """The same in device memory. CuPy has no `reduceat`, and truncated rows would need more memory than a sum."""
    counted = offsets_of((ids.values & LOSS) != 0)
    begin, end = ids.offsets[:-1], ids.offsets[1:]
    if limit is not None:
        kept = array_module(begin).minimum(ids.lengths, limit)
        begin, end = (end - kept, end) if side == "left" else (begin, begin + kept)
    return on_host(counted[end] == counted[begin])
