"""Strict arrays refuse what CuPy refuses, and count what it waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from simulator.host_kernels import COMPILER
from simulator.strict_arrays import StrictKernels

from gpuload.core.arrays import array_module, offsets_of

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture
def kernels() -> StrictKernels:
    return StrictKernels()


HOST = np.arange(3)


@pytest.mark.parametrize("mix", [
    lambda there, xp: there + HOST, lambda there, xp: HOST + there, lambda there, xp: np.add(there, there, out=HOST),
    lambda there, xp: there[HOST], lambda there, xp: HOST[there], lambda there, xp: xp.concatenate([there, HOST]),
    lambda there, xp: xp.where(there > 1, HOST, 0), lambda there, xp: np.asarray(there), lambda there, xp: list(there),
    lambda there, xp: np.cumsum(there), lambda there, xp: np.concatenate([there]), lambda there, xp: bytes(there),
    lambda there, xp: there.__setitem__(slice(None), HOST), lambda there, xp: HOST.__setitem__(slice(None), there),
    lambda there, xp: torch.as_tensor(there), lambda there, xp: xp.arange(there[0]), lambda there, xp: there.ctypes,
])  # fmt: skip
def test_host_and_device_do_not_mix(kernels: StrictKernels, mix: Callable[..., Any]) -> None:
    with pytest.raises((TypeError, AttributeError, ValueError, RuntimeError)):
        mix(kernels.xp.asarray(HOST), kernels.xp)


@pytest.mark.parametrize(("waits", "work"), [
    (0, lambda there, xp: xp.cumsum(there * 2 + 1)), (0, lambda there, xp: there[there]),
    (0, lambda there, xp: there[1]), (0, lambda there, xp: len(there)), (0, lambda there, xp: offsets_of(there)),
    (0, lambda there, xp: xp.asarray(there)),
    (0, lambda there, xp: xp.repeat(there, 2)), (1, lambda there, xp: xp.repeat(there, there)),
    (1, lambda there, xp: int(there[1])), (1, lambda there, xp: bool((there > 5).any())),
    (1, lambda there, xp: there[there > 1]), (1, lambda there, xp: there.get()), (1, lambda there, xp: there.tolist()),
    (1, lambda there, xp: xp.flatnonzero(there)), (1, lambda there, xp: xp.unique(there)),
])  # fmt: skip
def test_waits_are_counted(kernels: StrictKernels, waits: int, work: Callable[..., Any]) -> None:
    there = kernels.xp.asarray(HOST)
    work(there, kernels.xp)
    assert kernels.xp.waits == waits


def test_values_are_those_of_numpy(kernels: StrictKernels) -> None:
    xp = kernels.xp
    there = xp.asarray(HOST)
    assert array_module(there) is xp
    assert (there[::-1] * 2 + there).tolist() == (HOST[::-1] * 2 + HOST).tolist()
    there += 1
    there[there == 2] = 9
    assert there.tolist() == [1, 9, 3]
    assert HOST.tolist() == [0, 1, 2], "device memory is a copy"
    assert there.astype(np.int8).view(np.uint8).sum().tolist() == 13


def test_bytes_are_counted_until_they_are_freed(kernels: StrictKernels) -> None:
    xp = kernels.xp
    there = xp.zeros(1000, np.int64)
    view = there[10:].view(np.uint8)
    assert (xp.alive, xp.peak) == (8000, 8000)
    there = there[:1]
    assert xp.alive == 8000
    del view, there
    assert (xp.alive, xp.peak) == (0, 8000)


def test_kernels_take_device_arrays_only(kernels: StrictKernels) -> None:
    arrays = [np.zeros(4, np.uint8), np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros(1, np.int64)]
    with pytest.raises(TypeError, match="data must be a strict_arrays_"):
        kernels.run("hash_texts", 1, 1, *arrays)
    kernels.run("hash_texts", 1, 1, *map(kernels.xp.asarray, arrays))
