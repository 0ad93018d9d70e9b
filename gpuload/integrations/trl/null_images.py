"""Conversations with a column `images` in which no row has one, for `SFTTrainer` with a processor.

TRL takes them for data with images: it prepares nothing, and its collator renders and tokenizes each batch, in each
epoch. Here they get columns of ids, which `FlatTextsOfVision` pads. All other columns stay, so that TRL's collator can
make the first batches too, with which these are compared, and those of a dataset that has images.
"""

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow.compute as pc
from datasets import Dataset

from gpuload.integrations.core import unless_unsupported
from gpuload.integrations.trl.preparation import prepared
from gpuload.integrations.trl.sft import SFT
from gpuload.integrations.trl.steps import OWN_ARGUMENTS, Call
from gpuload.sources.types import is_list

logger = logging.getLogger("gpuload.integrations.trl")

_OTHERS = frozenset({"prompt", "completion", "image"}) | OWN_ARGUMENTS
"""Columns with which TRL's collator makes other ids than its `_prepare_dataset`."""


def give_ids(trainer: Any, stock: Callable[..., Any], change: str | None) -> bool:
    """Adds ids to those datasets of an `SFTTrainer`, with TRL's collator for images, that have conversations without
    images. `stock` is TRL's `_prepare_dataset`. Returns whether there is one."""
    if trainer.completion_only_loss:  # which TRL's collator rejects
        return False
    with_ids = partial(_with_ids, trainer, partial(stock, trainer), change)
    held_out = trainer.eval_dataset
    given = {"train": trainer.train_dataset, **(held_out if isinstance(held_out, dict) else {"eval": held_out})}
    made = {name: with_ids(dataset, name) for name, dataset in given.items()}
    if all(made[name] is given[name] for name in given):
        return False
    trainer.train_dataset = made.pop("train")
    trainer.eval_dataset = made if isinstance(held_out, dict) else made["eval"]
    trainer._set_signature_columns_if_needed()  # the columns that `Trainer` keeps
    trainer._signature_columns = [*trainer._signature_columns, "input_ids", "labels"]
    return True


def _with_ids(trainer: Any, stock: Callable[..., Any], change: str | None, dataset: Any, name: str) -> Any:
    """The dataset with ids, or as it is if it has images or cannot be tokenized by columns."""
    if not _is_without_images(dataset):
        return dataset
    args = copy.copy(trainer.args)
    args.max_length, args.shuffle_dataset = None, False  # the collator truncates, and the dataset keeps its order
    given = {"dataset": dataset, "processing_class": trainer.processing_class, "args": args, "packing": False}
    call = Call(trainer, stock, {**given, "formatting_func": None, "dataset_name": name}, change)
    made = unless_unsupported(lambda: prepared(call, SFT), logger, f"TRL's collator for the {name} dataset")
    return dataset if made is None else made


def _is_without_images(dataset: Any) -> bool:
    if not isinstance(dataset, Dataset) or _OTHERS & set(dataset.column_names):
        return False
    if not {"messages", "images"} <= set(dataset.column_names):
        return False
    images = dataset.data.column("images")
    return images.null_count == len(images) or (
        is_list(images.type) and not pc.sum(pc.list_value_length(images)).as_py()
    )
