"""Conversations for slime's SFT, tokenized by columns, with slime's loss masks.

For `--loss-mask-type` qwen and qwen3, slime tokenizes a conversation turn by turn, and concatenates the ids. Here each
turn of each row becomes a row of one column, which `load_chats` renders and encodes:

    qwen     a turn is a message. The ids of the system prompt that the template adds are removed from all but the first
    qwen3    a turn is a message, or consecutive messages of tools. The first turn of a row is rendered before a message
             of the user, the others after it, and the ids of that message are removed; then as above

All ids of an assistant's turn have loss, except for the first ones, as many as a generation prompt has. These counts
are slime's own. For the other masks see `rendered.py`. Rows that cannot be tokenized have no ids: slime tokenizes them.
"""

import itertools
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from slime.utils.mask_utils import MultiTurnLossMaskGenerator

from gpuload.core.arrays import Ragged, offsets_of, ranges
from gpuload.core.errors import DataError
from gpuload.core.marks import with_loss
from gpuload.core.options import NO_LIMIT
from gpuload.integrations.core import are_messages
from gpuload.integrations.slime.rendered import with_answer, with_markers
from gpuload.integrations.slime.samples import SampleColumns
from gpuload.kinds.chats.load import load_chats

_PREFIX = {"role": "user", "content": "FOR CALCULATING LOSS MASK ONLY"}  # slime's


def conversations(args: Any, tokenizer: Any, settings: dict[str, Any], samples: SampleColumns) -> Ragged:
    """Ids of all rows, with a bit for loss (`gpuload.core.marks`).

    Args:
        args: slime's arguments.
        tokenizer: of the model.
        settings: options of `load_chats`.
        samples: n rows whose prompts are messages.

    Returns:
        n rows; those that slime has to tokenize are empty.

    Raises:
        DataError: slime has to tokenize all rows.
        GpuloadError: as for `load_chats`.
    """
    kind = args.loss_mask_type
    if kind not in ("qwen", "qwen3", "qwen3_5", "distill_qwen"):
        raise DataError(f"loss_mask_type={kind!r} is not supported")
    table = samples.columns.table()
    column = table[samples.prompt].combine_chunks()
    if not are_messages(column.type) or column.null_count:
        raise DataError(f"column {samples.prompt!r} is not messages with text")
    if not len(column.flatten()):
        raise DataError(f"column {samples.prompt!r} has no messages")
    if samples.tools is None and samples.metadata is not None:
        _check_metadata(table[samples.metadata])
    try:
        generator = MultiTurnLossMaskGenerator(tokenizer, tokenizer_type=kind)
    except Exception as error:  # whatever the template raises: slime raises it at the first step
        raise DataError(f"slime's loss mask cannot be made: {error!s:.200}") from error
    if kind == "qwen" and "<｜Assistant｜>" in tokenizer.get_added_vocab():
        kind = "distill_qwen"
    if kind in ("qwen3_5", "distill_qwen"):
        return _rendered(column, tokenizer, kind, samples)
    return _by_turns(column, tokenizer, kind, generator, settings, samples)


def _rendered(column: pa.Array, tokenizer: Any, kind: str, samples: SampleColumns) -> Ragged:
    """Rows of which slime renders the whole conversation, or its first message."""
    if samples.tools is not None:
        raise DataError(f"rows have tools, which are not supported with loss_mask_type={kind!r}")
    messages, count = _MessageTurns(column, joins_tools=False), len(column)
    if kind == "qwen3_5":
        answers = np.flatnonzero(messages.is_role("assistant"))
        bounds = np.searchsorted(messages.row[answers], np.arange(count + 1))
        flags = messages.learned[answers].tolist()
        learned = [flags[low:high] for low, high in itertools.pairwise(bounds.tolist())]
        return with_markers(column, tokenizer, learned)
    last = np.searchsorted(messages.row, np.arange(count), side="right") - 1
    return with_answer(column, tokenizer, messages.learned[last])


def _by_turns(
    column: pa.Array, tokenizer: Any, kind: str, generator: Any, settings: dict[str, Any], samples: SampleColumns
) -> Ragged:
    """Rows that slime tokenizes turn by turn."""
    system, unlearned = generator.system_message_length, generator.gen_token_length
    try:
        prefix = tokenizer.apply_chat_template([_PREFIX], tokenize=True, return_dict=False) if kind == "qwen3" else []
    except Exception as error:
        raise DataError(f"slime's loss mask cannot be made: {error!s:.200}") from error
    if min(system, unlearned) < 0:
        raise DataError("the template's system prompt or generation prompt has no length")

    turns = _MessageTurns(column, joins_tools=kind == "qwen3")
    chats = {"messages": turns.conversations(with_prefix=kind == "qwen3"), "turn": np.arange(len(turns.start))}
    if samples.tools is not None:
        chats["tools"] = turns.tools(samples)
    given: dict[str, Any] = {"format": "messages", "loss_on": "all", "max_length": NO_LIMIT, "store": "memory"}
    loaded = load_chats(pa.table(chats), tokenizer, **(settings | given))
    ids, there = loaded.tokens, loaded.columns["turn"].to_numpy()

    front = np.where(turns.opening, 0, len(prefix) + np.where(turns.is_role("system"), 0, system))[there]
    back = np.where(turns.opening, len(prefix), 0)[there]
    rest = np.maximum(ids.lengths - front - back, 0)
    # Position of each id in the part of its turn that is kept; negative if it is removed at the front.
    position = ids.positions - np.repeat(front, ids.lengths)
    kept = (position >= 0) & (position < np.repeat(rest, ids.lengths))
    is_assistant = turns.is_role("assistant")[there]
    learned = np.repeat(is_assistant & turns.learned[there], ids.lengths) & (position >= unlearned)
    # slime raises for a turn that is shorter than the generation prompt, and so it does for one that is missing here.
    failed = np.ones(len(turns.start), bool)
    failed[there] = is_assistant & (rest < unlearned)
    without = np.zeros(len(column), bool)
    without[turns.row[failed]] = True
    kept &= ~np.repeat(without[turns.row[there]], ids.lengths)
    lengths = np.zeros(len(column), np.int64)
    np.add.at(lengths, turns.row[there], np.where(without[turns.row[there]], 0, rest))
    return with_loss(Ragged(ids.values[kept], offsets_of(lengths)), learned[kept])


def _check_metadata(column: pa.ChunkedArray) -> None:
    """Checks that no tools are in a column of metadata, where slime looks for them."""
    kind = column.type
    plain = pa.types.is_null(kind) or (pa.types.is_struct(kind) and kind.get_field_index("tools") < 0)
    if not plain:
        raise DataError(f"metadata of type {kind!s:.80} may have tools")


class _MessageTurns:
    """The t turns of n conversations.

    Args:
        column: (n,) conversations.
        joins_tools: consecutive messages of tools are one turn.

    Attributes:
        start: (t,) number of the first message.
        size: (t,) number of messages.
        row: (t,) row.
        opening: (t,) whether it is the first of its row.
        learned: (t,) whether `step_loss_mask` of the first message allows loss.
    """

    def __init__(self, column: pa.Array, joins_tools: bool):
        self._messages = column.flatten()
        counts = np.asarray(pc.list_value_length(column), np.int64)
        row = np.repeat(np.arange(len(counts)), counts)
        role = self._messages.field("role").cast(pa.large_string())
        is_tool = np.asarray(pc.fill_null(pc.equal(role, "tool"), False), bool)
        first = np.ones(len(row), bool)
        first[1:] = row[1:] != row[:-1]
        starts = first.copy()
        if joins_tools:
            starts[1:] |= ~(is_tool[1:] & is_tool[:-1])
        else:
            starts[:] = True
        self.start = np.flatnonzero(starts)
        self.size = np.diff(np.append(self.start, len(row)))
        self.row, self.opening = row[self.start], first[self.start]
        self._role = role.take(pa.array(self.start))
        self.learned = self._step_mask()

    def _step_mask(self) -> np.ndarray[Any, Any]:
        index = self._messages.type.get_field_index("step_loss_mask")
        if index < 0:
            return np.ones(len(self.start), bool)
        try:
            mask = self._messages.field(index).cast(pa.float64()).take(pa.array(self.start))
        except pa.ArrowException as error:
            raise DataError(f"step_loss_mask is not a number: {error}") from error
        # A null is not 1: slime's default is for messages without the key.
        return np.asarray(pc.fill_null(pc.equal(mask, 1.0), False), bool)

    def is_role(self, name: str) -> np.ndarray[Any, Any]:
        """(t,) whether the first message has a role."""
        return np.asarray(pc.fill_null(pc.equal(self._role, name), False), bool)

    def conversations(self, with_prefix: bool) -> pa.Array:
        """(t,) conversations of one turn.

        Args:
            with_prefix: with the message of the user after the first turn of each row and before the others.
        """
        if not with_prefix:
            offsets = np.append(self.start, len(self._messages))
            return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), self._messages)
        prefix = pa.array([_PREFIX], self._messages.type)
        lengths = self.size + 1
        offsets = offsets_of(lengths)
        # The turn's messages and one more, whose number becomes that of the prefix.
        numbers = ranges(self.start - ~self.opening, lengths, offsets)
        numbers[np.where(self.opening, offsets[1:] - 1, offsets[:-1])] = len(self._messages)
        values = pa.concat_arrays([self._messages, prefix]).take(pa.array(numbers))
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)

    def tools(self, samples: SampleColumns) -> list[str | None]:
        """(t,) tools as JSON text. Only the first turn of a row is rendered with them."""
        texts = [json.dumps(sample.metadata["tools"]) for sample in samples.take(np.arange(len(samples)))]
        return [
            texts[row] if first else None
            for row, first in zip(self.row.tolist(), self.opening.tolist(), strict=True)
        ]  # fmt: skip
