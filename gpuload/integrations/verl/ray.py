"""A load where the GPUs are: Ray hides them from a process that asked for none, as verl's driver does."""

import time
from dataclasses import replace

from gpuload.integrations.verl.reading import Loaded, LoadRequest, load_rows

PATIENCE = 10.0
"""Seconds. Ray's books are late: the GPU of a task that has just ended still counts as taken for a moment."""


def obstacle() -> str | None:
    """Why there can be no Ray task with a GPU now, or None. It would be waited for without end."""
    import ray

    if not ray.is_initialized():
        return "Ray is not running"
    if not ray.cluster_resources().get("GPU"):
        return "Ray knows of no GPU"
    deadline = time.monotonic() + PATIENCE
    while ray.available_resources().get("GPU", 0) < 1:
        if time.monotonic() > deadline:
            return "all of Ray's GPUs are taken"
        time.sleep(0.1)
    return None


def load_in_task(request: LoadRequest) -> Loaded:
    """`load_rows` in a Ray task that has a GPU. The files must be readable there, and what comes back is Arrow.

    Raises:
        whatever `load_rows` raises.
    """
    import ray

    loaded: Loaded = ray.get(ray.remote(num_gpus=1, max_retries=0)(_load).remote(request))
    return loaded


def _load(request: LoadRequest) -> Loaded:
    """In the task. Who asks for a GPU with "auto" means it, where it works."""
    from gpuload.engines.device import cuda

    if request.options.device == "auto" and cuda.unavailable_reason("cuda") is None:
        request = replace(request, options=replace(request.options, device="cuda"))
    return load_rows(request)
