"""What a cluster has: whether Ray is installed, GPUs, and how many workers fit."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from gpuload.core import errors
from gpuload.core.errors import DeviceError, GpuloadError, OptionError
from gpuload.sources.parallel import PART_ROWS


@dataclass(frozen=True)
class Scale:
    """How work is spread over a cluster: `core.keywords.WorkerKeywords`."""

    concurrency: int | tuple[int, int] | None = None
    num_cpus: float = 1
    rows_per_task: int = PART_ROWS

    def __post_init__(self) -> None:
        rows = self.rows_per_task
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise OptionError(f"rows_per_task={rows!r}: expected an integer > 0")

    @staticmethod
    def parse(given: Mapping[str, Any]) -> tuple["Scale", dict[str, Any]]:
        """The scale, and the other keyword arguments; an `OptionError` for an invalid value."""
        names = {field.name for field in fields(Scale)}
        scale = Scale(**{name: value for name, value in given.items() if name in names})
        return scale, {name: value for name, value in given.items() if name not in names}


@dataclass(frozen=True)
class Workers:
    """How workers are started."""

    concurrency: int | tuple[int, int]  # how many: a number, or (at least, at most)
    num_cpus: float  # of each
    num_gpus: float  # of each


def import_ray() -> Any:
    """The module `ray.data`'s parent; a `GpuloadError` if it is not installed."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise GpuloadError(f"this needs Ray Data ({error}): pip install 'gpuload[ray]' on all nodes") from error
    return ray


def connect(address: str | None) -> None:
    """Connects to the cluster of an address, or of `$RAY_ADDRESS`, or a new one of this machine, unless this process is
    connected already; a `GpuloadError` if there is no cluster at this address."""
    ray = import_ray()
    if ray.is_initialized():
        return
    try:
        ray.init(address=address)
    except Exception as error:  # Ray has no class for it
        raise GpuloadError(
            f"cannot connect to the Ray cluster {address or '$RAY_ADDRESS'} ({error}): check its address and that it "
            "runs, and that its versions of Ray and Python are those of this process"
        ) from error


def workers_for(device: str, parts: int, scale: Scale) -> tuple[Workers, str]:
    """How many workers there are for a number of parts, and the device of each, from the option, an `OptionError` if
    that is invalid; a `DeviceError` if a GPU is asked for, and the cluster has none."""
    ray = import_ray()
    if device not in ("auto", "cpu", "cuda"):
        raise OptionError(f"device={device!r}: Ray chooses the GPU of each worker: use 'auto', 'cpu' or 'cuda'")
    connect(None)
    there = ray.cluster_resources()
    gpus, cpus = int(there.get("GPU", 0)), int(there.get("CPU", 0))
    if device == "cuda" and not gpus:
        raise DeviceError(
            f"device='cuda': the Ray cluster has no GPU ({cpus} CPUs on {len(ray.nodes())} nodes): add a node with "
            "GPUs, or use device='cpu' or 'auto'"
        )
    concurrency, num_cpus = scale.concurrency, scale.num_cpus
    on_gpus = device != "cpu" and gpus > 0
    if concurrency is None:
        fit = gpus if on_gpus else int(cpus / num_cpus) if num_cpus else cpus
        concurrency = (1, max(1, min(fit, parts)))
    return Workers(concurrency, num_cpus, float(on_gpus)), "cuda" if on_gpus else "cpu"


@contextmanager
def own_errors() -> Iterator[None]:
    """Raises gpuload's errors in place of those in which Ray has wrapped them, with the trace of another process."""
    try:
        yield
    except GpuloadError:
        raise
    except Exception as error:
        if (own := _own_error(error)) is None:
            raise
        raise own from None


def _own_error(error: BaseException) -> GpuloadError | None:
    """The error of a worker. Ray keeps that of a task as a cause, and that of an actor's constructor only as text."""
    cause: Any = error
    while cause is not None:
        if found := _OWN.findall(str(cause)):
            name, message = found[-1]
            kind = getattr(errors, name, GpuloadError)
            return kind(message) if issubclass(kind, GpuloadError) else None
        cause = getattr(cause, "cause", None) or cause.__cause__
    return None


_OWN = re.compile(rf"{re.escape(errors.__name__)}\.(\w+): (.+)")
