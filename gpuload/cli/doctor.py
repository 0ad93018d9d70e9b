"""`gpuload doctor`: versions, GPUs, and a test of each engine."""

import argparse
import importlib.util
import os
import platform
import re
from pathlib import Path

from gpuload._version import __version__
from gpuload.cli.machine import PACKAGES, nvidia_smi, version_of


def run(given: argparse.Namespace) -> int:
    """Prints what this machine has, and tests its engines; the GPU's initializes CUDA and compiles kernels.

    Only a required engine, "cpu" or "cuda", is tested. With --quick, none is, and neither torch nor transformers is
    imported; with --gpu and --replay, see `ladder.run`. Returns 0, or 1 if what was asked for does not work.
    """
    if given.quick and (given.require or given.gpu is not None or given.replay):
        given.parser.error("--quick tests nothing: use it alone")
    if (given.dump and given.gpu is None) or (given.kernel and not given.dump):
        given.parser.error("--dump needs --gpu, and --kernel needs --dump")
    if given.replay and given.gpu is not None:
        given.parser.error("--replay needs no GPU: use it without --gpu")
    if given.gpu is not None and given.gpu < 0:
        given.parser.error(f"--gpu {given.gpu}: expected the number of a GPU, 0 or more")
    if given.gpu is not None or given.replay:
        from gpuload.cli import ladder

        return ladder.run(given)
    _print(
        f"gpuload {__version__}, Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores",
        "",
        "packages",
        *(f"  {name:13} {version_of(name) or 'not installed'}" for name in PACKAGES),
        "",
        "GPU",
        *(f"  {name:13} {value}" for name, value in _gpu()),
    )
    if given.quick:
        return 0
    _print("", "engines, tested on the shipped prompts")
    works = [_works(engine) for engine in ("cpu", "cuda") if given.require in (None, engine)]
    return 0 if given.require is None or all(works) else 1


def _print(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def _works(engine: str) -> bool:
    """Tests an engine, and prints its description, the time of each stage, and which stage failed."""
    from gpuload.cli.selftest import check_engine
    from gpuload.engines.device.cuda import cuda_engine, unavailable_reason
    from gpuload.engines.host.engine import HostEngine

    if engine == "cuda" and (why_not := unavailable_reason("cuda")):
        _print(f"  {engine:13} not available: {why_not}")
        return False
    outcome = check_engine(cuda_engine if engine == "cuda" else HostEngine)
    lines = [(stage, f"{seconds:.3f} s") for stage, seconds in outcome.seconds.items()]
    if outcome.failure is not None:
        stage, how = outcome.failure
        lines.append((stage, f"FAILED: {how}"))
    lines += [("uses", outcome.description), *(("note", note) for note in outcome.notes)]
    _print(f"  {engine:13} {'works' if outcome.failure is None else 'DOES NOT WORK'}")
    _print(*(f"    {name:11} {what}" for name, what in lines))
    return outcome.failure is None


def _gpu() -> list[tuple[str, str]]:
    """GPUs and driver as nvidia-smi lists them, and the CUDA version of torch. Does not initialize CUDA."""
    listed = nvidia_smi("--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").splitlines()
    devices = [line.rsplit(", ", 1) for line in listed if ", " in line]
    newest = re.search(r"CUDA (?:UMD )?Version: *([\d.]+)", nvidia_smi())
    lines = [(f"GPU {number}", name) for number, (name, _) in enumerate(devices)]
    if not lines:
        return [("GPU", "none found: nvidia-smi is missing or lists no GPU"), ("CUDA", _torch_cuda())]
    driver = devices[0][1] + (f", supports CUDA up to {newest[1]}" if newest else "")
    return [*lines, ("driver", driver), ("CUDA", _torch_cuda())]


def _torch_cuda() -> str:
    """The CUDA version that torch is built for, read from its files."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    built = re.search(r"^cuda[^=]*= *'([^']+)'", Path(spec.origin).with_name("version.py").read_text(), re.MULTILINE)
    return f"torch is built for {built[1]}" if built else "torch is built without CUDA"
