"""Batches in host memory: padded, or packed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpuload.core.arrays import Ragged
from gpuload.core.marks import loss_weights, split
from gpuload.engines.batches import BatchLayout
from gpuload.engines.host.packs import IGNORED, packed
from gpuload.packing import Plan


@dataclass(frozen=True)
class HostBatches:
    """The `Batches` of the host.

    Attributes:
        layout: of the batches.
        pad_id: fills rows up.
    """

    layout: BatchLayout
    pad_id: int

    def __call__(self, plan: Plan, rows: Callable[[], Ragged], width: int) -> dict[str, torch.Tensor]:
        return pad(rows(), width, self.layout, self.pad_id)

    def packed(self, pieces: Plan, tokens: Callable[[], Ragged]) -> dict[str, Any]:
        return packed(tokens(), pieces, self.layout.weights)

    @staticmethod
    def ahead(batches: Iterator[Any]) -> Iterator[Any]:
        return batches


def pad(tokens: Ragged, width: int, layout: BatchLayout, pad_id: int) -> dict[str, torch.Tensor]:
    """Pads rows.

    Args:
        tokens: B rows of at most `width` tokens.
        width: columns of the batch.
        layout: which tensors are made, and on which side they are filled up.
        pad_id: fills rows up.

    Returns:
        The tensors of the layout, each int64 (B, width), and `loss_weight`, float32.
    """
    # A batch is megabytes of int64. So arrays of its size are made only for its tensors, and two of them in place.
    ids, loss = split(tokens)
    lengths = tokens.lengths[:, None]
    if layout.side == "left":  # column c of a row with k tokens has its token c - (width - k)
        positions = np.arange(width) - (width - lengths)
        mask = positions >= 0
        np.maximum(positions, 0, out=positions)
    else:
        positions = np.arange(width)[None]
        mask = positions < lengths

    def filled(values: Any, fill: int, dtype: type = np.int64) -> np.ndarray[Any, Any]:
        made = np.full(mask.shape, fill, dtype)
        made[mask] = values  # row-major order of the mask is the order of the flat values
        return made

    make: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
        "input_ids": lambda: filled(ids.values, pad_id),
        "attention_mask": lambda: mask.astype(np.int64),
        "position_ids": lambda: positions if layout.side == "left" else np.where(mask, positions, 0),
        "labels": lambda: filled(np.where(loss.values, ids.values, IGNORED), IGNORED),
        "completion_mask": lambda: filled(loss.values, 0),
        "loss_weight": lambda: filled(loss_weights(tokens, np.array(layout.weights, np.float32)), 0, np.float32),
    }
    names = (*layout.planes, *(("loss_weight",) if layout.weights else ()))
    return {name: torch.from_numpy(make[name]()) for name in names}
