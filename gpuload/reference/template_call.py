"""The reference rendering: `apply_chat_template` of transformers, with everything but the conversation fixed.

`TemplateCall` holds what is constant during a load: the tokenizer, the template, the tools and further arguments. A
compiled template must reproduce `TemplateCall.render` byte for byte.
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

_CHANGES_THE_TEXT = ("continue_final_message", "return_assistant_tokens_mask", "sanitize_control_tokens")
_OURS = ("conversation", "tokenize", "add_generation_prompt", "chat_template", "tools")


@dataclass(frozen=True)
class TemplateCall:
    """A call of `apply_chat_template` without its conversation.

    Attributes:
        tokenizer: a transformers tokenizer.
        template: a template's text or name; None lets transformers choose.
        tools: as `apply_chat_template` takes them.
        kwargs: further arguments of `apply_chat_template`, such as `documents`.
        add_generation_prompt: as `apply_chat_template` takes it.
        instant: the time that the template's `strftime_now` formats, the same for all rows.

    Raises:
        TypeError: `kwargs` contains an argument that has its own parameter.
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
            raise TypeError(f"{', '.join(taken)} cannot be passed in the chat template's kwargs")

    def render(self, messages: Sequence[Any], template: str | None = None) -> str:
        """Render one conversation with transformers.

        Args:
            messages: the conversation.
            template: a template to use instead of the call's own.

        Raises:
            Exception: whatever transformers or the template raises.
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
        """Render and encode one conversation in one call. These ids are correct by definition.

        Raises:
            Exception: whatever transformers or the template raises.
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
        """Return the template's Jinja source. Names of templates are resolved by transformers.

        Raises:
            ValueError: the tokenizer has no such template.
        """
        return str(self.tokenizer.get_chat_template(self.template, None if self.tools is None else list(self.tools)))

    def not_compilable_reason(self) -> str | None:
        """Return why this call cannot be compiled at all, or None.

        A compiled template reproduces `PreTrainedTokenizerBase.apply_chat_template`, not an override of it.
        """
        from transformers import PreTrainedTokenizerBase

        kind = type(self.tokenizer)
        own = getattr(kind, "apply_chat_template", None)
        if own is not PreTrainedTokenizerBase.apply_chat_template or "apply_chat_template" in vars(self.tokenizer):
            return f"{kind.__name__} overrides apply_chat_template"
        if getattr(kind, "get_chat_template", None) is not PreTrainedTokenizerBase.get_chat_template:
            return f"{kind.__name__} overrides get_chat_template"
        for name in _CHANGES_THE_TEXT:
            if self.kwargs.get(name):
                return f"{name} is set"
        for name, value in self.kwargs.items():
            if callable(value):
                return f"{name} is a function, whose use of the texts cannot be traced"
        return None

    def context(self) -> dict[str, Any]:
        """Return the template's variables except `messages`, as transformers prepares them.

        transformers has no function for this, so its code is reproduced here. Probes detect any difference.
        """
        from transformers.utils import chat_template_utils, get_json_schema

        # Only some versions of transformers have this function.
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
        """Return this call's instant in `format`: the template's `strftime_now`."""
        return self.instant.strftime(format)

    @contextmanager
    def clock_stopped(self) -> Iterator[Callable[[str], str] | None]:
        """Make this call's instant the time that transformers' template sees, inside a `with` block.

        Without it, a template that prints the time would give other text for rows that are rendered a minute later.
        transformers caches the compiled template together with its `strftime_now`, which is replaced in that cache, and
        restored when the last of several overlapping blocks ends. Several threads may be inside at once; then the
        instant of the first one is used by all.

        Yields:
            The `strftime_now` that the template sees; None if the template does not use it or it cannot be replaced.
        """
        try:
            text = self.text()
            if "strftime_now" not in text:
                raise AttributeError
            from transformers.utils import chat_template_utils

            clock = chat_template_utils._compile_jinja_template(text).environment.globals
            own = clock["strftime_now"]
        except Exception:  # no such template, cache or function
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
_stopped: dict[int, tuple[int, Any]] = {}  # id of a template's globals → number of open blocks, original function


def rejection(error: Exception) -> str:
    """Return the reason to report for a row that transformers rejects.

    A template's own message (`raise_exception`) is reported unchanged, other errors with their class.
    """
    if type(error) is jinja2.TemplateError:
        return str(error)
    return f"{type(error).__name__}: {error}"
