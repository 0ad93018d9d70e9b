"""Data for SFT: `gpuload.load_chats`, or TRL's own preparation, of the same conversations with loss on answers.

The template is TRL's training template of the tokenizer's model, for both.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer
from trl.chat_template_utils import get_training_chat_template

import gpuload
from bench.contenders.common import Meter, answer, task_given


def conversations(task: dict[str, Any]) -> list[list[dict[str, str]]]:
    """Read the conversations of a dataset, each ending with an answer."""
    rows = []
    for path in task["files"]:
        for messages in pq.read_table(path, columns=["prompt"])["prompt"].to_pylist():
            messages = [{"role": each["role"], "content": each["content"]} for each in messages]
            if messages[-1]["role"] != "assistant":  # only a question: it is answered by itself
                messages = [*messages, {"role": "assistant", "content": messages[-1]["content"]}]
            rows.append(messages)
    return rows[: task["most"]]


def write_conversations(task: dict[str, Any], file: Path) -> int:
    """Write conversations. Returns their number."""
    rows = conversations(task)
    pq.write_table(pa.table({"messages": rows}), file)
    return len(rows)


def by_gpuload(load: Callable[..., Any]) -> Callable[[Path, Any, str, int], Any]:
    """Load as a user does by one of gpuload's functions, without the token cache."""
    settings = {"max_length": 1 << 20, "token_cache": False, "progress": False}
    return lambda file, tokenizer, template, _: load(str(file), tokenizer, chat_template=template, **settings)


def by_trl(file: Path, tokenizer: Any, template: str, processes: int) -> Any:
    """Prepare as SFTTrainer does with `assistant_only_loss=True`."""
    from datasets import load_dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    data = load_dataset("parquet", data_files=str(file), cache_dir=str(file.parent / "datasets"))["train"]
    config = SFTConfig(
        output_dir=str(file.parent), assistant_only_loss=True, max_length=None, bf16=False, report_to=[],
        dataset_num_proc=processes,
    )  # fmt: skip
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer, chat_template=template, completion_only_loss=False)
    return SFTTrainer._prepare_dataset(trainer, data, tokenizer, config, False, None, "train")


def digest(data: Any, rows: int, names: Sequence[str]) -> str:
    """Digest of some lists of numbers of the first rows."""
    made = hashlib.sha256()
    for row in (data[k] for k in range(rows)):
        for name in names:
            made.update(np.asarray(row[name], np.int64).data)
    return made.hexdigest()


def measure(
    write: Callable[[dict[str, Any], Path], int], prepare: Mapping[str, Callable[..., Any]], names: Sequence[str]
) -> None:
    """Measure one preparation.

    Args:
        write: writes the rows of a task to a file; returns their number.
        prepare: library → its preparation.
        names: of the lists that are compared.
    """
    task = task_given()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    template = get_training_chat_template(tokenizer) or tokenizer.chat_template
    file = Path(task["scratch"]) / "rows.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = write(task, file)
    meter = Meter()
    one = prepare[task["library"]]
    data = one(file, tokenizer, template, task["processes"])
    measured = meter.stop()
    if task["library"] == "gpuload":  # TRL would read what it has cached
        started = time.perf_counter()
        one(file, tokenizer, template, 1)
        measured["second_seconds"] = time.perf_counter() - started
    answer(**measured, rows=rows, kept=len(data), digest=digest(data, min(len(data), task["compared"]), names))


if __name__ == "__main__":
    measure(write_conversations, {"gpuload": by_gpuload(gpuload.load_chats), "TRL": by_trl}, ("input_ids", "labels"))
