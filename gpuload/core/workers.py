"""What a worker process of a DataLoader does once, before its first batch, so that its batches cost less.

Two things take more time in a worker than its rows:

1. A forked worker shares the memory of its parent until one of them writes to it. A full garbage collection in the
   worker writes to every object that it inherited: a hundred megabytes are copied, and a batch is late by a third of a
   second. `gc.freeze` excludes these objects from collections.
2. torch sends a tensor to the parent as a file descriptor, for which the parent connects to a thread of the worker that
   has to wait for the one that makes the next batch. Tensors of a few kilobytes (verl has one of a byte per row) are
   sent with the rest of the batch instead.
"""

import gc
import os
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing.reductions import reduce_tensor

_MOST_BYTES = 64 << 10

_prepared = 0  # the process that has been prepared: a forked one inherits its parent's


def prepare_worker() -> None:
    """Prepares this process, if it is a worker of a DataLoader that has not been prepared yet."""
    global _prepared
    if torch.utils.data.get_worker_info() is None or _prepared == os.getpid():
        return
    _prepared = os.getpid()
    gc.freeze()
    ForkingPickler.register(torch.Tensor, _reduce)


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor is pickled for another process: as an array if it is small, as torch does otherwise."""
    if _is_plain(tensor) and tensor.nbytes <= _MOST_BYTES:
        return torch.from_numpy, (tensor.numpy(),)
    reduced: tuple[Any, ...] = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return reduced


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether NumPy has an array that is the same in memory, which no other process has."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.requires_grad:
        return False
    if tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor.untyped_storage().is_shared():
        return False
    return tensor.is_contiguous() and tensor.dtype in _DTYPES


_DTYPES = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64)
)
