"""`gpuload demo`: real prompts, a real tokenizer, and the row-wise way beside it."""

import lzma
import os
import shutil
import tempfile
import time
from importlib import resources
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from gpuload.dataset import PromptDataset, collate_fn
from gpuload.load import load

_LIMIT = 512
_BATCH = 256


def demo_files() -> tuple[str, str]:
    """The shipped data set, and a folder with the shipped tokenizer, unpacked once into the user's cache."""
    data = Path(str(resources.files("gpuload.demo_data")))
    folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "gpuload" / "demo" / "qwen2.5"
    wanted = folder / "tokenizer.json"
    if not wanted.exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(data / "qwen2.5" / "tokenizer_config.json", folder)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as unpacked:
            unpacked.write(lzma.decompress((data / "qwen2.5" / "tokenizer.json.xz").read_bytes()))
        os.replace(unpacked.name, wanted)
    return str(data / "gsm8k.parquet"), str(folder)


def demo() -> int:
    """Loads, shows one batch, does the same row by row and compares every token.

    Returns:
        0, or 1 where a token differs.
    """
    from transformers import AutoTokenizer

    file, folder = demo_files()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    started = time.perf_counter()
    prompts = load(file, tokenizer, max_prompt_length=_LIMIT, token_cache=False)  # the other way starts cold too
    loaded = time.perf_counter()
    first = prompts.batch(range(min(_BATCH, len(prompts))))
    for _ in prompts.loader(_BATCH):
        pass
    ours = (loaded - started, time.perf_counter() - loaded)
    print(prompts.report)
    _show(first, tokenizer)

    print("\nthe same the row-wise way: the template and the tokenizer, called for each row", flush=True)
    started = time.perf_counter()
    kept = _filter_row_wise(file, tokenizer)
    filtered = time.perf_counter()
    drawn = [_draw_row_wise(kept[i : i + _BATCH], tokenizer) for i in range(0, len(kept), _BATCH)]
    theirs = (filtered - started, time.perf_counter() - filtered)

    print(f"  {'':18}{'gpuload':>12}{'row by row':>12}")
    for step, a, b in zip(("load and filter", "an epoch's batches"), ours, theirs, strict=True):
        print(f"  {step:18}{a:10.2f} s{b:10.2f} s")
    differing = _differing_tokens(prompts, torch.cat([batch["input_ids"] for batch in drawn]))
    print(f"  {sum(theirs) / sum(ours):.1f} times as fast, {len(kept):,} rows compared, {differing:,} differing tokens")
    return 0 if differing == 0 else 1


def _show(batch: dict[str, Any], tokenizer: Any) -> None:
    print("\na batch")
    for key, value in batch.items():
        kind = str(value.dtype).removeprefix("torch.")
        print(f"  {key:15} {kind:7} {tuple(value.shape)}")
    print(f"  its first row ends with {tokenizer.decode(batch['raw_prompt_ids'][0][-24:])!r}")


def _filter_row_wise(file: str, tokenizer: Any) -> list[dict[str, Any]]:
    """What verl's first versions do at the start of a run."""
    rows = pq.read_table(file).to_pylist()
    return [
        row
        for row in rows
        if len(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]) <= _LIMIT
    ]


def _draw_row_wise(rows: list[dict[str, Any]], tokenizer: Any) -> dict[str, Any]:
    """What they do again for every row of every epoch."""
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
    """Positions of the padded batches that differ; all of them where other rows were kept."""
    if len(prompts) != len(expected):
        return expected.numel()
    found = torch.cat([batch["input_ids"] for batch in prompts.loader(_BATCH)])
    return int((found != expected).sum())
