"""Whether the kernels of this version may be trusted on a GPU: each must return known answers there once.

`gpuload doctor --gpu` runs them, in processes of their own with a limit of time: a kernel that reads wrong memory ends
its process, and one that waits for ever is stopped. Before the first load on a GPU, that step of the command runs here;
what it found is kept in the cache directory, for this GPU, driver, CuPy, compiler and source of the kernels, and serves
all later loads. Of several processes of a machine one runs it, and the others wait.
"""

import hashlib
import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuload._version import __version__
from gpuload.core.files import cache_root, locked, replacing
from gpuload.engines.device.cubins import shipped
from gpuload.engines.device.kernel_source import source
from gpuload.engines.device.kernels import load_cupy

LIMIT = 600.0  # seconds for all known answers, which include the compilation of the kernels
_EXCLUSIVE = 3  # cudaComputeModeExclusiveProcess
_COMPUTE_MODE = 20  # cudaDevAttrComputeMode

logger = logging.getLogger(__name__)


def distrust(number: int) -> str | None:
    """Why no load may run on a GPU of this process, or None if its kernels return what they should.

    `GPULOAD_GPU_CHECK=off` trusts every GPU. In exclusive-process mode, which permits no second process, a GPU is
    trusted without a verdict: run `gpuload doctor --gpu` before the process that uses it.
    """
    if os.environ.get("GPULOAD_GPU_CHECK") == "off":
        return None
    about = described(number)
    path = place_of(about)
    if (known := _read(path)) is None:
        if about["compute_mode"] == _EXCLUSIVE:
            logger.warning(
                "gpuload: GPU %s is in exclusive-process mode, and its kernels have not been checked: run "
                "`gpuload doctor --gpu` before this process",
                number,
            )
            return None
        try:
            with locked(path.parent / "check.lock"):
                known = _read(path)
                if known is None:
                    known = _check(number, path)
        except OSError as error:
            logger.warning("gpuload: the kernels of GPU %s were not checked: %s", number, error)
            return None
    return known or None


def described(number: int) -> dict[str, Any]:
    """What a verdict is about. Initializes CUDA."""
    cupy = load_cupy()
    shipped_code = shipped(cupy.cuda.Device(number).compute_capability)
    runtime, name = cupy.cuda.runtime, cupy.cuda.runtime.getDeviceProperties(number)["name"]
    return {
        "gpu": name.decode() if isinstance(name, bytes) else str(name),
        "compute_mode": runtime.deviceGetAttribute(_COMPUTE_MODE, number),
        "driver": runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "nvrtc": list(cupy.cuda.nvrtc.getVersion()),
        "gpuload": __version__,
        "source": hashlib.sha256(source().encode()).hexdigest(),
        "machine_code": hashlib.sha256(shipped_code.read_bytes()).hexdigest() if shipped_code else "",
    }


def place_of(about: dict[str, Any]) -> Path:
    """The file of the verdict about what was `described`."""
    return cache_root() / "gpu" / f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]}.json"


def keep(path: Path, failure: str) -> str:
    """Writes a verdict.

    Args:
        failure: which answers are wrong; empty if none.

    Returns:
        Why the GPU is not trusted; empty if it is.
    """
    wrong = f"its kernels do not return known answers ({failure}): run `gpuload doctor --gpu`" if failure else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps({"wrong": wrong}))
    return wrong


def _read(path: Path) -> str | None:
    """The verdict of a file; None if there is none that can be read."""
    try:
        wrong = json.loads(path.read_text())["wrong"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return wrong if isinstance(wrong, str) else None


def _check(number: int, path: Path) -> str:
    logger.warning("gpuload: checking every kernel on GPU %s, once; `gpuload doctor --gpu` checks more", number)
    return keep(path, run_step("kernels", number, LIMIT).failure)


@dataclass(frozen=True)
class Step:
    """What became of a step of `doctor --gpu`."""

    output: str  # what it printed
    failure: str  # why it failed, in one line; empty if it did not


def run_step(name: str, number: int, limit: float, *more: str) -> Step:
    """Runs a step of `doctor --gpu` in a process of its own, in which each launch is waited for.

    Args:
        name: of the step.
        number: of the GPU.
        limit: seconds after which it is stopped.
        *more: arguments of the command.
    """
    command = [sys.executable, "-m", "gpuload", "doctor", "--gpu", str(number), "--gpu-step", name, *more]
    about = os.environ | {"GPULOAD_SYNC": "1", "GPULOAD_GPU_CHECK": "off"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False, env=about)
    except subprocess.TimeoutExpired as error:
        output = error.stdout or ""  # of a process that was stopped, it is bytes in some versions of Python
        output = output.decode(errors="replace") if isinstance(output, bytes) else output
        return Step(output, f"stopped after {limit:.0f} s, behind: {_last_line(output)}")
    if done.returncode < 0:
        return Step(done.stdout, f"ended by signal {-done.returncode}, behind: {_last_line(done.stdout)}")
    if done.returncode:
        return Step(done.stdout, _last_line(done.stderr or done.stdout))
    return Step(done.stdout, "")


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1].strip()[:500] if lines else "nothing was printed"
