"""Data of TRL's `SFTTrainer`."""

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from trl.data_utils import maybe_convert_to_chatml, pack_dataset

from gpuload.core.arrays import Ragged, count_in_rows
from gpuload.core.options import LossOn
from gpuload.dataset.arrow import lists as list_array
from gpuload.engines.host.packs import IGNORED
from gpuload.integrations.core import are_messages
from gpuload.integrations.trl.columns import SIDES, column_of, columns_with_eos, prefixed, ragged_of
from gpuload.integrations.trl.steps import OWN_ARGUMENTS, Call, Steps, joined, whole
from gpuload.integrations.trl.streams import schema_of
from gpuload.kinds.chats.dataset import ChatDataset
from gpuload.kinds.chats.engine import ChatEngine
from gpuload.kinds.chats.load import ChatKind
from gpuload.sources.types import is_list, is_text

_TOKENS = ["input_ids", "labels"]
_RENAMED = {"from": "role", "value": "content"}


def _unsupported(call: Call, schema: pa.Schema) -> str | None:
    args = call.args
    schema = _explicit_schema(call, schema)
    if call.given["packing"] and args.max_length is None:
        return "packing needs max_length"
    if args.truncation_mode not in SIDES:
        return f"truncation_mode={args.truncation_mode!r} is not supported"
    names = _columns(call, schema)
    if not names:
        return f"its columns are {', '.join(schema.names)}"
    kinds = [schema.field(name).type for name in names]
    if not (all(map(are_messages, kinds)) or (all(map(is_text, kinds)) and names != ["messages"])):
        return f"{' and '.join(names)} are neither texts nor messages with text"
    return None


def _columns(call: Call, schema: pa.Schema) -> list[str]:
    """The columns that TRL tokenizes; none if that is not clear."""
    text = call.args.dataset_text_field
    found = {"prompt", "completion", "messages", "conversations", "chosen", "rejected"} & set(schema.names)
    choices = [["messages"], ["prompt", "completion"], []]
    names = next((choice for choice in choices if set(choice) == found), None)
    if names is None or text not in schema.names:
        return names or []
    if not names:
        return [text]
    # TRL leaves a text next to messages as it is; next to other texts, it gets the EOS token instead of them.
    return names if all(are_messages(schema.field(name).type) for name in names) else []


def _explicit_schema(call: Call, schema: pa.Schema) -> pa.Schema:
    """The columns that `_explicit` will make."""
    if call.given["formatting_func"] is not None:
        schema = pa.schema([each for each in schema if each.name != "text"]).append(pa.field("text", pa.string()))
    if _is_sharegpt(schema):
        kind = schema.field("conversations").type.value_type
        message = pa.struct([(_RENAMED.get(each.name, each.name), each.type) for each in kind])
        schema = schema.remove(schema.get_field_index("conversations")).append(pa.field("messages", pa.list_(message)))
    return schema


def _is_sharegpt(schema: pa.Schema) -> bool:
    kind = schema.field("conversations").type if "conversations" in schema.names else pa.null()
    names = {each.name for each in kind.value_type} if is_list(kind) and pa.types.is_struct(kind.value_type) else set()
    return names >= set(_RENAMED) and not names & set(_RENAMED.values()) and "messages" not in schema.names


def _explicit(call: Call, dataset: Any) -> Any:
    """Rows with the text that the user's function makes, or messages, by TRL's function: both row by row."""
    function = call.given["formatting_func"]
    if function is not None:
        dataset = dataset.map(lambda row: {"text": function(row)}, **call.of_map("Applying formatting function to"))
    if _is_sharegpt(schema_of(dataset)):
        settings = call.of_map("Converting to ChatML: the")
        dataset = dataset.map(maybe_convert_to_chatml, remove_columns="conversations", **settings)
    return dataset


def _tokenized(call: Call, table: pa.Table) -> tuple[pa.Table, ChatDataset]:
    names = _columns(call, table.schema)
    loss_on: LossOn = "completion" if len(names) == 2 else "all"
    if call.args.assistant_only_loss:
        loss_on = "assistant"
    if is_text(table.schema.field(names[0]).type):
        table = columns_with_eos(table, names[-1:], call.tokenizer.eos_token)
        rows = table.select(names).rename_columns(names if len(names) == 2 else ["text"])
    else:
        rows = table.select([*names, *(OWN_ARGUMENTS & set(table.column_names))])
    load = partial(call.load, ChatKind, store="memory")
    if len(names) == 1 or call.trainer.completion_only_loss:
        form = "prompt-completion" if len(names) == 2 else rows.column_names[0]
        loaded = load(rows, format=form, loss_on=loss_on)
        return joined(table, whole(table, loaded)), loaded
    # TRL keeps the mask of completions that it does not use, as a column.
    loaded = load(rows, format="prompt-completion", loss_on="completion")
    tokens = whole(table, loaded)
    ids, labels = tokens["input_ids"], ragged_of(tokens["labels"])
    mask = column_of(Ragged((labels.values != IGNORED).astype(np.int32), labels.offsets))
    if loss_on == "assistant":  # also on the answers in prompts: a row is one conversation
        rows = rows.append_column("messages", prefixed(rows["prompt"], rows["completion"])).drop_columns(names)
        loaded = load(rows, format="messages", loss_on=loss_on)
        tokens = whole(table, loaded)
    else:
        tokens = pa.table({"input_ids": ids, "labels": ids})
    return joined(table, tokens.append_column("completion_mask", mask)), loaded


def _finished(call: Call, table: pa.Table) -> pa.Table:
    """Truncates rows, and drops those that are then without labels, unless they are packed."""
    if call.args.max_length is None or call.given["packing"]:
        return table
    if pc.max(pc.list_value_length(table["input_ids"])).as_py() <= call.args.max_length:
        return table  # as most datasets; there is no row without labels, see `whole`
    keep, kept = [np.zeros(0, bool)], []
    for batch in table.select(_TOKENS).to_batches():  # one by one, so that the memory of the arrays is used again
        tokens = [ragged_of(batch[name]) for name in _TOKENS]
        ids, labels = (each.truncate(call.args.max_length, SIDES[call.args.truncation_mode]) for each in tokens)
        keep.append(count_in_rows(labels.values != IGNORED, labels.offsets) > 0)
        if not keep[-1].all():
            ids, labels = ids.filter(keep[-1]), labels.filter(keep[-1])
        kept.append(pa.record_batch([list_array(each.values, each.offsets) for each in (ids, labels)], _TOKENS))
    table, every = table.drop_columns(_TOKENS), np.concatenate(keep)
    return joined(table if every.all() else table.filter(pa.array(every)), pa.Table.from_batches(kept))


def _packed(call: Call, dataset: Any) -> Any:
    """Packs rows by TRL's function, in its order."""
    args = call.args
    if call.given["packing"]:
        dataset = dataset.select_columns(_TOKENS)
        if args.shuffle_dataset:
            dataset = dataset.shuffle(seed=args.seed)
        dataset = pack_dataset(dataset, args.max_length, args.packing_strategy, call.of_map("Packing"))
    return dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset


SFT = Steps(
    unsupported=_unsupported,
    explicit=_explicit,
    tokenized=_tokenized,
    finished=_finished,
    completed=lambda call, table, processes: table,
    packed=_packed,
    engine=ChatEngine,
    sampled={"packing": False, "formatting_func": None},
)
