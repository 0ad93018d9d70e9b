"""Preference data: `gpuload.load_pairs`, or TRL's own preparation for DPO, of the same pairs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import load_dataset
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

import gpuload
from bench.contenders.chats import by_gpuload, measure
from bench.data import chosen_evenly, conversations, pair_columns


def write_pairs(task: dict[str, Any], file: Path) -> int:
    """Write pairs with explicit prompts. Returns their number."""
    rows = chosen_evenly(conversations(task["files"]), task["most"])
    pq.write_table(pa.table(pair_columns(rows)), file)
    return len(rows)


def by_trl(file: Path, tokenizer: Any, template: str, processes: int) -> Any:
    """Prepare as DPOTrainer does."""
    data = load_dataset("parquet", data_files=str(file), cache_dir=str(file.parent / "datasets"))["train"]
    config = DPOConfig(
        output_dir=str(file.parent), max_length=None, bf16=False, report_to=[], dataset_num_proc=processes
    )
    tokenizer.chat_template = template
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer)
    return DPOTrainer._prepare_dataset(trainer, data, tokenizer, config, "train")


if __name__ == "__main__":
    prepare = {"gpuload": by_gpuload(gpuload.load_pairs), "TRL": by_trl}
    measure(write_pairs, prepare, ("prompt_ids", "chosen_ids", "rejected_ids"))
