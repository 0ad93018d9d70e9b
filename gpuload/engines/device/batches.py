"""Batches from the store of tokens, each by one kernel: padded, or packed.

The store is in device memory (4 bytes per token), or in host memory, which is then pinned. In the second case the same
kernel reads the ids of a batch's rows, and no others, across the bus. A loader's batches are made one ahead of the
consumer, on a stream of their own: making one overlaps with the work on the one before it. The kernel writes into a
tensor of torch, which it reaches through DLPack: torch manages its memory, streams and lifetime, `record_stream`
included.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gpuload.core.arrays import Ragged, offsets_of
from gpuload.engines.batches import OTHER_PLANES, BatchLayout
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.packs import packed, prepare_pack
from gpuload.engines.device.store import DeviceStore, Index, to_device
from gpuload.engines.failures import explaining
from gpuload.engines.host.batches import HostBatches
from gpuload.engines.protocol import TokenStore
from gpuload.packing import Plan
from gpuload.packing.plan import whole_rows


class DeviceBatches:
    """The `Batches` of a device. All tokens are in device memory; in host memory, which is pinned with the first batch;
    or on disk. In another process, forked or spawned, it makes host tensors: a process cannot use the CUDA context of
    another one."""

    def __init__(self, kernels: Kernels, store: TokenStore, layout: BatchLayout, pad_id: int):
        self._kernels, self._layout, self._pad_id = kernels, layout, pad_id
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

    @cached_property
    def _pad(self) -> Callable[..., None]:
        return self._prepared(lambda index: prepare_pad(self._kernels, index, self._layout, self._pad_id))

    @cached_property
    def _pack(self) -> Callable[..., None]:
        return self._prepared(lambda index: prepare_pack(self._kernels, index, self._layout.weights))

    def _prepared(self, prepare: Callable[[Index], Callable[..., None]]) -> Callable[..., None]:
        """A launch for batches on any stream: what it reads is there, and is freed when nothing reads it any more."""
        index = self._readable.index
        with self._kernels.lasting():
            launch = prepare(index)
        self._kernels.synchronize()
        return launch

    @property
    def _on_host(self) -> HostBatches:
        """What makes batches in another process."""
        return HostBatches(self._layout, self._pad_id)

    @property
    def _elsewhere(self) -> bool:
        """Whether this is another process than the one that the device's memory belongs to."""
        return os.getpid() != self._process

    @property
    def _on_disk(self) -> bool:
        """Whether the store is in files: kernels cannot read it, so the rows of each batch are copied."""
        return not isinstance(self._store, Ragged | DeviceStore)

    def __call__(self, plan: Plan, rows: Callable[[], Ragged], width: int) -> dict[str, torch.Tensor]:
        if self._elsewhere:
            return self._on_host(plan, rows, width)
        taken = rows() if self._on_disk else None
        with self._explaining(), self._kernels.current():
            if taken is not None:
                with copied(self._kernels, taken) as index:
                    launch = prepare_pad(self._kernels, index, self._layout, self._pad_id)
                    plan = whole_rows(np.arange(len(taken)), taken.lengths)
                    return pad(self._kernels, launch, plan, width, self._layout)
            return pad(self._kernels, self._pad, plan, width, self._layout)

    def packed(self, pieces: Plan, tokens: Callable[[], Ragged]) -> dict[str, Any]:
        if self._elsewhere:
            return self._on_host.packed(pieces, tokens)
        weights = self._layout.weights
        rows = Ragged(tokens().values, offsets_of(pieces.lengths)) if self._on_disk else None  # one of each piece
        with self._explaining(), self._kernels.current():
            if rows is not None:
                plan = replace(pieces, rows=np.arange(len(rows)), first=np.zeros(len(rows), np.int64))
                with copied(self._kernels, rows) as index:
                    return packed(self._kernels, prepare_pack(self._kernels, index, weights), plan, bool(weights))
            return packed(self._kernels, self._pack, pieces, bool(weights))

    def ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches, each of them made while the consumer works on the one before it."""
        if self._elsewhere:
            yield from batches
            return
        coming = self._next(batches)
        while coming is not None:
            with self._explaining():
                self._kernels.rejoin()
            ready = coming
            coming = self._next(batches)
            yield ready
            del ready  # so that its memory can serve the next batch

    def _next(self, batches: Iterator[Any]) -> Any:
        """The next batch, made on the stream of its own; None if there is none."""
        with ExitStack() as stack:
            with self._explaining():
                stack.enter_context(self._kernels.aside())
            return next(batches, None)

    def _explaining(self) -> AbstractContextManager[None]:
        return explaining(self._kernels, "making a batch")

    def __reduce__(self) -> tuple[type[HostBatches], tuple[BatchLayout, int]]:
        return HostBatches, (self._layout, self._pad_id)


@contextmanager
def copied(kernels: Kernels, rows: Ragged) -> Iterator[Index]:
    """Rows of a batch in host memory, where kernels can read them for the length of the block.

    CuPy copies them to the device through its pool of pinned memory, in order of the stream: pages of a file cannot be
    pinned in place, as the system may drop them.
    """
    ids = to_device(kernels, rows)
    yield Index(kernels.address(ids.values) + 4 * ids.offsets[:-1], ids.lengths)
    del ids  # kernels that were launched in the block run before its memory is used for anything else on this stream


def prepare_pad(kernels: Kernels, index: Index, layout: BatchLayout, pad_id: int) -> Callable[..., None]:
    """Prepares the launch, for `pad`, of the kernel that takes pieces of rows from the store and pads them. The caller
    keeps the memory that the addresses of the rows point into."""
    planes = sum(1 << number for number, name in enumerate(OTHER_PLANES) if name in layout.planes)
    planes += bool(layout.weights) << len(OTHER_PLANES)
    weights = kernels.xp.asarray(np.array(layout.weights, np.float32))
    return kernels.prepare("pad", index.address, pad_id, layout.side == "left", planes, weights)


def pad(
    kernels: Kernels, launch: Callable[..., None], plan: Plan, width: int, layout: BatchLayout
) -> dict[str, torch.Tensor]:
    """One padded batch of B sequences, none of which has more than `width` tokens, by a launch that `prepare_pad` has
    prepared for the same layout.

    Returns:
        The planes of the layout, each int64 (B, width), and `loss_weight`, float32: views of one tensor, which is
        written in order of the current stream.
    """
    count, cells = len(plan), len(plan) * width
    size = len(layout.planes) * cells
    made, array = kernels.tensor(size + (-(-cells // 2) if layout.weights else 0))
    # One transfer for the whole batch.
    piece = kernels.xp.asarray(np.concatenate([offsets_of(plan.lengths), plan.rows, plan.first, plan.offsets]))
    launch(kernels.blocks(count if width else 0), count, len(plan.rows), piece, width, array)
    planes = made[:size].view(len(layout.planes), count, width).unbind(0)
    weight = {"loss_weight": made[size:].view(torch.float32)[:cells].view(count, width)} if layout.weights else {}
    return {**dict(zip(layout.planes, planes, strict=True)), **weight}
