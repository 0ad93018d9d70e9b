"""Rows out of verl 0.1 and 0.2: template, tokenizer and padding again for every row of every epoch."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoTokenizer

from bench.workers.common import answer, job, rate, shuffled_batches
from bench.workers.load_rowwise import read


def draw_row(frame: pd.DataFrame, number: int, tokenizer: Any, limit: int) -> dict[str, Any]:
    """One row as a training loop wants it."""
    row = frame.iloc[number].to_dict()
    chat = row.pop("prompt")
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    row["input_ids"] = torch.nn.functional.pad(ids, (limit - len(ids), 0), value=tokenizer.pad_token_id)
    row["attention_mask"] = torch.nn.functional.pad(torch.ones_like(ids), (limit - len(ids), 0))
    row["position_ids"] = (row["attention_mask"].cumsum(0) - 1).clip(min=0)
    row["raw_prompt_ids"] = tokenizer.encode(text, add_special_tokens=False)
    row["index"] = row.get("extra_info", {}).get("index", 0)
    return row


def main() -> None:
    """Reads without the filter, then draws the rows that are known to pass it."""
    task = job()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    frame = read(task["files"])
    batches = shuffled_batches(np.load(task["kept"]), task["batch"])

    def draw(rows: Any) -> list[dict[str, Any]]:
        return [draw_row(frame, row, tokenizer, task["limit"]) for row in rows]

    answer(rates={"getitem": rate(draw, batches, task["seconds"])})


if __name__ == "__main__":
    main()
