"""Any column of prompts as text: which of them the compiled template renders, and the others row by row.

Messages go through the compiled template, as Arrow columns or as the Python objects of JSON of mixed shapes. Plain
strings become one user message each and go the same way; without a chat template they are the text already. Tokenizers
that define their own rendering render row by row, so that a row they reject does not affect the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged
from gpuload.core.arrow import as_arrow, as_numpy
from gpuload.core.memory import garbage_collection_paused
from gpuload.engines.conversations import from_rows, messages_of_users
from gpuload.engines.host.render import AnswerSpans, HostText, render, render_conversations
from gpuload.engines.host.sanitize import can_be_marked, reject_unplain
from gpuload.engines.host.texts import HostTexts
from gpuload.engines.protocol import add_seconds
from gpuload.reference.reference import Reference, messages_of
from gpuload.reference.template_call import rejection
from gpuload.sources.columns import to_python
from gpuload.sources.types import JSON_TYPE, is_list, is_plain, is_text
from gpuload.template.program import ByReference, RenderedRow

if TYPE_CHECKING:
    from gpuload.template.compiler import ChatProgram


@garbage_collection_paused()
def render_column(prompts: pa.Array, reference: Reference, program: ChatProgram) -> HostText:
    """Renders a column of prompts, by column where that is possible.

    Args:
        prompts: (n,) messages, strings or JSON; see `check_prompt_type`. Or several columns of messages that are
            `joined`.
        program: the reference's compiled template.
    """
    if is_text(prompts.type):
        if not reference.uses_template:
            return _plain_text(prompts, reference)
        prompts = messages_of_users(prompts.cast(pa.large_string()))
    elif prompts.type == JSON_TYPE and reference.uses_template and not reference.sanitizes:
        rejected: dict[int, str] = {}
        rows = _python_rows(prompts, rejected)
        rejected |= {
            number: why for number, row in enumerate(rows) if number not in rejected and (why := reference.problem(row))
        }
        return render_messages(
            [row if i in rejected else messages_of(row) for i, row in enumerate(rows)], rejected, program
        )
    elif not reference.uses_template or not (is_list(prompts.type) or pa.types.is_struct(prompts.type)):
        return render_rows(prompts, reference, program, why=MARKED_BY_ROW)
    if reference.sanitizes and not can_be_marked(prompts.type):
        return render_rows(prompts, reference, program, why=MARKED_BY_ROW)
    return render(program, prompts)


MARKED_BY_ROW = "control tokens are marked row by row in such messages"
"""Why such rows are rendered by transformers."""

BY_PROMPT = "the tokenizer object renders and encodes prompt by prompt"
"""Why all rows of a load are."""


def render_messages(
    rows: Sequence[Any], rejected: dict[int, str], program: ChatProgram, plain: bool = True
) -> HostText:
    """Renders conversations that are Python objects, by column where that is possible.

    Args:
        rows: (n,) lists of messages; anything where a row is rejected.
        rejected: row → why no prompt can be made of it.
        program: the compiled template, of a tokenizer that does not sanitize control tokens.
        plain: whether everything in the messages is plain data, as `json.loads` returns it.
    """
    return render_conversations(program, from_rows(HostTexts(), rows, rejected, plain))


@garbage_collection_paused()
def render_rows(
    prompts: pa.Array, reference: Reference, program: ChatProgram | None = None, with_ids: bool = False, *, why: str
) -> HostText:
    """Renders a column of prompts with the reference, row by row.

    Args:
        prompts: (n,) messages, strings or JSON.
        program: the reference's compiled template, whose limits are used; None for a limit of time only.
        with_ids: also encode each prompt, in the single call that defines its ids.
        why: for the report, why they are not rendered by column.
    """
    rejected: dict[int, str] = {}
    started = time.perf_counter()
    values = _python_rows(prompts, rejected)
    for row, value in enumerate(values):
        if row not in rejected and (reason := reference.problem(value)):
            rejected[row] = reason

    def each(step: Callable[[Any], Any], items: list[Any]) -> list[Any]:
        return [None if row in rejected else attempt(rejected, row, step, item) for row, item in enumerate(items)]

    ids = None
    if with_ids:
        ids = Ragged.from_lists([row or [] for row in each(reference.ids, values)])
        # The ids are what counts: with some arguments of the template the text cannot be had without them.
        texts = [None if row in rejected else _text_or_nothing(reference, value) for row, value in enumerate(values)]
    elif program is not None and reference.uses_template:
        texts = each(lambda value: program.render(reference.call.marked(messages_of(value)), "row by row"), values)
    else:
        texts = each(reference.render, values)
    answers = None
    if program is not None and (find := program.answers) is not None and not with_ids:
        spans = each(lambda pair: find.in_bytes(messages_of(pair[0]), pair[1]), list(zip(values, texts, strict=True)))
        answers = AnswerSpans.of_rows({row: some for row, some in enumerate(spans) if some is not None})
    texts = each(lambda text: text.encode(), texts)
    text = pc.cast(as_arrow(texts, pa.large_binary()), pa.large_string())
    if reference.sanitizes and not with_ids:
        text = reject_unplain(text, reference.call.control, rejected)
    return HostText(
        text=text,
        ids=ids,
        answers=answers,
        rejected=rejected,
        # Without a template, rows are text, and transformers renders nothing.
        by_reference=dict.fromkeys(range(len(values)), why) if reference.uses_template else {},
        reason_seconds={why: time.perf_counter() - started} if reference.uses_template else {},
    )


def render_with_tools(
    prompts: pa.Array, reference: Reference, program: ChatProgram, tools: list[dict[str, Any]]
) -> HostText:
    """Renders a column of prompts with tools that the compiled template does not have, row by row.

    Args:
        prompts: (n,) messages or JSON.
        reference: with these tools; its tokenizer does not sanitize control tokens.
        program: its compiled template without tools.
        tools: those of these prompts.
    """
    rejected: dict[int, str] = {}
    by_reference: dict[int, str] = {}
    seconds: dict[str, float] = {}
    texts: list[str | None] = []
    plain = is_plain(prompts.type)
    for row, value in enumerate(_python_rows(prompts, rejected)):
        if row not in rejected and (why := reference.problem(value)):
            rejected[row] = why
        if row in rejected:
            texts.append(None)
            continue
        messages = messages_of(value)
        made = program.render_row(messages, tools) if plain else ByReference(MARKED_BY_ROW)
        if isinstance(made, RenderedRow):
            texts.append(made.text)
            continue
        started = time.perf_counter()
        texts.append(attempt(rejected, row, reference.render, value))
        if isinstance(made, ByReference):  # otherwise it is rejected, and transformers says why
            by_reference[row] = made.reason
            add_seconds(seconds, {made.reason: time.perf_counter() - started})
    texts = [None if text is None else attempt(rejected, row, encodable, text) for row, text in enumerate(texts)]
    return HostText(
        text=as_arrow(texts, pa.large_string()), rejected=rejected, by_reference=by_reference, reason_seconds=seconds
    )


def encodable(text: str) -> str:
    """The same text, if UTF-8 can encode it: a lone surrogate is an error of its row."""
    text.encode()
    return text


def _plain_text(prompts: pa.Array, reference: Reference) -> HostText:
    """Plain strings without a template."""
    text = prompts.cast(pa.large_string())
    rejected = {int(row): "prompt is null" for row in np.flatnonzero(as_numpy(text.is_null()))}
    try:
        text.validate(full=True)
    except pa.ArrowInvalid:
        rows: list[Any] = [
            None if row in rejected else attempt(rejected, row, lambda i: text[i].as_py(), row)
            for row in range(len(text))
        ]
        text = as_arrow(rows, pa.large_string())
    return HostText(text=text, rejected=rejected)


def _python_rows(prompts: pa.Array, rejected: dict[int, str]) -> list[Any]:
    """All rows as Python objects; one by one where some row has bytes that are not text, or no JSON."""
    try:
        return to_python(prompts)
    except ValueError:
        one = lambda i: to_python(prompts.slice(i, 1))[0]  # noqa: E731
        return [attempt(rejected, row, one, row) for row in range(len(prompts))]


def _text_or_nothing(reference: Reference, prompt: Any) -> str:
    try:
        return reference.render(prompt)
    except Exception:
        return ""


def attempt(rejected: dict[int, str], row: int, step: Callable[[Any], Any], value: Any) -> Any:
    """`step(value)`; or None, with the reason recorded."""
    try:
        return step(value)
    except Exception as error:
        rejected[row] = rejection(error)
    return None
