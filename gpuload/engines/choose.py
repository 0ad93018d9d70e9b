"""Which engine a load uses."""

from collections.abc import Callable
from functools import partial
from typing import Any

from gpuload.core.errors import DeviceError
from gpuload.core.options import Options
from gpuload.engines.device.present import absent_reason
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.protocol import Engine
from gpuload.reference.reference import Reference

EngineBuilder = Callable[[Options, Reference, bool], Engine]
"""Options, tokenizer, and whether the tokenizer object itself must do everything → an engine."""


def choose_engine(
    options: Options,
    reference: Any,
    exact_only: bool = False,
    on_host: type[HostEngine] = HostEngine,
    on_device: Callable[..., Any] | None = None,
) -> Engine:
    """The engine that `options.device` names.

    Args:
        exact_only: the tokenizer object itself must do everything.
        on_host: the class of the host's engine, which also does what a device's cannot.
        on_device: makes a device's engine; None for that of prompts.

    Raises:
        DeviceError: a GPU is asked for and not available.
    """
    device = options.device
    notes: tuple[str, ...] = ()
    if device != "cpu":
        why_not = absent_reason(device)
        if why_not is None:
            from gpuload.engines.device import cuda  # here, because a fifth of the package's import is for GPUs

            why_not = cuda.unavailable_reason(device)
        if why_not is None:
            from gpuload.engines.device.engine import DeviceEngine

            return cuda.cuda_engine(
                reference,
                device,
                options.gpu_memory_limit,
                options.tokens_on,
                exact_only,
                partial(on_device or DeviceEngine, host_engine=on_host),
            )
        if device != "auto":
            raise DeviceError(f"device={device!r}: {why_not}; or use device='cpu' or 'auto'")
        notes = (f"no GPU is used: {why_not}",)
    return on_host(reference, exact_only, notes)
