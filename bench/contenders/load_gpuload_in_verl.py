"""gpuload's RLHFDataset inside verl. Runs in verl's environment."""

import verl.utils.fs  # noqa: F401  (imported lazily by the first load)
from transformers import AutoTokenizer

from bench.contenders.common import Meter, answer, objects_digest, task_given
from bench.contenders.imported import import_ahead
from bench.contenders.load_verl import config, epochs_of
from gpuload.integrations.verl import RLHFDataset


def main() -> None:
    """Measure one load, and an epoch if asked for."""
    task = task_given()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    settings = config(task, filter_overlong_prompts=True, shuffle=True, seed=0)
    import_ahead(ours=True)
    meter = Meter()
    dataset = RLHFDataset(task["files"], tokenizer, settings)
    measured = meter.stop()
    epochs = epochs_of(dataset, settings, task)
    prompts = [row["prompt"] for row in dataset.dataframe.take(range(len(dataset)))]
    answer(
        **measured,
        epochs=epochs,
        rows_read=task["rows"],
        rows_kept=len(dataset),
        prompts_digest=objects_digest(prompts),
    )


if __name__ == "__main__":
    main()
