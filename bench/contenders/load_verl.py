"""verl's RLHFDataset, unchanged. Runs in verl's environment."""

from typing import Any

import verl.utils.fs  # noqa: F401
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoTokenizer
from verl.trainer.ppo.utils import create_rl_sampler
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

from bench.contenders.common import Meter, answer, dataset_rows, epoch, objects_digest, rows_digest, task_given
from bench.contenders.imported import import_ahead


def config(task: dict[str, Any], **more: Any) -> Any:
    """Return verl's `data:` section with defaults for all but a few keys."""
    return OmegaConf.create({"max_prompt_length": task["limit"], "cache_dir": task["cache"], **more})


def make_loader(dataset: Any, settings: Any, batch: int, workers: int) -> Any:
    """Return the training data loader of verl's `RayPPOTrainer`."""
    return StatefulDataLoader(
        dataset=dataset,
        batch_size=batch,
        num_workers=workers,
        drop_last=True,
        collate_fn=collate_fn,
        sampler=create_rl_sampler(settings, dataset),
    )


def epochs_of(dataset: Any, settings: Any, task: dict[str, Any]) -> dict[str, dict[str, float | int]]:
    """Measure an epoch of verl's batches, which have messages and columns, with each number of workers of the task."""
    if not task.get("batch"):
        return {}
    size = min(task["batch"], len(dataset))
    return {
        f"{workers} workers": epoch(make_loader(dataset, settings, size, workers), ("raw_prompt",), False)
        for workers in task["loader_workers"]
    }


def main() -> None:
    """Measure one load, and epochs if asked for."""
    task = task_given()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    settings = config(
        task, filter_overlong_prompts=True, filter_overlong_prompts_workers=task["workers"], shuffle=True, seed=0
    )
    import_ahead(ours=False)
    meter = Meter()
    dataset = RLHFDataset(task["files"], tokenizer, settings)
    measured = meter.stop()
    epochs = epochs_of(dataset, settings, task)
    answer(
        **measured,
        epochs=epochs,
        rows_read=task["rows"],
        rows_kept=len(dataset),
        rows_digest=rows_digest(dataset_rows(dataset.dataframe)),
        prompts_digest=objects_digest(dataset.dataframe["prompt"]),
    )


if __name__ == "__main__":
    main()
