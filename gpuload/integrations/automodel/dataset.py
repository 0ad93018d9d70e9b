"""ChatDataset for NeMo Automodel: its own class, whose rows are tokenized once, when it is made.

    1. Automodel reads the rows. Its own functions make messages of each.
    2. All conversations are tokenized by columns (`masks.py`), or found in the token cache.
    3. Automodel prepares a sample of the rows itself, and they must be equal.
    4. A row is made of its ids and labels when it is asked for, as Automodel does.

A row that is not tokenized in step 2 is prepared by Automodel when it is asked for: with the same result, or the same
error. If settings or the tokenizer are not supported, or the sample differs, that is what happens to all rows; also if
a private part of Automodel has moved. The sample has rows of every shape if Automodel's code is not known.
"""

import copy
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from nemo_automodel.components.datasets.llm import ChatDataset as StockDataset

from gpuload.cache.token_store import DiskTokens
from gpuload.core.arrays import Ragged
from gpuload.core.errors import GpuloadError
from gpuload.core.marks import IDS, LOSS
from gpuload.core.options import Options
from gpuload.engines.host.packs import IGNORED
from gpuload.integrations.automodel.contract import KNOWN, NAMES
from gpuload.integrations.automodel.masks import Chat, marked, table_of
from gpuload.integrations.comparison import compare, sampled
from gpuload.integrations.core import LOAD_OPTIONS, imported, log_fallback, log_own_rows, release_of, settings_under
from gpuload.integrations.known_code import change
from gpuload.integrations.messages.cache import RowCache, Rule, identified
from gpuload.integrations.messages.rows import MessageRows, SharedRows, row_of, shared
from gpuload.reference.reference import Reference

STOCK, PROBLEM = imported(NAMES)

OPTIONS = (*LOAD_OPTIONS, "store")  # keys of `dataset.gpuload`, options of `load_chats`
_OF_LOADS = ("device", "gpu_memory_limit", "verify", "progress")

_TRUNCATED = (True, "longest_first", "only_first")
_WHOLE = (False, "do_not_truncate")
_UNPADDED = (False, True, "do_not_pad", "longest")  # a dataset has no batches, so "longest" is the row's own length

logger = logging.getLogger("gpuload.integrations.automodel")


class AutomodelChatDataset(StockDataset):  # type: ignore[misc]
    """Automodel's `ChatDataset`. Conversations are tokenized once, by columns.

    Args:
        path_or_dataset_id, tokenizer, **settings: as for Automodel's class.
        gpuload: options of `gpuload.load_chats`: `device`, `gpu_memory_limit`, `verify`, `progress`, `token_cache`,
            `token_cache_bytes` and `store`.

    Raises:
        OptionError: an unknown key in `gpuload`.
    """

    def __init__(self, path_or_dataset_id: Any, tokenizer: Any, *, gpuload: Any = None, **settings: Any) -> None:
        options = settings_under("dataset.gpuload", gpuload, OPTIONS)
        super().__init__(path_or_dataset_id, tokenizer, **settings)
        self._rows: SharedRows | DiskTokens | None = None
        self._name = f"{path_or_dataset_id!s:.200}"
        self._pads_with_eos = self.pad_token_id == self.tokenizer.eos_token_id  # slow to ask for each row
        why = _unsupported(self)
        if why is None:
            try:
                why = self._tokenize(options)
            except GpuloadError as error:
                why = str(error)
        if why is not None:
            self._rows = None
            log_fallback(logger, "Automodel's ChatDataset", why)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        made = self._prepared(idx) if isinstance(idx, int) and -len(self) <= idx < len(self) else None
        return super().__getitem__(idx) if made is None else made

    def _prepared(self, idx: int) -> dict[str, Any] | None:
        """A row as Automodel makes it of ids and mask; None if it has to do that itself."""
        if self._rows is None:
            return None
        tokens = row_of(self._rows, idx % len(self))
        if not len(tokens):
            return None
        ids, labels = tokens & IDS, np.where(tokens & LOSS, tokens & IDS, IGNORED)
        if self.truncation in _TRUNCATED and len(ids) > self.seq_length:
            if self.tokenizer.truncation_side != "right":
                return None
            ids, labels = ids[: self.seq_length], labels[: self.seq_length]
        if self.unshifted or self.padding == "max_length":
            row = self._packaged(ids.tolist(), (labels != IGNORED).tolist())
        else:
            # Automodel takes padding tokens at the end for padding; if padding is the EOS token, all but the first.
            content = len(ids)
            while content and ids[content - 1] == self.pad_token_id:
                content -= 1
            if self._pads_with_eos:
                content = min(content + 1, len(ids))
            content = min(max(content - 1, 0), len(ids) - 1)
            row = {
                "input_ids": ids[:-1].tolist(),
                "labels": labels[1:].tolist(),
                "attention_mask": [1] * content + [0] * (len(ids) - 1 - content),
                "___PAD_TOKEN_IDS___": {"input_ids": self.pad_token_id, "labels": IGNORED, "attention_mask": 0},
            }
        if self.mask_history:
            name, ignored = ("loss_mask", 0) if self.unshifted else ("labels", IGNORED)
            self._keep_last_supervised_run(row[name], ignored)
        return row

    def _packaged(self, ids: list[int], mask: list[bool]) -> dict[str, Any]:
        """A row by Automodel's function, padded first as the tokenizer pads it."""
        missing = self.seq_length - len(ids) if self.padding == "max_length" else 0
        pads, none = [self.tokenizer.pad_token_id] * missing, [False] * missing
        left = self.tokenizer.padding_side == "left"
        row: dict[str, Any] = STOCK["_package_tokenized_example"](
            tokenizer=self.tokenizer,
            input_ids=pads + ids if left else ids + pads,
            assistant_masks=none + mask if left else mask + none,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.pad_token_id,
            seq_length=self.seq_length,
            truncation=self.truncation,
            padding=self.padding,
            unshifted=self.unshifted,
        )
        return row

    def _tokenize(self, options: dict[str, Any]) -> str | None:
        """Fill `_rows`. Returns why Automodel has to prepare all rows; None if it need not."""
        others: dict[int, str] = {}
        chats, content, nbytes = identified(
            self._chats(others), lambda chat: (chat.row, [chat.messages, chat.tools]), others
        )
        tokenizer = _plain(self.tokenizer)
        blocks = STOCK["GENERATION_REGEX"].search(self.tokenizer.chat_template) is not None
        functions = [StockDataset.__getitem__]
        release = release_of("nemo_automodel", "Automodel")
        differs = partial(self._difference, chats, change(release, KNOWN, *functions))
        with RowCache(
            Options.parse(options),
            Reference(tokenizer),
            Rule(release, functions, {"blocks": blocks, "eos_token_id": tokenizer.eos_token_id}),
            name=self._name,
            rows=len(self),
            nbytes=nbytes,
            content=lambda _: content,
        ) as cache:
            loading = {name: value for name, value in options.items() if name in _OF_LOADS}

            def make() -> tuple[MessageRows, None]:
                made = marked(chats, tokenizer, blocks, loading)
                return MessageRows.joined([made], np.array([chat.row for chat in chats], np.int64), others), None

            rows = cache.find_or_make(lambda found: differs(found.ids, found.others), make, logger)
        if isinstance(rows, str):
            return rows
        self._rows = shared(rows.ids)
        return None

    def _chats(self, others: dict[int, str]) -> Iterator[Chat]:
        """The conversations that can be tokenized by columns; `others` gets the reason for each other row."""
        one_system = isinstance(self.tokenizer, STOCK["NeMoAutoTokenizerWithBosEosEnforced"])
        for number, row in enumerate(self.dataset):
            try:
                messages, tools = _messages_of(row)
            except Exception as error:  # Automodel's own, when the row is read
                others[number] = f"{error!s:.100}"
                continue
            if self.mask_reasoning_content and any(message.get("reasoning_content") for message in messages):
                others[number] = "mask_reasoning_content is set, and it has reasoning_content"
            elif one_system and sum(message["role"] == "system" for message in messages) > 1:
                others[number] = "it has several system messages"
            else:
                yield Chat(number, messages, tools)

    def _difference(
        self, chats: Sequence[Chat], changed: str | None, made: Ragged | DiskTokens, others: Mapping[int, str]
    ) -> str | None:
        """Use the ids `made` of all rows, and say how some of them differ from Automodel's, or why there are none.

        `chats` can be tokenized by columns, `others` have to be prepared by Automodel, and `changed` is from
        `known_code.change`.
        """
        self._rows = shared(made)
        log_own_rows(logger, "Automodel", Counter(others.values()), len(self))
        there = np.flatnonzero(made.lengths)
        if not len(there):
            return "no row can be tokenized by columns"
        sample = sampled(
            made.lengths[there], changed, lambda: table_of([chat for chat in chats if chat.row not in others])
        )
        theirs = super().__getitem__
        return compare(there[sample].tolist(), self._prepared, theirs, changed, logger=logger, trainer="Automodel")


def _unsupported(dataset: AutomodelChatDataset) -> str | None:
    """Why Automodel has to prepare all rows; None if it need not."""
    if PROBLEM is not None:
        return PROBLEM
    if not len(dataset):
        return "it has no rows"
    if not isinstance(dataset.tokenizer.chat_template, str):
        return "the tokenizer has several chat templates"
    if dataset.mask_generation_prompt:
        return "mask_generation_prompt is set"
    if dataset.truncation not in (*_TRUNCATED, *_WHOLE):
        return f"truncation={dataset.truncation!r} is not supported"
    if dataset.padding not in (*_UNPADDED, "max_length"):
        return f"padding={dataset.padding!r} is not supported"
    if dataset.seq_length is None and (dataset.truncation in _TRUNCATED or dataset.padding == "max_length"):
        return "rows are truncated or padded without seq_length"
    return None


def _plain(tokenizer: Any) -> Any:
    """The tokenizer without Automodel's class around it.

    For chat templates that class only rejects several system messages, and merges the system message into the first
    one of the user where the template rejects it. Such rows are prepared by Automodel; for others, it changes nothing.
    """
    if not isinstance(tokenizer, STOCK["NeMoAutoTokenizerWithBosEosEnforced"]):
        return tokenizer
    plain = copy.copy(tokenizer)
    plain.__class__ = vars(plain).pop("_base_class")  # which says nothing about ids, but no digest could identify it
    return plain


def _messages_of(row: Any) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Messages and tools of a row, by Automodel's functions, which may raise anything."""
    messages = row.get("messages")
    if messages is None:
        messages = STOCK["_conversations_to_messages"](row["conversations"])
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = json.loads(tools)
    if not isinstance(messages, list) or not isinstance(tools, list | None):
        raise ValueError("it has no list of messages, or tools that are not a list")
    return STOCK["_normalize_messages"](messages), tools or None
