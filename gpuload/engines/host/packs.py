"""Packed batches in host memory."""

from typing import Any

import numpy as np
import torch

from gpuload.core.arrays import Ragged, offsets_of, ranges
from gpuload.packing import Plan

IGNORED = -100  # the label of tokens without loss; `ignore_index` of torch's cross_entropy


def packed(ids: Ragged, mask: np.ndarray[Any, Any], plan: Plan, packs: Any) -> dict[str, Any]:
    """Makes one flat row of some packs, as transformers' `DataCollatorWithFlattening` makes it of the same pieces with
    `return_flash_attn_kwargs=True, return_seq_idx=True`.

    Args:
        ids: all rows.
        mask: (len(ids.values),) uint8 or bool, 1 where a token has a loss, else 0.
        plan: of these rows.
        packs: (m,) pack numbers; together they have p pieces of T tokens.

    Returns:
        `input_ids`, `labels` and `position_ids`, int64 (1, T); `seq_idx`, int32 (1, T), the piece of each token;
        `cu_seq_lens_q` and `cu_seq_lens_k`, int32 (p + 1,), where pieces begin; `max_length_q` and `max_length_k`, int.
        Positions begin with 0 in each piece. Labels are -100 where the mask is 0 and for the first token of each piece.
    """
    pieces = plan.take(packs)
    bounds = offsets_of(pieces.lengths)
    places = ranges(ids.offsets[pieces.rows] + pieces.first, pieces.lengths, bounds)
    made = np.empty((3, 1, len(places)), np.int64)
    tokens = ids.values.take(places)
    made[0] = tokens
    # Arithmetic takes the same time for every mask; a choice is several times slower for one that often changes.
    tokens -= IGNORED
    tokens *= mask.take(places)
    np.add(tokens, IGNORED, out=made[1, 0])
    made[1, 0, bounds[:-1]] = IGNORED
    np.subtract(np.arange(len(places)), np.repeat(bounds[:-1], pieces.lengths), out=made[2, 0])
    number = np.repeat(np.arange(len(pieces.rows), dtype=np.int32), pieces.lengths)[None]
    return as_batch(
        torch.from_numpy(made).unbind(0), torch.from_numpy(number), torch.from_numpy(bounds.astype(np.int32)), pieces
    )


def as_batch(
    ids_labels_positions: tuple[torch.Tensor, ...], seq_idx: torch.Tensor, bounds: torch.Tensor, pieces: Plan
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
    }
