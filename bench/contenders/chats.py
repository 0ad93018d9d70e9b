"""Data for SFT: `gpuload.load_chats`, or TRL's own preparation, of the same conversations with loss on answers.

The template is TRL's training template of the tokenizer's model, for both.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import load_dataset
from transformers import AutoTokenizer
from trl.chat_template_utils import get_training_chat_template
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import gpuload
from bench.contenders.common import Meter, answer, numbers_digest, task_given
from bench.contenders.imported import import_ahead
from bench.data import chosen_evenly, conversations

Prepare = Callable[[Path, Any, str, int], Any]
"""File, tokenizer, template, processes → rows."""


def write_conversations(task: dict[str, Any], file: Path) -> int:
    """Write conversations. Returns their number."""
    rows = chosen_evenly(conversations(task["files"]), task["most"])
    pq.write_table(pa.table({"messages": rows}), file)
    return len(rows)


def by_gpuload(load: Callable[..., Any]) -> Prepare:
    """Load as a user does by one of gpuload's functions, without the token cache."""
    settings = {"max_length": 1 << 20, "token_cache": False, "progress": False}
    return lambda file, tokenizer, template, _: load(str(file), tokenizer, chat_template=template, **settings)


def by_trl(file: Path, tokenizer: Any, template: str, processes: int) -> Any:
    """Prepare as SFTTrainer does with `assistant_only_loss=True`."""
    data = load_dataset("parquet", data_files=str(file), cache_dir=str(file.parent / "datasets"))["train"]
    config = SFTConfig(
        output_dir=str(file.parent), assistant_only_loss=True, max_length=None, bf16=False, report_to=[],
        dataset_num_proc=processes,
    )  # fmt: skip
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer, chat_template=template, completion_only_loss=False)
    return SFTTrainer._prepare_dataset(trainer, data, tokenizer, config, False, None, "train")


def measure(write: Callable[[dict[str, Any], Path], int], prepare: Mapping[str, Prepare], names: Sequence[str]) -> None:
    """Measure one preparation.

    Args:
        write: writes the rows of a task to a file; returns their number.
        prepare: library → its preparation.
        names: of the lists that are compared, if the task says so.
    """
    task = task_given()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    template = get_training_chat_template(tokenizer) or tokenizer.chat_template
    file = Path(task["scratch"]) / "rows.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = write(task, file)
    import_ahead(ours=task["library"] == "gpuload")
    meter = Meter()
    one = prepare[task["library"]]
    data = one(file, tokenizer, template, task["processes"])
    measured = meter.stop()
    if task["library"] == "gpuload":  # TRL would read what it has cached
        started = time.perf_counter()
        one(file, tokenizer, template, 1)
        measured["second_seconds"] = time.perf_counter() - started
    lists = ([row[name] for name in names] for row in (data[k] for k in range(len(data))))
    digest = numbers_digest(lists) if task["compared"] else ""
    answer(**measured, rows=rows, kept=len(data), digest=digest)


if __name__ == "__main__":
    measure(write_conversations, {"gpuload": by_gpuload(gpuload.load_chats), "TRL": by_trl}, ("input_ids", "labels"))
