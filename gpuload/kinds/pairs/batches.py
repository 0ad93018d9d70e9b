"""Batches of sequences of preference data: what a `PairDataset` asks of an engine, and on the host."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from gpuload.core.arrays import Ragged, RowNumbers
from gpuload.core.marks import split
from gpuload.engines.host.batches import HostBatches
from gpuload.engines.protocol import Batches


@dataclass(frozen=True, eq=False)
class RowSlices:
    """B sequences, each the beginning of one row of a store and the end of the same or another one; (B,) int64 arrays.

    Attributes:
        rows: the row numbers.
        size: how many ids of each of these rows belong to the sequence.
        others: the numbers of the rows that the rest comes from.
        begin: the first id of each of them that belongs to the sequence.
        length: ids of each sequence.
    """

    rows: RowNumbers
    size: RowNumbers
    others: RowNumbers
    begin: RowNumbers
    length: RowNumbers

    @staticmethod
    def concatenate(parts: "Sequence[RowSlices]") -> "RowSlices":
        """The sequences of all parts, one after the other."""
        names = RowSlices.__dataclass_fields__
        return RowSlices(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


class PairBatches(Batches, Protocol):
    """`Batches` of sequences, padded on the right."""

    def padded(self, slices: RowSlices, sequences: Callable[[], Ragged], width: int) -> dict[str, torch.Tensor]:
        """One batch of B sequences.

        Args:
            slices: where the sequences are in the store.
            sequences: returns the same, truncated, in host memory, with the bit of loss; called only if the
                batch is made there.
            width: columns of the batch.

        Returns:
            `input_ids`, `attention_mask` and `completion_mask`, each int64 (B, width).
        """


class HostPairBatches(HostBatches):
    """The `PairBatches` of the host."""

    def padded(self, slices: RowSlices, sequences: Callable[[], Ragged], width: int) -> dict[str, torch.Tensor]:
        return padded_sequences(sequences(), width, self.pad_id)


def padded_sequences(rows: Ragged, width: int, pad_id: int) -> dict[str, torch.Tensor]:
    """Pads sequences on the right.

    Args:
        rows: B sequences of at most `width` ids, with the bit of loss.
        width: columns of the batch.
        pad_id: fills rows up.

    Returns:
        `input_ids`, `attention_mask` and `completion_mask`, each int64 (B, width).
    """
    ids, completion = split(rows)
    mask: np.ndarray[Any, Any] = np.arange(width) < ids.lengths[:, None]
    tokens, completions = np.full(mask.shape, pad_id, np.int64), np.zeros(mask.shape, np.int64)
    tokens[mask], completions[mask] = ids.values, completion.values  # row-major order of the mask is that of the ids
    made = {"input_ids": tokens, "attention_mask": mask.astype(np.int64), "completion_mask": completions}
    return {name: torch.from_numpy(values) for name, values in made.items()}
