"""The reference rendering: `apply_chat_template` of transformers, with everything but the conversation fixed.

`TemplateCall` holds what is constant during a load: the tokenizer, the template, the tools and further arguments. A
compiled template must reproduce `TemplateCall.render` byte for byte.
"""

from __future__ import annotations

import inspect
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jinja2

from gpuload.reference.control_tokens import (
    ControlTokens,
    added_control_tokens,
    arguments_are_marked,
    sanitizing_is_known,
)
from gpuload.reference.deadline import Deadline, EndlessError
from gpuload.reference.template_source import examined

_Rendered = TypeVar("_Rendered")

_CHANGES_THE_TEXT = ("continue_final_message", "return_assistant_tokens_mask")
_SANITIZE = "sanitize_control_tokens"
_CHARACTERS_PER_SECOND = 100_000  # that are encoded at least; a tenth of what one core does
READ_BACK = "{{ [messages, tools] | tojson }}"
RESERVED = ("conversation", "tokenize", "add_generation_prompt", "chat_template", "tools")


class Changes(NamedTuple):
    """What a version of transformers changes in messages before the template sees them: whether it drops keys that are
    None, and gives reasoning under all of its names. 4.57 and 5.10 do neither."""

    drops_none: bool
    fills_reasoning: bool


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
        deadline: limits the time for one conversation.
        calling: the tokenizer with settings of its own, which makes the ids; None for `tokenizer`.

    Raises:
        TypeError: `kwargs` contains an argument that has its own parameter.
    """

    tokenizer: Any
    template: str | None = None
    tools: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    instant: datetime = field(default_factory=datetime.now)
    deadline: Deadline = field(default_factory=Deadline, compare=False, repr=False)
    calling: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        taken = [name for name in RESERVED if name in self.kwargs]
        if taken:
            raise TypeError(f"{', '.join(taken)} cannot be passed in the chat template's kwargs")

    def render(self, messages: Sequence[Any], template: str | None = None) -> str:
        """Render one conversation with transformers.

        Args:
            messages: the conversation; `marked`, if control tokens are sanitized.
            template: a template to use instead of the call's own.

        Raises:
            EndlessError: the template did not finish in time.
            Exception: whatever transformers or the template raises.
        """
        tools, kwargs = self._marked_constants
        return self._alone(
            lambda: str(
                self.tokenizer.apply_chat_template(
                    messages,
                    tools=tools,
                    chat_template=self.template if template is None else template,
                    add_generation_prompt=self.add_generation_prompt,
                    tokenize=False,
                    **kwargs,
                )
            )
        )

    def ids(self, messages: Sequence[Any]) -> list[int]:
        """Render and encode one conversation in one call. These ids are correct by definition.

        Raises:
            EndlessError: the template did not finish in time.
            Exception: whatever transformers or the template raises.
        """
        tokenizer = self.tokenizer if self.calling is None else self.calling
        answer = self._alone(
            lambda: tokenizer.apply_chat_template(
                messages,
                tools=None if self.tools is None else list(self.tools),
                chat_template=self.template,
                add_generation_prompt=self.add_generation_prompt,
                tokenize=True,
                return_dict=True,
                **self.kwargs,
            ),
            more=_characters(messages) / _CHARACTERS_PER_SECOND,
        )
        return list(answer["input_ids"])

    def blocks(self, messages: Sequence[Any]) -> tuple[str, list[tuple[int, int]]]:
        """Render one conversation, and find its `{% generation %}` blocks as transformers does.

        Returns:
            The text, and start and end of each block, in characters.

        Raises:
            EndlessError: the template did not finish in time.
            Exception: whatever transformers or the template raises.
        """
        from transformers.utils import chat_template_utils

        own = inspect.signature(self.tokenizer.apply_chat_template).parameters
        further = {name: value for name, value in self.kwargs.items() if name not in own}
        texts, blocks = self._alone(
            lambda: chat_template_utils.render_jinja_template(
                [without_none(messages) if self.changes.drops_none else list(messages)],
                tools=None if self.tools is None else list(self.tools),
                documents=self.kwargs.get("documents"),
                chat_template=self.text(),
                return_assistant_tokens_mask=True,
                add_generation_prompt=self.add_generation_prompt,
                **{**self.tokenizer.special_tokens_map, **further},
            )
        )
        return str(texts[0]), list(blocks[0])

    def _alone(self, render: Callable[[], _Rendered], more: float = 0.0) -> _Rendered:
        """The result of a call of transformers, which no other thread calls meanwhile, if it is in time.

        While transformers looks for `{% generation %}` blocks, its compiled template keeps them in one list for all
        threads: another thread that renders adds its own, or fails when the list is taken away. Rendering holds the
        interpreter lock anyway, so waiting costs nothing.
        """
        with _rendering:
            return self.deadline.within(render, more)

    # -- control tokens ------------------------------------------------------------------------------------------------

    @property
    def sanitizes(self) -> bool:
        """Whether control tokens in messages are encoded as plain text."""
        return bool(self.kwargs.get(_SANITIZE))

    @cached_property
    def control(self) -> ControlTokens:
        """The control tokens of tokenizer and template.

        Without sanitizing they are only counted, and the template is not compiled for that: transformers would evaluate
        its constant expressions, which have no limits.
        """
        if self.sanitizes:
            return ControlTokens(self.tokenizer, self.tokenizer._get_control_tokens(self.text()))
        try:
            literals, _ = examined(self.text())
        except Exception:  # no template, or none that can be parsed
            literals = ""
        return ControlTokens(self.tokenizer, added_control_tokens(self.tokenizer, literals))

    def marked(self, messages: Any) -> Any:
        """One conversation as the template sees it: control tokens are marked, if they are sanitized."""
        return self.control.mark(messages) if self.sanitizes else messages

    @cached_property
    def _marked_constants(self) -> tuple[list[Any] | None, dict[str, Any]]:
        """Tools and further arguments as `render` passes them. Marks come from here, not from transformers, which
        sanitizes only if it encodes as well."""
        tools = None if self.tools is None else list(self.tools)
        if not self.sanitizes:
            return tools, dict(self.kwargs)
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters
        kwargs = {
            name: self.control.mark(value)
            if name == "documents" or (arguments_are_marked() and name not in own)
            else value
            for name, value in self.kwargs.items()
            if name != _SANITIZE
        }
        return self.control.mark(tools), kwargs

    # -- the template --------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Return the template's Jinja source. Names of templates are resolved by transformers.

        Raises:
            ValueError: the tokenizer has no such template.
        """
        return str(self.tokenizer.get_chat_template(self.template, None if self.tools is None else list(self.tools)))

    @cached_property
    def changes(self) -> Changes:
        """What this transformers changes in messages before the template sees them."""
        message = {"role": "user", "content": "", "dropped": None, "reasoning": "filled"}
        try:
            seen = json.loads(self.render([message], template=READ_BACK))[0][0]
        except Exception:  # rows show why
            return Changes(True, True)
        return Changes("dropped" not in seen, "reasoning_content" in seen)

    def syntax_error(self) -> str | None:
        """Return what is wrong with the template's source and on which line, or None.

        Raises:
            ValueError: the tokenizer has no such template.
        """
        return examined(self.text())[1]

    def not_compilable_reason(self) -> str | None:
        """Return why this call cannot be compiled at all, or None.

        A compiled template reproduces `PreTrainedTokenizerBase.apply_chat_template`, not an override of it.
        """
        from transformers import PreTrainedTokenizerBase

        kind = type(self.tokenizer)
        own = getattr(kind, "apply_chat_template", None)
        if own is not PreTrainedTokenizerBase.apply_chat_template or "apply_chat_template" in vars(self.tokenizer):
            return f"{kind.__name__} overrides apply_chat_template"
        own = getattr(kind, "get_chat_template", None)
        if own is not PreTrainedTokenizerBase.get_chat_template or "get_chat_template" in vars(self.tokenizer):
            return f"{kind.__name__} overrides get_chat_template"
        for name in _CHANGES_THE_TEXT:
            if self.kwargs.get(name):
                return f"{name} is set"
        if self.sanitizes and not sanitizing_is_known():
            return f"this version of transformers implements {_SANITIZE} in an unsupported way"
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
        tools, kwargs = self._marked_constants
        if tools is not None:
            tools = [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in tools]
        own = inspect.signature(self.tokenizer.apply_chat_template).parameters
        further = {name: value for name, value in kwargs.items() if name not in own}
        return {
            **plain({**self.tokenizer.special_tokens_map, **further}),
            "tools": plain(tools),
            "documents": plain(kwargs.get("documents")),
            "add_generation_prompt": self.add_generation_prompt,
        }

    @property
    def strftime_now(self) -> Callable[[str], str]:
        """The template's `strftime_now`: a format → this call's instant in it. It does not refer to the call: templates
        are cycles of references, and would keep the tokenizer with them until the next garbage collection."""
        return self.instant.strftime

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
            clock = None
        if clock is None:  # not inside `except`: errors of the block would lose what they came from
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


def _characters(value: Any) -> int:
    """How many characters the texts in plain data have."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, Sequence) else 0


def without_none(messages: Sequence[Any]) -> list[Any]:
    """Messages without keys that are None, as some versions of transformers give them to the template."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


_rendering = threading.RLock()


def _unlock() -> None:
    """A process that was forked while another thread was rendering has no such thread."""
    global _rendering
    _rendering = threading.RLock()


os.register_at_fork(after_in_child=_unlock)

_stopping = threading.Lock()


def _in_child() -> None:
    global _stopping
    _stopping = threading.Lock()


os.register_at_fork(after_in_child=_in_child)
_stopped: dict[int, tuple[int, Any]] = {}  # id of a template's globals → number of open blocks, original function


class OwnReasonError(ValueError):
    """An error that says why a row is rejected: `subject` is what is wrong, and the message why."""

    subject: str


def rejection(error: Exception) -> str:
    """Return the reason to report for a row that transformers rejects. It is never empty.

    A template's own message (`raise_exception`) and that of a limit are reported unchanged, other errors with their
    class.
    """
    if isinstance(error, UnicodeDecodeError):
        return f"prompt is not valid UTF-8 (byte {error.start})"
    if isinstance(error, UnicodeEncodeError):
        return f"prompt contains a lone surrogate, {error.object[error.start]!r}, which UTF-8 cannot encode"
    if type(error) in (jinja2.TemplateError, EndlessError) and str(error).strip():
        return str(error)
    return describe_error(error)


def describe_error(error: BaseException) -> str:
    """Return class and message of an exception; only the class if the message is empty."""
    name = error.subject if isinstance(error, OwnReasonError) else type(error).__name__
    return f"{name}: {error}".removesuffix(": ")


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message; its class if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
