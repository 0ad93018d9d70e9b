"""Rendering by the reference: transformers' own Jinja, conversation by conversation.

A batch is rendered in one call. Where that raises, the rows are rendered one by one, so that a row which the template
refuses takes no other with it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gpuload.arrays import Ragged
from gpuload.columns import to_python
from gpuload.errors import DataError
from gpuload.read import JSON_TYPE
from gpuload.tokenizer.reference import Reference, problem


@dataclass(frozen=True)
class Rendered:
    """A batch of prompts as text.

    Attributes:
        text: (n,) large_string, null where a row was refused.
        refused: row → why it has no text.
        by_reference: rows that transformers rendered.
        reasons: why, with the number of rows.
        ids: n rows of token ids, where rendering and encoding were one step.
    """

    text: pa.LargeStringArray
    refused: dict[int, str]
    by_reference: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    ids: Ragged | None = None

    @property
    def nbytes(self) -> int:
        """Of the texts, without Arrow's offsets."""
        return int(pc.sum(pc.binary_length(self.text)).as_py() or 0)


def render_rows(prompts: pa.Array, reference: Reference, with_ids: bool = False) -> Rendered:
    """Renders a column of prompts with the reference.

    Args:
        prompts: (n,) messages, strings or JSON; see `check_prompt_type`.
        with_ids: have the reference encode each prompt as well, in the one call that defines its ids.
    """
    refused: dict[int, str] = {}
    values = _python_rows(prompts, refused)
    for row, value in enumerate(values):
        if row not in refused and (reason := problem(value)):
            refused[row] = reason
    good = [row for row in range(len(values)) if row not in refused]
    texts: list[str | None] = [None] * len(values)
    try:
        for row, text in zip(good, reference.render_many([values[row] for row in good]), strict=True):
            texts[row] = text
    except Exception:
        for row in good:
            texts[row] = _attempt(refused, row, reference.render, values[row])
    text = _text_column(texts, refused)
    ids = None
    if with_ids:
        rows = [
            [] if row in refused else _attempt(refused, row, reference.ids, value) for row, value in enumerate(values)
        ]
        ids = Ragged.from_lists([row or [] for row in rows])
    return Rendered(text, refused, len(good), ids=ids)


def check_prompt_type(kind: pa.DataType, where: str) -> None:
    """Raises DataError where a column of this type cannot hold prompts."""
    if pa.types.is_dictionary(kind):
        return check_prompt_type(kind.value_type, where)
    if is_text(kind) or kind == JSON_TYPE or pa.types.is_null(kind):
        return None
    if is_list(kind) and pa.types.is_struct(kind.value_type):
        names = [field.name for field in kind.value_type]
        if "role" in names:
            return None
        raise DataError(f"{where}: messages have the fields {', '.join(names)}: expected role and content")
    raise DataError(f"{where} holds {kind}: expected list<struct<role, content>> or string")


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    return any(
        test(kind)
        for test in (
            pa.types.is_list,
            pa.types.is_large_list,
            pa.types.is_list_view,
            pa.types.is_large_list_view,
            pa.types.is_fixed_size_list,
        )
    )


def _python_rows(prompts: pa.Array, refused: dict[int, str]) -> list[Any]:
    """All rows as Python objects; one by one where some row's bytes are not text."""
    try:
        return to_python(prompts)
    except UnicodeDecodeError:
        pass
    return [_attempt(refused, row, lambda i: to_python(prompts.slice(i, 1))[0], row) for row in range(len(prompts))]


def _text_column(texts: list[str | None], refused: dict[int, str]) -> pa.LargeStringArray:
    try:
        return pa.array(texts, pa.large_string())
    except UnicodeEncodeError:
        encoded = [None if t is None else _attempt(refused, row, str.encode, t) for row, t in enumerate(texts)]
        return pc.cast(pa.array(encoded, pa.large_binary()), pa.large_string())


def _attempt(refused: dict[int, str], row: int, step: Callable[[Any], Any], value: Any) -> Any:
    """`step(value)`, or None and the reason noted."""
    try:
        return step(value)
    except UnicodeDecodeError as error:
        refused[row] = f"not valid UTF-8: {error.reason} (byte {error.start})"
    except UnicodeEncodeError as error:
        refused[row] = f"a lone surrogate, {error.object[error.start]!r}, is not text"
    except Exception as error:
        refused[row] = f"the chat template refuses it: {_sentence(error)}"
    return None


def _sentence(error: Exception) -> str:
    message = " ".join(str(error).split())
    name = type(error).__name__
    return message[:300] if name == "TemplateError" and message else f"{name}: {message[:300]}"
