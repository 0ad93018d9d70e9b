"""Where a GPU record was made: GPU, driver, packages, and what is missing."""

import importlib.metadata
import platform
import shutil
import subprocess
from typing import Any

import torch

from bench.gpu_rig import absent, cudf_missing, open_rig
from bench.gpu_run import Note, Task
from bench.inputs import VERL_PYTHON
from bench.machine import circumstances
from gpuload.engines.device import cuda

_PACKAGES = (
    "torch transformers tokenizers gigatoken fastokens awkward pyarrow numpy cupy-cuda13x cupy-cuda12x pylibcudf-cu13 "
    "pylibcudf-cu12 rmm-cu13 rmm-cu12 cuda-bindings verl"
).split()


def machine(task: Task, note: Note) -> None:
    """The facts, and whether a kernel runs at all."""
    about = circumstances()
    about.pop("commit")
    note("machine", **about, python=platform.python_version())
    note("packages", **_versions())
    note("not here", **_not_here())
    rig = open_rig(task)
    if not rig.rehearsal:
        note("GPU", **_gpu(rig.device))
    cuda.self_test(rig.kernels)
    note("kernels", right=True)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _not_here() -> dict[str, str]:
    """What sections would use, and what then is not measured."""
    reasons = {
        "cuDF": cudf_missing(),
        "gigatoken": absent(["gigatoken", "awkward"]),
        "fastokens": absent(["fastokens"]),
        "verl": None if VERL_PYTHON.exists() else absent(["verl"]),
        "compute-sanitizer": None if shutil.which("compute-sanitizer") else "not on the PATH",
    }
    return {name: why for name, why in reasons.items() if why}


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "not told: no nvidia-smi"
    import cupy

    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "driver": driver,
        "driver_cuda": _dotted(cupy.cuda.runtime.driverGetVersion()),
        "cupy_cuda": _dotted(cupy.cuda.runtime.runtimeGetVersion()),
        "torch_cuda": torch.version.cuda,
    }


def _dotted(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
