"""Rows out of verl's RLHFDataset: the messages and the other columns; no tokens. Runs in verl's own environment."""

from typing import Any

import numpy as np
from transformers import AutoTokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset

from bench.workers.common import answer, job, rate, shuffled_batches
from bench.workers.load_verl import config


def main() -> None:
    """Reads without the filter, then draws the rows that are known to pass it."""
    task = job()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    dataset = RLHFDataset(task["files"], tokenizer, config(task, filter_overlong_prompts=False))
    batches = shuffled_batches(np.load(task["kept"]), task["batch"])

    def draw(rows: Any) -> list[dict[str, Any]]:
        return [dataset[row] for row in rows]

    answer(rates={"getitem": rate(draw, batches, task["seconds"])})


if __name__ == "__main__":
    main()
