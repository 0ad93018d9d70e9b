"""Rows from verl's RLHFDataset, without tokens, and from gpuload's in its place. Runs in verl's environment."""

from typing import Any

import numpy as np
from transformers import AutoTokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset as VerlDataset

from bench.contenders.common import answer, rate, shuffled_batches, task_given
from bench.contenders.load_verl import config
from gpuload.integrations.verl import RLHFDataset


def main() -> None:
    """Read without the filter, then draw rows that are known to pass it."""
    task = task_given()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    settings = config(task, filter_overlong_prompts=False)
    theirs, ours = (kind(task["files"], tokenizer, settings) for kind in (VerlDataset, RLHFDataset))
    batches = shuffled_batches(np.load(task["kept"]), task["batch"])

    def row_by_row(dataset: Any) -> Any:
        return lambda rows: [dataset[row] for row in rows]

    answer(
        rates={
            "verl 0.9.1: `__getitem__`, no tokens": rate(row_by_row(theirs), batches, task["seconds"]),
            "gpuload inside verl 0.9.1: `__getitems__`, no tokens": rate(ours.__getitems__, batches, task["seconds"]),
            "gpuload inside verl 0.9.1: `__getitem__`, no tokens": rate(row_by_row(ours), batches, task["seconds"]),
        }
    )


if __name__ == "__main__":
    main()
