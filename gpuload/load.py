"""load(): the whole pipeline on one page.

    sources.py    files, globs, URLs → local files, fetched once
    read.py       files → tables of Arrow, some thousand rows at a time
    engines/      prompts → text → token ids
    verify.py     the fast path against the reference
    cache.py      ids that an earlier load has made, in the place of the last two
    here          lengths, filter
    dataset.py    what the user gets

Reading, rendering and encoding of successive batches overlap (stages.py).
"""

import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from gpuload.arrays import Ragged, array_module, on_host
from gpuload.cache.entry import Kept
from gpuload.cache.store import TokenCache
from gpuload.dataset import PromptDataset
from gpuload.engines.host.engine import CpuEngine
from gpuload.engines.host.prompts import check_prompt_type
from gpuload.engines.protocol import Engine
from gpuload.errors import DataError, DeviceError, GpuloadError, MismatchError
from gpuload.fingerprint import fingerprint
from gpuload.options import Options
from gpuload.reference.reference import Reference
from gpuload.report import Report
from gpuload.sources.columns import Columns
from gpuload.sources.fetch import resolve
from gpuload.sources.read import Source, check_prompt_column, invalid_rows, is_frame, open_file, open_frame
from gpuload.stream import Batch, RowNumbers, ahead, read, stage
from gpuload.verify import Verifier

EngineBuilder = Callable[[Options, Reference, bool], Engine]


def load(files: Any, tokenizer: Any = None, /, **options: Any) -> PromptDataset:
    """Loads prompts as exact token batches.

    >>> prompts = gpuload.load("train/*.parquet", "Qwen/Qwen2.5-7B-Instruct", max_prompt_length=1024)
    >>> print(prompts.report)

    Args:
        files: a path, glob, folder or URL (s3, gs, hf, hdfs, http, ...) of .parquet, .json or .jsonl files, or a list
            of them; or a frame in memory: `pyarrow.Table`, `pandas.DataFrame`, `datasets.Dataset`, `cudf.DataFrame`
            (its prompt column is used as it lies on the GPU).
        tokenizer: a path, a hub id, a transformers tokenizer or a `tokenizers.Tokenizer`; also as a keyword.
        **options: see `gpuload.Options`. verl's `data:` section can be passed as it is.

    Raises:
        OptionError, SourceError, DataError, TokenizerError, DeviceError; with `strict=True` also MismatchError.
    """
    started = time.perf_counter()
    tokenizer = options.pop("tokenizer", None) if tokenizer is None else tokenizer
    chosen = Options.parse(options)
    return load_sources(open_sources(files, chosen), tokenizer, chosen, started)


def load_sources(
    sources: list[Source],
    tokenizer: Any,
    chosen: Options,
    started: float | None = None,
    keep_rejected: bool = False,
    build_engine: EngineBuilder | None = None,
) -> PromptDataset:
    """`load` over what was opened by other means.

    Args:
        started: when the opening began, for the report.
        keep_rejected: rows whose prompts cannot be rendered are counted and kept, with no tokens.
        build_engine: makes the engine from options, reference and whether the tokenizer itself must do everything;
            None for the one that `options.device` names.
    """
    build_engine = build_engine or choose_engine
    started = time.perf_counter() if started is None else started
    wanted = samples(sum(source.num_rows for source in sources), chosen)
    reference = reference_of(tokenizer, chosen)
    _ = reference.pad_token_id  # or an error, before any work
    opened = time.perf_counter() - started

    dataset = _run_somewhere(build_engine, sources, wanted, reference, chosen, keep_rejected)
    mismatches = dataset.report.check.mismatches
    if mismatches:
        message = f"the fast path differs from the tokenizer in {len(mismatches)} rows: {'; '.join(mismatches[:3])}"
        if chosen.strict:
            raise MismatchError(f"{message}. With strict=False the load would fall back to the tokenizer itself")
        warnings.warn(f"{message}. Loading again with the tokenizer itself, slowly", stacklevel=2)
        chosen = replace(chosen, token_cache=False)
        dataset = _run_somewhere(build_engine, sources, wanted, reference, chosen, keep_rejected, exact_only=True)
        dataset.report.notes.append(message)
    dataset.report.seconds |= {"open": opened, "total": time.perf_counter() - started}
    return dataset


def open_sources(files: Any, options: Options) -> list[Source]:
    """Files or a frame, opened, with the prompt column checked in each."""
    if is_frame(files):
        sources = [open_frame(files, type(files).__name__)]
    else:
        sources = [open_file(file) for file in resolve(files, options.cache_dir)]
    if not any(source.num_rows for source in sources):
        raise DataError(f"no rows in {', '.join(source.name for source in sources)}")
    for source in sources:
        if source.num_rows:
            check_prompt_column(source, options.prompt_key)
            kind = source.schema.field(options.prompt_key).type
            check_prompt_type(kind, f"{source.name}: column {options.prompt_key!r}")
    return sources


def samples(total: int, options: Options) -> RowNumbers | None:
    """Which rows to take, in which order; None for all. Drawn as verl draws them, so that both take the same."""
    if not 0 < options.max_samples < total:
        return None
    if not options.shuffle:
        return np.arange(options.max_samples)
    return np.random.default_rng(options.seed).choice(total, size=options.max_samples, replace=False)


def reference_of(tokenizer: Any, options: Options) -> Reference:
    """The tokenizer of a load, with the options that concern it."""
    return Reference(
        tokenizer,
        chat_template=options.chat_template,
        template_kwargs=options.apply_chat_template_kwargs,
        pad_token_id=options.pad_token_id,
        trust_remote_code=options.trust_remote_code,
    )


def choose_engine(options: Options, reference: Reference, exact_only: bool = False) -> Engine:
    """The engine that `options.device` names."""
    if options.device == "cpu":
        return CpuEngine(reference, exact_only)
    from gpuload.engines.device import cuda

    why_not = cuda.obstacle(options.device)
    if why_not is None:
        return cuda.cuda_engine(options, reference, exact_only)
    if options.device != "auto":
        raise DeviceError(f"device={options.device!r}: {why_not}; or use device='cpu' or 'auto'")
    return CpuEngine(reference, exact_only, (f"no GPU is used: {why_not}",))


def _run_somewhere(
    build_engine: EngineBuilder,
    sources: list[Source],
    wanted: RowNumbers | None,
    reference: Reference,
    options: Options,
    keep_rejected: bool,
    exact_only: bool = False,
) -> PromptDataset:
    """One pass on the machine that `device` names. With "auto" nobody asked for the GPU: where it fails, for whatever
    reason, the CPU does it."""
    engine = build_engine(options, reference, exact_only)
    try:
        return _run(sources, wanted, reference, engine, options, keep_rejected)
    except Exception as error:
        about_the_data = isinstance(error, GpuloadError) and not isinstance(error, DeviceError)
        if options.device != "auto" or engine.name == "cpu" or about_the_data:
            raise
        why = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
    warnings.warn(f"the GPU engine failed, the CPU is used ({why})", stacklevel=3)
    dataset = _run(sources, wanted, reference, CpuEngine(reference, exact_only), options, keep_rejected)
    dataset.report.notes.append(f"no GPU is used: it failed ({why})")
    return dataset


def _run(
    sources: list[Source],
    wanted: RowNumbers | None,
    reference: Reference,
    engine: Engine,
    options: Options,
    keep_rejected: bool,
) -> PromptDataset:
    """One pass over the rows: read → render → encode → filter, then one store of all that was kept."""
    report = Report(
        [source.name for source in sources],
        options.max_prompt_length,
        overlong_dropped=options.filter_overlong_prompts,
        source_bytes=sum(source.nbytes for source in sources),
    )
    total = sum(source.num_rows for source in sources) if wanted is None else len(wanted)
    verifier = Verifier(options.verify, reference, total)
    tables: list[pa.Table] = []
    tokens: list[Ragged] = []
    places: list[RowNumbers] = []  # (n, 2): source, row in the source
    with ExitStack() as stack:
        stack.enter_context(engine.loading())
        # A template that tells the date tells one for all rows.
        cache = TokenCache(options, reference, stack.enter_context(reference.call.clock_stopped()))
        stack.callback(cache.discard)
        bar = stack.enter_context(_progress(total, options))
        for batch in _encoded(sources, wanted, engine, cache, options, report, stack):
            source = sources[batch.source].name
            assert batch.rendered is not None
            assert batch.tokens is not None
            if not isinstance(batch.prompts, Kept):
                compared = verifier.check.rows
                verifier.see(source, batch.rows, batch.fetch, batch.rendered, batch.tokens)
                cache.keep(sources[batch.source], batch, verifier.check.rows - compared)
            keep = _filter(batch, source, report, options, keep_rejected)
            kept = np.flatnonzero(keep)
            tables.append(_kept_columns(batch, keep, options))
            tokens.append(engine.keep(batch.tokens, None if keep.all() else kept))
            places.append(np.stack([np.full(len(kept), batch.source), batch.rows[kept]], axis=1))
            bar.update(len(keep))
        cache.finish(sources, trusted=not verifier.check.mismatches)
        _tell(report, engine, cache, verifier)
        report.rows_kept = sum(len(part) for part in tokens)
        if not report.rows_kept:
            raise DataError(nothing_left(report))
        origin = np.concatenate(places)
        order = _order(origin, sources, wanted)
        store = engine.store(tokens, order)
        report.tokens, report.longest = len(store.values), int(store.lengths.max())
    return PromptDataset(
        store,
        Columns(_drain(tables), order),
        origin if order is None else origin[order],
        engine,
        options,
        reference.pad_token_id,
        report,
        fingerprint(sources, reference, options),
    )


def _encoded(
    sources: list[Source],
    wanted: RowNumbers | None,
    engine: Engine,
    cache: TokenCache,
    options: Options,
    report: Report,
    stack: ExitStack,
) -> Iterator[Batch]:
    """The batches after the three heavy stages, each stage in a thread of its own. What is in the cache passes them
    by, in its place among the others."""

    def open_source(source: Source) -> Iterator[tuple[pa.Table, Any]]:
        entry = cache.find(source)
        return (entry or engine).read(source, options.prompt_key, options.return_raw_chat)

    def render(batch: Batch) -> None:
        prompts = batch.prompts
        batch.rendered = prompts.rendered() if isinstance(prompts, Kept) else engine.render(prompts)

    def encode(batch: Batch) -> None:
        assert batch.rendered is not None
        batch.tokens, batch.left = engine.encode(batch.rendered)

    threads = [stack.enter_context(ThreadPoolExecutor(1, name)) for name in ("read", "render", "encode")]
    batches = ahead(read(sources, open_source, wanted, report.seconds), threads[0])
    batches = ahead(stage("render", render, batches, report.seconds), threads[1])
    return ahead(stage("encode", encode, batches, report.seconds), threads[2])


def _tell(report: Report, engine: Engine, cache: TokenCache, verifier: Verifier) -> None:
    """What did the work."""
    report.check = verifier.check
    report.check.earlier = sum(entry.compared for entry in cache.found.values())
    report.cache, report.into_cache = str(cache.folder), cache.written
    report.from_cache = [name for name in report.files if name in cache.found]
    report.seconds |= {name: value for name, value in cache.seconds.items() if value}
    if cache.missed:
        report.engine, report.notes = engine.description, [*engine.notes, *cache.notes]
    else:  # to ask the engine would build the encoder
        report.engine, report.notes = f"{engine.name}: no tokens had to be made", cache.notes


def _filter(
    batch: Batch, source: str, report: Report, options: Options, keep_rejected: bool
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """(n,) which rows stay: those with tokens, and not too many of them; those without any, where asked. Counts the
    others."""
    assert batch.rendered is not None
    assert batch.tokens is not None
    rejected = batch.rendered.rejected | invalid_rows(_without(batch.table, options.prompt_key))
    keep = np.ones(len(batch.rows), bool)
    for row, reason in sorted(rejected.items()):
        place = f"{source} row {batch.rows[row]}"
        if options.strict:
            raise DataError(f"{place}: {reason}. With strict=False such rows are dropped and counted")
        report.reject(place, reason)
        keep[row] = False
    lengths = batch.tokens.lengths  # compared where they lie; one byte a row comes to the host
    overlong = keep & on_host(lengths > options.max_prompt_length)
    report.rows_read += len(keep)
    report.rows_compiled += batch.rendered.compiled_rows
    report.rows_left += batch.left
    for why, count in batch.rendered.reasons.items():
        report.by_reference[why] = report.by_reference.get(why, 0) + count
    report.text_bytes += batch.rendered.nbytes
    report.overlong += int(overlong.sum())
    if keep.any():
        shortest = int(lengths[array_module(lengths).asarray(keep)].min())
        report.shortest = min(report.shortest, shortest) if report.shortest else shortest
    if options.filter_overlong_prompts:
        keep &= ~overlong
    if keep_rejected:
        keep[list(batch.rendered.rejected)] = True
    return keep


def _kept_columns(batch: Batch, keep: np.ndarray[Any, Any], options: Options) -> pa.Table:
    """What stays of a batch's columns: all but the prompt, and what rows are to carry of it."""
    assert batch.rendered is not None
    table = _without(batch.table, options.prompt_key)
    if options.return_raw_chat:
        table = _with_column(table, "raw_prompt", batch.table.column(options.prompt_key))
    if options.return_full_prompt:
        table = _with_column(table, "full_prompts", batch.rendered.text)
    return table if keep.all() else table.filter(pa.array(keep))


def _with_column(table: pa.Table, name: str, column: Any) -> pa.Table:
    return _without(table, name).append_column(name, column)


def _without(table: pa.Table, name: str) -> pa.Table:
    return table.drop_columns([name]) if name in table.schema.names else table


def _order(origin: RowNumbers, sources: list[Source], wanted: RowNumbers | None) -> RowNumbers | None:
    """How to bring rows that were read in the files' order into the order in which they were drawn."""
    if wanted is None or bool(np.all(np.diff(wanted) > 0)):
        return None
    starts = np.cumsum([0] + [source.num_rows for source in sources])
    by_number = np.argsort(wanted)
    found = np.searchsorted(wanted, starts[origin[:, 0]] + origin[:, 1], sorter=by_number)
    return np.argsort(by_number[found])


def nothing_left(report: Report) -> str:
    """What to say where no row is left, and why."""
    lines = [f"none of {report.rows_read:,} rows is left"]
    if report.overlong:
        lines.append(
            f"  overlong   {report.overlong:,} rows are over max_prompt_length={report.max_prompt_length} tokens: "
            f"the shortest has {report.shortest}"
        )
    return "\n".join(lines + ([report.reasons()] if report.rejected else []))


def _progress(total: int, options: Options) -> Any:
    # None: tqdm shows a bar where standard error is a terminal.
    disable = None if options.progress is None else not options.progress
    return tqdm(total=total, desc="prompts", unit=" rows", unit_scale=True, disable=disable, leave=False)


def _drain(tables: list[pa.Table]) -> Iterator[pa.Table]:
    """Gives the tables away one by one, so that each is freed as soon as its copy is made."""
    while tables:
        yield tables.pop(0)
