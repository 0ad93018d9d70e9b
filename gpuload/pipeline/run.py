"""A load, whatever its rows are for. The whole pipeline on one page.

    sources/      paths, globs, URLs → local files → Arrow tables of some thousand rows
    kind.py       which column a row is made of
    cache/        token ids that an earlier load has made: such batches skip the next two stages
    engines/      prompts → text → token ids
    verify.py     a sample of the rows compared with the tokenizer
    filter.py     overlong and rejected rows dropped and counted
    dataset/      the result

Reading, rendering and encoding of successive batches overlap (`stream.py`).
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from tqdm import tqdm

from gpuload.cache.directory import tokens_directory
from gpuload.cache.known_tokenizer import remember
from gpuload.cache.store import TokenCache
from gpuload.core.arrays import Ragged, RowNumbers, offsets_of, on_host
from gpuload.core.errors import DeviceError, GpuloadError, MismatchError, NoRowsError
from gpuload.core.files import cache_root, remove_orphans
from gpuload.core.memory import NoRoomError
from gpuload.core.options import Options, Store, Verify, tokenizer_of
from gpuload.dataset.fingerprint import fingerprint
from gpuload.dataset.origins import Origins
from gpuload.dataset.report import Report
from gpuload.dataset.rows import Loaded
from gpuload.engines.choose import EngineBuilder
from gpuload.engines.failures import MisreadError, explained, one_line
from gpuload.engines.protocol import Engine
from gpuload.pipeline.filter import all_dropped, filter_rows, without
from gpuload.pipeline.keep_in_memory import InMemory, choose_keeper
from gpuload.pipeline.kind import Dataset, Kind
from gpuload.pipeline.long_rows import rendered_without, rows_without_room
from gpuload.pipeline.parts import Batch, Encoded, Rendered, SourceRows, small_ones_joined
from gpuload.pipeline.parts import joined as joined_batches
from gpuload.pipeline.ranks import Ranks, joined
from gpuload.pipeline.remedies import add_remedies
from gpuload.pipeline.room import choose_disk, fits_on_disk, row_bytes
from gpuload.pipeline.stream import choose_rows, has_work_for_threads, passed_on, read, shared_out, wanted_order
from gpuload.pipeline.verify import Verifier
from gpuload.reference.reference import Reference
from gpuload.reference.volatile import contains_randomness, volatile_reason
from gpuload.sources.columns import invalid_rows
from gpuload.sources.later import decoded
from gpuload.sources.open import open_all
from gpuload.sources.read import Source, check_unchanged

if TYPE_CHECKING:
    from gpuload.pipeline.keep_on_disk import OnDisk

_MANY_BYTES = 1 << 26


@dataclass(frozen=True)
class Job(Generic[Dataset]):
    """What is to be loaded, opened.

    Attributes:
        kind: of the data, with the format found.
        sources: the opened files, or the frame, each with the column that rows are made of.
        reference: the tokenizer.
        options: of the load.
        started: when its opening began (`time.perf_counter()`), for the report.
        tokenizer: as the user has given it; None for one that was opened before.
        keep_rejected: keep rows that cannot be rendered, without tokens, instead of dropping them.
        wanted: the numbers of the rows to take, over all sources, in the order of the dataset; None for all.
        ranks: the ranks that share the work.
    """

    kind: Kind[Dataset]
    sources: list[Source]
    reference: Reference
    options: Options
    started: float
    tokenizer: Any = None
    keep_rejected: bool = False
    wanted: RowNumbers | None = None
    ranks: Ranks | None = None

    @property
    def to_read(self) -> RowNumbers | None:
        """The numbers of the rows that this process reads; None for all."""
        if self.ranks is None:
            return self.wanted
        return self.ranks.share([source.num_rows for source in self.sources], self.wanted)

    def report(self) -> Report:
        """A report that has names and bytes of the sources, and no rows yet."""
        return Report(
            [source.name for source in self.sources],
            self.options.max_prompt_length,
            limit_name=self.kind.limit_name,
            overlong_dropped=self.options.filter_overlong_prompts,
            sanitized=self.reference.sanitizes,
            source_bytes=sum(source.nbytes for source in self.sources),
        )

    def check(self) -> None:
        """Raises an error if the load is of no use any more, because another rank has failed."""
        if self.ranks is not None:
            self.ranks.check()


def load_given(
    kind: type[Kind[Dataset]],
    files: Any,
    tokenizer: Any,
    given: Mapping[str, Any],
    build_engine: EngineBuilder | None = None,
) -> Dataset:
    """Loads files.

    Args:
        kind: of the data.
        files, tokenizer: as for `gpuload.load`.
        given: the keyword arguments of the load; `tokenizer` may be one of them.
        build_engine: builds the engine; None for the one that the kind needs.
    """
    started = time.perf_counter()
    given = dict(given)
    tokenizer = tokenizer_of(tokenizer, given)
    with joined(given.get("distributed") is True):  # what fails on one rank fails on all
        parsed, options = kind.parse(given)
        return run(open_job(parsed, open_all(files, options), tokenizer, options, started), build_engine)


def open_job(
    kind: Kind[Dataset], opened: Sequence[Source], tokenizer: Any, options: Options, started: float
) -> Job[Dataset]:
    """Finds the format of opened files, and opens the tokenizer.

    Args:
        tokenizer: as for `gpuload.load`, or a `Reference` of this kind.
        started: see `Job`.
    """
    kind, sources, options = kind.resolve(opened, options)
    known = isinstance(tokenizer, Reference)
    reference = tokenizer if known else kind.reference(tokenizer, options)
    sources = [kind.column(source, options, reference) for source in sources]
    return Job(kind, sources, reference, options, started, None if known else tokenizer)


def run(job: Job[Dataset], build_engine: EngineBuilder | None = None) -> Dataset:
    """Loads what is open.

    Args:
        build_engine: builds the engine; None for the one that the kind needs.
    """
    build_engine = build_engine or job.kind.engine
    options = job.options
    for directory in (cache_root(options.cache_dir), tokens_directory(options.cache_dir)):
        remove_orphans(directory)
    with joined(options.distributed) as ranks:
        _ = job.reference.pad_token_id  # raises before any work, if there is none
        rows = sum(source.num_rows for source in job.sources)
        job = replace(job, wanted=choose_rows(rows, options.max_samples, options.shuffle, options.seed))
        opened = time.perf_counter() - job.started
        if ranks is not None:
            job = _shared(job, ranks)
        if ranks is None or job.options.store == "memory":
            dataset = _exact(job, build_engine)
        else:
            dataset = ranks.one_per_machine(partial(_exact, replace(job, ranks=None), build_engine))
    if job.tokenizer is not None:
        remember(job.tokenizer, options, job.reference)
    dataset.report.seconds |= {"open": opened, "total": time.perf_counter() - job.started}
    if not job.keep_rejected and (warning := dataset.report.warning()):
        warnings.warn(warning, stacklevel=4)  # the line that calls `load`
    return dataset


def _shared(job: Job[Dataset], ranks: Ranks) -> Job[Dataset]:
    """The same work, shared with the other ranks."""
    reference, options = job.reference, job.options
    given: dict[str, Any] = {
        "the list of files": [(os.path.basename(source.name), source.num_rows) for source in job.sources]
    }
    given |= {"the tokenizer's fingerprint": reference.fingerprint()}
    about = fingerprint(job.sources, None, options)
    given |= {"the content of the files": list(about["files"].values()), **about["options"]}
    store: Store = "disk" if choose_disk(options, job.sources, job.wanted) else "memory"
    wanted, instant, store = ranks.agree(given, (job.wanted, reference.call.instant, store))
    if store == "disk" and options.store == "auto" and not ranks.all(fits_on_disk(options, job.sources, wanted)):
        store = "memory"
    options = replace(options, store=store)
    return replace(job, reference=reference.at(instant), wanted=wanted, ranks=ranks, options=options)


def _exact(job: Job[Dataset], build_engine: EngineBuilder) -> Dataset:
    """The dataset. If the fast path differs from the tokenizer, it is made again by the tokenizer itself."""
    options = job.options
    dataset = _run_on_device(job, build_engine)
    mismatches = dataset.report.check.mismatches
    if mismatches:
        message = f"the fast path differs from the tokenizer in {len(mismatches)} rows: {'; '.join(mismatches[:3])}"
        if options.strict:
            raise MismatchError(f"{message}. With strict=False, gpuload would load again with the tokenizer itself")
        warnings.warn(f"{message}. Loading again with the tokenizer itself, which is slow", stacklevel=2)
        job = replace(job, options=replace(options, token_cache=False))
        if job.ranks is not None:
            job.ranks.again()
        dataset = _run_on_device(job, build_engine, exact_only=True)
        dataset.report.notes.append(message)
    return dataset


def _run_on_device(job: Job[Dataset], build_engine: EngineBuilder, exact_only: bool = False) -> Dataset:
    """One pass by the engine that the options name. With "auto", the CPU takes over if the GPU fails for any reason."""
    while True:
        engine = build_engine(job.options, job.reference, exact_only)
        try:
            return _run(job, engine)
        except Exception as error:
            found = explained(engine, error)
            if isinstance(found, MisreadError):
                continue
            final = isinstance(found, GpuloadError) and type(found) is not DeviceError
            exchanged = job.ranks is not None and job.ranks.exchanged  # the others have gone on
            if job.options.device != "auto" or engine.name == "cpu" or final or exchanged:
                if found is error:
                    raise
                raise found from error
            why = one_line(found)
            break
    warnings.warn(f"the GPU engine failed, falling back to the CPU ({why})", stacklevel=3)
    dataset = _run(job, engine.host)
    dataset.report.notes.append(f"no GPU is used: it failed ({why})")
    return dataset


def _run(job: Job[Dataset], engine: Engine) -> Dataset:
    """One pass over the rows: read → render → encode → filter, then one store of all that was kept."""
    options, sources = job.options, job.sources
    report = job.report()
    # Two calls for one row differ if the template makes random choices.
    random = contains_randomness(job.reference.template_text)
    wanted, starts = job.to_read, offsets_of(np.array([source.num_rows for source in sources]))
    num_rows = int(starts[-1]) if wanted is None else len(wanted)
    mode: Verify = "off" if random else options.verify
    # One of several ranks that share the rows looks at a sample of its own: so it is said once.
    looks = job.ranks is None or not job.ranks.rank
    finders = job.kind.finders(mode, job.reference, num_rows) if looks else ()
    with ExitStack() as stack:
        nbytes = row_bytes(sources, wanted)
        stack.enter_context(engine.loading(_prompt_bytes(sources, wanted, options, nbytes), num_rows))
        verifier = Verifier(mode, job.reference, num_rows, finders, engine.by_tokenizer)
        # A template that prints the date must print the same one for all rows.
        clock = stack.enter_context(job.reference.clock_stopped())
        kept = choose_keeper(sources, wanted, engine, job.reference, clock, options, report)
        stack.callback(kept.discard)
        about = fingerprint(sources, job.reference, options)
        bar = stack.enter_context(_progress_bar(num_rows, options.progress))
        threads = stack if engine.name == "cuda" or has_work_for_threads(num_rows, nbytes) else None
        for batch in _encoded(job, wanted, engine, kept, verifier, report.seconds, threads):
            job.check()
            batch = replace(batch, sizes=on_host(job.kind.sizes(batch.tokens.ids)))
            useless = job.kind.useless(batch.sizes, batch.tokens.ids, options)
            lengths, place = job.kind.limited(batch.sizes), partial(batch.place, sources)
            keep = filter_rows(batch, lengths, place, report, options, job.keep_rejected, useless)
            report.count(job.kind.counts_of_dropped(batch.tokens.ids, keep))
            among_all = [starts[each.source] + each.rows - sources[each.source].first_row for each in batch.parts]
            kept.add(batch, keep, np.concatenate(among_all))
            if bar is not None:
                bar.update(len(keep))
        check_unchanged(sources)
        kept.complete(trusted=not verifier.check.mismatches)
        _describe(report, engine, kept.cache, verifier, overlap=threads is not None or len(sources) > 1)
        if reason := volatile_reason(job.reference.template_text, clock):
            report.notes.append(f"prompts differ from run to run: {reason}")
        if job.ranks is not None:
            assert isinstance(kept, InMemory)  # ranks load a store on disk one after the other
            report = kept.exchange(job.ranks, report, verifier.shapes)
        report.rows_kept = len(kept)
        if not report.rows_kept:
            raise job.kind.nothing_left(report, job.reference.template_text) or NoRowsError(all_dropped(report), report)
        numbers = kept.numbers()
        order = wanted_order(numbers, job.wanted)
        store, sizes, columns = kept.finish(order)
        columns = columns.without(job.kind.hidden)
        if options.tokens_on == "auto" and engine.name == "cuda" and isinstance(store, Ragged):
            report.notes.append("token ids are in host memory: gpu_memory_limit leaves too little GPU memory for them")
        report.tokens, report.longest = int(sizes[0].sum()), int(job.kind.limited(sizes).max())
    origins = Origins(
        numbers if order is None else numbers[order], starts, np.array([source.first_row for source in sources])
    )
    pad_id = job.reference.pad_token_id
    return job.kind.dataset(
        Loaded(store, sizes, columns, origins, engine, options, pad_id, report, about, job.reference)
    )


def _prompt_bytes(sources: Sequence[Source], wanted: RowNumbers | None, options: Options, whole: int) -> int:
    """About how many bytes of prompts are read; those of all columns if there are many, to look at fewer footers."""
    return whole if whole > _MANY_BYTES else row_bytes(sources, wanted, (options.prompt_key,))


def _encoded(
    job: Job[Any],
    wanted: RowNumbers | None,
    engine: Engine,
    kept: InMemory | OnDisk,
    verifier: Verifier,
    seconds: dict[str, float],
    stack: ExitStack | None,
) -> Iterator[Encoded]:
    """The batches with tokens: read, rendered, encoded and verified.

    Args:
        stack: ends the threads in which that is done, while other batches are; None to do it all in this thread.
    """
    remedies: dict[str, str] = {}

    def render(batch: Batch) -> Rendered:
        text = engine.render(batch.prompts)
        add_remedies(job.reference, batch.prompts, text.rejected, remedies)
        return Rendered(batch.parts, batch.prompts, text)

    def encode(batch: Rendered) -> Encoded:
        try:
            return Encoded(batch.parts, engine.encode(batch.text), batch)
        except NoRoomError:
            return encode_others(batch)

    def encode_others(batch: Rendered) -> Encoded:
        """Without the rows for which there is too little memory, where rows may be dropped and no file has them all."""
        found = rows_without_room(engine, batch.prompts, batch.text)
        if found and (job.keep_rejected or not isinstance(kept, InMemory) or engine is not engine.host):
            row, error = next(iter(found.items()))
            raise NoRoomError(batch.place(job.sources, row), error.why)
        if found:
            why = {row: f"it {error.why}" for row, error in found.items()}
            batch = replace(batch, text=rendered_without(engine, batch.prompts, why))
        tokens = engine.encode(batch.text)
        tokens.transient = bool(found)
        return Encoded(batch.parts, tokens, batch)

    def compare(batch: Encoded) -> Encoded:
        compared, invalid, rendered, parts = batch.compared, batch.invalid or {}, batch.rendered, list[SourceRows]()
        if rendered is not None:
            place, fetch = partial(batch.place, job.sources), partial(engine.fetch, batch.tokens.ids)
            compared = verifier.compare(place, rendered.prompts, rendered.text, fetch)
        for part, low, high in batch.ranges:
            if rendered is not None:
                prompts, sizes = rendered.prompts_of(low, high), rendered.text.sizes[low:high]
                for finder in verifier.finders:
                    finder.look(job.sources[part.source], part.rows, prompts, sizes)
            parts.append(replace(part, table=decoded(part.table)))
            if batch.invalid is None:
                found = invalid_rows(without(parts[-1].table, job.options.prompt_key))
                invalid |= {low + row: why for row, why in found.items()}
        return replace(batch, parts=tuple(parts), compared=compared, invalid=invalid)

    on_host = engine.name != "cuda"
    given = read(job.sources, kept.open, wanted, seconds, several=on_host)
    if on_host:
        given = small_ones_joined(given)
        given = shared_out(given, sum(source.num_rows for source in job.sources) if wanted is None else len(wanted))
    elif nbytes := engine.part_bytes:
        given = joined_batches(given, nbytes)
    return passed_on(given, {"render": render, "encode": encode}, compare, seconds, stack, on_device=not on_host)


def _describe(report: Report, engine: Engine, cache: TokenCache, verifier: Verifier, overlap: bool) -> None:
    """Records in the report what did the work."""
    report.check = verifier.check
    report.count(engine.counts)
    report.notes += [note for finder in verifier.finders for note in finder.notes]
    report.check.earlier = sum(entry.compared for entry in cache.found.values())
    report.cache, report.into_cache = str(cache.directory), cache.written
    report.from_cache = [name for name in report.files if name in cache.found]
    report.seconds |= {name: value for name, value in cache.seconds.items() if value}
    report.overlapping = list(report.seconds) if overlap else []
    if cache.missed:
        report.engine = engine.describe(compiled=report.rows_compiled > 0 or not report.by_reference)
        report.notes = [*engine.notes, *cache.notes, *report.notes]
    else:  # asking the engine would build the encoder
        report.engine, report.notes = f"{engine.name}: all tokens are from the cache", [*cache.notes, *report.notes]


def _progress_bar(total: int, progress: bool | None) -> Any:
    shown = getattr(sys.stderr, "isatty", bool)() if progress is None else progress
    if not shown:  # one that is disabled would make a lock of processes all the same: a hundredth of a second
        return nullcontext()
    return tqdm(total=total, desc="prompts", unit=" rows", unit_scale=True, disable=False, leave=False)
