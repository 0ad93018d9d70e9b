"""What a dataset asks of an engine: batches, padded or packed, from a store of tokens."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from gpuload.core.arrays import Ragged
from gpuload.packing import Plan


@dataclass(frozen=True)
class BatchLayout:
    """What padded batches consist of."""

    side: Literal["left", "right"]  # where rows are filled up
    # Names of tensors: `input_ids`, `attention_mask`, and, in this order, some of `OTHER_PLANES`
    planes: tuple[str, ...]
    # If the loss of tokens has weights, the weight of each number (`core.marks`); batches then have a `loss_weight`.
    # Packed ones, too
    weights: tuple[float, ...] = ()


OTHER_PLANES = ("position_ids", "labels", "completion_mask")


class Batches(Protocol):
    """Makes batches from a store of tokens.

    A dataset keeps this object, and nothing else of the engine, when it is pickled for a loader worker. In another
    process it makes host tensors.
    """

    def __call__(self, plan: Plan, rows: Callable[[], Ragged], width: int) -> dict[str, torch.Tensor]:
        """A padded batch of B sequences.

        Args:
            plan: of which pieces of rows of the store each of them consists.
            rows: returns the same sequences in host memory; called only if the batch is made there, or the store is on
                disk.
            width: columns of the batch, at least as many as the longest sequence has tokens.

        Returns:
            The planes of the layout, each int64 (B, width). `input_ids` has the padding token where `attention_mask`
            is 0; `position_ids` are clip(cumsum(attention_mask) - 1, 0); `labels` are the ids, and -100 in the padding
            and for tokens without loss; `completion_mask` is 1 for those with loss. With weights also `loss_weight`,
            float32 (B, width): that of the token's loss, and 0 where there is none.
        """

    def packed(self, pieces: Plan, tokens: Callable[[], Ragged]) -> dict[str, Any]:
        """One flat row of some packs, see `engines.host.packs.packed`.

        Args:
            pieces: of these packs, of rows of the store.
            tokens: returns the tokens of these packs, one after the other, in host memory; called only if the batch is
                made there, or the store is on disk.
        """

    def ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches in the same order; an engine may make each one early to hide a transfer."""
