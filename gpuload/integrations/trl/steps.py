"""A call of TRL's `_prepare_dataset`, and the steps that take its place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import pyarrow as pa
from datasets import IterableDataset
from transformers import PreTrainedTokenizerBase

from gpuload.core.errors import DataError
from gpuload.core.options import NO_LIMIT
from gpuload.engines.choose import EngineBuilder
from gpuload.engines.host.engine import HostEngine
from gpuload.integrations.processors import difference_of_ids, processor_problem, template_of, tokenizer_of
from gpuload.integrations.trl.columns import ragged_of
from gpuload.kinds.chats.dataset import ChatDataset
from gpuload.kinds.pairs.dataset import OF_OTHER_ROWS, PairDataset
from gpuload.pipeline.kind import Kind
from gpuload.pipeline.run import load_given

OWN_ARGUMENTS = frozenset({"tools", "chat_template_kwargs"})
"""Columns with arguments of the template."""

MADE = frozenset(
    "input_ids labels assistant_masks completion_mask prompt_ids chosen_ids rejected_ids completion_ids "
    "chosen_input_ids rejected_input_ids".split()
) | {OF_OTHER_ROWS}


@dataclass(frozen=True)
class Call:
    """A call of `_prepare_dataset`."""

    trainer: Any  # whose method is called
    stock: Callable[..., Any]  # the method of TRL's class
    given: Mapping[str, Any]  # parameter → argument
    change: str | None = None  # that its code is not known, from `known_code.change`; None if it is
    engines: EngineBuilder | None = None  # builds the engines of its loads; None if they build their own

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

    @property
    def is_stream(self) -> bool:
        return isinstance(self.given["dataset"], IterableDataset)

    def of_map(self, doing: str) -> dict[str, Any]:
        """Arguments of the `map` of a dataset, which those of streams do not have; what is shown says that it is
        `doing` something, such as "Packing"."""
        if self.is_stream:
            return {}
        return {"num_proc": self.args.dataset_num_proc, "desc": f"{doing} {self.name} dataset"}

    def load(self, kind: type[Kind[Any]], rows: pa.Table, **options: Any) -> Any:
        """The rows as gpuload loads them, of any length."""
        given = {"max_length": NO_LIMIT, "chat_template": self.chat_template}
        given |= {"token_cache": not self.is_stream}  # its key takes longer than a batch
        return load_given(kind, rows, self.tokenizer, given | options, self.engines)

    def by_trl(self, **changed: Any) -> Any:
        return self.stock(**{**self.given, **changed})


@dataclass(frozen=True)
class Steps:
    """How a trainer's data is prepared."""

    unsupported: Callable[[Call, pa.Schema], str | None]  # types of the columns → why TRL has to prepare the data
    explicit: Callable[[Call, Any], Any]  # dataset → the one whose rows are tokenized
    tokenized: Callable[[Call, pa.Table], tuple[pa.Table, ChatDataset | PairDataset]]  # with tokens, and what made them
    finished: Callable[[Call, pa.Table], pa.Table]  # rows with tokens → those that are kept, truncated
    # Kept rows, and how many processes TRL would use → with the columns that depend on other rows.
    completed: Callable[[Call, pa.Table, int], pa.Table]
    packed: Callable[[Call, Any], Any]  # what is trained on: packs, or rows of a stream with what depends on others
    engine: type[HostEngine]  # of the host
    sampled: Mapping[str, Any]  # arguments that TRL gets for the sample


def whole(table: pa.Table, loaded: ChatDataset | PairDataset) -> pa.Table:
    """The tokens of all rows; a `DataError` if rows were dropped, which TRL keeps or raises an error for."""
    if len(loaded) < len(table):
        reason, count = max(loaded.report.rejected.items(), key=lambda item: item[1])
        raise DataError(f"{count:,} of {len(table):,} rows cannot be tokenized: {reason}")
    return loaded.to_arrow(columns=[]).read_all()


def joined(table: pa.Table, tokens: pa.Table) -> pa.Table:
    """Rows with their tokens."""
    for name in tokens.column_names:
        table = table.append_column(name, tokens[name])
    return table


def unsupported_columns(call: Call, schema: pa.Schema) -> str | None:
    """Why TRL has to prepare data with these columns, whatever the trainer; None if it need not."""
    columns = set(schema.names)
    if problem := processor_problem(call.processor):
        return problem
    if made := sorted(columns & MADE):
        return f"it is tokenized already: it has a column {made[0]}"
    if "chat_template_kwargs" in columns:
        kind = schema.field("chat_template_kwargs").type
        names = {field.name for field in kind} if pa.types.is_struct(kind) else set()
        taken = sorted(names & set(signature(PreTrainedTokenizerBase.apply_chat_template).parameters))
        if taken or not names:
            return f"chat_template_kwargs has {taken[0] if taken else 'no keys'}"
    return None


def processor_difference(call: Call, table: pa.Table) -> str | None:
    """Why a processor would give these rows other ids; None if it would not, or if there is none."""
    for name in MADE & set(table.column_names):
        if why := difference_of_ids(call.processor, ragged_of(table[name]), name in ("input_ids", "prompt_ids")):
            return why
    return None
