"""Digests of a trainer's functions, and the rows on which code that is not known is compared."""

import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from gpuload.integrations import known_code
from gpuload.integrations.comparison import ROWS, comparable, compare, covering_rows, spread
from gpuload.integrations.known_code import change, digest, digests_of, main

TRAINER = """
from .base import Base
from trainer_for_tests import tools
from trainer_for_tests.tools import LIMIT as limit
import json


class Trainer(Base):
    def prepare(self, rows, length: int = 3) -> list:
        \"\"\"Prepares.\"\"\"
        # one by one
        made = [self.made(json.loads(row)) for row in rows if len(row) < limit]
        return tools.joined(made) + super().padding(f"of {length} {{}} rows")

    def other(self):
        return 1
"""
BASE = """
from trainer_for_tests.tools import *

class Base:
    def made(self, row):
        return row["text"]

    def padding(self, text):
        return [text]
"""
TOOLS = """
LIMIT = 10

def joined(rows):
    from . import deep
    return deep.sorted_rows(rows)

def unused(rows):
    return rows
"""
DEEP = """
try:
    import numpy
except ImportError:
    numpy = None

if numpy is None:
    def sorted_rows(rows):
        return sorted(rows)
else:
    def sorted_rows(rows):
        return joined_by(rows)

def joined_by(rows):
    return joined_by(rows[1:]) if rows else []
"""
FILES = {"trainer": TRAINER, "base": BASE, "tools": TOOLS, "deep": DEEP}
PACKAGE = "trainer_for_tests"
NAME = f"{PACKAGE}.trainer:Trainer.prepare"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Writes the package with some texts replaced, and returns its module `trainer`, newly imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]

    def written(**changed: tuple[str, str]) -> ModuleType:
        forget()
        folder = tmp_path / f"version{len(list(tmp_path.iterdir()))}" / PACKAGE
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        for name, text in FILES.items():
            assert changed.get(name, ("", ""))[0] in text
            (folder / f"{name}.py").write_text(text.replace(*changed.get(name, ("", ""))))
        monkeypatch.syspath_prepend(folder.parent)
        return importlib.import_module(f"{PACKAGE}.trainer")

    yield written
    forget()


def of(module: ModuleType) -> str:
    found = digest(module.Trainer.prepare)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "changed",
    [
        {"trainer": ("row in rows if", "row in rows[1:] if")},
        {"trainer": ("3)", "4)")},
        {"trainer": ("of {length}", "in {length}")},
        {"base": ('row["text"]', 'row["texts"]')},
        {"base": ("[text]", "[text, text]")},
        {"tools": ("10", "11")},
        {"deep": ("rows[1:]", "rows[2:]")},
        {"deep": ("sorted(rows)", "rows")},
    ],
)
def test_a_change_of_what_is_used_changes_the_digest(write: Any, changed: dict[str, tuple[str, str]]) -> None:
    before = of(write())
    assert of(write(**changed)) != before


@pytest.mark.parametrize(
    "changed",
    [
        {"trainer": ("Prepares.", "Prepares rows.")},
        {"trainer": ("# one by one", "# all at once")},
        {"trainer": (") -> list:", "):")},
        {"trainer": ("length: int = 3", "length: float = 3")},
        {"trainer": ("return 1", "return 2")},
        {"trainer": ("class Trainer", "import os\n\nclass Trainer")},
        {"tools": ("    return rows\n", "    return rows + rows\n")},
        {"trainer": ("from trainer_for_tests.tools import LIMIT as limit", "from .tools import LIMIT as limit")},
    ],
)
def test_other_changes_do_not(write: Any, changed: dict[str, tuple[str, str]]) -> None:
    before = of(write())
    assert of(write(**changed)) == before


def test_a_function_that_moves_keeps_its_digest(write: Any) -> None:
    before = of(write())
    inside = TOOLS[TOOLS.index("def joined") : TOOLS.index("def unused")]
    moved = write(
        tools=(inside, "from trainer_for_tests.deep import joined\n\n"),
        deep=("def joined_by", inside + "def joined_by"),
    )
    assert moved.tools.joined.__module__ == f"{PACKAGE}.deep"
    assert of(moved) == before


def test_code_without_source_has_no_digest(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = write()
    known = {NAME: {of(module): "1.0"}}
    assert change("Trainer 1.1", known, module.Trainer.prepare) is None
    assert change("Trainer 1.1", known, module.Trainer().prepare) is None
    prepare = module.Trainer.prepare

    def replaced(self: Any, rows: Any, length: int = 3) -> Any:
        return prepare(self, rows, length)

    replaced.__module__, replaced.__qualname__ = prepare.__module__, prepare.__qualname__
    monkeypatch.setattr(module.Trainer, "prepare", replaced)
    assert digest(module.Trainer.prepare) is None
    assert change("Trainer 1.1", known, module.Trainer.prepare) == "Trainer 1.1: Trainer.prepare has changed"
    assert digest(len) is None
    monkeypatch.undo()
    Path(str(module.__file__)).unlink()
    known_code._file.cache_clear()
    assert digest(module.Trainer.prepare) is None


def test_digests_without_an_import(write: Any) -> None:
    module = write()
    folder = str(Path(str(module.__file__)).parents[1])
    found = digests_of(
        {NAME: {}, f"{PACKAGE}.trainer:gone": {}, f"{PACKAGE}.gone:f": {}, "no_such_package:f": {}}, folder
    )
    assert list(found.values()) == [of(module), None, None, None]
    assert digests_of({NAME: {}})[NAME] == of(module)
    assert digests_of({"no_such_package.a:f": {}}) == {"no_such_package.a:f": None}


def test_the_command_prints_what_is_known(write: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    module = write()
    contract = importlib.import_module("gpuload.integrations.trl.contract")
    monkeypatch.setattr(contract, "KNOWN", {NAME: {of(module): "1.0, 1.1"}, f"{PACKAGE}.tools:unused": {}})
    main(["trl", str(Path(str(module.__file__)).parents[1])])
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{NAME} {of(module)} known from 1.0, 1.1"
    assert second.endswith("not known")


@pytest.mark.parametrize("integration", ["trl", "verl", "automodel", "nemo_rl", "slime"])
def test_the_tables_are_read_without_the_trainers(integration: str) -> None:
    table = importlib.import_module(f"gpuload.integrations.{integration}.contract").KNOWN
    digests = [each for seen in table.values() for each in seen]
    assert digests
    assert all(len(each) == 16 and int(each, 16) for each in digests)


# -- rows --------------------------------------------------------------------------------------------------------------


def chat(*roles: str, **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": "text", **more} for role in roles]


def test_rows_of_every_shape() -> None:
    rows: list[dict[str, Any]] = [{"messages": chat("user", "assistant"), "n": row} for row in range(5_000)]
    rows[777]["messages"] = chat("tool", "assistant")
    rows[1234]["messages"] = chat("user", "assistant", name="x")
    rows[2345]["n"] = None
    rows[3456]["messages"][0]["content"] = "long " * 99
    rows[4567]["messages"][0]["content"] = ""
    table = pa.Table.from_pylist(rows)
    numbers, found = covering_rows(lambda: [table.slice(0, 2_000), table.slice(2_000)])
    assert len(numbers) == ROWS
    assert {0, 777, 1234, 2345, 3456, 4567} <= set(numbers.tolist())
    assert (np.diff(numbers) > 0).all()
    assert (
        found.equals(table.take(pa.array(numbers)).combine_chunks())
        or found.to_pylist() == table.take(numbers).to_pylist()
    )
    # Others are from all of the data.
    assert numbers[ROWS // 2] > 1_500


def test_few_rows_are_all_compared() -> None:
    tables = [pa.table({"messages": [chat("user")]}), pa.table({"messages": [chat("user")], "tools": ["x"]})]
    numbers, found = covering_rows(lambda: tables)
    assert numbers.tolist() == [0, 1]
    assert found.column_names == ["messages", "tools"]


def test_more_shapes_than_rows() -> None:
    table = pa.table({"messages": [chat(*["user"] * (row % 200 + 1)) for row in range(400)]})
    numbers, _ = covering_rows(lambda: [table])
    assert len(numbers) == ROWS
    assert {0, 199} <= set(numbers.tolist())


def test_all_processes_choose_the_same_rows() -> None:
    """Numbers of the shapes of JSON depend on the process."""
    code = """if True:
        import pyarrow as pa
        from gpuload.kinds.chats.formats import messages_column
        from gpuload.integrations.comparison import covering_rows
        rows = [[{"role": "user", "content": "x", f"key {row % 90}": row}] for row in range(300)]
        print(covering_rows(lambda: [pa.table({"messages": messages_column(rows)})])[0].tolist())
    """
    made = set()
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        command = [sys.executable, "-c", code]
        made.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(made) == 1


def test_rows_that_can_be_compared() -> None:
    row = {"ids": torch.tensor([1, 2]), "n": np.array([1.5]), "more": [{"x": torch.tensor(1)}], "text": "x"}
    assert comparable(row) == comparable(dict(row))
    assert comparable(row) != comparable({**row, "ids": torch.tensor([1, 2], dtype=torch.int32)})
    assert comparable(row) != comparable({**row, "n": np.array([2.5])})


@pytest.mark.parametrize(
    ("rows", "count", "expected"),
    [(0, 4, []), (1, 4, [0]), (3, 4, [0, 1, 2]), (7, 4, [0, 2, 4, 6]), (9, 2, [0, 8]), (9, 0, [])],
)
def test_rows_at_equal_distances(rows: int, count: int, expected: list[int]) -> None:
    assert spread(rows, count).tolist() == expected


def compared(theirs: Any, changed: str | None, **more: Any) -> str | None:
    """Rows 3, 5 and 8 as tensors, compared with what a trainer makes of them. It prepares row 8 itself."""
    logger = logging.getLogger("gpuload.integrations.test")
    return compare(
        [3, 5, 8], lambda row: torch.tensor([row]) if row < 8 else None, theirs, changed,
        logger=logger, trainer="slime", **more,
    )  # fmt: skip


def test_a_sample_that_is_equal(caplog: pytest.LogCaptureFixture) -> None:
    assert compared(lambda row: torch.tensor([row]), None) is None
    assert caplog.messages == []
    assert compared(lambda row: torch.tensor([row]), "slime 0.4.0: f has changed") is None
    assert compared(lambda row: torch.tensor([row]), "slime 0.4.0: g has changed", rows=40) is None
    assert caplog.messages == [
        "gpuload: slime 0.4.0: f has changed; 3 rows prepared by both are equal: used",
        "gpuload: slime 0.4.0: g has changed; 40 rows prepared by both are equal: used",
    ]


def test_a_sample_that_differs(caplog: pytest.LogCaptureFixture) -> None:
    def theirs(row: int) -> Any:
        return torch.tensor([3])

    assert compared(theirs, None) == "row 5 of a sample differs from slime's"
    why = compared(theirs, "slime 0.4.0: f has changed", rows=40, differs="40 rows differ")
    assert why == "slime 0.4.0: f has changed, and 40 rows differ"
    assert caplog.messages == []


def test_a_sample_that_the_trainer_rejects() -> None:
    def theirs(row: int) -> Any:
        raise KeyError("x" * 300)

    assert compared(theirs, None) == f"row 3: slime raises KeyError: '{'x' * 199}"
    why = compared(theirs, "slime 0.4.0: f has changed", rows=40)
    assert why == f"slime 0.4.0: f has changed, and slime raises KeyError: '{'x' * 199}"
