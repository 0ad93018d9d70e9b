"""A trainer of TRL, or gpuload's of the same name: seconds to construct it with its dataset, and to draw batches."""

import hashlib
import time
from typing import Any

import torch
import trl
from datasets import load_dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from bench.contenders.common import Meter, answer, task_given
from gpuload.integrations import trl as with_gpuload

_ROWS = 5_000
_SIZES = (8, _ROWS)
_SETTINGS = {"SFTTrainer": {"assistant_only_loss": True}, "DPOTrainer": {}}


def small_model(tokenizer: Any) -> Any:
    """Return a model that costs next to nothing."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1,
            num_key_value_heads=1, tie_word_embeddings=True,
        )
    )  # fmt: skip


def drawn(trainer: Any, rows: int) -> tuple[int, float, str]:
    """Draw batches of some rows: their number, CPU seconds, and a digest. The first batch is not counted."""
    torch.manual_seed(0)
    batches = iter(trainer.get_train_dataloader())
    kept = [next(batches)]
    size = len(kept[0]["input_ids"])
    started = time.process_time()
    kept += [next(batches) for _ in range(rows // size)]
    seconds = time.process_time() - started
    digest = hashlib.blake2b(digest_size=12)
    for batch in kept:
        for name, values in batch.items():
            digest.update(name.encode() + values.numpy().tobytes())
    return len(kept) - 1, seconds, digest.hexdigest()


def collated(dataset: Any, collate: Any) -> dict[str, float]:
    """CPU seconds for `_ROWS` rows, repeated if there are fewer: in batches of some sizes, and one by one.

    Batches are made twice and the second time counts, because gpuload makes the first one by TRL's collator too.
    """
    rows = [row % len(dataset) for row in range(_ROWS)]
    seconds = {}
    for size in _SIZES:
        batches = [rows[first : first + size] for first in range(0, _ROWS, size)]
        for _ in range(2):
            started = time.process_time()
            for batch in batches:
                collate(dataset.__getitems__(batch))
            seconds[f"batches of {size}"] = time.process_time() - started
    started = time.process_time()
    for row in rows:
        dataset[row]
    return seconds | {"dataset[i]": time.process_time() - started}


def main() -> None:
    """Measure one start."""
    task = task_given()
    name = task["trainer"]
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    data = load_dataset("parquet", data_files=task["file"])["train"]
    model = small_model(tokenizer)
    more = {"ref_model": small_model(tokenizer)} if name == "DPOTrainer" else {}
    config = getattr(trl, name.replace("Trainer", "Config"))
    args = config(
        output_dir=task["cache"], report_to=[], bf16=False, use_cpu=True, per_device_train_batch_size=8,
        dataset_num_proc=task["processes"], disable_tqdm=True, **_SETTINGS[name],
    )  # fmt: skip
    kind = getattr(with_gpuload if task["library"] == "gpuload" else trl, name)
    meter, cpu_before = Meter(), time.process_time()
    trainer = kind(model, args=args, train_dataset=data, processing_class=tokenizer, **more)
    measured = meter.stop() | {"cpu_seconds": time.process_time() - cpu_before}
    made = trainer.train_dataset
    digest = hashlib.blake2b(digest_size=12)
    for column in sorted(name for name in made.column_names if name.endswith("_ids") or name == "labels"):
        for row in made.with_format("numpy", columns=[column]).select(range(min(task["compared"], len(made)))):
            digest.update(row[column].astype("<i4").tobytes())
    batches, seconds, batches_digest = drawn(trainer, task["drawn"])
    rows = trainer.get_train_dataloader().dataset
    of_rows = collated(rows, trainer.data_collator)
    answer(
        **measured, rows=len(data), kept=len(made), digest=digest.hexdigest(), batches=batches,
        batches_seconds=seconds, batches_digest=batches_digest, collated_rows=_ROWS, seconds_of_rows=of_rows,
    )  # fmt: skip


if __name__ == "__main__":
    main()
