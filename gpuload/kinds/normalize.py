"""Messages in the form that most templates take: `normalize_messages="auto"`.

Three things differ in the data that people have, and templates agree on none of them:

- The content of a message with tool calls is null, missing or the empty text. Many templates fail without a text, or
  print "None". It becomes the empty text, as any content that is null.
- A message without tool calls has an empty list of them. Some templates take that for calls, and leave the content out
  (DeepSeek V3). It is removed.
- The arguments of a tool call are an object, or JSON text of one, as the API of OpenAI returns them. Many templates
  fail on text, or print it as text inside of JSON. It becomes an object, unless the template cannot print objects.

A load is then compared with what transformers makes of the normalized messages.
"""

import json
import secrets
from dataclasses import replace
from typing import Any

import pyarrow as pa

from gpuload.reference.template_call import TemplateCall
from gpuload.sources.columns import to_python
from gpuload.sources.nulls import changed_json
from gpuload.sources.types import JSON_TYPE, as_json, fields_of, is_messages

_PARTS = ("messages", "prompt", "completion", "chosen", "rejected")
"""Keys of a row with several parts that have messages."""

_MAY_CHANGE = r'"tool_calls"|"content"\s*:\s*null'


def normalized(row: Any, objects: bool) -> Any:
    """A row as a template takes it: messages; or a dict of them, by the names of `_PARTS`, and of other values. With
    `objects`, arguments that are JSON text become objects."""
    if isinstance(row, dict):
        return {name: normalized(part, objects) if name in _PARTS else part for name, part in row.items()}
    return [_message(each, objects) for each in row] if isinstance(row, list) else row


def normalized_column(column: pa.Array, objects: bool) -> pa.Array:
    """(n,) rows → the same, normalized: unchanged if all of them are as they should be, otherwise as JSON.

    Raises:
        TypeError: a value is nothing that JSON has.
    """
    if column.type == JSON_TYPE:
        return changed_json(column, _MAY_CHANGE, lambda row: normalized(row, objects))
    return as_json([normalized(row, objects) for row in to_python(column)]) if _may_change(column) else column


def _may_change(column: pa.Array) -> bool:
    if pa.types.is_struct(column.type):
        return any(map(_may_change, column.flatten()))
    if not is_messages(column.type):
        return False
    messages, fields = column.flatten(), fields_of(column.type)
    calls = "tool_calls" in fields and messages.field("tool_calls").null_count < len(messages)
    return calls or ("content" in fields and messages.field("content").null_count > 0)


def _message(message: Any, objects: bool) -> Any:
    if not isinstance(message, dict):
        return message
    made, calls = dict(message), message.get("tool_calls")
    if made.get("content") is None and ("content" in made or calls):
        made["content"] = ""
    if calls == []:
        del made["tool_calls"]
    elif objects and isinstance(calls, list):
        made["tool_calls"] = [_call(each) for each in calls]
    return made


def _call(call: Any) -> Any:
    """A tool call, in whichever of its two forms, with its arguments as an object."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return call | {"function": _call(call["function"])}
    text = call.get("arguments") if isinstance(call, dict) else None
    if not isinstance(text, str):
        return call
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):  # the template may print it as it is
        return call
    return call | {"arguments": arguments} if isinstance(arguments, dict) else call


def takes_objects(call: TemplateCall) -> bool:
    """Whether a template prints the arguments of tool calls that are objects, or takes no tool calls at all. Otherwise
    it takes them as JSON text only: it fails with objects, or prints them as Python does."""
    objects, text = argument_forms(call)
    return objects or not text


def argument_forms(call: TemplateCall, exactly: bool = False) -> tuple[bool, bool]:
    """Whether a template prints the arguments of tool calls that are objects, and those that are JSON text; `exactly`:
    only if the text is printed as it is, and not inside of JSON."""
    arguments = {"x": secrets.token_hex(8)}  # not in the list of tools: only a template that writes calls prints it
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    answered = [{"role": "tool", "name": "f", "tool_call_id": "abcdefghi", "content": "r"}]
    answered += [{"role": "assistant", "content": "a"}]

    def text(given: Any, tools: Any, more: list[Any]) -> str:
        calls = [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": given}}]
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        try:
            return replace(call, tools=tools).render(messages + more)
        except Exception:
            return ""

    as_text, printed = False, json.dumps(arguments)
    for tools in (call.tools, [{"type": "function", "function": function}]):
        for count in range(len(answered) + 1):
            one, other = (text(given, tools, answered[:count]) for given in (arguments, printed))
            as_text = as_text or (printed if exactly else arguments["x"]) in other
            if arguments["x"] in one and str(arguments) not in one:
                return True, as_text
    return False, as_text
