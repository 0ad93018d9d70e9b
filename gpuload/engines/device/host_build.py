"""The kernels compiled for the host: the same source as for the GPU, on NumPy arrays, for tests and for launches that
`gpuload doctor` repeats. A kernel whose threads do not wait for each other runs in a loop over blocks and threads. The
others run on fibers (`kernels/fibers.h`).

With GPULOAD_SANITIZE=1 in the environment they are compiled with the address sanitizer, which must be loaded before
Python: LD_PRELOAD=$(g++ -print-file-name=libasan.so).
"""

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from gpuload.core.errors import DeviceError
from gpuload.core.files import replacing
from gpuload.engines.device.kernel_source import Parameter, parsed
from gpuload.engines.device.kernels import BLOCK

COMPILER = shutil.which("g++") or shutil.which("clang++")
_C_TYPES = {
    "int64": "long long",
    "uint64": "unsigned long long",
    "int32": "int",
    "float32": "float",
    "uint16": "unsigned short",
    "uint8": "unsigned char",
    "bool": "bool",
}
_C_NUMBERS: dict[str, Any] = {"int64": ctypes.c_longlong, "uint64": ctypes.c_ulonglong, "int32": ctypes.c_int}


def _launch(name: str, parameters: tuple[Parameter, ...], waits: bool) -> str:
    """Return the C++ source of a kernel's launch. It returns a description of the error, or null."""
    declared = "".join(f", {_C_TYPES[p.dtype.name]} {'*' * p.is_array}{p.name}" for p in parameters)
    call = f"{name}({', '.join(p.name for p in parameters)});"
    loop = f"""
    for (blockIdx.x = 0; blockIdx.x < host_blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < host_threads; threadIdx.x++) {call}
    return nullptr;"""
    with_fibers = f"""
    return fibers::run_blocks(host_blocks, host_threads, host_seed, [=] {{ {call} }});"""
    return f"""
extern "C" const char* launch_{name}(
    unsigned host_blocks, unsigned host_threads, [[maybe_unused]] unsigned host_seed{declared})
{{
    gridDim.x = host_blocks;
    blockDim.x = host_threads;{with_fibers if waits else loop}
}}
"""


def waiting_kernels(text: str) -> set[str]:
    """Return the names of the kernels whose threads wait for each other or use shared memory, directly or in a function
    that they call. Every other kernel runs in a plain loop, which is much faster."""
    code = re.sub(r"//.*", "", text)
    bodies = dict(re.findall(r"^[^\n]*?(\w+)\([^;{}]*\)\n\{\n(.*?)^\}", code, re.MULTILINE | re.DOTALL))
    found: set[str] = set()
    needs = r"__shared__|__sync\w+|__\w+_sync|__nanosleep"
    while more := {name for name, body in bodies.items() if re.search(rf"\b(?:{needs})\b", body)} - found:
        found |= more
        needs = "|".join([needs, *more])
    return found & set(parsed(text))


def _on_host(text: str) -> str:
    """Return a source in which every array in shared memory is a reference to memory of its block."""
    return re.sub(
        r"__shared__ (\w+) (\w+)((?:\[[^\]]*\])*);",
        r"auto& \2 = *(\1 (*)\3)fibers::shared_memory(__COUNTER__, sizeof(\1\3));",
        text,
    )


@functools.cache
def build(text: str, *defines: str, any_order: bool = False) -> ctypes.CDLL:
    """Compile kernels for the host, or take them from an earlier build.

    Args:
        text: CUDA C++, in which the braces of functions, and no others, begin lines.
        *defines: macros as for the compiler: "NAME=value".
        any_order: all kernels run on fibers, so that a seed decides the order of their threads.

    Raises:
        DeviceError: there is no compiler.
        subprocess.CalledProcessError: it fails.
    """
    if COMPILER is None:
        raise DeviceError("kernels cannot be compiled for the host: there is neither g++ nor clang++")
    directory = resources.files("gpuload.engines.kernels")
    fibers = (directory / "fibers.h").read_text()
    header = (directory / "cuda_host.h").read_text().replace('#include "fibers.h"\n', fibers)
    waiting = waiting_kernels(text)
    launches = (_launch(name, parameters, any_order or name in waiting) for name, parameters in parsed(text).items())
    whole = "".join([header, _on_host(text), *launches])
    options = ["-x", "c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra"]
    options += ["-Werror"] * (not any_order)  # tests have a known compiler, users any
    options += ["-Wno-unknown-pragmas"]  # those that unroll loops
    options += ["-fno-strict-aliasing"]  # kernels read bytes as 64-bit words, which CUDA allows
    options += ["-U_FORTIFY_SOURCE"]  # its longjmp does not leave a fiber
    options += [f"-D{macro}" for macro in defines]
    if os.environ.get("GPULOAD_SANITIZE"):
        options += ["-fsanitize=address", "-g"]
    digest = hashlib.sha256(" ".join([COMPILER, *options, whole]).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"gpuload-kernels-{os.getuid()}-{digest}.so"
    if not library.exists() or library.stat().st_uid != os.getuid():
        with replacing(library) as unfinished:
            subprocess.run([COMPILER, *options, "-", "-o", str(unfinished)], input=whole, text=True, check=True)
    return ctypes.CDLL(str(library))


def launch(library: ctypes.CDLL, name: str, blocks: int, seed: int, arguments: list[Any]) -> None:
    """Run a kernel of a library that `build` has made, in blocks of `BLOCK` threads. The seed decides the order in
    which these run, if they wait for each other. Arguments are arrays, and NumPy numbers of the parameters' types.

    Raises:
        RuntimeError: the threads of a block cannot continue; see `fibers.h`.
    """
    passed: list[Any] = [ctypes.c_uint(blocks), ctypes.c_uint(BLOCK), ctypes.c_uint(seed)]
    for argument in arguments:
        if isinstance(argument, np.ndarray):
            passed.append(ctypes.c_void_p(argument.ctypes.data))
        else:
            passed.append(_C_NUMBERS[argument.dtype.name](argument))
    function = getattr(library, f"launch_{name}")
    function.restype = ctypes.c_char_p
    if error := function(*passed):
        raise RuntimeError(f"kernel {name}: {error.decode()}")
