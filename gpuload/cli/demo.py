"""`gpuload demo`: loads real prompts next to the row-by-row baseline, and compares every token."""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow.parquet as pq
import torch

from gpuload.core.words import counted
from gpuload.demo_data import demo_files
from gpuload.kinds.load import load
from gpuload.kinds.prompts import PromptDataset, collate_fn

_LIMIT = 512
_BATCH = 256
# A process that starts again as a training run would: imports are not counted, everything after them is.
_SECOND_START = f"""
import sys, time
import gpuload
import torch
from gpuload import load
file, folder, cache = sys.argv[1:]
started = time.perf_counter()
prompts = load(file, folder, max_prompt_length={_LIMIT}, cache_dir=cache)
print(time.perf_counter() - started)
assert prompts.report.from_cache == [file], "the token cache was not used"
"""


def run(_: argparse.Namespace) -> int:
    """Loads the shipped prompts, shows one batch, does the same with the baseline, and compares every token.

    Returns:
        0, or 1 if a token differs.
    """
    file, folder = demo_files()
    _import_transformers(folder)
    with tempfile.TemporaryDirectory() as cache:
        prompts, ours = _with_gpuload(file, folder, cache)
    print(prompts.report)
    _show(prompts)
    print("\nthe same row by row: template and tokenizer ...", flush=True)
    expected, theirs = _row_by_row(file, folder)
    print(f"\n  {'seconds, after imports of PyTorch and transformers':58}{'gpuload':>9}{'row by row':>13}")
    for step, seconds in ours.items():
        print(f"  {step:58}{seconds:9.2f}{theirs[step]:13.2f}")
    differing = _differing_tokens(prompts, expected)
    print(f"  {counted(len(expected), 'rows')} compared, {counted(differing, 'tokens differ')}")
    print("\nNext, with your data and your model's tokenizer:")
    print("  gpuload inspect YOUR.parquet --tokenizer YOUR/TOKENIZER")
    return 0 if differing == 0 else 1


def _import_transformers(folder: str) -> None:
    """Opens and uses a tokenizer, which imports most of transformers: whichever way came first would pay for both."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.apply_chat_template([{"role": "user", "content": ""}])


_FIRST = "first start: open the tokenizer, render, tokenize, filter"
_AGAIN = "second start, in a new process"
_EPOCH = f"an epoch in batches of {_BATCH}"


def _with_gpuload(file: str, folder: str, cache: str) -> tuple[PromptDataset, dict[str, float]]:
    """The dataset, and the seconds of each step."""
    seconds = {}
    # The tokenizer by its name, as in the second start: with an object, so little data would not be kept.
    prompts, seconds[_FIRST] = _timed(lambda: load(file, folder, max_prompt_length=_LIMIT, cache_dir=cache))
    command = [sys.executable, "-c", _SECOND_START, file, folder, cache]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    seconds[_AGAIN] = float(done.stdout)
    # `dict` makes all values, as the baseline does.
    _, seconds[_EPOCH] = _timed(lambda: [dict(batch) for batch in prompts.loader(_BATCH)])
    return prompts, seconds


def _row_by_row(file: str, folder: str) -> tuple[torch.Tensor, dict[str, float]]:
    """The ids of all batches, and the seconds of the same steps. Nothing is kept for a second start."""
    from transformers import AutoTokenizer

    seconds = {}
    tokenizer, opened = _timed(lambda: AutoTokenizer.from_pretrained(folder))
    kept, filtered = _timed(lambda: _filter_by_row(file, tokenizer))
    seconds[_FIRST] = seconds[_AGAIN] = opened + filtered
    batches, seconds[_EPOCH] = _timed(
        lambda: [_batch_by_row(kept[i : i + _BATCH], tokenizer) for i in range(0, len(kept), _BATCH)]
    )
    return torch.cat([batch["input_ids"] for batch in batches]), seconds


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """A result, and the seconds that it took."""
    started = time.perf_counter()
    made = work()
    return made, time.perf_counter() - started


def _show(prompts: PromptDataset) -> None:
    batch: Mapping[str, Any] = prompts.batch(range(min(_BATCH, len(prompts))))
    print("\na batch")
    for key, value in batch.items():
        kind = str(value.dtype).removeprefix("torch.")
        print(f"  {key:15} {kind:7} {tuple(value.shape)}")


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
