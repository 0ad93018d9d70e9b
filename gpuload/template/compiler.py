"""A chat template as a program that grows: one tree per shape of conversation, traced where rows go.

Compiling everything a template could do is impossible (a question per message of a long conversation is 2^n paths) and
useless. So a program starts empty, and `render` has it traced wherever rows arrive that no earlier row prepared the way
for.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from gpuload.reference.template_call import TemplateCall
from gpuload.template.program import TEXT, ByReference, Shape, Tree, describe_shape, describe_tree
from gpuload.template.rope import NotCompilableError
from gpuload.template.trace import Texts, Tracer

__all__ = ["ChatProgram", "compile"]

FREE_LEAVES = 256
MOST_LEAVES = 4096
FEWEST_ROWS = 16
"""A trace with its probes costs what the reference needs for some ten rows. So the first `FREE_LEAVES` ways through the
template are traced for the asking, further ones for `FEWEST_ROWS` rows that go there, and none beyond `MOST_LEAVES`."""


class ChatProgram:
    """A compiled chat template. Made by `compile`.

    Attributes:
        call: tokenizer, template and constants.
        trees: the decision tree of each shape met so far.
        obstacle: why nothing can be compiled, or None.
        leaves: how many ways through the template were traced.
        lock: for whoever walks the trees, which may grow.
    """

    def __init__(self, call: TemplateCall) -> None:
        self.call = call
        self.trees: dict[Shape, Tree] = {}
        self.obstacle: str | None = None
        self.leaves = 0
        self.lock = threading.Lock()
        try:
            with call.clock_stopped():
                self._tracer = Tracer(call)
        except NotCompilableError as error:
            self.obstacle = str(error)

    def tree(self, shape: Shape) -> Tree:
        """The tree of one shape, empty at first."""
        if self.obstacle:
            return Tree([ByReference(self.obstacle)])
        return self.trees.get(shape) or Tree()

    def grow(self, tree: Tree, shape: Shape, texts: Texts, rows: int) -> str | None:
        """Trace the way that a conversation takes, and add it to its tree.

        Args:
            tree: that of `shape`.
            shape: the conversation's shape.
            texts: its texts.
            rows: how many rows go the same way, as far as the tree goes.

        Returns:
            None, or why these rows are left to the reference.
        """
        if self.leaves >= MOST_LEAVES:
            return f"more than {MOST_LEAVES} ways through the template"
        if self.leaves >= FREE_LEAVES and rows < FEWEST_ROWS:
            return f"fewer than {FEWEST_ROWS} rows go this way through the template"
        with self.call.clock_stopped():
            decisions, leaf = self._tracer.trace(shape, texts)
        if not tree.graft(decisions, leaf):
            return "the template does not do the same thing twice"
        self.leaves += 1
        self.trees[shape] = tree
        return None

    def explore(self, shape: Shape, most: int = 32) -> Tree:
        """Trace a shape without rows, following every answer for which a text is found.

        Args:
            shape: what conversation.
            most: how many ways to trace at most.
        """
        tree = self.tree(shape)
        if self.obstacle:
            return tree
        plain = {(k, name): f"text {k}" for k, fields in enumerate(shape) for name, value in fields if value == TEXT}
        hopeless = set()
        for _ in range(most):
            open_ = next((way for way, leaf in tree.leaves() if leaf is None and way not in hopeless), None)
            if open_ is None:
                break
            texts = self._tracer.example(plain, open_)
            if texts is None or self.grow(tree, shape, texts, FEWEST_ROWS) is not None:
                hopeless.add(open_)
        return tree

    def describe(self) -> str:
        """The program as text: every shape met, with its tree."""
        if self.obstacle:
            return f"nothing is compiled: {self.obstacle}"
        return "\n\n".join(f"{describe_shape(shape)}\n{describe_tree(tree)}" for shape, tree in self.trees.items())

    __str__ = describe


def compile(
    tokenizer: Any,
    *,
    chat_template: str | None = "default",
    tools: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> ChatProgram:
    """Compile a tokenizer's chat template.

    Args:
        tokenizer: a transformers tokenizer.
        chat_template: `default` for what transformers chooses, or a template's text, or the name of one of its
            templates.
        tools: the tools of every conversation, as `apply_chat_template` takes them.
        kwargs: further arguments of `apply_chat_template`: `enable_thinking`, `documents` and so on.
        add_generation_prompt: end every prompt with the start of an answer.

    Raises:
        TypeError: `kwargs` names what is an argument of its own.

    >>> program = compile(tokenizer)                                # doctest: +SKIP
    >>> program.render(table["prompt"]).text                        # doctest: +SKIP
    """
    template = None if chat_template == "default" else chat_template
    return ChatProgram(TemplateCall(tokenizer, template, tools, dict(kwargs or {}), add_generation_prompt))
