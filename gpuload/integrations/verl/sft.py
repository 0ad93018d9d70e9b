"""SFTDataset: verl's dataset for multi-turn SFT, tokenized once instead of at each access.

    data.custom_cls.path=pkg://gpuload.integrations.verl data.custom_cls.name=SFTDataset

Each time that a row is accessed, verl calls the chat template and the tokenizer once per message, and again for
the whole conversation. This class tokenizes by columns when it is created (`turns.py`), and stores the ids. Rows,
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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.py_functional import convert_nested_value_to_list_recursive

from gpuload.core.arrays import Ragged, offsets_of
from gpuload.core.errors import GpuloadError, PromptTooLongError
from gpuload.core.marks import LOSS
from gpuload.core.options import Options, plain
from gpuload.engines.protocol import ArrowPrompts, RowCounts
from gpuload.integrations.core import log_fallback
from gpuload.integrations.verl.contract import difference, system_and_generation_prompt
from gpuload.integrations.verl.settings import Settings
from gpuload.integrations.verl.sft_store import (
    SFTStore,
    SFTStoreBuilder,
    read_conversations,
    shape_row,
)
from gpuload.integrations.verl.turns import ConversationTokenizer, TokenizedConversations
from gpuload.pipeline.stream import Batch, choose_rows
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
    ("off"). With a processor, or with columns of images or videos, the dataset falls back to verl's class.

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
        self._verify = Options.parse(Settings.parse(config or {}).options()).verify
        self.report: str | None = None
        self._store: SFTStore | None = None
        # A copy: verl replaces items of the list by the paths of downloaded files.
        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        super().__init__(files, tokenizer, config, processor, max_samples)

    def _read_files_and_process(self) -> None:
        started = time.perf_counter()
        sources = [open_file(file) for file in resolve(self.parquet_files)]
        reason = self._unsupported_reason(sources)
        if reason is None and not self.is_compared:
            given = self.tokenizer, self._config, self.processor
            reason = difference(SFTDataset, MultiTurnSFTDataset, sources, given)
        if reason is None:
            self.system_prompt, self.generation_prompt = system_and_generation_prompt(
                self.tokenizer, self.apply_chat_template_kwargs
            )
            reason = self._tokenize(sources, started)
        if reason is not None:
            log_fallback(logger, "verl's own dataset class, which tokenizes at each access", reason)
            self.report = self._store = None
            super()._read_files_and_process()

    def _unsupported_reason(self, sources: Sequence[Source]) -> str | None:
        """Why the dataset must fall back to verl's class, or None."""
        if self.processor is not None:
            return "there is a processor"
        for source in sources:
            check_prompt_column(source, self.messages_key)
            for key in (self.image_key, self.video_key):
                if key in source.schema.names:
                    return f"{source.name} has a column {key!r}"
            kind = source.schema.field(self.messages_key).type
            if not is_messages(kind):
                return f"{source.name}: column {self.messages_key!r} holds {kind}, not messages"
            if "role" not in [field.name for field in kind.value_type]:
                return f"{source.name}: messages have no role"
        return self._unsupported_template_reason()

    def _unsupported_template_reason(self) -> str | None:
        for name, value in self.apply_chat_template_kwargs.items():
            if not isinstance(value, str | int | float | None):
                return f"apply_chat_template_kwargs.{name} is of type {type(value).__name__}"
        try:
            probe = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": "x"}], tokenize=True, return_dict=True, **self.apply_chat_template_kwargs
            )
        except Exception as error:
            return f"the chat template does not render a message: {error!s:.200}"
        further = sorted(set(probe) - {"input_ids", "attention_mask"})
        return f"the tokenizer also returns {', '.join(further)}" if further else None

    def _tokenize(self, sources: Sequence[Source], started: float) -> str | None:
        """Tokenize all rows.

        Returns:
            None, or why this is not possible.
        """
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
        count = total if wanted is None else len(wanted)
        builder, summary = SFTStoreBuilder(), _Summary()
        for batch in read_conversations(sources, self.messages_key, wanted):
            tokenized = self._tokenize_batch(tokenizer, batch)
            name = sources[batch.source].name
            mismatch = self._first_mismatch(tokenized, batch, count)
            if mismatch is not None:
                return f"{name} row {batch.rows[mismatch]} differs from the result of verl's method"
            self._tokenize_fallback_rows(tokenized, batch.table)
            builder.add(tokenized, batch)
            summary.add(tokenized, batch, name)
        self._store = builder.build()
        self._names = [source.name for source in sources]
        # Rows are read in ascending order, so row i of the dataset is stored at the rank of `wanted[i]`.
        self._stored = np.arange(count) if wanted is None else np.argsort(np.argsort(wanted))
        self.report = summary.text(count, len(self._store.ids.values), time.perf_counter() - started)
        logger.info("gpuload: %s", self.report)
        if summary.rejected:
            examples = "; ".join(summary.examples)
            logger.warning(
                "gpuload: %d of %d rows will raise on access, as in verl: %s", summary.rejected, count, examples
            )
        return None

    def _conversation_tokenizer(self) -> ConversationTokenizer:
        return ConversationTokenizer(
            self.tokenizer,
            plain(self.apply_chat_template_kwargs),
            len(self.system_prompt),
            len(self.generation_prompt),
            self.ignore_input_ids_mismatch,
        )

    def _tokenize_batch(self, tokenizer: ConversationTokenizer, batch: Batch) -> TokenizedConversations:
        n = len(batch.rows)
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
        return tokenizer.tokenize(batch.prompts.column, tools, thinking, rejected)

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

    def _first_mismatch(self, tokenized: TokenizedConversations, batch: Batch, total: int) -> int | None:
        """The first row of a sample for which verl's method has another result, or None."""
        rows = np.array(
            [row for row in range(len(batch.rows)) if row not in tokenized.fallback and row not in tokenized.rejected],
            np.int64,
        )
        if self._verify == "sample" and len(rows):
            count = max(_MIN_VERIFY_ROWS, _VERIFY_ROWS * len(batch.rows) // total)
            by_length = rows[np.argsort(tokenized.ids.lengths[rows], kind="stable")]
            rows = by_length[np.unique(np.linspace(0, len(rows) - 1, count).astype(np.int64))]
        if self._verify == "off" or not len(rows):
            return None
        dataset = self._unshaped_verl_dataset(batch.table.take(pa.array(rows)))
        for number, row in enumerate(int(row) for row in rows):
            try:
                item = dataset[number]
            except Exception:
                return row
            if set(item) != _ROW_KEYS or not np.array_equal(tokenized.ids[row], _with_bits(item)):
                return row
        return None

    # -- rows ----------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return super().__len__() if self._store is None else len(self._stored)

    def __getitem__(self, item: int) -> dict[str, Any]:
        if self._store is None:
            return super().__getitem__(item)  # type: ignore[no-any-return]
        if not -len(self) <= item < len(self):
            raise IndexError(f"index {item} is out of range for a dataset with {len(self)} rows")
        row = int(self._stored[item])
        rejected = self._store.rejected_row(row)
        if rejected is not None:
            return self._verl_dataset(rejected)[0]  # type: ignore[no-any-return]
        ids = self._store.row(row)
        if len(ids) > self.max_length and self.truncation == "error":
            source, number = self._store.places[row]
            raise PromptTooLongError(
                f"row {item} ({self._names[source]} row {number}) has {len(ids)} tokens, more than "
                f"max_length={self.max_length}: raise it, or set truncation to 'left' or 'right'"
            )
        return shape_row(
            ids,
            max_length=self.max_length,
            pad_mode=self.pad_mode,
            truncation=self.truncation,
            pad_token_id=self.tokenizer.pad_token_id,
        )


def _with_bits(item: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The ids of verl's row, int32, with a bit for loss."""
    ids, mask = (item[key].numpy() for key in ("input_ids", "loss_mask"))
    bits: np.ndarray[Any, Any] = np.where(mask != 0, ids | LOSS, ids).astype(np.int32)
    return bits


@dataclass
class _Summary:
    """Counts of a load, for the report.

    Attributes:
        fallback, rejected, mismatches: numbers of rows; see `TokenizedConversations`.
        rendering: how the texts were rendered.
        examples: the first rejected rows, and why.
    """

    fallback: int = 0
    rejected: int = 0
    mismatches: int = 0
    rendering: RowCounts = field(default_factory=RowCounts)
    examples: list[str] = field(default_factory=list)

    def add(self, tokenized: TokenizedConversations, batch: Batch, source: str) -> None:
        self.fallback += len(tokenized.fallback)
        self.rejected += len(tokenized.rejected)
        self.mismatches += tokenized.mismatches
        self.rendering.add_counts(tokenized.rendering)
        for row in sorted(tokenized.rejected)[: 3 - len(self.examples)]:
            self.examples.append(f"{source} row {batch.rows[row]}: {tokenized.rejected[row]}")

    def text(self, rows: int, tokens: int, seconds: float) -> str:
        counts = self.rendering
        parts = [
            f"{rows:,} conversations, {tokens:,} tokens in {seconds:.1f} s",
            f"{counts.compiled_rows:,} texts rendered by the compiled template, "
            f"{counts.reference_rows:,} by transformers",
        ]
        if counts.reasons:
            reasons = ", ".join(f"{reason} ({count:,})" for reason, count in list(counts.reasons.items())[:3])
            parts.append(f"reasons: {reasons}")
        if self.fallback:
            parts.append(f"{self.fallback:,} rows tokenized by verl's method")
        if self.rejected:
            parts.append(f"{self.rejected:,} rows passed to verl's method at each access")
        if self.mismatches:
            parts.append(f"{self.mismatches:,} rows kept whose messages have other ids than the whole conversation")
        return "; ".join(parts)
