"""fitting(): data with images for TRL's `SFTTrainer`, without the rows that are too long.

TRL's collator tokenizes data with images batch by batch, and truncates what is too long, maybe in an image: then the
model raises an error, because tokens and pixels do not agree. TRL has no filter. Here the length of a row is that of
the ids that its collator would make, from the text and the headers of the images.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from datasets.features.features import require_decoding
from trl.data_utils import apply_chat_template, is_conversational, prepare_multimodal_messages
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from gpuload.core.errors import DataError, OptionError
from gpuload.kinds.images.engine import ImageEngine
from gpuload.kinds.images.lengths import lengths_of
from gpuload.kinds.images.options import ImageOptions, is_processor
from gpuload.kinds.images.reference import ImageReference
from gpuload.media.arrow import values_of
from gpuload.media.dry_run import Size
from gpuload.media.headers import FileBytes, read_header
from gpuload.media.references import as_list

_ROWS = 512  # at a time
_COMPARED = 6  # rows, with TRL's own collator
_COLUMNS = ("images", "image")

logger = logging.getLogger("gpuload.integrations.trl")


def fitting(dataset: Any, processor: Any, max_length: int, *, chat_template: str | None = None) -> Any:
    """Drop the rows of a dataset with images that have more tokens than a limit, as `SFTTrainer` counts them.

    Rows of which TRL's collator raises an error, such as those with a truncated image, are dropped as well. Damage in
    the middle of a file, which only decoding shows, is not looked for. The log says how many rows were dropped, and
    why. Pass the result to TRL's trainer with the same `max_length`: nothing is truncated.

    Examples:
        >>> from gpuload.integrations.trl import fitting
        >>> fitting(dataset, processor, 4096)  # doctest: +SKIP

    Args:
        dataset: A `datasets.Dataset` as TRL's `SFTTrainer` takes it: a column `image` or `images`, and `messages`,
            `prompt` with `completion`, or `text`.
        processor: A processor of transformers.
        max_length: Maximum length of a row in tokens.
        chat_template: That of the trainer, if it is not the processor's own.

    Returns:
        A `datasets.Dataset` of the rows that are kept, in their order.

    Raises:
        OptionError: It is no processor, or the limit is not positive.
        DataError: The dataset has no images, or no row is kept.
    """
    if not is_processor(processor):
        raise OptionError(f"fitting needs a processor, not {type(processor).__name__}: AutoProcessor.from_pretrained")
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1:
        raise OptionError(f"max_length={max_length!r}: expected a positive number of tokens")
    key = next((name for name in _COLUMNS if name in (getattr(dataset, "column_names", None) or ())), None)
    if key is None or not hasattr(dataset, "select"):
        raise DataError("fitting needs a datasets.Dataset with a column image or images, in which TRL finds images")
    lengths = _CollatedLengths(dataset, processor, key, chat_template)
    found = np.concatenate([np.zeros(0, np.int64), *map(lengths.of_part, range(0, len(dataset), _ROWS))])
    if why := lengths.difference(found, max_length):
        logger.warning("gpuload: TRL's collator is run on every row: %s", why)
        found[:] = -1
    for row in np.flatnonzero(found < 0).tolist():
        found[row] = lengths.by_trl(row)
    keep = (found >= 0) & (found <= max_length)
    logger.info(
        "gpuload: %s of %s rows have at most %s tokens%s",
        *(f"{count:,}" for count in (int(keep.sum()), len(keep), max_length)),
        "".join(f"; {count:,} cannot be used: {why}" for why, count in lengths.reasons.most_common(5)),
    )
    if not keep.any():
        raise DataError(f"none of {len(keep):,} rows has at most {max_length} tokens and can be used: raise max_length")
    return dataset.select(np.flatnonzero(keep).tolist())


class _CollatedLengths:
    """Lengths of rows as TRL's collator makes them.

    Args:
        dataset, processor, chat_template: as for `fitting`.
        key: the column with images.

    Attributes:
        reasons: why rows cannot be used → how many.
    """

    def __init__(self, dataset: Any, processor: Any, key: str, chat_template: str | None):
        self._decoded = require_decoding(dataset.features[key])  # the collator takes nothing else
        self._rows, self._table, self._key = dataset.with_format(None), dataset.with_format("arrow"), key
        self._processor, self._template = processor, chat_template
        more = {} if chat_template is None else {"chat_template": chat_template}
        self._engine = ImageEngine(ImageReference(processor, ImageOptions(key), **more))
        self._collator = DataCollatorForVisionLanguageModeling(processor, chat_template=chat_template)
        self._by_trl: dict[int, int] = {}
        self.reasons: Counter[str] = Counter()

    def of_part(self, first: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Of some rows from `first` on; -1 where only the collator knows."""
        table = self._table[first : first + _ROWS]
        if self._engine.by_prompt or not self._decoded:
            return np.full(table.num_rows, -1, np.int64)
        images = [value for chunk in table.column(self._key).chunks for value in values_of(chunk)]
        rows = table.drop_columns([self._key]).to_pylist()
        texts: list[tuple[str | None, str]] = []
        sizes: list[Sequence[Size]] = []
        for row, given in zip(rows, images, strict=True):
            try:
                if given is None and "messages" not in row:
                    raise ValueError("the processor gets None in the place of images")
                sizes.append([_size_of(image) for image in (as_list(given) if self._key == "images" else [given])])
                texts.append(self._texts(row, len(sizes[-1])))
            except Exception:  # the collator finds out
                sizes = [*sizes[: len(texts)], ()]
                texts.append((None, ""))
        found = lengths_of(self._engine, [text for text, _ in texts], sizes)
        more = lengths_of(self._engine, [completion for _, completion in texts], [()] * len(texts))
        return np.where((found < 0) | (more < 0), -1, found + more)

    def _texts(self, row: Mapping[str, Any], count: int) -> tuple[str, str]:
        """What the collator tokenizes of a row with so many images: a text, and one behind it."""
        images = ["an image"] * count  # which TRL moves into messages, and templates do not look at
        if "messages" in row:
            messages = prepare_multimodal_messages(row["messages"], images)
            return self._processor.apply_chat_template(messages, chat_template=self._template, tokenize=False), ""
        if "text" in row:
            return row["text"], ""
        given = {"prompt": row["prompt"], "completion": row["completion"]}
        if is_conversational(given):
            given["prompt"] = prepare_multimodal_messages(given["prompt"], images)
            given["completion"] = prepare_multimodal_messages(given["completion"])
            given = apply_chat_template(given, self._processor)
        return given["prompt"], given["completion"]

    def by_trl(self, row: int) -> int:
        """The length of a row by the collator; -1 if it raises an error."""
        if row not in self._by_trl:
            try:
                self._by_trl[row] = int(self._collator([dict(self._rows[row])])["attention_mask"].sum())
            except Exception as error:
                why = re.sub(r"\bat 0x[0-9a-f]+", "...", str(error))  # another one for each row
                self.reasons[f"{type(error).__name__}: {why:.80}"] += 1
                self._by_trl[row] = -1
        return self._by_trl[row]

    def difference(self, found: np.ndarray[Any, Any], limit: int) -> str | None:
        """What differs from the lengths of the collator, of the rows next to the limit and of some others."""
        known = np.flatnonzero(found >= 0)
        near = known[np.argsort(np.abs(found[known] - limit), kind="stable")][: _COMPARED // 2]
        spread = known[np.argsort(found[known], kind="stable")][
            np.linspace(0, max(0, len(known) - 1), min(len(known), _COMPARED // 2)).astype(int)
        ]
        for row in {*near.tolist(), *spread.tolist()}:
            made = self.by_trl(row)
            if made >= 0 and made != found[row]:
                return f"row {row} has {found[row]} tokens by the rule of its processor, and {made} by the collator"
            found[row] = made
        return None


def _size_of(image: Any) -> Size:
    """The size of an image that `datasets` decodes."""
    data = image["bytes"] if image["bytes"] is not None else FileBytes(os.path.realpath(image["path"]))
    return read_header(data)[:2]
