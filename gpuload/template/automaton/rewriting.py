"""Loops with a condition and `loop` or an else, as two loops that can be recorded."""

from typing import Any

from jinja2 import Environment, nodes
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
        self._count += 1
        kept, variables = f"gpuload_kept_{self._count}", [each.name for each in targets]
        found = "".join(f"{{% set {name} = {kept}_item[{at}] %}}" for at, name in enumerate(variables))
        namespace, first, second = _parsed(
            f"{{% set {kept} = namespace(kept=[]) %}}"
            "{% for target in iter %}{% if test %}"
            f"{{% set {kept}.kept = {kept}.kept + [[{', '.join(variables)}]] %}}"
            "{% endif %}{% endfor %}"
            f"{{% for {kept}_item in {kept}.kept %}}{found}{{% endfor %}}"
        )
        first.target, first.iter, first.body[0].test = loop.target, loop.iter, loop.test
        loop.target, loop.iter, loop.test = second.target, second.iter, None
        loop.body = second.body + loop.body
        return [namespace, first, loop]


def _parsed(text: str) -> list[Any]:
    """The statements of a template."""
    return Environment().parse(text).body


def _independent(loop: Any, targets: set[str]) -> bool:
    """Whether a pass cannot change what the condition reads: namespaces are all that outlives a pass."""
    names = {name.name for name in loop.test.find_all(nodes.Name)}
    if isinstance(loop.test, nodes.Name):
        names.add(loop.test.name)
    if names <= targets:
        return True
    changing = (nodes.NSRef, nodes.Call, nodes.CallBlock)
    return not any(isinstance(each, changing) or any(each.find_all(changing)) for each in loop.body)
