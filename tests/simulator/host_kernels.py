"""`Kernels` that run on the host, on NumPy arrays."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from gpuload.core.arrays import Array
from gpuload.engines.device.host_build import COMPILER, build, launch, waiting_kernels
from gpuload.engines.device.kernel_source import source
from gpuload.engines.device.kernels import BLOCK, Kernels

__all__ = ["COMPILER", "HostKernels", "build", "launch", "waiting_kernels"]


class HostKernels(Kernels):
    """`Kernels` that run on the host, on NumPy arrays.

    Attributes:
        seed: decides the order in which threads run, if they wait for each other.
        segment: bytes of text per thread in tiles. With fewer, texts have more borders of tiles.
    """

    xp = np
    seed = 0
    resident = 4 * BLOCK

    def _launch(self, name: str, blocks: int, arguments: list[Any]) -> None:
        launch(build(source(), f"SEGMENT={self.segment}"), name, blocks, self.seed, arguments)

    def view(self, buffer: Any) -> Array:
        """Return a buffer as a uint8 array, zero-copy. The tests' cuDF columns are in host memory."""
        memory = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.ptr)
        return np.frombuffer(memory, np.uint8)

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)
