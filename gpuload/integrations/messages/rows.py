"""Rows made of the ids of pieces, and which of them the trainer's own function has to prepare."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch

from gpuload.cache.token_store import DiskTokens
from gpuload.core.arrays import Ragged, RowNumbers, mask_of, offsets_of
from gpuload.core.marks import with_loss
from gpuload.engines.host.render import HostText
from gpuload.engines.protocol import RowCounts
from gpuload.integrations.messages.turns import MessageTurns

_Part = TypeVar("_Part")
_Made = TypeVar("_Made")

_MOST_THREADS = 16

NO_LOSS = 1 << 40  # more ids than a turn has: none of them has loss


@dataclass
class MessageRows:
    """n rows as a trainer trains on them."""

    ids: Ragged  # n rows of token ids, with a bit for loss (`core.marks`); empty for rows in `fallback`
    fallback: dict[int, str]  # row → why the trainer's own function has to prepare it
    rendering: RowCounts = field(default_factory=RowCounts)  # how the texts of the pieces were rendered

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
        """The rows of a dataset, some of which were tokenized in parts.

        Those have the numbers `rows` (m,), ascending; `others` are all other rows → why they fall back.
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


@dataclass(frozen=True)
class SharedRows:
    """n rows of ids in memory, as tensors: they go to the workers of a DataLoader through shared memory."""

    starts: torch.Tensor  # (n + 1,) int64, where the rows begin
    values: torch.Tensor  # (starts[-1],) int32 ids, with a bit for loss

    @classmethod
    def of(cls, ids: Ragged) -> "SharedRows":
        """The same rows, without a copy if they are arrays that can be written to."""
        return cls(*(torch.from_numpy(np.require(each, requirements=["C", "W"])) for each in (ids.offsets, ids.values)))

    @cached_property
    def _rows(self) -> Ragged:
        """The same without a copy: reading a few values of arrays is several times as fast."""
        return Ragged(self.values.numpy(), self.starts.numpy())

    def __getstate__(self) -> dict[str, torch.Tensor]:
        return {"starts": self.starts, "values": self.values}  # arrays would be copied

    @property
    def lengths(self) -> RowNumbers:
        """(n,) how many ids rows have."""
        lengths: RowNumbers = self._rows.lengths
        return lengths

    def __getitem__(self, row: int) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self._rows[row]
        return found


def shared(ids: Ragged | DiskTokens) -> SharedRows | DiskTokens:
    """The same rows in a form that workers of a DataLoader share: in shared memory, or in a file that each maps."""
    return SharedRows.of(ids) if isinstance(ids, Ragged) else ids


def row_of(ids: Ragged | SharedRows | DiskTokens, row: int) -> np.ndarray[Any, Any]:
    """The ids of one row, with bits; a `StoreError` if they have been damaged."""
    return ids.take(np.array([row])).values if isinstance(ids, DiskTokens) else ids[row]


def without(ids: Ragged, rows: Iterable[int]) -> Ragged:
    """The same rows, of which the given ones have no ids."""
    given = list(rows)
    if not given:
        return ids
    keep = ~mask_of(given, len(ids))
    lengths = ids.lengths
    return Ragged(ids.values[np.repeat(keep, lengths)], offsets_of(np.where(keep, lengths, 0)))


def trimmed(ids: Ragged, turns: MessageTurns, front: RowNumbers, loss_from: RowNumbers, back: Any = 0) -> Ragged:
    """The rule "trim": a row is what remains of its turns, without what the template adds to each.

    Of the ids of t turns, `front` and `back` (t,) are removed at the start of each, and at its end. Of the rest, the
    first `loss_from` (t,) have no loss; the others have a bit for it.
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
