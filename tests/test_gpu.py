"""On a GPU: what the tests of the device engine show on the host, once more where it is meant to run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import shared_files

import gpuload
from gpuload.engines.cuda import obstacle


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    why_not = obstacle("cuda")
    if why_not is not None:
        pytest.skip(why_not)


def assert_same(file: str, tokenizer: Any, **options: Any) -> gpuload.PromptDataset:
    found = gpuload.load(file, tokenizer, device="cuda", **options)
    expected = gpuload.load(file, tokenizer, device="cpu", **options)
    assert found.tokens.values.tolist() == expected.tokens.values.tolist()
    assert found.tokens.offsets.tolist() == expected.tokens.offsets.tolist()
    assert found.report.refused == expected.report.refused
    assert found.columns.equals(expected.columns)
    rows = range(min(len(found), 257))
    one, other = found.batch(rows), expected.batch(rows)
    for key in ("input_ids", "attention_mask", "position_ids"):
        assert one[key].device.type == "cuda"
        assert torch.equal(one[key].cpu(), other[key])
    return found


@pytest.mark.gpu
def test_shipped_data(gsm8k: str, qwen: Any) -> None:
    prompts = assert_same(gsm8k, qwen, max_prompt_length=128, return_raw_chat=True)
    assert prompts.report.check.mismatches == []
    assert "rendered and encoded by kernels" in prompts.report.engine


@pytest.mark.gpu
@pytest.mark.parametrize("file", shared_files("**/*.parquet"), ids=lambda file: file.stem)
def test_shared_data(qwen: Any, file: Any) -> None:
    try:
        gpuload.load(str(file), qwen, device="cpu", max_prompt_length=512, verify="off")
    except gpuload.GpuloadError as error:
        pytest.skip(f"not for the CPU engine either: {error}")
    assert_same(str(file), qwen, max_prompt_length=512, verify="off")


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [64 << 20, 1 << 30])
def test_a_bounded_load_gives_its_memory_back(gsm8k: str, qwen: Any, limit: int) -> None:
    assert_same(gsm8k, qwen, max_prompt_length=512, gpu_memory_limit=limit)  # kernels are compiled, pools are there
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    prompts = gpuload.load(gsm8k, qwen, device="cuda", max_prompt_length=512, gpu_memory_limit=limit)
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    assert before - after < prompts.tokens.nbytes + (64 << 20)


@pytest.mark.gpu
def test_batches_follow_torchs_stream(gsm8k: str, qwen: Any) -> None:
    prompts = gpuload.load(gsm8k, qwen, device="cuda", max_prompt_length=512)
    expected = prompts.batch(range(256))["input_ids"].sum().item()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(50):
            assert prompts.batch(range(256))["input_ids"].sum().item() == expected
