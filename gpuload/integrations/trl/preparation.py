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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset
from datasets.fingerprint import Hasher
from datasets.table import InMemoryTable
from transformers import PreTrainedTokenizerBase
from trl.trainer.utils import global_then_local_main_first

from gpuload.core.errors import DataError, GpuloadError
from gpuload.integrations.comparison import compare, covering_rows, spread
from gpuload.integrations.core import log_ignored, unless_unsupported
from gpuload.integrations.processors import (
    difference_of_ids,
    processor_change,
    processor_problem,
    template_of,
    tokenizer_of,
)
from gpuload.integrations.trl.columns import picked, ragged_of
from gpuload.integrations.trl.prepared_files import file_of, read, write
from gpuload.kinds.chats.dataset import ChatDataset
from gpuload.kinds.pairs.dataset import PairDataset

OWN_ARGUMENTS = frozenset({"tools", "chat_template_kwargs"})
"""Columns with arguments of the template."""

_SAMPLE = 16
_MADE = frozenset(
    "input_ids labels assistant_masks completion_mask prompt_ids chosen_ids rejected_ids completion_ids "
    "KL_completion_ids chosen_input_ids rejected_input_ids".split()
)

logger = logging.getLogger("gpuload.integrations.trl")


@dataclass(frozen=True)
class Call:
    """A call of `_prepare_dataset`.

    Attributes:
        trainer: whose method is called.
        stock: the method of TRL's class.
        given: parameter → argument.
        change: that its code is not known, from `known_code.change`; None if it is.
    """

    trainer: Any
    stock: Callable[..., Any]
    given: Mapping[str, Any]
    change: str | None = None

    @property
    def args(self) -> Any:
        return self.given["args"]

    @property
    def processor(self) -> Any:
        """The tokenizer, or the processor that it is a part of."""
        return self.given["processing_class"]

    @property
    def tokenizer(self) -> Any:
        return tokenizer_of(self.processor)

    @property
    def chat_template(self) -> str:
        return template_of(self.processor, getattr(self.trainer, "chat_template", None))

    @property
    def name(self) -> str:
        return str(self.given["dataset_name"])

    def by_trl(self, **changed: Any) -> Any:
        return self.stock(**{**self.given, **changed})


@dataclass(frozen=True)
class Steps:
    """How a trainer's data is prepared.

    Attributes:
        unsupported: call, types of the columns → why TRL has to prepare the data; None if it need not.
        explicit: call, dataset → the dataset whose rows are tokenized.
        tokenized: call, n rows → the same rows with their tokens, and what has tokenized them.
        finished: call, rows with tokens → those that are kept, truncated.
        completed: call, kept rows, number of processes that TRL would use → with the columns that depend on other rows.
        packed: call, dataset → what is trained on.
        sampled: arguments that TRL gets for the sample.
    """

    unsupported: Callable[[Call, pa.Schema], str | None]
    explicit: Callable[[Call, Any], Any]
    tokenized: Callable[[Call, pa.Table], tuple[pa.Table, ChatDataset | PairDataset]]
    finished: Callable[[Call, pa.Table], pa.Table]
    completed: Callable[[Call, pa.Table, int], pa.Table]
    packed: Callable[[Call, Any], Any]
    sampled: Mapping[str, Any]


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
    made = unless_unsupported(lambda: _prepared(call, steps), logger, f"TRL for the {call.name} dataset")
    return call.by_trl() if made is None else made


def _prepared(call: Call, steps: Steps) -> Any:
    """The prepared dataset.

    Raises:
        DataError: TRL has to prepare it.
    """
    why = _unsupported(call) or steps.unsupported(call, call.given["dataset"].features.arrow_schema)
    change = call.change or processor_change(call.processor)
    if "chat_template_kwargs" in call.given["dataset"].column_names:
        change = change or "rows have chat_template_kwargs"
    if why is None and change is not None:
        why = _difference(call, steps, change)
    if why is not None:
        raise DataError(why)
    return _by_columns(call, steps)


def _difference(call: Call, steps: Steps, change: str) -> str | None:
    """How rows of every shape, prepared in both ways, differ.

    Args:
        change: why they are compared.
    """
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
    """The prepared dataset.

    Raises:
        DataError: there is none.
    """
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
    """Says that the number of processes has no effect, if no step of TRL's uses it.

    Args:
        dataset: with explicit prompts, which TRL's functions may have made.
    """
    used = call.given.get("packing") or getattr(call.trainer, "calculate_KL", False)
    if dataset is call.given["dataset"] and not used and (count := call.args.dataset_num_proc) is not None:
        log_ignored(logger, {"dataset_num_proc": count}, f"the {call.name} dataset is tokenized by columns")


def _made(call: Call, steps: Steps, dataset: Any, rows: list[int], expected: Any) -> Any:
    """The prepared dataset, or why there is none.

    Args:
        rows: of the sample.
        expected: the sample as TRL prepares it, also where a file is found: all ranks wait for each other in it.
    """
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
    """All rows with their tokens, and what has tokenized them.

    Raises:
        DataError: they are not what TRL makes.
    """
    table, loaded = steps.tokenized(call, dataset.with_format("arrow")[:])
    names, schema, why = expected.column_names, expected.features.arrow_schema, None
    for name in _MADE & set(table.column_names):
        why = why or difference_of_ids(call.processor, ragged_of(table[name]), name in ("input_ids", "prompt_ids"))
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
    """A dataset over a table, without copying it.

    Args:
        table: of `datasets`.
        like: the dataset that it is made of.
    """
    info = like.info.copy()
    info.features = features
    return Dataset(table, info=info, split=like.split, fingerprint=fingerprint)


def whole(table: pa.Table, loaded: ChatDataset | PairDataset) -> pa.Table:
    """The tokens of all rows.

    Raises:
        DataError: rows were dropped, which TRL keeps or raises an error for.
    """
    if len(loaded) < len(table):
        reason, count = max(loaded.report.rejected.items(), key=lambda item: item[1])
        raise DataError(f"{count:,} of {len(table):,} rows cannot be tokenized: {reason}")
    return loaded.to_arrow(columns=[]).read_all()


def joined(table: pa.Table, tokens: pa.Table) -> pa.Table:
    """Rows with their tokens."""
    for name in tokens.column_names:
        table = table.append_column(name, tokens[name])
    return table


def _unsupported(call: Call) -> str | None:
    dataset = call.given["dataset"]
    if not isinstance(dataset, Dataset):
        return "it is read as a stream"
    columns = set(dataset.column_names)
    if not len(dataset):
        return "it has no rows"
    if dataset.format["type"] is not None or set(dataset.format["columns"]) != columns:
        return "it has a format or a transform"
    if problem := processor_problem(call.processor):
        return problem
    if made := sorted(columns & _MADE):
        return f"it is tokenized already: it has a column {made[0]}"
    if found := sorted(columns & {"image", "images"}):
        return f"a column {found[0]} is not supported"
    if "chat_template_kwargs" in columns:
        kind = dataset.features.arrow_schema.field("chat_template_kwargs").type
        names = {field.name for field in kind} if pa.types.is_struct(kind) else set()
        taken = sorted(names & set(signature(PreTrainedTokenizerBase.apply_chat_template).parameters))
        if taken or not names:
            return f"chat_template_kwargs has {taken[0] if taken else 'no keys'}"
    return None
