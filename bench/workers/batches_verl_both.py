"""The same rows out of verl's class and out of gpuload's, in one process. Runs in verl's own environment."""

from typing import Any

from transformers import AutoTokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset as VerlDataset

from bench.workers.common import answer, job, rate, shuffled_batches
from bench.workers.load_verl import config
from gpuload.integrations.verl import RLHFDataset


def main() -> None:
    """Reads without the filter, then draws by turns."""
    task = job()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    settings = config(task, filter_overlong_prompts=False)
    theirs, ours = (kind(task["files"], tokenizer, settings) for kind in (VerlDataset, RLHFDataset))
    batches = shuffled_batches(range(len(theirs)), task["batch"])

    def one_by_one(dataset: Any) -> Any:
        return lambda rows: [dataset[row] for row in rows]

    answer(
        rates={
            "verl's `__getitem__`": rate(one_by_one(theirs), batches, task["seconds"]),
            "gpuload's `__getitems__`": rate(ours.__getitems__, batches, task["seconds"]),
            "gpuload's `__getitem__`": rate(one_by_one(ours), batches, task["seconds"]),
        }
    )


if __name__ == "__main__":
    main()
