"""Tests on a GPU: the device engine compared with the CPU engine, and memory, copies and streams.

They are here because they use the same checks as the GPU record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from tiers import SHARED, name_of, shared_files, shared_tokenizers, with_shared

import gpuload
from bench.gpu.chats import answered
from bench.gpu.chats import compared as compared_chats
from bench.gpu.checks import SLACK, copied, kept_memory, pointers, sanitized, too_much
from bench.gpu.data import conversations
from bench.gpu.exact import compared, device_encoder, encoded
from bench.gpu.rig import Rig, open_rig
from bench.gpu.section import MissingError, Task

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
    options: dict[str, Any] = {"max_prompt_length": 128, "return_raw_chat": True}
    cells = compared(rig, gsm8k, qwen, **options)
    assert cells["same"], cells
    prompts = rig.load(gsm8k, qwen, **options)
    assert prompts.report.check.mismatches == []
    assert prompts.report.check.rows > 0
    assert "rendered and encoded by kernels" in prompts.report.engine
    assert all(prompts.batch([0])[key].is_cuda for key in ("input_ids", "attention_mask", "position_ids"))


def test_cudf_reads_what_arrow_reads(with_cudf: Rig, gsm8k: str, qwen: Any) -> None:
    by_arrow = Rig(with_cudf.kernels, with_cudf.device, rehearsal=False)
    one, other = (machine.load(gsm8k, qwen, max_prompt_length=512) for machine in (with_cudf, by_arrow))
    assert one.tokens.values.tolist() == other.tokens.values.tolist()
    assert one.columns.equals(other.columns)


@pytest.mark.parametrize("file", with_shared(lambda: shared_files("**/*.parquet")), ids=name_of)
def test_shared_data(rig: Rig, qwen: Any, file: Any) -> None:
    cells = compared(rig, str(file), qwen)
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
def test_chats_have_the_masks_and_batches_of_the_cpu_engine(
    rig: Rig, gsm8k: str, qwen_directory: str, file: Any
) -> None:
    prompts = conversations(gsm8k if file == "shipped" else str(file))
    assert prompts is not None
    cells = compared_chats(rig, pa.table({"messages": answered(prompts)}), qwen_directory)
    assert cells["differing"] == 0, cells
    assert cells["batches"], cells
    assert cells["loss_tokens"] > 0


def test_flat_and_padded_batches_of_chats_are_on_the_gpu(rig: Rig, gsm8k: str, qwen: Any) -> None:
    prompts = conversations(gsm8k)
    assert prompts is not None
    chats = rig.load_chats(pa.table({"messages": answered(prompts)}), qwen)
    assert "rendered and encoded by kernels" in chats.report.engine
    for batch in (chats.batch([0, 1]), next(iter(chats.loader(4, packing="bfd")))):
        assert all(value.is_cuda for value in batch.values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("objective", ["dpo", "rm", "kto"])
def test_pairs_have_the_rows_and_batches_of_the_cpu_engine(rig: Rig, gsm8k: str, qwen: Any, objective: Any) -> None:
    prompts = conversations(gsm8k)
    assert prompts is not None
    answers = [[{"role": "assistant", "content": f"{k} {'good' * (k % 5)}"}] for k in range(len(prompts))]
    table = pa.table({"prompt": prompts, "chosen": answers, "rejected": answers[1:] + answers[:1]})
    found = rig.load_pairs(table, qwen, objective=objective)
    expected = gpuload.load_pairs(table, qwen, objective=objective, device="cpu", token_cache=False)
    assert "rendered and encoded by kernels" in found.report.engine
    assert found.fingerprint == expected.fingerprint
    for one, other in zip(found.loader(64, shuffle=True), expected.loader(64, shuffle=True), strict=True):
        tensors = {name: value for name, value in one.items() if isinstance(value, torch.Tensor)}
        assert all(value.is_cuda and torch.equal(value.cpu(), other[name]) for name, value in tensors.items())


@pytest.mark.parametrize("limit", [64 << 20, 1 << 30])
def test_a_bounded_load_gives_its_memory_back(with_cudf: Rig, gsm8k: str, qwen: Any, limit: int) -> None:
    cells = kept_memory(with_cudf, gsm8k, qwen, gpu_memory_limit=limit)
    assert cells["kept_bytes"] < cells["store_bytes"] + SLACK


def test_only_row_numbers_are_copied_while_batches_are_drawn(rig: Rig, gsm8k: str, qwen: Any, tmp_path: Path) -> None:
    prompts = rig.load(gsm8k, qwen, max_prompt_length=512)
    try:
        copies = copied(prompts, 64, tmp_path / "trace.json")
    except MissingError as why:
        pytest.skip(str(why))
    assert too_much(copies, copies["batches"], 64) is None, copies


def test_batches_in_torch_are_the_memory_that_the_kernel_wrote(rig: Rig) -> None:
    assert len(found := pointers(rig)) == 3
    assert all(written == given != 0 for written, given in found.values()), found


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


def test_kernels_touch_no_byte_that_is_not_theirs() -> None:
    try:
        cells = sanitized()
    except MissingError as why:
        pytest.skip(str(why))
    assert cells["clean"], cells["output"]
