"""Blocks of threads on the host: barriers, collectives and atomics in any order of threads, and errors in their use."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulator.host_kernels import COMPILER, build, launch, waiting_kernels

from gpuload.engines.device.kernel_source import parsed

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

KERNELS = Path(__file__).with_name("fibers.cu")
SEEDS = range(5)


def text() -> str:
    common = resources.files("gpuload.engines.kernels") / "common.cuh"
    return f'{common.read_text()}#line 1 "fibers.cu"\n{KERNELS.read_text()}'


def run(name: str, blocks: int, *arguments: Any, seed: int = 0) -> None:
    launch(
        build(text()), name, blocks, seed,
        [
            argument if parameter.is_array else parameter.dtype.type(argument)
            for parameter, argument in zip(parsed(text())[name], arguments, strict=True)
        ],
    )  # fmt: skip


def line_of(part: str) -> int:
    return next(number for number, line in enumerate(KERNELS.read_text().splitlines(), 1) if part in line)


def test_only_kernels_that_wait_pay_for_fibers() -> None:
    assert set(parsed(text())) - waiting_kernels(text()) == {"double_all"}
    values = np.arange(1000, dtype=np.int32)
    run("double_all", 2, 1000, values)
    assert values.tolist() == [2 * i for i in range(1000)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("grid", [1, 2, 3, 20])
def test_barriers_and_shared_memory(seed: int, grid: int) -> None:
    values = np.arange(20 * 256, dtype=np.int32)
    run("reverse", grid, 20, values, seed=seed)
    assert values.tolist() == np.arange(20 * 256).reshape(20, 256)[:, ::-1].ravel().tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles_scan_a_warp(seed: int) -> None:
    values = np.random.default_rng(seed).integers(-50, 50, 512, np.int32)
    sums = np.empty_like(values)
    run("scan_warps", 1, 512, values, sums, seed=seed)
    assert sums.tolist() == values.reshape(-1, 32).cumsum(axis=1).ravel().tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_collectives(seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 100, 256, np.int32)
    values[:32] %= 90
    out = np.empty((256, 12), np.int32)
    run("collectives", 1, 256, values, out, seed=seed)
    for row, warp in zip(out.reshape(8, 32, 12), values.reshape(8, 32), strict=True):
        lane = np.arange(32)
        votes = int(np.sum((warp & 1).astype(np.uint64) << lane.astype(np.uint64))) & 0xFFFFFFFF
        expected = [
            warp[(lane + 5) % 32], warp[np.where(lane < 3, lane, lane - 3)], warp[np.where(lane > 28, lane, lane + 3)],
            warp[lane ^ 9], np.uint32(votes).astype(np.int32), (warp == 7).any(), (warp < 90).all(), warp.min(),
            warp.sum(), warp[31], warp.reshape(2, 16).max(axis=1).repeat(16), [bin(value).count("1") for value in warp],
        ]  # fmt: skip
        for number, wanted in enumerate(expected):
            assert (row[:, number] == wanted).all(), number


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [1, 256, 257, 5000])
def test_look_back_across_blocks(seed: int, count: int) -> None:
    values = np.random.default_rng(seed).integers(0, 1000, count, np.int32)
    tiles = -(-count // 256)
    sums, state = np.empty(count, np.int64), np.zeros(tiles, np.uint64)
    run("scan_tiles", tiles, count, values, np.zeros(1, np.int32), state, sums, seed=seed)
    assert sums.tolist() == values.cumsum().tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics_and_a_lock(seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 31, 1000, np.int32)
    counts = np.array([0, 99, -1, 0, 0, 0], np.int32)
    run("count_atomically", 4, 1000, values, counts, seed=seed)
    bits = int(np.bitwise_or.reduce(1 << values))
    assert counts.tolist() == [values.sum(), values.min(), values.max(), bits, 0, values.sum()]


def test_the_seed_decides_the_order_of_threads() -> None:
    def order(seed: int) -> list[int]:
        found = np.empty(2048, np.int32)
        run("run_order", 8, 2048, np.zeros(1, np.int32), found, seed=seed)
        assert sorted(found.tolist()) == list(range(2048))
        return found.tolist()

    first = order(0)
    assert order(0) == first != order(1)
    blocks = [thread // 256 for thread in first]
    assert sum(a != b for a, b in itertools.pairwise(blocks)) > 500  # blocks are interleaved
    assert len({order(seed)[0] // 256 for seed in range(8)}) > 1  # not always the same block first


def test_shared_memory_is_garbage_at_first() -> None:
    out = np.zeros(2, np.int32)
    for blocks in (1, 5):  # other blocks have written before
        run("unwritten", blocks, out)
        assert out.tolist() == [0x5A5A5A5A] * 2


ERRORS = {
    0: r"divergent barrier: 100 threads of a block wait at __syncthreads \(fibers.cu:{0}\), the others have ended",
    1: r"divergent barrier: threads of a block wait at __syncthreads \(fibers.cu:{0}\) and __syncthreads "
    r"\(fibers.cu:{1}\)",
    2: r"deadlock: threads wait, 248 at __syncwarp \(fibers.cu:{0}\)",
    3: r"divergent warp: lanes wait at __(syncwarp|ballot_sync) \(fibers.cu:\d+\) and __(syncwarp|ballot_sync) "
    r"\(fibers.cu:\d+\)",
    4: r"divergent warp: lanes wait at __syncwarp .* and __syncwarp .* with different masks",
    5: r"__shfl_down_sync \(fibers.cu:{0}\): lane 15 reads from lane 16, which is not in the mask",
    6: r"deadlock: threads wait, 255 at __syncthreads \(fibers.cu:{1}\), 1 at __syncwarp \(fibers.cu:{0}\)",
    7: r"__syncwarp \(fibers.cu:{0}\): the mask does not contain the calling lane",
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ERRORS)
def test_errors_are_exceptions(kind: int, seed: int) -> None:
    first = line_of(f"kind == {kind}")
    message = ERRORS[kind].replace("{0}", str(first + 1)).replace("{1}", str(first + 2))
    with pytest.raises(RuntimeError, match=f"kernel go_wrong: {message}"):
        run("go_wrong", 1, kind, seed=seed)
    test_look_back_across_blocks(seed, 257)  # the next launch is not affected


def test_waiting_for_a_block_that_has_not_started_is_a_deadlock() -> None:
    done = np.zeros(3, np.int32)
    run("wait_for_block_before", 3, 3, done)  # all of them run at the same time
    assert done.tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match=r"deadlock: threads wait, \d+ for memory to change"):
        run("wait_for_block_before", 40, 40, np.zeros(40, np.int32))


@pytest.mark.skipif("GPULOAD_SANITIZE" not in os.environ, reason="only with the address sanitizer")
@pytest.mark.parametrize("by", [-1, 4])
def test_the_address_sanitizer_watches_shared_memory(by: int) -> None:
    code = f"import test_fibers; test_fibers.run('write_behind_shared_memory', 1, {by})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), *sys.path]))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
