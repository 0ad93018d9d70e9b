"""What tests of exports share: opening a directory, and five steps of a trainer of TRL."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pyarrow.parquet as pq
import torch
from transformers import Qwen2Config


def opened(directory: Path) -> Any:
    """The store, after a check that parquet has the same rows."""
    store = datasets.load_from_disk(str(directory))
    for name, split in store.items():
        file = pq.read_table(directory / f"{name}.parquet")
        assert file.equals(split.data.table)
        assert file.schema.metadata == split.data.table.schema.metadata  # the features of `datasets`
    return store


def small_model(kind: Any, tokenizer: Any) -> Any:
    """A model with two layers, the same at each call."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return kind(config)


@contextmanager
def one_thread() -> Iterator[None]:
    """With so little to compute, threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def five_steps(
    trainer: Any, config: Any, model: Any, dataset: Any, tokenizer: Any, output: Path, more: Any = None, **settings: Any
) -> tuple[Any, list[float]]:
    """What a trainer makes of a dataset, and the losses of its first five steps.

    Args:
        more: further arguments of the trainer.
        **settings: of its configuration.
    """
    arguments = config(
        output_dir=str(output), report_to=[], bf16=False, use_cpu=True, max_steps=5, logging_steps=1,
        per_device_train_batch_size=2, save_strategy="no", learning_rate=0.01, disable_tqdm=True, **settings,
    )  # fmt: skip
    made = trainer(model, args=arguments, train_dataset=dataset, processing_class=tokenizer, **(more or {}))
    with one_thread():
        made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    assert len(losses) == 5
    return made.train_dataset, losses
