"""Loading in a Ray task with a GPU.

Ray hides GPUs from processes that did not request one. verl's driver, which creates the datasets, is such a process.
"""

import time
from dataclasses import replace

from gpuload.integrations.verl.reading import LoadedRows, LoadRequest, load_rows

GPU_WAIT_SECONDS = 10.0
"""How long to wait for a free GPU: Ray counts the GPU of a finished task as taken for a moment."""


def no_gpu_task_reason() -> str | None:
    """Return why no Ray task with a GPU can start now, or None if one can.

    Checked before a task is submitted, because Ray would wait for a missing GPU indefinitely.
    """
    import ray

    if not ray.is_initialized():
        return "Ray is not running"
    if not ray.cluster_resources().get("GPU"):
        return "the Ray cluster has no GPU"
    deadline = time.monotonic() + GPU_WAIT_SECONDS
    while ray.available_resources().get("GPU", 0) < 1:
        if time.monotonic() > deadline:
            return "all GPUs of the Ray cluster are in use"
        time.sleep(0.1)
    return None


def load_in_task(request: LoadRequest) -> LoadedRows:
    """Run `load_rows` in a Ray task with one GPU, and return the rows in host memory. Every node must be able to read
    the files.

    Raises:
        GpuloadError: as `load_rows`.
    """
    import ray

    # The task may run on another node, which has other disks.
    request = replace(request, options=replace(request.options, store="memory"))
    loaded: LoadedRows = ray.get(ray.remote(num_gpus=1, max_retries=0)(_load_on_gpu).remote(request))
    return loaded


def _load_on_gpu(request: LoadRequest) -> LoadedRows:
    """Body of the task: `device="auto"` becomes "cuda" if the GPU works, so that a failure there is an error."""
    from gpuload.engines.device import cuda

    if request.options.device == "auto" and cuda.unavailable_reason("cuda") is None:
        request = replace(request, options=replace(request.options, device="cuda"))
    return load_rows(request)
