"""Batches with labels from a store of ids with loss bits: what a `ChatDataset` asks of an engine, and on the host."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from gpuload.cache.token_store import DiskTokens
from gpuload.core.arrays import Ragged
from gpuload.core.marks import split
from gpuload.engines.host.batches import HostBatches
from gpuload.engines.host.packs import IGNORED, packed
from gpuload.engines.protocol import Batches
from gpuload.packing import Plan

Parts = Callable[[], tuple[Ragged, np.ndarray[Any, Any]]]
"""Returns the rows of a plan without bits, and one bool for each id: whether it has loss. Both in host memory."""


class ChatBatches(Batches, Protocol):
    """`Batches` of rows with loss bits: padded on the right, with `labels`."""

    def packed(self, plan: Plan, packs: Any, parts: Parts) -> dict[str, Any]:
        """One flat row of some packs, see `engines.host.packs.packed`.

        Args:
            plan: of the rows of the store; of those that `parts` returns, if the store is on disk.
            packs: (m,) pack numbers.
            parts: called only if the batch is made on the host, or the store is on disk.
        """


class HostChatBatches(HostBatches):
    """The `ChatBatches` of the host."""

    def __call__(
        self, numbers: np.ndarray[Any, Any], rows: Callable[[], Ragged], width: int
    ) -> dict[str, torch.Tensor]:
        return padded_rows(*split(rows()), width, self.pad_id)

    @staticmethod
    def packed(plan: Plan, packs: Any, parts: Parts) -> dict[str, Any]:
        return packed(*parts(), plan, packs)


def at_hand(store: Ragged | DiskTokens, plan: Plan, packs: Any) -> tuple[Ragged, Plan]:
    """The rows that some packs are made of, in memory, and the plan of these packs for them.

    Args:
        store: n rows.
        plan: of these rows.
        packs: (m,) pack numbers.
    """
    pieces = plan.take(packs)
    if isinstance(store, Ragged):
        return store, pieces
    return store.take(pieces.rows), replace(pieces, rows=np.arange(len(pieces.rows)))


def padded_rows(ids: Ragged, loss: Ragged, width: int, pad_id: int) -> dict[str, torch.Tensor]:
    """Pads rows on the right.

    Args:
        ids: B rows of at most `width` ids.
        loss: one bool for each of them.
        width: columns of the batch.
        pad_id: fills rows up.

    Returns:
        `input_ids`, `attention_mask`, `position_ids` and `labels`, each int64 (B, width).
    """
    position = np.arange(width)[None, :].repeat(len(ids), axis=0)
    mask = position < ids.lengths[:, None]
    tokens, labels = np.full(mask.shape, pad_id, np.int64), np.full(mask.shape, IGNORED, np.int64)
    tokens[mask] = ids.values  # row-major order of the mask is the order of the flat values
    labels[mask] = np.where(loss.values, ids.values, IGNORED)
    position[~mask] = 0
    return {
        "input_ids": torch.from_numpy(tokens),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        "position_ids": torch.from_numpy(position),
        "labels": torch.from_numpy(labels),
    }
