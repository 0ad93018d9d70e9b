"""read_prompts(), read_chats(), read_pairs(): Ray Data datasets of tokenized rows.

    driver    finds the files, reads their footers, opens the tokenizer; one item per part of a file
    workers   actors with a tokenizer and an engine: part → rows (`worker.py`)
    reports   an actor on the driver's node that keeps the report of each part (`reports.py`)

The datasets are lazy: nothing is tokenized before Ray Data executes them.
"""

import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack
from weakref import WeakKeyDictionary

import pyarrow as pa

from gpuload.core.errors import OptionError
from gpuload.core.keywords import ReadChatsKeywords, ReadPairsKeywords, ReadPromptsKeywords, takes
from gpuload.core.options import Options, tokenizer_of
from gpuload.dataset.report import Report
from gpuload.integrations.ray.cluster import Scale, Workers, import_ray, workers_for
from gpuload.integrations.ray.parts import FilePart, all_parts, open_files
from gpuload.integrations.ray.reports import merged, start_keeper
from gpuload.integrations.ray.worker import ORIGIN, TokenizingActor, Work
from gpuload.kinds.chats.load import ChatKind
from gpuload.kinds.pairs.dataset import LABEL, OF_OTHER_ROWS
from gpuload.kinds.pairs.load import PairKind
from gpuload.kinds.prompts import PromptKind
from gpuload.kinds.served.options import ServedOptions
from gpuload.kinds.served.prompts import check_conversations
from gpuload.kinds.served.reference import ServedReference
from gpuload.kinds.training_options import TrainingDefaults
from gpuload.pipeline.kind import Kind, warn_of_replaced
from gpuload.pipeline.run import Job, open_job
from gpuload.sources.columns import promoted

if TYPE_CHECKING:
    from ray.data import Dataset


@dataclass(frozen=True)
class About:
    """What is known of a dataset that was made here, without executing it."""

    kind: Kind[Any]  # of its rows, in which pairs may have become single completions
    options: Options  # of the load
    pad_token_id: int  # the padding token
    empty: Report  # a report with the names and bytes of the files
    parts: Sequence[FilePart]  # in order
    reports: Any  # the actor that keeps the reports


_ABOUT: "WeakKeyDictionary[Any, About]" = WeakKeyDictionary()


@takes(ReadPromptsKeywords, Options, Scale, others="verl_keys")
def read_prompts(files: Any, tokenizer: Any = None, /, **options: Unpack[ReadPromptsKeywords]) -> "Dataset":
    """Reads prompts as a Ray Data dataset of exact token ids.

    Args:
        files: as for `gpuload.load`, except for frames: paths that all nodes can read, or URLs.
        tokenizer: as for `gpuload.load`. It is opened here, and sent to each worker once.
        **options: see `ReadPromptsKeywords`.

    Returns:
        A dataset with the columns `raw_prompt_ids` (list of int32), `origin` (the number of the file and of the row in
        it), and all other columns of the files. Rows are in the order of the files if
        `ray.data.DataContext.get_current().execution_options.preserve_order` is true.

    Raises:
        OptionError: an unknown option, an invalid value, or an option that has no meaning here.
        SourceError: a file that cannot be found or read.
        DataError: no prompt column, or no type has all values of a column.
        TokenizerError: as for `gpuload.load`.
        DeviceError: a GPU is asked for, and the cluster has none.
        GpuloadError: Ray Data is not installed.
    """
    return _read(PromptKind, files, tokenizer, options)


@takes(ReadChatsKeywords, Options, TrainingDefaults, ChatKind, Scale)
def read_chats(files: Any, tokenizer: Any = None, /, **options: Unpack[ReadChatsKeywords]) -> "Dataset":
    """Reads conversations for SFT as a Ray Data dataset.

    Args:
        files: as for `read_prompts`.
        tokenizer: as for `read_prompts`.
        **options: see `ReadChatsKeywords`.

    Returns:
        A dataset with the columns of `ChatDataset.to_arrow`: `input_ids` and `labels` (lists of int32), all other
        columns of the files, and `origin`.

    Raises:
        GpuloadError: as for `read_prompts` and `gpuload.load_chats`.
    """
    return _read(ChatKind, files, tokenizer, options)


@takes(ReadPairsKeywords, Options, TrainingDefaults, PairKind, Scale)
def read_pairs(files: Any, tokenizer: Any = None, /, **options: Unpack[ReadPairsKeywords]) -> "Dataset":
    """Reads preference data as a Ray Data dataset.

    Args:
        files: as for `read_prompts`.
        tokenizer: as for `read_prompts`.
        **options: see `ReadPairsKeywords`.

    Returns:
        A dataset with the columns of `PairDataset.to_arrow`: `prompt_ids` (for "dpo"), `chosen_ids` and `rejected_ids`
        (lists of int32), all other columns of the files, and `origin`. For "kto" `prompt_ids`, `completion_ids` and
        `label`: completions of other rows are those of a batch, which `collate_fn` makes. Pairs become single
        completions in runs of 1,000 rows of a task.

    Raises:
        GpuloadError: as for `read_prompts` and `gpuload.load_pairs`.
    """
    return _read(PairKind, files, tokenizer, options)


def report(dataset: "Dataset") -> Report:
    """Returns what all workers have done so far for a dataset.

    Args:
        dataset: the result of `read_prompts`, `read_chats` or `read_pairs` itself, not of one of its methods.

    Returns:
        The report of the parts that have been tokenized: all of them after the dataset was iterated over once.

    Raises:
        OptionError: it is another dataset.
    """
    about = about_dataset(dataset)
    kept = import_ray().get(about.reports.get.remote())
    return merged(about.empty, kept, [part.key for part in about.parts])


def about_dataset(dataset: Any) -> About:
    """What is known of a dataset that was made here; an `OptionError` if it was made elsewhere."""
    try:
        return _ABOUT[dataset]
    except (KeyError, TypeError):
        raise OptionError(
            f"expected the result of read_prompts, read_chats or read_pairs itself, not {type(dataset).__name__} "
            f"{dataset!s:.60}: keep it in a variable of its own"
        ) from None


def _passed_through(job: Job[Any]) -> pa.Schema:
    """The columns of rows that are not made of tokens, of types that have the values of all files; a `DataError` if
    there is no such type."""
    types: dict[str, list[pa.DataType]] = {}
    for source in job.sources:
        for field in source.schema:
            types.setdefault(field.name, []).append(field.type)
    prompts = types.pop(job.options.prompt_key, [])
    if job.options.return_raw_chat:
        types["raw_prompt"] = prompts
    if job.options.return_full_prompt:
        types["full_prompts"] = [pa.large_string()]
    if getattr(job.kind, "turns", None) == "served":
        types |= {name: [pa.int64()] for name in ("conversation", "turn")}
    instead = "rename or convert it, or read the files in two datasets"
    return pa.schema(
        [promoted([pa.field(name, kind) for kind in dict.fromkeys(kinds)], instead) for name, kinds in types.items()]
    )


def _read(kind: type[Kind[Any]], files: Any, tokenizer: Any, given: Mapping[str, Any]) -> "Dataset":
    """A dataset of the rows of one kind, with the keyword arguments given."""
    started = time.perf_counter()
    import_ray()
    scale, given = Scale.parse(given)
    tokenizer = tokenizer_of(tokenizer, given)
    parsed, options = kind.parse(given)
    opened = open_files(files, options)
    sources = [file.source for file in opened]
    filled = [source for source in sources if source.num_rows]
    of_turns = isinstance(parsed, PromptKind) and parsed.turns == "served"
    whole = PromptKind() if of_turns else parsed
    job = open_job(whole, filled, tokenizer, options, started)
    if of_turns:  # workers make the prompts of turns
        for source in job.sources:
            check_conversations(source, options.prompt_key)
        job = replace(job, kind=parsed)
    for name, value, why in (
        ("shuffle", True, "use the methods of Ray Data, such as random_shuffle"),
        ("distributed", True, "Ray does"),
        ("store", "disk", "its rows are in Ray's object store, which spills to disk"),
    ):
        if getattr(job.options, name) == value:
            raise OptionError(f"{name}={value!r} has no effect on a Ray dataset: {why}")
    parts = all_parts(opened, scale.rows_per_task, job.options.max_samples)
    on_cpu = isinstance(job.kind, ChatKind) and job.kind.as_served
    workers, device = workers_for("cpu" if on_cpu else job.options.device, len(parts), scale)
    work = work_of(job, device, _passed_through(job))
    reports = start_keeper()
    dataset = mapped(parts, TokenizingActor, (work, reports), workers)
    empty = replace(job, sources=sources).report()
    _ABOUT[dataset] = About(_kind_of_rows(job.kind), job.options, job.reference.pad_token_id, empty, parts, reports)
    return dataset


def _kind_of_rows(kind: Kind[Any]) -> Kind[Any]:
    """The kind of the rows that workers have made of pairs and of conversations."""
    if isinstance(kind, PairKind) and kind.unpairs:
        return replace(kind, paired=False)
    return replace(kind, **vars(ServedOptions())) if isinstance(kind, ChatKind) else kind


def work_of(job: Job[Any], device: str, passed: pa.Schema) -> Work:
    """What workers on a device need to know of the job that the driver has opened, and of the columns that are passed
    through."""
    kind, reference, options = job.kind, job.reference, job.options
    own = [*(field for field in kind.fields if field.name != OF_OTHER_ROWS), ORIGIN]
    names = kind.hidden | {field.name for field in own}
    warn_of_replaced([passed], names - {LABEL}, stacklevel=5)  # the line that calls `read_prompts`
    schema = pa.schema([*own, *(field for field in passed if field.name not in names)])
    if options.chat_template not in (None, "default"):
        options = replace(options, chat_template=reference.call.template)  # the text of a file on the driver's node
    if isinstance(kind, ChatKind) and isinstance(reference, ServedReference):
        kind = replace(kind, serving_template=reference.serving_template)
    options = replace(options, device=device, max_samples=-1, progress=False, token_cache=False, store="memory")
    return Work(kind, reference.tokenizer, reference.fingerprint(), reference.call.instant, options, schema)


def mapped(parts: Sequence[Any], actor: type, arguments: tuple[Any, ...], workers: Workers) -> "Dataset":
    """One item per part, each in a block of its own, mapped by actors: objects of a class that are called with a table
    that has a column `part`."""
    ray = import_ray()
    items = [{"part": pickle.dumps(part)} for part in parts]
    size = workers.concurrency
    pool = {"size": size} if isinstance(size, int) else dict(zip(("min_size", "max_size"), size, strict=True))
    return ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        actor,
        fn_constructor_args=arguments,
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(**pool),
        num_cpus=workers.num_cpus,
        num_gpus=workers.num_gpus or None,
    )
