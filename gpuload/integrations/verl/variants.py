"""Render conversations with the chat template, compiled once for each combination of tools and `enable_thinking`.

In verl's SFT data, tools and `enable_thinking` can differ in each row. They are constants of a compiled template, so
each combination is a variant of the template that is compiled separately.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.options import check_template_kwargs, plain
from gpuload.engines.host.prompts import render_column, render_rows
from gpuload.engines.host.render import HostText
from gpuload.engines.protocol import RowCounts
from gpuload.reference.reference import Reference
from gpuload.template import ChatProgram

Ints = npt.NDArray[np.int64]
VariantKey = tuple[str, bool | None]

COMPILE_MIN_ROWS = 16
"""Fewer conversations with the same tools are rendered by transformers: compiling the template costs more."""

_EMPTY_USER = [{"role": "user", "content": [{"type": "text", "text": ""}]}]

# transformers renders with trim_blocks, which removes the newline after a block. The newline at the end of this prefix
# is the one that is removed, so that a newline at the start of the template is not.
_AFTER_EMPTY_USER = f"{{% set messages = {_EMPTY_USER} + messages %}}\n"

_EXAMPLES = 8  # messages on which the template with the prefix is compared with verl's call


@dataclass(eq=False)
class ConversationTexts(RowCounts):
    """Texts of n conversations, which are rendered in several parts.

    Attributes:
        prefix: (n,) number of ids at the start of each text that are those of the empty user message.
        texts, rows: the parts; row `rows[k][i]` has the text `texts[k][i]`.
    """

    prefix: Ints
    texts: list[pa.Array] = field(default_factory=list)
    rows: list[Ints] = field(default_factory=list)

    def add_part(self, rendered: HostText, rows: Ints) -> Ints:
        """Add the texts of some rows. Texts of a row that is added again replace the former ones.

        Returns:
            Those of the rows that were rejected.
        """
        self.texts.append(pc.fill_null(rendered.text, ""))
        self.rows.append(rows)
        self.add_counts(rendered)
        self.rejected.update((int(rows[row]), reason) for row, reason in rendered.rejected.items())
        return rows[sorted(rendered.rejected)]

    def text(self) -> pa.Array:
        """Return all texts, (n,) large_string; "" for a row that was rejected."""
        if not self.rows:
            return pa.array([], pa.large_string())
        position = np.zeros(len(self.prefix), np.int64)
        # With repeated indices, NumPy keeps the last assignment: the text that was added last.
        position[np.concatenate(self.rows)] = np.arange(sum(map(len, self.rows)))
        return pa.concat_arrays(self.texts).take(pa.array(position))


def render_conversations(
    conversations: pa.Array, variant_of: Ints, variants: list["TemplateVariant"], retry_after_user: bool = False
) -> ConversationTexts:
    """Render conversations, each with its variant of the template.

    Args:
        conversations: (n,) list of structs.
        variant_of: (n,) number of the variant of each conversation.
        retry_after_user: render conversations that are rejected again, after an empty user message.
    """
    texts = ConversationTexts(np.zeros(len(conversations), np.int64))
    for number in np.unique(variant_of).tolist():
        rows = np.flatnonzero(variant_of == number)
        part = conversations if len(rows) == len(conversations) else conversations.take(pa.array(rows))
        rejected = texts.add_part(variants[number].render(part), rows)
        if not retry_after_user or not len(rejected):
            continue
        retry = variants[number].after_empty_user(conversations.take(pa.array(rejected[:_EXAMPLES])))
        if retry is not None:
            for row in rejected.tolist():
                del texts.rejected[row]
            texts.add_part(retry.render(conversations.take(pa.array(rejected))), rejected)
            texts.prefix[rejected] = retry.prefix
    return texts


# -- the template ------------------------------------------------------------------------------------------------------


def variant_key(tools: Any, thinking: bool | None) -> VariantKey:
    """Return a hashable key for a combination of tools and `enable_thinking`."""
    return ("" if tools is None else repr(tools), thinking)


class TemplateVariant:
    """The chat template with fixed tools and `enable_thinking`. Compiled once enough conversations need it.

    Attributes:
        reference: the tokenizer with these arguments.
        program: the compiled template, or None.
        prefix: number of ids at the start of every text that are those of an empty user message.
    """

    def __init__(self, tokenizer: Any, kwargs: Mapping[str, Any], tools: Any, thinking: bool | None, instant: datetime):
        self._arguments = (tokenizer, kwargs, tools, thinking, instant)
        template_kwargs = dict(kwargs) | {"add_generation_prompt": False}
        template = template_kwargs.pop("chat_template", None) or "default"
        if tools is not None:
            template_kwargs["tools"] = tools
        if thinking is not None:
            template_kwargs["enable_thinking"] = thinking
        template_kwargs = plain(template_kwargs)
        check_template_kwargs(template_kwargs)
        self.reference = Reference(tokenizer, chat_template=template, template_kwargs=template_kwargs)
        self.reference.call = replace(self.reference.call, instant=instant)
        self.program: ChatProgram | None = None
        self.prefix = 0
        self._after_user: TemplateVariant | None = None

    def render(self, conversations: pa.Array) -> HostText:
        """Render a column of conversations (n,)."""
        with self.reference.call.clock_stopped():
            if self.program is None and len(conversations) >= COMPILE_MIN_ROWS:
                self.program = ChatProgram(self.reference.call)
            if self.program is None:
                why = f"fewer than {COMPILE_MIN_ROWS} rows of a batch have these tools"
                return render_rows(conversations, self.reference, why=why)
            return render_column(conversations, self.reference, self.program)

    def after_empty_user(self, examples: pa.Array) -> "TemplateVariant | None":
        """Return the variant that renders an empty user message first, or None if the template cannot do so.

        Args:
            examples: conversations that need it. The first one that renders is compared with verl's call.
        """
        for example in examples if self._after_user is None else ():
            try:
                conversation = example.as_py()
                expected = self.reference.call.render(_EMPTY_USER + conversation)
                variant = self._with_prefix()
                if variant.reference.render(conversation) != expected:
                    return None
            except Exception:  # whatever the template raises, verl's code raises it too: try the next example
                continue
            self._after_user = variant
            break
        return self._after_user

    def _with_prefix(self) -> "TemplateVariant":
        tokenizer, kwargs, tools, thinking, instant = self._arguments
        template = _AFTER_EMPTY_USER + self.reference.call.text()
        variant = TemplateVariant(tokenizer, {**kwargs, "chat_template": template}, tools, thinking, instant)
        variant.prefix = len(self.reference.call.ids(_EMPTY_USER))
        return variant
