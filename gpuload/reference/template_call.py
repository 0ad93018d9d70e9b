"""The reference: transformers' own rendering of one conversation, held still for one load.

`TemplateCall` is everything about a load that is not a row: the tokenizer, the template, tools and further arguments.
What a compiled template must reproduce, byte for byte, is `TemplateCall.render`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2

__all__ = ["TemplateCall", "rejection"]

_CHANGES_THE_TEXT = ("continue_final_message", "return_assistant_tokens_mask", "sanitize_control_tokens")
_OURS = ("conversation", "tokenize", "add_generation_prompt", "chat_template", "tools")


@dataclass(frozen=True)
class TemplateCall:
    """One load's way to render.

    Attributes:
        tokenizer: a transformers tokenizer.
        template: a template's text or name, or None for what transformers chooses.
        tools: as `apply_chat_template` takes them.
        kwargs: further arguments of `apply_chat_template`, `documents` among them.
        add_generation_prompt: as there.
        instant: what the template's `strftime_now` tells; one instant for all rows.
    """

    tokenizer: Any
    template: str | None = None
    tools: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    instant: datetime = field(default_factory=datetime.now)

    def __post_init__(self) -> None:
        taken = [name for name in _OURS if name in self.kwargs]
        if taken:
            raise TypeError(
                f"{', '.join(taken)} cannot be among the chat template's kwargs: it is an argument of its own"
            )

    def render(self, messages: Sequence[Any], template: str | None = None) -> str:
        """What transformers makes of one conversation.

        Args:
            messages: the conversation.
            template: another template to render it with.

        Raises:
            Exception: whatever transformers or the template raises on it.
        """
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                tools=None if self.tools is None else list(self.tools),
                chat_template=self.template if template is None else template,
                add_generation_prompt=self.add_generation_prompt,
                tokenize=False,
                **self.kwargs,
            )
        )

    def ids(self, messages: Sequence[Any]) -> list[int]:
        """The token ids of one conversation, rendered and encoded in one call: the definition of right.

        Raises:
            Exception: whatever transformers or the template raises on it.
        """
        answer = self.tokenizer.apply_chat_template(
            messages,
            tools=None if self.tools is None else list(self.tools),
            chat_template=self.template,
            add_generation_prompt=self.add_generation_prompt,
            tokenize=True,
            return_dict=True,
            **self.kwargs,
        )
        return list(answer["input_ids"])

    def text(self) -> str:
        """The template's Jinja source, named templates resolved as transformers does.

        Raises:
            ValueError: there is no template.
        """
        return str(self.tokenizer.get_chat_template(self.template, None if self.tools is None else list(self.tools)))

    def obstacle(self) -> str | None:
        """Why nothing of this call can be compiled, or None.

        A compiled template reproduces `PreTrainedTokenizerBase.apply_chat_template` and nothing else.
        """
        from transformers import PreTrainedTokenizerBase

        kind = type(self.tokenizer)
        own = getattr(kind, "apply_chat_template", None)
        if own is not PreTrainedTokenizerBase.apply_chat_template or "apply_chat_template" in vars(self.tokenizer):
            return f"{kind.__name__} has an apply_chat_template of its own"
        if getattr(kind, "get_chat_template", None) is not PreTrainedTokenizerBase.get_chat_template:
            return f"{kind.__name__} has a get_chat_template of its own"
        for name in _CHANGES_THE_TEXT:
            if self.kwargs.get(name):
                return f"{name} is set"
        for name, value in self.kwargs.items():
            if callable(value):
                return f"{name} is a function, which could look into texts unseen"
        return None

    def context(self) -> dict[str, Any]:
        """The template's variables except `messages`, as transformers prepares them. Probes notice where this goes
        wrong."""
        from transformers.utils import chat_template_utils, get_json_schema

        plain: Callable[[Any], Any] = getattr(chat_template_utils, "_plain_template_data", lambda value: value)
        tools = self.tools
        if tools is not None:
            tools = [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in tools]
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters
        further = {name: value for name, value in self.kwargs.items() if name not in own}
        return {
            **plain({**self.tokenizer.special_tokens_map, **further}),
            "tools": plain(tools),
            "documents": plain(self.kwargs.get("documents")),
            "add_generation_prompt": self.add_generation_prompt,
        }

    def strftime_now(self, format: str) -> str:
        """The template's clock."""
        return self.instant.strftime(format)

    @contextmanager
    def clock_stopped(self) -> Iterator[Callable[[str], str] | None]:
        """Within, transformers' template sees this call's instant as the time. Gives the clock that it sees, None where
        there is none that can be stopped.

        A template that prints the time would otherwise give other text to the rows rendered a minute later.
        transformers keeps the compiled template, and with it the clock, in a cache: it is replaced there, and put back
        by the last one to leave. Threads may be inside together; the first one's instant is everybody's.
        """
        try:
            text = self.text()
            if "strftime_now" not in text:
                raise AttributeError
            from transformers.utils import chat_template_utils

            clock = chat_template_utils._compile_jinja_template(text).environment.globals
            own = clock["strftime_now"]
        except Exception:  # no such template, cache or clock: then there is nothing to stop
            yield None
            return
        with _stopping:
            inside, own = _stopped.get(id(clock), (0, own))
            _stopped[id(clock)] = (inside + 1, own)
            if not inside:
                clock["strftime_now"] = self.strftime_now
            seen: Callable[[str], str] = clock["strftime_now"]
        try:
            yield seen
        finally:
            with _stopping:
                inside, own = _stopped.pop(id(clock))
                if inside > 1:
                    _stopped[id(clock)] = (inside - 1, own)
                else:
                    clock["strftime_now"] = own


_stopping = threading.Lock()
_stopped: dict[int, tuple[int, Any]] = {}  # a template's globals → how many are inside, and its own clock


def rejection(error: Exception) -> str:
    """What to tell of a row that the reference rejects: a template's own words as they are, else with the error's
    kind."""
    if type(error) is jinja2.TemplateError:
        return str(error)
    return f"{type(error).__name__}: {error}"
