"""The kernels compiled for the host: the same source as for the GPU, with loops over blocks and threads, on NumPy
arrays.

With GPULOAD_SANITIZE=1 in the environment they are compiled with the address sanitizer, which must be loaded before
Python: LD_PRELOAD=$(g++ -print-file-name=libasan.so).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from gpuload.arrays import Array
from gpuload.engines.device.kernels import BLOCK, Kernels, Parameter, signatures, source
from gpuload.files import replacing

COMPILER = shutil.which("g++") or shutil.which("clang++")
_C_TYPES = {
    "int64": "long long",
    "uint64": "unsigned long long",
    "int32": "int",
    "uint16": "unsigned short",
    "uint8": "unsigned char",
    "bool": "bool",
}
_C_NUMBERS: dict[str, Any] = {"int64": ctypes.c_longlong, "uint64": ctypes.c_ulonglong, "int32": ctypes.c_int}


def _loop(name: str, parameters: tuple[Parameter, ...]) -> str:
    """Return the C++ source of a kernel's launch: it runs every thread of every block, one after the other."""
    declared = "".join(f", {_C_TYPES[p.dtype.name]} {'*' * p.is_array}{p.name}" for p in parameters)
    return f"""
extern "C" void launch_{name}(unsigned blocks, unsigned threads{declared})
{{
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
            {name}({", ".join(p.name for p in parameters)});
}}
"""


@functools.cache
def _library() -> ctypes.CDLL:
    assert COMPILER is not None
    header = Path(__file__).with_name("cuda_host.h").read_text()
    text = header + source() + "".join(_loop(name, parameters) for name, parameters in signatures().items())
    options = ["-x", "c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    options += ["-fno-strict-aliasing"]  # kernels read bytes as 64-bit words, which CUDA allows
    if os.environ.get("GPULOAD_SANITIZE"):
        options += ["-fsanitize=address", "-g"]
    digest = hashlib.sha256(" ".join([COMPILER, *options, text]).encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"gpuload-kernels-{os.getuid()}-{digest}.so"
    if not library.exists():
        with replacing(library) as unfinished:
            subprocess.run([COMPILER, *options, "-", "-o", str(unfinished)], input=text, text=True, check=True)
    return ctypes.CDLL(str(library))


class HostKernels(Kernels):
    """`Kernels` that run on the host, on NumPy arrays."""

    xp = np

    def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
        passed = [ctypes.c_uint(blocks), ctypes.c_uint(BLOCK)]
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                passed.append(ctypes.c_void_p(argument.ctypes.data))  # type: ignore[arg-type]
            else:
                passed.append(_C_NUMBERS[argument.dtype.name](argument))
        getattr(_library(), f"launch_{name}")(*passed)

    def view(self, buffer: Any) -> Array:
        """Return a buffer as a uint8 array, zero-copy. The tests' cuDF columns are in host memory."""
        memory = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.ptr)
        return np.frombuffer(memory, np.uint8)

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)
