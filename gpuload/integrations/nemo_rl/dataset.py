"""PromptDataset for NeMo-RL: its ResponseDataset, whose prompts are tokenized once, before workers are started.

    1. NeMo-RL reads the rows, makes messages of them, and splits off rows for validation.
    2. `set_processor`, which it calls last, tokenizes all prompts by columns and drops those that are too long.
    3. NeMo-RL's processor makes a sample of the rows itself, and they must be equal.

Only its processor for problems with an answer is replaced. With others, NeMo-RL prepares all rows.
"""

import logging
from typing import Any

import nemo_rl
import numpy as np
import torch
from nemo_rl.algorithms.utils import get_tokenizer
from nemo_rl.data.datasets.response_datasets.response_dataset import ResponseDataset
from nemo_rl.data.processors import math_hf_data_processor

from gpuload.errors import OptionError, TokenizerError
from gpuload.integrations.core import is_supported, log_fallback, settings_under
from gpuload.integrations.nemo_rl.rows import PromptProcessor, TokenizedPrompts, identity, tokenized
from gpuload.options import NO_LIMIT, plain

SUPPORTED = "0.7"

OPTIONS = ("device", "gpu_memory_limit", "verify", "progress")
"""Keys of the section `gpuload`, options of `gpuload.load`."""

_SAMPLE = 16

logger = logging.getLogger("gpuload.integrations.nemo_rl")


class NemoPromptDataset(ResponseDataset):  # type: ignore[misc]
    """NeMo-RL's `ResponseDataset`. Prompts are tokenized once, by columns, and those that are too long are dropped.

    Args:
        data_path, **settings: as for NeMo-RL's class.
        tokenizer: the section `policy.tokenizer`.
        max_input_seq_length: prompts of this many tokens or more are dropped; None keeps them.
        gpuload: options of `gpuload.load`: `device`, `gpu_memory_limit`, `verify` and `progress`.

    Raises:
        OptionError: an unknown key in `gpuload`, or an invalid value.
    """

    dataset: Any
    val_dataset: Any

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
        super().__init__(data_path, **settings)

    def set_processor(self) -> None:
        """Tokenize the rows. NeMo-RL calls this after `set_task_spec`."""
        super().set_processor()
        why = self._unsupported()
        made: list[TokenizedPrompts | None] = []
        if why is None:
            try:
                parts = [self._tokenized(part) for part in (self.dataset, self.val_dataset)]
            except TokenizerError as error:
                parts = [str(error)]
            why = next((part for part in parts if isinstance(part, str)), None)
            made = [part for part in parts if not isinstance(part, str)]
        if why is not None:
            log_fallback(logger, f"NeMo-RL for {self.task_name}", why)
            return
        self.dataset, self.val_dataset = made
        self.processor = PromptProcessor(identity(get_tokenizer(self._tokenizer)))

    def _unsupported(self) -> str | None:
        if not is_supported(nemo_rl.__version__, SUPPORTED, SUPPORTED):
            return f"NeMo-RL {nemo_rl.__version__} is installed, and {SUPPORTED} is supported"
        if self.processor is not math_hf_data_processor:
            return f"the processor {self.data_config['processor']} is not supported"
        return None

    def _tokenized(self, rows: Any) -> TokenizedPrompts | str | None:
        """The prompts of a `datasets.Dataset`; or why NeMo-RL has to tokenize them; None for None."""
        if rows is None:
            return None
        chats = rows.with_format("arrow")[:]["messages"].to_pylist()
        problems, answers = ([chat[k]["content"] for chat in chats] for k in (0, 1))
        if not all(isinstance(problem, str) for problem in problems):
            return "the content of a message is not text"
        spec = self.task_spec
        system = [{"role": "system", "content": spec.system_prompt}] if spec.system_prompt else []
        texts = [spec.prompt.format(problem) for problem in problems] if spec.prompt else problems
        conversations = [[*system, {"role": "user", "content": text}] for text in texts]
        kwargs = self._tokenizer.get("chat_template_kwargs") or {}
        plainly = get_tokenizer({**self._tokenizer, "chat_template_kwargs": None})
        made = tokenized(conversations, answers, self.task_name, plainly, kwargs, self._limit, self._options)
        if dropped := len(rows) - len(made):
            logger.warning(
                "gpuload: dropped %s of %s prompts with max_input_seq_length=%s tokens or more",
                f"{dropped:,}",
                f"{len(rows):,}",
                self._limit,
            )
        return self._difference(rows, made) or made

    def _difference(self, rows: Any, made: TokenizedPrompts) -> str | None:
        """Which row of a sample differs from NeMo-RL's."""
        tokenizer = get_tokenizer(self._tokenizer)
        process = PromptProcessor(identity(tokenizer))
        for row in np.unique(np.linspace(0, len(made) - 1, _SAMPLE).astype(np.int64)).tolist():
            number = int(made.numbers[row])
            expected = self.processor(rows[number], self.task_spec, tokenizer, NO_LIMIT, row)
            found = process(made[row], self.task_spec, tokenizer, NO_LIMIT, row)
            if _plain(found) != _plain(expected):
                return f"row {number} of a sample differs from NeMo-RL's"
        return None


def _plain(value: Any) -> Any:
    """A row whose tensors can be compared with `!=`."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
