"""The package's structure: imports go one way, files stay short, names are unique."""

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import gpuload

PACKAGE = Path(gpuload.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MOST_LINES = 400

# The floors of the package, from the ground up. A room imports from floors below its own only.
FLOORS = [
    {"core"},
    {"packing", "demo_data", "sources", "reference", "tokenizer"},
    {"media"},
    {"template"},
    {"engines"},
    {"cache", "dataset"},
    {"pipeline"},
    {"kinds"},
    {"inspect", "export"},
    {"integrations"},
    {"cli"},
]
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
ROOT = {"__init__", "__main__", "_version", "export"}


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path) -> set[str]:
    """The package's modules that a file imports, at its top level or inside functions, for types or to use them."""
    modules = {module_of(each) for each in FILES}
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gpuload"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in modules else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("gpuload")}
    return found - {module_of(file)}


IMPORTS = {module_of(file): imports_of(file) for file in FILES}


def test_imports_have_no_cycle() -> None:
    # `gpuload/__init__.py` looks names up when they are first used, and for type checkers.
    below = {name: modules - {"gpuload"} for name, modules in IMPORTS.items() if name != "gpuload"}
    done: set[str] = set()
    while ready := {name for name in below if name not in done and below[name] <= done | {name}}:
        done |= ready
    assert sorted(set(below) - done) == []


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_rooms_import_only_from_floors_below() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, modules in IMPORTS.items()
        for other in modules
        if room_of(name) in FLOOR_OF and room_of(other) in FLOOR_OF and room_of(name) != room_of(other)
        if FLOOR_OF[room_of(other)] >= FLOOR_OF[room_of(name)]
    ]
    assert wrong == []


def test_every_module_has_a_floor() -> None:
    assert {file.stem for file in PACKAGE.glob("*.py")} == ROOT
    assert {room_of(module_of(file)) for file in FILES if file.parent != PACKAGE} == set(FLOOR_OF) - {"export"}


def test_engines_of_a_machine_do_not_import_the_other() -> None:
    wrong = [
        name for name, modules in IMPORTS.items() for other in modules
        if name.startswith("gpuload.engines.host.") and other.startswith("gpuload.engines.device")
    ]  # fmt: skip
    assert wrong == []


def test_host_and_device_have_the_same_modules() -> None:
    host, device = ({file.name for file in (PACKAGE / "engines" / side).glob("*.py")} for side in ("host", "device"))
    assert {"engine.py", "texts.py", "render.py", "encode.py", "batches.py"} <= host & device


def test_files_are_short() -> None:
    sources = [*FILES, *(file for file in PACKAGE.rglob("*") if file.suffix in (".cu", ".cuh", ".h"))]
    lengths = {str(file.relative_to(PACKAGE)): len(file.read_text().splitlines()) for file in sources}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES} == {}


def test_class_names_are_unique() -> None:
    homes = defaultdict(list)
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(module_of(file))
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def test_every_folder_is_a_package_and_wheels_have_its_files() -> None:
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {file.parent: module_of(file) for file in FILES if file.name == "__init__.py"}
    # Wheels have the packages that setuptools finds: folders with an `__init__.py`.
    assert {file.parent for file in FILES} == set(folders)
    for file in PACKAGE.rglob("*"):
        if file.is_dir() or file.suffix in (".py", ".pyc"):
            continue
        folder = next(folder for folder in file.parents if folder in folders)
        patterns = settings["package-data"].get(folders[folder], [])
        assert any(file.relative_to(folder).match(pattern) for pattern in patterns), file


REQUIREMENTS = sorted((PACKAGE.parent / "bench").rglob("*requirements.txt"))
# What PyTorch, transformers and datasets, of which each trainer requires versions, need themselves.
OF_TRAINERS = {"torch", "transformers", "tokenizers", "filelock", "fsspec", "numpy", "pyarrow"}


def test_environments_of_trainers_have_what_the_package_needs() -> None:
    """It is not installed there, but imported from the checkout."""
    needed = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.split("[<=>]", line)[0] for line in needed}
    assert REQUIREMENTS
    for file in REQUIREMENTS:
        given = {re.split("[<=>]", line)[0] for line in file.read_text().splitlines()}
        assert names - OF_TRAINERS - given == set(), file
