"""Modules can be imported by the names that they had in 0.1, and pickles of 0.1 can be read."""

import importlib
import pickle
import re
import subprocess
import sys

import pytest

import gpuload
from gpuload._moved import MOVED
from gpuload.demo_data import demo_files


@pytest.mark.parametrize("old", MOVED)
def test_an_old_module_has_the_same_objects(old: str) -> None:
    new = importlib.import_module(MOVED[old])
    own = ((name, kind) for name, kind in vars(new).items() if getattr(kind, "__module__", "") == new.__name__)
    name, kind = next(own)
    with pytest.warns(DeprecationWarning, match=re.escape(f"{old} has moved: import {name} from {new.__name__}")):
        assert getattr(importlib.import_module(old), name) is kind


def test_the_warning_names_the_line_that_imports() -> None:
    with pytest.warns(DeprecationWarning, match="gpuload.errors has moved") as found:
        from gpuload.errors import GpuloadError
    assert GpuloadError is gpuload.GpuloadError
    assert found[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="gpuload.dataset has moved") as found:
        from gpuload.dataset import PromptDataset
    assert PromptDataset is gpuload.PromptDataset
    assert found[0].filename == __file__


def test_an_unknown_name_of_an_old_module() -> None:
    with pytest.raises(ImportError, match="nothing"):
        from gpuload.report import nothing  # noqa: F401


def test_the_module_of_load_does_not_replace_the_function() -> None:
    module = importlib.import_module("gpuload.load")
    assert gpuload.load is not module
    with pytest.warns(DeprecationWarning, match="gpuload.load has moved"):
        assert gpuload.load is module.load


def test_a_pickle_of_an_earlier_version_is_read() -> None:
    rows = gpuload.load(*demo_files(), max_samples=20, progress=False)
    new_names = pickle.dumps(rows, protocol=0)  # in which names are lines of text
    old_names = new_names
    for old, new in sorted(MOVED.items(), key=lambda pair: -len(pair[1])):
        old_names = old_names.replace(f"c{new}\n".encode(), f"c{old}\n".encode())
    old_names = old_names.replace(b"cgpuload.dataset.rows\n", b"cgpuload.dataset\n")
    assert old_names.count(b"cgpuload.arrays\n") > 0
    with pytest.warns(DeprecationWarning, match="has moved"):
        found = pickle.loads(old_names)
    assert type(found) is type(rows)
    assert found.batch([3, 1])["input_ids"].tolist() == rows.batch([3, 1])["input_ids"].tolist()


def test_nothing_is_imported_before_it_is_used() -> None:
    script = "import sys, gpuload; print(sorted(name for name in sys.modules if name.startswith('gpuload')))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(["gpuload", "gpuload._moved", "gpuload._version"])
