"""The parts of the integration with verl that need no verl."""

import fnmatch
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

import gpuload.integrations.verl

ROOT = Path(__file__).parents[1]


def agent_loop_config(directory: Path) -> Path:
    """The path that the command prints in a working directory."""
    command = [sys.executable, "-m", "gpuload.integrations.verl"]
    environment = {"PYTHONPATH": str(Path(gpuload.__file__).parents[1])}
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\n")
    return Path(done.stdout[:-1])


def test_command_prints_the_path_of_the_agent_loops(tmp_path: Path) -> None:
    path = agent_loop_config(tmp_path)
    assert path.is_absolute()
    targets = {loop["name"]: loop["_target_"] for loop in yaml.safe_load(path.read_text())}
    assert targets == {
        "single_turn_agent": "gpuload.integrations.verl.SingleTurnAgentLoop",
        "tool_agent": "gpuload.integrations.verl.ToolAgentLoop",
    }
    exported = {f"gpuload.integrations.verl.{name}" for name in gpuload.integrations.verl.__all__}
    assert set(targets.values()) <= exported


def test_the_configuration_is_part_of_the_distribution(tmp_path: Path) -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = tool["package-data"]["gpuload.integrations.verl"]
    assert any(fnmatch.fnmatch(agent_loop_config(tmp_path).name, pattern) for pattern in patterns)
