"""Datasets for NeMo-RL: its own classes, whose rows are tokenized once, before workers are started.

    1. NeMo-RL reads the rows, makes messages of them, and splits off rows for validation.
    2. `set_processor`, which it calls last, tokenizes all rows by columns and drops those that are too long.
    3. NeMo-RL's processor makes a sample of the rows itself, and they must be equal.

For SFT, ids and texts of an earlier start are found in the token cache, and compared as if they had been made.

Two of its processors are replaced: that for problems with an answer, and that for SFT. With others, NeMo-RL prepares
all rows; also if a part of it has moved. The sample has rows of every shape if the processor's code is not known.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from nemo_rl.data.datasets.response_datasets import OpenAIFormatDataset, ResponseDataset

from gpuload.cache.token_store import DiskTokens
from gpuload.core.errors import OptionError, TokenizerError
from gpuload.core.options import NO_LIMIT, Options, plain
from gpuload.integrations.comparison import compare, sampled
from gpuload.integrations.core import (
    LOAD_OPTIONS,
    check_switches,
    imported,
    log_fallback,
    log_ignored,
    log_own_rows,
    release_of,
    settings_under,
)
from gpuload.integrations.known_code import change
from gpuload.integrations.messages.cache import RowCache, Rule, StoredRows, identified
from gpuload.integrations.nemo_rl.contract import KNOWN, NAMES
from gpuload.integrations.nemo_rl.conversations import (
    ConversationProcessor,
    FormattedChats,
    MessageSettings,
    NemoConversations,
    templates_of,
    tokenized_conversations,
)
from gpuload.integrations.nemo_rl.rows import PromptProcessor, TokenizedPrompts, identity, tokenized
from gpuload.kinds.chats.formats import messages_column

STOCK, PROBLEM = imported(NAMES)

OPTIONS = (*LOAD_OPTIONS, "store")  # keys of the section `gpuload`, options of `gpuload.load`
_OF_ROWS = ("token_cache", "token_cache_bytes", "store")  # those for messages of SFT; the others are for prompts
_MESSAGES = ("add_bos", "add_eos", "add_generation_prompt")

_Made = TokenizedPrompts | NemoConversations

logger = logging.getLogger("gpuload.integrations.nemo_rl")


class _TokenizedOnce:
    """What both datasets add to NeMo-RL's."""

    dataset: Any
    val_dataset: Any
    processor: Any
    task_spec: Any
    task_name: str
    data_config: Any

    def __init__(
        self,
        data_path: str,
        *,
        tokenizer: Any = None,
        max_input_seq_length: int | None = None,
        gpuload: Any = None,
        **settings: Any,
    ) -> None:
        self._options = settings_under("data.train.gpuload", gpuload, OPTIONS)
        self._tokenizer, self._limit = plain(tokenizer), max_input_seq_length
        if not isinstance(self._tokenizer, dict) or "name" not in self._tokenizer:
            raise OptionError(
                f"data.train.tokenizer={tokenizer!r}: expected the section of the policy: set "
                "+data.train.tokenizer=${policy.tokenizer}"
            )
        if self._limit is not None and (not isinstance(self._limit, int) or self._limit < 2):
            raise OptionError(f"data.train.max_input_seq_length={self._limit!r}: expected an integer > 1")
        given = {name: settings[name] for name in _MESSAGES if name in settings}
        check_switches("data.train", given, given)
        self._messages = MessageSettings(**given)
        super().__init__(data_path, **settings)  # type: ignore[call-arg]

    def set_processor(self) -> None:
        """Tokenize the rows. NeMo-RL calls this after `set_task_spec`."""
        super().set_processor()  # type: ignore[misc]
        try:
            made = [self._unsupported() or self._tokenized(part) for part in (self.dataset, self.val_dataset)]
        except TokenizerError as error:
            made = [str(error)]
        if why := next((each for each in made if isinstance(each, str)), None):
            log_fallback(logger, f"NeMo-RL for {self.task_name}", why)
            return
        ignored = {
            f"data.train.gpuload.{name}": value
            for name, value in self._options.items()
            if (name in _OF_ROWS) != self._is_sft
        }
        why = "messages for SFT are tokenized on the CPU, and compared with NeMo-RL's"
        log_ignored(logger, ignored, why if self._is_sft else "prompts are in memory, with their texts")
        self.dataset, self.val_dataset = made
        self.processor = self._processor()

    @property
    def _is_sft(self) -> bool:
        return getattr(self.processor, "func", self.processor) is STOCK["sft_processor"]

    def _processor(self) -> PromptProcessor | ConversationProcessor:
        """NeMo-RL's, for rows that are tokenized already."""
        own = identity(STOCK["get_tokenizer"](self._tokenizer))
        return ConversationProcessor(own, self._messages, self.processor) if self._is_sft else PromptProcessor(own)

    def _unsupported(self) -> str | None:
        if PROBLEM is not None:
            return PROBLEM
        if self.processor not in (STOCK["math_hf_data_processor"], STOCK["sft_processor"]):
            return f"the processor {self.data_config['processor']} is not supported"
        return None

    def _tokenized(self, rows: Any) -> _Made | str | None:
        """The rows of a dataset; or why NeMo-RL has to tokenize them; None for None."""
        if rows is None:
            return None
        kwargs = self._tokenizer.get("chat_template_kwargs") or {}
        plainly = STOCK["get_tokenizer"]({**self._tokenizer, "chat_template_kwargs": None})
        made = (self._conversations if self._is_sft else self._prompts)(rows, plainly, kwargs)
        if isinstance(made, str):
            return made
        if dropped := len(rows) - len(made):
            message = "gpuload: dropped %s of %s rows with max_input_seq_length=%s tokens or more"
            logger.warning(message, f"{dropped:,}", f"{len(rows):,}", self._limit)
        return made

    def _prompts(self, rows: Any, tokenizer: Any, kwargs: Any) -> TokenizedPrompts | str:
        chats = [row["messages"] for row in rows]
        problems, answers = ([chat[k]["content"] for chat in chats] for k in (0, 1))
        if not all(isinstance(problem, str) for problem in problems):
            return "the content of a message is not text"
        spec = self.task_spec
        system = [{"role": "system", "content": spec.system_prompt}] if spec.system_prompt else []
        texts = [spec.prompt.format(problem) for problem in problems] if spec.prompt else problems
        conversations = [[*system, {"role": "user", "content": text}] for text in texts]
        options = {name: value for name, value in self._options.items() if name not in _OF_ROWS}
        made = tokenized(conversations, answers, self.task_name, tokenizer, kwargs, self._limit, options)
        return self._difference(rows, chats, made) or made

    def _conversations(self, rows: Any, tokenizer: Any, kwargs: Any) -> NemoConversations | str:
        chats, tools, others = list[Any](), dict[int, Any](), dict[int, str]()
        for number, row in enumerate(rows):
            chats.append(row["messages"])
            if (own := row.get("tools")) is not None:
                tools[number] = own
            if why := _problem(chats[-1], own):
                others[number] = why
        later = FormattedChats(rows, others, self.task_spec.prompt)
        chats = [later.formatted(row, chat) for row, chat in enumerate(chats)]
        given = [row for row in range(len(chats)) if row not in others]
        _, content, nbytes = identified(given, lambda row: (row, [chats[row], tools.get(row)]), others)
        templates = templates_of(tokenizer, kwargs)

        def held(stored: StoredRows, chats: Sequence[Any] | FormattedChats, limit: int | None) -> NemoConversations:
            return NemoConversations.of(stored, chats, rows, self.task_name, limit)

        def differs(stored: StoredRows) -> str | None:
            made = held(stored, chats, None)  # longer rows, too: which they are depends on their ids
            if not len(made.tokenized):
                return ", ".join(Counter(made.fallback.values()))
            return self._difference(rows, chats, made)

        settings = {**vars(self._messages), "bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
        with RowCache(
            Options.parse({name: value for name, value in self._options.items() if name in _OF_ROWS}),
            templates.default.reference,
            Rule(release_of("nemo_rl", "NeMo-RL"), [STOCK["sft_processor"]], settings),
            name=self.task_name,
            rows=len(chats),
            nbytes=2 * nbytes,  # ids, and texts
            content=lambda _: content,
        ) as cache:
            make = partial(tokenized_conversations, chats, tokenizer, templates, self._messages, tools, others)
            stored = cache.find_or_make(differs, make, logger)
        if isinstance(stored, str):
            return stored
        log_own_rows(logger, "NeMo-RL", Counter(stored.others.values()), len(chats))
        return held(stored, later if isinstance(stored.ids, DiskTokens) else chats, self._limit)

    def _difference(self, rows: Any, chats: list[Any], made: _Made) -> str | None:
        """Which row of a sample differs from NeMo-RL's."""
        changed = change(release_of("nemo_rl", "NeMo-RL"), KNOWN, self.processor)
        numbers = made.numbers.numpy()
        there, lengths = numbers, made.ids.lengths
        if isinstance(made, NemoConversations):
            there, lengths = made.tokenized, lengths[made.tokenized]
        sample = sampled(
            lengths, changed, lambda: pa.table({"messages": messages_column([chats[row] for row in there.tolist()])})
        )
        place = {number: k for k, number in enumerate(numbers.tolist())}
        tokenizer, process = STOCK["get_tokenizer"](self._tokenizer), self._processor()
        more = vars(self._messages) if self._is_sft else {}

        def ours(number: int) -> Any:
            row = place[number]
            return process(made[row], self.task_spec, tokenizer, NO_LIMIT, row, **more)

        def theirs(number: int) -> Any:
            return self.processor(rows[number], self.task_spec, tokenizer, NO_LIMIT, place[number], **more)

        return compare(there[sample].tolist(), ours, theirs, changed, logger=logger, trainer="NeMo-RL")


class NemoPromptDataset(_TokenizedOnce, ResponseDataset):  # type: ignore[misc]
    """NeMo-RL's `ResponseDataset`. Rows are tokenized once, by columns, and those that are too long are dropped.

    Args:
        data_path, **settings: as for NeMo-RL's class; for SFT also `add_bos`, `add_eos` and `add_generation_prompt`, as
            in the section `data`.
        tokenizer: the section `policy.tokenizer`.
        max_input_seq_length: rows of this many tokens or more are dropped; None keeps them.
        gpuload: options of `gpuload.load`: `device`, `gpu_memory_limit`, `verify` and `progress`, which have no effect
            for SFT, whose messages are tokenized on the CPU; `token_cache`, `token_cache_bytes` and `store` for SFT.

    Raises:
        OptionError: an unknown key in `gpuload`, or an invalid value.
        StoreError: a store on disk is asked for, and there is too little space for it, or it cannot be written.
    """


class NemoChatDataset(_TokenizedOnce, OpenAIFormatDataset):  # type: ignore[misc]
    """NeMo-RL's `OpenAIFormatDataset`, for SFT. Conversations are tokenized once, by columns.

    Args:
        data_path, **settings: as for NeMo-RL's class; also `add_bos`, `add_eos` and `add_generation_prompt`, as in the
            section `data`.
        tokenizer: the section `policy.tokenizer`.
        max_input_seq_length: conversations of this many tokens or more are dropped; None keeps them.
        gpuload: options of `gpuload.load`: `token_cache`, `token_cache_bytes` and `store`.

    Raises:
        OptionError: an unknown key in `gpuload`, or an invalid value.
        StoreError: a store on disk is asked for, and there is too little space for it, or it cannot be written.
    """

    val_dataset = None


def _problem(chat: Any, tools: Any) -> str | None:
    """Why NeMo-RL has to tokenize a conversation."""
    if not chat or not all(isinstance(message["content"], str) for message in chat):
        return "the content of a message is not text"
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        return "its tools are not a list of objects"
    return None
