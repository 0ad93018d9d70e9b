"""With gpuload[verl] and what these packages require, verl's trainers and gpuload's classes can be imported."""

import re
import subprocess
import sys
import tomllib
from collections import deque
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("verl.utils.dataset")

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
MODULES = [
    *("verl.trainer.main_ppo", "verl.trainer.sft_trainer", "verl.experimental.agent_loop"),
    *("gpuload.integrations.verl.rlhf", "gpuload.integrations.verl.sft", "gpuload.integrations.verl.agent_loop"),
]
# Imports the modules with an import system that does not find the given ones.
IMPORT = """
import importlib, sys
from importlib.machinery import PathFinder

class Visible(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        # ray has some packages of others in a folder of its own.
        ours = spec is not None and "thirdparty_files" in str(spec.origin)
        return None if name in hidden and not ours else spec

modules, hidden = (argument.split(",") for argument in sys.argv[1:])
sys.meta_path[sys.meta_path.index(PathFinder)] = Visible
for name in modules:
    importlib.import_module(name)
"""


def required_distributions() -> set[str]:
    """Names of the distributions that gpuload[verl] requires, directly or indirectly."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = deque(map(Requirement, project["dependencies"] + project["optional-dependencies"]["verl"]))
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.popleft()
        name = canonicalize_name(requirement.name)
        for extra in ["", *requirement.extras]:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                requires = metadata.requires(name) or []
            except metadata.PackageNotFoundError:  # for another platform or version of Python
                continue
            for each in map(Requirement, requires):
                if each.marker is None or each.marker.evaluate({"extra": extra}):
                    waiting.append(each)
    return {name for name, _ in seen}


def test_trainers_import_with_the_packages_of_the_extra() -> None:
    required = required_distributions() | {"gpuload"}
    assert {"verl", "transformers", "uvicorn", "cachetools"} <= required
    hidden = [
        module
        for module, names in metadata.packages_distributions().items()
        if re.fullmatch(r"\w+", module) and not required & {canonicalize_name(name) for name in names}
    ]
    assert "pytest" in hidden
    done = subprocess.run(
        [sys.executable, "-c", IMPORT, ",".join(MODULES), ",".join(hidden)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
