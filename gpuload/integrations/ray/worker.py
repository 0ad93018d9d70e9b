"""A worker of a cluster: it holds one tokenizer and one engine, and tokenizes one part of a file at a time.

What it makes of a part depends on the part and on its settings only. So Ray may run a part again, on another node,
after a worker has died, and the rows are the same.
"""

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrow import as_numpy, without_rows
from gpuload.core.errors import GpuloadError, NoRowsError
from gpuload.core.options import Options
from gpuload.dataset.report import Report
from gpuload.engines.protocol import Engine
from gpuload.integrations.ray.parts import FilePart, open_part
from gpuload.pipeline.kind import Kind
from gpuload.pipeline.run import Job, run
from gpuload.sources.read import Source

ORIGIN = pa.field("origin", pa.struct([("file", pa.int32()), ("row", pa.int64())]))
"""The column that says where a row comes from: the number of the file in the report, and the row in it."""


@dataclass(frozen=True)
class Work:
    """What a worker needs to know. It is sent to each worker once."""

    kind: Kind[Any]  # of rows
    tokenizer: Any  # a transformers tokenizer
    fingerprint: str  # what the driver's `Reference` of it says
    instant: datetime  # the time that templates print
    options: Options  # of a load of one part
    schema: pa.Schema  # the columns of all rows, whatever the file

    @property
    def as_served(self) -> bool:
        """Whether a row of a file is a conversation that becomes several rows, or prompts."""
        return getattr(self.kind, "turns", None) == "served"


class Tokenizing:
    """The tokenizer (`reference`) and the engine of a process, and what it makes of parts; a `GpuloadError` if it does
    not make the same ids as the driver."""

    def __init__(self, work: Work):
        self.work = work
        self.reference = work.kind.reference(work.tokenizer, work.options).at(work.instant)
        if self.reference.fingerprint() != work.fingerprint:
            raise GpuloadError(
                "the tokenizer is another one in a Ray worker than in the driver: install the same versions of "
                "transformers and tokenizers on all nodes"
            )
        self._loading = ExitStack()  # until the process ends: an engine's tables are in the memory of a load
        self._engine: Callable[[bool], Engine] = cache(self._build)

    def _build(self, exact_only: bool) -> Engine:
        engine = self.work.kind.engine(self.work.options, self.reference, exact_only)
        loading: AbstractContextManager[Any] = engine.loading()
        self._loading.enter_context(loading)
        return engine

    def load(self, source: Source, options: Options) -> tuple[Any, Report]:
        """A dataset of an opened source, None if all of its rows were dropped, and the report."""
        started = time.perf_counter()

        def load(exact_only: bool) -> Any:
            job = Job(self.work.kind, [source], self.reference, options, started)
            return run(job, build_engine=lambda _options, _reference, exact: self._engine(exact or exact_only))

        for exact_only in (False, True):
            try:
                dataset = load(exact_only)
                return dataset, dataset.report
            except NoRowsError as error:
                report = error.report
                if not report.check.mismatches:
                    break
        return None, report

    def part(self, part: FilePart) -> tuple[pa.Table, Report]:
        """The rows of a part that were kept, in order, and the report."""
        schema = self.work.schema
        options = self.work.options
        source = open_part(part, options.cache_dir)
        if part.take < source.num_rows:
            options = replace(options, max_samples=part.take)
        if self.work.as_served and self.work.kind.name == "prompts":
            _, (source,), options = self.work.kind.resolve([source], options)
        prompts = self.work.kind.column(source, options, self.reference)
        dataset, report = self.load(prompts, options)
        if dataset is None:
            return without_rows(schema), report
        return pa.Table.from_batches(list(self._rows(dataset, part)), schema), report

    def _rows(self, dataset: Any, part: FilePart) -> Iterator[pa.RecordBatch]:
        at, numbers = 0, dataset.origins[:, 1]
        for batch in dataset.to_arrow():
            rows, own = numbers[at : at + batch.num_rows], {}
            at += batch.num_rows
            if self.work.as_served:  # `load` counts conversations from the first row that it reads
                rows = part.rows.start + as_numpy(batch.column("conversation"))
                own["conversation"] = pa.array(part.before + rows)
            files = np.full(len(rows), part.file, np.int32)
            origin = pa.StructArray.from_arrays([pa.array(files), pa.array(rows)], fields=list(ORIGIN.type))
            yield conformed(batch, {**own, ORIGIN.name: origin}, self.work.schema)


def conformed(batch: pa.RecordBatch, more: dict[str, pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """Rows of one file with the columns of all files: null where the file has no such column. `more` are columns that
    they have, too, or in the place of their own."""
    there = dict(zip(batch.schema.names, batch.columns, strict=True)) | more
    table = pa.table({name: column for name, column in there.items() if name in schema.names})
    promoted = pa.concat_tables([without_rows(schema), table], promote_options="permissive").select(schema.names)
    return promoted.cast(schema).combine_chunks().to_batches()[0]


class TokenizingActor:
    """The function of Ray Data's `map_batches`: numbers of parts → rows. The actor `reports` keeps the reports."""

    def __init__(self, work: Work, reports: Any):
        self._tokenizing, self._reports = Tokenizing(work), reports

    def __call__(self, batch: pa.Table) -> Iterator[pa.Table]:
        import ray

        for pickled in batch["part"].to_pylist():
            part = pickle.loads(pickled)
            rows, report = self._tokenizing.part(part)
            if not self._tokenizing.work.as_served:  # otherwise conversations are counted, as by `load_chats`
                report.rows_kept = len(rows)
            # Before the rows are passed on: what Ray has of a part is in the report, too.
            ray.get(self._reports.put.remote(part.key, report))
            yield rows
