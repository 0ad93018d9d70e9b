"""Tokenized prompts, and what NeMo-RL trains on of each. Nothing here needs NeMo-RL."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from gpuload.core.arrays import row_number
from gpuload.core.errors import DataError, OptionError
from gpuload.core.options import NO_LIMIT
from gpuload.integrations.messages.rows import SharedRows
from gpuload.kinds.chats.formats import messages_column
from gpuload.kinds.load import load


@dataclass(frozen=True)
class TokenizedPrompts:
    """A map-style dataset of n prompts, in place of the rows that NeMo-RL's processor would tokenize."""

    task_name: str  # of all rows
    numbers: torch.Tensor  # (n,) int64, their rows in the data that was read
    ids: SharedRows  # of each row, int32
    texts: pa.ChunkedArray  # (n,) the rendered prompts
    answers: Sequence[Any]  # (n,) the ground truth, any Python objects

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        row = row_number(idx, len(self))
        return {
            "task_name": self.task_name,
            "content": self.texts[row].as_py(),
            "token_ids": torch.from_numpy(self.ids[row].astype(np.int64)),
            "ground_truth": self.answers[row],
        }


def tokenized(
    conversations: Sequence[Any],
    answers: Sequence[Any],
    task_name: str,
    tokenizer: Any,
    template_kwargs: Mapping[str, Any],
    limit: int | None,
    options: Mapping[str, Any],
) -> TokenizedPrompts:
    """Tokenize n prompts by columns, and drop those of `limit` tokens or more, if it is not None. Options and errors
    are those of `gpuload.load`; also a `DataError` if prompts cannot be rendered."""
    table = pa.table({"prompt": messages_column(conversations), "row": np.arange(len(conversations))})
    loaded = load(
        table,
        tokenizer,
        max_prompt_length=NO_LIMIT if limit is None else limit - 1,
        return_full_prompt=True,
        apply_chat_template_kwargs=template_kwargs,
        **options,
    )
    if loaded.report.rejected:
        reason, count = max(loaded.report.rejected.items(), key=lambda item: item[1])
        raise DataError(f"{count:,} of {len(table):,} prompts cannot be tokenized: {reason}")
    columns, tokens = loaded.columns, loaded.tokens
    numbers = columns["row"].to_numpy()
    return TokenizedPrompts(
        task_name,
        torch.from_numpy(numbers.copy()),
        SharedRows.of(tokens),
        columns["full_prompts"],
        [answers[row] for row in numbers.tolist()],
    )


def identity(tokenizer: Any) -> tuple[Any, ...]:
    """What must be the same for the tokenizer of a load and NeMo-RL's."""
    # NeMo-RL keeps `chat_template_kwargs` in a partial of the method.
    return tokenizer.name_or_path, tokenizer.chat_template, getattr(tokenizer.apply_chat_template, "keywords", {})


def check_tokenizer(tokenizer: Any, own: tuple[Any, ...]) -> None:
    """Checks that NeMo-RL trains with the tokenizer that has made the ids, whose `identity` is `own`; an `OptionError`
    if not."""
    if identity(tokenizer) != own:
        raise OptionError(
            f"the tokenizer of the policy is not the one of the dataset ({tokenizer.name_or_path!r} and "
            f"{own[0]!r}, or another chat template): set the dataset's tokenizer=${{policy.tokenizer}}"
        )


def datum_spec(log: Sequence[Mapping[str, Any]], limit: int, idx: int, about: Any = None) -> dict[str, Any]:
    """A DatumSpec of tokenized messages, as NeMo-RL makes it: those of `limit` tokens or more have no loss, and hardly
    any tokens."""
    length = sum(len(message["token_ids"]) for message in log)
    too_long = length >= limit
    if too_long:
        most = min(4, limit // len(log))
        log = [{**message, "token_ids": message["token_ids"][:most]} for message in log]
    return {
        "message_log": log,
        "length": length,
        "extra_env_info": about,
        "loss_multiplier": 0.0 if too_long else 1.0,
        "idx": idx,
    }


@dataclass(frozen=True)
class PromptProcessor:
    """NeMo-RL's processor of prompts, for rows that are tokenized already."""

    tokenizer: tuple[Any, ...]  # `identity` of the one that has made the ids

    def __call__(
        self, datum_dict: Mapping[str, Any], task_data_spec: Any, tokenizer: Any, max_seq_length: int, idx: int
    ) -> dict[str, Any]:
        """Returns a DatumSpec, as NeMo-RL's processor does; an `OptionError` if NeMo-RL uses another tokenizer."""
        check_tokenizer(tokenizer, self.tokenizer)
        log = [{"role": "user", "content": datum_dict["content"], "token_ids": datum_dict["token_ids"]}]
        made = datum_spec(log, max_seq_length, idx, {"ground_truth": datum_dict["ground_truth"]})
        return made | {"task_name": datum_dict["task_name"]}
