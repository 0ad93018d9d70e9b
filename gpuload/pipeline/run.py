"""load(): the whole pipeline on one page.

    sources/      paths, globs, URLs → local files → Arrow tables of some thousand rows
    cache/        token ids that an earlier load has made: such batches skip the next two stages
    engines/      prompts → text → token ids
    verify.py     a sample of the rows compared with the tokenizer
    filter.py     overlong and rejected rows dropped and counted
    dataset/      the result

Reading, rendering and encoding of successive batches overlap (`stream.py`).
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from gpuload.cache.directory import tokens_directory
from gpuload.cache.known_tokenizer import open_known, remember
from gpuload.cache.store import TokenCache
from gpuload.core.arrays import Ragged, RowNumbers, offsets_of
from gpuload.core.errors import MORE_MEMORY, DeviceError, GpuloadError, HostMemoryError, MismatchError, NoRowsError
from gpuload.core.files import cache_root, remove_orphans
from gpuload.core.options import Options, Store, TokensOn, Truncation, Verify
from gpuload.dataset.fingerprint import fingerprint
from gpuload.dataset.origins import Origins
from gpuload.dataset.report import Report
from gpuload.dataset.rows import Make, PromptDataset, warn_of_replaced
from gpuload.engines.choose import EngineBuilder, choose_engine
from gpuload.engines.protocol import Engine
from gpuload.pipeline.filter import all_dropped, filter_rows
from gpuload.pipeline.keep_in_memory import InMemory, choose_keeper
from gpuload.pipeline.keep_on_disk import choose_disk, fits_on_disk
from gpuload.pipeline.ranks import Ranks, joined
from gpuload.pipeline.stream import Batch, Parts, ahead, choose_rows, one_by_one, read, side_by_side, wanted_order
from gpuload.pipeline.verify import Verifier
from gpuload.reference.reference import Reference
from gpuload.reference.volatile import contains_randomness, volatile_reason
from gpuload.sources.open import open_sources
from gpuload.sources.read import Source, check_unchanged


def load(
    files: Any,
    tokenizer: Any = None,
    /,
    *,
    prompt_key: str = "prompt",
    max_prompt_length: int = 1024,
    filter_overlong_prompts: bool = True,
    truncation: Truncation = "error",
    return_raw_chat: bool = False,
    return_full_prompt: bool = False,
    apply_chat_template_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | os.PathLike[str] | None = "default",
    max_samples: int = -1,
    shuffle: bool = False,
    seed: int | None = None,
    pad_token_id: int | None = None,
    cache_dir: str | None = None,
    remote_timeout: float = 60.0,
    token_cache: bool = True,
    token_cache_bytes: int = 0,
    device: str = "auto",
    tokens_on: TokensOn = "auto",
    store: Store = "auto",
    gpu_memory_limit: int = 0,
    verify: Verify = "sample",
    strict: bool = False,
    progress: bool | None = None,
    trust_remote_code: bool = False,
    distributed: bool = False,
    **verl_keys: Any,
) -> PromptDataset:
    """Loads prompts as exact token batches.

    Every row has the tokens that `tokenizer.apply_chat_template(messages, add_generation_prompt=True)` returns for it.

    Args:
        files: a path, glob, directory or URL (s3, gs, hf, hdfs, http, ...) of .parquet, .json or .jsonl files, or a
            list of them; or a frame in memory: `pyarrow.Table`, `pandas.DataFrame`, `datasets.Dataset` or
            `cudf.DataFrame`.
        tokenizer: a path, a hub id, a transformers tokenizer or a `tokenizers.Tokenizer`; also as a keyword.
        prompt_key: the column with the prompts: messages or plain strings.
        max_prompt_length: the limit in tokens, and the width of padded rows.
        filter_overlong_prompts: drop rows over the limit.
        truncation: what a batch does with a row over the limit that was not dropped.
        return_raw_chat: rows have `raw_prompt`, the messages.
        return_full_prompt: rows have `full_prompts`, the rendered text.
        apply_chat_template_kwargs: constants for the chat template.
        chat_template: "default", the name of one of the tokenizer's templates, the text of a template, the path of a
            `.jinja` file, or None.
        max_samples: take at most this many rows, before the filter; -1 for all.
        shuffle: take `max_samples` at random; also the loader's default.
        seed: for `shuffle`.
        pad_token_id: the padding token, instead of the tokenizer's.
        cache_dir: directory for copies of remote files and for cached token ids.
        remote_timeout: seconds that a web server may be silent before an attempt to download fails.
        token_cache: cache the token ids of files, and reuse them.
        token_cache_bytes: limit of that cache.
        device: "auto", "cpu", "cuda" or "cuda:N".
        tokens_on: where the GPU engine stores ids.
        store: where the host has ids and columns: in "memory" or on "disk", whose files are used in place.
        gpu_memory_limit: bytes of GPU memory that a load may use in addition to the stored ids.
        verify: compare a "sample" of the rows, all ("full") or none ("off") with the tokenizer.
        strict: raise an error for a row that cannot be rendered and for a token that differs.
        progress: show a progress bar; None: if standard error is a terminal.
        trust_remote_code: passed to transformers if the tokenizer is given by name.
        distributed: share the work among the ranks of `torch.distributed`; every rank gets all rows.
        **verl_keys: the other keys of verl's `data:` section, which are ignored. For all options see `Options`.

    Returns:
        The rows that were kept, with their tokens and all other columns.

    Raises:
        OptionError: an unknown option or an invalid value.
        SourceError: a file that cannot be found, downloaded or read.
        DataError: no prompt column, or no rows left.
        TokenizerError: a tokenizer that cannot be loaded, or has no chat template or padding token.
        DeviceError: the device is not available, or has too little memory.
        HostMemoryError: the host has too little memory.
        StoreError: the store on disk cannot be written.
        MismatchError: with `strict=True`, a token differs from the tokenizer's.

    Examples:
        >>> import gpuload
        >>> from gpuload.demo_data import demo_files
        >>> prompts = gpuload.load(*demo_files(), max_prompt_length=512, max_samples=8)
        >>> prompts.batch([0, 1])["input_ids"].shape
        torch.Size([2, 512])
    """
    started = time.perf_counter()
    given = {name: value for name, value in locals().items() if name in _OPTIONS} | verl_keys
    tokenizer = given.pop("tokenizer", None) if tokenizer is None else tokenizer
    with joined(distributed is True):  # what fails on one rank fails on all
        options = Options.parse(given)
        sources = open_sources(files, options)
        warn_of_replaced({name for source in sources for name in source.schema.names}, options)
        return load_sources(sources, tokenizer, options, started)


_OPTIONS = frozenset(Options.__dataclass_fields__)

Unusable = Callable[[Ragged], Mapping[int, str]]


@dataclass(frozen=True)
class Pass:
    """What one pass over the rows needs.

    Attributes:
        sources: the opened files, or the frame.
        wanted: the numbers of the rows to take, over all sources, in the order of the dataset; None for all.
        reference: the tokenizer.
        options: of the load.
        keep_rejected: keep rows whose prompts cannot be rendered, without tokens, instead of dropping them.
        ranks: the ranks that share the work.
        check: raises an error if the load is of no use any more, because another rank has failed.
        make: makes the result.
        unusable: n rows of ids → row: why it is of no use.
    """

    sources: list[Source]
    wanted: RowNumbers | None
    reference: Reference
    options: Options
    keep_rejected: bool = False
    ranks: Ranks | None = None
    check: Callable[[], None] = lambda: None
    make: Make = PromptDataset
    unusable: Unusable = lambda _: {}

    @property
    def to_read(self) -> RowNumbers | None:
        """The numbers of the rows that this process reads; None for all."""
        if self.ranks is None:
            return self.wanted
        return self.ranks.share([source.num_rows for source in self.sources], self.wanted)


def load_sources(
    sources: list[Source],
    tokenizer: Any,
    options: Options,
    started: float | None = None,
    keep_rejected: bool = False,
    build_engine: EngineBuilder | None = None,
    make: Make = PromptDataset,
    unusable: Unusable = Pass.unusable,
) -> PromptDataset:
    """`load` of sources that are open already.

    Args:
        started: when their opening began (`time.perf_counter()`), for the report.
        tokenizer: as for `load`, or a `Reference`.
        keep_rejected: see `Pass`.
        build_engine: builds the engine; None for the one that `options.device` names.
        make, unusable: see `Pass`.
    """
    started = time.perf_counter() if started is None else started
    build_engine = build_engine or choose_engine
    for directory in (cache_root(options.cache_dir), tokens_directory(options.cache_dir)):
        remove_orphans(directory)
    with joined(options.distributed) as ranks:
        known = isinstance(tokenizer, Reference)
        reference = tokenizer if known else open_known(tokenizer, options, partial(reference_of, tokenizer, options))
        _ = reference.pad_token_id  # raises before any work, if there is none
        rows = sum(source.num_rows for source in sources)
        wanted = choose_rows(rows, options.max_samples, options.shuffle, options.seed)
        task = Pass(sources, wanted, reference, options, keep_rejected, make=make, unusable=unusable)
        opened = time.perf_counter() - started
        if ranks is not None:
            task = _shared(task, ranks)
        if ranks is None or task.options.store == "memory":
            dataset = _load(task, build_engine)
        else:
            dataset = ranks.one_per_machine(partial(_load, replace(task, ranks=None), build_engine))
    if not known:
        remember(tokenizer, options, reference)
    dataset.report.seconds |= {"open": opened, "total": time.perf_counter() - started}
    if not keep_rejected and (warning := dataset.report.warning()):
        warnings.warn(warning, stacklevel=2)
    return dataset


def _shared(task: Pass, ranks: Ranks) -> Pass:
    """The same work, shared with the other ranks."""
    reference, options = task.reference, task.options
    about = fingerprint(task.sources, reference, options)
    given = {"the list of files": [(os.path.basename(source.name), source.num_rows) for source in task.sources]}
    given |= {"the tokenizer's fingerprint": about["tokenizer"], **about["options"]}
    store: Store = "disk" if choose_disk(options, task.sources, task.wanted) else "memory"
    wanted, instant, store = ranks.agree(given, (task.wanted, reference.call.instant, store))
    if store == "disk" and options.store == "auto" and not ranks.all(fits_on_disk(options, task.sources, wanted)):
        store = "memory"
    reference.call = replace(reference.call, instant=instant)
    return replace(task, wanted=wanted, ranks=ranks, check=ranks.check, options=replace(options, store=store))


def _load(task: Pass, build_engine: EngineBuilder) -> PromptDataset:
    """The dataset. If the fast path differs from the tokenizer, it is made again by the tokenizer itself."""
    options = task.options
    dataset = _run_on_device(task, build_engine)
    mismatches = dataset.report.check.mismatches
    if mismatches:
        message = f"the fast path differs from the tokenizer in {len(mismatches)} rows: {'; '.join(mismatches[:3])}"
        if options.strict:
            raise MismatchError(f"{message}. With strict=False, gpuload would load again with the tokenizer itself")
        warnings.warn(f"{message}. Loading again with the tokenizer itself, which is slow", stacklevel=2)
        task = replace(task, options=replace(options, token_cache=False))
        if task.ranks is not None:
            task.ranks.again()
        dataset = _run_on_device(task, build_engine, exact_only=True)
        dataset.report.notes.append(message)
    return dataset


def reference_of(tokenizer: Any, options: Options) -> Reference:
    """The tokenizer of a load, with the options that concern it."""
    return Reference(tokenizer, **options.of_tokenizer())


def _run_on_device(task: Pass, build_engine: EngineBuilder, exact_only: bool = False) -> PromptDataset:
    """One pass by the engine that the options name. With "auto", the CPU takes over if the GPU fails for any reason."""
    engine = build_engine(task.options, task.reference, exact_only)
    try:
        return _run(task, engine)
    except Exception as error:
        about_the_data = isinstance(error, GpuloadError) and not isinstance(error, DeviceError)
        if engine.name == "cpu" and isinstance(error, MemoryError) and not about_the_data:
            raise HostMemoryError(f"out of memory while loading ({error}): {MORE_MEMORY}") from error
        exchanged = task.ranks is not None and task.ranks.exchanged  # the others have gone on
        if task.options.device != "auto" or engine.name == "cpu" or about_the_data or exchanged:
            raise
        why = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
    warnings.warn(f"the GPU engine failed, falling back to the CPU ({why})", stacklevel=3)
    dataset = _run(task, engine.host)
    dataset.report.notes.append(f"no GPU is used: it failed ({why})")
    return dataset


def _run(task: Pass, engine: Engine) -> PromptDataset:
    """One pass over the rows: read → render → encode → filter, then one store of all that was kept."""
    options, sources = task.options, task.sources
    report = Report(
        [source.name for source in sources],
        options.max_prompt_length,
        overlong_dropped=options.filter_overlong_prompts,
        source_bytes=sum(source.nbytes for source in sources),
        sanitized=task.reference.sanitizes,
        limit_name=task.make.limit_name,
    )
    # Two calls for one row differ if the template makes random choices.
    random = contains_randomness(task.reference.template_text)
    wanted, starts = task.to_read, offsets_of(np.array([source.num_rows for source in sources]))
    num_rows = int(starts[-1]) if wanted is None else len(wanted)
    verifier = Verifier("off" if random else options.verify, task.reference, num_rows)
    with ExitStack() as stack:
        stack.enter_context(engine.loading())
        # A template that prints the date must print the same one for all rows.
        clock = stack.enter_context(task.reference.clock_stopped())
        kept = choose_keeper(sources, wanted, engine, task.reference, clock, options, report)
        stack.callback(kept.discard)
        bar = stack.enter_context(_progress_bar(num_rows, options.progress))
        for batch in _encoded(task, wanted, engine, kept.open, verifier, report.seconds, stack):
            task.check()
            source = sources[batch.source]
            assert batch.tokens is not None
            lengths, unusable = task.make.limited(batch.tokens.ids), task.unusable(batch.tokens.ids)
            keep = filter_rows(batch, lengths, source.name, report, options, task.keep_rejected, unusable)
            kept.add(batch, keep, starts[batch.source] + batch.rows - source.first_row)
            bar.update(len(keep))
        check_unchanged(sources)
        kept.complete(trusted=not verifier.check.mismatches)
        _describe(report, engine, kept.cache, verifier)
        if reason := volatile_reason(task.reference.template_text, clock):
            report.notes.append(f"prompts differ from run to run: {reason}")
        if task.ranks is not None:
            assert isinstance(kept, InMemory)  # ranks load a store on disk one after the other
            report = kept.exchange(task.ranks, report)
        report.rows_kept = len(kept)
        if not report.rows_kept:
            raise NoRowsError(all_dropped(report), report)
        numbers = kept.numbers()
        order = wanted_order(numbers, task.wanted)
        store, columns = kept.finish(order)
        if options.tokens_on == "auto" and engine.name == "cuda" and isinstance(store, Ragged):
            report.notes.append("token ids are in host memory: gpu_memory_limit leaves too little GPU memory for them")
        report.tokens, report.longest = int(store.lengths.sum()), int(task.make.limited(store).max())
    return task.make(
        store,
        columns,
        Origins(numbers if order is None else numbers[order], starts, np.array([s.first_row for s in sources])),
        engine,
        options,
        task.reference.pad_token_id,
        report,
        fingerprint(sources, task.reference, options),
    )


def _encoded(
    task: Pass,
    wanted: RowNumbers | None,
    engine: Engine,
    open_source: Callable[[int], Parts],
    verifier: Verifier,
    seconds: dict[str, float],
    stack: ExitStack,
) -> Iterator[Batch]:
    """The batches with tokens: read, rendered, encoded and verified, each in threads of their own."""

    def render(batch: Batch) -> None:
        assert batch.prompts is not None
        batch.text = engine.render(batch.prompts)

    def encode(batch: Batch) -> None:
        batch.tokens = engine.encode(batch.text)

    def compare(batch: Batch) -> Batch:
        if batch.prompts is not None and batch.text is not None and batch.tokens is not None:
            fetch = partial(engine.fetch, batch.tokens.ids)
            name = task.sources[batch.source].name
            batch.compared = verifier.compare(name, batch.rows, batch.prompts, batch.text, fetch)
        return batch

    threads = {name: stack.enter_context(ThreadPoolExecutor(1, name)) for name in ("read", "verify")}
    # On a device each stage has one thread, with its stream.
    on_host = engine.name != "cuda"
    batches = ahead(read(task.sources, open_source, wanted, seconds, several=on_host), threads["read"])
    batches = (side_by_side if on_host else one_by_one)({"render": render, "encode": encode}, batches, seconds, stack)
    return ahead(map(compare, batches), threads["verify"])


def _describe(report: Report, engine: Engine, cache: TokenCache, verifier: Verifier) -> None:
    """Records in the report what did the work."""
    report.check, report.counts = verifier.check, engine.counts
    report.check.earlier = sum(entry.compared for entry in cache.found.values())
    report.cache, report.into_cache = str(cache.directory), cache.written
    report.from_cache = [name for name in report.files if name in cache.found]
    report.seconds |= {name: value for name, value in cache.seconds.items() if value}
    report.overlapping = list(report.seconds)
    if cache.missed:
        report.engine = engine.describe(compiled=report.rows_compiled > 0 or not report.by_reference)
        report.notes = [*engine.notes, *cache.notes, *report.notes]
    else:  # asking the engine would build the encoder
        report.engine, report.notes = f"{engine.name}: all tokens are from the cache", [*cache.notes, *report.notes]


def _progress_bar(total: int, progress: bool | None) -> Any:
    disable = None if progress is None else not progress  # None: a bar if standard error is a terminal
    return tqdm(total=total, desc="prompts", unit=" rows", unit_scale=True, disable=disable, leave=False)
