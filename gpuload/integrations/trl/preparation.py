"""What TRL's `_prepare_dataset` does with a dataset, by columns.

    1. Prompts are extracted and pairs become single rows, by TRL's own functions.
    2. TRL prepares a sample of the rows, neither truncated nor packed. It has the columns and types of the result.
    3. `load_chats` or `load_pairs` tokenizes all rows. Those of the sample must equal TRL's.
    4. Rows are truncated, dropped, packed and shuffled as the configuration says.

What step 3 makes of a dataset in files is written to a file too, and mapped by the other ranks and at the next start.

The steps that differ between trainers are in `Steps`. A dataset that one of them does not support is prepared by TRL.
If the code of `_prepare_dataset` is not known, rows of every shape are prepared in both ways first, with all steps.
"""

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset
from datasets.fingerprint import Hasher
from datasets.table import InMemoryTable
from trl.trainer.utils import global_then_local_main_first

from gpuload.core.errors import DataError, GpuloadError
from gpuload.integrations.comparison import compare, covering_rows, spread
from gpuload.integrations.core import log_ignored, unless_unsupported
from gpuload.integrations.processors import processor_change
from gpuload.integrations.trl.columns import picked
from gpuload.integrations.trl.prepared_files import file_of, read, write
from gpuload.integrations.trl.steps import Call, Steps, processor_difference, unsupported_columns
from gpuload.integrations.trl.streams import prepare_stream
from gpuload.kinds.chats.dataset import ChatDataset
from gpuload.kinds.pairs.dataset import PairDataset

_SAMPLE = 16

logger = logging.getLogger("gpuload.integrations.trl")


class _Unnamed(Dataset):  # type: ignore[misc]
    """A dataset in memory whose results are not named after what made them.

    `map` names its result by a digest of all arguments, one of which is the tokenizer: seconds, for a few rows.
    """

    @staticmethod
    def of(dataset: Any) -> Any:
        made: Any = copy.copy(dataset)
        made.__class__ = _Unnamed
        return made

    def map(self, *given: Any, **named: Any) -> Any:
        return _Unnamed.of(super().map(*given, **{"new_fingerprint": "sample"} | named))  # `filter` gives a name


def prepare(call: Call, steps: Steps) -> Any:
    """Prepares a dataset as TRL does.

    All ranks take the same way, because it depends on the data and the configuration only. No exception may leave
    `global_then_local_main_first` on the main process, as the other ranks would wait forever.
    """
    made = unless_unsupported(lambda: prepared(call, steps), logger, f"TRL for the {call.name} dataset")
    return call.by_trl() if made is None else made


def prepared(call: Call, steps: Steps) -> Any:
    """The prepared dataset; a `DataError` if TRL has to prepare it."""
    dataset = call.given["dataset"]
    change = call.change or processor_change(call.processor)
    if call.is_stream:
        return prepare_stream(call, steps, change)
    if "chat_template_kwargs" in dataset.column_names:
        change = change or "rows have chat_template_kwargs"
    schema = dataset.features.arrow_schema
    why = _unsupported(dataset) or unsupported_columns(call, schema) or steps.unsupported(call, schema)
    if why is None and change is not None:
        why = _difference(call, steps, change)
    if why is not None:
        raise DataError(why)
    return _by_columns(call, steps)


def _difference(call: Call, steps: Steps, change: str) -> str | None:
    """How rows of every shape, prepared in both ways, differ. They are compared because of a `change`."""
    dataset, args = call.given["dataset"], copy.copy(call.args)
    numbers, _ = covering_rows(lambda: dataset.with_format("arrow").iter(10_000))
    args.dataset_num_proc = None
    few = replace(call, given={**call.given, "dataset": _few(dataset, numbers.tolist()), "args": args})

    def parts(made: Any) -> tuple[Any, ...]:
        return made.column_names, made.features, made.with_format("arrow")[:].cast(made.features.arrow_schema)

    return compare(
        [few], lambda few: parts(_by_columns(few, steps)), lambda few: parts(few.by_trl()), change,
        logger=logger, trainer="TRL", rows=len(numbers), differs=f"{len(numbers)} rows prepared by both differ",
    )  # fmt: skip


def _few(dataset: Any, rows: list[int]) -> Any:
    """Some rows, as a copy in memory: TRL's steps would write those of a file to the cache of datasets."""
    table = dataset.select(rows).with_format("arrow")[:]
    return _Unnamed.of(dataset_of(InMemoryTable(table), dataset, dataset.features, "sample"))


def _by_columns(call: Call, steps: Steps) -> Any:
    """The prepared dataset; a `DataError` if there is none."""
    with global_then_local_main_first():
        dataset = steps.explicit(call, call.given["dataset"])
    rows = spread(len(dataset), _SAMPLE).tolist()
    plain = copy.copy(call.args)
    plain.max_length, plain.dataset_num_proc, plain.shuffle_dataset = None, None, False
    changed = {"dataset": _few(dataset, rows), "args": plain, "dataset_name": f"{call.name} (sample)", **steps.sampled}
    expected = call.by_trl(**changed)
    with global_then_local_main_first():
        made = _made(call, steps, dataset, rows, expected)
    if isinstance(made, str):
        raise DataError(made)
    _log_ignored(call, dataset)
    return made


def _log_ignored(call: Call, dataset: Any) -> None:
    """Says that the number of processes has no effect, if no step of TRL's uses it: its functions may have made the
    prompts of the dataset explicit."""
    used = call.given.get("packing") or getattr(call.trainer, "calculate_KL", False)
    if dataset is call.given["dataset"] and not used and (count := call.args.dataset_num_proc) is not None:
        log_ignored(logger, {"dataset_num_proc": count}, f"the {call.name} dataset is tokenized by columns")


def _made(call: Call, steps: Steps, dataset: Any, rows: list[int], expected: Any) -> Any:
    """The prepared dataset, or why there is none. `expected` is the sample, those `rows`, as TRL prepares it, also
    where a file is found: all ranks wait for each other in it."""
    names, features = expected.column_names, expected.features
    schema = features.arrow_schema
    file = file_of(call, dataset)
    if file is not None and (found := read(file, schema)) is not None:
        logger.info("gpuload: the %s dataset is mapped from %s", call.name, file)
        return steps.packed(call, dataset_of(found, dataset, features, file.stem))
    try:
        table, loaded = _tokenized(call, steps, dataset, rows, expected)
        table = steps.finished(call, table)
        table = steps.completed(call, table, call.args.dataset_num_proc or 1).select(names).cast(schema)
    except (GpuloadError, pa.ArrowException) as error:
        return str(error)
    limits = [call.args.max_length, getattr(call.args, "truncation_mode", None)]
    name = file.stem if file else Hasher.hash([dataset._fingerprint, loaded.fingerprint, *limits, names])
    return steps.packed(call, dataset_of(_stored(call, table, file), dataset, features, name))


def _tokenized(
    call: Call, steps: Steps, dataset: Any, rows: list[int], expected: Any
) -> tuple[pa.Table, ChatDataset | PairDataset]:
    """All rows with their tokens, and what has tokenized them; a `DataError` if they are not what TRL makes."""
    table, loaded = steps.tokenized(call, dataset.with_format("arrow")[:])
    names, schema = expected.column_names, expected.features.arrow_schema
    why = processor_difference(call, table)
    found = steps.completed(call, picked(table, rows), 1)
    if unknown := sorted(set(names) - set(found.column_names)):
        why = f"TRL makes a column {unknown[0]}"
    elif not found.select(names).cast(schema).equals(expected.with_format("arrow")[:].cast(schema)):
        why = why or "its rows of a sample differ from those of load_chats and load_pairs"
    if why is not None:
        raise DataError(why)
    return table, loaded


def _stored(call: Call, table: pa.Table, file: Path | None) -> Any:
    """A table of `datasets`: mapped from a file that is written here, or in memory."""
    try:
        if file is not None and len(table):
            write(table, file)
            if (mapped := read(file, table.schema)) is not None:
                return mapped
    except OSError as error:
        logger.warning("gpuload: the %s dataset is in memory: %s cannot be written: %s", call.name, file, error)
    return InMemoryTable(table)


def dataset_of(table: Any, like: Any, features: Any, fingerprint: str) -> Any:
    """A dataset over a table of `datasets`, without copying it, made of one `like` it."""
    info = like.info.copy()
    info.features = features
    return Dataset(table, info=info, split=like.split, fingerprint=fingerprint)


def _unsupported(dataset: Any) -> str | None:
    if not isinstance(dataset, Dataset):
        return f"it is a {type(dataset).__name__}"
    if not len(dataset):
        return "it has no rows"
    if dataset.format["type"] is not None or set(dataset.format["columns"]) != set(dataset.column_names):
        return "it has a format or a transform"
    return None
