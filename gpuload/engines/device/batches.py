"""Batches from the ragged store of ids, by one kernel.

The store stays in device memory (4 bytes a token), or, with `tokens_on="host"`, in pinned host memory: the same kernel
then reads the ids of a batch's rows, and no others, across the bus, one batch ahead of the consumer in a stream of its
own. Either way the kernel writes into torch's own tensors, which it reaches through DLPack: their memory, streams and
lifetimes are torch's business, `record_stream` included.
"""

import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gpuload.arrays import Array, Ragged
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.host.engine import CpuEngine, HostBatches
from gpuload.options import Truncation


class DeviceBatches:
    """The `Batches` of a device.

    In another process, forked or spawned, it makes host tensors: no process may use the CUDA of another.

    Args:
        store: all ids, in the device's memory, or in the host's.
        pinned: they are in the host's: a pinned copy is made. A forked process may not be able to read that one.
    """

    def __init__(
        self, kernels: Kernels, store: Ragged, limit: int, keep: Truncation, pad_id: int, pinned: bool = False
    ):
        self._kernels, self._limit, self._keep, self._pad_id = kernels, limit, keep, pad_id
        self._process = os.getpid()
        self._given = store
        self._crosses_the_bus = pinned

    @cached_property
    def store(self) -> Ragged:
        """All ids as kernels reach them; not every data set is drawn from here."""
        kernels, given = self._kernels, self._given
        with kernels.current():
            values = kernels.reached(kernels.pinned(given.values)) if self._crosses_the_bus else given.values
            made = Ragged(values, kernels.xp.asarray(given.offsets))
            kernels.synchronize()  # batches may be asked for in another stream
        return made

    def __call__(self, numbers: np.ndarray[Any, Any], rows: Ragged, width: int) -> dict[str, torch.Tensor]:
        if os.getpid() != self._process:
            return CpuEngine.pad(rows, width, self._pad_id)
        with self._kernels.current():
            at = self._kernels.xp.asarray(numbers)
            return pad(self._kernels, self.store, at, width, self._limit, self._keep, self._pad_id)

    def ahead(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The same batches; where ids cross the bus, each is made while the consumer works on the one before it."""
        if not self._crosses_the_bus or os.getpid() != self._process:
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
            del ready  # its memory may serve the next one

    def __reduce__(self) -> tuple[type[HostBatches], tuple[int]]:
        return HostBatches, (self._pad_id,)


def pad(
    kernels: Kernels, store: Ragged, rows: Array, width: int, limit: int, keep: Truncation, pad_id: int
) -> dict[str, torch.Tensor]:
    """A batch, taken from the store, truncated and padded by one kernel.

    Args:
        store: all ids, where the device can read them; int32.
        rows: (B,) int64 row numbers, in device memory.
        width: of the batch, at least as much as the longest row keeps.
        limit: a row keeps at most so many ids.
        keep: which part goes, as in `Ragged.truncate`; "error" is for rows that are not too long.
        pad_id: fills rows up at the left.

    Returns:
        `input_ids`, `attention_mask`, `position_ids`: int64 (B, width), the memory that the kernel wrote, ordered
        behind it in the current stream.
    """
    count = len(rows)
    head = {"error": 0, "left": 0, "right": limit, "middle": limit // 2}[keep]
    outs = {name: kernels.tensor(count, width) for name in ("input_ids", "attention_mask", "position_ids")}
    kernels.run(
        "pad", kernels.blocks(count if width else 0), count, rows, store.values, store.offsets, width, limit, head,
        pad_id, *(array for _, array in outs.values()),
    )  # fmt: skip
    return {name: tensor for name, (tensor, _) in outs.items()}
