"""Whether the kernels of this version may be trusted on a GPU: each must return known answers there once.

`gpuload doctor --gpu` runs them, in processes of their own with a limit of time: a kernel that reads wrong memory ends
its process, and one that waits for ever is stopped. Before the first load on a GPU, that step of the command runs here,
with the machine code that loads run. Of several processes of a machine one runs it, and the others wait.

A verdict is about code: right or wrong answers are kept in the cache directory for this kind of GPU, driver, CuPy,
compiler and source of the kernels, and serve all later loads, on any such GPU. A check that comes to no answers proves
nothing, for instance if the GPU is full: processes of this machine that already run do not use it, and later ones check
again.
"""

import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gpuload._version import __version__
from gpuload.core.files import cache_root, locked, replacing
from gpuload.engines.device.cubins import shipped
from gpuload.engines.device.kernel_source import source
from gpuload.engines.device.kernels import load_cupy, on_gpu

LIMIT = 600.0  # seconds for all known answers, which include the compilation of the kernels
WRONG = 3  # the exit status of a step that found wrong results

_KILLED = 10.0  # seconds that a process may take to end once it is killed: one that waits for its driver never does
EXCLUSIVE = 3  # cudaComputeModeExclusiveProcess
_COMPUTE_MODE = 20  # cudaDevAttrComputeMode
_STARTED = time.time()

UNCHECKED: dict[int, str] = {}
"""The number of a GPU that this process trusts without a verdict → a line for reports."""

logger = logging.getLogger(__name__)


def distrust(number: int) -> str | None:
    """Why no load may run on a GPU of this process, or None if its kernels return what they should.

    `GPULOAD_GPU_CHECK=off` trusts every GPU. In exclusive-process mode, which permits no second process, a GPU is
    trusted without a verdict, as reports say: run `gpuload doctor --gpu` before the process that uses it.
    """
    if os.environ.get("GPULOAD_GPU_CHECK") == "off":
        return None
    about = described(number)
    path = place_of(about)
    if (known := _read(path, since=_STARTED)) is not None:
        return known or None
    if about["compute_mode"] == EXCLUSIVE:
        if (known := _read(path, since=0)) is None:
            UNCHECKED[number] = (
                f"GPU {number} is in exclusive-process mode, and its kernels have not been checked: run "
                "'gpuload doctor --gpu' before this process"
            )
            logger.warning("gpuload: %s", UNCHECKED[number])
        return known
    with alone():
        if (known := _read(path, since=_STARTED)) is None:
            logger.warning("gpuload: checking every kernel on GPU %s, once; `gpuload doctor --gpu` checks more", number)
            done = run_step("kernels", number, LIMIT)
            known = keep(path, done.failure, None if done.wrong or not done.failure else time.time())
    return known or None


@contextmanager
def alone() -> Iterator[None]:
    """Waits until no other process of this user and machine checks kernels. The file of the lock is the machine's own:
    the cache directory may be shared with others, or be another one for each process. Where there are no locks, nobody
    waits."""
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(locked(Path(tempfile.gettempdir()) / f"gpuload-{os.getuid()}-gpu.lock"))
        yield


def described(number: int) -> dict[str, Any]:
    """What a verdict is about. Initializes CUDA."""
    cupy = load_cupy()
    with on_gpu(number):
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


def keep(path: Path, failure: str, at: float | None = None) -> str:
    """Writes a verdict, if that can be done: what was found counts in any case.

    `failure` says which answers are wrong, or why there are none; it is empty if all are right. A check that came to no
    answers has a time `at` which it was made: processes that were started later check again. Returns why the GPU is not
    trusted; empty if it is.
    """
    what = "do not return known answers" if at is None else "could not be checked"
    wrong = f"its kernels {what} ({failure}): run `gpuload doctor --gpu`" if failure else ""
    about = {"wrong": wrong} | ({} if at is None else {"machine": platform.node(), "at": at})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as unfinished:
            unfinished.write_text(json.dumps(about))
    except OSError as error:
        logger.warning("gpuload: the verdict cannot be kept, each process checks again (%s): set GPULOAD_CACHE", error)
    return wrong


def _read(path: Path, since: float) -> str | None:
    """The verdict of a file; None if there is none that can be read, or one that is not settled and of another machine
    or time."""
    try:
        about = json.loads(path.read_text())
        if "at" in about and (about["machine"] != platform.node() or about["at"] < since):
            return None
        return str(about["wrong"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Step:
    """What became of a step of `doctor --gpu`."""

    output: str  # what it printed
    failure: str  # why it failed, in one line; empty if it did not
    wrong: bool = False  # it found wrong results


def run_step(name: str, number: int, limit: float, *more: str, wait: bool = False) -> Step:
    """Runs a step of `doctor --gpu` in a process of its own.

    It is stopped after `limit` seconds. `more` are arguments of the command. With `wait`, it waits for each launch
    (`GPULOAD_SYNC=1`), so that an error names the kernel, and kernels are compiled with a bound for waiting threads;
    otherwise they are those that loads run.
    """
    arguments = ["doctor", "--gpu", str(number), "--gpu-step", name, *more]
    # It imports what this process imports: `sys.path` may have directories that PYTHONPATH has not.
    code = f"import sys; sys.path[:] = {sys.path!r}; from gpuload.cli.main import main; sys.exit(main({arguments!r}))"
    about = os.environ | {"GPULOAD_SYNC": "1" if wait else "", "GPULOAD_GPU_CHECK": "off"}
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        child = subprocess.Popen([sys.executable, "-c", code], stdout=out, stderr=err, env=about)
        status = None
        try:
            status = child.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also if the user interrupts
            if status is None:
                child.kill()
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_KILLED)
        output, errors = (_written(file) for file in (out, err))
    if status is None:
        return Step(output, f"stopped after {limit:.0f} s, behind: {_last_line(output)}")
    if status < 0:
        return Step(output, f"ended by signal {-status}, behind: {_last_line(output)}")
    return Step(output, _last_line(errors or output) if status else "", status == WRONG)


def _written(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1].strip()[:500] if lines else "nothing was printed"
