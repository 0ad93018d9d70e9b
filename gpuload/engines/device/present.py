"""Whether there is a GPU at all, which a load asks before it imports what a GPU needs."""

import glob
import os

import torch


def absent_reason(device: str) -> str | None:
    """Why this process has no such GPU, or None. `cuda.unavailable_reason` also tries it."""
    if torch.version.cuda is None:
        if not _has_gpu():
            return "this machine has no NVIDIA GPU"
        return f"torch {torch.__version__} was built without CUDA: install a CUDA build of torch"
    if torch.cuda._is_in_bad_fork():
        return "this process was forked from one that had initialized CUDA: use the 'spawn' start method"
    count = torch.cuda.device_count()
    if not count:
        return "torch finds no NVIDIA GPU or driver: check nvidia-smi and CUDA_VISIBLE_DEVICES"
    if (number := number_of(device)) >= count:
        return f"there is no GPU {number}: torch finds {count}"
    return None


def number_of(device: str) -> int:
    """The number of the GPU that "auto", "cuda" or "cuda:N" names.

    Without a number it is torch's current one. Before torch has initialized CUDA, a launcher's `LOCAL_RANK` says which
    GPU the process is about to use, unless the process sees fewer GPUs: then each has been given its own. Later loads
    use the same one until somebody has chosen another for torch, whose first one is 0.
    """
    _, _, number = device.partition(":")
    if number:
        return int(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.current_device() or next(iter(_BY_RANK), 0)
    rank = os.environ.get("LOCAL_RANK", "")
    if rank.isdigit() and int(rank) < torch.cuda.device_count():
        _BY_RANK.add(int(rank))
        return int(rank)
    return 0


_BY_RANK: set[int] = set()
"""The GPU that `LOCAL_RANK` has named in this process."""


def _has_gpu() -> bool:
    """Whether a driver has made devices, as in Linux and in its subsystem of Windows; without any library."""
    return bool(glob.glob("/dev/nvidia[0-9]*")) or os.path.exists("/dev/dxg")
