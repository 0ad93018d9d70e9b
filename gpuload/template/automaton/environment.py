"""The template in transformers' Jinja environment, instrumented for symbolic conversations (`symbols.py`)."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.utils import Namespace

from gpuload.template.automaton.filters import (
    TESTS,
    Known,
    as_list,
    calling,
    dictsort,
    integer,
    length,
    listed,
    on_text,
    reverse,
    selected,
    typed,
)
from gpuload.template.automaton.loops import Loop
from gpuload.template.automaton.nodes import Affine, TextSource
from gpuload.template.automaton.recorder import Buffer, BufferedCode, Recorder
from gpuload.template.automaton.rewriting import Conditions, call_of
from gpuload.template.automaton.symbols import (
    SplitParts,
    SymbolicList,
    SymbolicMapping,
    characters_of,
    lines_of,
    placed,
    split,
)
from gpuload.template.automaton.values import Printable, Range, Safe, SymbolicNumber, Text, Value, text_of
from gpuload.template.rope import Rope, join
from gpuload.template.sandbox import TracingTemplate, holds_symbol, wrapping
from gpuload.template.symbol import Symbol, reject

_ITERATE, _WITH_ELSE, _FILTERED, _KEYS = "gpuload_iterate", "gpuload_else", "gpuload_filtered", "gpuload_keys"

_METHODS: dict[str, Callable[[Text], Any]] = {
    "capitalize": lambda text: text.capitalize,
    "title": lambda text: text.title,
    "split": lambda text: functools.partial(split, text, "split"),
    "rsplit": lambda text: functools.partial(split, text, "rsplit"),
    "splitlines": lambda text: functools.partial(lines_of, text),
}

LONGEST_TEXT = 1 << 14
"""Loops over longer texts are for transformers: each pass is traced, and such loops are not faster here."""

_MOST_KEYS = 64
"""A text is compared with so many keys of a mapping at most."""


class RecordingTemplate(TracingTemplate):
    """A chat template that writes down what it does. For the arguments see `TracingTemplate`."""

    recorder: Recorder

    def run(self, recorder: Recorder, context: Mapping[str, Any]) -> None:
        """Records one execution. `recorder` gets all but its end.

        Raises:
            NotCompilableError: the template does something that cannot be recorded.
            Exception: whatever the template raises.
        """
        self.recorder = recorder
        symbols = {name: recorder.at((name,))[1] for name in recorder.row}
        for part in self._template.root_render_func(self._template.new_context({**context, **symbols})):
            if isinstance(part, _Generated):
                recorder.emit(part.text, True)
            else:
                recorder.emit(part, False)

    def _extend(self, environment: Any) -> None:
        environment.code_generator_class = BufferedCode
        attribute, item, concat, call = environment.getattr, environment.getitem, environment.concat, environment.call
        names = {"get", "items", "keys", "values"}

        def found(obj: Any, key: Any) -> Any:
            there, value = obj.find(key)
            return value if there else environment.undefined(obj=self.recorder.value(obj.place), name=key)

        def new_attribute(obj: Any, name: str) -> Any:
            if isinstance(obj, SymbolicMapping):
                if hasattr({}, name):
                    return getattr(obj, name) if name in names else reject(f"calls {name} of a mapping")
                return found(obj, name)
            if isinstance(obj, Value):
                reject(f"uses the attribute {name} of a value of a conversation")
            if isinstance(obj, Text) and name in _METHODS:
                return _METHODS[name](obj)
            if isinstance(obj, Text) and not hasattr(str, name):
                return environment.undefined(obj="", name=name)
            return attribute(obj, name)

        def new_item(obj: Any, key: Any) -> Any:
            if isinstance(obj, SplitParts) and not (type(key) is int and key in (0, -1)):
                obj = obj.listed()
            if type(obj) is dict and isinstance(key, Rope):
                same = next((each for each in _Keys(obj).texts() if key == each), None)
                return reject("looks for a text in a mapping that does not have it") if same is None else obj[same]
            if isinstance(obj, SymbolicMapping):
                of_class = type(key) is str and hasattr({}, key) and key not in obj
                return new_attribute(obj, key) if of_class else found(obj, key)
            if isinstance(obj, SymbolicList):
                if isinstance(key, slice):
                    return obj.sliced(key)
                if type(key) is not int and not isinstance(key, SymbolicNumber):
                    reject("indexes a list with something other than a number")
                return found(obj, key)
            if isinstance(obj, Rope) and (type(key) is int or isinstance(key, SymbolicNumber)):
                there, value = characters_of(self.recorder, obj).find(key)
                return value if there else environment.undefined(obj="", name=key)
            if isinstance(obj, Text) and type(key) is str and not hasattr(str, key):
                return environment.undefined(obj="", name=key)
            return item(obj, key)

        def new_concat(parts: Any) -> Any:
            if isinstance(parts, Buffer):
                while self.recorder.buffers and self.recorder.buffers.pop() is not parts:
                    pass
                return join(list(parts))
            return concat(parts)

        def new_call(context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
            owner = getattr(function, "__self__", None)
            given = listed(args[0]) if len(args) == 1 else None
            if type(owner) is not str or function.__name__ != "join" or not isinstance(given, SymbolicList):
                return call(context, function, *args, **kwargs)
            place = placed(self.recorder, given)
            if not self.recorder.only_texts(place):
                raise TypeError("a list is joined that contains something other than texts")
            return text_of(self.recorder, TextSource("join", place, (owner,)))

        environment.getattr, environment.getitem, environment.concat = new_attribute, new_item, new_concat
        environment.call = new_call
        environment.globals[_ITERATE] = self._iterate
        environment.globals[_WITH_ELSE] = self._iterate_with_else
        environment.globals[_FILTERED] = _filtered
        environment.globals[_KEYS] = lambda value: _Keys(value) if type(value) is dict else value
        environment.globals["namespace"] = self._namespace
        environment.globals["range"] = wrapping(environment.globals["range"], self._range)
        for name in ("cycler", "joiner"):
            environment.globals.pop(name, None)
        filters, tests = environment.filters, environment.tests
        own: dict[str, Callable[..., Any]] = {
            **{"tojson": self._json, "join": self._joined, "safe": self._safe},
            "string": functools.partial(calling, "text", Printable),
            "items": functools.partial(calling, "items", SymbolicMapping),
            "capitalize": functools.partial(calling, "capitalize", Text),
            **{"length": length, "count": length, "list": as_list, "int": integer, "reverse": reverse},
            "dictsort": dictsort,
            **{name: functools.partial(self._end, at, environment) for name, at in (("first", 0), ("last", -1))},
            **dict.fromkeys(("trim", "lower", "upper", "replace"), on_text),
            **dict.fromkeys(("map", "select", "reject", "selectattr", "rejectattr"), self._each),
        }
        for name, function in own.items():
            filters[name] = wrapping(filters[name], function)
        for name in ("selectattr", "rejectattr"):
            filters[name] = wrapping(filters[name], functools.partial(selected, name == "rejectattr"))
        for name in TESTS & set(tests):
            tests[name] = wrapping(tests[name], functools.partial(typed, name))

    def _rewrite(self, tree: Any) -> None:
        for comparison in tree.find_all(jinja2.nodes.Compare):
            for operand in comparison.ops:
                if operand.op in ("in", "notin"):
                    operand.expr = call_of(_KEYS, operand.expr)
        Conditions().visit(tree)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            if loop.recursive:
                continue
            names = {name.name for each in loop.body for name in each.find_all(jinja2.nodes.Name)}
            if loop.test is not None and "loop" not in names and not loop.else_:
                # The same, without the generator that Jinja makes of the condition.
                loop.body = [jinja2.nodes.If(loop.test, loop.body, [], [], lineno=loop.lineno)]
                loop.test = None
            # A condition depends on the passes of a generator, which are not in the key of a head.
            loop.iter = call_of(
                _FILTERED if loop.test is not None else _WITH_ELSE if loop.else_ else _ITERATE, loop.iter
            )

    def _patch(self, module: dict[str, Any]) -> None:
        printed, loops = module["str"], module["LoopContext"]

        def text(value: Any) -> Any:
            if isinstance(value, (list, dict)) and holds_symbol(value):
                return text_of(self.recorder, TextSource("str", placed(self.recorder, value)))
            return value.text() if isinstance(value, Printable) else printed(value)

        module["str"] = text
        joined = module["str_join"]
        module["str_join"] = lambda parts: joined([text(part) for part in parts])
        module["gpuload_buffer"] = self._buffer

        def context(over: Any, undefined: Any, *more: Any) -> Any:
            if isinstance(over, _Passes):
                return Loop(self.recorder, over.over, undefined)
            return loops(over, undefined, *more)

        module["LoopContext"] = context

    def _generated(self, text: Any) -> Any:
        return _Generated(text)

    def _buffer(self) -> Buffer:
        buffer = Buffer()
        self.recorder.buffers.append(buffer)
        return buffer

    def _namespace(self, *args: Any, **kwargs: Any) -> Namespace:
        namespace = Namespace(*args, **kwargs)
        self.recorder.namespaces.append((self.recorder.at_node, namespace))
        return namespace

    def _range(self, known: Known, *args: Any) -> Any:
        if not any(isinstance(each, SymbolicNumber) for each in args):
            return known(*args)
        affine = [each.affine if isinstance(each, SymbolicNumber) else Affine(each) for each in args]
        start, stop = (Affine(0), affine[0]) if len(args) == 1 else affine[:2]
        step = args[2] if len(args) > 2 else 1
        return Range(self.recorder, start, stop, step if type(step) is int else 0)

    def _safe(self, known: Known, value: Any) -> Any:
        if isinstance(value, Printable):
            value = value.text()
        return Safe(self.recorder, value) if isinstance(value, Rope) else known(value)

    def _iterate_with_else(self, over: Any) -> Any:
        """As `_iterate`. Whether there is a pass is asked before, because no head would know it after the loop."""
        over = self._iterate(over)
        return over if not isinstance(over, _Passes) or not self.recorder.compare("==", over.over.length) else ()

    def _iterate(self, over: Any) -> Any:
        over = listed(over)
        if isinstance(over, SymbolicMapping):
            over = over.keys()
        elif isinstance(over, Rope):
            over = characters_of(self.recorder, over)
            if self.recorder.compare("<", Affine(LONGEST_TEXT).plus(over.length, -1)):
                reject(f"loops over the characters of a text of more than {LONGEST_TEXT:,}")
        return _Passes(self.recorder, over) if isinstance(over, (SymbolicList, Range)) else over

    def _json(self, known: Known, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not holds_symbol(value):
            return known(value, *args, **kwargs)
        given = (*((None, each) for each in args), *sorted(kwargs.items()))
        try:
            hash(given)
        except TypeError:
            reject("calls tojson with arguments that cannot be recorded")
        return text_of(self.recorder, TextSource("json", placed(self.recorder, value), given))

    def _joined(self, known: Known, context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
        value = listed(value)
        if not isinstance(value, (SymbolicList, SymbolicMapping)):
            return known(context, value, d, attribute)
        if type(d) is not str or attribute is not None:
            reject("joins a list of a conversation with an attribute, or by a text that differs from row to row")
        return text_of(self.recorder, TextSource("join", placed(self.recorder, value), (d,)))

    def _each(self, known: Known, context: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """A filter that handles each element by itself. Of a list of a conversation it makes a list in a namespace."""
        value = listed(value)
        if not isinstance(value, SymbolicList):
            return known(context, value, *args, **kwargs)
        namespaces = self.recorder.namespaces
        made, outside = self._namespace(kept=[]), len(namespaces) - 1
        for element in self.recorder.passes(self.recorder.enter(), value):
            made["kept"] = made.kept + list(known(context, [element], *args, **kwargs))
        del namespaces[outside:]
        return made.kept

    def _end(self, index: int, environment: Any, known: Known, *args: Any) -> Any:
        """The filter `first`, or `last`."""
        value = args[-1]
        if isinstance(value, Rope):
            value = characters_of(self.recorder, value)
        if isinstance(value, SymbolicList):
            there, found = value.find(index)
            return found if there else environment.undefined("No first item, sequence was empty.")
        return known(*args)


class _Passes:
    """A symbolic list that a `for` loops over."""

    def __init__(self, recorder: Recorder, over: SymbolicList | Range) -> None:
        self.recorder, self.over = recorder, over

    def __iter__(self) -> Any:
        return self.recorder.passes(self.recorder.enter(), self.over)


class _Generated:
    """The text of a `{% generation %}` block."""

    def __init__(self, text: Any) -> None:
        self.text = text


class _Keys:
    """The keys of a known mapping, among which a text can be searched."""

    def __init__(self, mapping: dict[Any, Any]) -> None:
        self._mapping = mapping

    def texts(self) -> list[str]:
        found = [key for key in self._mapping if type(key) is str]
        return found if len(found) <= _MOST_KEYS else reject(f"looks for a text in more than {_MOST_KEYS} keys")

    def __contains__(self, value: object) -> bool:
        return any(value == key for key in self.texts()) if isinstance(value, Rope) else value in self._mapping


def _filtered(over: Any) -> Any:
    if isinstance(over, Symbol):
        reject("loops over a list of a conversation with a condition that its passes may change")
    return over
