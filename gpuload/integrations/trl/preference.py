"""Data of TRL's trainers for preferences: `DPOTrainer`, `RewardTrainer` and `KTOTrainer`."""

import logging
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from trl.data_utils import extract_prompt, unpair_preference_dataset

from gpuload.core.options import Objective
from gpuload.integrations.core import are_messages
from gpuload.integrations.trl.columns import column_of, columns_with_eos, partners, prefixed, ragged_of
from gpuload.integrations.trl.steps import OWN_ARGUMENTS, Call, Steps, joined, whole
from gpuload.integrations.trl.streams import schema_of
from gpuload.kinds.pairs.dataset import OF_OTHER_ROWS, PairDataset
from gpuload.kinds.pairs.engine import PairEngine
from gpuload.kinds.pairs.load import PairKind
from gpuload.sources.types import is_text

logger = logging.getLogger("gpuload.integrations.trl")

_TOKENS = {
    "dpo": ["prompt_ids", "chosen_ids", "rejected_ids"],
    "rm": ["chosen_ids", "rejected_ids"],
    "kto": ["prompt_ids", "completion_ids"],
}


def _unsupported(objective: Objective, call: Call, schema: pa.Schema) -> str | None:
    names = set(schema.names)
    answers = ["completion"] if objective == "kto" and "chosen" not in names else ["chosen", "rejected"]
    needed = [*answers, *(["label"] if answers == ["completion"] else [])]
    if missing := [name for name in needed if name not in names]:
        return f"it has no column {missing[0]}"
    if extra := sorted(names & ({"messages", "conversations", "chosen", "rejected", "completion"} - set(answers))):
        return f"it has a column {extra[0]} too"
    if "prompt" not in names and answers == ["completion"]:
        return "it has no column prompt"
    kinds = [schema.field(name).type for name in (*({"prompt"} & names), *answers)]
    if not (all(map(are_messages, kinds)) or all(map(is_text, kinds))):
        return "prompts and answers are neither all text nor all messages with text"
    return None


def _explicit(objective: Objective, call: Call, dataset: Any) -> Any:
    """Rows with prompts; for KTO, with one answer each. TRL's functions do this row by row."""
    if objective != "rm" and "prompt" not in schema_of(dataset).names:
        dataset = dataset.map(extract_prompt, **call.of_map("Extracting prompt from"))
    if objective == "kto" and "chosen" in schema_of(dataset).names:
        dataset = unpair_preference_dataset(dataset, **call.of_map("Unpairing"))
    return dataset


def _tokenized(objective: Objective, call: Call, table: pa.Table) -> tuple[pa.Table, PairDataset]:
    answers = ["completion"] if objective == "kto" else ["chosen", "rejected"]
    names = [*answers, *({"prompt"} & set(table.column_names))]
    read = names + (["label"] if objective == "kto" else [])
    if is_text(table.schema.field(answers[0]).type):
        table = columns_with_eos(table, answers, call.tokenizer.eos_token)
    else:
        read += OWN_ARGUMENTS & set(table.column_names)
    loaded = call.load(PairKind, table.select(read), objective=objective)
    if objective == "rm" and "prompt" in names and not call.is_stream:  # TRL puts them in front of the answers
        for name in answers:
            place = table.schema.get_field_index(name)
            table = table.set_column(place, name, prefixed(table["prompt"], table[name]))
    return joined(table, whole(table, loaded).select(_TOKENS[objective])), loaded


def _finished(objective: Objective, call: Call, table: pa.Table) -> pa.Table:
    """Drops rows that are too long, by the rule of each trainer."""
    limit = call.args.max_length
    if limit is None or (objective == "dpo" and call.args.truncation_mode != "keep_start"):
        return table
    lengths = {name: pc.list_value_length(table[name]).to_numpy() for name in _TOKENS[objective]}
    if objective == "rm":
        keep = np.maximum(lengths["chosen_ids"], lengths["rejected_ids"]) <= limit
    else:
        keep = lengths["prompt_ids"] < limit
    return table if keep.all() else table.filter(pa.array(keep))


def _with_kl(call: Call, table: pa.Table, processes: int) -> pa.Table:
    """Rows with the completions of other rows, if the loss needs them."""
    if not call.trainer.calculate_KL:
        return table
    others = partners(len(table), call.args.per_device_train_batch_size, max(1, min(processes, len(table))))
    return table.append_column(OF_OTHER_ROWS, column_of(ragged_of(table["completion_ids"]).take(others)))


def _with_others(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Rows of a stream, each with the completion of the row before it, and the first with the last one."""
    completions = rows["completion_ids"]
    return rows | {OF_OTHER_ROWS: completions[-1:] + completions[:-1]}


def _balanced(call: Call, dataset: Any) -> Any:
    """Warns of weights that do not balance the labels, as TRL does for the rows that are trained on. Rows of a stream,
    which cannot be counted, get the completions of other rows, if the loss needs them."""
    if call.is_stream:
        size = call.args.per_device_train_batch_size
        return dataset.map(_with_others, batched=True, batch_size=size) if call.trainer.calculate_KL else dataset
    desirable = int(np.sum(dataset.with_format("numpy")["label"][:]))
    counts = max(desirable, 1), max(len(dataset) - desirable, 1)
    weights = call.trainer.desirable_weight, call.trainer.undesirable_weight
    ratio = counts[0] * weights[0] / (counts[1] * weights[1])
    if call.name == "train" and counts[0] != counts[1] and not 1 <= round(ratio, 2) <= 1.33:
        logger.warning(
            "gpuload: %d rows are desirable and %d are not: set desirable_weight or undesirable_weight so that the "
            "first number times its weight is 1 to 1.33 times the second number times its weight",
            *counts,
        )
    return dataset


def _steps(objective: Objective) -> Steps:
    return Steps(
        unsupported=partial(_unsupported, objective),
        explicit=partial(_explicit, objective),
        tokenized=partial(_tokenized, objective),
        finished=partial(_finished, objective),
        completed=_with_kl if objective == "kto" else lambda call, table, processes: table,
        packed=_balanced if objective == "kto" else lambda call, dataset: dataset,
        engine=PairEngine,
        sampled={},
    )


DPO, RM, KTO = _steps("dpo"), _steps("rm"), _steps("kto")
