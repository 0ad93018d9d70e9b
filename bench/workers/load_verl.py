"""verl's RLHFDataset, unchanged. Runs in verl's own environment."""

from typing import Any

import verl.utils.fs  # noqa: F401  (imported by the first load otherwise)
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset

from bench.workers.common import Meter, answer, dataset_rows, job, rows_digest, texts_digest


def config(task: dict[str, Any], **more: Any) -> Any:
    """verl's `data:` section with all but a few keys at their defaults."""
    return OmegaConf.create({"max_prompt_length": task["limit"], "cache_dir": task["cache"], **more})


def main() -> None:
    """One measured load."""
    task = job()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    settings = config(task, filter_overlong_prompts=True, filter_overlong_prompts_workers=task["workers"])
    meter = Meter()
    dataset = RLHFDataset(task["files"], tokenizer, settings)
    measured = meter.stop()
    answer(
        **measured,
        rows_read=task["rows"],
        rows_kept=len(dataset),
        rows_digest=rows_digest(dataset_rows(dataset.dataframe)),
        prompts_digest=texts_digest(dataset.dataframe["prompt"]),
    )


if __name__ == "__main__":
    main()
