"""Rows made of the ids of pieces, and which of them the trainer's own function has to prepare."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged, RowNumbers, offsets_of
from gpuload.core.marks import with_loss
from gpuload.engines.host.render import HostText
from gpuload.engines.protocol import RowCounts
from gpuload.integrations.messages.turns import MessageTurns

_Part = TypeVar("_Part")
_Made = TypeVar("_Made")

_MOST_THREADS = 16

NO_LOSS = 1 << 40
"""More ids than a turn has: none of them has loss."""


@dataclass
class MessageRows:
    """n rows as a trainer trains on them.

    Attributes:
        ids: n rows of token ids, with a bit for loss (`core.marks`); empty for rows in `fallback`.
        fallback: row → why the trainer's own function has to prepare it.
        rendering: how the texts of the pieces were rendered.
    """

    ids: Ragged
    fallback: dict[int, str]
    rendering: RowCounts = field(default_factory=RowCounts)

    def __post_init__(self) -> None:
        self.ids = without(self.ids, self.fallback)

    @classmethod
    def of(cls, ids: Ragged, fallback: dict[int, str], *texts: HostText) -> "MessageRows":
        """Rows that were made of these texts."""
        made = cls(ids, fallback)
        for text in texts:
            made.rendering.add_counts(text)
        return made

    @classmethod
    def joined(cls, parts: "Sequence[MessageRows]", rows: RowNumbers, others: Mapping[int, str]) -> "MessageRows":
        """The rows of a dataset, of which some were tokenized in parts.

        Args:
            parts: the rows that were tokenized, one part after the other.
            rows: (m,) their numbers in the dataset, ascending.
            others: all other rows → why they fall back.
        """
        ids = Ragged.concatenate([part.ids for part in parts])
        lengths = np.zeros(len(rows) + len(others), np.int64)
        lengths[rows] = ids.lengths
        made, first = cls(Ragged(ids.values, offsets_of(lengths)), dict(others)), 0
        for part in parts:
            made.fallback.update((int(rows[first + row]), why) for row, why in part.fallback.items())
            made.rendering.add_counts(part.rendering)
            first += len(part.ids)
        return made


def without(ids: Ragged, rows: Iterable[int]) -> Ragged:
    """The same rows, of which the given ones have no ids."""
    given = list(rows)
    if not given:
        return ids
    keep = np.ones(len(ids), bool)
    keep[given] = False
    lengths = ids.lengths
    return Ragged(ids.values[np.repeat(keep, lengths)], offsets_of(np.where(keep, lengths, 0)))


def trimmed(ids: Ragged, turns: MessageTurns, front: RowNumbers, loss_from: RowNumbers, back: Any = 0) -> Ragged:
    """The rule "trim": a row is what remains of its turns, without what the template adds to each.

    Args:
        ids: the ids of t turns.
        front, back: (t,) how many ids are removed at the start of each turn, and at its end.
        loss_from: (t,) how many ids of the rest have no loss; the others have.

    Returns:
        n rows, with a bit for loss.
    """
    rest = np.maximum(ids.lengths - front - back, 0)
    # Position of each id in the part of its turn that is kept; negative if it is removed at the front.
    position = ids.positions - np.repeat(front, ids.lengths)
    kept = (position >= 0) & (position < np.repeat(rest, ids.lengths))
    loss = position >= np.repeat(loss_from, ids.lengths)
    lengths = np.bincount(turns.row, rest, len(turns.counts)).astype(np.int64)  # float64 is exact up to 2^53
    return with_loss(Ragged(ids.values[kept], offsets_of(lengths)), loss[kept])


def each_part(work: Callable[[_Part], _Made], parts: Iterable[_Part]) -> list[_Made]:
    """`work` of all parts of a dataset, in order. Several threads do it at once."""
    with ThreadPoolExecutor(min(pa.cpu_count(), _MOST_THREADS), "pieces") as threads:
        return list(threads.map(work, parts))
