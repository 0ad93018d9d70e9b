"""What the failure of an engine means to whoever waits for its load or its batches."""

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpuload.core.errors import MORE_MEMORY, ContextLostError, DeviceError, GpuloadError, HostMemoryError
from gpuload.engines.protocol import Engine

_FAILURES = (RuntimeError, MemoryError, GpuloadError)  # what CUDA, CuPy, cuDF and torch raise, and what says more


class MisreadError(DeviceError):
    """A file of which a device has read other rows than Arrow does: the load begins again, and Arrow reads it."""


def explained(engine: Engine, error: Exception) -> Exception:
    """The error that the caller of a load should see; `error` itself where it says enough.

    After the failure of a device, the memory of the failed load is given back, and the device is asked whether it still
    works: an illegal access, say, destroys what the process has there, whoever reports it, and however late.

    Returns:
        ContextLostError: nothing in this process can use the device any more.
        DeviceError: the device has too little memory.
        HostMemoryError: the host has.
        error: otherwise; a device still works, so another engine may go on.
    """
    if engine.name == "cpu":
        if isinstance(error, MemoryError) and not isinstance(error, GpuloadError):
            return HostMemoryError(f"out of memory while loading ({error}): {MORE_MEMORY}")
        return error
    release(error)
    if isinstance(error, ContextLostError):
        return error
    if lost := engine.lost():
        return context_lost(engine.device, error, lost)
    if isinstance(error, MemoryError) and not isinstance(error, GpuloadError):
        return DeviceError(out_of_memory("loading"))
    return error


@contextmanager
def explaining(kernels: Any, work: str) -> Iterator[None]:
    """A block of work on a device after a load, in words such as "making a batch", whose errors say what to do. What it
    has allocated is given back.

    Raises:
        ContextLostError: nothing in this process can use the device any more.
        DeviceError: the device has too little memory, or failed in another way.
    """
    try:
        yield
    except Exception as error:
        release(error)
        if lost := kernels.lost():
            raise context_lost(kernels.device, error, lost) from error
        # What CUDA, CuPy and torch raise. Other errors are those of data and arguments.
        if isinstance(error, GpuloadError) or not isinstance(error, RuntimeError | MemoryError):
            raise
        if isinstance(error, MemoryError) or "out of memory" in str(error):
            raise DeviceError(
                f"out of GPU memory while {work} ({one_line(error)}): free GPU memory, or make smaller batches"
            ) from error
        raise DeviceError(
            f"{kernels.device} failed while {work} ({one_line(error)}): set GPULOAD_SYNC=1 in the environment, which "
            "names the kernel, or load with device='cpu'"
        ) from error


def context_lost(device: Any, error: Exception, lost: str) -> ContextLostError:
    """What to raise after an error behind which a device does not work any more, because of what `lost` says: after
    the first one, since waits for streams and the end of the pool fail, too, and their errors say less."""
    while not isinstance(error, GpuloadError) and isinstance(error.__context__, _FAILURES):
        error = error.__context__
    return ContextLostError(
        f"context lost: {device} failed ({one_line(error)}), and nothing in this process can use it any "
        f"more ({lost}). Start the process again; with GPULOAD_SYNC=1 in the environment, the error names the "
        "kernel. device='cpu' does without the GPU"
    )


def out_of_memory(stage: str) -> str:
    """The message of a `DeviceError`."""
    return f"out of GPU memory while {stage}: raise gpu_memory_limit, free GPU memory, or use device='cpu'"


def one_line(error: BaseException) -> str:
    """The type of an error, and the beginning of what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.300}".rstrip(": ")


def release(error: BaseException) -> None:
    """Forgets the local variables of the functions that an error has left: arrays of a failed load would otherwise keep
    their memory for as long as the error, or a cycle of objects that it belongs to, exists."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)  # those that still run are left alone
            waiting += [one.__cause__, one.__context__]
    gc.collect()
