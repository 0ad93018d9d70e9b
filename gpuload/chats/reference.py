"""The tokenizer of a load for SFT: what it makes of a conversation, of a prompt with its completion, and of a text.

As TRL prepares them: the ids of `apply_chat_template` for messages, and those of the tokenizer's call, which adds its
special tokens, for texts; an EOS token follows a text that does not end with it. A completion begins where its ids
first differ from those of the prompt alone.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any

from gpuload.errors import OptionError, TokenizerError
from gpuload.loss import LOSS
from gpuload.options import LossOn
from gpuload.reference.reference import Reference, problem
from gpuload.reference.template_call import TemplateCall
from gpuload.template.answers import Answers, UnknownAnswersError


class ChatReference(Reference):
    """As `Reference`; ids with loss have a bit (`gpuload.loss`).

    Args:
        tokenizer, **settings: as for `Reference`.
        loss_on: which tokens have loss: those of all answers ("assistant"), of the last one ("last"), of the completion
            or "all".

    Attributes:
        prompting: how the prompt of a completion is rendered alone.

    Raises:
        OptionError: as for `Reference`; or control tokens are to be sanitized.
        TokenizerError: as for `Reference`; or the tokenizer encodes conversations in its own way.
    """

    def __init__(self, tokenizer: Any, loss_on: LossOn, **settings: Any):
        super().__init__(tokenizer, **settings)
        self.loss_on = loss_on
        self.call = replace(self.call, add_generation_prompt=False)
        self.prompting = replace(self.call, add_generation_prompt=True)
        if self.sanitizes:
            raise OptionError(
                "apply_chat_template_kwargs.sanitize_control_tokens is not supported by load_chats, because "
                "transformers makes no loss masks with it: remove it"
            )
        if not self.encodes_rendered_text:
            raise TokenizerError(
                f"{type(self.tokenizer).__name__} renders and encodes in its own way, so which of its tokens have loss "
                "is unknown: use a tokenizer with the methods of PreTrainedTokenizerBase"
            )

    @cached_property
    def answers(self) -> Answers | None:
        return Answers(self.call, self.loss_on) if self.loss_on in ("assistant", "last") else None

    @cached_property
    def added(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer's call adds before and after a text."""
        plain, whole = self.encode("x"), list(self.tokenizer("x")["input_ids"])
        first = next(k for k in range(len(whole)) if whole[k : k + len(plain)] == plain)
        return whole[:first], whole[first + len(plain) :]

    @property
    def eos(self) -> str:
        """The text of the token that ends a text.

        Raises:
            TokenizerError: the tokenizer has none.
        """
        if self.tokenizer.eos_token is None:
            raise TokenizerError(
                f"tokenizer {self.name} has no eos token, which ends texts and completions: set tokenizer.eos_token"
            )
        return str(self.tokenizer.eos_token)

    def with_eos(self, text: str) -> str:
        return text if text.endswith(self.eos) else text + self.eos

    def problem(self, prompt: Any) -> str | None:
        return problem(messages_in(prompt))

    def render(self, prompt: Any) -> str:
        """The text of one row: all of it, as it is encoded."""
        messages = messages_in(prompt)
        if isinstance(messages, str):
            return self.with_eos(messages)
        return self.call_with(tools_of(prompt)).render(messages)

    def ids(self, prompt: Any) -> list[int]:
        """The ids of one row: messages, a text, {"prompt", "completion"}, or {"messages"}; dicts may have "tools"."""
        return self._ids(prompt, self.answers)

    def _ids(self, prompt: Any, answers: Answers | None) -> list[int]:
        if isinstance(prompt, str):
            return [token | int(LOSS) for token in self.tokenizer(self.with_eos(prompt))["input_ids"]]
        if isinstance(prompt, dict) and "prompt" in prompt:
            return self._completion(prompt["prompt"], prompt["completion"], tools_of(prompt), answers)
        return self._messages(messages_in(prompt), tools_of(prompt), answers)

    def compared(self, prompt: Any, found: list[int]) -> tuple[list[int], list[int]]:
        """As in `Reference`. Where only the compiled template knows the answers, their loss is not compared."""
        try:
            return self.ids(prompt), found
        except UnknownAnswersError:
            expected, found = ([token & ~int(LOSS) for token in ids] for ids in (self._ids(prompt, None), found))
            return expected, found

    def call_with(self, tools: Any, prompt_only: bool = False) -> TemplateCall:
        """How a row with its own tools is rendered; or its prompt alone."""
        call = self.prompting if prompt_only else self.call
        return replace(call, tools=tools) if tools else call

    def _completion(self, prompt: Any, completion: Any, tools: Any, answers: Answers | None) -> list[int]:
        if isinstance(prompt, str):
            alone = list(self.tokenizer(prompt)["input_ids"])
            ids = list(self.tokenizer(prompt + self.with_eos(completion))["input_ids"])
            bits = [True] * len(ids)
        else:
            alone = self.call_with(tools, prompt_only=True).ids(prompt)
            marked = self._messages(prompt + completion, tools, answers)
            ids = [token & ~int(LOSS) for token in marked]
            bits = [bool(token & int(LOSS)) or answers is None for token in marked]
        same = next((k for k, (one, other) in enumerate(zip(alone, ids, strict=False)) if one != other), None)
        first = min(len(alone), len(ids)) if same is None else same
        if self.loss_on == "all":
            first = 0
        return [token | int(LOSS) if k >= first and bits[k] else token for k, token in enumerate(ids)]

    def _messages(self, messages: list[dict[str, Any]], tools: Any, answers: Answers | None) -> list[int]:
        """As transformers computes `return_assistant_tokens_mask` from the answers' places in the text."""
        call = self.call_with(tools)
        text = call.render(messages)
        encoded = self.tokenizer(text, add_special_tokens=False)
        ids = list(encoded["input_ids"])
        if answers is None:
            return [token | int(LOSS) for token in ids] if self.loss_on == "all" else ids
        for start, end in answers.with_call(call).of_text(messages, text):
            first, last = encoded.char_to_token(start), encoded.char_to_token(end - 1)
            if first is None:
                break
            for at in range(first, last + 1 if last else len(ids)):
                ids[at] |= int(LOSS)
        return ids

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} loss on {self.loss_on}"


def messages_in(row: Any) -> Any:
    """What a row consists of: its messages or its text, with the completion if it has one; None if a part is null."""
    if not isinstance(row, dict):
        return row
    if "messages" in row:
        return row["messages"]
    prompt, completion = row["prompt"], row["completion"]
    return None if prompt is None or completion is None else prompt + completion


def tools_of(row: Any) -> Any:
    """The tools that only this row has; None without any."""
    return row.get("tools") if isinstance(row, dict) else None
