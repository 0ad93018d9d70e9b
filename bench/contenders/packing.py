"""Packing on one core, gpuload and TRL in turns, with documents of the same lengths; and an epoch of packed batches."""

import os

# Before any import starts a thread pool.
os.environ |= {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, disable_progress_bars
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from trl.data_utils import pack_dataset
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import gpuload
from bench.contenders.common import answer, epoch, task_given
from bench.data import conversations
from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.marks import with_loss
from gpuload.dataset.pieces import tokens_of
from gpuload.engines.host.packs import packed
from gpuload.packing import pack
from gpuload.packing.packs import Packing

_ROUNDS = 3
_STRATEGIES: dict[str, Packing] = {"bfd": "trl", "bfd_split": "trl_bfd_split", "wrapped": "trl_wrapped"}
"""TRL's strategies, and gpuload's names of the same packs."""


def lengths_of(task: dict[str, Any]) -> Any:
    """Return the lengths of the prompts of a dataset in tokens, or generated ones, (n,) int64."""
    if task["generated"]:
        # Half of the documents have less than 403 tokens, one in a hundred more than 4,100.
        chosen = np.random.default_rng(0).lognormal(6.0, 1.0, task["generated"])
        return chosen.astype(np.int64).clip(1, 32_768)
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    options = {"filter_overlong_prompts": False, "cache_dir": task["cache"], "device": "cpu"}
    return gpuload.load(task["files"], tokenizer, **options).tokens.lengths


def epochs_of(task: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Measure an epoch of packed batches: of gpuload's loader, and of a dataset that TRL has packed."""
    size, batch = task["size"], task["batch"]
    file = Path(task["cache"]) / "rows.parquet"
    pq.write_table(pa.table({"messages": conversations(task["files"])}), file)
    chats = gpuload.load_chats(str(file), task["tokenizer"], max_length=1 << 20, token_cache=False, progress=False)
    rows = Dataset(chats.to_arrow(columns=[]).read_all())
    packs = pack_dataset(rows, size, "bfd")
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    loaders = {
        "gpuload": chats.loader(batch_size=batch, packing="bfd", pack_length=size, shuffle=True, seed=0),
        "TRL": DataLoader(packs, batch, shuffle=True, collate_fn=collate),
    }
    keys = ("input_ids", "labels", "position_ids")
    return {name: epoch(loader, keys, False) | {"rows": len(chats)} for name, loader in loaders.items()}


def main() -> None:
    """Pack with each strategy, then draw an epoch of packs."""
    task = task_given()
    size = task["size"]
    disable_progress_bars()
    lengths = lengths_of(task)
    offsets = offsets_of(lengths)
    chance = np.random.default_rng(0)
    ids = Ragged(chance.integers(0, 150_000, offsets[-1], np.int32), offsets)
    # Turns of 32 tokens with and without loss.
    mask = (np.arange(offsets[-1]) // 32 % 2).astype(np.uint8)
    seconds: dict[str, list[float]] = {}
    fill: dict[str, float] = {}

    def run(name: str, work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        made = work(*arguments, **options)
        seconds.setdefault(name, []).append(time.perf_counter() - started)
        return made

    def dataset(**columns: Any) -> Dataset:
        bounds = pa.array(offsets.astype(np.int32))
        rows = {name: pa.ListArray.from_arrays(bounds, pa.array(values)) for name, values in columns.items()}
        return Dataset(pa.table(rows))

    for _ in range(_ROUNDS):
        for strategy, same in _STRATEGIES.items():
            theirs = run(f"TRL: {strategy}", pack_dataset, dataset(input_ids=ids.values), size, strategy)
            for name in (strategy, same):
                plan = run(f"gpuload: {name}", pack, lengths, size, name, shuffle=True)
                fill[f"gpuload: {name}"] = plan.fill(size)
            values = theirs.data.table["input_ids"].combine_chunks().flatten().to_numpy()
            fill[f"TRL: {strategy}"] = len(values) / (len(theirs) * size)
            plan = pack(lengths, size, same)
            whole = packed(tokens_of(with_loss(ids, mask), plan), plan)
            if not np.array_equal(whole["input_ids"][0].numpy(), values):
                raise SystemExit(f"gpuload's packs differ from TRL's {strategy}")
    answer(
        rows=len(lengths),
        tokens=int(offsets[-1]),
        seconds={name: median(took) for name, took in seconds.items()},
        fill=fill,
        epochs={} if task["generated"] else epochs_of(task),
    )


if __name__ == "__main__":
    main()
