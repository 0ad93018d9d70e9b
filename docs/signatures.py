"""For the site: functions whose keyword arguments are described elsewhere (`gpuload.core.keywords.takes`) are shown as
`help` shows them, with every argument, its type, its default and its meaning."""

import importlib
import inspect
import re
from typing import Any

import griffe


class CompleteSignatures(griffe.Extension):  # type: ignore[misc]
    """Replaces signature and docstring of decorated functions with those of the functions themselves."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if not any(each.callable_path.rpartition(".")[2] == "takes" for each in func.decorators):
            return
        function = getattr(importlib.import_module(func.module.path), func.name)
        func.parameters = griffe.Parameters(*map(_parameter, inspect.signature(function).parameters.values()))
        func.docstring = griffe.Docstring(inspect.cleandoc(function.__doc__), parent=func)
        func.decorators = []


def _parameter(given: inspect.Parameter) -> griffe.Parameter:
    default = None if given.default is given.empty else repr(given.default)
    kind = griffe.ParameterKind[given.kind.name.lower()]
    hint = inspect.formatannotation(given.annotation).replace("typing.", "").replace("collections.abc.", "")
    hint = re.sub(r"Optional\[(Literal\[[^]]*\])\]", r"\1 | None", hint)
    return griffe.Parameter(given.name, annotation=hint, kind=kind, default=default)
