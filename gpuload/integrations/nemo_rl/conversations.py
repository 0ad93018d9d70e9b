"""Tokenized conversations, message by message, as NeMo-RL trains on them. Nothing here needs NeMo-RL.

NeMo-RL renders the beginning of a conversation up to each message. What differs from the text up to the message before
is the message's own text, which is encoded by itself. Here all beginnings of many conversations are rendered as one
column, and all these texts are encoded as one.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from gpuload.cache.token_store import DiskTokens
from gpuload.core.arrays import Ragged, RowNumbers, common_prefixes, mask_of, offsets_of, row_number
from gpuload.core.errors import DataError, OptionError, TokenizerError
from gpuload.engines.host.render import HostText
from gpuload.engines.host.texts import gather
from gpuload.integrations.core import runs
from gpuload.integrations.messages.cache import StoredRows
from gpuload.integrations.messages.rows import MessageRows, SharedRows, each_part, row_of, shared
from gpuload.integrations.messages.templates import Arguments, Templates, render
from gpuload.integrations.nemo_rl.rows import check_tokenizer, datum_spec
from gpuload.kinds.chats.formats import messages_column
from gpuload.sources.columns import Columns

_AT_ONCE = 20_000
"""Messages whose beginnings one thread renders at a time: a conversation is written once for each of its messages."""


@dataclass(frozen=True)
class MessageSettings:
    """NeMo-RL's settings in the section `data`."""

    add_bos: bool = True  # the first message begins with the tokenizer's BOS token
    add_eos: bool = True  # the last one ends with its EOS token
    add_generation_prompt: bool = False  # messages of users and tools end with a generation prompt


@dataclass(frozen=True)
class NemoConversations:
    """A map-style dataset of n conversations, of the N that were read."""

    task_name: str  # of all rows
    numbers: torch.Tensor  # (n,) int64, which of the N rows it has
    ids: SharedRows | DiskTokens  # N rows, of all messages one after the other; none for rows that NeMo-RL tokenizes
    columns: Columns  # N rows: `texts`, what the template makes of messages, and `sizes`, how many ids each of them has
    chats: "Sequence[Any] | FormattedChats"  # (N,) the messages as NeMo-RL renders them
    raw: Sequence[Any]  # (N,) the rows as they were read
    fallback: Mapping[int, str]  # number of a row that NeMo-RL tokenizes → why

    @classmethod
    def of(
        cls, rows: StoredRows, chats: "Sequence[Any] | FormattedChats", raw: Sequence[Any], name: str, limit: int | None
    ) -> "NemoConversations":
        """The rows of fewer than `limit` tokens, and those that NeMo-RL tokenizes; a `DataError` if none is kept."""
        lengths = rows.ids.lengths
        kept = np.ones(len(lengths), bool) if limit is None else lengths < limit
        kept[list(rows.others)] = True
        if not kept.any():
            raise DataError(f"all {len(lengths):,} conversations have {limit} tokens or more: raise the limit")
        numbers = torch.from_numpy(np.flatnonzero(kept))
        return cls(name, numbers, shared(rows.ids), rows.columns, chats, raw, rows.others)

    @property
    def tokenized(self) -> RowNumbers:
        """The numbers of the rows here that NeMo-RL does not tokenize."""
        return np.setdiff1d(self.numbers.numpy(), list(self.fallback))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        number = int(self.numbers[row_number(idx, len(self))])
        if number in self.fallback:
            return self.raw[number]  # type: ignore[no-any-return]
        table, place = self.columns.place(number)
        (row,) = table.slice(place, 1).to_pylist()
        # Converted once for the row. Not parts of one tensor: each would be pickled with the ids of the whole row.
        ids = row_of(self.ids, number).astype(np.int64)
        parts = [torch.from_numpy(part) for part in np.split(ids, np.cumsum(row["sizes"])[:-1])]
        log = [
            {**message, "content": text, "token_ids": part}
            for message, text, part in zip(self.chats[number], row["texts"], parts, strict=True)
        ]
        return {"task_name": self.task_name, "messages": log}


@dataclass(frozen=True)
class FormattedChats:
    """The messages of rows, made when they are asked for: with a store on disk, none stay in memory."""

    rows: Sequence[Any]  # as NeMo-RL has read them
    others: Container[int]  # rows that NeMo-RL has to tokenize
    prompt: str | None  # formats the first message of the user; None if it stays as it is

    def __getitem__(self, row: int) -> Any:
        return self.formatted(row, self.rows[row]["messages"])

    def formatted(self, row: int, chat: list[Any]) -> list[Any]:
        """The messages of a row, of which `chat` are as they were read."""
        if not self.prompt or row in self.others:
            return chat
        first = next((k for k, message in enumerate(chat) if message["role"] == "user"), 0)
        # As in NeMo-RL, it has role and content only.
        message = {"role": "user", "content": self.prompt.format(chat[first]["content"])}
        return [*chat[:first], message, *chat[first + 1 :]]


def templates_of(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> Templates:
    """The tokenizer with its template and constants for it. A `TokenizerError` as for `gpuload.load`, or if the
    tokenizer encodes texts in its own way."""
    templates = Templates(tokenizer, template_kwargs)
    if not templates.encodes_rendered_text:
        raise TokenizerError("the tokenizer class or apply_chat_template_kwargs change how texts are encoded")
    return templates


def tokenized_conversations(
    chats: Sequence[Sequence[Mapping[str, Any]]],
    tokenizer: Any,
    templates: Templates,
    settings: MessageSettings,
    tools: Mapping[int, Any],
    others: Mapping[int, str],
) -> tuple[MessageRows, pa.Table]:
    """Tokenize n conversations by columns: n rows of ids, and their columns, see `NemoConversations`. `tools` are those
    of some rows, and `others` the rows that NeMo-RL has to tokenize, with the reason."""
    rows = np.setdiff1d(np.arange(len(chats)), list(others))
    sizes = np.array([0 if row in others else len(chat) for row, chat in enumerate(chats)], np.int64)

    def made(part: Sequence[int]) -> tuple[MessageRows, pa.LargeStringArray, RowNumbers]:
        given = [{} if (own := tools.get(row)) is None else {"tools": own} for row in part]
        turns, first = [chats[row] for row in part], offsets_of(sizes[part])
        texts, rendered, failed = _texts(turns, given, templates, settings.add_generation_prompt)
        texts = _with_ends(texts, first, tokenizer, settings)
        ids = templates.ids(texts)
        return MessageRows.of(Ragged(ids.values, ids.offsets[first]), failed, rendered), texts, ids.lengths

    parts = each_part(made, runs(rows.tolist(), sizes[rows], _AT_ONCE))
    joined = MessageRows.joined([part for part, _, _ in parts], rows, others)
    texts = pa.concat_arrays([pa.array([], pa.large_string()), *(text for _, text, _ in parts)])
    lengths = pa.array(np.concatenate([np.zeros(0, np.int64), *(each for _, _, each in parts)]).astype(np.int32))
    there = ~mask_of(joined.fallback, len(chats))
    here = pa.array(np.repeat(there, sizes))
    first = pa.array(offsets_of(np.where(there, sizes, 0)), pa.int64())
    columns = {"texts": texts.filter(here), "sizes": lengths.filter(here)}
    return joined, pa.table({name: pa.LargeListArray.from_arrays(first, each) for name, each in columns.items()})


def _texts(
    chats: Sequence[Any], given: Sequence[Arguments], templates: Templates, generates: bool
) -> tuple[pa.LargeStringArray, HostText, dict[int, str]]:
    """The rule "difference of texts", of NeMo-RL's `get_formatted_message_log`: (m,) the texts of the messages, of each
    beginning without what the one before begins with; the beginnings; and the conversations of which one cannot be
    rendered → why."""
    row = np.repeat(np.arange(len(chats)), [len(chat) for chat in chats])
    beginnings = [chat[: k + 1] for chat in chats for k in range(len(chat))]
    arguments = [
        {**given[of], "add_generation_prompt": generates and chat[-1]["role"] in ("user", "tool")}
        for of, chat in zip(row.tolist(), beginnings, strict=True)
    ]
    rendered = render(messages_column(beginnings), *templates.choose(arguments))
    whole = pc.fill_null(rendered.text, "")
    offsets = np.frombuffer(whole.buffers()[1], np.int64)[: len(whole) + 1]
    data = np.frombuffer(whole.buffers()[2] or b"", np.uint8)[: offsets[-1]]
    same_row = np.append(False, row[1:] == row[:-1])
    begin = offsets[:-1] + np.where(same_row, _shared(data, offsets), 0)
    made_offsets, made = gather(data, begin, offsets[1:], np.arange(len(whole)))
    texts = pa.LargeStringArray.from_buffers(len(whole), pa.py_buffer(made_offsets), pa.py_buffer(made))
    return texts, rendered, {int(row[number]): why for number, why in rendered.rejected.items()}


def _shared(data: np.ndarray[Any, Any], offsets: RowNumbers) -> RowNumbers:
    """(m,) bytes of the characters with which each text and the one before it begin in common; 0 for the first."""
    before = np.maximum(np.arange(len(offsets) - 1) - 1, 0)
    texts = Ragged(data, offsets)
    size = common_prefixes(texts, texts.take(before))
    size[:1] = 0
    # The first byte that differs may be inside of a character: back to its first byte, which is at most 3 before.
    at, end = offsets[:-1], offsets[1:]
    padded = np.append(data, np.uint8(0))
    for _ in range(3):
        inside = (at + size < end) & (padded[np.minimum(at + size, len(data))] & 0xC0 == 0x80)
        size = size - inside
    return size


def _with_ends(
    texts: pa.LargeStringArray, first: RowNumbers, tokenizer: Any, settings: MessageSettings
) -> pa.LargeStringArray:
    """The same texts with BOS and EOS tokens, where they are not there already. `first` (n + 1,) are the numbers of the
    first text of each conversation."""
    bos, eos, nothing = tokenizer.bos_token, tokenizer.eos_token, pa.scalar("", pa.large_string())
    if settings.add_bos and bos is not None:
        wanted = mask_of(first[:-1], len(texts)) & ~np.asarray(pc.starts_with(texts, bos), bool)
        start = pc.if_else(pa.array(wanted), pa.scalar(bos, pa.large_string()), nothing)
        texts = pc.binary_join_element_wise(start, texts, nothing)
    if settings.add_eos and eos is not None:
        wanted = mask_of(first[1:] - 1, len(texts)) & ~np.asarray(pc.ends_with(pc.utf8_rtrim(texts, "\n"), eos), bool)
        end = pc.if_else(pa.array(wanted), pa.scalar(eos, pa.large_string()), nothing)
        texts = pc.binary_join_element_wise(texts, end, nothing)
    return texts


@dataclass(frozen=True)
class ConversationProcessor:
    """NeMo-RL's processor for SFT, for rows that are tokenized already."""

    tokenizer: tuple[Any, ...]  # `identity` of the one that has made the ids
    settings: MessageSettings  # that the ids were made with
    own: Any = None  # NeMo-RL's processor, for rows that are not tokenized

    def __call__(
        self,
        datum_dict: Mapping[str, Any],
        task_data_spec: Any,
        tokenizer: Any,
        max_seq_length: int,
        idx: int,
        **settings: bool,
    ) -> dict[str, Any]:
        """Returns a DatumSpec, as NeMo-RL's processor does; an `OptionError` if NeMo-RL uses another tokenizer or other
        settings."""
        check_tokenizer(tokenizer, self.tokenizer)
        if replace(self.settings, **settings) != self.settings:
            name = next(name for name, value in settings.items() if value != getattr(self.settings, name))
            raise OptionError(
                f"data.{name}={settings[name]}, but conversations were tokenized with {not settings[name]}: set "
                f"+data.train.{name}=${{data.{name}}}"
            )
        log = datum_dict["messages"]
        if not log or "token_ids" not in log[0]:
            made: dict[str, Any] = self.own(datum_dict, task_data_spec, tokenizer, max_seq_length, idx, **settings)
            return made
        return datum_spec(log, max_seq_length, idx)
