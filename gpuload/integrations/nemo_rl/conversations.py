"""Tokenized conversations, message by message, as NeMo-RL trains on them. Nothing here needs NeMo-RL.

NeMo-RL renders the beginning of a conversation up to each message. What differs from the text up to the message before
is the message's own text, which is encoded by itself. Here all beginnings of many conversations are rendered as one
column, and all these texts are encoded as one.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from gpuload.core.arrays import Ragged, RowNumbers, common_prefixes, offsets_of
from gpuload.core.errors import DataError, OptionError, TokenizerError
from gpuload.engines.host.texts import gather
from gpuload.integrations.core import runs
from gpuload.integrations.messages.rows import each_part
from gpuload.integrations.messages.templates import Arguments, Templates, render
from gpuload.integrations.nemo_rl.rows import check_tokenizer
from gpuload.kinds.chats.formats import messages_column

_AT_ONCE = 20_000
"""Messages whose beginnings one thread renders at a time: a conversation is written once for each of its messages."""


@dataclass(frozen=True)
class MessageSettings:
    """NeMo-RL's settings in the section `data`.

    Attributes:
        add_bos: the first message begins with the tokenizer's BOS token.
        add_eos: the last one ends with its EOS token.
        add_generation_prompt: messages of users and tools end with a generation prompt.
    """

    add_bos: bool = True
    add_eos: bool = True
    add_generation_prompt: bool = False


@dataclass(frozen=True)
class NemoConversations:
    """A map-style dataset of n conversations with m messages in all.

    Attributes:
        task_name: of all rows.
        numbers: (n,) int64, their rows in the data that was read.
        first: (n + 1,) int64, number of the first message of each row.
        starts: (m + 1,) int64, where the ids of messages begin.
        ids: (starts[-1],) int32.
        texts: (m,) what the template makes of messages.
        messages: (m,) as they were read.
        fallback: number of a row that has no messages here, because NeMo-RL tokenizes it → why.
        raw: number of such a row → the row as it was read.
    """

    task_name: str
    numbers: torch.Tensor
    first: torch.Tensor
    starts: torch.Tensor
    ids: torch.Tensor
    texts: pa.LargeStringArray
    messages: Sequence[Mapping[str, Any]]
    fallback: Mapping[int, str]
    raw: Mapping[int, Any] = field(default_factory=dict)

    @property
    def tokenized(self) -> RowNumbers:
        """The rows here that NeMo-RL does not tokenize."""
        return np.flatnonzero(np.diff(self.first.numpy()))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        if not -len(self) <= idx < len(self):
            raise IndexError(f"row {idx} of {len(self)}")
        low, high = self.first[idx % len(self) :][:2].tolist()
        if low == high:
            return self.raw[int(self.numbers[idx])]  # type: ignore[no-any-return]
        starts = self.starts[low : high + 1].tolist()
        # Converted once for the row. Not parts of one tensor: each would be pickled with the ids of the whole row.
        ids = self.ids[starts[0] : starts[-1]].numpy().astype(np.int64)
        parts = [
            torch.from_numpy(ids[start - starts[0] : end - starts[0]]) for start, end in itertools.pairwise(starts)
        ]
        texts = self.texts.slice(low, high - low).to_pylist()
        log = [
            {**message, "content": text, "token_ids": part}
            for message, text, part in zip(self.messages[low:high], texts, parts, strict=True)
        ]
        return {"task_name": self.task_name, "messages": log}


def tokenized_conversations(
    chats: Sequence[Sequence[Mapping[str, Any]]],
    task_name: str,
    tokenizer: Any,
    template_kwargs: Mapping[str, Any],
    settings: MessageSettings,
    limit: int | None,
    tools: Mapping[int, Any] | None = None,
    others: Mapping[int, Any] | None = None,
) -> NemoConversations:
    """Tokenize conversations by columns, and drop those of `limit` tokens or more.

    Args:
        chats: n conversations.
        task_name: of all rows.
        tokenizer: a transformers tokenizer.
        template_kwargs: constants for the chat template.
        settings: NeMo-RL's.
        limit: None to drop none.
        tools: row → its tools; others have none.
        others: row → why NeMo-RL has to tokenize it.

    Raises:
        DataError: all conversations were dropped.
        TokenizerError: as for `gpuload.load`, or the tokenizer encodes texts in its own way.
    """
    templates = Templates(tokenizer, template_kwargs)
    if not templates.encodes_rendered_text:
        raise TokenizerError("the tokenizer class or apply_chat_template_kwargs change how texts are encoded")
    fallback = dict(others or {})
    rows = np.setdiff1d(np.arange(len(chats)), list(fallback))
    sizes = np.array([0 if row in fallback else len(chat) for row, chat in enumerate(chats)], np.int64)

    def made(part: Sequence[int]) -> tuple[pa.LargeStringArray, Ragged]:
        given = [{} if (own := (tools or {}).get(row)) is None else {"tools": own} for row in part]
        turns = [chats[row] for row in part]
        texts, failed = _texts(turns, given, templates, settings.add_generation_prompt)
        fallback.update((part[row], why) for row, why in failed.items())
        texts = _with_ends(texts, offsets_of(sizes[part]), tokenizer, settings)
        return texts, templates.ids(texts)

    parts = each_part(made, runs(rows.tolist(), sizes[rows], _AT_ONCE))
    texts = pa.concat_arrays([pa.array([], pa.large_string()), *(text for text, _ in parts)])
    ids = Ragged.concatenate([part for _, part in parts])
    kept = np.ones(len(chats), bool)
    if limit is not None:
        kept = np.diff(ids.offsets[offsets_of(sizes)]) < limit
    kept[list(fallback)] = True
    if not kept.any():
        raise DataError(f"all {len(chats):,} conversations have {limit} tokens or more: raise the limit")
    has_messages = kept.copy()
    has_messages[list(fallback)] = False
    messages = [message for row in rows.tolist() for message in chats[row]]
    here = np.flatnonzero(np.repeat(has_messages, sizes))
    if len(here) < len(messages):
        ids, texts, messages = ids.take(here), texts.take(pa.array(here)), [messages[k] for k in here.tolist()]
    return NemoConversations(
        task_name,
        torch.from_numpy(np.flatnonzero(kept)),
        torch.from_numpy(offsets_of(np.where(has_messages, sizes, 0)[kept])),
        torch.from_numpy(np.array(ids.offsets)),
        torch.from_numpy(np.array(ids.values)),
        texts,
        messages,
        fallback,
    )


def _texts(
    chats: Sequence[Any], given: Sequence[Arguments], templates: Templates, generates: bool
) -> tuple[pa.LargeStringArray, dict[int, str]]:
    """The rule "difference of texts", of NeMo-RL's `get_formatted_message_log`.

    Returns:
        (m,) the texts of the messages: of each beginning without what the one before begins with. And the conversations
        of which one cannot be rendered → why.
    """
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
    return texts, {int(row[number]): why for number, why in rendered.rejected.items()}


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
    """The same texts with BOS and EOS tokens, where they are not there already.

    Args:
        first: (n + 1,) number of the first text of each conversation.
    """
    bos, eos, nothing = tokenizer.bos_token, tokenizer.eos_token, pa.scalar("", pa.large_string())
    if settings.add_bos and bos is not None:
        wanted = np.zeros(len(texts), bool)
        wanted[first[:-1]] = True
        wanted &= ~np.asarray(pc.starts_with(texts, bos), bool)
        start = pc.if_else(pa.array(wanted), pa.scalar(bos, pa.large_string()), nothing)
        texts = pc.binary_join_element_wise(start, texts, nothing)
    if settings.add_eos and eos is not None:
        wanted = np.zeros(len(texts), bool)
        wanted[first[1:] - 1] = True
        wanted &= ~np.asarray(pc.ends_with(pc.utf8_rtrim(texts, "\n"), eos), bool)
        end = pc.if_else(pa.array(wanted), pa.scalar(eos, pa.large_string()), nothing)
        texts = pc.binary_join_element_wise(texts, end, nothing)
    return texts


@dataclass(frozen=True)
class ConversationProcessor:
    """NeMo-RL's processor for SFT, for rows that are tokenized already.

    Attributes:
        tokenizer: `identity` of the one that has made the ids.
        settings: that the ids were made with.
        own: NeMo-RL's processor, for rows that are not tokenized.
    """

    tokenizer: tuple[Any, ...]
    settings: MessageSettings
    own: Any = None

    def __call__(
        self,
        datum_dict: Mapping[str, Any],
        task_data_spec: Any,
        tokenizer: Any,
        max_seq_length: int,
        idx: int,
        **settings: bool,
    ) -> dict[str, Any]:
        """Returns a DatumSpec, as NeMo-RL's processor does.

        Raises:
            OptionError: NeMo-RL uses another tokenizer or other settings.
        """
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
        length = sum(len(message["token_ids"]) for message in log)
        too_long = length >= max_seq_length
        if too_long:
            most = min(4, max_seq_length // len(log))
            log = [{**message, "token_ids": message["token_ids"][:most]} for message in log]
        return {
            "message_log": log,
            "length": length,
            "extra_env_info": None,
            "loss_multiplier": 0.0 if too_long else 1.0,
            "idx": idx,
        }
