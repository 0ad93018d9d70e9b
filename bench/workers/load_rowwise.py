"""The row-wise way of verl 0.1 and 0.2: pandas, and a template and tokenizer call per row to filter."""

from typing import Any

import numpy as np
import pandas as pd
from transformers import AutoTokenizer

from bench.workers.common import Meter, answer, job, rows_digest


def read(files: list[str]) -> pd.DataFrame:
    """All rows of all files as one frame of Python objects."""
    return pd.concat([pd.read_parquet(file) for file in files])


def kept(frame: pd.DataFrame, tokenizer: Any, limit: int) -> pd.Series:
    """Which rows have at most `limit` tokens."""
    return frame.apply(
        lambda row: (
            len(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)) <= limit
        ),
        axis=1,
    )


def main() -> None:
    """One measured load."""
    task = job()
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
