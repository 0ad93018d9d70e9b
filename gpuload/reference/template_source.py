"""The source of a chat template: parsed, and looked at before anything evaluates it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence, Set
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
    """How many `{% generation %}` blocks a message can have at most, if outermost loops are over messages."""
    environment = vendor_environment()
    if environment is None:
        return 2
    tree = environment.parse(template)
    if any(_most_blocks(macro.body, 0, set()) for macro in tree.find_all(jinja2.nodes.Macro)):
        return 2  # a message may call it several times
    changing: set[str] = set()
    for node in tree.find_all((jinja2.nodes.Assign, jinja2.nodes.AssignBlock)):
        changing |= _names(node.target)  # type: ignore[attr-defined]
    return max((_most_blocks(loop.body, 1, changing) for loop in _outermost_loops(tree.body)), default=0)


def _outermost_loops(nodes: Sequence[jinja2.nodes.Node]) -> Iterator[jinja2.nodes.For]:
    for node in nodes:
        if isinstance(node, jinja2.nodes.For):
            yield node
        else:
            yield from _outermost_loops(list(node.iter_child_nodes()))


def _most_blocks(nodes: Sequence[jinja2.nodes.Node], loops: int, changing: Set[str]) -> int:
    """The most that one pass through some nodes has. An inner loop may have any number. `changing` are the variables
    that the template sets, which may differ between two conditions."""
    found: list[tuple[jinja2.nodes.Node, int]] = []
    for node in nodes:
        if isinstance(node, jinja2.nodes.If):
            branches = [node.body, *(each.body for each in node.elif_), node.else_]
            found.append((node, max(_most_blocks(each, loops, changing) for each in branches)))
        elif isinstance(node, jinja2.nodes.For):
            inner = _most_blocks(node.body, loops + 1, changing) * (2 if loops else 1)
            found.append((node, max(inner, _most_blocks(node.else_, loops, changing))))
        else:
            call = node.call.node if isinstance(node, jinja2.nodes.CallBlock) else None
            own = isinstance(call, jinja2.nodes.ExtensionAttribute) and call.name == "_generation_support"
            found.append((node, own + _most_blocks(getattr(node, "body", ()), loops, changing)))
    having = [(node, count) for node, count in found if count]
    together = [sum(count for other, count in having if not _exclude(node, other, changing)) for node, _ in having]
    return max(together, default=0)


def _exclude(one: jinja2.nodes.Node, other: jinja2.nodes.Node, changing: Set[str]) -> bool:
    """Whether two conditions with one branch each cannot both be true: one asks for what the other one denies."""
    if not isinstance(one, jinja2.nodes.If) or not isinstance(other, jinja2.nodes.If):
        return False
    if one.elif_ or one.else_ or other.elif_ or other.else_:
        return False
    first, second = (_parts(each.test) for each in (one, other))
    fixed = [part for part in first if not changing & _names(part)]
    return any(a == _negated(b) for a in fixed for b in second)


def _names(node: jinja2.nodes.Node) -> set[str]:
    """The variables in an expression, or in what is assigned to."""
    kinds = jinja2.nodes.Name, jinja2.nodes.NSRef
    return {each.name for each in (node, *node.find_all(kinds)) if isinstance(each, kinds)}


def _parts(test: jinja2.nodes.Node) -> list[jinja2.nodes.Node]:
    """The conditions that must all be true."""
    return [*_parts(test.left), *_parts(test.right)] if isinstance(test, jinja2.nodes.And) else [test]


def _negated(test: jinja2.nodes.Node) -> jinja2.nodes.Node:
    if isinstance(test, jinja2.nodes.Not):
        return test.node
    if isinstance(test, jinja2.nodes.Compare) and len(test.ops) == 1 and (other := _OPPOSITE.get(test.ops[0].op)):
        return jinja2.nodes.Compare(test.expr, [jinja2.nodes.Operand(other, test.ops[0].expr)])
    return jinja2.nodes.Not(test)


_OPPOSITE = {"in": "notin", "notin": "in", "eq": "ne", "ne": "eq"}


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
