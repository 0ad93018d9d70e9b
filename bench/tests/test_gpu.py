"""Tests on a GPU: the device engine compared with the CPU engine, and memory, copies and streams.

They are here because they use the same comparisons as the GPU record. `gpuload doctor --gpu` comes before them.
"""

from __future__ import annotations

import gc
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiers import SHARED, name_of, shared_files, shared_tokenizers, with_shared

import gpuload
from bench.gpu.data import agent_rows, answered, conversations, paired
from bench.gpu.rig import Rig, open_rig
from bench.gpu.section import MissingError, Task
from bench.gpu.tokens import device_encoder
from bench.tests.gpu_cases import LIMIT, compared, encoded

pytestmark = pytest.mark.gpu

TASK = Task(rehearsal=False, files=(), tokenizers=(), scratch="")


@pytest.fixture(scope="module", autouse=True)
def rig() -> Rig:
    try:
        return open_rig(TASK)
    except MissingError as why:
        pytest.skip(str(why))


@pytest.fixture
def with_cudf(rig: Rig) -> Rig:
    if not rig.cudf:
        pytest.skip("cuDF is not installed or does not load")
    return rig


def test_shipped_data(rig: Rig, gsm8k: str, qwen: Any) -> None:
    options: dict[str, Any] = {"max_prompt_length": 128, "return_raw_chat": True, "verify": "sample"}
    cells = compared(rig, "prompts", gsm8k, qwen, **options)
    assert cells["same"], cells
    prompts = rig.load(gsm8k, qwen, **options)
    assert prompts.report.check.mismatches == []
    assert prompts.report.check.rows > 0
    assert "rendered and encoded by kernels" in prompts.report.engine
    assert all(prompts.batch([0])[key].is_cuda for key in ("input_ids", "attention_mask", "position_ids"))


def test_cudf_reads_what_arrow_reads(with_cudf: Rig, gsm8k: str, qwen: Any) -> None:
    one, other = (with_cudf.load(data, qwen, max_prompt_length=512) for data in (gsm8k, pq.read_table(gsm8k)))
    assert one.tokens.values.tolist() == other.tokens.values.tolist()
    assert one.columns.equals(other.columns)


@pytest.mark.parametrize("file", with_shared(lambda: shared_files("**/*.parquet")), ids=name_of)
def test_shared_data(rig: Rig, qwen: Any, file: Any) -> None:
    cells = compared(rig, "prompts", str(file), qwen, **LIMIT)
    assert cells["same"], cells


@pytest.mark.parametrize("name", with_shared(shared_tokenizers, "shipped"))
def test_ids_of_shared_data_are_those_of_tokenizers_every_time(
    rig: Rig, gsm8k: str, qwen_directory: str, name: str
) -> None:
    directory = qwen_directory if name == "shipped" else str(SHARED / "tokenizers" / name)
    try:
        encoder = device_encoder(rig, directory)
    except MissingError as why:
        pytest.skip(str(why))
    rows = 0
    for file in [gsm8k] if name == "shipped" else map(str, shared_files("*.parquet")):
        cells = encoded(rig, encoder, directory, file)
        assert (cells["differing"], cells["unlike_before"]) == (0, 0), (file, cells)
        rows += cells["rows"] - cells["fallback"]
    assert rows > 0


def test_loads_and_batches_are_the_same_every_time(rig: Rig, gsm8k: str, qwen: Any) -> None:
    first, again = (rig.load(gsm8k, qwen, max_prompt_length=512) for _ in range(2))
    assert first.fingerprint == again.fingerprint
    batches = [prompts.batch(range(300))["input_ids"] for prompts in (first, again, first)]
    assert torch.equal(batches[0], batches[1])
    assert torch.equal(batches[0], batches[2])


@pytest.mark.parametrize("file", with_shared(lambda: shared_files("*_multiturn.parquet"), "shipped"))
def test_chats_have_the_masks_and_batches_of_the_cpu_engine(rig: Rig, gsm8k: str, qwen: Any, file: Any) -> None:
    prompts = conversations(gsm8k if file == "shipped" else str(file))
    assert prompts is not None
    cells = compared(rig, "chats", pa.table({"messages": answered(prompts)}), qwen)
    assert cells["same"], cells


def test_rows_of_agents_have_the_masks_and_batches_of_the_cpu_engine(rig: Rig, qwen: Any, tmp_path: Path) -> None:
    rows = agent_rows(replace(TASK, scratch=str(tmp_path)), 500)
    cells = compared(rig, "chats", rows, qwen)
    assert cells["same"], cells


def test_flat_and_padded_batches_of_chats_are_on_the_gpu(rig: Rig, gsm8k: str, qwen: Any) -> None:
    prompts = conversations(gsm8k)
    assert prompts is not None
    chats = rig.load(pa.table({"messages": answered(prompts)}), qwen, "chats")
    assert "rendered and encoded by kernels" in chats.report.engine
    for batch in (chats.batch([0, 1]), next(iter(chats.loader(4, packing="bfd")))):
        assert all(value.is_cuda for value in batch.values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("objective", ["dpo", "rm", "kto"])
def test_pairs_have_the_rows_and_batches_of_the_cpu_engine(rig: Rig, gsm8k: str, qwen: Any, objective: Any) -> None:
    prompts = conversations(gsm8k)
    assert prompts is not None
    table = paired(prompts)
    assert "rendered and encoded by kernels" in rig.load(table, qwen, "pairs").report.engine
    cells = compared(rig, "pairs", table, qwen, objective=objective)
    assert cells["same"], cells


@pytest.mark.parametrize("limit", [64 << 20, 1 << 30])
def test_a_bounded_load_gives_its_memory_back(with_cudf: Rig, gsm8k: str, qwen: Any, limit: int) -> None:
    cells = kept_memory(with_cudf, gsm8k, qwen, gpu_memory_limit=limit)
    assert cells["kept_bytes"] < cells["store_bytes"] + SLACK


def test_only_row_numbers_are_copied_while_batches_are_drawn(rig: Rig, gsm8k: str, qwen: Any, tmp_path: Path) -> None:
    prompts = rig.load(gsm8k, qwen, max_prompt_length=512)
    try:
        copies, batches = copied(prompts, 64, tmp_path / "trace.json")
    except MissingError as why:
        pytest.skip(str(why))
    assert too_much(copies, batches, 64) is None, copies


def test_batches_follow_torchs_stream(rig: Rig, gsm8k: str, qwen: Any) -> None:
    prompts = rig.load(gsm8k, qwen, max_prompt_length=512)
    expected = prompts.batch(range(256))["input_ids"].sum().item()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for _ in range(50):
            assert prompts.batch(range(256))["input_ids"].sum().item() == expected


@pytest.mark.parametrize("tokens_on", ["device", "host"])
def test_workers_of_a_loader_make_host_tensors(rig: Rig, gsm8k: str, qwen: Any, tokens_on: str) -> None:
    prompts = rig.load(gsm8k, qwen, max_prompt_length=512, tokens_on=tokens_on)
    loader = torch.utils.data.DataLoader(
        prompts, batch_size=256, num_workers=2, collate_fn=gpuload.collate_fn, multiprocessing_context="fork"
    )
    for number, batch in enumerate(loader):
        there = prompts.batch(range(256 * number, min(len(prompts), 256 * (number + 1))))
        assert batch["input_ids"].device.type == "cpu"
        assert torch.equal(batch["input_ids"], there["input_ids"].cpu())
    assert prompts.batch([])["input_ids"].shape == (0, 512)


# -- memory and copies -----------------------------------------------------------------------------------------------

SLACK = 64 << 20
"""Bytes that CUDA may keep: code of kernels, partly used pages."""

PER_BATCH = 256
"""Bytes that a batch may move between host and device in addition to its plan."""


def kept_memory(rig: Rig, file: str, tokenizer: Any, **options: Any) -> dict[str, int]:
    """The device memory that a load keeps. Another load runs before, for memory that is allocated once per process."""
    options = {"max_prompt_length": 512} | options
    rig.load(file, tokenizer, **options)
    before = free(rig)
    prompts = rig.load(file, tokenizer, **options)
    return {"store_bytes": prompts.tokens.nbytes, "kept_bytes": before - free(rig)}


def free(rig: Rig) -> int:
    gc.collect()
    torch.cuda.synchronize()
    rig.kernels.xp.get_default_memory_pool().free_all_blocks()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(rig.device)[0])


def copied(prompts: gpuload.PromptDataset, rows: int, trace: Path) -> tuple[dict[str, int], int]:
    """Bytes that are copied in each direction while batches are drawn, as CUDA reports them, and the number of batches.

    Raises:
        MissingError: the profiler does not see the GPU, not even the kernel that makes batches.
    """
    chance = np.random.default_rng(0)
    some = [chance.integers(0, len(prompts), rows) for _ in range(16)]
    prompts.batch(some[0])
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for one in some:
            prompts.batch(one)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(trace))
    return copies_of(json.loads(trace.read_text())["traceEvents"], len(some)), len(some)


def copies_of(events: list[dict[str, Any]], batches: int) -> dict[str, int]:
    """Direction ("HtoD", "DtoH", "DtoD") → bytes, in a profiler's trace."""
    kernels = sum(event.get("cat") == "kernel" and event["name"] == "pad" for event in events)
    if kernels != batches:
        raise MissingError(
            f"the profiler saw {kernels} kernels for {batches} batches, so its copies are incomplete too"
        )
    found: dict[str, int] = {}
    for event in (event for event in events if event.get("cat") == "gpu_memcpy"):
        direction = (re.search(r"[HD]to[HD]", event["name"]) or [event["name"]])[0]
        found[direction] = found.get(direction, 0) + int(event["args"]["bytes"])
    return found


def too_much(copies: dict[str, int], batches: int, rows: int) -> str | None:
    """A sentence on unnecessary copies, or None. Necessary is the plan of a batch, four numbers for each row: where it
    begins in the batch and in the store, its number and its piece."""
    for direction, allowed in (("HtoD", batches * (32 * rows + PER_BATCH)), ("DtoH", batches * PER_BATCH)):
        if (size := copies.get(direction, 0)) > allowed:
            return f"{direction}: {size:,} bytes for {batches} batches of {rows} rows, {allowed:,} allowed"
    return None
