"""`datasets` as in TRL's trainers: a batched map that renders and tokenizes, then a filter on the lengths.

An epoch is that of a pretokenized dataset: transformers' `DataCollatorWithPadding` in PyTorch's `DataLoader`.
"""

from typing import Any

import numpy as np
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, DataCollatorWithPadding

from bench.contenders.common import Meter, answer, dataset_rows, epoch, rows_digest, task_given, tokens_digest
from bench.contenders.imported import import_ahead


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
    """Measure one load, and an epoch if asked for."""
    task = task_given()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    processes = task["processes"]
    several = {"num_proc": processes} if processes > 1 else {}
    import_ahead(ours=False)
    meter = Meter()
    read = load_dataset("parquet", data_files=task["files"])["train"]
    mapped = read.map(tokenize, batched=True, fn_kwargs={"tokenizer": tokenizer}, **several)
    filtered = mapped.filter(
        short_enough, batched=True, input_columns="input_ids", fn_kwargs={"limit": task["limit"]}, **several
    )
    measured = meter.stop()
    epochs = {}
    if task.get("batch"):
        tokenizer.padding_side = "left"
        collate = DataCollatorWithPadding(tokenizer, padding="max_length", max_length=task["limit"])
        loader = DataLoader(
            filtered.select_columns("input_ids"), task["batch"], shuffle=True, collate_fn=collate,
            num_workers=processes if processes > 1 else 0,
        )  # fmt: skip
        epochs["tensors"] = epoch(loader, ("input_ids", "attention_mask"), task["checked"])
    ids = [np.asarray(row, np.int32) for row in filtered["input_ids"]]
    answer(
        **measured,
        epochs=epochs,
        rows_read=len(read),
        rows_kept=len(filtered),
        rows_digest=rows_digest(dataset_rows(filtered)),
        tokens_digest=tokens_digest(np.concatenate(ids), [len(row) for row in ids]),
    )


if __name__ == "__main__":
    main()
