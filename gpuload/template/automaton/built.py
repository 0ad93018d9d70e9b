"""What a template builds of symbols (`nodes.Built`): computed for one row, and as an expression of Python code."""

from collections.abc import Callable
from typing import Any

from gpuload.template.automaton.nodes import Affine, Built, ListPart, Place, TextSource
from gpuload.template.program import Operation


def evaluate(
    built: Built,
    value: Callable[[Place], Any],
    number: Callable[[Affine], int],
    text: Callable[[str | TextSource, tuple[Operation, ...]], str],
) -> Any:
    """The plain data, from the values at places, the numbers and the texts of a row."""
    held: list[Any] = []

    def hold(found: Any) -> str:
        held.append(found)
        return f"held[{len(held) - 1}]"

    code = expression(
        built,
        lambda place: hold(value(place)),
        lambda affine: hold(number(affine)),
        lambda source, operations: hold(text(source, operations)),
        hold,
    )
    return eval(code, {"held": held})


def expression(
    built: Built,
    value: Callable[[Place], str],
    number: Callable[[Affine], str],
    text: Callable[[str | TextSource, tuple[Operation, ...]], str],
    constant: Callable[[Any], str],
) -> str:
    """The plain data as an expression of Python, from those for places, numbers, texts and other constants."""

    def of(each: Built) -> str:
        match each.kind, each.parts:
            case "at", (place,):
                return value(place)
            case "text", pieces:
                return " + ".join(text(*piece) for piece in pieces) or "''"
            case "number", (affine,):
                return number(affine)
            case "constant", (literal,):
                return str(literal)
            case "part", (ListPart() as part, only):
                elements = f"{constant(part)}.of({value(part.place)}, {number(part.start)}, {number(part.length)})"
                return elements if only is None else f"[each[{only!r}] for each in {elements}]"
            case "list", items:
                return f"[{', '.join(map(of, items))}]"
            case "mapping", pairs:
                return f"{{{', '.join(f'{key!r}: {of(item)}' for key, item in pairs)}}}"
            case "sum", (left, right):
                return f"({of(left)} + {of(right)})"
            case "slice", (of_text, start, stop, step):
                return f"({of(of_text)})[{of(start)}:{of(stop)}:{of(step)}]"
            case "method", (name, of_text, *arguments):
                return f"({of(of_text)}).{name}({', '.join(arguments)})"
        raise ValueError(each.kind)

    return of(built)
