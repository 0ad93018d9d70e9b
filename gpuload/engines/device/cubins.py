"""Machine code of the kernels in a wheel: the first load on a machine does not compile them.

    make cubins        # or python -m gpuload.engines.device.cubins: compiles them, with nvcc, next to the source

Files are named after the source and the GPUs that they are for, so those of another source are never loaded. Where
there is none that fits, as in a checkout, NVRTC compiles.
"""

import hashlib
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

from gpuload.core.errors import DeviceError
from gpuload.core.files import replacing
from gpuload.engines.device.kernel_source import source

ARCHITECTURES = (80, 90, 100, 120)
"""Compute capabilities, times 10. Code for one runs on those of the same major and no smaller minor number."""


def folder() -> Path:
    """Where the files are."""
    return Path(str(resources.files("gpuload.engines.kernels")))


def _file(architecture: int) -> Path:
    return folder() / f"sm_{architecture}-{hashlib.sha256(source().encode()).hexdigest()[:16]}.cubin"


def shipped(capability: str) -> Path | None:
    """The file for a GPU of a capability such as "90", as CuPy has it; None if there is none of this source for it."""
    number = int(capability)
    fitting = [one for one in ARCHITECTURES if one // 10 == number // 10 and one <= number]
    file = _file(max(fitting)) if fitting else None
    return file if file is not None and file.exists() else None


def compile_all(architectures: tuple[int, ...] = ARCHITECTURES) -> list[Path]:
    """Compiles the files, and removes those of other sources; a `DeviceError` if nvcc is missing, or fails."""
    if (nvcc := shutil.which("nvcc")) is None:
        raise DeviceError("kernels cannot be compiled for GPUs: nvcc is not on the PATH: install the CUDA toolkit")
    for old in folder().glob("*.cubin"):
        old.unlink()
    made = []
    for architecture in architectures:
        with replacing(_file(architecture)) as unfinished:
            text = unfinished.with_suffix(".cu")
            text.write_text(source())
            command = [nvcc, "-std=c++17", "-cubin", f"-arch=sm_{architecture}", "-o", str(unfinished), str(text)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            text.unlink()
            if done.returncode:
                raise DeviceError(f"kernels cannot be compiled for GPUs: {done.stderr.strip()[-500:]}")
        made.append(_file(architecture))
    return made


if __name__ == "__main__":
    for file in compile_all():
        print(f"{file} ({file.stat().st_size:,} bytes)", file=sys.stderr)
