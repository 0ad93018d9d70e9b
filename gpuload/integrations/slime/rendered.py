"""slime's loss masks of conversations that it renders as a whole, for `--loss-mask-type` qwen3_5 and distill_qwen.

    qwen3_5       the tokens of the rendered conversation. Those between the header of an assistant's message and the
                  end marker after it have loss, without the beginning of a thought
    distill_qwen  the first message with a generation prompt, then the content of the last one, which has loss

Rows that cannot be tokenized, and those for which slime raises an error, have no ids.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, appended, offsets_of, stretches
from gpuload.core.errors import DataError
from gpuload.core.marks import with_loss
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.protocol import ArrowPrompts
from gpuload.reference.reference import Reference

_HEADER, _THOUGHT, _END = b"<|im_start|>assistant\n", b"<think>\n", b"<|im_end|>"  # slime's

Flags = np.ndarray[Any, np.dtype[np.bool_]]


def with_markers(column: pa.Array, tokenizer: Any, learned: Sequence[Sequence[bool]]) -> Ragged:
    """The ids of conversations, with bits for loss as of qwen3_5.

    Args:
        column: n conversations, messages with text.
        learned: of each row, whether the messages of assistants have loss.

    Raises:
        DataError: slime has to tokenize all rows.
    """
    engine = _engine(tokenizer, add_generation_prompt=False)
    table = engine.spans.table
    if table is not None and (table.leading.any() or table.trailing.any()):
        raise DataError("the tokenizer trims white space from offsets, which decide about slime's loss mask")
    text = _rendered(engine, column)
    whole = pc.fill_null(text, "")
    offsets = np.frombuffer(whole.buffers()[1], np.int64)[: len(whole) + 1].tolist()
    data = (whole.buffers()[2] or pa.py_buffer(b"")).to_pybytes()
    failed, spans = np.asarray(text.is_null()), []
    for row, messages in enumerate(learned):
        found = _marked(data[offsets[row] : offsets[row + 1]], messages)
        failed[row] |= found is None
        spans += [(row, *span) for span in found or []]
    ids = engine.ids(whole)
    rows, start, end = np.array(spans, np.int64).reshape(-1, 3).T
    owner, known = engine.spans.owners(whole, ids, rows, start, end)
    return _without(with_loss(ids, owner >= 0), ~known | failed)


def _marked(text: bytes, learned: Sequence[bool]) -> list[tuple[int, int]] | None:
    """Where the answers with loss are in one text, in bytes; None if not all of them are found."""
    spans, cursor = [], 0
    for has_loss in learned:
        start = text.find(_HEADER, cursor)
        end = text.find(_END, start + len(_HEADER))
        if start < 0 or end < 0:
            return None
        start += len(_HEADER)
        cursor = end + len(_END)
        cursor += text[cursor : cursor + 1] == b"\n"
        if has_loss:
            spans.append((start + len(_THOUGHT) * text.startswith(_THOUGHT, start), cursor))
    return spans


def with_answer(column: pa.Array, tokenizer: Any, learned: Flags) -> Ragged:
    """The ids of first messages and last contents, with bits for loss as of distill_qwen.

    Args:
        column: n conversations, messages with text.
        learned: (n,) whether the last message has loss.

    Raises:
        DataError: slime has to tokenize all rows.
    """
    engine = _engine(tokenizer, add_generation_prompt=True)
    counts = np.asarray(pc.list_value_length(column), np.int64)
    messages, ends = column.flatten(), offsets_of(counts)[1:]
    filled = counts > 0
    first = messages.take(pa.array((ends - counts)[filled]))
    alone = pa.LargeListArray.from_arrays(pa.array(offsets_of(filled.astype(np.int64))), first)
    prompts = _rendered(engine, alone)
    last = messages.field("content").take(pa.array(np.maximum(ends - 1, 0), mask=~filled))
    answers = last.cast(pa.large_string())
    failed = np.asarray(pc.or_(prompts.is_null(), answers.is_null()))
    ids = engine.ids(pc.fill_null(pa.concat_arrays([prompts, answers]), ""))
    split = ids.offsets[len(column)]
    start = Ragged(ids.values[:split], ids.offsets[: len(column) + 1])
    answer = Ragged(ids.values[split:], ids.offsets[len(column) :] - split)
    loss = stretches(start.lengths, answer.lengths) & np.repeat(learned, start.lengths + answer.lengths)
    return _without(with_loss(appended(start, answer), loss), failed)


def _engine(tokenizer: Any, add_generation_prompt: bool) -> HostEngine:
    engine = HostEngine(Reference(tokenizer, template_kwargs={"add_generation_prompt": add_generation_prompt}))
    if engine.by_prompt:
        raise DataError("the tokenizer class changes how texts are encoded")
    return engine


def _rendered(engine: HostEngine, column: pa.Array) -> pa.LargeStringArray:
    """(n,) texts; null for rows that the template rejects."""
    rendered = engine.render(ArrowPrompts(column))
    rejected = np.zeros(len(column), bool)
    rejected[list(rendered.rejected)] = True
    return pc.if_else(pa.array(~rejected), rendered.text, pa.scalar(None, pa.large_string()))


def _without(ids: Ragged, failed: Flags) -> Ragged:
    """The same rows, some of them without ids."""
    lengths = ids.lengths
    return Ragged(ids.values[np.repeat(~failed, lengths)], offsets_of(np.where(failed, 0, lengths)))
