"""SFTDataset: verl's data set for multi-turn SFT, tokenized once instead of at every access.

    data.custom_cls.path=pkg://gpuload.integrations.verl data.custom_cls.name=SFTDataset

verl 0.9.1 calls the chat template and the tokenizer once per message, and once more for the whole conversation, each
time that a row is asked for. Here that happens when the data set is made, by columns (`turns.py`), and a row is a slice
of the store of ids. Rows, masks, padding, truncation and what is rejected are verl's, item by item:

1. Rows that the columns cannot do exactly are made by verl's own method, once.
2. Rows that verl's method rejects, and rows with more than ids, stay in Arrow and are given to it at each access, so
   that they raise what they raise in verl.
3. A sample of the others is compared with verl's method. Should one differ, the whole data set is verl's.
"""

import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.py_functional import convert_nested_value_to_list_recursive
from verl.utils.tokenizer.chat_template import extract_system_prompt_and_generation

from gpuload.arrays import Ragged, offsets_of
from gpuload.errors import GpuloadError, PromptTooLongError
from gpuload.integrations.verl.settings import Settings
from gpuload.integrations.verl.turns import Tokenized, Turns
from gpuload.options import Options, plain
from gpuload.sources.fetch import resolve
from gpuload.sources.read import Source, check_prompt_column, open_file, with_prompts
from gpuload.stream import Batch, read

logger = logging.getLogger(__name__)

_VERIFY_ROWS = 64
_FEWEST_ROWS = 2  # of a batch, however many batches there are


class SFTDataset(MultiTurnSFTDataset):  # type: ignore[misc]
    """Conversations for SFT, with the loss on what the assistant says.

    A row, with L ids, or L = `max_length` with `pad_mode="right"`:

        input_ids, position_ids, loss_mask   int64 (L,)
        attention_mask                       int64 (L,), with `pad_mode="right"`

    Takes what verl's class takes: files, tokenizer, the `data:` section, processor, `max_samples`. With a processor, or
    columns of images or videos, everything is done by verl's class. Of the keys under `data.gpuload`, `verify` says
    which rows are compared with verl's method: a "sample", all ("full") or none ("off").

    Attributes:
        report: what was done, in one line; None where verl's class does everything.
    """

    def __init__(
        self,
        parquet_files: str | Sequence[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ):
        self._verify = Options.parse(Settings.parse(config or {}).options()).verify
        self.report: str | None = None
        self._ids: Ragged | None = None
        # verl writes the places of downloaded files into the list that it is given.
        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        super().__init__(files, tokenizer, config, processor, max_samples)

    def _read_files_and_process(self) -> None:
        started = time.perf_counter()
        sources = [open_file(file) for file in resolve(self.parquet_files, "~/.cache/gpuload")]
        why_not = self._obstacle(sources)
        if why_not is None:
            self.system_prompt, self.generation_prompt = extract_system_prompt_and_generation(
                self.tokenizer, **self.apply_chat_template_kwargs
            )
            why_not = self._tokenize(sources, started)
        if why_not is not None:
            logger.warning("conversations are tokenized by verl's own class, at each access: %s", why_not)
            self.report = self._ids = None
            super()._read_files_and_process()

    def _obstacle(self, sources: Sequence[Source]) -> str | None:
        """Why verl's class has to do everything, or None."""
        if self.processor is not None:
            return "there is a processor"
        for source in sources:
            check_prompt_column(source, self.messages_key)
            for key in (self.image_key, self.video_key):
                if key in source.schema.names:
                    return f"{source.name} has a column {key!r}"
            kind = source.schema.field(self.messages_key).type
            if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_struct(kind.value_type):
                return f"{source.name}: column {self.messages_key!r} holds {kind}"
            if "role" not in [field.name for field in kind.value_type]:
                return f"{source.name}: messages have no role"
        for name, value in self.apply_chat_template_kwargs.items():
            if not isinstance(value, str | int | float | None):
                return f"apply_chat_template_kwargs.{name} is a {type(value).__name__}"
        try:
            probe = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": "x"}], tokenize=True, return_dict=True, **self.apply_chat_template_kwargs
            )
        except Exception as error:
            return f"the chat template does not render a message: {error!s:.200}"
        further = sorted(set(probe) - {"input_ids", "attention_mask"})
        return f"the tokenizer gives {', '.join(further)} as well" if further else None

    def _tokenize(self, sources: Sequence[Source], started: float) -> str | None:
        """Fills the store.

        Returns:
            None, or why this cannot be done.
        """
        try:
            turns = Turns(
                self.tokenizer,
                plain(self.apply_chat_template_kwargs),
                len(self.system_prompt),
                len(self.generation_prompt),
                self.ignore_input_ids_mismatch,
            )
        except GpuloadError as error:
            return str(error)
        if not turns.exact_by_text:
            return "the tokenizer, or an argument of the chat template, encodes in a way of its own"
        self._columns = {name for source in sources for name in source.schema.names}
        wanted = self._wanted(sum(source.num_rows for source in sources))
        total = sum(source.num_rows for source in sources) if wanted is None else len(wanted)
        ids: list[Ragged] = []
        loss: list[np.ndarray[Any, Any]] = []
        places: list[np.ndarray[Any, Any]] = []
        self._parts: list[pa.Table] = []
        self._left: dict[int, tuple[int, int]] = {}  # stored row → (part, row there)
        told = _Told()
        first = 0
        for batch in read(sources, lambda source: with_prompts(source, self.messages_key), wanted, {}):
            tokenized = self._batch(turns, batch)
            wrong = self._differing(tokenized, batch, total)
            if wrong is not None:
                return f"{sources[batch.source].name} row {batch.rows[wrong]} came out otherwise than in verl"
            self._by_verl(tokenized, batch.table)
            told.add(tokenized, batch, sources[batch.source].name)
            left = sorted(tokenized.rejected)
            if left:
                self._left |= {first + row: (len(self._parts), number) for number, row in enumerate(left)}
                self._parts.append(batch.table.take(pa.array(left)))
            ids.append(tokenized.ids)
            loss.append(tokenized.loss)
            places.append(np.stack([np.full(len(batch.rows), batch.source), batch.rows], axis=1))
            first += len(batch.rows)
        self._ids = Ragged.concatenate(ids)
        self._loss = np.concatenate(loss) if loss else np.zeros(0, np.uint8)
        self._places = np.concatenate(places) if places else np.zeros((0, 2), np.int64)
        self._names = [source.name for source in sources]
        # Rows were read in the files' order: where the row that was drawn as number i is stored.
        self._stored = np.arange(first) if wanted is None else np.argsort(np.argsort(wanted))
        self.report = told.sentence(len(self._stored), len(self._ids.values), time.perf_counter() - started)
        logger.info(self.report)
        if told.rejected:
            logger.warning(
                "%d rows of %d will raise when they are asked for, as in verl: %s",
                told.rejected,
                len(self._stored),
                "; ".join(told.examples),
            )
        return None

    def _wanted(self, total: int) -> np.ndarray[Any, Any] | None:
        """Which rows, in which order, drawn as verl draws them; None for all."""
        if not 0 < self.max_samples < total:
            return None
        if not self.shuffle:
            return np.arange(self.max_samples)
        return np.asarray(np.random.default_rng(self.seed).choice(total, size=self.max_samples, replace=False))

    def _batch(self, turns: Turns, batch: Batch) -> Tokenized:
        """One batch by columns."""
        rows = len(batch.rows)
        rejected: dict[int, str] = {}

        def column(key: str) -> list[Any] | None:
            if key not in self._columns:
                return None
            values = batch.table.column(key).to_pylist() if key in batch.table.schema.names else [None] * rows
            rejected.update((row, f"{key} is null") for row, value in enumerate(values) if value is None)
            return values

        tools, thinking = column(self.tools_key), column(self.enable_thinking_key)
        default = self.enable_thinking_default
        if thinking is None:
            thinking = [None if default is None else bool(default)] * rows
        else:
            thinking = [bool(value) for value in thinking]
        return turns.tokenize(batch.prompts, tools, thinking, rejected)

    # -- verl's own method -----------------------------------------------------------------------------------------

    def _verls(self, table: pa.Table, **settings: Any) -> MultiTurnSFTDataset:
        """verl's data set over some rows."""
        import pandas as pd

        verls = MultiTurnSFTDataset.__new__(MultiTurnSFTDataset)
        kept = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        vars(verls).update(kept | settings)
        for key in (self.tools_key, self.enable_thinking_key):
            if key in self._columns and key not in table.schema.names:  # another file has it
                table = table.append_column(key, pa.nulls(len(table)))
        frame = table.to_pandas(types_mapper=pd.ArrowDtype, ignore_metadata=True)
        verls.dataframe, verls.messages = frame, frame[self.messages_key]
        verls.tools = verls.enable_thinking = None
        if self.tools_key in self._columns:
            verls.tools = frame[self.tools_key].apply(convert_nested_value_to_list_recursive).tolist()
        if self.enable_thinking_key in self._columns:
            verls.enable_thinking = frame[self.enable_thinking_key].tolist()
        return verls

    def _whole(self, table: pa.Table) -> MultiTurnSFTDataset:
        """verl's data set over some rows, nothing padded or cut."""
        return self._verls(table, pad_mode="no_padding", truncation="right", max_length=sys.maxsize)

    def _by_verl(self, tokenized: Tokenized, table: pa.Table) -> None:
        """Has verl's method make the rows that columns could not."""
        rows = sorted(tokenized.once)
        if not rows:
            return
        verls = self._whole(table.take(pa.array(rows)))
        ids, loss = [], []
        for number, row in enumerate(rows):
            try:
                item = verls[number]
                further = set(item) - {"input_ids", "position_ids", "loss_mask"}
                reason = f"it has {', '.join(sorted(further))}" if further else None
            except Exception as error:
                reason = f"{type(error).__name__}: {error!s:.200}"
            if reason is not None:
                tokenized.rejected[row] = reason
                del tokenized.once[row]
            ids.append(np.zeros(0, np.int32) if reason else item["input_ids"].numpy().astype(np.int32))
            loss.append(np.zeros(0, np.uint8) if reason else item["loss_mask"].numpy().astype(np.uint8))
        made = Ragged(np.concatenate(ids), offsets_of(np.array([len(row) for row in ids], np.int64)))
        order = np.arange(len(tokenized.ids))
        order[rows] = len(order) + np.arange(len(rows))
        joined = Ragged.concatenate([tokenized.ids, made])
        tokenized.loss = Ragged(np.concatenate([tokenized.loss, *loss]), joined.offsets).take(order).values
        tokenized.ids = joined.take(order)

    def _differing(self, tokenized: Tokenized, batch: Batch, total: int) -> int | None:
        """A row of the sample that verl's method makes otherwise, or None."""
        theirs = {*tokenized.once, *tokenized.rejected}
        rows = np.array([row for row in range(len(batch.rows)) if row not in theirs], np.int64)
        if self._verify == "sample":
            most = max(_FEWEST_ROWS, _VERIFY_ROWS * len(batch.rows) // total)
            by_length = rows[np.argsort(tokenized.ids.lengths[rows], kind="stable")]
            rows = by_length[np.unique(np.linspace(0, len(rows) - 1, most).astype(np.int64))] if len(rows) else rows
        if self._verify == "off" or not len(rows):
            return None
        verls = self._whole(batch.table.take(pa.array(rows)))
        for number, row in enumerate(int(row) for row in rows):
            try:
                item = verls[number]
            except Exception:
                return row
            span = slice(int(tokenized.ids.offsets[row]), int(tokenized.ids.offsets[row + 1]))
            found = (tokenized.ids.values[span], tokenized.loss[span])
            if set(item) != {"input_ids", "position_ids", "loss_mask"} or not all(
                np.array_equal(mine, item[key].numpy())
                for mine, key in zip(found, ("input_ids", "loss_mask"), strict=True)
            ):
                return row
        return None

    # -- rows ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return super().__len__() if self._ids is None else len(self._stored)

    def __getitem__(self, item: int) -> dict[str, Any]:
        if self._ids is None:
            return super().__getitem__(item)  # type: ignore[no-any-return]
        if not -len(self) <= item < len(self):
            raise IndexError(f"row {item} of a data set of {len(self)} rows")
        row = int(self._stored[item])
        if row in self._left:
            part, number = self._left[row]
            return self._verls(self._parts[part].slice(number, 1))[0]  # type: ignore[no-any-return]
        start, end = int(self._ids.offsets[row]), int(self._ids.offsets[row + 1])
        if end - start > self.max_length and self.truncation == "error":
            source, number = self._places[row]
            raise PromptTooLongError(
                f"row {item} ({self._names[source]} row {number}) has {end - start} tokens, more than "
                f"max_length={self.max_length}: raise it, or set truncation to 'left' or 'right'"
            )
        return self._shaped(start, end)

    def _shaped(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """A span of the store as verl's item: padded or cut."""
        assert self._ids is not None
        length = self.max_length
        from_end = self.pad_mode == "right" and self.truncation == "left"
        skipped = max(0, end - start - length) if from_end else 0
        begin, stop = start + skipped, min(end, start + skipped + length)
        count = stop - begin
        width = length if self.pad_mode == "right" else count
        pad = self.tokenizer.pad_token_id
        input_ids = np.full(width, 0 if pad is None else pad, np.int64)
        input_ids[:count] = self._ids.values[begin:stop]
        position_ids, loss_mask = np.zeros(width, np.int64), np.zeros(width, np.int64)
        position_ids[:count] = np.arange(skipped, skipped + count)
        loss_mask[:count] = self._loss[begin:stop]
        shaped = {"input_ids": input_ids}
        if self.pad_mode == "right":
            shaped["attention_mask"] = (np.arange(width) < count).astype(np.int64)
        shaped |= {"position_ids": position_ids, "loss_mask": loss_mask}
        return {key: torch.from_numpy(values) for key, values in shaped.items()}


class _Told:
    """What is said of a load."""

    def __init__(self) -> None:
        self.once = self.rejected = self.ignored = self.by_column = self.by_reference = 0
        self.reasons: dict[str, int] = {}
        self.examples: list[str] = []

    def add(self, tokenized: Tokenized, batch: Batch, source: str) -> None:
        self.once += len(tokenized.once)
        self.rejected += len(tokenized.rejected)
        self.ignored += tokenized.ignored
        self.by_column += tokenized.by_column
        self.by_reference += tokenized.by_reference
        for why, many in tokenized.reasons.items():
            self.reasons[why] = self.reasons.get(why, 0) + many
        for row in sorted(tokenized.rejected)[: 3 - len(self.examples)]:
            self.examples.append(f"{source} row {batch.rows[row]}: {tokenized.rejected[row]}")

    def sentence(self, rows: int, tokens: int, seconds: float) -> str:
        parts = [
            f"{rows:,} conversations, {tokens:,} tokens in {seconds:.1f} s",
            f"texts rendered by column {self.by_column:,}, by transformers {self.by_reference:,}",
        ]
        if self.reasons:
            parts.append("because " + ", ".join(f"{why} ({many:,})" for why, many in list(self.reasons.items())[:3]))
        if self.once:
            parts.append(f"made by verl's method, once {self.once:,}")
        if self.rejected:
            parts.append(f"left to verl's method {self.rejected:,}")
        if self.ignored:
            parts.append(f"messages unlike the whole conversation, kept {self.ignored:,}")
        return "; ".join(parts)
