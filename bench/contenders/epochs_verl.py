"""Epochs of verl's RLHFDataset and of gpuload's, through the loader of verl's trainer. Runs in verl's environment."""

import os
import time
from typing import Any

from transformers import AutoTokenizer
from verl.utils.dataset.rl_dataset import RLHFDataset as VerlDataset

from bench.contenders.common import answer, objects_digest, task_given
from bench.contenders.load_verl import config, make_loader
from gpuload.integrations.verl import RLHFDataset


def epoch(loader: Any) -> dict[str, float]:
    """Return the seconds of one epoch, and the CPU seconds of this process and of its workers."""
    before, started = os.times(), time.perf_counter()
    for _ in loader:
        pass
    seconds, after = time.perf_counter() - started, os.times()
    process, workers = (
        sum(getattr(after, prefix + kind) - getattr(before, prefix + kind) for kind in ("user", "system"))
        for prefix in ("", "children_")
    )
    return {"seconds": seconds, "process_cpu": process, "workers_cpu": workers}


def digest(loader: Any) -> str:
    """Return a digest of everything in the batches of one epoch."""
    columns = ({key: batch[key].tolist() for key in sorted(batch)} for batch in loader)
    return objects_digest(columns)


def main() -> None:
    """Compare one epoch, then run epochs in turns."""
    task = task_given()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    settings = config(task, filter_overlong_prompts=False, shuffle=True, seed=0)
    theirs, ours = (kind(task["files"], tokenizer, settings) for kind in (VerlDataset, RLHFDataset))
    loaders: dict[str, Any] = {}
    for workers in task["workers"]:
        pair = [make_loader(dataset, settings, task["batch"], workers) for dataset in (theirs, ours)]
        if digest(pair[0]) != digest(pair[1]):  # the order of an epoch depends on the number of workers
            raise ValueError(f"gpuload's batches are not verl's with {workers} workers")
        names = (f"verl 0.9.1, {workers} workers", f"gpuload inside verl 0.9.1, {workers} workers")
        loaders |= dict(zip(names, pair, strict=True))
    epochs: dict[str, list[dict[str, float]]] = {name: [] for name in loaders}
    for _ in range(task["repeats"]):
        for name, loader in loaders.items():
            epochs[name].append(epoch(loader))
    answer(rows=len(next(iter(loaders.values()))) * task["batch"], batch=task["batch"], epochs=epochs)


if __name__ == "__main__":
    main()
