"""What TRL's `_prepare_dataset` does with a stream (`IterableDataset`): batches of rows, each tokenized by columns.

    1. The first rows are prepared by TRL and by columns. They must be equal.
    2. The stream maps batches: each becomes a table, and takes the steps of a dataset.
    3. A batch that no table has exactly, or in which a row cannot be tokenized, is given to TRL's own stream.
    4. What depends on other rows, such as packs, is made of the rows that are kept.

Like those of TRL, streams are read lazily, can be resumed (`state_dict`), and are split among workers and ranks.
"""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import pyarrow as pa
from datasets import Dataset, IterableDataset

from gpuload.core.errors import DataError, GpuloadError
from gpuload.engines.kept import KeptEngine
from gpuload.integrations.comparison import ROWS, compare
from gpuload.integrations.core import log_fallback
from gpuload.integrations.trl.steps import Call, Steps, processor_difference, unsupported_columns
from gpuload.kinds.pairs.dataset import OF_OTHER_ROWS
from gpuload.kinds.training_options import training_engine

_BATCH = 1_000
"""Rows that are tokenized together, as in a `map` of `datasets`."""

_SAMPLE = 16

logger = logging.getLogger("gpuload.integrations.trl")

Row = dict[str, Any]
Columns = Mapping[str, list[Any]]


def schema_of(dataset: Any) -> pa.Schema:
    """The columns of a dataset; of a stream without types, those of its first rows."""
    if dataset.features is None:
        return Dataset.from_list(list(islice(dataset, _SAMPLE))).features.arrow_schema
    return dataset.features.arrow_schema


@dataclass
class _GivenRows:
    """Rows that TRL's own stream is to prepare."""

    given: Sequence[Row] = field(default_factory=list)

    def __call__(self) -> Iterator[Row]:
        yield from self.given


class _BatchSteps:
    """A batch of rows → the same rows as TRL prepares them, without those that it drops.

    The call is one with a stream with explicit prompts, which is neither packed nor shuffled, and begins with the
    sample: `expected` are these rows as TRL prepares them, without the column that depends on other rows.
    """

    def __init__(self, call: Call, steps: Steps, sample: Sequence[Row]):
        self._call, self._steps = call, steps
        # Made here, where all ranks are: TRL lets them wait for each other when it is called.
        self._rows = _GivenRows(sample)
        self._theirs = call.by_trl(dataset=IterableDataset.from_generator(self._rows))
        self.expected = [{name: row[name] for name in row if name != OF_OTHER_ROWS} for row in self._theirs]
        self._names = list(self.expected[0]) if self.expected else []
        self._told = False

    def __call__(self, batch: Columns) -> Columns:
        try:
            return self.by_columns(batch)
        except (GpuloadError, pa.ArrowException, ArithmeticError, LookupError, TypeError, ValueError) as error:
            if not self._told:
                log_fallback(logger, f"TRL for some rows of the {self._call.name} dataset", str(error))
            self._told = True
        self._rows.given = rows_of(batch)
        found = list(self._theirs)
        names = dict.fromkeys(name for row in found for name in row if name != OF_OTHER_ROWS)
        return {name: [row.get(name) for row in found] for name in names}

    def by_columns(self, batch: Columns) -> Columns:
        """The rows, tokenized by columns. If anything is raised, TRL has to prepare them."""
        features = self._call.given["dataset"].features
        table = pa.Table.from_pydict(dict(batch), None if features is None else features.arrow_schema)
        if table.to_pydict() != batch:  # in a table, all messages have the same keys
            raise ValueError("messages have different keys")
        table, _ = self._steps.tokenized(self._call, table)
        if why := processor_difference(self._call, table):
            raise ValueError(why)
        made: Columns = self._steps.finished(self._call, table).select(self._names).to_pydict()
        return made


def prepare_stream(call: Call, steps: Steps, change: str | None) -> Any:
    """The prepared stream; a `DataError` if TRL has to prepare it. More rows than usual are compared because of a
    `change`."""
    why = None if call.given["dataset"]._formatting is None else "it has a format"
    if why is not None:
        raise DataError(why)
    stream = steps.explicit(call, call.given["dataset"])
    schema = schema_of(stream)
    if "chat_template_kwargs" in schema.names:
        change = change or "rows have chat_template_kwargs"
    sample = list(islice(stream, ROWS if change else _SAMPLE))
    why = None if sample else "it has no rows"
    if why := why or unsupported_columns(call, schema) or steps.unsupported(call, schema):
        raise DataError(why)
    plain = copy.copy(call.args)
    plain.shuffle_dataset = False
    if call.given.get("packing"):
        plain.max_length = None  # TRL does not truncate what it packs
    given = {**call.given, **steps.sampled, "args": plain, "dataset": stream}
    engines = KeptEngine(partial(training_engine, on_host=steps.engine))
    prepared = _BatchSteps(replace(call, given=given, engines=engines), steps, sample)
    names = list(sample[0])
    why = compare(
        [{name: [row.get(name) for row in sample] for name in names}],
        lambda batch: rows_of(prepared.by_columns(batch)),
        lambda _: prepared.expected,
        change,
        logger=logger,
        trainer="TRL",
        rows=len(sample),
        differs=f"its first {len(sample)} rows differ from TRL's",
    )
    if why is not None:
        raise DataError(why)
    return steps.packed(call, stream.map(prepared, batched=True, batch_size=_BATCH, remove_columns=names))


def rows_of(columns: Columns) -> list[Row]:
    """The rows of some columns."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
