"""`SFTConfig(dataset_kwargs={"turns": "served"})`: rows as served for TRL's `SFTTrainer`, see docs/served.md.

A dataset then has more rows than conversations, all of them made by `load_chats`. TRL has nothing like it, so nothing
falls back to TRL: what cannot be prepared in this way is an error.
"""

import logging
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features
from datasets.fingerprint import Hasher
from datasets.table import InMemoryTable
from trl.trainer.utils import global_then_local_main_first

from gpuload.core.errors import GpuloadError, OptionError
from gpuload.core.options import NO_LIMIT, nearest
from gpuload.integrations.trl.columns import prefixed
from gpuload.integrations.trl.steps import Call, Steps, unsupported_columns
from gpuload.kinds.chats.dataset import ChatDataset
from gpuload.kinds.chats.load import ChatKind
from gpuload.kinds.served.options import OF_SERVED
from gpuload.pipeline.run import load_given

_NAMES = (*OF_SERVED, "loss_on", "drop_nulls")
_COLUMNS = ("input_ids", "labels", "conversation", "turn")

logger = logging.getLogger("gpuload.integrations.trl")


def served_options(args: Any) -> dict[str, Any]:
    """The options of `load_chats` that `dataset_kwargs` of a configuration has; none of them: rows are TRL's. An
    `OptionError` if they are not for rows as served, or a key is neither one of them nor one of TRL's."""
    given = dict(getattr(args, "dataset_kwargs", None) or {})
    options = {name: given.pop(name) for name in _NAMES if name in given}
    if not options:
        return {}
    if unknown := sorted(set(given) - {"skip_prepare_dataset"}):
        raise OptionError(f"dataset_kwargs: unknown key {unknown[0]!r}{nearest(unknown[0], set(_NAMES))}")
    ChatKind(**options)
    if options.get("turns") != "served":
        if rest := [name for name in options if name != "turns"]:
            raise OptionError(f"dataset_kwargs: {rest[0]} is for turns='served': pass that too")
        return {}
    if given.get("skip_prepare_dataset"):
        raise OptionError(
            "dataset_kwargs: turns='served' prepares the dataset, and skip_prepare_dataset=True does not: remove one"
        )
    return options


def prepare_served(call: Call, steps: Steps, options: dict[str, Any]) -> Any:
    """The rows as served of a dataset: `input_ids`, `labels`, `conversation` and `turn`, packed if the configuration
    says so.

    All ranks take the same way, as in `preparation.prepare`. An `OptionError` if the configuration cannot be kept with
    rows as served, a `DataError` if no rows are kept, or the dataset has no conversations.
    """
    if why := _problem(call):
        raise OptionError(f"turns='served': {why}")
    made: Any
    with global_then_local_main_first():
        try:
            made = _loaded(call, options)
        except GpuloadError as error:  # the other ranks wait until this block ends
            made = error
    if isinstance(made, GpuloadError):
        raise made
    logger.info("gpuload: the %s dataset as served\n%s", call.name, made.report)
    batches = made.to_arrow(columns=["conversation", "turn"])
    table = pa.Table.from_batches(batches, batches.schema).select(_COLUMNS)
    features = Features.from_arrow_schema(table.schema.remove_metadata())
    table = table.cast(features.arrow_schema)
    name = Hasher.hash(made.fingerprint)
    return steps.packed(call, Dataset(InMemoryTable(table), split=call.given["dataset"].split, fingerprint=name))


def _problem(call: Call) -> str | None:
    """Why a configuration cannot be kept."""
    dataset, args = call.given["dataset"], call.args
    if not isinstance(dataset, Dataset):
        return f"the {call.name} dataset is a {type(dataset).__name__}: pass a datasets.Dataset"
    if dataset.format["type"] == "custom":
        return f"the {call.name} dataset has a transform: use map instead"
    if call.processor is not call.tokenizer:
        return "it is for tokenizers: pass processing_class=processor.tokenizer"
    if call.given["formatting_func"] is not None:
        return "formatting_func makes texts: pass a dataset with messages"
    if args.truncation_mode != "keep_start":
        return f"truncation_mode={args.truncation_mode!r} takes answers from behind their prompts: use 'keep_start'"
    if call.given["packing"] and args.max_length is None:
        return "packing needs max_length"
    if call.given["packing"] and args.packing_strategy == "wrapped":
        return "packing_strategy='wrapped' cuts rows between prompt and answer: use 'bfd'"
    return unsupported_columns(call, dataset.features.arrow_schema)


def _loaded(call: Call, options: dict[str, Any]) -> ChatDataset:
    dataset, args = call.given["dataset"], call.args
    table = dataset.with_format("arrow")[:]
    sides = {"prompt", "completion"}
    if sides <= set(table.column_names) and not call.trainer.completion_only_loss:  # also the answers in prompts
        whole = prefixed(table["prompt"], table["completion"])
        table = table.drop_columns(list(sides)).append_column("messages", whole)
    limits = {"max_length": NO_LIMIT if args.max_length is None else args.max_length, "overlong": "keep_start"}
    # The template is the tokenizer's own, not the one with blocks that TRL trains with.
    loaded = load_given(ChatKind, table, call.tokenizer, options | limits | {"store": "memory"})
    if "loss_weight" in loaded.column_names:
        raise OptionError("turns='served': messages have weights, which TRL's loss does not take: use 0 and 1")
    return loaded
