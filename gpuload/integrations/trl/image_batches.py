"""ready(): data with images for `SFTTrainer` and `DPOTrainer`, with the ids, loss masks and pixels of gpuload's loads.

TRL's collator learns all tokens, or those of a template with `{% generation %}` blocks, and packs no rows with images.
Here the trainer samples numbers of rows or of packs, and the collator makes batches of them.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset

from gpuload.core.errors import DataError, OptionError
from gpuload.kinds.images.chats import ImageChatDataset
from gpuload.kinds.images.pairs import ImagePairDataset
from gpuload.packing.packs import Packing

NUMBER = "images"
"""The column of numbers of rows. TRL takes a dataset with this column as it is, because its collator makes the ids, and
may remove all others: so it also says of which load the numbers are."""

_TRAINERS = {"messages": ("load_chats", "SFTTrainer"), "chosen": ("load_pairs", "DPOTrainer")}
"""A second column, of no values, which only the right one of TRL's trainers hands to the collator: the load and that
trainer."""

_OF_IMAGES = ("height", "width", "nbytes", "sample")
_DIGESTED_ROWS = 10_000  # at a time


def ready(
    rows: Any, *, packing: Packing | None = None, pack_length: int | None = None
) -> tuple[Any, Callable[[Sequence[Any]], dict[str, Any]]]:
    """Loaded data with images as `train_dataset` and `data_collator` of TRL's `SFTTrainer` or `DPOTrainer`.

    `max_length` and `completion_only_loss` of the trainer have no effect; the options of the load have. `packing`,
    `padding_free` and `assistant_only_loss` are errors of TRL: batches have what they mean already.

    Examples:
        >>> from gpuload.integrations.trl import ready
        >>> dataset, collate = ready(chats)  # doctest: +SKIP
        >>> SFTTrainer(model, args, train_dataset=dataset, data_collator=collate)  # doctest: +SKIP

    Args:
        rows: Made by `gpuload.load_chats`, or by `gpuload.load_pairs` for `"dpo"`, with a processor and
            `media="inputs"`.
        packing: `"bfd"` or `"trl"`: packs of whole conversations, as of `chats.loader`. None: rows, padded.
        pack_length: As for `chats.loader`.

    Returns:
        A `datasets.Dataset` with the columns `images`, the number of a row or pack and a digest of the load,
        `length`, its tokens, and `messages` or `chosen`, which says for which trainer it is; it may be shuffled, split
        and selected from. And its collator, for its rows and that trainer only: tensors that the model takes, see
        `ChatDataset.batch` and `loader`, or `PairDataset.batch`.

    Raises:
        OptionError: These are other rows, their messages have weights that TRL does not know, there are no packs of
            them, or `pack_length` is no length of packs.
    """
    chats = isinstance(rows, ImageChatDataset)
    pairs = isinstance(rows, ImagePairDataset) and rows.objective == "dpo"
    if not (chats or pairs) or rows._media != "inputs":
        raise OptionError("ready needs conversations, or pairs for DPO, loaded with a processor and media='inputs'")
    if "loss_weight" in rows.column_names:
        raise OptionError("TRL does not know weights of messages other than 0 and 1: remove them")
    make, lengths = rows.batch, rows.lengths
    if packing is not None:
        if pairs or rows._facts.merge is None:
            raise OptionError(
                "packs are for conversations, and processors whose position_ids are known: remove packing"
            )
        plan = rows.loader(batch_size=1, packing=packing, pack_length=pack_length, shuffle=False).plan()
        make, lengths = partial(rows._flat, plan), plan.tokens
    elif pack_length is not None:
        raise OptionError("pack_length is for packs: pass packing too")
    load = _digest(rows, lengths)
    numbers = pa.StructArray.from_arrays([np.arange(len(lengths)), pa.repeat(load, len(lengths))], ["row", "load"])
    kept = "messages" if chats else "chosen"
    collate = partial(_collate, make, rows.passed_through.names, load, kept)
    return Dataset.from_dict({NUMBER: numbers, "length": lengths, kept: pa.nulls(len(lengths), pa.bool_())}), collate


def _digest(rows: Any, lengths: np.ndarray[Any, Any]) -> str:
    """The same for the same load in another process, so that a dataset that was saved fits."""
    found = hashlib.sha256(np.asarray(lengths, np.int64).tobytes())
    found.update(rows.fingerprint["tokens"].encode())
    for first in range(0, len(rows), _DIGESTED_ROWS):  # images of equal sizes have equal ids
        for row in rows._references(np.arange(first, min(first + _DIGESTED_ROWS, len(rows)))):
            found.update(repr([[each[name] for name in _OF_IMAGES] for each in row]).encode())
    return found.hexdigest()[:16]


def _collate(
    make: Callable[[Any], Any], others: Sequence[str], load: str, kept: str, rows: Sequence[Any]
) -> dict[str, Any]:
    """A batch of rows with numbers, without the other columns of the files. A `DataError` if they are not those of this
    load; an `OptionError` if the trainer is for other data."""
    given = [row.get(NUMBER) for row in rows]
    if not all(isinstance(each, Mapping) and each.get("load") == load for each in given):
        raise DataError(
            "the collator of ready makes batches of its own rows, and these are others: load the files for training "
            "and evaluation together, and split the rows"
        )
    if not all(kept in row for row in rows):
        raise _of_another_trainer(kept)
    made = make([each["row"] for each in given])
    return {name: made[name] for name in made if name not in others}


def check_trainer(trainer: str, columns: Mapping[str, Any], has_collator: bool) -> None:
    """Checks the columns (name → type) of a trainer's dataset, if `ready` has made it: an `OptionError` if it is for
    another trainer, or comes without its collator."""
    numbers = columns.get(NUMBER)
    if not isinstance(numbers, dict) or numbers.keys() != {"row", "load"}:
        return
    if not has_collator:
        raise OptionError("ready returned a dataset and a collator: pass data_collator, too")
    for kept, (_, right) in _TRAINERS.items():  # with remove_unused_columns=False the collator cannot know it
        if kept in columns and trainer != right:
            raise _of_another_trainer(kept)


def _of_another_trainer(kept: str) -> OptionError:
    made_by, trainer = _TRAINERS[kept]
    return OptionError(
        f"ready made these batches of {made_by} for {trainer}, and this is another trainer, or the column {kept!r} "
        f"was removed: pass both to {trainer}, or make batches for this one with the other load"
    )
