"""Description of the machine, the packages and the commit of a measurement. Needs the standard library only."""

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.process import run_command

PACKAGES = (
    "gpuload gigatoken fastokens transformers tokenizers datasets verl trl accelerate llamafactory nemo_automodel "
    "nemo_rl ray pandas awkward pyarrow numpy torch cupy-cuda13x cupy-cuda12x pylibcudf-cu13 pylibcudf-cu12 rmm-cu13 "
    "rmm-cu12 cuda-bindings"
).split()


def machine() -> dict[str, Any]:
    """Describe the machine, the time and the load average at this moment."""
    return {
        "date": now(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 2),
    }


def about(command: str, tokenizer: str, repeats: int, quick: bool, **more: Any) -> dict[str, Any]:
    """Describe a run on the CPU at its start: machine, commit and parameters."""
    facts = {"commit": commit(), "command": command, "tokenizer": Path(tokenizer).name, "repeats": repeats}
    return machine() | facts | {"quick": quick} | more


def now() -> str:
    """Return the time in UTC, to the minute."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def commit() -> str:
    """Return the commit of the checkout, with a plus where tracked files other than records differ from it."""

    def git(*arguments: str) -> str:
        done = run_command(["git", *arguments])
        return done.stdout.strip() if done.returncode == 0 else ""

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results", ":!bench/records")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed or imported."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # a checkout on the path is not installed
            if number := getattr(sys.modules.get(name), "__version__", None):
                found[name] = str(number)
    return found


def nvidia_smi(query: str) -> str | None:
    """Return a property of the first GPU from the driver's tool, which does not initialize CUDA in this process."""
    try:
        done = run_command(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], seconds=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def gpu(device: Any) -> dict[str, Any]:
    """Describe a GPU.

    Args:
        device: A `torch.device`.
    """
    import cupy
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "driver": nvidia_smi("driver_version") or "unknown: nvidia-smi failed",
        "driver_cuda": _dotted(cupy.cuda.runtime.driverGetVersion()),
        "cupy_cuda": _dotted(cupy.cuda.runtime.runtimeGetVersion()),
        "torch_cuda": torch.version.cuda,
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or "unknown"
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    # Virtual machines often hide the model's name; family and number still identify it.
    numbers = ", ".join(f"{key} {facts[key]}" for key in ("cpu family", "model") if key in facts)
    name = facts.get("model name", "unknown")
    return f"{name} ({numbers})" if numbers else name


def _dotted(number: int) -> str:
    """CUDA's version number, 13020, as 13.2."""
    return f"{number // 1000}.{number % 1000 // 10}"
