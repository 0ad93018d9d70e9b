"""Baseline: template and tokenizer, row by row, on a pandas frame, as in verl 0.1 and 0.2."""

from typing import Any

import numpy as np
import pandas as pd
from transformers import AutoTokenizer

from bench.contenders.common import Meter, answer, rows_digest, task_given


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


def main() -> None:
    """Measure one load."""
    task = task_given()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    meter = Meter()
    frame = read(task["files"])
    mask = kept(frame, tokenizer, task["limit"])
    filtered = frame[mask]
    measured = meter.stop()
    answer(
        **measured,
        rows_read=len(frame),
        rows_kept=len(filtered),
        rows_digest=rows_digest(np.flatnonzero(mask.to_numpy())),
    )


if __name__ == "__main__":
    main()
