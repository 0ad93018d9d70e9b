"""Pieces of conversations as texts and ids: one chat template for each set of arguments, compiled where it pays.

Tools and other arguments can differ in each row. They are constants of a compiled template, so each set of them is a
template of its own. Pieces whose tools few others have are rendered one by one, by the compiled template without tools.
"""

import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Ragged, RowNumbers
from gpuload.core.options import check_template_kwargs, plain
from gpuload.engines.host.encode import HostEncoder, host_encoder
from gpuload.engines.host.prompts import BY_PROMPT, render_column, render_rows, render_with_tools
from gpuload.engines.host.render import HostText, MixedText
from gpuload.engines.host.sanitize import rows_with_control_tokens
from gpuload.reference.reference import Reference
from gpuload.template.compiler import ChatProgram

COMPILE_MIN_ROWS = 16
"""Fewer pieces with the same arguments are rendered by transformers: compiling the template costs more."""

Arguments = Mapping[str, Any]  # of `apply_chat_template`, for one piece; without those that are None


class Template:
    """The chat template with fixed arguments of `apply_chat_template`. Compiled once enough pieces need it.

    `instant` is the time of day that it sees; `without_tools` is the same without tools, if it has any. For errors see
    `Templates`.
    """

    def __init__(
        self, tokenizer: Any, arguments: Arguments, instant: datetime, without_tools: "Template | None" = None
    ):
        self._given, self._without_tools = (tokenizer, arguments, instant), without_tools
        kwargs = {"add_generation_prompt": False, **arguments}
        template = kwargs.pop("chat_template", None) or "default"
        kwargs = plain(kwargs)
        check_template_kwargs(kwargs)
        self.reference = Reference(tokenizer, chat_template=template, template_kwargs=kwargs).at(instant)
        self.program: ChatProgram | None = None  # the compiled template
        self._lock, self._pieces = threading.Lock(), 0
        self._beginning_with: dict[str, Template] = {}

    def needed_by(self, pieces: int) -> None:
        """Counts pieces that will be rendered, and compiles the template once there are enough."""
        other = self._without_tools
        if other is not None and self.program is None and pieces < COMPILE_MIN_ROWS:
            return other.needed_by(pieces)
        with self._lock:
            self._pieces += pieces
            if self.program is None and self._pieces >= COMPILE_MIN_ROWS:
                self.program = ChatProgram(self.reference.call)

    def render(self, pieces: pa.Array) -> HostText:
        """Renders a column of conversations (n,); with their ids, if those are not the ids of the text."""
        text = self._render(pieces)
        if text.with_control is None:
            text.with_control = rows_with_control_tokens(pieces, self.reference.call.control)
        return text

    def _render(self, pieces: pa.Array) -> HostText:
        with self.reference.call.clock_stopped():
            if not self.reference.encodes_rendered_text:
                return render_rows(pieces, self.reference, with_ids=True, why=BY_PROMPT)
            program, tools, other = self.program, None, self._without_tools
            if program is None and other is not None:
                program, tools = other.program, self.reference.call.tools
            if program is None or not isinstance(tools, list | None):
                why = f"fewer than {COMPILE_MIN_ROWS} rows of a batch have these tools"
                return render_rows(pieces, self.reference, why=why)
            if tools is None:
                return render_column(pieces, self.reference, program)
            return render_with_tools(pieces, self.reference, program, tools)

    def beginning_with(self, text: str) -> "Template":
        """The same with further text of a template at the start."""
        if text not in self._beginning_with:
            tokenizer, arguments, instant = self._given
            other = None if self._without_tools is None else self._without_tools.beginning_with(text)
            longer = {**arguments, "chat_template": text + self.reference.call.text()}
            self._beginning_with[text] = Template(tokenizer, longer, instant, other)
        return self._beginning_with[text]


class Templates:
    """The chat template with all arguments that rows have, and the encoder of the texts. Threads can share it.

    Raises:
        OptionError: an argument is not supported.
        TokenizerError: the tokenizer has no usable chat template.
    """

    def __init__(self, tokenizer: Any, kwargs: Arguments | None = None):
        self._tokenizer, self._kwargs = tokenizer, dict(kwargs or {})
        self._instant = datetime.now()  # the same for all rows, in case the template prints it
        self._lock = threading.Lock()
        self._made: dict[str, Template] = {}
        self.default = self._template({})  # for pieces without further arguments
        reference = self.default.reference
        # Whether the ids of a piece are the ids of its text. If not, only `encode` has them.
        self.encodes_rendered_text = reference.encodes_rendered_text and not reference.sanitizes

    def _template(self, arguments: Arguments) -> Template:
        key, other = repr(arguments), None
        if arguments.get("tools") is not None:
            other = self._template({name: value for name, value in arguments.items() if name != "tools"})
        with self._lock:
            if key not in self._made:
                self._made[key] = Template(self._tokenizer, {**self._kwargs, **arguments}, self._instant, other)
            return self._made[key]

    def choose(self, arguments: Sequence[Arguments]) -> tuple[list[Template], RowNumbers]:
        """The templates of n pieces or rows with these arguments, and (n,) which of them each has.

        Tools often differ in each row: templates of former calls that were not compiled are forgotten.
        """
        with self._lock:
            self._made = {key: each for key, each in self._made.items() if each.program or each is self.default}
        made = [self._template(each) for each in arguments]
        templates = list(dict.fromkeys(made))
        place = {each: k for k, each in enumerate(templates)}
        return templates, np.array([place[each] for each in made], np.int64)

    def encode(self, text: HostText) -> Ragged:
        """n rendered pieces → n rows of ids, whichever way they were rendered."""
        if isinstance(text, MixedText):
            return Ragged.concatenate([self.encode(part) for part in text.parts]).take(text.order)
        return self.ids(text.text) if text.ids is None else text.ids

    def ids(self, text: pa.LargeStringArray) -> Ragged:
        """(n,) texts → n rows of ids; a null has none."""
        with self._lock:
            encode = self._encoder.encode
        return encode(pc.fill_null(text, ""))

    @cached_property
    def _encoder(self) -> HostEncoder:
        """Made for the first texts: it takes half a second, and rows from the cache need none."""
        return host_encoder(self.default.reference)


def render(pieces: pa.Array, templates: Sequence[Template], number: RowNumbers) -> HostText:
    """Renders pieces, (n,) conversations, each with the template that has its `number`, (n,)."""
    parts = []
    for k, count in zip(*(each.tolist() for each in np.unique(number, return_counts=True)), strict=True):
        templates[k].needed_by(count)
    for k in np.unique(number).tolist():
        rows = np.flatnonzero(number == k)
        part = pieces if len(rows) == len(pieces) else pieces.take(pa.array(rows))
        parts.append((rows.tolist(), templates[k].render(part)))
    return MixedText.of(parts) if parts else HostText(text=pa.array([], pa.large_string()))
