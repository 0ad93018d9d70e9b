"""A trainer of TRL, or gpuload's of the same name: seconds to construct it with its dataset, and to draw batches."""

import sys
from typing import Any

import torch
import trl
from datasets import load_dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from bench.contenders.common import Clock, answer, numbers_digest, task_given
from bench.contenders.imported import import_ahead
from gpuload.integrations import trl as with_gpuload

_ROWS = 5_000
_DRAWN = 100
_SETTINGS = {"SFTTrainer": {"assistant_only_loss": True}, "DPOTrainer": {}}


def small_model(tokenizer: Any) -> Any:
    """Return a model that costs next to nothing."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=1,
            num_key_value_heads=1, tie_word_embeddings=True,
        )
    )  # fmt: skip


def digest_of(batches: list[Any]) -> str:
    """Digest of the values of batches."""
    return numbers_digest([values for _, values in sorted(batch.items())] for batch in batches)


def main() -> None:
    """Measure one start, then batches: from the trainer's loader, and of rows of the prepared dataset.

    Of those, each is made twice and the second time counts: gpuload makes the first batch by TRL's collator too.
    """
    task, clock = task_given(), Clock()
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
    import_ahead(ours=task["library"] == "gpuload")
    modules = set(sys.modules)
    with clock("start"):
        trainer = kind(model, args=args, train_dataset=data, processing_class=tokenizer, **more)
    imported = sorted(set(sys.modules) - modules)
    made, digest = trainer.train_dataset, ""
    torch.manual_seed(0)
    batches = iter(trainer.get_train_dataloader())
    kept = [next(batches)]
    with clock(f"{_DRAWN} batches of 8 from the loader"):
        kept += [batch for _, batch in zip(range(_DRAWN), batches, strict=False)]
    if task["compared"]:
        columns = sorted(name for name in made.column_names if name.endswith("_ids") or name == "labels")
        rows = made.with_format("numpy", columns=columns)
        digest = numbers_digest([row[name] for name in columns] for row in rows) + digest_of(kept)
    dataset, collate = trainer.get_train_dataloader().dataset, trainer.data_collator
    chosen = [row % len(dataset) for row in range(_ROWS)]
    for size in (8, _ROWS):
        for _ in range(2):
            with clock(f"{_ROWS:,} rows in batches of {size:,}"):
                for first in range(0, _ROWS, size):
                    collate(dataset.__getitems__(chosen[first : first + size]))
    with clock(f"{_ROWS:,} rows as `dataset[i]`"):
        for row in chosen:
            dataset[row]
    answer(seconds=clock.seconds, cpu_seconds=clock.cpu_seconds, kept=len(made), digest=digest, imported=imported)


if __name__ == "__main__":
    main()
