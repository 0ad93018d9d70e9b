"""The store of ids in device memory: the same rows as on the host, little more memory than they need, and no copies
to the host that nobody asked for."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from simulator import engine_on, load_with
from simulator.host_kernels import COMPILER
from simulator.stream_checks import StreamKernels
from simulator.strict_arrays import StrictKernels
from tiers import core
from torch.utils.data import DataLoader

import gpuload
from gpuload.core.arrays import Ragged
from gpuload.core.errors import DeviceError
from gpuload.engines.device import store as device_store
from gpuload.engines.device.engine import DeviceEngine
from gpuload.engines.device.shared import SharedTables
from gpuload.engines.device.store import DeviceStore, Segments, host_store, in_order
from gpuload.engines.host.engine import HostEngine

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

KERNELS = StrictKernels()


def random_parts(rng: np.random.Generator, count: int, rows: int, longest: int) -> list[Ragged]:
    lists = [[rng.integers(0, 1 << 17, n).tolist() for n in rng.integers(0, longest, rows)] for _ in range(count)]
    return [Ragged.from_lists(part) for part in lists]


def host_rows(parts: list[Ragged], kept: list[Any], order: Any) -> list[list[int]]:
    """What the host engine makes of the same parts."""
    chosen = [HostEngine.keep(part, rows) for part, rows in zip(parts, kept, strict=True)]
    return HostEngine.store(chosen, order).to_host().to_lists()


@given(st.integers(0, 10_000), st.sampled_from([1, 7, 64, 1 << 19]), st.booleans())
def test_rows_are_those_of_the_host_engine(seed: int, segment: int, ordered: bool) -> None:
    rng = np.random.default_rng(seed)
    parts = random_parts(rng, int(rng.integers(1, 6)), int(rng.integers(0, 9)), 20)
    kept = [None if rng.random() < 0.3 else np.flatnonzero(rng.random(len(part)) < 0.7) for part in parts]
    total = sum(len(part) if rows is None else len(rows) for part, rows in zip(parts, kept, strict=True))
    order = rng.permutation(total) if ordered else None
    expected = host_rows(parts, kept, order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_store, "_SEGMENT", segment)
        patch.setattr(device_store.DeviceStore, "most_values", 16)
        segments = Segments(KERNELS)
        found = in_order([segments.add(*pair) for pair in zip(parts, kept, strict=True)], order)  # type: ignore[misc]
        some = rng.integers(0, total, 5) if total else np.zeros(0, np.int64)
        assert found.take(some).to_lists() == [expected[row] for row in some]
        assert found.joined().to_host().to_lists() == expected
        assert found.to_host().to_lists() == expected
    assert found.take(some).to_lists() == [expected[row] for row in some]
    assert found.lengths.tolist() == [len(row) for row in expected]
    host_parts = [HostEngine.keep(part, rows) for part, rows in zip(parts, kept, strict=True)]
    assert host_store(host_parts, order).to_lists() == expected
    assert host_parts == []


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("rows", "length"), [(8192, 130), (500, 9000), (8192, 20)])
def test_a_store_never_needs_more_than_its_size_and_a_tenth(rows: int, length: int, ordered: bool) -> None:
    """Counted are all bytes of device memory, except for those of the part being added. Segments are scaled down with
    the number of rows: a store of a few megabytes stands for one of gigabytes."""
    kernels, rng = StrictKernels(), np.random.default_rng(0)
    xp, ids = kernels.xp, 0
    segments, parts = Segments(kernels), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_store, "_SEGMENT", 1 << 14)
        for _ in range(40):
            lengths = rng.integers(0, 2 * length, rows // 16)
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            part = Ragged(xp.zeros(int(offsets[-1]), np.int32), xp.asarray(offsets))
            xp.peak = xp.alive
            before = part.nbytes
            kept = segments.add(part)
            assert kept is not None
            parts.append(kept)
            ids += part.nbytes
            temporary = before + 6 * 8 * len(lengths)  # the part, and numbers about its rows
            assert xp.peak <= 1.1 * ids + temporary + 4 * 2 * (1 << 14)
            del part
        held = xp.alive
        xp.peak = 0
        order = rng.permutation(sum(map(len, parts))) if ordered else None
        whole = in_order(parts, order)
        assert len(whole.index.address) == len(whole)
    size = 4 * int(whole.lengths.sum()) + 16 * len(whole)
    assert held + 16 * len(whole) == xp.alive
    assert xp.peak <= 1.1 * size


def test_a_load_frees_everything_but_the_store(gsm8k: str, qwen: Any) -> None:
    kernels = StrictKernels()
    prompts = load_with(engine_on(kernels), gsm8k, qwen, max_prompt_length=512, tokens_on="device", verify="off")
    kernels.shared = SharedTables()  # those of the tokenizer are for later loads
    gc.collect()
    assert 0 <= kernels.xp.alive - 4 * prompts.report.tokens <= 4 * device_store._SEGMENT
    del prompts
    gc.collect()
    assert kernels.xp.alive == 0


def test_batches_do_not_wait_for_the_device(gsm8k: str, qwen: Any) -> None:
    kernels = StrictKernels()
    options: dict[str, Any] = {"max_prompt_length": 512, "max_samples": 64}
    prompts = load_with(engine_on(kernels), gsm8k, qwen, tokens_on="device", **options)
    expected = gpuload.load(gsm8k, qwen, device="cpu", **options)
    before = kernels.xp.waits
    batch = prompts.batch(range(32))
    assert batch["extra_info"].tolist() == expected.batch(range(32))["extra_info"].tolist()
    assert len(prompts), str(prompts)
    assert kernels.xp.waits == before
    assert batch["raw_prompt_ids"].tolist() == expected.batch(range(32))["raw_prompt_ids"].tolist()
    assert kernels.xp.waits == before + 1, "one copy for all rows"
    assert batch["raw_prompt_ids"] is batch["raw_prompt_ids"]
    assert kernels.xp.waits == before + 1
    rows = prompts.__getitems__(range(3))
    assert kernels.xp.waits == before + 2
    assert [row["raw_prompt_ids"] for row in rows] == expected.tokens.take(np.arange(3)).to_lists()
    assert "_host" not in prompts._store.__dict__
    assert prompts.fingerprint == expected.fingerprint
    assert "_host" not in prompts._store.__dict__
    assert prompts.tokens.to_lists() == expected.tokens.to_lists()
    assert prompts.tokens.values is prompts.tokens.values


@pytest.mark.parametrize("start", core(["fork", "spawn"], "fork"))
@pytest.mark.parametrize("tokens_on", ["device", "host"])
def test_workers_take_rows_from_host_memory(
    gsm8k: str, qwen: Any, start: str, tokens_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"max_prompt_length": 256, "max_samples": 40}
    prompts = load_with(engine_on(StrictKernels()), gsm8k, qwen, tokens_on=tokens_on, **options)
    prompts.batch([0])
    loader = DataLoader(
        prompts, 16, num_workers=1, collate_fn=gpuload.collate_fn, multiprocessing_context=start, pin_memory=False
    )
    if start == "fork":  # a worker that uses the device has no copy of it
        monkeypatch.setattr(StrictKernels, "current", _only_here())
    expected = gpuload.load(gsm8k, qwen, device="cpu", **options)
    for batch, other in zip(loader, expected.loader(16), strict=True):
        assert torch.equal(batch["input_ids"], other["input_ids"])
        assert batch["raw_prompt_ids"].tolist() == other["raw_prompt_ids"].tolist()
    assert pickle.loads(pickle.dumps(prompts)).tokens.to_lists() == expected.tokens.to_lists()


def test_workers_have_the_rows_of_a_store_when_another_store_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def to_host(self) -> None:
            raise DeviceError("the context is lost")

    stores = [
        in_order([part], None)
        for part in map(Segments(KERNELS).add, random_parts(np.random.default_rng(0), 2, 5, 9))
        if part
    ]
    monkeypatch.setattr(device_store, "_STORES", [Lost(), stores[0], Lost(), stores[1]])
    with pytest.raises(DeviceError, match="the context is lost"):
        device_store._copy_to_host()
    assert all("_host" in store.__dict__ for store in stores)


def _only_here() -> Callable[[Any], Any]:
    import os

    here = os.getpid()

    @contextmanager
    def current(kernels: Any) -> Iterator[None]:
        assert os.getpid() == here
        yield

    return current


# -- auto --------------------------------------------------------------------------------------------------------------

NOTE = "token ids are in host memory: gpu_memory_limit leaves too little GPU memory for them"


@pytest.mark.parametrize("limit", [None, 0, 1 << 13, 1 << 22])
@pytest.mark.parametrize("shuffle", core([False, True], True))
def test_auto_uses_host_memory_beyond_the_limit(
    files: list[str], qwen: Any, monkeypatch: pytest.MonkeyPatch, limit: int | None, shuffle: bool
) -> None:
    monkeypatch.setattr(device_store, "_SEGMENT", 1 << 10)
    kernels = StrictKernels()
    kernels.ids_limit = limit
    options: dict[str, Any] = {"max_prompt_length": 64}
    options |= {"shuffle": True, "max_samples": 200, "seed": 1} if shuffle else {}
    found = load_with(engine_on(kernels), files, qwen, tokens_on="auto", **options)
    expected = gpuload.load(files, qwen, device="cpu", **options)
    assert found.tokens.to_lists() == expected.tokens.to_lists()
    batch, other = found.batch(range(50)), expected.batch(range(50))
    assert all(torch.equal(batch[key], other[key]) for key in ("input_ids", "attention_mask", "position_ids"))
    stays = limit is None or limit == 1 << 22
    assert isinstance(found._store, DeviceStore if stays else Ragged)
    assert (NOTE in found.report.notes) is not stays


def test_auto_changes_to_host_memory_in_the_middle_of_a_load(
    files: list[str], qwen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_store, "_SEGMENT", 1 << 10)
    expected = gpuload.load(files, qwen, device="cpu", max_prompt_length=64)
    size = 4 * int(expected.tokens.lengths[:128].sum())
    kernels = StrictKernels()
    kernels.ids_limit = size + (1 << 13)
    kernels.chunk_bytes = 1 << 14
    kept: list[type] = []
    keep = DeviceEngine.keep

    def noting(self: DeviceEngine, *arguments: Any) -> Any:
        part = keep(self, *arguments)
        kept.append(type(part))
        return part

    monkeypatch.setattr(DeviceEngine, "keep", noting)
    found = load_with(engine_on(kernels), files, qwen, max_prompt_length=64)
    assert (kept[0], kept[-1]) == (DeviceStore, Ragged)
    assert found.tokens.to_lists() == expected.tokens.to_lists()
    assert NOTE in found.report.notes


def test_running_out_of_memory_for_ids(files: list[str], qwen: Any) -> None:
    class Full(StrictKernels):
        @contextmanager
        def lasting(self) -> Iterator[None]:
            raise DeviceError("out of GPU memory while storing token ids")
            yield

    expected = gpuload.load(files, qwen, device="cpu", max_prompt_length=64)
    found = load_with(engine_on(Full()), files, qwen, max_prompt_length=64)
    assert found.tokens.to_lists() == expected.tokens.to_lists()
    with pytest.raises(DeviceError, match="while storing token ids"):
        load_with(engine_on(Full()), files, qwen, max_prompt_length=64, tokens_on="device", device="cuda")


def test_cached_tokens_on_the_device(files: list[str], qwen: Any, warm_cache: Path) -> None:
    """They are read from a mapped file in host memory."""
    engine = engine_on(StrictKernels())
    cold = load_with(engine, files[:1], qwen, device="cuda", max_prompt_length=64)
    for tokens_on in ("device", "host", "auto"):
        warm = load_with(engine, files[:1], qwen, device="cuda", max_prompt_length=64, tokens_on=tokens_on)
        assert warm.report.from_cache == files[:1]
        assert warm.tokens.to_lists() == cold.tokens.to_lists()
        assert torch.equal(warm.batch(range(9))["input_ids"], cold.batch(range(9))["input_ids"])


def test_joined_rows_may_be_used_and_freed_on_any_stream() -> None:
    """cuDF works on its own stream, whatever torch's current one is, and nobody says when it lets go of them."""
    kernels = StreamKernels()
    kept = Segments(kernels).add(Ragged.from_lists([[1, 2], [3]]))
    assert kept is not None
    kernels.synchronize()  # the end of the load
    with kernels.new_stream():
        joined = kept.joined()
    doubled = joined.values * 2 + joined.offsets.astype(np.int32)
    del joined
    assert doubled.tolist() == [2, 6, 9]
    gc.collect()
    assert kernels.races == []
