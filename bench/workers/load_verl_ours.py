"""gpuload's RLHFDataset inside verl. Runs in verl's own environment."""

# Imported by the first load otherwise (pandas by Arrow, where it is installed): no contender's imports are counted.
import awkward  # noqa: F401
import gigatoken  # noqa: F401
import pandas  # noqa: F401
import verl.utils.fs  # noqa: F401
from transformers import AutoTokenizer

from bench.workers.common import Meter, answer, job, texts_digest
from bench.workers.load_verl import config
from gpuload.integrations.verl import RLHFDataset


def main() -> None:
    """One measured load."""
    task = job()
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
        prompts_digest=texts_digest(prompts),
        report=dataset.report,
    )


if __name__ == "__main__":
    main()
