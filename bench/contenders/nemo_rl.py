"""NeMo-RL's dataset for GRPO or SFT, or gpuload's: the start, and an epoch in which all rows are read.

Runs in the environment of `make nemo-rl-test`; `NEMO_RL_REPO` names a checkout.
"""

import os
import sys
from functools import partial
from typing import Any

sys.path.append(os.environ["NEMO_RL_REPO"])

from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.data.datasets import AllTaskProcessedDataset, load_response_dataset

from bench.contenders.common import Clock, answer, objects_digest, task_given
from bench.contenders.imported import import_ahead
from gpuload.integrations.comparison import comparable

_LIMIT = 4096
_SETTINGS = {"add_bos": True, "add_eos": True, "add_generation_prompt": False}


def set_up(task: dict[str, Any]) -> Any:
    """Train data, as NeMo-RL's scripts make it of a configuration."""
    ours = task["library"] == "gpuload"
    name, processor = task[task["library"]], task["processor"]
    config: dict[str, Any] = {
        "dataset_name": f"gpuload.integrations.nemo_rl.{name}" if ours else name,
        "data_path": task["file"],
        "processor": processor,
    }
    settings = _SETTINGS if processor == "sft_processor" else {}
    section = {"name": task["tokenizer"]}
    data = load_response_dataset(config | ({"tokenizer": section, **settings} if ours else {}))
    processors = {data.task_name: (data.task_spec, partial(data.processor, **settings))}
    return AllTaskProcessedDataset(data.dataset, get_tokenizer(section), None, processors, max_seq_length=_LIMIT)


def main() -> None:
    """Measure one of the two."""
    task, clock = task_given(), Clock()
    import_ahead(ours=task["library"] == "gpuload")
    with clock("start"):
        dataset = set_up(task)
    if len(dataset) != task["rows"]:
        raise ValueError(f"{len(dataset)} of {task['rows']} rows are left")
    with clock("an epoch"):
        for row in range(len(dataset)):
            dataset[row]
    rows = (comparable(dataset[row]) for row in range(len(dataset)))
    digest = objects_digest(rows) if task["compared"] else ""
    answer(seconds=clock.seconds, cpu_seconds=clock.cpu_seconds, digest=digest)


if __name__ == "__main__":
    main()
