"""The tokenizer of a load of whole conversations: what SFT and preference data have in common.

As TRL prepares both: the ids of `apply_chat_template` for messages, and those of the tokenizer's call, which adds its
special tokens, for texts; an EOS token follows a text that does not end with it.
"""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from gpuload.core.errors import OptionError, TokenizerError
from gpuload.core.memory import room_to_encode
from gpuload.core.options import SET_BY_LOADER, Normalize
from gpuload.kinds.normalize import normalized, takes_objects
from gpuload.reference.reference import Reference
from gpuload.reference.template_call import RESERVED, TemplateCall

TOOLS, KWARGS = "tools", "chat_template_kwargs"
"""Columns with arguments of `apply_chat_template` for each row. Tools may be JSON text."""


_OF_LOADS = (*SET_BY_LOADER, "continue_final_message", "sanitize_control_tokens", "return_assistant_tokens_mask")
"""Further arguments that a row cannot set: all rows are rendered and encoded in one way."""


class TrainingReference(Reference):
    """As `Reference`, for conversations that end with an answer. The rows are without null keys (`drop_nulls`), and
    `normalized` with `normalize_messages`."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        drop_nulls: bool = False,
        normalize_messages: Normalize | None = None,
        **settings: Any,
    ):
        for name in ("add_generation_prompt", "continue_final_message"):
            if (settings.get("template_kwargs") or {}).get(name):
                raise OptionError(
                    f"apply_chat_template_kwargs.{name} is set by the loader: conversations to train on end with their "
                    "last message: remove it"
                )
        super().__init__(tokenizer, **settings)
        self.drop_nulls, self.normalize_messages = drop_nulls, normalize_messages
        self.call = replace(self.call, add_generation_prompt=False)

    @property
    def prompts_alone(self) -> bool:
        """Whether prompts are rendered and encoded alone, too, to find where completions begin."""
        return True

    def texts(self, row: Any) -> list[str]:
        """The texts of one row as they are encoded: the prompt with each completion, or all of it; and then the prompt
        alone, if there is one and `prompts_alone`."""
        raise NotImplementedError

    @property
    def prompting(self) -> TemplateCall:
        """How the prompt of a completion is rendered alone."""
        return replace(self.call, add_generation_prompt=True)

    def with_special_tokens(self, text: str) -> list[int]:
        """The ids of a text, with those that the tokenizer's call adds."""
        with room_to_encode(len(text)):
            return list(self.calling(text)["input_ids"])

    @cached_property
    def added(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer's call adds before and after a text, whatever it is."""
        plain, whole = self.encode("x"), self.with_special_tokens("x")
        first = next(k for k in range(len(whole)) if whole[k : k + len(plain)] == plain)
        return whole[:first], whole[first + len(plain) :]

    @cached_property
    def content_of_calls(self) -> str | None:
        """The content of an assistant's message that consists of calls: null, as most templates expect it, or the empty
        text for a template that fails without a text, or prints null as one."""
        return "" if self.uses_template and _needs_text(self.call) else None

    @property
    def changes_messages(self) -> bool:
        """Whether rows are changed before they are rendered."""
        return self.drop_nulls or self.normalize_messages is not None

    @property
    def keeps_nulls(self) -> bool:
        return not self.drop_nulls

    @cached_property
    def takes_objects(self) -> bool:
        """Whether arguments of tool calls that are JSON text become objects where messages are normalized."""
        return not self.uses_template or takes_objects(self.call)

    def remedy(self, prompt: Any) -> str:
        if self.normalize_messages is not None or not self.uses_template or self.problem(prompt):
            return ""
        other = normalized(prompt, self.takes_objects)
        if other == prompt:
            return ""
        try:
            self.ids(other)
        except Exception:
            return ""
        return ": normalize_messages='auto' makes contents and arguments that this template takes"

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

    @property
    def variant(self) -> str:
        return " without nulls" * self.drop_nulls + " normalized" * (self.normalize_messages is not None)

    def with_eos(self, text: str) -> str:
        return text if text.endswith(self.eos) else text + self.eos

    def call_with(self, own: Mapping[str, Any], prompt_only: bool = False) -> TemplateCall:
        """How a row is rendered that has arguments of its own; or its prompt alone."""
        call = self.prompting if prompt_only else self.call
        if not own:
            return call
        kwargs = {name: value for name, value in own.items() if name != TOOLS}
        return replace(call, tools=own.get(TOOLS, call.tools), kwargs={**call.kwargs, **kwargs})


def answers_in(row: Any) -> tuple[str, ...]:
    """The names of the completions of a row, or of the fields of a column of rows."""
    return ("completion",) if "completion" in row else ("chosen", "rejected")


def messages_in(row: Any) -> Any:
    """What a row consists of: its messages or its text, with the completion if it has one; None if a part is null."""
    if not isinstance(row, dict):
        return row
    if "messages" in row:
        return row["messages"]
    prompt, completion = row["prompt"], row["completion"]
    return None if prompt is None or completion is None else prompt + completion


def own_arguments(row: Any) -> dict[str, Any]:
    """The arguments of `apply_chat_template` that only this row has."""
    if not isinstance(row, dict):
        return {}
    tools = {TOOLS: row[TOOLS]} if row.get(TOOLS) is not None else {}
    return tools | (row.get(KWARGS) or {})


def own_problem(row: Any) -> str | None:
    """Why a row cannot be rendered with its own arguments; None if it can."""
    own = row.get(KWARGS) if isinstance(row, dict) else None
    if own is not None and not isinstance(own, dict):
        return f"chat_template_kwargs is {type(own).__name__}, not an object"
    taken = [name for name in RESERVED if name != TOOLS and name in (own or ())]
    taken += [name for name in _OF_LOADS if name not in taken and (own or {}).get(name) not in (None, False)]
    return f"chat_template_kwargs has {', '.join(taken)}, which gpuload sets" if taken else None


def _needs_text(call: TemplateCall) -> bool:
    """Whether a template needs a text as the content of an assistant's message with calls."""
    value = secrets.token_hex(8)  # not in the list of tools: only a template that writes calls prints it
    function = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": value}}}]

    def text(content: str | None, tools: Any, more: list[Any]) -> str | None:
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content, "tool_calls": calls}]
        try:
            return replace(call, tools=tools).render(messages + more)
        except Exception:
            return None

    answered = [{"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"}]
    for tools in (call.tools, [{"type": "function", "function": function}]):
        for count in range(len(answered) + 1):
            null, empty, named = (text(content, tools, answered[:count]) for content in (None, "", "None"))
            if empty is not None and (value in empty if null is None else null == named != empty):
                return True
    return False
