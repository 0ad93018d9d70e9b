"""Whether the code of a trainer that an integration replaces is known: then the integration replaces it exactly.

A version number does not say what has changed, and a comparison of some rows does not say what would become of others.
So each integration has a table with digests of the functions that it replaces, each with all that it uses of the
trainer's package. Comments, docstrings, annotations and the places of definitions are not part of a digest.

    known digest                            gpuload is used
    another digest, the same parameters     gpuload and the trainer prepare up to 64 rows; it is used if they are equal,
                                            and not used where there is nothing to compare
    other parameters, or a missing name     the trainer does the work itself

To make a release known, run the tests of the integration with it, and add its digests to `KNOWN` in its `contract.py`:

    python -m gpuload.integrations.known_code trl
"""

import ast
import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

Table = Mapping[str, Mapping[str, str]]
"""Function, such as "trl.data_utils:pack_dataset" → digest → the releases in which it was seen."""

_MOST = 400  # definitions in a digest. None of those that are known has more than 70.
_LEFT_OUT = {"annotation", "returns", "type_comment", "kind", "ctx", "type_params"}


def problem(expected: Mapping[str, tuple[Any, Sequence[str]]]) -> str | None:
    """The sentence "SFTTrainer._prepare_dataset has the parameters self, dataset"; None if all have those expected.

    `expected` has for each name a function or class as it is now, None if there is none, and its parameters where it is
    known.
    """
    for name, (found, parameters) in expected.items():
        now = () if found is None else tuple(inspect.signature(found).parameters)
        if now != tuple(parameters):
            names = ", ".join(now) or "(none)"
            return f"{name} has the fields {names}" if is_dataclass(found) else f"{name} has the parameters {names}"
    return None


def change(release: str, table: Table, *functions: Any) -> str | None:
    """The sentence "TRL 1.17.0: SFTTrainer._prepare_dataset has changed"; None if all functions, as they are used now,
    are known.

    Those in the table of the integration have the same names.
    """
    for function in functions:
        name = function.__qualname__
        known = {each for place, seen in table.items() if place.endswith(f":{name}") for each in seen}
        if digest(function) not in known:
            return f"{release}: {name} has changed"
    return None


def digest(function: Any) -> str | None:
    """A digest of a function or method, and of what it uses of its package.

    None if it was replaced by one that is defined elsewhere, or if there is no source file.
    """
    function = inspect.unwrap(getattr(function, "__func__", function))
    module = sys.modules.get(function.__module__)
    file, code = getattr(module, "__file__", None), getattr(function, "__code__", None)
    if file is None or code is None or code.co_filename != file:
        return None
    package = function.__module__.partition(".")[0]
    folders = getattr(sys.modules[package], "__path__", [file])
    return _digest(_Sources(package, tuple(folders)), _Place(function.__module__, function.__qualname__))


def digests_of(table: Table, folder: str | None = None) -> dict[str, str | None]:
    """The digests of the functions in a table, from the source files in a folder with the trainer's package; None for
    the installed one. Nothing of the trainer is imported."""
    made = {}
    for function in table:
        module, _, name = function.partition(":")
        top = module.partition(".")[0]
        spec = find_spec(top) if folder is None else None
        folders = [str(Path(folder, top))] if folder else spec.submodule_search_locations if spec else None
        made[function] = _digest(_Sources(top, tuple(folders or ())), _Place(module, name))
    return made


# -- definitions -------------------------------------------------------------------------------------------------------


class _Sources(NamedTuple):
    """Its name, and its folders; a package of a single module has that file."""

    name: str
    folders: tuple[str, ...]


class _Place(NamedTuple):
    """A definition: the module, and the name there, such as "Class.method". A module itself has no name."""

    module: str
    name: str = ""


def _digest(package: _Sources, place: _Place) -> str | None:
    first = _resolved(package, place.module, place.name)
    found: dict[_Place, str] = {}
    waiting = [] if first is None else [first]
    while waiting and len(found) < _MOST:
        here = waiting.pop(0)
        if here in found:
            continue
        nodes = _nodes(package, here)
        found[here] = repr([_plain(node) for node in nodes])
        waiting += [used for node in nodes for used in _used(package, here, node)]
    return hashlib.blake2b("\n".join(found.values()).encode(), digest_size=8).hexdigest() if found else None


def _plain(node: Any) -> Any:
    """A syntax tree as lists, the same in all versions of Python."""
    if isinstance(node, list):
        return [_plain(each) for each in node if not _is_docstring(each)]
    if isinstance(node, ast.Constant):
        return ["text", node.value] if isinstance(node.value, str) else ["value", repr(node.value)]
    if isinstance(node, ast.JoinedStr):
        return ["f-string", *_joined(list(map(_plain, node.values)))]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in _LEFT_OUT]
    return [type(node).__name__, *((name, _plain(value)) for name, value in fields if value not in (None, []))]


def _joined(parts: list[Any]) -> Iterator[Any]:
    """The parts of an f-string. Python 3.12 may cut the text between two values into pieces."""
    for is_text, some in groupby(parts, lambda part: part[0] == "text"):
        if not is_text:
            yield from some
        elif text := "".join(part[1] for part in some):
            yield ["text", text]


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _below(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a definition, in the order of the source, without annotations."""
    yield node
    for name, value in ast.iter_fields(node):
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST) and name not in _LEFT_OUT:
                yield from _below(each)


def _used(package: _Sources, here: _Place, node: ast.AST) -> Iterator[_Place]:
    """The definitions of the package that a definition uses."""
    kind = _Place(here.module, here.name if isinstance(node, ast.ClassDef) else here.name.rpartition(".")[0])
    inside = {name: origin for each in _below(node) for name, origin in _imports(package, here.module, each)}

    def of(name: str) -> _Place | None:
        return _followed(package, inside[name]) if name in inside else _resolved(package, here.module, name)

    for each in _below(node):
        found = None
        if isinstance(each, ast.Name):
            found = of(each.id)
        elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
            base = of(each.value.id)
            if each.value.id in ("self", "cls"):
                found = _member(package, kind, each.attr)
            elif base is not None and not base.name:
                found = _resolved(package, base.module, each.attr)
        elif isinstance(each, ast.Attribute) and _is_super(each.value):
            members = [_member(package, base, each.attr) for base in _bases(package, kind)]
            found = next(filter(None, members), None)
        if found is not None and found.name:
            yield found


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _resolved(package: _Sources, module: str, name: str) -> _Place | None:
    """Where a name of a module is defined; None if that is not in the package."""
    first, _, rest = name.partition(".")
    nodes = _names(_file(package, module)).get(first, [])
    if all(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes):
        imports = [origin for node in nodes for alias, origin in _imports(package, module, node) if alias == first]
        return _followed(package, imports[0]) if imports else None
    return _member(package, _Place(module, first), rest) if rest else _Place(module, first)


def _followed(package: _Sources, origin: _Place) -> _Place | None:
    """Where a name that was imported is defined. It may be that of a module."""
    if not origin.name:
        return origin
    module = f"{origin.module}.{origin.name}"
    return _resolved(package, *origin) or (_Place(module) if _file(package, module) else None)


def _member(package: _Sources, kind: _Place, name: str) -> _Place | None:
    """Where a method, or another attribute, of a class or of one of its bases is defined."""
    if _nodes(package, here := _Place(kind.module, f"{kind.name}.{name}")):
        return here
    members = (_member(package, base, name) for base in _bases(package, kind))
    return next(filter(None, members), None)


def _bases(package: _Sources, kind: _Place) -> list[_Place]:
    bases = [base for node in _nodes(package, kind) if isinstance(node, ast.ClassDef) for base in node.bases]
    found = [_resolved(package, kind.module, base.id) for base in bases if isinstance(base, ast.Name)]
    return [place for place in found if place is not None and place != kind]


def _nodes(package: _Sources, place: _Place) -> list[ast.stmt]:
    """The statements of a definition: several if it depends on a condition."""
    first, *rest = place.name.split(".")
    nodes = _names(_file(package, place.module)).get(first, [])
    for name in rest:
        nodes = [each for node in nodes if isinstance(node, ast.ClassDef) for each in _defined(node.body).get(name, [])]
    return nodes


def _imports(package: _Sources, module: str, node: ast.AST) -> Iterator[tuple[str, _Place]]:
    """The names that a statement imports from the package, each with where it comes from."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            if top == package.name:
                yield alias.asname or top, _Place(alias.name if alias.asname else top)
    elif isinstance(node, ast.ImportFrom):
        origin = node.module or ""
        if node.level:
            is_package = (_file(package, module) or "").endswith("__init__.py")
            above = module.split(".")[: len(module.split(".")) - node.level + is_package]
            origin = ".".join([*above, *filter(None, [origin])])
        if origin.partition(".")[0] == package.name:
            yield from ((alias.asname or alias.name, _Place(origin, alias.name)) for alias in node.names)


# -- files -------------------------------------------------------------------------------------------------------------


@lru_cache(4096)
def _file(package: _Sources, module: str) -> str | None:
    rest = module.split(".")[1:]
    for folder in package.folders:
        path = Path(folder, *rest)
        for file in (path, path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.suffix == ".py" and file.is_file():
                return str(file)
    return None


@lru_cache(256)
def _names(file: str | None) -> dict[str, list[ast.stmt]]:
    """Name → the statements of a module that define or import it."""
    try:
        return _defined(ast.parse(Path(file).read_bytes()).body) if file else {}
    except (OSError, SyntaxError, ValueError):
        return {}


def _defined(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    found: dict[str, list[ast.stmt]] = {}
    for node in body:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        elif isinstance(node, ast.If | ast.Try | ast.With):
            inner = [*node.body, *getattr(node, "orelse", [])]
            inner += [each for handler in getattr(node, "handlers", []) for each in handler.body]
            for name, nodes in _defined(inner).items():
                found.setdefault(name, []).extend(nodes)
        for name in names:
            found.setdefault(name, []).append(node)
    return found


def main(arguments: list[str]) -> None:
    """Print the digests of a trainer's functions: of the integration with this name, and the package in this folder,
    unless it is installed."""
    table: Table = import_module(f"gpuload.integrations.{arguments[0]}.contract").KNOWN
    for function, found in digests_of(table, *arguments[1:2]).items():
        seen = table[function].get(found or "")
        print(function, found, f"known from {seen}" if seen else "not known")


if __name__ == "__main__":
    main(sys.argv[1:])
