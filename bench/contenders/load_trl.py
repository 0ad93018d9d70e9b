"""`datasets` as in TRL's trainers: a batched map that renders and tokenizes, then a filter on the lengths."""

from typing import Any

import numpy as np
from datasets import load_dataset
from transformers import AutoTokenizer

from bench.contenders.common import Meter, answer, dataset_rows, rows_digest, task_given, tokens_digest


def tokenize(batch: dict[str, list[Any]], tokenizer: Any) -> dict[str, list[Any]]:
    """Render and tokenize 1,000 conversations in one call."""
    return {
        "input_ids": tokenizer.apply_chat_template(batch["prompt"], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
    }


def short_enough(batch: list[list[int]], limit: int) -> list[bool]:
    """Return which rows of a batch pass the filter."""
    return [len(ids) <= limit for ids in batch]


def main() -> None:
    """Measure one load."""
    task = task_given()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    meter = Meter()
    read = load_dataset("parquet", data_files=task["files"])["train"]
    mapped = read.map(tokenize, batched=True, fn_kwargs={"tokenizer": tokenizer})
    filtered = mapped.filter(short_enough, batched=True, input_columns="input_ids", fn_kwargs={"limit": task["limit"]})
    measured = meter.stop()
    ids = [np.asarray(row, np.int32) for row in filtered["input_ids"]]
    answer(
        **measured,
        rows_read=len(read),
        rows_kept=len(filtered),
        rows_digest=rows_digest(dataset_rows(filtered)),
        tokens_digest=tokens_digest(np.concatenate(ids), [len(row) for row in ids]),
    )


if __name__ == "__main__":
    main()
