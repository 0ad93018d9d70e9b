"""Padded batches from the store of ids, by one kernel.

The store is in device memory (4 bytes per token), or in host memory, which is then pinned. In the second case the same
kernel reads the ids of a batch's rows, and no others, across the bus. A loader's batches are made one ahead of the
consumer, on a stream of their own: making one overlaps with the work on the one before it. The kernel writes into a
tensor of torch, which it reaches through DLPack: torch manages its memory, streams and lifetime, `record_stream`
included.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from gpuload.core.arrays import Array, Ragged
from gpuload.core.options import Truncation
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.store import DeviceStore, Index, to_device
from gpuload.engines.host import batches as host
from gpuload.engines.protocol import TokenStore


class DeviceBatches:
    """The `Batches` of a device. In another process, forked or spawned, it makes host tensors: a process cannot use
    the CUDA context of another one.

    Args:
        store: all ids: in device memory; in host memory, which is pinned with the first batch; or on disk.
        limit: a row keeps at most this many ids.
        side: which end is truncated, see `Ragged.truncate`.
        pad_id: fills rows up on the left.
    """

    _host: ClassVar[type[host.HostBatches]] = host.HostBatches  # in another process
    _labelled: ClassVar[bool] = False  # see `prepare_pad`

    def __init__(self, kernels: Kernels, store: TokenStore, limit: int, side: Truncation, pad_id: int):
        self._kernels, self._limit, self._side, self._pad_id = kernels, limit, side, pad_id
        self._process = os.getpid()
        self._store = store

    @cached_property
    def _readable(self) -> DeviceStore:
        """The store where kernels can read it; made with the first batch, which not every dataset asks for."""
        kernels, store = self._kernels, self._store
        if isinstance(store, Ragged):
            address = kernels.pinned(store.values) + 4 * store.offsets[:-1]
            store = DeviceStore(kernels, address, store.lengths, [store.values])
        assert isinstance(store, DeviceStore)
        return store

    @property
    def _index(self) -> Index:
        return self._readable.index

    @cached_property
    def _pad(self) -> Callable[..., None]:
        return self._prepared(self._index)

    def _prepared(self, index: Index) -> Callable[..., None]:
        return prepare_pad(self._kernels, index, self._limit, self._side, self._pad_id, self._labelled)

    @property
    def _elsewhere(self) -> bool:
        """Whether this is another process than the one that the device's memory belongs to."""
        return os.getpid() != self._process

    @property
    def _on_disk(self) -> bool:
        """Whether the store is in files: kernels cannot read it, so the rows of each batch are copied."""
        return not isinstance(self._store, Ragged | DeviceStore)

    def __call__(
        self, numbers: np.ndarray[Any, Any], rows: Callable[[], Ragged], width: int
    ) -> dict[str, torch.Tensor]:
        if self._elsewhere:
            return self._host(self._pad_id)(numbers, rows, width)
        made = pad_labelled if self._labelled else pad
        with self._kernels.current():
            if self._on_disk:
                with copied(self._kernels, rows()) as index:
                    return made(self._kernels, self._prepared(index), self._kernels.xp.arange(len(numbers)), width)
            return made(self._kernels, self._pad, self._kernels.xp.asarray(numbers), width)

    def ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, each of them made while the consumer works on the one before it."""
        if self._elsewhere:
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
        return self._host, (self._pad_id,)


@contextmanager
def copied(kernels: Kernels, rows: Ragged) -> Iterator[Index]:
    """Rows of a batch in host memory, where kernels can read them for the length of the block.

    CuPy copies them to the device through its pool of pinned memory, in order of the stream: pages of a file cannot be
    pinned in place, as the system may drop them.
    """
    ids = to_device(kernels, rows)
    yield Index(kernels.address(ids.values) + 4 * ids.offsets[:-1], ids.lengths)
    del ids  # kernels that were launched in the block run before its memory is used for anything else on this stream


def prepare_pad(
    kernels: Kernels, index: Index, limit: int, side: Truncation, pad_id: int, labelled: bool = False
) -> Callable[..., None]:
    """Prepares the launch of the kernel that takes rows from the store, truncates and pads them.

    Args:
        index: all rows, where the device can read them.
        limit: a row keeps at most this many ids.
        side: which end is truncated, as in `Ragged.truncate`; "error" for rows within the limit.
        pad_id: fills rows up.
        labelled: the ids have the bits of `gpuload.core.marks`; see `pad_labelled`.

    Returns:
        For `pad`, or for `pad_labelled`.
    """
    # A truncated row keeps its first `head` ids and the last `limit - head`.
    head = {"error": 0, "left": 0, "right": limit, "middle": limit // 2}[side]
    name = "pad_labelled" if labelled else "pad"
    return kernels.prepare(name, index.address, index.length, limit, head, pad_id)


def pad(kernels: Kernels, launch: Callable[..., None], rows: Array, width: int) -> dict[str, torch.Tensor]:
    """Makes one batch.

    Args:
        launch: from `prepare_pad`.
        rows: (B,) int64 row numbers in device memory.
        width: columns of the batch, at least as many as the longest row keeps.

    Returns:
        `input_ids`, `attention_mask` and `position_ids`, each int64 (B, width), written in order of the current stream.
        They are views of one tensor.
    """
    return _made(kernels, launch, rows, width, ("input_ids", "attention_mask", "position_ids"))


def pad_labelled(kernels: Kernels, launch: Callable[..., None], rows: Array, width: int) -> dict[str, torch.Tensor]:
    """As `pad`, padded on the right, and with `labels`: -100 in the padding and for tokens without loss."""
    return _made(kernels, launch, rows, width, ("input_ids", "attention_mask", "position_ids", "labels"))


def _made(
    kernels: Kernels, launch: Callable[..., None], rows: Array, width: int, names: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    count = len(rows)
    made, array = kernels.tensor(len(names), count, width)
    launch(kernels.blocks(count if width else 0), count, rows, width, array)
    return dict(zip(names, made.unbind(0), strict=True))
