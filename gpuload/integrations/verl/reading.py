"""Files as verl reads them, loaded by gpuload: which rows stay is what verl's own class decides, in the same order.

verl reads with `datasets`, which gives a parquet file's values as they are, and types JSON in a way of its own. So
parquet is read here, and what `datasets` would change (JSON, its own column types) is read by it first. Then:

1. render and encode all prompts by columns, and drop those over the limit;
2. prompts that gpuload does not render at all (a null among the messages, say) are put to the tokenizer as verl does:
   some templates have an answer;
3. keep the other columns, and the ids where rows are to carry them.
"""

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gpuload.errors import DataError
from gpuload.filter import all_dropped
from gpuload.fingerprint import Fingerprint, fingerprint
from gpuload.integrations.verl.rows import Rows
from gpuload.load import choose_rows, load_sources, reference_of
from gpuload.options import Options
from gpuload.sources.columns import Columns
from gpuload.sources.fetch import SourceFile, resolve
from gpuload.sources.read import Source, open_file, open_frame


@dataclass(frozen=True)
class LoadRequest:
    """All that a load needs: it can be sent to another process.

    Attributes:
        files: local paths, or what `datasets` and gpuload open besides.
        tokenizer: the transformers tokenizer that decides lengths.
        options: of `gpuload.load`.
        tokenize: whether lengths or ids are wanted at all.
        keep_ids: whether rows carry their ids.
    """

    files: tuple[str, ...]
    tokenizer: Any
    options: Options
    tokenize: bool
    keep_ids: bool


@dataclass(frozen=True)
class Loaded:
    """What a load gives.

    Attributes:
        rows: the rows that stay.
        report: what was done, for people.
        about: tells this data from other data.
    """

    rows: Rows
    report: str
    about: Fingerprint


def open_files(files: Sequence[str], cache_dir: str | None) -> list[Source]:
    """The files in verl's order, as verl reads them.

    Raises:
        DataError: neither .parquet nor .json nor .jsonl.
        SourceError: a file cannot be found or read.
        DecodedColumnError: `datasets` makes images, audio or the like of a column.
    """
    return [source for path in files for source in _open(path, cache_dir)]


def _open(path: str, cache_dir: str | None) -> list[Source]:
    if path.endswith((".json", ".jsonl")):
        return [_open_as_datasets_does("json", path)]
    if not path.endswith(".parquet"):
        raise DataError(f"{path}: verl takes .parquet, .json and .jsonl files")
    found = [open_file(file, index_columns=True) for file in resolve(path, cache_dir)]
    return found if all(map(_is_plain, found)) else [_open_as_datasets_does("parquet", path)]


def _is_plain(source: Source) -> bool:
    """Whether `datasets` gives the values of this parquet file as they are."""
    import datasets

    try:
        features = datasets.Features.from_arrow_schema(source.schema)
    except (ValueError, TypeError):  # a type that it does not know: verl could not read the file at all
        return True
    return bool(features.arrow_schema.remove_metadata().equals(source.schema.remove_metadata())) and not _decoded(
        features
    )


def _decoded(features: Any) -> list[str]:
    """The columns of which `datasets` makes something else when a row is drawn."""
    from datasets.features.features import require_decoding

    return [name for name, feature in features.items() if require_decoding(feature)]


class DecodedColumnError(Exception):
    """A column whose rows are made by `datasets`: verl's own class is to read it."""


def _open_as_datasets_does(kind: str, path: str) -> Source:
    import datasets

    frame = datasets.load_dataset(kind, data_files=path)["train"]
    if decoded := _decoded(frame.features):
        raise DecodedColumnError(f"`datasets` decodes column {decoded[0]!r} of {path}")
    return replace(open_frame(frame, path), identity=identity(path))


def identity(path: str) -> bytes:
    """Tells a file from another version of it."""
    if path.endswith(".parquet") and os.path.isfile(path):
        return open_file(SourceFile(path, path, "parquet")).identity
    digest = hashlib.sha256(path.encode(errors="surrogateescape"))
    if os.path.isfile(path):
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256")
    return digest.digest()


def load_rows(request: LoadRequest, sources: list[Source] | None = None) -> Loaded:
    """Reads the rows, drops those over the limit.

    Args:
        sources: the request's files, where they are open already.

    Raises:
        DataError: no row is left.
    """
    started = time.perf_counter()
    sources = sources or open_files(request.files, request.options.cache_dir)
    if not request.tokenize:
        return _all_rows(request, sources, started)
    dataset = load_sources(sources, request.tokenizer, request.options, started, keep_rejected=True)
    tokens, columns, report = dataset.tokens, dataset.passed_through, dataset.report
    kept = np.ones(len(tokens), bool)
    if request.options.filter_overlong_prompts:
        unrendered = np.flatnonzero(tokens.lengths == 0)
        kept[unrendered] = _pass_as_in_verl(columns, unrendered, request)
        if kept[unrendered].any():
            report.notes.append(f"{kept[unrendered].sum():,} of the rows rejected stay: the tokenizer takes them")
        report.rows_kept = int(kept.sum())
        if not report.rows_kept:
            raise DataError(all_dropped(report))
    ids = None
    if request.keep_ids:
        ids = tokens if kept.all() else tokens.take(np.flatnonzero(kept))
    names = _names(sources) | {request.options.prompt_key: "raw_prompt"}
    selected = columns if kept.all() else columns.select(np.flatnonzero(kept))
    return Loaded(Rows(selected, names, ids), str(report), dataset.fingerprint)


def _pass_as_in_verl(columns: Columns, rows: np.ndarray[Any, Any], request: LoadRequest) -> list[bool]:
    """Of rows without tokens, which ones verl's own call gives a length within the limit."""
    reference = reference_of(request.tokenizer, request.options)

    def passes(row: int) -> bool:
        try:
            (prompt,) = columns.take(np.array([row]), ["raw_prompt"])["raw_prompt"]
            return len(reference.call.ids(prompt)) <= request.options.max_prompt_length
        except Exception:  # verl's rule: whatever the reason, such a row is too long
            return False

    with reference.call.clock_stopped():
        return [passes(int(row)) for row in rows]


def _all_rows(request: LoadRequest, sources: list[Source], started: float) -> Loaded:
    """Every row, none rendered."""
    total = sum(source.num_rows for source in sources)
    if not total:
        raise DataError(f"no rows in {', '.join(request.files)}")
    options = request.options
    wanted = choose_rows(total, options.max_samples, options.shuffle, options.seed)
    columns = Columns((table for source in sources for table in source.batches()), wanted)
    what = request.files[0] if len(request.files) == 1 else f"{len(request.files)} files"
    report = (
        f"{what}: {len(columns):,} of {total:,} rows read in {time.perf_counter() - started:.2f} s, none tokenized: "
        "neither filter_overlong_prompts nor gpuload.reuse_ids is on"
    )
    about = fingerprint(sources, None, request.options)
    about["tokens"] = None if wanted is None else hashlib.sha256(np.ascontiguousarray(wanted).data).hexdigest()
    return Loaded(Rows(columns, _names(sources)), report, about)


def _names(sources: Sequence[Source]) -> dict[str, str]:
    """Key of a row → name of its column."""
    return {name: name for source in sources for name in source.schema.names}
