"""The vendor's template in transformers' own sandbox, made able to carry unknown text.

transformers compiles a chat template in a sandboxed Jinja environment of its own making, with its own filters and
globals. A fresh copy of exactly that environment is taken here and given ears wherever text is joined, looked into or
printed:

- what generated code calls to print, to join (`~`) and to collect a macro, block or call becomes symbolic (`Rope`);
- `+`, `%`, `*`, `**` go through the sandbox's own hook for operators, which also bounds how large a value may grow;
- filters and tests reject unknown text unless they are written down below;
- every loop pass and every call counts as a step, so that an endless template ends.

The template itself, and everything it does to known values, is untouched.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2
import jinja2.filters
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpuload.template.rope import TEXT_METHODS, Length, NotCompilableError, Rope, Split, Symbol, join

__all__ = ["EndlessError", "Meter", "TracingTemplate", "vendor_environment"]

MOST_CHARACTERS = 1 << 25
"""No value of a traced template grows beyond this."""

_STEP = "gpuload_step"


class EndlessError(Exception):
    """The template ran past its bound of steps, seconds or size."""


class Meter:
    """Counts the steps of one trace and stops it at a bound."""

    def __init__(self) -> None:
        self.reset(0, 0.0)

    def reset(self, steps: int, seconds: float) -> None:
        """Allow `steps` more steps and `seconds` more seconds."""
        self.allowed = self.left = steps
        self.deadline = time.monotonic() + seconds

    def step(self) -> None:
        self.left -= 1
        # The clock is the second bound, for steps that are slow in themselves, and is read now and then only.
        if self.left < 0 or (self.left % 64 == 0 and time.monotonic() > self.deadline):
            raise EndlessError(f"the template does not end (stopped after {self.allowed - self.left:,} steps)")


def vendor_environment() -> ImmutableSandboxedEnvironment | None:
    """A new environment as transformers makes it for each template; None where that is not to be had."""
    try:
        from transformers.utils import chat_template_utils

        # An empty template: compiling the real one would run its constant expressions before there is any bound.
        compiled = chat_template_utils._cached_compile_jinja_template("")
    except (ImportError, AttributeError):
        return None
    environment = getattr(compiled, "environment", None)
    return environment if type(environment) is ImmutableSandboxedEnvironment else None


class TracingTemplate:
    """A chat template that renders unknown text.

    Args:
        text: the Jinja source.
        meter: counts steps; a caller resets it before each `render`.
        strftime_now: what the template's `strftime_now` is to be.

    Raises:
        NotCompilableError: transformers' environment could not be had, or is not the one this was written for.
        jinja2.TemplateSyntaxError: `text` is no template.
    """

    def __init__(self, text: str, meter: Meter, strftime_now: Callable[[str], str]) -> None:
        environment = vendor_environment()
        if environment is None:
            raise NotCompilableError("this version of transformers makes its template environment in an unknown way")
        _instrument(environment, meter)
        tree = environment.parse(text)
        for loop in tree.find_all(jinja2.nodes.For):
            call = jinja2.nodes.Call(jinja2.nodes.Name(_STEP, "load"), [], [], None, None)
            loop.body.insert(0, jinja2.nodes.ExprStmt(call, lineno=loop.lineno))
        tree.set_environment(environment)
        environment.globals["strftime_now"] = strftime_now
        # Tracing twice must give the same: nothing random.
        for name in ("lipsum",):
            environment.globals.pop(name, None)
        self._template = jinja2.Template.from_code(
            environment, environment.compile(tree), environment.make_globals(None)
        )
        # Generated code looks these names up in its module, so replacing them there reaches every print and every `~`.
        module: dict[str, Any] = self._template.root_render_func.__globals__
        module["str"] = _text
        module["str_join"] = lambda parts: _join([_text(part) for part in parts])
        for name in ("escape", "markup_join"):
            module[name] = _known_only(module[name], "autoescape")

    def render(self, context: Mapping[str, Any]) -> str | Rope:
        """The prompt; a `Rope` where it holds text of a message.

        Raises:
            NotCompilableError, EndlessError: as they say.
            Exception: whatever the template raises.
        """
        return _join(list(self._template.root_render_func(self._template.new_context(dict(context)))))


def _text(value: object) -> str | Rope:
    """`str(value)` as printing and `~` do it, except that unknown text stays itself."""
    return value if isinstance(value, Rope) else str(value)


def _known_only(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """`function`, rejecting unknown text anywhere in its arguments."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if any(_holds_symbol(value) for value in (*args, *kwargs.values())):
            raise NotCompilableError(f"{what} on text of a message")
        return function(*args, **kwargs)

    return wrapped


def _holds_symbol(value: object) -> bool:
    if isinstance(value, Symbol):
        return True
    if isinstance(value, dict):
        return any(map(_holds_symbol, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_symbol, value))


def _instrument(environment: ImmutableSandboxedEnvironment, meter: Meter) -> None:
    """Give `environment` ears. See the module's first lines."""
    getattr_, getitem, call, call_binop = (
        environment.getattr,
        environment.getitem,
        environment.call,
        environment.call_binop,
    )

    def attribute(obj: Any, name: str) -> Any:
        if isinstance(obj, Symbol) and not (isinstance(obj, Rope) and name in TEXT_METHODS):
            raise NotCompilableError(f"{name!r} of text of a message")
        return getattr_(obj, name)

    def item(obj: Any, key: Any) -> Any:
        if isinstance(obj, Split):
            return obj[key]
        if isinstance(obj, Symbol) or isinstance(key, Symbol):
            raise NotCompilableError(
                "index into text of a message" if isinstance(obj, Symbol) else "look-up by text of a message"
            )
        return getitem(obj, key)

    def counted_call(context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter.step()
        # `", ".join(parts)` is the one method of known text that leaves unknown text whole.
        if getattr(obj, "__name__", "") == "join" and type(getattr(obj, "__self__", None)) is str and len(args) == 1:
            parts = list(args[0])
            if any(isinstance(part, Symbol) for part in parts):
                return _join_with(obj.__self__, parts)
            args = (parts,)
        return call(context, obj, *args, **kwargs)

    def operator(context: Any, name: str, left: Any, right: Any) -> Any:
        if name == "%" and type(left) is str and (isinstance(right, Symbol) or _holds_symbol(right)):
            return _percent(left, right)
        size = _size(left) + _size(right)
        if name == "*" and isinstance(left, int) != isinstance(right, int):
            size = (_size(left) or _size(right)) * (left if isinstance(left, int) else right)
        if name == "**" and isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * right
        _bound(size)
        return call_binop(context, name, left, right)

    ears: Any = environment
    ears.getattr, ears.getitem, ears.call, ears.call_binop = attribute, item, counted_call, operator
    ears.intercepted_binops = frozenset(["+", "%", "*", "**"])
    ears.concat = lambda parts: _join(list(parts))
    environment.globals[_STEP] = lambda: None
    for name, function in list(ears.filters.items()):
        if name not in _STRUCTURAL_FILTERS:
            ears.filters[name] = _SYMBOLIC_FILTERS.get(name, _plain_filter)(function, name)
    for name, test in list(ears.tests.items()):
        ears.tests[name] = _test(test, name)
    ears.filters["random"] = _unrepeatable


def _size(value: object) -> int:
    return value._size if isinstance(value, Rope) else len(value) if isinstance(value, (str, list, tuple)) else 0


def _bound(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise EndlessError("the template builds a value beyond all bounds")


def _join(parts: list[Any]) -> str | Rope:
    _bound(sum(map(_size, parts)))
    return join(parts)


def _unrepeatable(*_: object) -> object:
    raise NotCompilableError("filter random")


def _join_with(separator: str | Rope, parts: Iterable[object]) -> str | Rope:
    joined: list[object] = []
    for part in parts:
        joined += [separator, part]
    return _join(joined[1:])


def _percent(template: str, values: object) -> str | Rope:
    """`template % values` for plain `%s` marks."""
    pieces = template.split("%s")
    given = values if isinstance(values, tuple) else (values,)
    if any("%" in piece for piece in pieces) or len(pieces) != len(given) + 1:
        raise NotCompilableError("% format of text of a message")
    return _join([pieces[0], *(part for pair in zip(map(_text, given), pieces[1:], strict=True) for part in pair)])


# Filters. Those not named below take known values only.

_STRUCTURAL_FILTERS = frozenset("batch d default first items last list map reject rejectattr select selectattr".split())
"""Filters that hand values on without looking into them (a `Rope` itself rejects to be walked through)."""

_Wrapper = Callable[[Callable[..., Any], str], Callable[..., Any]]


def _on_rope(handler: Callable[..., Any]) -> _Wrapper:
    """A filter that is `handler` on a rope and itself on known values."""

    def wrap(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        # Some filters get the evaluation context or environment first.
        skip, known = int(hasattr(function, "jinja_pass_arg")), _known_only(function, f"filter {name}")

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if len(args) > skip and isinstance(args[skip], Rope):
                return handler(*args[skip:], **kwargs)
            return known(*args, **kwargs)

        return wrapped

    return wrap


def _plain_filter(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    return _known_only(function, f"filter {name}")


def _length(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def wrapped(value: Any) -> Any:
        return Length(value) if isinstance(value, Rope) else function(value)

    return wrapped


def _join_filter(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
        parts = list(value)
        if isinstance(d, Symbol) or any(isinstance(part, Symbol) for part in parts):
            if attribute is not None:
                raise NotCompilableError("filter join with an attribute on text of a message")
            return _join_with(_text(d), map(_text, parts))
        return _known_only(function, "filter join")(context, parts, d, attribute)

    return wrapped


def _format(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(value: Any, *args: Any, **kwargs: Any) -> Any:
        if type(value) is str and not kwargs and any(isinstance(arg, Symbol) for arg in args):
            return _percent(value, args)
        return _known_only(function, "filter format")(value, *args, **kwargs)

    return wrapped


def _replace(value: Rope, old: Any, new: Any, count: Any = None) -> Rope:
    return value.replace(old, new, -1 if count is None else count)


_SYMBOLIC_FILTERS: dict[str, _Wrapper] = {
    "trim": _on_rope(lambda value, chars=None: value.strip(chars)),
    "string": _on_rope(lambda value: value),
    "lower": _on_rope(lambda value: value.lower()),
    "upper": _on_rope(lambda value: value.upper()),
    "replace": _on_rope(_replace),
    "length": _length,
    "count": _length,
    "join": _join_filter,
    "format": _format,
}

# Tests. A rope is no `str` to Python, so what asks for its type is answered here; comparisons reach the rope itself.

_TYPE_OF_TEXT = {
    "string": True, "iterable": True, "sequence": True, "mapping": False, "number": False, "integer": False,
    "float": False, "boolean": False, "callable": False, "none": False, "defined": True, "undefined": False,
    "true": False, "false": False,
}  # fmt: skip
_COMPARISONS = frozenset("eq equalto == ne != lt lessthan < le <= gt greaterthan > ge >= in".split())


def _test(test: Callable[..., Any], name: str) -> Callable[..., Any]:
    known = _known_only(test, f"test {name}")
    if name in _COMPARISONS:
        return test

    @functools.wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        subject = args[0] if args else None
        if name not in _TYPE_OF_TEXT or (isinstance(subject, Symbol) and not isinstance(subject, Rope)):
            return known(*args, **kwargs)
        # What a list or mapping is does not depend on the text in it.
        return _TYPE_OF_TEXT[name] if isinstance(subject, Rope) else test(*args, **kwargs)

    return wrapped
