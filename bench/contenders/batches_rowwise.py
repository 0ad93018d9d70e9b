"""Baseline: template, tokenizer and padding for every row of every epoch, as in verl 0.1 and 0.2."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoTokenizer

from bench.contenders.common import answer, rate, shuffled_batches, task_given
from bench.contenders.load_rowwise import read


def draw_row(frame: pd.DataFrame, number: int, tokenizer: Any, limit: int) -> dict[str, Any]:
    """Return one row with padded tensors."""
    row: dict[Any, Any] = frame.iloc[number].to_dict()
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
    """Read without the filter, then draw rows that are known to pass it."""
    task = task_given()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    frame = read(task["files"])
    batches = shuffled_batches(np.load(task["kept"]), task["batch"])

    def draw(rows: Any) -> list[dict[str, Any]]:
        return [draw_row(frame, row, tokenizer, task["limit"]) for row in rows]

    answer(rates={"baseline, row by row: `__getitem__`": rate(draw, batches, task["seconds"])})


if __name__ == "__main__":
    main()
