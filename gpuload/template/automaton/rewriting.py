"""Loops with a condition and `loop` or an else, as two loops that can be recorded."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.visitor import NodeTransformer


def call_of(name: str, argument: Any) -> Any:
    """A call of a global function with one argument."""
    return nodes.Call(nodes.Name(name, "load"), [argument], [], None, None, lineno=argument.lineno)


class Conditions(NodeTransformer):
    """Makes two loops of a loop with a condition and `loop` or an else: the first one keeps the elements in a list.

    Jinja evaluates the condition of an element after the pass of the one before. So this is the same only if a pass
    cannot change what the condition reads; other loops remain as they are.
    """

    def __init__(self) -> None:
        self._count = 0

    def visit_For(self, loop: Any) -> Any:  # noqa: N802 - Jinja looks for this name
        self.generic_visit(loop)
        targets: list[Any] = loop.target.items if isinstance(loop.target, nodes.Tuple) else [loop.target]
        names = {name.name for each in loop.body for name in each.find_all(nodes.Name)}
        if loop.test is None or loop.recursive or not all(isinstance(each, nodes.Name) for each in targets):
            return loop
        if ("loop" not in names and not loop.else_) or not _independent(loop, {each.name for each in targets}):
            return loop
        line, self._count = {"lineno": loop.lineno}, self._count + 1
        kept = f"gpuload_kept_{self._count}"
        item = f"{kept}_item"

        def load(name: str) -> Any:
            return nodes.Name(name, "load", **line)

        def elements() -> Any:
            return nodes.Getattr(load(kept), "kept", "load", **line)

        empty = nodes.Keyword("kept", nodes.List([], **line), **line)
        namespace = nodes.Call(load("namespace"), [], [empty], None, None, **line)
        one = nodes.List([load(each.name) for each in targets], **line)
        keep = nodes.Assign(
            nodes.NSRef(kept, "kept", **line), nodes.Add(elements(), nodes.List([one], **line), **line), **line
        )
        condition = nodes.If(loop.test, [keep], [], [], **line)
        first = nodes.For(loop.target, loop.iter, [condition], [], None, False, **line)
        loop.target, loop.iter, loop.test = nodes.Name(item, "store", **line), elements(), None
        loop.body = [
            nodes.Assign(
                nodes.Name(each.name, "store", **line),
                nodes.Getitem(load(item), nodes.Const(number, **line), "load", **line), **line,
            )
            for number, each in enumerate(targets)
        ] + loop.body  # fmt: skip
        return [nodes.Assign(nodes.Name(kept, "store", **line), namespace, **line), first, loop]


def _independent(loop: Any, targets: set[str]) -> bool:
    """Whether a pass cannot change what the condition reads: namespaces are all that outlives a pass."""
    names = {name.name for name in loop.test.find_all(nodes.Name)}
    if isinstance(loop.test, nodes.Name):
        names.add(loop.test.name)
    if names <= targets:
        return True
    changing = (nodes.NSRef, nodes.Call, nodes.CallBlock)
    return not any(isinstance(each, changing) or any(each.find_all(changing)) for each in loop.body)
