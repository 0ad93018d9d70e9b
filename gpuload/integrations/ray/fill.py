"""prepare(): a Ray cluster fills a store of token ids, which loads in any process then read.

1. one task per file computes the keys of its entry and pieces: a digest of the bytes of its prompts
2. workers make the pieces that the store does not have, and the one that has made the last piece of a file joins them
   (`pieces.py`)
3. files of which all pieces were found, but no entry, are joined: whoever has made the last piece has died

Runs know nothing of each other. Each makes the pieces in a random order, and looks before each of them whether it is
there; so two runs at the same time share the work. A piece or an entry that both begin at the same time is made twice.
"""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import pyarrow as pa

from gpuload.cache.key import key_maker
from gpuload.cache.shared_store import SharedStore
from gpuload.core.errors import GpuloadError, StoreError
from gpuload.core.keywords import ReadPromptsKeywords, takes
from gpuload.core.options import NO_LIMIT, Options
from gpuload.core.words import counted
from gpuload.integrations.ray.cluster import Scale, Workers, connect, import_ray, own_errors, workers_for
from gpuload.integrations.ray.dataset import mapped, work_of
from gpuload.integrations.ray.parts import FilePart, OpenedFile, all_parts, open_files, part_digests
from gpuload.integrations.ray.pieces import EntryPlan, Piece, PieceActor, PieceTask, is_complete
from gpuload.kinds.prompts import PromptKind
from gpuload.pipeline.run import open_job

_WINDOW = 1000  # tasks for keys that are submitted at a time


@dataclass
class Prepared:
    """What a run did; `print` it."""

    store: str  # as it is shown
    files: int  # with rows
    rows: int  # of all of them
    found: int = 0  # files whose entries were there before
    pieces: int = 0  # that this run has made
    rows_made: int = 0  # their rows
    pieces_found: int = 0  # that were there before, or were made by another run
    worker_seconds: float = 0.0  # of all tasks
    cpu_seconds: float = 0.0  # of all tasks
    seconds: float = 0.0  # from the first step to the last
    errors: dict[str, str] = field(default_factory=dict)  # file → what failed

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{counted(self.files, 'files')}, {counted(self.rows, 'rows')} in {self.store}",
                f"  found      {counted(self.found, 'files')}",
                f"  tokenized  {counted(self.rows_made, 'rows')} in {counted(self.pieces, 'pieces')}, "
                f"{self.pieces_found:,} were there",
                f"  seconds    {self.seconds:.1f}, of workers {self.worker_seconds:.1f} (CPU: {self.cpu_seconds:.1f})",
                *(f"  failed     {name}: {error}" for name, error in list(self.errors.items())[:10]),
            ]
        )


@takes(ReadPromptsKeywords, Options, Scale, others="verl_keys")
def prepare(
    files: Any,
    tokenizer: Any,
    store: str,
    /,
    *,
    address: str | None = None,
    **options: Unpack[ReadPromptsKeywords],
) -> Prepared:
    """Fills a store of token ids from a Ray cluster.

    Of the options, only those that decide the ids, `device`, `verify` and `remote_timeout` have an effect: all prompts
    are stored, whatever their length. A load finds the ids with `cache_dir=store`. A run that was interrupted continues
    where it stopped. Two runs at the same time make one store, and each piece is made by the one that comes to it
    first; by both, if they begin it at the same time.

    Args:
        files: paths that all nodes can read, or URLs.
        tokenizer: as for `gpuload.load`.
        store: a directory that all nodes and trainers mount at the same path, or a URL such as "s3://bucket/tokens".
        address: of the cluster; None: of `$RAY_ADDRESS`, or a cluster of this machine.
        **options: see `ReadPromptsKeywords`.

    Returns:
        What was done. Files that failed are in `errors`; all others are in the store.

    Raises:
        OptionError: an unknown option, or an invalid value.
        SourceError: a file that cannot be found or read.
        DeviceError: a GPU is asked for, and the cluster has none.
        StoreError: the store cannot be written.
        GpuloadError: Ray is not installed, its cluster is not there, or the ids cannot be cached.
    """
    started = time.perf_counter()
    import_ray()
    scale, given = Scale.parse(options)
    parsed = Options.parse(given)
    opened = open_files(files, parsed)
    job = open_job(PromptKind(), [file.source for file in opened], tokenizer, parsed, started)
    reference = job.reference
    with reference.call.clock_stopped() as clock:
        make = key_maker(reference, parsed, clock)
    if isinstance(make, str):
        raise GpuloadError(f"tokens cannot be stored: {make}: use read_prompts, which tokenizes for each run")
    place = SharedStore(store)
    name = place.create()
    connect(address)
    parts = all_parts(opened, scale.rows_per_task)
    workers, device = workers_for(parsed.device, len(parts), scale)
    work = work_of(replace(job, options=replace(parsed, max_prompt_length=NO_LIMIT)), device, pa.schema([]))
    plans = list(_plans(opened, parts, make, parsed))
    done = Prepared(place.shown, len(plans), sum(len(p.part.rows) for plan in plans for p in plan.pieces))
    todo = [plan for plan in plans if not is_complete(place, plan)]
    done.found = len(plans) - len(todo)
    arguments = (work, place, name, make(b""))
    random.shuffle(todo)
    tasks = [
        PieceTask(plan, number) for plan in todo for number in random.sample(range(len(plan.pieces)), len(plan.pieces))
    ]
    _execute(tasks, arguments, workers, done)
    apart = [plan for plan in todo if plan.name not in done.errors and not is_complete(place, plan)]
    _execute([PieceTask(plan, None) for plan in apart], arguments, workers, done)
    for plan in todo:
        if is_complete(place, plan):  # what failed here was made by another run
            done.errors.pop(plan.name, None)
        else:
            done.errors.setdefault(plan.name, "a piece is missing: run the command again")
    done.seconds = time.perf_counter() - started
    return done


def check_prepared(done: Prepared) -> None:
    """Checks that all files are in the store; a `StoreError` if some are not."""
    if done.errors:
        name, error = next(iter(done.errors.items()))
        raise StoreError(
            f"{len(done.errors):,} of {done.files:,} files are not in the store {done.store}: {name}: {error}"
        )


def _plans(opened: Sequence[OpenedFile], parts: Sequence[FilePart], make: Any, options: Options) -> Iterator[EntryPlan]:
    """The entries of all files that have rows. Files with the same prompts have the same entry, which is made once."""
    ray = import_ray()
    of_file = {file: list(some) for file, some in itertools.groupby(parts, lambda part: part.file)}
    digest = ray.remote(num_cpus=1, max_retries=-1)(part_digests)
    numbers, seen = list(of_file), set()
    for at in range(0, len(numbers), _WINDOW):
        some = numbers[at : at + _WINDOW]
        with own_errors():
            digests = ray.get([digest.remote(of_file[n], options.prompt_key, options.cache_dir) for n in some])
        for number, (whole, each) in zip(some, digests, strict=True):
            key = make(whole)
            if key not in seen:
                seen.add(key)
                pieces = tuple(Piece(p, d, make(d)) for p, d in zip(of_file[number], each, strict=True))
                yield EntryPlan(opened[number].source.name, key, options.verify, pieces)


def _execute(tasks: Sequence[PieceTask], arguments: tuple[Any, ...], workers: Workers, done: Prepared) -> None:
    """Executes tasks, and records what became of them."""
    if not tasks:
        return
    with own_errors():
        for outcome in mapped(tasks, PieceActor, arguments, workers).iter_rows():
            done.worker_seconds += outcome["seconds"]
            done.cpu_seconds += outcome["cpu_seconds"]
            done.rows_made += outcome["rows"]
            done.pieces += outcome["state"] == "made"
            done.pieces_found += outcome["state"] == "found"
            if outcome["state"] == "failed":
                done.errors.setdefault(outcome["name"], outcome["error"])
