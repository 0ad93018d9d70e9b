"""The source of a chat template: parsed, and looked at before anything evaluates it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import lru_cache

import jinja2
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment


def vendor_environment() -> ImmutableSandboxedEnvironment | None:
    """Return a new environment as transformers creates it for each template; None if it has another type."""
    try:
        from transformers.utils import chat_template_utils

        # Compile an empty template to get at the environment. Compiling the real one here would evaluate its constant
        # expressions before any limit is in place. Without the function's cache: callers change the environment.
        compiled = inspect.unwrap(chat_template_utils._compile_jinja_template)("")
    except (ImportError, AttributeError):
        return None
    environment = getattr(compiled, "environment", None)
    return environment if type(environment) is ImmutableSandboxedEnvironment else None


@lru_cache
def examined(template: str) -> tuple[str, str | None]:
    """The text and the string constants of a template, separated by null characters, as transformers collects them; and
    its error, if it has one."""
    environment = vendor_environment()
    if environment is None:
        return template, None
    literals = ""
    try:
        tree = environment.parse(template)
        nodes = list(tree.find_all(jinja2.nodes.Node))
        found = {node.data for node in nodes if isinstance(node, jinja2.nodes.TemplateData)}
        found |= {node.value for node in nodes if isinstance(node, jinja2.nodes.Const) and isinstance(node.value, str)}
        literals = "\0".join(found)
        if any(_may_not_compile(node, environment) for node in nodes):
            # Compiling evaluates constant expressions, which have no limits. It does not evaluate operators that are
            # intercepted and filters that need the context.
            environment.intercepted_binops = frozenset(environment.binop_table)
            environment.filters = dict.fromkeys(environment.filters, jinja2.pass_context(lambda *_: ""))
            environment.compile(tree, raw=True)
        else:
            _trees.clear()
            _trees[template] = tree
    except jinja2.TemplateSyntaxError as error:
        return literals, f"line {error.lineno}: {error.message}"
    return literals, None


_trees: dict[str, jinja2.nodes.Template] = {}
"""The last template that was parsed, if nobody has taken its tree yet."""


def parsed(template: str, environment: jinja2.Environment) -> jinja2.nodes.Template:
    """Return a template's syntax tree, which the caller may change and has to bind to its environment.

    Args:
        template: the Jinja source.
        environment: one of `vendor_environment`.

    Raises:
        jinja2.TemplateSyntaxError: `template` is not a valid template.
    """
    return _trees.pop(template, None) or environment.parse(template)


@lru_cache
def blocks_of_a_message(template: str) -> int:
    """How many `{% generation %}` blocks a message can have at most, if the outermost loop is that over messages."""
    environment = vendor_environment()
    return 2 if environment is None else _most_blocks(environment.parse(template).body, 0)


def _most_blocks(nodes: Sequence[jinja2.nodes.Node], loops: int) -> int:
    """The most that one pass through some nodes has. An inner loop may have any number."""
    found = 0
    for node in nodes:
        if isinstance(node, jinja2.nodes.If):
            branches = [node.body, *(each.body for each in node.elif_), node.else_]
            found += max(_most_blocks(each, loops) for each in branches)
        elif isinstance(node, jinja2.nodes.For):
            found += _most_blocks(node.body, loops + 1) * (2 if loops else 1)
        else:
            call = node.call.node if isinstance(node, jinja2.nodes.CallBlock) else None
            found += isinstance(call, jinja2.nodes.ExtensionAttribute) and call.name == "_generation_support"
            found += _most_blocks(getattr(node, "body", ()), loops)
    return found


def _may_not_compile(node: jinja2.nodes.Node, environment: jinja2.Environment) -> bool:
    """Whether Jinja's compiler may find something wrong with a node that its parser has accepted."""
    if isinstance(node, jinja2.nodes.Filter):
        return node.name not in environment.filters
    if isinstance(node, jinja2.nodes.Test):
        return node.name not in environment.tests
    if isinstance(node, jinja2.nodes.Name):
        return node.ctx == "store" and node.name == "loop"
    return isinstance(node, _DECLARING)


_DECLARING = (
    jinja2.nodes.Block,
    jinja2.nodes.CallBlock,
    jinja2.nodes.Extends,
    jinja2.nodes.FromImport,
    jinja2.nodes.Import,
    jinja2.nodes.Include,
    jinja2.nodes.Macro,
)
