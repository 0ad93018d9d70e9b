"""Packed batches from the store of ids, by one kernel.

The plan is in host memory. A batch needs one small copy to the device, of where its pieces are, and one launch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gpuload.core.arrays import offsets_of
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.store import Index
from gpuload.engines.host.packs import as_batch
from gpuload.packing import Plan


def prepare_pack(kernels: Kernels, index: Index, weights: Sequence[float] = ()) -> Callable[..., None]:
    """Prepares the launch, for `packed`, of the kernel that gathers pieces of rows with their bits
    (`gpuload.core.marks`). The caller keeps the memory that the addresses of the rows point into."""
    table = kernels.xp.asarray(np.array(weights, np.float32))
    return kernels.prepare("pack", index.address, bool(weights), table)


def packed(kernels: Kernels, launch: Callable[..., None], pieces: Plan, weighted: bool = False) -> dict[str, Any]:
    """As `engines.host.packs.packed`, by a launch that `prepare_pack` has prepared, with weights or without. The
    tensors are views of one tensor, which is written in order of the current stream."""
    offsets = offsets_of(pieces.lengths)
    count, tokens = len(pieces.rows), int(offsets[-1])
    # int64 ids, labels and positions, then the arrays of four bytes, of two items per int64.
    made, array = kernels.tensor(3 * tokens + -(-((1 + weighted) * tokens + count + 1) // 2))
    piece = kernels.xp.asarray(np.concatenate([offsets, pieces.rows, pieces.first]))
    launch(kernels.threads(tokens + 1), count, piece, tokens, array)
    number, bounds, rest = made[3 * tokens :].view(torch.int32).tensor_split((tokens, tokens + count + 1))
    weight = rest[:tokens].view(torch.float32)[None] if weighted else None
    return as_batch(made[: 3 * tokens].view(3, 1, tokens).unbind(0), number[None], bounds, pieces, weight)
