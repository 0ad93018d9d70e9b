"""Which packages and GPUs this machine has."""

import importlib.metadata
import subprocess

PACKAGES = (
    "torch transformers tokenizers gigatoken pyarrow awkward msgspec numpy fsspec datasets cudf cupy pylibcudf rmm verl"
).split()
# Packages whose distributions are named after the CUDA version they are built for.
_DISTRIBUTIONS = {name: (f"{name}-cu13", f"{name}-cu12") for name in ("cudf", "pylibcudf", "rmm")}
_DISTRIBUTIONS["cupy"] = ("cupy-cuda13x", "cupy-cuda12x")


def versions() -> dict[str, str]:
    """The installed packages that matter, with their versions."""
    return {name: version for name in PACKAGES if (version := version_of(name))}


def version_of(package: str) -> str | None:
    for name in (package, *_DISTRIBUTIONS.get(package, ())):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def nvidia_smi(*arguments: str) -> str:
    """What the program prints; nothing if it is missing or fails."""
    try:
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
