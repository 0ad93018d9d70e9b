"""Which engine a load uses."""

from collections.abc import Callable
from typing import Any

from gpuload.core.errors import DeviceError
from gpuload.core.options import Options
from gpuload.engines.device.engine import DeviceEngine
from gpuload.engines.protocol import Engine
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
    device = options.device
    notes: tuple[str, ...] = ()
    if device != "cpu":
        from gpuload.engines.device import cuda

        why_not = cuda.unavailable_reason(device)
        if why_not is None:
            return cuda.cuda_engine(reference, device, options.gpu_memory_limit, options.tokens_on, exact_only, make)
        if device != "auto":
            raise DeviceError(f"device={device!r}: {why_not}; or use device='cpu' or 'auto'")
        notes = (f"no GPU is used: {why_not}",)
    return make.host_engine(reference, exact_only, notes)
