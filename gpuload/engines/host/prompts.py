"""A column of prompts, whatever it holds → a column of text.

Messages go through the compiled template. Plain strings become one user message each and go the same way, or are the
text already. What no column can say (JSON of mixed shapes, a tokenizer with a rendering of its own) is rendered by the
reference, row by row, so that a row which it rejects takes no other with it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.arrays import Ragged
from gpuload.engines.host.render import render
from gpuload.engines.host.rendered import Rendered
from gpuload.errors import DataError
from gpuload.reference.reference import Reference, problem
from gpuload.reference.template_call import rejection
from gpuload.sources.columns import to_python
from gpuload.sources.read import JSON_TYPE
from gpuload.template.compiler import ChatProgram


def render_column(prompts: pa.Array, reference: Reference, program: ChatProgram) -> Rendered:
    """Renders a column of prompts by columns, as far as that is possible.

    Args:
        prompts: (n,) messages, strings or JSON; see `check_prompt_type`.
        program: the reference's compiled template.
    """
    kind = prompts.type
    if _is_text(kind):
        if not reference.uses_template:
            return _as_they_are(prompts)
        prompts = one_user_message(prompts.cast(pa.large_string()))
    elif not reference.uses_template or not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return render_rows(prompts, reference)
    return render(program, prompts)


def render_rows(prompts: pa.Array, reference: Reference, with_ids: bool = False) -> Rendered:
    """Renders a column of prompts with the reference, row by row.

    Args:
        prompts: (n,) messages, strings or JSON.
        with_ids: have the reference encode each prompt as well, in the one call that defines its ids.
    """
    rejected: dict[int, str] = {}
    values = _python_rows(prompts, rejected)
    for row, value in enumerate(values):
        if row not in rejected and (reason := problem(value)):
            rejected[row] = reason

    def each(step: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        return [None if row in rejected else _attempt(rejected, row, step, item) for row, item in enumerate(items)]

    ids = None
    if with_ids:
        ids = Ragged.from_lists([row or [] for row in each(reference.ids, values)])
        # The ids are what counts: arguments that only make sense with them may not let the text be had alone.
        texts = [None if row in rejected else _text_or_nothing(reference, value) for row, value in enumerate(values)]
    else:
        texts = each(reference.render, values)
    texts = each(lambda text: text.encode(), texts)
    return Rendered(
        pc.cast(pa.array(texts, pa.large_binary()), pa.large_string()),
        rejected,
        reference_rows=len(values) - len(rejected),
        ids=ids,
    )


def check_prompt_type(kind: pa.DataType, where: str) -> None:
    """Raises DataError where a column of this type cannot hold prompts."""
    if pa.types.is_dictionary(kind):
        return check_prompt_type(kind.value_type, where)
    if _is_text(kind) or kind == JSON_TYPE or pa.types.is_null(kind):
        return None
    if _is_list(kind) and pa.types.is_struct(kind.value_type):
        names = [field.name for field in kind.value_type]
        if "role" in names:
            return None
        raise DataError(f"{where}: messages have the fields {', '.join(names)}: expected role and content")
    raise DataError(f"{where} holds {kind}: expected list<struct<role, content>> or string")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_list(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_list_view, pa.types.is_large_list_view)
    return any(test(kind) for test in (*lists, pa.types.is_fixed_size_list))


def one_user_message(texts: pa.LargeStringArray) -> pa.Array:
    """(n,) large_string → list<struct<role, content>> over the same texts; a null text is a null prompt."""
    role = pa.DictionaryArray.from_arrays(np.zeros(len(texts), np.int8), ["user"])
    messages = pa.StructArray.from_arrays([role, texts], names=["role", "content"])
    offsets = pa.array(np.arange(len(texts) + 1), pa.int64())
    return pa.LargeListArray.from_arrays(offsets, messages, mask=texts.is_null() if texts.null_count else None)


def _as_they_are(prompts: pa.Array) -> Rendered:
    """Plain strings without a template."""
    text = prompts.cast(pa.large_string())
    rejected = {int(row): "prompt is null" for row in np.flatnonzero(np.asarray(text.is_null()))}
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        rows: list[Any] = [
            None if row in rejected else _attempt(rejected, row, lambda i: text[i].as_py(), row)
            for row in range(len(text))
        ]
        text = pa.array(rows, pa.large_string())
    return Rendered(text, rejected, compiled_rows=len(text) - len(rejected))


def _python_rows(prompts: pa.Array, rejected: dict[int, str]) -> list[Any]:
    """All rows as Python objects; one by one where some row's bytes are not text."""
    try:
        return to_python(prompts)
    except UnicodeDecodeError:
        return [
            _attempt(rejected, row, lambda i: to_python(prompts.slice(i, 1))[0], row) for row in range(len(prompts))
        ]


def _text_or_nothing(reference: Reference, prompt: Any) -> str:
    try:
        return reference.render(prompt)
    except Exception:
        return ""


def _attempt(rejected: dict[int, str], row: int, step: Callable[[Any], Any], value: Any) -> Any:
    """`step(value)`, or None and the reason noted."""
    try:
        return step(value)
    except UnicodeDecodeError as error:
        rejected[row] = f"prompt is not valid UTF-8 (byte {error.start})"
    except UnicodeEncodeError as error:
        rejected[row] = f"a lone surrogate, {error.object[error.start]!r}, is not text"
    except Exception as error:
        rejected[row] = rejection(error)
    return None
