"""The kernels compile for real GPUs with NVRTC, which needs no GPU, and need few registers, no local memory, and so
little shared memory that a multiprocessor can hold half of its threads."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from gpuload.engines.device.kernel_source import signatures, source
from gpuload.engines.device.kernels import _DEBUG, BLOCK

SHARED = {"sm_80": 164, "sm_90": 228, "sm_100": 228, "sm_120": 100}
"""Shared memory of a multiprocessor in KiB; 1 KiB of it per block is the driver's."""

LEAST = {"sm_80": 1024, "sm_90": 1024, "sm_100": 1024, "sm_120": 512}
"""Threads of any kernel that the shared memory of a multiprocessor has room for: half of all, a third in sm_120."""

MOST_REGISTERS = 48
"""Per thread. With 48, a multiprocessor of 65,536 registers holds five eighths of the threads it could hold at most,
enough to hide the latency of memory. The registers of each kernel are printed: pytest -s."""


def compiled(architecture: str, *more: str) -> tuple[bytes, str]:
    """Compile all kernels, with some options more; return the machine code and the assembler's log."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        error, program = nvrtc.nvrtcCreateProgram(source().encode(), b"kernels.cu", 0, [], [])
    except Exception as missing:  # the bindings are there, the library is not
        pytest.skip(f"NVRTC is not installed: {missing}")
    options = [f"--gpu-architecture={architecture}".encode(), b"-std=c++17", b"--ptxas-options=-v"]
    options += [option.encode() for option in more]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    log = _read(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")
    assert int(error) == 0, log
    return _read(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log


def _read(program: Any, size: Callable[..., Any], get: Callable[..., Any]) -> bytes:
    error, length = size(program)
    assert int(error) == 0
    text = b" " * length
    (error,) = get(program, text)
    assert int(error) == 0
    return text


@pytest.mark.parametrize("architecture", SHARED)
def test_kernels_compile_without_spills(architecture: str) -> None:
    code, log = compiled(architecture)
    assert code[:4] == b"\x7fELF"
    assert "warning" not in log
    found = re.findall(
        r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers([^\n]*)",
        log,
        re.DOTALL,
    )
    assert {name for name, *_ in found} == set(signatures())
    for name, stack, stores, loads, registers, more in sorted(found):
        shared = int(match[1]) if (match := re.search(r"(\d+) bytes smem", more)) else 0
        print(f"{architecture} {name}: {registers} registers, {stack} bytes of stack, {stores} + {loads} spilled, "
              f"{shared} bytes of shared memory")  # fmt: skip
        threads = SHARED[architecture] * 1024 // (shared + 1024) * BLOCK
        assert threads >= LEAST[architecture], (name, shared)
        assert (int(stack), int(stores), int(loads)) == (0, 0, 0), name
        assert int(registers) <= MOST_REGISTERS, (name, registers)


@pytest.mark.parametrize(("architecture", "options"), [("sm_75", ()), ("sm_90", _DEBUG)])
def test_other_builds_compile(architecture: str, options: tuple[str, ...]) -> None:
    """For Turing, which has no reductions of warps, and with the bound for waiting threads of `GPULOAD_SYNC=1`."""
    code, log = compiled(architecture, *options)
    assert "warning" not in log
    assert all(name.encode() in code for name in signatures())
