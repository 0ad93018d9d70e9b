"""Padded batches from the store of ids, by one kernel.

The store is in device memory (4 bytes per token), or with `tokens_on="host"` in pinned host memory. In the second case
the same kernel reads the ids of a batch's rows, and no others, across the bus, one batch ahead of the consumer on a
stream of its own. Either way the kernel writes into torch's own tensors, which it reaches through DLPack: torch manages
their memory, streams and lifetimes, `record_stream` included.
"""

import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gpuload.arrays import Array, Ragged
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.host import batches as host
from gpuload.options import Truncation


class DeviceBatches:
    """The `Batches` of a device. In another process, forked or spawned, it makes host tensors: a process cannot use
    the CUDA context of another one.

    Args:
        store: all ids, in device memory, or in host memory.
        limit: a row keeps at most this many ids.
        side: which end is truncated, see `Ragged.truncate`.
        pad_id: fills rows up on the left.
        pinned: the store is in host memory, and a pinned copy of it is made.
    """

    def __init__(
        self, kernels: Kernels, store: Ragged, limit: int, side: Truncation, pad_id: int, pinned: bool = False
    ):
        self._kernels, self._limit, self._side, self._pad_id = kernels, limit, side, pad_id
        self._process = os.getpid()
        self._given = store
        self._pinned = pinned

    @cached_property
    def store(self) -> Ragged:
        """All ids where kernels can read them; made with the first batch, which not every dataset asks for."""
        kernels, given = self._kernels, self._given
        with kernels.current():
            values = kernels.reached(kernels.pinned(given.values)) if self._pinned else given.values
            made = Ragged(values, kernels.xp.asarray(given.offsets))
            kernels.synchronize()  # batches may be made on another stream
        return made

    def __call__(self, numbers: np.ndarray[Any, Any], rows: Ragged, width: int) -> dict[str, torch.Tensor]:
        if os.getpid() != self._process:
            return host.pad(rows, width, self._pad_id)
        with self._kernels.current():
            at = self._kernels.xp.asarray(numbers)
            return pad(self._kernels, self.store, at, width, self._limit, self._side, self._pad_id)

    def ahead(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The same batches; with a pinned store, each is made while the consumer works on the one before it."""
        if not self._pinned or os.getpid() != self._process:
            yield from batches
            return
        with self._kernels.aside():
            coming = next(batches, None)
        while coming is not None:
            self._kernels.rejoin()
            ready = coming
            with self._kernels.aside():
                coming = next(batches, None)
            yield ready
            del ready  # so that its memory can serve the next batch

    def __reduce__(self) -> tuple[type[host.HostBatches], tuple[int]]:
        return host.HostBatches, (self._pad_id,)


def pad(
    kernels: Kernels, store: Ragged, rows: Array, width: int, limit: int, side: Truncation, pad_id: int
) -> dict[str, torch.Tensor]:
    """Takes rows from the store, truncates and pads them, in one kernel.

    Args:
        store: all ids, int32, where the device can read them.
        rows: (B,) int64 row numbers in device memory.
        width: columns of the batch, at least as many as the longest row keeps.
        limit: a row keeps at most this many ids.
        side: which end is truncated, as in `Ragged.truncate`; "error" for rows within the limit.
        pad_id: fills rows up on the left.

    Returns:
        `input_ids`, `attention_mask` and `position_ids`, each int64 (B, width), written in order of the current stream.
    """
    count = len(rows)
    # A truncated row keeps its first `head` ids and the last `limit - head`.
    head = {"error": 0, "left": 0, "right": limit, "middle": limit // 2}[side]
    outs = {name: kernels.tensor(count, width) for name in ("input_ids", "attention_mask", "position_ids")}
    kernels.run(
        "pad", kernels.blocks(count if width else 0), count, rows, store.values, store.offsets, width, limit, head,
        pad_id, *(array for _, array in outs.values()),
    )  # fmt: skip
    return {name: tensor for name, (tensor, _) in outs.items()}
