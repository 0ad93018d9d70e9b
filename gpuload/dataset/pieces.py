"""Rows that are made of pieces of the rows of a store, of which nothing is copied before it is used."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gpuload.core.arrays import Ragged, RowNumbers, RowsInParts, offsets_of, ranges
from gpuload.core.marks import IDS, LOSS
from gpuload.engines.host.store import HostTokens
from gpuload.engines.protocol import TokenStore
from gpuload.packing import Plan
from gpuload.packing.plan import whole_rows


@dataclass(frozen=True, eq=False)
class Sequences(RowsInParts):
    """n sequences that are made of the rows of a store; a `protocol.TokenStore`."""

    store: TokenStore
    plan: Plan  # of its rows; each pack is a sequence
    bits: np.int32 = IDS | LOSS  # what is kept of its tokens (`core.marks`): of sequences of pairs, no bit of a pair

    @cached_property
    def lengths(self) -> RowNumbers:
        return self.plan.tokens

    def take(self, rows: RowNumbers) -> Ragged:
        found = tokens_of(self.store, self.plan.take(rows))
        return Ragged(found.values & self.bits, found.offsets)


def stored(store: TokenStore) -> TokenStore:
    """The store that has the tokens of a store."""
    return store.store if isinstance(store, Sequences) else store


def some_of(store: TokenStore, rows: RowNumbers) -> TokenStore:
    """Some rows (k,) of a store in the given order, which are copied when they are used."""
    bits = store.bits if isinstance(store, Sequences) else np.int32(-1)
    return Sequences(stored(store), in_store(store, whole_rows(rows, store.lengths[rows])), bits)


def in_store(store: TokenStore, plan: Plan) -> Plan:
    """A plan of the rows of a store, as a plan of those of the store that has their tokens."""
    return plan.within(store.plan) if isinstance(store, Sequences) else plan


def tokens_of(store: TokenStore, plan: Plan) -> Ragged:
    """The tokens of a plan of a store's rows in host memory: a row for each pack, of its pieces one after the other."""
    bounds, rows = offsets_of(plan.lengths), plan.rows
    if isinstance(store, HostTokens):
        values, start = store.places
    elif isinstance(store, Ragged):
        values, start = store.values, store.offsets
    elif not plan.first.any() and np.array_equal(plan.lengths, store.lengths[rows]):  # whole rows
        return Ragged(store.take(rows).values, bounds[plan.offsets])
    else:
        some, rows = np.unique(rows, return_inverse=True)
        taken = store.take(some)
        values, start = taken.values, taken.offsets
    first = start[rows] + plan.first
    if np.array_equal(first[1:], first[:-1] + plan.lengths[:-1]):  # they are one after the other in the store
        values = values[int(first[:1].sum()) :][: int(bounds[-1])]
    else:
        values = values[ranges(first, plan.lengths, bounds)]
    return Ragged(values, bounds[plan.offsets])
