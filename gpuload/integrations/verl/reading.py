"""Load files as verl's RLHFDataset does: the same values, the same rows, in the same order.

verl reads with `datasets`, which returns the values of most parquet files unchanged, but infers its own types for JSON
and converts some column types. So plain parquet files are read here with Arrow, and all other files through `datasets`.
Then:

1. Render and encode all prompts in batches, and drop prompts over the limit.
2. Pass prompts that gpuload rejects (a message is null, for example) to the tokenizer as verl does, because some
   templates accept them.
3. Keep the other columns, and the ids if rows carry them.
"""

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpuload.core.arrays import RowNumbers
from gpuload.core.errors import DataError, StoreError
from gpuload.core.files import open_regular
from gpuload.core.options import Options
from gpuload.dataset.fingerprint import Fingerprint, fingerprint
from gpuload.integrations.verl.rows import ArrowRows
from gpuload.kinds.prompts import PromptKind, reference_of
from gpuload.pipeline.filter import all_dropped
from gpuload.pipeline.keep_on_disk import columns_on_disk
from gpuload.pipeline.room import choose_disk
from gpuload.pipeline.run import Job, run
from gpuload.pipeline.stream import choose_rows
from gpuload.sources.columns import Columns
from gpuload.sources.fetch import SourceFile, resolve
from gpuload.sources.frames import open_frame
from gpuload.sources.read import Source, check_unchanged, open_file, parquet_file

_MEDIA_ROWS = 64  # rows decoded at a time when looking for images: an image can have megabytes


class DecodedColumnError(Exception):
    """A column whose values `datasets` decodes (images, audio ...), so that only verl's own class can read it."""


@dataclass(frozen=True)
class LoadRequest:
    """Arguments of `load_rows`. Can be pickled and sent to another process."""

    files: tuple[str, ...]  # local paths, or any other paths that both `datasets` and gpuload can open
    tokenizer: Any  # the transformers tokenizer that determines lengths
    options: Options  # of `gpuload.load`
    tokenize: bool  # whether lengths or ids are needed
    keep_ids: bool  # whether rows carry their ids


@dataclass(frozen=True)
class LoadedRows:
    """Result of `load_rows`."""

    rows: ArrowRows  # those that were kept
    report: str  # what was done, as text for the log
    fingerprint: Fingerprint  # identifies the data, for checkpoints


# -- files -------------------------------------------------------------------------------------------------------------


def open_files(files: Sequence[str], cache_dir: str | None) -> list[Source]:
    """Open .parquet, .json or .jsonl files in verl's order, with the values that verl reads; copies of remote files are
    in `cache_dir`.

    Raises:
        DataError: a file of another type.
        SourceError: a file that cannot be found or read.
        DecodedColumnError: a column that `datasets` decodes.
    """
    return [source for path in files for source in _open(path, cache_dir)]


def _open(path: str, cache_dir: str | None) -> list[Source]:
    if path.endswith((".json", ".jsonl")):
        return [_open_with_datasets("json", path)]
    if not path.endswith(".parquet"):
        raise DataError(f"{path}: unsupported file type. verl reads .parquet, .json and .jsonl files")
    sources = [open_file(file, index_columns=True) for file in resolve(path, cache_dir)]
    return sources if all(map(_unchanged_by_datasets, sources)) else [_open_with_datasets("parquet", path)]


def _unchanged_by_datasets(source: Source) -> bool:
    """Whether `datasets` returns the values of this parquet file unchanged."""
    import datasets

    try:
        features = datasets.Features.from_arrow_schema(source.schema)
    except (ValueError, TypeError):  # an unknown type: verl itself could not read the file
        return True
    same_types = features.arrow_schema.remove_metadata().equals(source.schema.remove_metadata())
    return bool(same_types) and not _decoded_columns(features)


def _decoded_columns(features: Any) -> list[str]:
    """Names of the columns that `datasets` decodes on access."""
    from datasets.features.features import require_decoding

    return [name for name, feature in features.items() if require_decoding(feature)]


def _open_with_datasets(file_type: str, path: str) -> Source:
    import datasets

    frame = datasets.load_dataset(file_type, data_files=path)["train"]
    if decoded := _decoded_columns(frame.features):
        raise DecodedColumnError(f"`datasets` decodes column {decoded[0]!r} of {path}")
    return replace(open_frame(frame, path), identity=content_digest(path))


def content_digest(path: str) -> bytes:
    """Compute a digest of a file's content (of a local parquet file: its footer); of its name if it is not local."""
    if path.endswith(".parquet") and os.path.isfile(path):
        return open_file(SourceFile(path, path, "parquet")).identity
    return file_digest(path)


def file_digest(path: str) -> bytes:
    """Compute a digest of all bytes of a file; of its name for a path that is not a local file."""
    digest = hashlib.sha256(path.encode(errors="surrogateescape"))
    if os.path.isfile(path):
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
    return digest.digest()


def media_column(source: Source, names: Sequence[str]) -> str | None:
    """Return the first of the given columns with a non-empty value (an image, a video, audio) in some row, or None."""
    for name in names:
        if name in source.schema.names and any(any(chunk.to_pylist()) for chunk in _column_chunks(source, name)):
            return str(name)
    return None


def _column_chunks(source: Source, name: str) -> Iterator[Any]:
    """One column in chunks. Of a parquet file, only this column is read."""
    if source.parquet is None:
        yield from (table.column(name) for table in source.batches())
        return
    with parquet_file(source.parquet) as file:
        yield from (batch.column(0) for batch in file.iter_batches(_MEDIA_ROWS, columns=[name]))


# -- rows --------------------------------------------------------------------------------------------------------------


def load_rows(request: LoadRequest, sources: list[Source] | None = None) -> LoadedRows:
    """Read the rows and drop those over the limit. The files of the request may be open already.

    Raises:
        DataError: there are no rows, or all were dropped.
        GpuloadError: as `gpuload.load`.
    """
    started = time.perf_counter()
    sources = sources or open_files(request.files, request.options.cache_dir)
    if not request.tokenize:
        return _load_untokenized(request, sources, started)
    reference = PromptKind().reference(request.tokenizer, request.options)
    job = Job(
        PromptKind(),
        sources,
        reference,
        request.options,
        started,
        request.tokenizer,
        keep_rejected=True,
    )
    dataset = run(job)
    columns, report = dataset.passed_through, dataset.report
    kept = np.ones(len(dataset), bool)
    if request.options.filter_overlong_prompts:
        rejected = np.flatnonzero(dataset.lengths == 0)
        kept[rejected] = _accepted_by_tokenizer(columns, rejected, request)
        if kept[rejected].any():
            report.notes.append(f"{kept[rejected].sum():,} of the rejected rows are kept: the tokenizer accepts them")
        report.rows_kept = int(kept.sum())
        if not report.rows_kept:
            raise DataError(all_dropped(report))
    names = _column_names(sources) | {request.options.prompt_key: "raw_prompt"}
    store = dataset.token_store
    rows = ArrowRows(columns, names, store if request.keep_ids else None, owner=getattr(store, "owner", None))
    rows = rows if kept.all() else rows.select(np.flatnonzero(kept))
    return LoadedRows(rows, str(report), dataset.fingerprint)


def _accepted_by_tokenizer(columns: Columns, rows: np.ndarray[Any, Any], request: LoadRequest) -> list[bool]:
    """Whether verl's own call returns a length within the limit, for each of some rejected rows."""
    if not len(rows):
        return []
    reference = reference_of(request.tokenizer, request.options)

    def accepted(row: int) -> bool:
        try:
            (prompt,) = columns.take(np.array([row]), ["raw_prompt"])["raw_prompt"]
            return len(reference.call.ids(prompt)) <= request.options.max_prompt_length
        except Exception:  # verl drops a row whatever the exception
            return False

    with reference.call.clock_stopped():
        return [accepted(int(row)) for row in rows]


def _load_untokenized(request: LoadRequest, sources: list[Source], started: float) -> LoadedRows:
    """All rows, or `max_samples` of them, without tokenizing."""
    total = sum(source.num_rows for source in sources)
    if not total:
        raise DataError(f"no rows in {', '.join(request.files)}")
    options = request.options
    wanted = choose_rows(total, options.max_samples, options.shuffle, options.seed)
    columns, owner = _columns(sources, options, wanted)
    check_unchanged(sources)
    files = request.files[0] if len(request.files) == 1 else f"{len(request.files)} files"
    report = (
        f"{files}: {len(columns):,} of {total:,} rows read in {time.perf_counter() - started:.2f} s. No prompts were "
        "tokenized, because filter_overlong_prompts and gpuload.reuse_ids are off"
    )
    identity = dict(fingerprint(sources, None, request.options))
    identity["tokens"] = None if wanted is None else hashlib.sha256(np.ascontiguousarray(wanted).data).hexdigest()
    identity["columns"] = columns.digests()
    return LoadedRows(ArrowRows(columns, _column_names(sources), owner=owner), report, identity)


def _columns(sources: Sequence[Source], options: Options, wanted: RowNumbers | None) -> tuple[Columns, Any]:
    """All columns, in memory or on disk, and the owner of their files."""
    if choose_disk(options, sources, wanted):
        try:
            return columns_on_disk(sources, options, wanted)
        except StoreError:
            if options.store != "auto":
                raise
    return Columns((table for source in sources for table in source.batches()), wanted), None


def _column_names(sources: Sequence[Source]) -> dict[str, str]:
    """Key of a row → name of its column."""
    return {name: name for source in sources for name in source.schema.names}
