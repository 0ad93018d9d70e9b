"""Every name of CuPy, RMM and pylibcudf that the device engine uses exists in the installed package.

CuPy is not typed, and a name that only Cython sees (a `cdef` enum) fails where it is first used: on a GPU, or not even
there until memory runs out.
"""

import ast
import gc
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cupy
import pytest

import gpuload
from gpuload.core.errors import DeviceError
from gpuload.engines.device.cuda import CudaKernels

FILES = [
    *sorted(Path(gpuload.__file__).parent.glob("engines/**/*.py")),
    Path(gpuload.__file__).parent / "core/arrays.py",
]
PACKAGES = ("cupy", "rmm", "pylibcudf")


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` of an expression made of names and attributes only."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (value := dotted(node.value)):
        return f"{value}.{node.attr}"
    return None


def expanded(text: str, known: dict[str, str]) -> str:
    first, dot, rest = text.partition(".")
    return known.get(first, first) + dot + rest


def aliases(tree: ast.Module) -> dict[str, str]:
    """Local names → the dotted names that they stand for: imports, and assignments such as `cuda = self.xp.cuda`."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = "" if isinstance(node, ast.Import) else f"{node.module}."
            for name in node.names:
                if (module or name.name).split(".")[0] in PACKAGES:
                    found[name.asname or name.name] = f"{module}{name.name}"
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=True) if several else [(target, value)]  # type: ignore[attr-defined]
            for name, value in pairs:
                text = expanded(dotted(value) or "", found)
                if isinstance(name, ast.Name) and ".xp." in f".{text}.":
                    found[name.id] = text
    return found


def names_used(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name (`cupy.cuda.runtime.memGetInfo`) of each use. `xp` counts as CuPy."""
    gc.collect()  # a destructor that fails while Python 3.11 parses prints a traceback, which parses, too: SystemError
    tree = ast.parse(path.read_text())
    local = aliases(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not (text := dotted(node)):
            continue
        text = expanded(text, local)
        for module in ("xp.", *(f"{package}." for package in PACKAGES)):
            if module in f".{text}" and f".{module}" in f".{text}":
                name = text[f".{text}".index(f".{module}") :]
                yield node.lineno, name.replace("xp.", "cupy.", 1)


def exists(name: str) -> bool:
    """Whether each attribute exists, as far as they are modules and classes."""
    first, *rest = name.split(".")
    owner: Any = importlib.import_module(first)
    for depth, attribute in enumerate(rest, 1):
        if not isinstance(owner, ModuleType | type):
            return True
        if not hasattr(owner, attribute):
            try:
                importlib.import_module(".".join([first, *rest[:depth]]))
            except ImportError:
                return False
        owner = getattr(owner, attribute)
    return True


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_names_exist(path: Path) -> None:
    assert [f"line {line}: {name}" for line, name in names_used(path) if not exists(name)] == []


def test_names_that_are_missing_are_found(tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(
        "import rmm\n"
        "def f(self):\n"
        "    cuda, stack = self.xp.cuda, None\n"
        "    runtime = cuda.runtime\n"
        "    runtime.errorMemoryAllocation, cuda.Stream.null, self.xp.empty, rmm.mr.nothing\n"
    )
    missing = {name for _, name in names_used(path) if not exists(name)}
    assert missing == {"cupy.cuda.runtime.errorMemoryAllocation", "rmm.mr.nothing"}


@pytest.mark.parametrize(("status", "raised"), [(2, DeviceError), (1, cupy.cuda.runtime.CUDARuntimeError)])
def test_out_of_memory_while_ids_are_stored(status: int, raised: type[Exception]) -> None:
    kernels = object.__new__(CudaKernels)
    kernels.xp = cupy
    with pytest.raises(raised), kernels.lasting():
        raise cupy.cuda.runtime.CUDARuntimeError(status)
