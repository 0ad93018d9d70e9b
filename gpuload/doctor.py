"""What this machine has, and what of it gpuload can use."""

import importlib.metadata
import importlib.util
import os
import platform
import subprocess

from gpuload import __version__

_PACKAGES = (
    "torch transformers tokenizers gigatoken pyarrow awkward numpy fsspec datasets cudf cupy pylibcudf verl".split()
)
# Packages whose distributions are named after the CUDA they are built for.
_DISTRIBUTIONS = {"cudf": ("cudf-cu13", "cudf-cu12"), "pylibcudf": ("pylibcudf-cu13", "pylibcudf-cu12")}
_DISTRIBUTIONS["cupy"] = ("cupy-cuda13x", "cupy-cuda12x")


def diagnose() -> str:
    """The report, a line per fact. Imports nothing heavy and starts no GPU."""
    lines = [
        f"gpuload {__version__}, Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores",
        "",
        "packages",
        *(f"  {name:13} {_version(name) or 'not installed'}" for name in _PACKAGES),
        "",
        "engines",
        f"  cpu           {_cpu()}",
        f"  cuda          {_cuda()}",
    ]
    return "\n".join(lines)


def _version(package: str) -> str | None:
    for name in (package, *_DISTRIBUTIONS.get(package, ())):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _cpu() -> str:
    if importlib.util.find_spec("gigatoken") is None:
        return "available, slowly: gigatoken is not installed (pip install gigatoken)"
    return "available"


def _cuda() -> str:
    gpus = _gpus()
    seen = f"{', '.join(gpus)} is here, but " if gpus else "no NVIDIA GPU found, and "
    return f"not available: {seen}this version has no GPU engine yet"


def _gpus() -> list[str]:
    """The names of the GPUs that the driver's own tool lists: asking torch would start CUDA."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in found.stdout.splitlines() if line.strip()]
