"""Prompts: data for GRPO and PPO."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import numpy as np
import pyarrow as pa
import torch

from gpuload.cache.known_tokenizer import open_known
from gpuload.core.arrays import Array, Ragged
from gpuload.core.errors import OptionError
from gpuload.core.options import Options, Padding, TurnsMode
from gpuload.core.words import counted
from gpuload.dataset.arrow import INT32_LIST, lists, names_of, ragged, row_reader
from gpuload.dataset.batch import RowBatch
from gpuload.dataset.pieces import stored
from gpuload.dataset.rows import Loaded, Made, Numbers, Rows, Values, object_array
from gpuload.engines.batches import BatchLayout
from gpuload.engines.choose import choose_engine
from gpuload.engines.protocol import Engine
from gpuload.packing.plan import whole_rows
from gpuload.pipeline.kind import Kind, warn_of_replaced
from gpuload.pipeline.stream import choose_rows
from gpuload.reference.reference import Reference, messages_of
from gpuload.sources.read import Source, check_prompts

if TYPE_CHECKING:
    from gpuload.dataset.loader import PromptLoader

FIELDS = (pa.field("raw_prompt_ids", INT32_LIST),)

LAYOUT = BatchLayout("left", ("input_ids", "attention_mask", "position_ids"))

_KEYS = frozenset(("input_ids", "attention_mask", "position_ids", "raw_prompt_ids", "index"))


@dataclass(frozen=True)
class PromptKind(Kind["PromptDataset"]):
    """Prompts, one text per row."""

    name = "prompts"
    limit_name = "max_prompt_length"
    turns: TurnsMode = "conversation"  # as for `load`
    fields: ClassVar[tuple[pa.Field, ...]] = FIELDS
    hidden: ClassVar[frozenset[str]] = frozenset(LAYOUT.planes)

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> tuple["PromptKind", Options]:
        turns = given.get("turns", cls.turns)
        if turns not in get_args(TurnsMode):
            raise OptionError(f"turns={turns!r}: use one of {', '.join(map(repr, get_args(TurnsMode)))}")
        return cls(turns), Options.parse({name: value for name, value in given.items() if name != "turns"})

    def resolve(self, sources: Sequence[Source], options: Options) -> tuple["PromptKind", list[Source], Options]:
        for source in sources:
            if source.num_rows:
                check_prompts(source, options.prompt_key)
        more = {"raw_prompt": options.return_raw_chat, "full_prompts": options.return_full_prompt}
        keys = _KEYS | {key for key, given in more.items() if given}
        warn_of_replaced((source.schema for source in sources), keys - {options.prompt_key})
        if self.turns == "served":
            from gpuload.kinds.served.prompts import prompts_of_turns  # most loads do not need it

            total = sum(source.num_rows for source in sources)
            chosen = choose_rows(total, options.max_samples, options.shuffle, options.seed)
            sources = prompts_of_turns(sources, options.prompt_key, chosen)
            options = replace(options, max_samples=-1)
        return self, list(sources), options

    def reference(self, tokenizer: Any, options: Options) -> Reference:
        return open_known(tokenizer, options)

    def column(self, source: Source, options: Options, reference: Reference) -> Source:
        return source

    def engine(self, options: Options, reference: Reference, exact_only: bool) -> Engine:
        return choose_engine(options, reference, exact_only)

    def sizes(self, tokens: Ragged) -> Array:
        return tokens.lengths[None]

    def from_arrow(self, table: pa.Table) -> Ragged:
        return ragged(table, "raw_prompt_ids")

    def dataset(self, loaded: Loaded) -> "PromptDataset":
        return PromptDataset(loaded, LAYOUT)


def reference_of(tokenizer: Any, options: Options) -> Reference:
    """The tokenizer of a load, with the options that concern it."""
    return Reference(tokenizer, **options.of_tokenizer())


class PromptDataset(Rows):
    """Tokenized prompts, with the other columns of their files. Made by `gpuload.load`.

    A map-style `torch.utils.data.Dataset`. A row is a dict with these keys, where L is `max_prompt_length`:

    - `input_ids`, `attention_mask`, `position_ids`: int64 tensors `(L,)`, left-padded.
    - `raw_prompt_ids`: the token ids as a list of int, without padding, truncated to at most L.
    - `raw_prompt`: the messages as a list of dict, with `return_raw_chat`.
    - `full_prompts`: the rendered text as a str, with `return_full_prompt`.
    - `index`: `extra_info["index"]`, or 0.
    - Every other column of the files, as Python objects; None in rows of files without the column.

    Examples:
        >>> import gpuload
        >>> from gpuload.demo_data import demo_files
        >>> file, tokenizer = demo_files()
        >>> prompts = gpuload.load(file, tokenizer, max_prompt_length=512, max_samples=100)
        >>> prompts
        PromptDataset(100 rows, 10,636 tokens, data_source, ability, reward_model, extra_info)
        >>> prompts[0]["input_ids"].shape
        torch.Size([512])
        >>> len(prompts[0]["raw_prompt_ids"])
        83

    Attributes:
        report: What the load did, as a `gpuload.dataset.report.Report`; `print` it.
        options: The options of the load.
        pad_token_id: The token that rows are padded with.
        passed_through: The other columns, one table per file schema.
    """

    def __repr__(self) -> str:
        columns = ", ".join(self.passed_through.names)
        return f"PromptDataset({counted(len(self), 'rows')}, {counted(self._lengths.sum(), 'tokens')}, {columns})"

    @property
    def tokens(self) -> Ragged:
        """The ids of all rows, without padding: flat `values`, int32, and `offsets`, int64 `(n + 1,)`, on the host.

        They are joined, or with `device="cuda"` copied there, when they are first needed; in each process that asks for
        them. With `store="disk"`, they are copied each time.
        """
        return self._store.to_host()

    @property
    def column_names(self) -> list[str]:
        return names_of(FIELDS, self.passed_through)

    def _parts(self, numbers: Numbers) -> dict[str, Ragged]:
        return {"prompt": self._tokens(whole_rows(numbers, self._lengths[numbers]))}

    def to_arrow(self, *, columns: Sequence[str] | None = None) -> pa.RecordBatchReader:
        """Return all rows as Arrow record batches, which are made one after the other.

        Examples:
            >>> prompts.to_arrow(columns=["ability"]).read_all().column_names
            ['raw_prompt_ids', 'ability']

        Args:
            columns: Which other columns of the files to add; None for all.

        Returns:
            The batches: `raw_prompt_ids`, list of int32, truncated as in a row; and the other columns.

        Raises:
            OptionError: A column does not exist.
            DataError: Files have other types in a column, and no type has all of its values.
        """

        def make(numbers: Numbers) -> list[pa.Array]:
            ids = self._tokens(self._plan(numbers))
            return [lists(ids.values, ids.offsets)]

        return row_reader(self._lengths, FIELDS, make, self.passed_through, columns)

    def to_cudf(self) -> Any:
        """Return all rows as a `cudf.DataFrame`.

        Examples:
            >>> prompts.to_cudf()  # doctest: +SKIP

        Returns:
            The pass-through columns, and the column `raw_prompt_ids`, list of int32.

        Raises:
            DeviceError: cuDF is not installed, or there are more tokens than a cuDF list column can hold.
            DataError: As for `columns`.
        """
        from gpuload.engines.device.cudf import frame_of

        # Rows that were selected are made of pieces of the store.
        return frame_of(self.columns, self._store) if stored(self._store) is self._store else super().to_cudf()

    def batch(self, rows: Sequence[int] | np.ndarray[Any, Any], padding: Padding = "max_length") -> RowBatch:
        """Return a batch of B rows.

        Examples:
            >>> import gpuload
            >>> from gpuload.demo_data import demo_files
            >>> file, tokenizer = demo_files()
            >>> prompts = gpuload.load(file, tokenizer, max_samples=100)
            >>> batch = prompts.batch([0, 1, 2], padding="longest")
            >>> batch["input_ids"].dtype, batch["input_ids"].shape
            (torch.int64, torch.Size([3, 105]))
            >>> batch["data_source"].dtype, batch["data_source"].shape
            (dtype('O'), (3,))

        Args:
            rows: Row numbers `(B,)`; negative numbers count from the end.
            padding: Width L of the tensors: `"max_length"` for `max_prompt_length`, `"longest"` for the longest row of
                the batch.

        Returns:
            A mapping with the keys of a row: int64 tensors `(B, L)` on the load's device, and object arrays `(B,)` for
            everything else. The arrays are made when they are first read; `dict(batch)` reads all of them.

        Raises:
            IndexError: A row number is out of range.
            PromptTooLongError: A row is longer than `max_prompt_length`, and `truncation="error"`.
            DataError: When a column is read that has a value without a Python equivalent.
        """
        return self._batch(rows, padding)

    def loader(self, batch_size: int, **settings: Any) -> "PromptLoader":
        """Return an iterable over batches, with a state that can be saved and restored.

        Examples:
            >>> len(prompts.loader(batch_size=32, shuffle=True, seed=0))
            4

        Args:
            batch_size: Rows per batch.
            **settings: `shuffle`, `seed`, `rank`, `world_size`, `drop_last` and `padding`; see `PromptLoader`.
                `shuffle` and `seed` default to those given to `load`.

        Returns:
            The loader.

        Raises:
            OptionError: A value is invalid, or `drop_last` leaves no batch.
        """
        return self._loader(batch_size, settings)

    def _lists(self, numbers: Numbers, columns: Made) -> dict[str, Sequence[Any]]:
        made = self._tensors(numbers, "max_length", columns)
        return {key: value.unbind(0) if isinstance(value, torch.Tensor) else value() for key, value in made.items()}

    def _tensors(self, numbers: Numbers, padding: Padding, columns: Made) -> Mapping[str, Values]:
        plan = self._plan(numbers)
        ids = cache(partial(self._tokens, plan))  # one copy, for tensors and lists
        extra_info = columns.get("extra_info", lambda: [None] * len(numbers))
        return {
            **self._batches(plan, ids, self._width(int(plan.tokens.max(initial=0)), padding)),
            "raw_prompt_ids": lambda: ids().to_lists(),
            "index": lambda: [index_of(extra) for extra in extra_info()],
        }

    def _column(self, name: str, numbers: Numbers) -> list[Any]:
        values = super()._column(name, numbers)
        if name == "raw_prompt" and self.options.return_raw_chat:
            return [messages_of(prompt) for prompt in values]
        return values


def collate_fn(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Collate rows into a batch as verl does. For PyTorch's `DataLoader` and torchdata's `StatefulDataLoader`.

    Examples:
        >>> import gpuload, torch
        >>> rows = [{"ids": torch.tensor([1, 2]), "name": "a"}, {"ids": torch.tensor([3, 4]), "name": "b"}]
        >>> gpuload.collate_fn(rows)
        {'ids': tensor([[1, 2], [3, 4]]), 'name': array(['a', 'b'], dtype=object)}

    Args:
        rows: B rows, as a `PromptDataset` returns them.

    Returns:
        A dict with the keys of the rows: tensors are stacked to `(B, ...)`, all other values become object arrays
        `(B,)`.

    Raises:
        OptionError: They are no rows.
    """
    values: dict[str, list[Any]] = {}
    for row in rows:
        if not isinstance(row, Mapping):
            raise OptionError(f"collate_fn: expected a list of rows, not of {type(row).__name__}")
        for key, value in row.items():
            values.setdefault(key, []).append(value)
    return {
        key: torch.stack(items) if all(isinstance(item, torch.Tensor) for item in items) else object_array(items)
        for key, items in values.items()
    }


def index_of(extra_info: Any) -> Any:
    """The key `index` of a row."""
    index = extra_info.get("index") if isinstance(extra_info, dict) else None
    return 0 if index is None else index
