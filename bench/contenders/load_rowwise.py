"""Baseline: template and tokenizer, row by row, on a pandas frame, as in verl 0.1 and 0.2: at the start, to filter, and
again for every row of every epoch."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import AutoTokenizer

from bench.contenders.common import Meter, answer, epoch, rows_digest, task_given
from bench.contenders.imported import import_ahead


def read(files: list[str]) -> pd.DataFrame:
    """Return all rows of all files as one frame of Python objects."""
    return pd.concat([pd.read_parquet(file) for file in files])


def kept(frame: pd.DataFrame, tokenizer: Any, limit: int) -> pd.Series:
    """Return which rows have at most `limit` tokens."""
    return frame.apply(
        lambda row: (
            len(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)) <= limit
        ),
        axis=1,
    )


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows whose tensors are made when they are drawn."""

    def __init__(self, frame: pd.DataFrame, tokenizer: Any, limit: int):
        self._frame, self._tokenizer, self._limit = frame, tokenizer, limit

    def __len__(self) -> int:
        return len(self._frame)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        chat = self._frame["prompt"].iloc[row]
        text = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = self._tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        left = (self._limit - len(ids), 0)
        return {
            "input_ids": torch.nn.functional.pad(ids, left, value=self._tokenizer.pad_token_id),
            "attention_mask": torch.nn.functional.pad(torch.ones_like(ids), left),
        }


def main() -> None:
    """Measure one load, and an epoch if asked for."""
    task = task_given()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    import_ahead(ours=False)
    meter = Meter()
    frame = read(task["files"])
    mask = kept(frame, tokenizer, task["limit"])
    filtered = frame[mask]
    measured = meter.stop()
    epochs = {}
    if task.get("batch"):
        rows = Rows(filtered, tokenizer, task["limit"])
        loader = torch.utils.data.DataLoader(rows, task["batch"], shuffle=True)
        epochs["tensors"] = epoch(loader, ("input_ids", "attention_mask"), task["checked"])
    answer(
        **measured,
        epochs=epochs,
        rows_read=len(frame),
        rows_kept=len(filtered),
        rows_digest=rows_digest(np.flatnonzero(mask.to_numpy())),
    )


if __name__ == "__main__":
    main()
