"""Rows that are made of pieces of the rows of a store, of which nothing is copied before it is used."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from gpuload.core.arrays import Ragged, RowNumbers, chunks_of, from_chunks, offsets_of, ranges
from gpuload.core.marks import IDS, LOSS
from gpuload.core.records import dataclass
from gpuload.engines.protocol import TokenStore
from gpuload.packing import Plan
from gpuload.packing.plan import whole_rows

_CHUNK = 1 << 22  # tokens that are copied at a time


@dataclass(frozen=True, eq=False)
class Sequences:
    """n sequences that are made of the rows of a store; a `protocol.TokenStore`.

    Attributes:
        store: the store.
        plan: of its rows; each pack is a sequence.
        bits: what is kept of its tokens (`gpuload.core.marks`): of the sequences of pairs, no bit of a pair.
    """

    store: TokenStore
    plan: Plan
    bits: np.int32 = IDS | LOSS

    def __len__(self) -> int:
        return len(self.plan)

    @cached_property
    def lengths(self) -> RowNumbers:
        return self.plan.tokens

    def take(self, rows: RowNumbers) -> Ragged:
        found = tokens_of(self.store, self.plan.take(rows))
        return Ragged(found.values & self.bits, found.offsets)

    def chunks(self) -> Iterator[np.ndarray[Any, Any]]:
        return chunks_of(self.take, self.lengths, _CHUNK)

    def to_host(self) -> Ragged:
        """All sequences in host memory: a copy, made each time."""
        return from_chunks(self.chunks(), self.lengths)


def stored(store: TokenStore) -> TokenStore:
    """The store that has the tokens of a store."""
    return store.store if isinstance(store, Sequences) else store


def some_of(store: TokenStore, rows: RowNumbers) -> TokenStore:
    """Some rows of a store, which are copied when they are used.

    Args:
        rows: (k,) their numbers, in the order of the result.
    """
    bits = store.bits if isinstance(store, Sequences) else np.int32(-1)
    return Sequences(stored(store), in_store(store, whole_rows(rows, store.lengths[rows])), bits)


def in_store(store: TokenStore, plan: Plan) -> Plan:
    """A plan of the rows of a store, as a plan of those of the store that has their tokens."""
    return plan.within(store.plan) if isinstance(store, Sequences) else plan


def tokens_of(store: TokenStore, plan: Plan) -> Ragged:
    """The tokens of a plan in host memory: one row for each pack, of its pieces one after the other.

    Args:
        store: n rows.
        plan: of these rows.
    """
    bounds, rows = offsets_of(plan.lengths), plan.rows
    if not isinstance(store, Ragged):
        some, rows = np.unique(rows, return_inverse=True)
        store = store.take(some)
    first = store.offsets[rows] + plan.first
    if np.array_equal(first[1:], first[:-1] + plan.lengths[:-1]):  # they are one after the other in the store
        values = store.values[int(first[:1].sum()) :][: int(bounds[-1])]
    else:
        values = store.values[ranges(first, plan.lengths, bounds)]
    return Ragged(values, bounds[plan.offsets])
