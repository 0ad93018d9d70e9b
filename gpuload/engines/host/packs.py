"""Packed batches in host memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.marks import loss_weights, split
from gpuload.packing import Plan

IGNORED = -100  # the label of tokens without loss; `ignore_index` of torch's cross_entropy


def packed(tokens: Ragged, pieces: Plan, weights: Sequence[float] = ()) -> dict[str, Any]:
    """Makes one flat row of some packs, as transformers' `DataCollatorWithFlattening` makes it of the same pieces with
    `return_flash_attn_kwargs=True, return_seq_idx=True`.

    Args:
        tokens: of these packs, one after the other.
        pieces: of these packs: p pieces of T tokens.
        weights: those of the `BatchLayout`.

    Returns:
        `input_ids`, `labels` and `position_ids`, int64 (1, T); `seq_idx`, int32 (1, T), the piece of each token;
        `cu_seq_lens_q` and `cu_seq_lens_k`, int32 (p + 1,), where pieces begin; `max_length_q` and `max_length_k`, int.
        Positions begin with 0 in each piece. Labels are -100 for tokens without loss and for the first of each piece.
        With weights also `loss_weight`, float32 (1, T): that of the label's loss, and 0 where the label is -100.
    """
    bounds = offsets_of(pieces.lengths)
    ids, loss = (each.values for each in split(tokens))
    made = np.empty((3, 1, len(ids)), np.int64)
    made[0] = ids
    # Arithmetic takes the same time for every mask; a choice is several times slower for one that often changes.
    ids -= IGNORED
    ids *= loss
    np.add(ids, IGNORED, out=made[1, 0])
    made[1, 0, bounds[:-1]] = IGNORED
    np.subtract(np.arange(len(ids)), np.repeat(bounds[:-1], pieces.lengths), out=made[2, 0])
    number = np.repeat(np.arange(len(pieces.rows), dtype=np.int32), pieces.lengths)[None]
    weight = None
    if weights:
        of_tokens = loss_weights(tokens, np.array(weights, np.float32))
        of_tokens[bounds[:-1]] = 0
        weight = torch.from_numpy(of_tokens[None])
    planes = torch.from_numpy(made).unbind(0)
    return as_batch(planes, torch.from_numpy(number), torch.from_numpy(bounds.astype(np.int32)), pieces, weight)


def as_batch(
    ids_labels_positions: tuple[torch.Tensor, ...],
    seq_idx: torch.Tensor,
    bounds: torch.Tensor,
    pieces: Plan,
    weight: torch.Tensor | None,
) -> dict[str, Any]:
    """The tensors of a batch under transformers' names."""
    longest = int(pieces.lengths.max(initial=0))
    return {
        **dict(zip(("input_ids", "labels", "position_ids"), ids_labels_positions, strict=True)),
        "seq_idx": seq_idx,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
        **({} if weight is None else {"loss_weight": weight}),
    }
