"""The examples in docstrings: every public function has one, and all of them run."""

import doctest
import importlib
import inspect
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gpuload
from gpuload.demo_data import demo_files

PACKAGE = Path(gpuload.__file__).parent
# Those of integrations need the trainers.
MODULES = [
    ".".join(("gpuload", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for file in sorted(PACKAGE.rglob("*.py"))
    if "    >>> " in file.read_text(encoding="utf-8") and "integrations" not in file.parts
]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NOT_FOR_USERS = {"ahead", "of_tokenizer"}


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What examples of methods begin with: `load` and the classes say how it is made."""
    file, tokenizer = demo_files()
    pairs = {"prompt": ["1 + 1 ="], "chosen": [" 2"], "rejected": [" 3"]}
    return {
        "Path": Path,
        "prompts": gpuload.load(file, tokenizer, max_samples=100, progress=False),
        "chats": gpuload.load_chats(pa.table({"text": ["two words", "one"]}), tokenizer, progress=False),
        "pairs": gpuload.load_pairs(pa.table(pairs), tokenizer, progress=False),
    }


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_run(module: str, names: dict[str, Any]) -> None:
    outcome = doctest.testmod(importlib.import_module(module), optionflags=FLAGS, extraglobs=names)
    assert outcome.attempted > 0
    assert outcome.failed == 0


def public() -> Iterator[tuple[str, Any]]:
    for name in gpuload.__all__:
        thing = getattr(gpuload, name)
        methods = inspect.getmembers(thing, inspect.isroutine) if inspect.isclass(thing) else [("", thing)]
        for method, function in methods:
            ours = (getattr(function, "__module__", None) or "").startswith("gpuload.")
            ours = ours and not isinstance(function, cached_property)  # a routine since Python 3.13
            if ours and not method.startswith("_") and method not in NOT_FOR_USERS:
                yield f"{name}.{method}", function


@pytest.mark.parametrize(("name", "function"), list(public()))
def test_every_public_function_has_an_example(name: str, function: Any) -> None:
    assert ">>> " in (inspect.getdoc(function) or "")
