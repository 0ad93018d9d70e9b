"""Conversations as token ids with Automodel's loss mask, by columns. Nothing here needs Automodel.

    template with {% generation %} blocks   the mask of transformers, as `load_chats` makes it
    other templates                         Automodel also encodes the conversation up to each message of an assistant,
                                            and up to its end: the tokens between these two lengths have loss

The second mask includes the header of an assistant's turn and its end marker, unlike that of `load_chats`, which has
the answer only. Conversations that end earlier are therefore rows of the same load. Automodel raises an error if their
ids are not the first ids of the whole conversation. Such rows, and all that cannot be tokenized, are left out here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged, RowNumbers, common_prefixes, offsets_of
from gpuload.core.marks import split, with_loss
from gpuload.core.options import NO_LIMIT, LossOn
from gpuload.integrations.core import runs
from gpuload.integrations.messages.rows import MessageRows
from gpuload.kinds.chats.formats import messages_column
from gpuload.kinds.load_chats import load_chats
from gpuload.sources.types import as_json

_AT_ONCE = 200_000  # conversations of a load, so that not all beginnings of all rows are in memory
_WHY = "it cannot be tokenized by columns, or no token has loss"


@dataclass(frozen=True)
class Chat:
    """One conversation."""

    row: int  # its number in the dataset
    messages: Sequence[Mapping[str, Any]]  # as the template gets them
    tools: Sequence[Any] | None = None  # None if it has none

    @property
    def answers(self) -> list[int]:
        """Numbers of the messages of the assistant."""
        return [k for k, message in enumerate(self.messages) if message["role"] == "assistant"]


def table_of(chats: Sequence[Chat]) -> pa.Table:
    """Conversations as rows, with a column `tools` if some have any."""
    columns = {"messages": messages_column([list(chat.messages) for chat in chats])}
    if any(chat.tools for chat in chats):
        columns["tools"] = as_json([chat.tools for chat in chats])
    return pa.table(columns)


def marked(chats: Sequence[Chat], tokenizer: Any, blocks: bool, options: Mapping[str, Any]) -> MessageRows:
    """Tokenize conversations, with options and errors of `load_chats`. The template has `{% generation %}` blocks or
    not. Returns a row for each, without ids for those that Automodel has to prepare itself."""
    if blocks:
        ids = _loaded(chats, tokenizer, "assistant", options)
        return MessageRows(ids, dict.fromkeys(np.flatnonzero(ids.lengths == 0).tolist(), _WHY))
    # Without an answer, Automodel raises an error. Templates are not asked to render the beginning without messages.
    usable = [k for k, chat in enumerate(chats) if chat.answers and chat.answers[0]]
    sizes = np.array([1 + 2 * len(chats[k].answers) for k in usable], np.int64)
    some = runs([chats[k] for k in usable], sizes, _AT_ONCE)
    parts = [_by_lengths(part, tokenizer, options) for part in some]
    rows = np.array(usable, np.int64)
    return MessageRows.joined(parts, rows, dict.fromkeys(np.setdiff1d(np.arange(len(chats)), rows).tolist(), _WHY))


def _by_lengths(chats: Sequence[Chat], tokenizer: Any, options: Mapping[str, Any]) -> MessageRows:
    """The rule "lengths of beginnings", of Automodel's `_build_multiturn_assistant_mask`: templates without blocks."""
    n = len(chats)
    # Beginnings: the first `k` messages of chat `c`. Two of them for each answer, where it begins and ends; one that
    # ends a conversation is the conversation itself.
    cuts = [(c, k) for c, chat in enumerate(chats) for a in chat.answers for k in (a, a + 1)]
    wanted = list(dict.fromkeys(cut for cut in cuts if cut[1] < len(chats[cut[0]].messages)))
    place = {cut: n + number for number, cut in enumerate(wanted)}
    pieces = [*chats, *(Chat(chats[c].row, chats[c].messages[:k], chats[c].tools) for c, k in wanted)]
    ids, _ = split(_loaded(pieces, tokenizer, "all", options))
    lengths = ids.lengths
    whole, part = np.array([c for c, _ in cuts]), np.array([place.get(cut, cut[0]) for cut in cuts])
    good = (lengths[part] > 0) & (lengths[whole] > 0) & _begins(ids, part, whole, tokenizer.eos_token_id)
    stops = np.minimum(lengths[part], lengths[whole])
    starts, ends = stops[::2], np.maximum(stops[::2], stops[1::2])
    # Counts up where a span begins and down where it ends: inside of one the sum is positive.
    base = ids.offsets[whole[::2]]
    steps = np.zeros(len(ids.values) + 1, np.int32)
    np.add.at(steps, base + starts, 1)
    np.add.at(steps, base + ends, -1)
    rows = with_loss(ids, np.cumsum(steps[:-1]) > 0).take(np.arange(n))
    return MessageRows(rows, dict.fromkeys(whole[~good].tolist(), _WHY))


def _begins(ids: Ragged, part: RowNumbers, whole: RowNumbers, eos: int | None) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether rows of ids begin other rows. As in Automodel, an EOS token at the end may be replaced."""
    same, lengths = common_prefixes(ids.take(part), ids.take(whole)), ids.lengths
    size = lengths[part]
    last = ids.values[np.maximum(ids.offsets[part + 1] - 1, 0)]
    replaced = (size > 1) & (same == size - 1) & (size <= lengths[whole])
    ended = np.zeros(len(size), bool) if eos is None else last == eos
    begins: np.ndarray[Any, np.dtype[np.bool_]] = (same == size) | (replaced & ended)
    return begins


def _loaded(chats: Sequence[Chat], tokenizer: Any, loss_on: LossOn, options: Mapping[str, Any]) -> Ragged:
    """(n,) rows of ids with bits, none for those that cannot be tokenized, or have no token with loss."""
    table = table_of(chats).append_column("row", pa.array(np.arange(len(chats))))
    given: dict[str, Any] = {"format": "messages", "loss_on": loss_on, "max_length": NO_LIMIT, "store": "memory"}
    loaded = load_chats(table, tokenizer, **given, **options)
    ids, lengths = with_loss(loaded.tokens, loaded.loss_mask.values), np.zeros(len(chats), np.int64)
    lengths[loaded.columns["row"].to_numpy()] = ids.lengths
    return Ragged(ids.values, offsets_of(lengths))
