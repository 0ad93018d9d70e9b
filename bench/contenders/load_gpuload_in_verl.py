"""gpuload's RLHFDataset inside verl. Runs in verl's environment."""

# The first load imports these lazily (Arrow imports pandas). Imports are not counted for any contender.
import awkward  # noqa: F401
import gigatoken  # noqa: F401
import pandas  # noqa: F401
import verl.utils.fs  # noqa: F401
from transformers import AutoTokenizer

from bench.contenders.common import Meter, answer, prompts_digest, task_given
from bench.contenders.load_verl import config
from gpuload.integrations.verl import RLHFDataset


def main() -> None:
    """Measure one load."""
    task = task_given()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    settings = config(task, filter_overlong_prompts=True)
    meter = Meter()
    dataset = RLHFDataset(task["files"], tokenizer, settings)
    measured = meter.stop()
    prompts = [row["prompt"] for row in dataset.dataframe.take(range(len(dataset)))]
    answer(
        **measured,
        rows_read=task["rows"],
        rows_kept=len(dataset),
        prompts_digest=prompts_digest(prompts),
    )


if __name__ == "__main__":
    main()
