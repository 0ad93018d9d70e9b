"""fitting(): data with images for TRL's trainers, without the rows that are too long.

TRL tokenizes data with images batch by batch. `SFTTrainer` and `DPOTrainer` truncate what is too long, maybe in an
image: then the model raises an error, because tokens and pixels do not agree. `GRPOTrainer` takes prompts of any
length. None has a filter. Here the length of a row is that of the ids that TRL would make, from the text and the
headers of the images.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
from datasets.features.features import require_decoding
from trl.data_utils import apply_chat_template, is_conversational, prepare_multimodal_messages
from trl.trainer.dpo_trainer import DataCollatorForVisionPreference
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from gpuload.core.errors import DataError, OptionError
from gpuload.integrations.comparison import near_and_others
from gpuload.kinds.images.engine import ImageEngine
from gpuload.kinds.images.lengths import lengths_of
from gpuload.kinds.images.options import ImageOptions, is_processor
from gpuload.kinds.images.reference import ImageReference
from gpuload.media.arrow import values_of
from gpuload.media.dry_run import Size
from gpuload.media.headers import FileBytes, read_header
from gpuload.media.references import as_list

_ROWS = 512  # at a time
_COMPARED = 6  # rows, with what TRL makes of them
_COLUMNS = {
    "sft": ("image", "images", "messages", "text", "prompt", "completion"),
    "dpo": ("image", "images", "prompt", "chosen", "rejected", "chat_template_kwargs"),
    "grpo": ("images", "image", "prompt"),
}
"""Trainer → the columns that it reads; of those with images, the first that a dataset has."""

_NAMES = {"sft": "SFTTrainer", "dpo": "DPOTrainer", "grpo": "GRPOTrainer"}

Trainer = Literal["sft", "dpo", "grpo"]

logger = logging.getLogger("gpuload.integrations.trl")


def fitting(
    dataset: Any,
    processor: Any,
    max_length: int,
    *,
    trainer: Trainer | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    length_column_name: str | None = None,
) -> Any:
    """Drop the rows of a dataset with images that have more tokens than a limit, as TRL's trainers count them.

    Rows of which TRL raises an error, such as those with a truncated image, are dropped as well. Damage in the middle
    of a file, which only decoding shows, is not looked for. The log says how many rows were dropped, and why. Pass the
    result to TRL's trainer with the same `max_length`: nothing is truncated.

    Examples:
        >>> from gpuload.integrations.trl import fitting
        >>> fitting(dataset, processor, 4096)  # doctest: +SKIP

    Args:
        dataset: A `datasets.Dataset` as TRL's trainer takes it: a column `image` or `images`, and for `SFTTrainer`
            `messages`, `prompt` with `completion`, or `text`; for `DPOTrainer` `prompt`, `chosen` and `rejected`; for
            `GRPOTrainer` `prompt`.
        processor: A processor of transformers.
        max_length: Maximum length of a row in tokens. For DPO, of the longer one of its two sequences; for GRPO, of the
            prompt with the generation prompt.
        trainer: The trainer; None: the one whose columns the dataset has, in the order DPO, SFT, GRPO.
        chat_template: That of the trainer, if it is not the processor's own. TRL uses it for `messages`, and for GRPO.
        chat_template_kwargs: Those of `GRPOConfig`, with `tools` if the trainer has any. For GRPO.
        length_column_name: Name of a column that is added, with the length of each row, for
            `train_sampling_strategy="group_by_length"`. None: no column.

    Returns:
        A `datasets.Dataset` of the rows that are kept, in their order.

    Raises:
        OptionError: It is no processor, the limit is not positive, or an argument is unknown, or not for this trainer.
        DataError: The dataset has no images, or no row is kept.
    """
    if not is_processor(processor):
        raise OptionError(f"fitting needs a processor, not {type(processor).__name__}: AutoProcessor.from_pretrained")
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1:
        raise OptionError(f"max_length={max_length!r}: expected a positive number of tokens")
    names = getattr(dataset, "column_names", None) or ()
    trainer = trainer or _trainer_of(names)
    if trainer not in _NAMES:
        raise OptionError(f"trainer={trainer!r}: expected 'sft', 'dpo' or 'grpo'")
    if trainer != "grpo" and chat_template_kwargs is not None:
        raise OptionError(f"chat_template_kwargs are those of GRPOConfig, and this is data of {_NAMES[trainer]}")
    if not isinstance(chat_template_kwargs, Mapping | None):
        raise OptionError(f"chat_template_kwargs={chat_template_kwargs!r}: expected a dict")
    if not (length_column_name is None or (isinstance(length_column_name, str) and length_column_name)):
        raise OptionError(f"length_column_name={length_column_name!r}: expected the name of a column")
    if length_column_name in names:
        raise OptionError(f"length_column_name={length_column_name!r}: the dataset has this column")
    key = next((name for name in _COLUMNS[trainer][:2] if name in names), None)
    if key is None or not hasattr(dataset, "select"):
        raise DataError("fitting needs a datasets.Dataset with a column image or images, in which TRL finds images")
    read = dataset.select_columns([name for name in _COLUMNS[trainer] if name in names])
    lengths = _TrlLengths(read, processor, key, trainer, chat_template, chat_template_kwargs or {})
    found = np.concatenate([np.zeros(0, np.int64), *map(lengths.of_part, range(0, len(dataset), _ROWS))])
    if why := lengths.difference(found, max_length):
        logger.warning("gpuload: the processor is run on every row: %s", why)
        found[:] = -1
    for row in np.flatnonzero(found < 0).tolist():
        found[row] = lengths.by_trl(row)
    keep = (found >= 0) & (found <= max_length)
    unusable = "".join(f"; {count:,} cannot be used: {why}" for why, count in lengths.reasons.most_common(5))
    kept = f"{int(keep.sum()):,} of {len(keep):,} rows have at most {max_length:,} tokens"
    logger.info("gpuload: %s, as %s counts them%s", kept, _NAMES[trainer], unusable)
    if not keep.any():
        raise DataError(
            f"none of {len(keep):,} rows has at most {max_length} tokens, as {_NAMES[trainer]} counts them{unusable}"
        )
    if length_column_name is not None:
        dataset = dataset.add_column(length_column_name, found)
    return dataset.select(np.flatnonzero(keep).tolist())


def _trainer_of(names: Collection[str]) -> Trainer:
    """The trainer that takes a dataset with some columns."""
    if {"chosen", "rejected"} <= {*names}:
        return "dpo"
    return "grpo" if "prompt" in names and not {"messages", "text", "completion"} & {*names} else "sft"


class _TrlLengths:
    """Lengths of rows as TRL makes them; see `fitting`. `key` is the column with images."""

    def __init__(
        self, dataset: Any, processor: Any, key: str, trainer: Trainer, template: str | None, kwargs: Mapping[str, Any]
    ):
        self._decoded = require_decoding(dataset.features[key])  # TRL takes nothing else
        self._rows, self._table, self._key = dataset.with_format(None), dataset.with_format("arrow"), key
        self._processor, self._trainer, self._template, self._kwargs = processor, trainer, template, kwargs
        more = {} if template is None else {"chat_template": template}
        self._engine = ImageEngine(ImageReference(processor, ImageOptions(key), **more))
        collator = DataCollatorForVisionPreference if trainer == "dpo" else DataCollatorForVisionLanguageModeling
        self._collator = collator(processor, **({} if trainer == "dpo" else more))  # TRL 1.14 knows no template
        self._by_trl: dict[int, int] = {}
        self._none: bool | None = None
        self.reasons: Counter[str] = Counter()  # why rows cannot be used → how many

    def of_part(self, first: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Of some rows from `first` on; -1 where only TRL knows."""
        table = self._table[first : first + _ROWS]
        if self._engine.by_prompt or not self._decoded:
            return np.full(table.num_rows, -1, np.int64)
        images = [value for chunk in table.column(self._key).chunks for value in values_of(chunk)]
        rows = table.drop_columns([self._key]).to_pylist()
        texts: list[tuple[str | None, list[str]]] = []
        sizes: list[Sequence[Size]] = []
        for number, (row, given) in enumerate(zip(rows, images, strict=True), first):
            try:
                if given is None and self._trainer != "grpo" and not ("messages" in row and self._takes_none(number)):
                    raise ValueError("the processor gets None in the place of images")
                sizes.append([_size_of(image) for image in self._images(given)])
                texts.append(self._texts(row, len(sizes[-1])))
            except Exception:  # TRL finds out
                sizes = [*sizes[: len(texts)], ()]
                texts.append((None, []))
        found = lengths_of(self._engine, [text for text, _ in texts], sizes, self._trainer == "grpo")
        answers = [answer for _, some in texts for answer in some]
        more = iter(lengths_of(self._engine, answers, [()] * len(answers)).tolist())
        longest = [max(each) if min(each) >= 0 else -1 for each in ([0, *islice(more, len(some))] for _, some in texts)]
        return np.where((found < 0) | (np.array(longest) < 0), -1, found + longest)

    def _takes_none(self, row: int) -> bool:
        """Whether TRL's collator takes messages with None in the place of images, as the first such row shows: that of
        1.14 does not."""
        if self._none is None:
            self._none = self.by_trl(row) >= 0
        return self._none

    def _images(self, given: Any) -> Sequence[Any]:
        """The images of a row. A single one may be missing for GRPO only."""
        return as_list(given) if self._key == "images" or self._trainer == "grpo" else [given]

    def _texts(self, row: Mapping[str, Any], count: int) -> tuple[str, list[str]]:
        """What TRL tokenizes of a row with so many images: a text, and those that come behind it."""
        images = ["an image"] * count  # which TRL moves into messages, and templates do not look at
        if self._trainer == "grpo":
            return self._of_prompt(row["prompt"], images, tokenize=False)[0], []
        if "messages" in row:
            messages = prepare_multimodal_messages(row["messages"], images)
            return self._processor.apply_chat_template(messages, chat_template=self._template, tokenize=False), []
        if "text" in row:
            return row["text"], []
        answers = ("chosen", "rejected") if self._trainer == "dpo" else ("completion",)
        if is_conversational(row):
            row = {**row, "prompt": prepare_multimodal_messages(row["prompt"], images)}
            row |= {name: prepare_multimodal_messages(row[name]) for name in answers}
            row = apply_chat_template(row, self._processor)
        return row["prompt"], [row[name] for name in answers]

    def _of_prompt(self, prompt: Any, images: list[Any], **more: Any) -> Any:
        """What `GRPOTrainer` makes of a batch of one prompt."""
        messages = prepare_multimodal_messages(prompt, images)
        given = {"chat_template": self._template, "add_generation_prompt": True, **self._kwargs, **more}
        return self._processor.apply_chat_template([messages], **given)

    def by_trl(self, row: int) -> int:
        """The length of a row by TRL itself; -1 if it raises an error."""
        if row not in self._by_trl:
            try:
                given = dict(self._rows[row])
                if self._trainer == "grpo":
                    images = list(self._images(given[self._key]))
                    made = self._of_prompt(given["prompt"], images, tokenize=True, return_dict=True)
                    self._by_trl[row] = len(made["input_ids"][0])
                else:
                    self._by_trl[row] = int(self._collator([given])["attention_mask"].sum(1).max())
            except Exception as error:
                why = re.sub(r"\bat 0x[0-9a-f]+", "...", str(error))  # another one for each row
                self.reasons[f"{type(error).__name__}: {why:.80}"] += 1
                self._by_trl[row] = -1
        return self._by_trl[row]

    def difference(self, found: np.ndarray[Any, Any], limit: int) -> str | None:
        """What differs from the lengths of TRL, of the rows next to the limit and of some others."""
        for row in near_and_others(found, limit, _COMPARED):
            made = self.by_trl(row)
            if made >= 0 and made != found[row]:
                return f"row {row} has {found[row]} tokens by the rule of its processor, and {made} by TRL"
            found[row] = made
        return None


def _size_of(image: Any) -> Size:
    """The size of an image that `datasets` decodes."""
    data = image["bytes"] if image["bytes"] is not None else FileBytes(os.path.realpath(image["path"]))
    return read_header(data)[:2]
