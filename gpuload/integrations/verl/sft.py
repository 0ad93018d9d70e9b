"""SFTDataset: verl's dataset for multi-turn SFT, tokenized once instead of at each access.

    data.custom_cls.path=pkg://gpuload.integrations.verl data.custom_cls.name=SFTDataset

Each time that a row is accessed, verl calls the chat template and the tokenizer once per message, and again for
the whole conversation. This class tokenizes by columns when it is created (`turns.py`), or finds the ids that an
earlier start has stored (`messages/cache.py`). Rows,
masks, padding, truncation and errors are those of verl:

1. verl's method tokenizes, once, the rows that cannot be tokenized exactly by columns.
2. Rows for which verl's method raises, or returns more than ids, are stored as Arrow and passed to verl's method at
   each access, so that they raise the same errors.
3. A sample of the other rows is compared with the result of verl's method. If one differs, the whole dataset falls back
   to verl's class.
"""

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.py_functional import convert_nested_value_to_list_recursive

from gpuload.cache.token_store import DiskTokens
from gpuload.core.arrays import Ragged, mask_of, offsets_of, row_number
from gpuload.core.errors import GpuloadError, PromptTooLongError
from gpuload.core.marks import LOSS, split
from gpuload.core.options import Options, plain
from gpuload.engines.protocol import ArrowPrompts
from gpuload.integrations.comparison import of_all_lengths
from gpuload.integrations.core import log_fallback, release_of
from gpuload.integrations.messages.cache import RowCache, Rule, StoredRows
from gpuload.integrations.messages.rows import row_of
from gpuload.integrations.processors import media_rows, processor_change, template_of, tokenizer_of
from gpuload.integrations.verl.contract import difference, stock_methods, system_and_generation_prompt, template_problem
from gpuload.integrations.verl.settings import Settings
from gpuload.integrations.verl.sft_store import (
    RejectedRows,
    RowPlaces,
    planes_of,
    read_conversations,
    row_cache,
    shape_row,
    summary,
)
from gpuload.integrations.verl.turns import ConversationTokenizer, TokenizedConversations
from gpuload.pipeline.parts import Batch
from gpuload.pipeline.stream import choose_rows
from gpuload.reference.reference import Reference
from gpuload.sources.fetch import resolve
from gpuload.sources.read import Source, check_prompt_column, open_file
from gpuload.sources.types import is_messages

logger = logging.getLogger(__name__)

_VERIFY_ROWS = 64  # of all rows
_MIN_VERIFY_ROWS = 2  # of each batch, however many batches there are
_ROW_KEYS = {"input_ids", "position_ids", "loss_mask"}  # of an unpadded row that holds only ids


class SFTDataset(MultiTurnSFTDataset):  # type: ignore[misc]
    """Conversations for SFT, with the loss on assistant messages.

    Takes the same arguments and `data:` section as verl's MultiTurnSFTDataset, and gives the same rows. A row, with L
    ids, or L = `max_length` with `pad_mode="right"`:

        input_ids, position_ids, loss_mask   int64 (L,)
        attention_mask                       int64 (L,), with `pad_mode="right"`

    Under `data.gpuload`, `verify` sets how many rows are compared with verl's method: a "sample", all ("full") or none
    ("off"). `token_cache` keeps the ids for the next start, which compares a sample of them; `store` says whether they
    are in memory or on disk. With columns of images or videos, the dataset falls back to verl's class. With a processor
    for which verl has four rows of positions, `position_ids` is (4, L).

    Attributes:
        report: what was done, in one line; None if the dataset falls back to verl's class.

    Raises:
        OptionError: an unknown key under `data.gpuload`, or an invalid value.
        SourceError: a file that cannot be found or read.
        DataError: a file without the column of messages.
    """

    is_compared = False  # true in a subclass, whose rows are compared with verl's

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ):
        self._config = config
        settings = Settings.parse(config or {}).options()
        self._options = Options.parse(settings | {"cache_dir": (config or {}).get("cache_dir") or None})
        self.report: str | None = None
        self._ids: Ragged | DiskTokens | None = None
        self._rejected = RejectedRows()
        # A copy: verl replaces items of the list by the paths of downloaded files.
        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        super().__init__(files, tokenizer, config, processor, max_samples)

    def _read_files_and_process(self) -> None:
        started = time.perf_counter()
        sources = [open_file(file) for file in resolve(self.parquet_files)]
        reason = self._unsupported_reason(sources)
        if reason is None and not self.is_compared:
            given = self.tokenizer, self._config, self.processor
            special = processor_change(self.processor)
            reason = difference(SFTDataset, MultiTurnSFTDataset, sources, given, special=special)
        if reason is None:
            self.system_prompt, self.generation_prompt = system_and_generation_prompt(
                self.tokenizer, self.apply_chat_template_kwargs
            )
            reason = self._tokenize(sources, started)
        if reason is not None:
            log_fallback(logger, "verl's own dataset class, which tokenizes at each access", reason)
            self.report = self._ids = None
            super()._read_files_and_process()

    def _unsupported_reason(self, sources: Sequence[Source]) -> str | None:
        """Why the dataset must fall back to verl's class, or None."""
        for source in sources:
            check_prompt_column(source, self.messages_key)
            for key in (self.image_key, self.video_key):
                if key in source.schema.names:
                    return f"{source.name} has a column {key!r}, and only conversations of text are made by columns"
            kind = source.schema.field(self.messages_key).type
            if not is_messages(kind):
                return f"{source.name}: column {self.messages_key!r} holds {kind}, not messages"
            if "role" not in [field.name for field in kind.value_type]:
                return f"{source.name}: messages have no role"
        return template_problem(self.tokenizer, self.processor, self.apply_chat_template_kwargs)

    def _tokenize(self, sources: Sequence[Source], started: float) -> str | None:
        """Tokenize all rows, and return None; or why this is not possible."""
        try:
            tokenizer = self._conversation_tokenizer()
        except GpuloadError as error:
            return str(error)
        if not tokenizer.encodes_rendered_text:
            return "the tokenizer class or apply_chat_template_kwargs change how texts are encoded"
        # Types of columns; for a column that several files have, one that is not null's.
        fields = [field for source in sources for field in source.schema]
        self._columns = {field.name: field.type for field in sorted(fields, key=lambda field: field.type != pa.null())}
        total = sum(source.num_rows for source in sources)
        wanted = choose_rows(total, self.max_samples, bool(self.shuffle), self.seed)
        self._places = RowPlaces.of(sources, wanted)
        with self._cache(tokenizer.reference, sources) as cache:
            rows = cache.find(partial(self._difference_of_found, sources))
            if rows is None:
                for batch in read_conversations(sources, self.messages_key, wanted):
                    mismatch = self._add(batch, tokenizer, cache)
                    if mismatch is not None:
                        return f"{self._places.place(mismatch)} differs from the result of verl's method"
                rows = cache.finish()
            self.report = summary(rows, self._places, time.perf_counter() - started, cache.notes)
        self._ids = rows.ids
        # Rows are read in ascending order, so row i of the dataset is stored at the rank of `wanted[i]`.
        self._stored = None if wanted is None else np.argsort(np.argsort(wanted))
        logger.info("gpuload: %s", self.report)
        if rows.others:
            examples = "; ".join(f"{self._places.place(row)}: {rows.others[row]}" for row in sorted(rows.others)[:3])
            logger.warning(
                "gpuload: %d of %d rows will raise on access, as in verl: %s", len(rows.others), len(self), examples
            )
        return None

    def _add(self, batch: Batch, tokenizer: ConversationTokenizer, cache: RowCache) -> int | None:
        """Tokenizes rows. Returns the first one of a sample for which verl's method has another result, or None."""
        first = len(cache)
        if not first:
            self._rejected = RejectedRows()
        tokenized = self._tokenize_batch(tokenizer, batch)
        mismatch = self._first_mismatch(tokenized, batch)
        if mismatch is not None:
            return first + mismatch
        self._tokenize_fallback_rows(tokenized, batch.table)
        rejected = np.array(sorted(tokenized.rejected), np.int64)
        self._rejected.add((first + rejected).tolist(), batch.table.take(pa.array(rejected)))
        counts = {"fallback": len(tokenized.fallback), "mismatches": tokenized.mismatches}
        cache.add(tokenized.ids, tokenized.rejected, tokenized.rendering, **counts)
        return None

    def _cache(self, reference: Reference, sources: Sequence[Source]) -> RowCache:
        """The cache of this dataset. Rows that are compared with verl's are made, and not found there."""
        options = self._options
        if self.is_compared:
            options = replace(options, token_cache=False, store="memory")
        settings = {
            "enable_thinking_default": plain(self.enable_thinking_default),
            "ignore_input_ids_mismatch": bool(self.ignore_input_ids_mismatch),
            "system_prompt": [int(number) for number in self.system_prompt],
            "generation_prompt": [int(number) for number in self.generation_prompt],
        }
        rule = Rule(release_of("verl", "verl"), stock_methods(MultiTurnSFTDataset), settings)
        keys = (self.messages_key, self.tools_key, self.enable_thinking_key)
        return row_cache(options, reference, rule, sources, keys, self._places)

    def _conversation_tokenizer(self) -> ConversationTokenizer:
        kwargs = dict(plain(self.apply_chat_template_kwargs))
        return ConversationTokenizer(
            tokenizer_of(self.processor or self.tokenizer),
            kwargs | {"chat_template": template_of(self.processor or self.tokenizer, kwargs.get("chat_template"))},
            len(self.system_prompt),
            len(self.generation_prompt),
            self.ignore_input_ids_mismatch,
        )

    def _tokenize_batch(self, tokenizer: ConversationTokenizer, batch: Batch) -> TokenizedConversations:
        n = len(batch)
        rejected: dict[int, str] = {}

        def column(key: str) -> list[Any] | None:
            if key not in self._columns:
                return None
            values = batch.table.column(key).to_pylist() if key in batch.table.schema.names else [None] * n
            rejected.update((row, f"{key} is null") for row, value in enumerate(values) if value is None)
            return values

        tools, thinking = column(self.tools_key), column(self.enable_thinking_key)
        default = self.enable_thinking_default
        if thinking is None:
            thinking = [None if default is None else bool(default)] * n
        else:
            thinking = [bool(value) for value in thinking]
        assert isinstance(batch.prompts, ArrowPrompts)
        made = tokenizer.tokenize(batch.prompts.column, tools, thinking, rejected)
        found = media_rows(self.processor, split(made.ids)[0])
        made.fallback |= dict.fromkeys(found, "a token stands for an image")
        return made

    # -- verl's own method ---------------------------------------------------------------------------------------------

    def _verl_dataset(self, table: pa.Table, **attributes: Any) -> MultiTurnSFTDataset:
        """verl's dataset with the given rows, and with attributes of this one unless given."""
        import pandas as pd

        dataset = MultiTurnSFTDataset.__new__(MultiTurnSFTDataset)
        public = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        vars(dataset).update(public | attributes)
        for key in (self.tools_key, self.enable_thinking_key):
            kind = self._columns.get(key)
            if kind is None:
                continue
            # What pandas makes of a null depends on the type, which verl takes from all files.
            if key not in table.schema.names:
                table = table.append_column(key, pa.nulls(len(table), kind))
            elif table.schema.field(key).type == pa.null():
                table = table.set_column(table.schema.get_field_index(key), key, pa.nulls(len(table), kind))
        frame = table.to_pandas(types_mapper=pd.ArrowDtype, ignore_metadata=True)
        dataset.dataframe, dataset.messages = frame, frame[self.messages_key]
        dataset.tools = dataset.enable_thinking = None
        if self.tools_key in self._columns:
            dataset.tools = frame[self.tools_key].apply(convert_nested_value_to_list_recursive).tolist()
        if self.enable_thinking_key in self._columns:
            dataset.enable_thinking = frame[self.enable_thinking_key].tolist()
        return dataset

    def _unshaped_verl_dataset(self, table: pa.Table) -> MultiTurnSFTDataset:
        """verl's dataset with the given rows, neither padded nor truncated."""
        return self._verl_dataset(table, pad_mode="no_padding", truncation="right", max_length=sys.maxsize)

    def _tokenize_fallback_rows(self, tokenized: TokenizedConversations, table: pa.Table) -> None:
        """Tokenize rows in `fallback` with verl's method. Those for which it raises are moved to `rejected`."""
        rows = sorted(tokenized.fallback)
        if not rows:
            return
        dataset = self._unshaped_verl_dataset(table.take(pa.array(rows)))
        ids: list[np.ndarray[Any, Any]] = []
        for number, row in enumerate(rows):
            try:
                item = dataset[number]
                further = ", ".join(sorted(set(item) - _ROW_KEYS))
                reason = f"verl's row also has {further}" if further else None
            except Exception as error:
                reason = f"{type(error).__name__}: {error!s:.200}"
            if reason is not None:
                tokenized.rejected[row] = reason
                del tokenized.fallback[row]
            ids.append(np.zeros(0, np.int32) if reason else _with_bits(item))
        # Append the new rows to the batch, then gather all rows in their order: a new row from the end.
        new = Ragged(np.concatenate(ids), offsets_of(np.array([len(row) for row in ids], np.int64)))
        joined = Ragged.concatenate([tokenized.ids, new])
        order = np.arange(len(tokenized.ids))
        order[rows] = len(order) + np.arange(len(rows))
        tokenized.ids = joined.take(order)

    def _first_mismatch(self, tokenized: TokenizedConversations, batch: Batch) -> int | None:
        """The first row of a sample for which verl's method has another result, or None."""
        rows = np.flatnonzero(~mask_of([*tokenized.fallback, *tokenized.rejected], len(batch)))
        if self._options.verify == "sample":
            count = max(_MIN_VERIFY_ROWS, _VERIFY_ROWS * len(batch) // len(self._places))
            rows = of_all_lengths(rows, tokenized.ids.lengths, count)
        if self._options.verify == "off":
            return None
        number = self._first_difference(batch.table.take(pa.array(rows)), tokenized.ids.take(rows))
        return None if number is None else int(rows[number])

    def _difference_of_found(self, sources: Sequence[Source], found: StoredRows) -> str | None:
        """Compares a sample of the rows of an earlier start, which has compared as many as `verify` says, and reads the
        columns of those that are rejected. Returns which row differs, or None."""
        self._rejected = RejectedRows()
        rejected = mask_of(found.others, len(self._places))
        sample = np.zeros(0, np.int64)
        if self._options.verify != "off":
            sample = of_all_lengths(np.flatnonzero(~rejected), found.ids.lengths, _VERIFY_ROWS)
        needed = np.union1d(np.flatnonzero(rejected), sample)
        if not len(needed):
            return None
        first = 0
        for batch in read_conversations(sources, self.messages_key, self._places.over_all_files(needed)):
            here = needed[first : first + len(batch)]
            first += len(here)
            of_verl = rejected[here]
            self._rejected.add(here[of_verl].tolist(), batch.table.filter(pa.array(of_verl)))
            rows = here[~of_verl]
            number = self._first_difference(batch.table.filter(pa.array(~of_verl)), found.ids.take(rows))
            if number is not None:
                return f"{self._places.place(int(rows[number]))} differs from the result of verl's method"
        return None

    def _first_difference(self, table: pa.Table, ids: Ragged) -> int | None:
        """The first row of a table for which verl's method has other ids than these, or None."""
        if not len(ids):
            return None
        dataset = self._unshaped_verl_dataset(table)
        for number in range(len(ids)):
            try:
                item = dataset[number]
            except Exception:
                return number
            if set(item) != _ROW_KEYS or not np.array_equal(ids[number], _with_bits(item)):
                return number
        return None

    # -- rows ----------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return super().__len__() if self._ids is None else len(self._places)

    def __getitem__(self, item: int) -> dict[str, Any]:
        if self._ids is None:
            return super().__getitem__(item)  # type: ignore[no-any-return]
        number = row_number(item, len(self))
        row = number if self._stored is None else int(self._stored[number])
        rejected = self._rejected.get(row)
        if rejected is not None:
            return self._verl_dataset(rejected)[0]  # type: ignore[no-any-return]
        ids = row_of(self._ids, row)
        if len(ids) > self.max_length and self.truncation == "error":
            raise PromptTooLongError(
                f"row {item} ({self._places.place(row)}) has {len(ids)} tokens, more than "
                f"max_length={self.max_length}: raise it, or set truncation to 'left' or 'right'"
            )
        return shape_row(
            ids,
            max_length=self.max_length,
            pad_mode=self.pad_mode,
            truncation=self.truncation,
            pad_token_id=self.tokenizer.pad_token_id,
            planes=planes_of(self.processor),
        )


def _with_bits(item: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The ids of verl's row, int32, with a bit for loss."""
    ids, mask = (item[key].numpy() for key in ("input_ids", "loss_mask"))
    bits: np.ndarray[Any, Any] = np.where(mask != 0, ids | LOSS, ids).astype(np.int32)
    return bits
