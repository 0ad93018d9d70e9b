"""Which engine a load uses."""

from collections.abc import Callable
from typing import Any

from gpuload.engines.device.engine import DeviceEngine
from gpuload.engines.protocol import Engine
from gpuload.errors import DeviceError
from gpuload.options import Options
from gpuload.reference.reference import Reference

EngineBuilder = Callable[[Options, Reference, bool], Engine]
"""Options, tokenizer, and whether the tokenizer object itself must do everything → an engine."""


def choose_engine(
    options: Options, reference: Any, exact_only: bool = False, make: type[DeviceEngine] = DeviceEngine
) -> Engine:
    """The engine that `options.device` names: of the class `make`, or of its `host_engine`.

    Raises:
        DeviceError: a GPU is asked for and not available.
    """
    device, notes = choose_device(options.device)
    if device == "cpu":
        return make.host_engine(reference, exact_only, notes)
    from gpuload.engines.device import cuda

    return cuda.cuda_engine(reference, device, options.gpu_memory_limit, options.tokens_on, exact_only, make)


def choose_device(device: str) -> tuple[str, tuple[str, ...]]:
    """What a load uses of what the option `device` allows.

    Returns:
        "cpu", or the same device; and lines for the report.

    Raises:
        DeviceError: a GPU is asked for and not available.
    """
    if device == "cpu":
        return "cpu", ()
    from gpuload.engines.device import cuda

    why_not = cuda.unavailable_reason(device)
    if why_not is None:
        return device, ()
    if device != "auto":
        raise DeviceError(f"device={device!r}: {why_not}; or use device='cpu' or 'auto'")
    return "cpu", (f"no GPU is used: {why_not}",)
