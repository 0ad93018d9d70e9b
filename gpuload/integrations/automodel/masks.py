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

from gpuload.core.arrays import Ragged, RowNumbers, common_prefixes
from gpuload.core.options import NO_LIMIT, LossOn
from gpuload.integrations.core import runs
from gpuload.kinds.chats.formats import messages_column
from gpuload.kinds.chats.load import load_chats
from gpuload.sources.types import as_json

_AT_ONCE = 200_000
"""Conversations of a load, so that not all beginnings of all rows are in memory."""


@dataclass(frozen=True)
class Chat:
    """One conversation.

    Attributes:
        row: its number in the dataset.
        messages: as the template gets them.
        tools: None if it has none.
    """

    row: int
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None

    @property
    def answers(self) -> list[int]:
        """Numbers of the messages of the assistant."""
        return [k for k, message in enumerate(self.messages) if message["role"] == "assistant"]


@dataclass(frozen=True)
class Marked:
    """Tokenized conversations.

    Attributes:
        rows: (n,) their numbers in the dataset, ascending.
        ids: n rows of token ids.
        mask: (ids.offsets[-1],) bool, which of them have loss.
    """

    rows: RowNumbers
    ids: Ragged
    mask: np.ndarray[Any, np.dtype[np.bool_]]


def marked(chats: Sequence[Chat], tokenizer: Any, blocks: bool, options: Mapping[str, Any]) -> Marked:
    """Tokenize conversations. Those that Automodel has to prepare itself are missing in the result.

    Args:
        chats: in the order of the dataset.
        tokenizer: a transformers tokenizer with one chat template.
        blocks: whether the template has `{% generation %}` blocks.
        options: of `load_chats`.

    Raises:
        GpuloadError: as `load_chats`.
    """
    if blocks:
        return _loaded(chats, tokenizer, "assistant", options)
    # Without an answer, Automodel raises an error. Templates are not asked to render the beginning without messages.
    chats = [chat for chat in chats if chat.answers and chat.answers[0]]
    sizes = np.array([1 + 2 * len(chat.answers) for chat in chats], np.int64)
    parts = [_by_lengths(part, tokenizer, options) for part in runs(chats, sizes, _AT_ONCE)]
    ids = Ragged.concatenate([part.ids for part in parts])
    none = [np.zeros(0, np.int64)], [np.zeros(0, bool)]
    rows, mask = [part.rows for part in parts], [part.mask for part in parts]
    return Marked(np.concatenate(none[0] + rows), ids, np.concatenate(none[1] + mask))


def _by_lengths(chats: Sequence[Chat], tokenizer: Any, options: Mapping[str, Any]) -> Marked:
    """The mask of templates without blocks."""
    n = len(chats)
    # Beginnings: the first `stops` messages of chat `of`. Two of them for each answer, where it begins and ends; one
    # that ends a conversation is the conversation itself.
    cuts = [(c, k) for c, chat in enumerate(chats) for a in chat.answers for k in (a, a + 1)]
    wanted = list(dict.fromkeys(cut for cut in cuts if cut[1] < len(chats[cut[0]].messages)))
    place = {cut: n + number for number, cut in enumerate(wanted)}
    all_chats = [Chat(c, chat.messages, chat.tools) for c, chat in enumerate(chats)]
    all_chats += [Chat(place[c, k], chats[c].messages[:k], chats[c].tools) for c, k in wanted]
    loaded = _loaded(all_chats, tokenizer, "all", options)
    store = np.full(len(all_chats), -1)
    store[loaded.rows] = np.arange(len(loaded.rows))

    of = np.array([c for c, _ in cuts])
    part = store[[place.get(cut, cut[0]) for cut in cuts]]  # of each cut
    whole = store[of]
    good = store[:n] >= 0
    good[of[part < 0]] = False
    known = np.flatnonzero(good[of])  # cuts of chats that are complete; their pairs stay together
    of, part, whole = of[known], part[known], whole[known]
    good[of[~_begins(loaded.ids, part, whole, tokenizer.eos_token_id)]] = False

    lengths = loaded.ids.lengths
    stops = np.minimum(lengths[part], lengths[whole])
    starts, ends = stops[::2], np.maximum(stops[::2], stops[1::2])
    # Counts up where a span begins and down where it ends: inside of one the sum is positive.
    base = loaded.ids.offsets[whole[::2]]
    steps = np.zeros(len(loaded.ids.values) + 1, np.int32)
    np.add.at(steps, base + starts, 1)
    np.add.at(steps, base + ends, -1)
    inside = Ragged(np.cumsum(steps[:-1]) > 0, loaded.ids.offsets)
    kept = store[:n][good]
    rows = np.array([chat.row for chat in chats])[good]
    return Marked(rows, loaded.ids.take(kept), inside.take(kept).values)


def _begins(ids: Ragged, part: RowNumbers, whole: RowNumbers, eos: int | None) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether rows of ids begin other rows. As in Automodel, an EOS token at the end may be replaced."""
    same, lengths = common_prefixes(ids.take(part), ids.take(whole)), ids.lengths
    size = lengths[part]
    last = ids.values[np.maximum(ids.offsets[part + 1] - 1, 0)]
    replaced = (size > 1) & (same == size - 1) & (size <= lengths[whole])
    ended = np.zeros(len(size), bool) if eos is None else last == eos
    begins: np.ndarray[Any, np.dtype[np.bool_]] = (same == size) | (replaced & ended)
    return begins


def _loaded(chats: Sequence[Chat], tokenizer: Any, loss_on: LossOn, options: Mapping[str, Any]) -> Marked:
    columns = {"messages": messages_column([list(chat.messages) for chat in chats])}
    if any(chat.tools for chat in chats):
        columns["tools"] = as_json([chat.tools for chat in chats])
    table = pa.table(columns | {"row": pa.array([chat.row for chat in chats], pa.int64())})
    given: dict[str, Any] = {"format": "messages", "loss_on": loss_on, "max_length": NO_LIMIT, "store": "memory"}
    loaded = load_chats(table, tokenizer, **given, **options)
    rows = loaded.columns["row"].to_numpy()
    return Marked(rows, loaded.tokens, loaded.loss_mask.values)
