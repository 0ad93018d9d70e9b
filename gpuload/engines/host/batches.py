"""Padded batches in host memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpuload.core.arrays import Ragged


@dataclass(frozen=True)
class HostBatches:
    """The `Batches` of the host.

    Attributes:
        pad_id: fills rows up on the left.
    """

    pad_id: int

    def __call__(
        self, numbers: np.ndarray[Any, Any], rows: Callable[[], Ragged], width: int
    ) -> dict[str, torch.Tensor]:
        return pad(rows(), width, self.pad_id)

    @staticmethod
    def ahead(batches: Iterator[Any]) -> Iterator[Any]:
        return batches


def pad(rows: Ragged, width: int, pad_id: int) -> dict[str, torch.Tensor]:
    """Pads rows on the left.

    Args:
        rows: B rows of at most `width` ids.
        width: columns of the batch.
        pad_id: fills rows up.

    Returns:
        `input_ids`, `attention_mask` and `position_ids`, each int64 (B, width).
    """
    # Column c of a row with k ids is its id number c - (width - k): its position, and negative in the padding.
    positions = np.arange(width) - (width - rows.lengths)[:, None]
    mask = positions >= 0
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[mask] = rows.values  # row-major order of the mask is the order of the flat values
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        "position_ids": torch.from_numpy(np.maximum(positions, 0, out=positions)),
    }
