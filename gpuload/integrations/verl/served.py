"""ServedSFTDataset: rows as served (docs/served.md) for verl's SFT trainer.

    data.custom_cls.path=pkg://gpuload.integrations.verl data.custom_cls.name=ServedSFTDataset

Ids and masks are those of `load_chats(turns="served")`; verl has no such rows, so nothing falls back to its class, and
nothing of verl is used. The shape of a row is that of verl's MultiTurnSFTDataset.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from torch.utils.data import Dataset

from gpuload.core.arrays import row_number
from gpuload.core.errors import DataError, OptionError, PromptTooLongError
from gpuload.core.marks import split
from gpuload.core.options import NO_LIMIT, plain
from gpuload.integrations.core import LOAD_OPTIONS, settings_under
from gpuload.integrations.processors import difference_of_ids, processor_problem, template_of, tokenizer_of
from gpuload.integrations.verl.sft_store import planes_of, shape_row
from gpuload.kinds.load_chats import load_chats
from gpuload.kinds.served.options import OF_SERVED
from gpuload.kinds.training_reference import KWARGS, TOOLS
from gpuload.reference.reference import Reference
from gpuload.sources.fetch import resolve
from gpuload.sources.frames import open_frame
from gpuload.sources.read import Source, open_file

logger = logging.getLogger(__name__)

_KEYS = (*LOAD_OPTIONS, "store", "loss_on", "drop_nulls", *OF_SERVED[1:])


class ServedSFTDataset(Dataset[dict[str, Any]]):
    """Conversations for SFT, each answer behind the prompt that inference would have.

    Takes the arguments and the `data:` section of verl's MultiTurnSFTDataset. It has a row for each row as served, most
    often more than one per conversation: `max_samples` counts conversations, `len` and the trainer's epochs rows. A row
    has the keys, shapes and types of verl's:

        input_ids, position_ids, loss_mask   int64 (L,)
        attention_mask                       int64 (L,), with `pad_mode="right"`

    Under `data.gpuload` are `missing_reasoning`, `thinking`, `serving_template`, `history`, `loss_on`, `drop_nulls` and
    the other options of `load_chats` that `SFTDataset` takes. `truncation="right"` ends rows behind their last answer
    within `max_length`, and drops rows without one.

    Attributes:
        report: what the load did; print it.

    Raises:
        OptionError: an unknown key under `data.gpuload`, an invalid value, or `truncation="left"`.
        SourceError: a file that cannot be found or read.
        DataError: a file without the column of messages, or no rows left.
        PromptTooLongError: a row is longer than `max_length`, with `truncation="error"`.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ):
        config = config or {}
        self.max_length, self.pad_mode = int(config.get("max_length", 1024)), config.get("pad_mode", "right")
        self.truncation = config.get("truncation", "error")
        if self.pad_mode not in ("right", "no_padding"):
            raise OptionError(f"data.pad_mode={self.pad_mode!r}: expected right or no_padding")
        if self.truncation == "left":
            raise OptionError(
                "data.truncation=left is not possible with rows as served, because no answer would be behind its whole "
                "prompt: use error or right"
            )
        if self.truncation not in ("error", "right"):
            raise OptionError(f"data.truncation={self.truncation!r}: expected error or right")
        if processor is not None and (why := processor_problem(processor)):
            raise OptionError(f"rows as served for verl: {why}")
        if isinstance(tokenizer, str):
            tokenizer = Reference(tokenizer).tokenizer
        self.tokenizer = tokenizer_of(processor or tokenizer)
        self._planes = planes_of(processor)
        kwargs = dict(plain(config.get("apply_chat_template_kwargs") or {}))
        messages = config.get("messages_key", "messages")
        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        default = config.get("enable_thinking_default")
        # verl's own configuration says "none", which its class takes for true: here this would be a choice between
        # prompts with and without thinking, which `missing_reasoning` makes.
        if default is not None and default != "none":
            kwargs["enable_thinking"] = bool(default)
        cut = self.truncation == "right"
        options = settings_under("data.gpuload", config.get("gpuload"), _KEYS) | {
            "turns": "served",
            "messages_key": messages,
            "format": "messages",
            "max_length": self.max_length if cut else NO_LIMIT,
            "overlong": "keep_start" if cut else "drop",
            "max_samples": max_samples if max_samples > 0 else -1,
            "shuffle": bool(config.get("shuffle", False)),
            "seed": config.get("seed"),
            "cache_dir": config.get("cache_dir") or None,
            "chat_template": template_of(processor or tokenizer, kwargs.pop("chat_template", None)),
            "apply_chat_template_kwargs": kwargs,
        }
        found = resolve(files, options["cache_dir"], read_in_place=options.get("store") == "disk")
        loaded = load_chats([_renamed(open_file(file), config) for file in found], self.tokenizer, **options)
        if "loss_weight" in loaded.column_names:
            raise OptionError("messages have weights, which verl's loss does not take: use 0 and 1")
        self._rows = loaded.token_store
        self.report = loaded.report
        lengths = np.asarray(self._rows.lengths)
        if not cut and (longer := np.flatnonzero(lengths > self.max_length)).size:
            name, row = loaded.origin(int(longer[0]))
            raise PromptTooLongError(
                f"{len(longer):,} of {len(lengths):,} rows as served, such as row {row} of {name}, have up "
                f"to {int(lengths.max())} tokens, more than max_length={self.max_length}: raise it, or set truncation "
                "to 'right', which ends rows behind their last answer"
            )
        if processor is not None and (why := difference_of_ids(processor, split(self._rows.to_host())[0], True)):
            raise OptionError(f"rows as served for verl: {why}")
        logger.info("gpuload: %s", self.report)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        return shape_row(
            self._rows.take(np.array([row_number(item, len(self))])).values,
            max_length=self.max_length,
            pad_mode=self.pad_mode,
            truncation=self.truncation,
            pad_token_id=self.tokenizer.pad_token_id,
            planes=self._planes,
        )


def _renamed(source: Source, config: Mapping[str, Any]) -> Source:
    """A file with verl's columns as `load_chats` reads it: with the names `tools` and `chat_template_kwargs`.

    Raises:
        OptionError: there is a column with images or videos.
        DataError: the column for `enable_thinking` has no booleans, or there are `chat_template_kwargs` next to it.
    """
    tools, thinking = config.get("tools_key", "tools"), config.get("enable_thinking_key", "enable_thinking")
    names = source.schema.names
    for name in (config.get("image_key", "images"), config.get("video_key", "videos")):
        if name in names:
            raise OptionError(f"{source.name}: column {name!r} has images or videos: rows as served are for texts")
    if thinking not in names and (tools == "tools" or not {tools, "tools"} & set(names)):
        return source
    if thinking in names and KWARGS in names:
        raise DataError(
            f"{source.name}: columns {thinking!r} and {KWARGS!r} both say how a row is rendered: drop one of them"
        )

    def renamed(table: pa.Table) -> pa.Table:
        table = table.select([name for name in table.column_names if name != TOOLS or tools == TOOLS])
        table = table.rename_columns([TOOLS if name == tools else name for name in table.column_names])
        if thinking not in names:
            return table
        column = table[thinking].combine_chunks()
        if not pa.types.is_boolean(column.type) and not pa.types.is_null(column.type):
            raise DataError(f"{source.name}: column {thinking!r} holds {column.type}: convert it to booleans")
        kwargs = pa.StructArray.from_arrays([column.cast(pa.bool_())], ["enable_thinking"], mask=column.is_null())
        return table.drop_columns([thinking]).append_column(KWARGS, kwargs)

    tables = [renamed(table) for table in source.batches()] or [renamed(source.schema.empty_table())]
    return open_frame(pa.concat_tables(tables, promote_options="permissive"), source.name)
