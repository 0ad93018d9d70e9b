"""Renders the vendor's template with symbolic texts, in transformers' own Jinja environment.

transformers compiles chat templates in a sandboxed Jinja environment with its own filters and globals.
`TracingTemplate` takes a new copy of exactly that environment and instruments every place where text is joined,
inspected or printed:

- The functions that Jinja's generated code calls to print a value, to join values (`~`) and to collect the output of a
  macro, block or call accept ropes and return ropes.
- `+`, `%`, `*` and `**` go through the sandbox's operator hook.
- Filters and tests reject symbolic arguments, except those that are listed below.
- The size of what operators, filters and methods of strings return is limited, before it is computed (`bounds.py`).
- Every loop pass and every call counts as a step, and the number of steps and seconds is limited, so that a template
  that does not terminate is stopped.

The template's source and its operations on known values are unchanged.
"""

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2
import jinja2.filters
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpuload.reference.deadline import EndlessError
from gpuload.reference.template_source import parsed, vendor_environment
from gpuload.template.bounds import call_size, deep_size, filter_size, operator_size, size
from gpuload.template.output import Output, output_of
from gpuload.template.rope import TEXT_METHODS, Rope, SplitText, join
from gpuload.template.symbol import Length, NotCompilableError, Symbol, reject

MOST_CHARACTERS = 1 << 25
"""Maximum size of a string or list that a template may build, in addition to 16 times the size of the messages."""

_STEP = "gpuload_step"


class Meter:
    """Counts the steps of one execution of a template, and stops it at a limit."""

    def __init__(self) -> None:
        self.reset(0, 0.0)

    def reset(self, steps: int, seconds: float, characters: int = 0) -> None:
        """Allow `steps` more steps, `seconds` more seconds, and values of `MOST_CHARACTERS + characters`."""
        self.allowed = self.left = steps
        self.deadline = time.monotonic() + seconds
        self.characters = MOST_CHARACTERS + characters

    def bound(self, size: int) -> None:
        """Check the size of a value, if possible before it is built; an `EndlessError` if it is too large."""
        if size > self.characters:
            raise EndlessError(f"the template builds a value of more than {self.characters:,} characters or items")

    def step(self) -> None:
        """Count one step; an `EndlessError` if the limit of steps or seconds is exceeded."""
        self.left -= 1
        # Single steps can be slow, hence the limit of seconds. Reading the clock costs more than a step: every 64th.
        if self.left < 0 or (self.left % 64 == 0 and time.monotonic() > self.deadline):
            raise EndlessError(f"the template does not terminate (stopped after {self.allowed - self.left:,} steps)")


class TracingTemplate:
    """A chat template that can be rendered with symbolic texts. Callers reset the meter before each `render`.

    Raises:
        NotCompilableError: this version of transformers creates its environment in another way.
        jinja2.TemplateSyntaxError: `text` is not a valid template.
    """

    def __init__(self, text: str, meter: Meter, strftime_now: Callable[[str], str]) -> None:
        environment = vendor_environment()
        if environment is None:
            raise NotCompilableError("this version of transformers creates its Jinja environment in an unsupported way")
        _instrument(environment, meter)
        self._extend(environment)
        tree = parsed(text, environment)
        self._rewrite(tree)
        # Jinja has no hook for loops: insert a call to a no-op, which `counted_call` counts, into every loop body.
        for loop in tree.find_all(jinja2.nodes.For):
            call = jinja2.nodes.Call(jinja2.nodes.Name(_STEP, "load"), [], [], None, None)
            loop.body.insert(0, jinja2.nodes.ExprStmt(call, lineno=loop.lineno))
        tree.set_environment(environment)
        environment.globals["strftime_now"] = strftime_now
        environment.globals.pop("lipsum", None)  # random text: two traces would differ
        self._template = jinja2.Template.from_code(
            environment, environment.compile(tree), environment.make_globals(None)
        )
        # Generated code prints with `str` and evaluates `~` with `str_join`, looked up in its module's globals.
        # Replacing them there covers every print and every `~`.
        module: dict[str, Any] = self._template.root_render_func.__globals__
        module["str"] = functools.partial(_printed, meter)
        module["str_join"] = lambda parts: _join(meter, [_printed(meter, part) for part in parts])
        for name in ("escape", "markup_join"):
            module[name] = _known_only(module[name], "autoescape")
        self._patch(module)
        self._output: list[Any] = []
        self._blocks: list[tuple[int, Any]] = []  # for each generation block: how much was printed before it, its text

        @jinja2.pass_eval_context
        def generation(_: object, caller: Callable[[], Any]) -> Any:
            return self._generated(caller())

        for extension in environment.extensions.values():
            if "generation" in extension.tags:
                extension._generation_support = generation  # type: ignore[attr-defined]

    def _extend(self, environment: Any) -> None:
        """Replace further hooks, filters and tests of the environment, before the template is parsed."""

    def _rewrite(self, tree: Any) -> None:
        """Change the parsed template, before it is compiled."""

    def _patch(self, module: dict[str, Any]) -> None:
        """Replace further globals of the generated code."""

    def _generated(self, text: Any) -> Any:
        """What is printed of a `{% generation %}` block: as transformers' extension does it, with ropes."""
        self._blocks.append((len(self._output), text))
        return text

    def render(self, context: Mapping[str, Any]) -> Output:
        """Return the prompt for the template's variables, in which texts are ropes.

        Raises:
            NotCompilableError: the template does something with a text that cannot be compiled.
            EndlessError: the template exceeded a limit.
            Exception: whatever the template raises.
        """
        self._output, self._blocks = [], []
        # One by one: a block that is executed between two parts is printed between them.
        for part in self._template.root_render_func(self._template.new_context(dict(context))):
            self._output.append(part)
        return output_of(self._output, self._blocks)


def _text(value: object) -> str | Rope:
    """Return `str(value)`, as printing and `~` do, but a rope unchanged."""
    return value if isinstance(value, Rope) else str(value)


def _printed(meter: Meter, value: object) -> str | Rope:
    """`_text`, for values that are not too large to print: lists that contain others can be."""
    if isinstance(value, (list, tuple, dict)):
        meter.bound(deep_size(value))
    return _text(value)


def wrapping(known: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or test that calls `function` with the known one, and then its arguments; for Jinja, it looks like
    the known one."""
    return functools.wraps(known)(functools.partial(function, known))


def _known_only(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Wrap `function` so that it rejects symbolic values anywhere in its arguments."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if any(holds_symbol(value) for value in (*args, *kwargs.values())):
            reject(f"applies {what} to a message's text")
        return function(*args, **kwargs)

    return wrapped


def holds_symbol(value: object) -> bool:
    if not isinstance(value, (dict, list, tuple)):
        return isinstance(value, Symbol)
    waiting, seen = [value], set()
    while waiting:
        item: Any = waiting.pop()
        if isinstance(item, Symbol):
            return True
        # By identity: a list that contains another one twice, and so on, is looked at once.
        if isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            waiting += item.values() if isinstance(item, dict) else item
    return False


def _instrument(environment: ImmutableSandboxedEnvironment, meter: Meter) -> None:
    """Replace the environment's hooks, filters and tests by versions that support or reject symbolic values."""
    # The original methods, called by their replacements.
    getattr_, getitem = environment.getattr, environment.getitem
    call, call_binop = environment.call, environment.call_binop

    def attribute(obj: Any, name: str) -> Any:
        if isinstance(obj, Symbol) and not (isinstance(obj, Rope) and name in TEXT_METHODS):
            reject(f"uses the attribute {name} of a message's text")
        return getattr_(obj, name)

    def item(obj: Any, key: Any) -> Any:
        if isinstance(obj, SplitText):
            return obj[key]
        if isinstance(obj, Symbol):
            reject("indexes into a message's text")
        if isinstance(key, Symbol):
            reject("uses a message's text as a key of a mapping")
        return getitem(obj, key)

    def counted_call(context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter.step()
        # `", ".join(parts)` is the only method of a known string that is supported with ropes as arguments.
        if getattr(obj, "__name__", "") == "join" and type(getattr(obj, "__self__", None)) is str and len(args) == 1:
            parts = list(args[0])
            if any(isinstance(part, Symbol) for part in parts):
                return _join_with(meter, obj.__self__, parts)
            args = (parts,)
        meter.bound(call_size(obj, args, kwargs))
        result = call(context, obj, *args, **kwargs)
        meter.bound(size(result))
        return result

    def operator(context: Any, name: str, left: Any, right: Any) -> Any:
        if name == "%" and type(left) is str and (isinstance(right, Symbol) or holds_symbol(right)):
            return _percent(meter, left, right)
        meter.bound(operator_size(name, left, right))
        return call_binop(context, name, left, right)

    patched: Any = environment  # Any: methods are assigned to
    patched.getattr, patched.getitem, patched.call, patched.call_binop = attribute, item, counted_call, operator
    patched.intercepted_binops = frozenset(["+", "%", "*", "**"])
    patched.concat = lambda parts: _join(meter, list(parts))
    environment.globals[_STEP] = lambda: None
    for name, function in list(patched.filters.items()):
        patched.filters[name] = _bounded(_symbolic_filter(function, name, meter), name, meter)
    for name, test in list(patched.tests.items()):
        patched.tests[name] = _test(test, name)
    patched.filters["random"] = lambda *_: reject("uses the filter random")


def _join(meter: Meter, parts: list[Any]) -> str | Rope:
    meter.bound(sum(map(size, parts)))
    return join(parts)


def _bounded(function: Callable[..., Any], name: str, meter: Meter) -> Callable[..., Any]:
    """A filter whose result is not too large."""
    skip = int(hasattr(function, "jinja_pass_arg"))

    def bounded(known: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        meter.bound(filter_size(name, args[skip:], kwargs))
        result = known(*args, **kwargs)
        meter.bound(size(result))
        return result

    return wrapping(function, bounded)


def _join_with(meter: Meter, separator: str | Rope, parts: Iterable[object]) -> str | Rope:
    joined: list[object] = []
    for part in parts:
        joined += [separator, part]
    return _join(meter, joined[1:])


def _percent(meter: Meter, template: str, values: object) -> str | Rope:
    """Evaluate `template % values`, where `template` contains plain `%s` only."""
    pieces = template.split("%s")
    given = values if isinstance(values, tuple) else (values,)
    if any("%" in piece for piece in pieces) or len(pieces) != len(given) + 1:
        reject("formats a message's text with % and something other than plain %s")
    texts = [_printed(meter, value) for value in given]
    return _join(meter, [pieces[0], *(part for pair in zip(texts, pieces[1:], strict=True) for part in pair)])


# Filters. Those not listed here accept known values only.

_STRUCTURAL_FILTERS = frozenset("batch d default first items last list map reject rejectattr select selectattr".split())
"""Filters that only select or pass on values, unchanged. (A rope in place of the list is rejected when iterated.)"""


def _join_filter(
    meter: Meter, known: Callable[..., Any], context: Any, value: Any, d: Any = "", attribute: Any = None
) -> Any:
    parts = list(value)
    if isinstance(d, Symbol) or any(isinstance(part, Symbol) for part in parts):
        if attribute is not None:
            reject("uses the filter join with an attribute on a message's text")
        return _join_with(meter, _text(d), [_printed(meter, part) for part in parts])
    return known(context, parts, d, attribute)


def _format(meter: Meter, known: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    if type(value) is str and not kwargs and any(isinstance(arg, Symbol) for arg in args):
        return _percent(meter, value, args)
    return known(value, *args, **kwargs)


def _replace(value: Rope, old: Any, new: Any, count: Any = None) -> Rope:
    return value.replace(old, new, -1 if count is None else count)


_JOINING: dict[str, Callable[..., Any]] = {"join": _join_filter, "format": _format}
"""Filters that accept known values with ropes in them."""

_ON_ROPES: dict[str, Callable[..., Any]] = {
    "trim": lambda value, chars=None: value.strip(chars),
    "string": lambda value: value,
    "lower": lambda value: value.lower(),
    "upper": lambda value: value.upper(),
    "replace": _replace,
    "length": Length,
    "count": Length,
}
"""What filters do with a rope. Lengths of other values do not depend on the texts in them."""


def _symbolic_filter(function: Callable[..., Any], name: str, meter: Meter) -> Callable[..., Any]:
    """A filter that accepts symbolic values as far as it is listed."""
    if name in _STRUCTURAL_FILTERS:
        return function
    known = function if _ON_ROPES.get(name) is Length else _known_only(function, f"filter {name}")
    if name in _JOINING:
        return wrapping(known, functools.partial(_JOINING[name], meter))
    if name not in _ON_ROPES:
        return known
    skip = int(hasattr(function, "jinja_pass_arg"))  # Jinja passes the context or environment to some filters first

    def on_rope(known: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(args) > skip and isinstance(args[skip], Rope):
            return _ON_ROPES[name](*args[skip:], **kwargs)
        return known(*args, **kwargs)

    return wrapping(known, on_rope)


# Tests (`x is string`). A rope is not a `str`, so tests of its type are answered from this table, as for a string.
# Comparisons call the rope's own operators.

_TYPE_OF_TEXT = {
    "string": True, "iterable": True, "sequence": True, "mapping": False, "number": False, "integer": False,
    "float": False, "boolean": False, "callable": False, "none": False, "defined": True, "undefined": False,
    "true": False, "false": False,
}  # fmt: skip
_COMPARISONS = frozenset("eq equalto == ne != lt lessthan < le <= gt greaterthan > ge >= in".split())


def _test(test: Callable[..., Any], name: str) -> Callable[..., Any]:
    if name in _COMPARISONS:
        return test

    def typed(known: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        subject = args[0] if args else None
        if name not in _TYPE_OF_TEXT or (isinstance(subject, Symbol) and not isinstance(subject, Rope)):
            return known(*args, **kwargs)
        # For a list or mapping that contains ropes, these tests do not depend on the texts.
        return _TYPE_OF_TEXT[name] if isinstance(subject, Rope) else test(*args, **kwargs)

    return wrapping(_known_only(test, f"test {name}"), typed)
