"""What TRL's `_prepare_dataset` does with a dataset, by columns.

    1. Prompts are extracted and pairs become single rows, by TRL's own functions.
    2. TRL prepares a sample of the rows, neither truncated nor packed. It has the columns and types of the result.
    3. `load_chats` or `load_pairs` tokenizes all rows. Those of the sample must equal TRL's.
    4. Rows are truncated, dropped, packed and shuffled as the configuration says.

The steps that differ between trainers are in `Steps`. A dataset that one of them does not support is prepared by TRL.
If the code of `_prepare_dataset` is not known, rows of every shape are prepared in both ways first, with all steps.
"""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from datasets.fingerprint import Hasher
from datasets.table import InMemoryTable
from transformers import PreTrainedTokenizerBase
from trl.trainer.utils import global_then_local_main_first

from gpuload.core.errors import DataError, GpuloadError
from gpuload.integrations.comparison import covering_rows, log_equal
from gpuload.integrations.core import log_fallback, log_ignored
from gpuload.integrations.trl.columns import picked
from gpuload.kinds.chats.dataset import ChatDataset
from gpuload.kinds.pairs.dataset import PairDataset

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
    def tokenizer(self) -> Any:
        return self.given["processing_class"]

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
    dataset = call.given["dataset"]
    why = _unsupported(call) or steps.unsupported(call, dataset.features.arrow_schema)
    if why is None and call.change is not None:
        rows, difference = _compared(call, steps)
        why = difference and f"{call.change}, and {difference}"
        if why is None:
            log_equal(logger, call.change, rows)
    if why is None:
        made, explicit = _by_columns(call, steps)
        if not isinstance(made, str):
            _log_ignored(call, explicit)
            return made
        why = made
    log_fallback(logger, f"TRL for the {call.name} dataset", why)
    return call.by_trl()


def _compared(call: Call, steps: Steps) -> tuple[int, str | None]:
    """How many rows of every shape were prepared in both ways, and how the results differ."""
    dataset, args = call.given["dataset"], copy.copy(call.args)
    numbers, _ = covering_rows(lambda: dataset.with_format("arrow").iter(10_000))
    args.dataset_num_proc = None
    few = replace(call, given={**call.given, "dataset": _few(dataset, numbers.tolist()), "args": args})
    try:
        found, expected = _by_columns(few, steps)[0], few.by_trl()
    except Exception as error:  # for these rows; it may be another error for all of them, or none
        return len(numbers), f"TRL raises {type(error).__name__}: {error!s:.200}"
    if isinstance(found, str):
        return len(numbers), found
    same = found.column_names == expected.column_names and found.features == expected.features
    if not same or found.with_format("arrow")[:] != expected.with_format("arrow")[:].cast(found.features.arrow_schema):
        return len(numbers), f"{len(numbers)} rows prepared by both differ"
    return len(numbers), None


def _few(dataset: Any, rows: list[int]) -> Any:
    """Some rows, as a copy in memory: TRL's steps would write those of a file to the cache of datasets."""
    table = dataset.select(rows).with_format("arrow")[:]
    return _Unnamed.of(dataset_of(table, dataset, dataset.features, "sample"))


def _by_columns(call: Call, steps: Steps) -> tuple[Any, Any]:
    """The prepared dataset, or why there is none; and the dataset with explicit prompts."""
    with global_then_local_main_first():
        dataset = steps.explicit(call, call.given["dataset"])
    rows = np.unique(np.linspace(0, len(dataset) - 1, _SAMPLE).astype(np.int64)).tolist()
    plain = copy.copy(call.args)
    plain.max_length, plain.dataset_num_proc, plain.shuffle_dataset = None, None, False
    changed = {"dataset": _few(dataset, rows), "args": plain, "dataset_name": f"{call.name} (sample)", **steps.sampled}
    expected = call.by_trl(**changed)
    with global_then_local_main_first():
        return _made(call, steps, dataset, rows, expected), dataset


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
        expected: the sample as TRL prepares it.
    """
    names, features, args = expected.column_names, expected.features, call.args
    schema = features.arrow_schema
    try:
        table, loaded = steps.tokenized(call, dataset.with_format("arrow")[:])
        found = steps.completed(call, picked(table, rows), 1)
        if unknown := sorted(set(names) - set(found.column_names)):
            return f"TRL makes a column {unknown[0]}"
        if not found.select(names).cast(schema).equals(expected.with_format("arrow")[:].cast(schema)):
            return "its rows of a sample differ from those of load_chats and load_pairs"
        table = steps.finished(call, table)
        table = steps.completed(call, table, args.dataset_num_proc or 1).select(names).cast(schema)
    except (GpuloadError, pa.ArrowException) as error:
        return str(error)
    about = [dataset._fingerprint, loaded.fingerprint, args.max_length, getattr(args, "truncation_mode", None), names]
    return steps.packed(call, dataset_of(table, dataset, features, Hasher.hash(about)))


def dataset_of(table: pa.Table, like: Any, features: Any, fingerprint: str) -> Any:
    """A dataset over a table, without copying it.

    Args:
        like: the dataset that it is made of.
    """
    info = like.info.copy()
    info.features = features
    return Dataset(InMemoryTable(table), info=info, split=like.split, fingerprint=fingerprint)


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
    if not isinstance(call.tokenizer, PreTrainedTokenizerBase):
        return f"{type(call.tokenizer).__name__} is a processor, not a tokenizer"
    if made := sorted(columns & _MADE):
        return f"it is tokenized already: it has a column {made[0]}"
    if found := sorted(columns & {"image", "images", "chat_template_kwargs"}):
        return f"a column {found[0]} is not supported"
    return None
