"""verl's RLHFDataset, unchanged. Runs in verl's environment."""

from typing import Any

import verl.utils.fs  # noqa: F401  (imported lazily by the first load)
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset

from bench.contenders.common import Meter, answer, dataset_rows, prompts_digest, rows_digest, task_given


def config(task: dict[str, Any], **more: Any) -> Any:
    """Return verl's `data:` section with defaults for all but a few keys."""
    return OmegaConf.create({"max_prompt_length": task["limit"], "cache_dir": task["cache"], **more})


def main() -> None:
    """Measure one load."""
    task = task_given()
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
        prompts_digest=prompts_digest(dataset.dataframe["prompt"]),
    )


if __name__ == "__main__":
    main()
