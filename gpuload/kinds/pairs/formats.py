"""The forms in which people keep preference data, and what is read from each.

    preference          `prompt`, `chosen`, `rejected`
    implicit            `chosen` and `rejected`, which begin with the prompt
    sharegpt            `conversations`, `chosen`, `rejected`; or `conversations` and a label; `system`
    prompt-completion   `prompt`, `completion` and a label
    messages            `messages`, of which the last is the completion, and a label

A prompt is text or messages. A completion (`chosen`, `rejected` or `completion`) is text, messages or one message, of
{role, content} or of {from, value}. If any of them is messages, a text is one message: of the user as a prompt, of the
assistant as a completion. A label is the column `label` or `kto_tag`.

Every form becomes one column with a struct: "prompt" and the completions, all as text or all as messages, and
"problem": why nothing can be made of the row, or null.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import common_prefix
from gpuload.core.arrow import as_arrow, as_scalar, fill_null
from gpuload.core.options import Objective
from gpuload.kinds.chats.formats import PLAIN_MESSAGES, sharegpt_turn, with_system
from gpuload.kinds.chats.malformed import check_text
from gpuload.kinds.formats import Content, Format, check_column, find_among, label_in
from gpuload.sources.columns import to_python
from gpuload.sources.nulls import without_nulls
from gpuload.sources.types import JSON_TYPE, as_json, fields_of, is_messages, is_text

FORMATS = ("preference", "implicit", "sharegpt", "prompt-completion", "messages")

MARGIN = "margin"  # the column with the margins of pairs for a reward model
_LARGEST = float(np.finfo(np.float32).max)  # of the numbers that batches have
Columns = Mapping[str, Any]


def find_pair_format(
    schema: pa.Schema, where: str, objective: Objective, name: str | None, keys: dict[str, str]
) -> Format:
    """The format of a file: see `find_among`. For "kto", it has pairs or single completions; `keys` has the columns of
    the "prompt", "chosen" and "rejected".

    Raises:
        DataError: it has none; the message shows its columns and the closest format.
    """
    for part, column in keys.items():
        if column != part:  # without it, other data than is meant may fit
            check_column(schema, column, where)
    prompt, chosen, rejected = (keys[part] for part in ("prompt", "chosen", "rejected"))
    found = label_in(schema)
    label = found or "label"
    pair = partial(_from_pairs, keys, objective)
    single = partial(_from_completions, keys, label)
    kept = (MARGIN,) if objective == "rm" else ()
    candidates = [
        Format("preference", (chosen, rejected, prompt), _fit, (), pair, kept),
        Format("sharegpt", (chosen, rejected, "conversations"), _fit, ("system",), pair, kept),
        Format("implicit", (chosen, rejected), _fit, (), pair, kept),
    ]
    if objective == "kto":

        def fit(kinds: Sequence[pa.DataType]) -> bool:
            return found is not None and _fit(kinds)

        candidates += [
            Format("prompt-completion", ("completion", prompt), fit, (), single, (label,)),
            Format("messages", ("messages",), fit, (), single, (label,)),
            Format("sharegpt", ("conversations",), fit, ("system",), single, (label,)),
        ]
    remedy = "rename the columns, or pass prompt_key=, chosen_key= and so on"
    return find_among(candidates, schema, where, name, remedy)


def label_column(schema: pa.Schema, keys: dict[str, str]) -> str | None:
    """The column with labels of single completions; None if there is none, or there are pairs."""
    return None if {keys["chosen"], keys["rejected"]} & set(schema.names) else label_in(schema)


def _fit(kinds: Sequence[pa.DataType]) -> bool:
    """Whether the values of all columns can be text, messages or a message."""
    messages = [kind.value_type if is_messages(kind) else kind for kind in kinds]
    return all(
        is_text(kind) or kind == JSON_TYPE or (pa.types.is_struct(kind) and {"role", "from"} & {f.name for f in kind})
        for kind in messages
    )


# -- pairs -----------------------------------------------------------------------------------------------------------


def _from_pairs(keys: dict[str, str], objective: Objective, columns: Columns, content: Content) -> pa.Array:
    conversations = "conversations" in columns
    prompt = columns.get("conversations", columns.get(keys["prompt"]))
    chosen, rejected = columns[keys["chosen"]], columns[keys["rejected"]]
    margin = _problems(columns[MARGIN], _wrong_margin) if MARGIN in columns else None
    if prompt is not None and not conversations and _same_form(prompt, chosen, rejected):
        return _struct({"prompt": prompt, "chosen": chosen, "rejected": rejected}, margin)
    prompts = [_MISSING] * len(chosen) if prompt is None else _with_system(to_python(prompt), columns)
    values = zip(prompts, to_python(chosen), to_python(rejected), strict=True)
    rows = [_pair([_turns(each, content) for each in row], objective) for row in values]
    return _column(rows, ("chosen", "rejected"), margin)


_MISSING = object()  # the prompt of rows without a column of prompts


def _pair(turns: Sequence[Any], objective: Objective) -> dict[str, Any]:
    """One pair of prompt, chosen and rejected, as texts or messages: its prompt, and what follows in each sequence."""
    prompt = turns[0]
    parts = dict(zip(("prompt", "chosen", "rejected"), turns, strict=True))
    if prompt is _MISSING:
        del parts["prompt"]
    if reason := _missing(parts):
        return {"problem": reason}
    chosen, rejected = parts["chosen"], parts["rejected"]
    if all(isinstance(part, str) for part in parts.values()):
        if prompt is not _MISSING:
            return parts
        # A reward model has no prompts: its sequences are the texts themselves.
        return parts | {"prompt": ""} if objective == "rm" else _extracted_text(chosen, rejected)
    chosen, rejected = _messages(chosen, "assistant"), _messages(rejected, "assistant")
    if prompt is not _MISSING and not isinstance(parts["prompt"], str):
        return {"prompt": parts["prompt"], "chosen": chosen, "rejected": rejected}
    if prompt is not _MISSING and all(_role(part[0]) == "assistant" for part in (chosen, rejected)):
        return {"prompt": _messages(prompt, "user"), "chosen": chosen, "rejected": rejected}
    found = _extracted(chosen, rejected)
    if prompt is not _MISSING and "problem" not in found and not _has(found["prompt"], parts["prompt"]):
        return {"problem": "the prompt is not in the messages that chosen and rejected begin with"}
    return found


def _extracted(chosen: list[Any], rejected: list[Any]) -> dict[str, Any]:
    """The messages that both begin with are the prompt, except the last one of the shorter list, as in TRL."""
    end = min(common_prefix(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if chosen[0] != rejected[0]:
        if without_nulls(chosen[0]) == without_nulls(rejected[0]):
            return {
                "problem": "chosen and rejected begin with messages that differ in nulls only: pass drop_nulls=True"
            }
        return {"problem": "chosen and rejected have no common first message: their prompts differ"}
    if not end:
        return {"problem": "chosen and rejected have no message before the answer"}
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def _extracted_text(chosen: str, rejected: str) -> dict[str, Any]:
    """The characters that both begin with are the prompt, as in TRL: a space before the answers belongs to them, and if
    one text is the beginning of the other, its last character is an answer."""
    end = common_prefix(chosen, rejected)
    if not end:
        return {"problem": "chosen and rejected have no common beginning: their prompts differ"}
    if end == min(len(chosen), len(rejected)) or chosen[end - 1] == " ":
        end -= 1
    return {"prompt": chosen[:end], "chosen": chosen[end:], "rejected": rejected[end:]}


def _has(messages: list[Any], text: str) -> bool:
    """Whether a text is the content of one of some messages."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    return any(isinstance(each, str) and each.strip() == text.strip() for each in contents)


# -- single completions ----------------------------------------------------------------------------------------------


def _from_completions(keys: dict[str, str], label: str, columns: Columns, content: Content) -> pa.Array:
    wrong = _problems(columns[label], _wrong_label)
    conversation = columns.get("conversations", columns.get("messages"))
    if conversation is not None:
        rows = [_last_answer(_turns(row, content)) for row in _with_system(to_python(conversation), columns)]
        return _column(rows, ("completion",), wrong)
    prompt, completion = columns[keys["prompt"]], columns["completion"]
    if _same_form(prompt, completion):
        return _struct({"prompt": prompt, "completion": completion}, wrong)
    values = zip(to_python(prompt), to_python(completion), strict=True)
    rows = [_completion(*(_turns(each, content) for each in row)) for row in values]
    return _column(rows, ("completion",), wrong)


def _completion(prompt: Any, completion: Any) -> dict[str, Any]:
    parts = {"prompt": prompt, "completion": completion}
    if reason := _missing(parts):
        return {"problem": reason}
    if all(isinstance(part, str) for part in parts.values()):
        return parts
    return {"prompt": _messages(prompt, "user"), "completion": _messages(completion, "assistant")}


def _last_answer(turns: Any) -> dict[str, Any]:
    """A conversation, of which the last message is the completion."""
    if reason := _missing({"messages": turns}):
        return {"problem": reason}
    if isinstance(turns, str) or _role(turns[-1]) != "assistant":
        return {"problem": "messages do not end with an answer of an assistant"}
    if len(turns) == 1:
        return {"problem": "there is no message before the answer"}
    return {"prompt": turns[:-1], "completion": turns[-1:]}


# -- values ----------------------------------------------------------------------------------------------------------


def _turns(value: Any, content: Content) -> Any:
    """A value as messages of {role, content}; a text as it is."""
    if isinstance(value, dict):
        return [sharegpt_turn(value, content)]
    return [sharegpt_turn(turn, content) for turn in value] if isinstance(value, list) else value


def _with_system(rows: list[Any], columns: Columns) -> list[Any]:
    if "system" not in columns:
        return rows
    first = to_python(columns["system"])
    for text in first:
        check_text("system", text)
    return [with_system(row, text) if isinstance(row, list) else row for row, text in zip(rows, first, strict=True)]


def _missing(parts: dict[str, Any]) -> str | None:
    """Why a row has not all of its parts; None if it has."""
    for name, value in parts.items():
        if value is None:
            return f"{name} is null"
        if isinstance(value, list) and not value:
            return f"{name} is an empty list"
        if not isinstance(value, (list, str)):
            return f"{name} is neither text nor messages, but of type {type(value).__name__}"
    return None


def _messages(part: Any, role: str) -> Any:
    return [{"role": role, "content": part}] if isinstance(part, str) else part


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _wrong_label(value: Any) -> str | None:
    # Numbers of a column with nulls are floats in a dataframe of pandas.
    right = isinstance(value, (bool, int, float)) and value in (0, 1)
    return None if right else f"label is {value!r:.40}, not true or false"


def _wrong_margin(value: Any) -> str | None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return f"margin is {value!r:.40}, not a number"
    return None if abs(value) <= _LARGEST else f"margin is {value!r:.40}, not a number of 32 bits"  # NaN is not, either


def _problems(column: Any, wrong: Callable[[Any], str | None]) -> list[str | None] | None:
    """What is wrong with each value of a column; None if nothing is."""
    found = [wrong(value) for value in to_python(column)]
    return found if any(found) else None


# -- columns ---------------------------------------------------------------------------------------------------------


def _same_form(*parts: Any) -> bool:
    """Whether columns are all of text, or all lists of messages with roles: these are used as they are."""
    kinds = [part.type for part in parts]
    return all(map(is_text, kinds)) or all("role" in fields_of(kind) for kind in kinds)


def _struct(parts: dict[str, Any], wrong: list[str | None] | None) -> pa.Array:
    problem = pa.nulls(len(parts["prompt"]), pa.large_string()) if wrong is None else as_arrow(wrong, pa.large_string())
    for name, column in reversed(parts.items()):
        if not is_text(column.type):
            lengths = pc.list_value_length(column)
            empty = fill_null(pc.equal(lengths, as_scalar(0, lengths.type)), False)
            problem = pc.if_else(empty, as_scalar(f"{name} is an empty list", problem.type), problem)
        problem = pc.if_else(column.is_null(), as_scalar(f"{name} is null", problem.type), problem)
    return pa.StructArray.from_arrays([*parts.values(), problem], [*parts, "problem"])


def _column(rows: Sequence[dict[str, Any]], answers: tuple[str, ...], wrong: list[str | None] | None) -> pa.Array:
    """Rows as a struct of texts or of messages with role and content only, or as JSON if they are neither."""
    names = ("prompt", *answers)
    if wrong is not None:
        rows = [row if reason is None else {"problem": reason} for row, reason in zip(rows, wrong, strict=True)]
    forms: dict[Any, Callable[[Any], bool]] = {
        pa.large_string(): lambda value: isinstance(value, str),
        PLAIN_MESSAGES: _are_plain,
    }
    for kind, fits in forms.items():
        if all(fits(row[name]) for row in rows for name in names if name in row):
            fields = [(name, kind) for name in names] + [("problem", pa.large_string())]
            try:
                return as_arrow(rows, pa.struct(fields))
            except UnicodeEncodeError:  # a lone surrogate, which JSON escapes
                break
    return as_json(rows)


def _are_plain(messages: Any) -> bool:
    """Whether messages have a role and a content, and nothing else."""
    return isinstance(messages, list) and all(
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and all(value is None or isinstance(value, str) for value in message.values())
        for message in messages
    )
