"""`gpuload demo`: loads real prompts with a real tokenizer, and compares with the baseline, row by row."""

import time
from collections.abc import Mapping
from typing import Any

import pyarrow.parquet as pq
import torch

from gpuload.dataset import PromptDataset, collate_fn
from gpuload.demo_data import demo_files
from gpuload.load import load

_LIMIT = 512
_BATCH = 256


def demo() -> int:
    """Loads, shows one batch, does the same with the baseline, and compares every token.

    Returns:
        0, or 1 if a token differs.
    """
    from transformers import AutoTokenizer

    file, folder = demo_files()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    started = time.perf_counter()
    prompts = load(file, tokenizer, max_prompt_length=_LIMIT, token_cache=False)  # cold, as the baseline
    loaded = time.perf_counter()
    first = prompts.batch(range(min(_BATCH, len(prompts))))
    for batch in prompts.loader(_BATCH):
        dict(batch)  # makes all values, as the baseline does
    fast = (loaded - started, time.perf_counter() - loaded)
    print(prompts.report)
    _show(first, tokenizer)

    print("\nbaseline: template and tokenizer, row by row", flush=True)
    started = time.perf_counter()
    kept = _filter_by_row(file, tokenizer)
    filtered = time.perf_counter()
    batches = [_batch_by_row(kept[i : i + _BATCH], tokenizer) for i in range(0, len(kept), _BATCH)]
    baseline = (filtered - started, time.perf_counter() - filtered)

    print(f"  {'':18}{'gpuload':>12}{'baseline':>12}")
    for step, a, b in zip(("load and filter", "an epoch's batches"), fast, baseline, strict=True):
        print(f"  {step:18}{a:10.2f} s{b:10.2f} s")
    differing = _differing_tokens(prompts, torch.cat([batch["input_ids"] for batch in batches]))
    print(f"  {sum(baseline) / sum(fast):.1f} times as fast; {len(kept):,} rows compared, {differing:,} tokens differ")
    return 0 if differing == 0 else 1


def _show(batch: Mapping[str, Any], tokenizer: Any) -> None:
    print("\na batch")
    for key, value in batch.items():
        kind = str(value.dtype).removeprefix("torch.")
        print(f"  {key:15} {kind:7} {tuple(value.shape)}")
    print(f"  the first row ends with {tokenizer.decode(batch['raw_prompt_ids'][0][-24:])!r}")


def _filter_by_row(file: str, tokenizer: Any) -> list[dict[str, Any]]:
    """The filter of verl's first versions, at the start of a run."""
    rows = pq.read_table(file).to_pylist()
    return [
        row
        for row in rows
        if len(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"])
        <= _LIMIT
    ]


def _batch_by_row(rows: list[dict[str, Any]], tokenizer: Any) -> dict[str, Any]:
    """Their `__getitem__`, for every row of every epoch."""
    batch = []
    for row in rows:
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        padded = torch.full((_LIMIT,), tokenizer.pad_token_id)
        padded[_LIMIT - len(ids) :] = ids
        mask = (torch.arange(_LIMIT) >= _LIMIT - len(ids)).long()
        tensors = {"input_ids": padded, "attention_mask": mask, "position_ids": (mask.cumsum(0) - 1).clip(min=0)}
        batch.append(row | tensors)
    return collate_fn(batch)


def _differing_tokens(prompts: PromptDataset, expected: torch.Tensor) -> int:
    """How many positions of the padded batches differ; all of them if other rows were kept."""
    if len(prompts) != len(expected):
        return expected.numel()
    found = torch.cat([batch["input_ids"] for batch in prompts.loader(_BATCH)])
    return int((found != expected).sum())
