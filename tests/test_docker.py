"""The container files, as far as they can be checked without a container engine and a network."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FILES = ["docker/Dockerfile", "docker/Dockerfile.cpu"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(file: str) -> list[tuple[str, str]]:
    """(instruction, its arguments) of each line of a Dockerfile, comments left out and continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / file).read_text(), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def defaults(file: str) -> dict[str, str]:
    """The build arguments with their defaults."""
    return dict(rest.partition("=")[::2] for name, rest in instructions(file) if name == "ARG")


def compose() -> Any:
    return yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())


@pytest.mark.parametrize("file", FILES)
def test_a_normal_user_runs_it(file: str) -> None:
    lines = instructions(file)
    last_stage = lines[max(i for i, (name, _) in enumerate(lines) if name == "FROM") :]
    users = [rest for name, rest in last_stage if name == "USER"]
    assert users == ["${UID}"]  # a number: Kubernetes' runAsNonRoot cannot look up names
    assert int(defaults(file)["UID"]) > 0
    assert any(name == "ENV" and "HOME=/home/gpuload" in rest for name, rest in last_stage)


@pytest.mark.parametrize(("file", "engine"), zip(FILES, ["cuda", "cpu"], strict=True))
def test_the_doctor_looks_after_its_engine(file: str, engine: str) -> None:
    (check,) = [rest for name, rest in instructions(file) if name == "HEALTHCHECK"]
    assert json.loads(check.partition("CMD ")[2]) == ["gpuload", "doctor", "--require", engine]


KNOWN = set("ARG CMD COPY ENV FROM HEALTHCHECK RUN USER WORKDIR".split())
EXEC_FORM = {"CMD", "ENTRYPOINT"}


def shell_of(command: str) -> str:
    """A RUN line without its mounts."""
    return re.sub(r"--mount=\S+\s+", "", command)


@pytest.mark.parametrize("file", FILES)
def test_files_pass_the_lint(file: str) -> None:
    lines = instructions(file)
    assert {name for name, _ in lines} <= KNOWN
    assert lines[0][0] in ("ARG", "FROM")
    assert sum(name == "CMD" for name, _ in lines) == 1
    set_before: set[str] = set()
    for name, rest in lines:
        if name == "FROM":
            image = rest.split()[0]
            image = defaults(file)[image[2:-1]] if image.startswith("${") else image
            assert re.search(r":[\w.-]*\d", image), f"{image}: no version"
            set_before = set()
        elif name in EXEC_FORM:
            assert isinstance(json.loads(rest), list)
        elif name == "RUN":
            done = subprocess.run(["bash", "-n", "-c", shell_of(rest)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            if "apt-get install" in rest:
                assert "apt-get update" in rest
                assert "--no-install-recommends" in rest
                assert "rm -rf /var/lib/apt/lists/*" in rest
            if re.search(r"\bpip (install|wheel)", rest):
                assert "--no-cache-dir" in rest or "PIP_NO_CACHE_DIR" in set_before
        elif name == "ENV":
            set_before |= {pair.partition("=")[0] for pair in rest.split()}
    used = set(re.findall(r"\$\{(\w+)", "\n".join(rest for _, rest in lines)))
    assert used <= defaults(file).keys() | {"PATH"}


def test_scripts_are_shell() -> None:
    for script in (*sorted((ROOT / "docker").glob("*.sh")), *sorted((ROOT / ".ci").iterdir())):
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", FILES)
def test_what_run_lines_install_exists(file: str) -> None:
    """Without a network: packages of Debian as far as apt knows them here, and targets of make."""
    for name, rest in instructions(file):
        if name != "RUN":
            continue
        for command in re.split(r"&&|;", shell_of(rest)):
            words = command.split()
            if words[:2] == ["apt-get", "install"] and shutil.which("apt-cache"):
                names = [word for word in words[2:] if not word.startswith("-")]
                assert names
                known = subprocess.run(["apt-cache", "pkgnames"], capture_output=True, text=True).stdout.split()
                assert len(known) < 10_000 or set(names) <= set(known)
            if words[:1] == ["make"]:
                targets = re.findall(r"^([\w./-]+(?: [\w./-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
                assert set(words[1:]) <= {each for line in targets for each in line.split()}


def test_extras_take_the_tested_versions() -> None:
    tested = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if re.match(r"[\w.-]+==", line)
    )
    tested = {canonicalize_name(name): version for name, version in tested.items()}
    checked = set()
    extras = {name: needs for name, needs in PROJECT["optional-dependencies"].items() if name != "verl"}  # own versions
    for needs in (PROJECT["dependencies"], *extras.values()):
        for need in map(Requirement, needs):
            if (version := tested.get(canonicalize_name(need.name))) is not None:
                assert need.specifier.contains(version), need
                checked.add(need.name)
    assert checked >= {"torch", "transformers", "pylibcudf-cu13", "cupy-cuda13x", "trl"}


def test_extras_exist() -> None:
    extras = PROJECT["optional-dependencies"]
    assert defaults("docker/Dockerfile")["EXTRA"] in extras
    text = (ROOT / "docs" / "install.md").read_text() + (ROOT / "docker" / "README.md").read_text()
    named = {extra for group in re.findall(r"gpuload\[([\w,-]+)\]", text) for extra in group.split(",")}
    named |= set(re.findall(r"`((?:cudf-)?cu\d+)[`,]", text))
    assert named >= {"cu12", "cu13", "cudf-cu12", "cudf-cu13"}
    assert named <= set(extras)


def test_the_lean_extras_are_lean() -> None:
    """What the engine imports and CuPy compiles with, and neither cuDF's other half nor numba."""
    for cuda, headers in (("cu12", "nvidia-cuda-runtime-cu12"), ("cu13", "nvidia-cuda-runtime")):
        names = {re.split(r"[><=]", need)[0] for need in PROJECT["optional-dependencies"][cuda]} - {"torch"}
        assert names == {f"pylibcudf-{cuda}", f"rmm-{cuda}", f"cupy-cuda{cuda[2:]}x", headers}


@pytest.mark.parametrize("file", FILES)
def test_what_is_copied_and_mounted_is_sent(file: str) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert all((ROOT / name).exists() for name in sent)
    wanted = {"pyproject.toml", "README.md", "LICENSE", "gpuload"}  # of a wheel
    for name, rest in instructions(file):
        if name == "COPY":  # of all that is sent
            assert next(part for part in rest.split() if not part.startswith("--")) == "."
        mounted = re.findall(r"--mount=source=(\S+?),", rest)
        assert all((ROOT / source).is_file() for source in mounted)
        wanted |= set(mounted)
    assert {name.split("/")[0] for name in wanted} <= sent
    if file.endswith("cpu"):
        assert {"Makefile", "constraints.txt", "tests", "bench", "docs", "docker", ".dockerignore"} <= sent


def test_compose_reserves_the_gpu_and_mounts_data_and_cache() -> None:
    whole = compose()
    service = whole["services"]["gpuload"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    data, cache = service["volumes"]
    assert data.endswith(":/data:ro")
    name, _, place = cache.partition(":")
    assert name in whole["volumes"]
    made = " ".join(rest for instruction, rest in instructions("docker/Dockerfile") if instruction == "RUN")
    assert f'install --directory --owner="${{UID}}" {place}' in made


def test_compose_builds_these_files() -> None:
    for service in compose()["services"].values():
        build = service["build"]
        file = build["dockerfile"]
        assert (ROOT / "docker" / build["context"]).resolve() == ROOT
        assert file in FILES
        given = build.get("args", {})
        assert given.keys() <= defaults(file).keys()
        for name, value in given.items():
            assert value.endswith(f":-{defaults(file)[name]}}}")  # the same default in both places


# -- beside_torch.sh --------------------------------------------------------------------------------------------------

PIP = """
import importlib.metadata, os, pathlib, sys
place = pathlib.Path(__file__).parents[1]
with open(place / "called", "w") as called:
    print(*sys.argv[1:], file=called)
    print(os.environ["PIP_CONSTRAINT"], file=called)
if (place / "replaces").exists():
    (place / "torch-9.0+vendor.dist-info").rename(place / "torch-9.1.dist-info")
    metadata = place / "torch-9.1.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("9.0+vendor", "9.1"))
"""


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A folder of modules that stands for an image: a torch that two versions name, and a pip that does little."""
    for name in ("torch", "pip", "cupy", "pylibcudf", "rmm"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "torch" / "__init__.py").write_text(
        "__version__ = '9.0+other'\nclass version:\n    cuda = '13.4'\nclass Tensor: ...\n"
    )
    (tmp_path / "gpuload" / "pipeline").mkdir(parents=True)
    (tmp_path / "gpuload" / "__init__.py").write_text("__version__ = '0'\n")
    (tmp_path / "gpuload" / "pipeline" / "run.py").touch()
    (tmp_path / "torch-9.0+vendor.dist-info").mkdir()
    (tmp_path / "torch-9.0+vendor.dist-info" / "METADATA").write_text("Name: torch\nVersion: 9.0+vendor\n")
    (tmp_path / "pip" / "__main__.py").write_text(PIP)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    return tmp_path


def install(image: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": f"{image / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(image),
        "PINS": str(image / "pins"),
        "KEPT": str(image / "kept"),
    }
    command = ["bash", str(ROOT / "docker" / "beside_torch.sh"), "gpuload.whl", "cu13", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=image)


def test_torch_is_pinned_as_pip_knows_it_beside_the_pins_of_the_image(image: Path) -> None:
    (image / "pins").write_text("numpy==2.1.0\ntorch==9.0+other\nTorch @ file:///torch.whl\ntorchvision==1\nrich==13\n")
    done = install(image)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("gpuload 0 next to torch 9.0+other\n")
    assert (image / "kept").read_text().split("\n") == [
        "torch==9.0+vendor", "numpy==2.1.0", "torchvision==1", "rich==13", "",
    ]  # fmt: skip
    called = (image / "called").read_text().splitlines()
    assert called == ["install --no-cache-dir gpuload.whl[cu13]", str(image / "kept")]
    assert install(image, "rich|NumPy").returncode == 0
    assert (image / "kept").read_text().split() == ["torch==9.0+vendor", "torchvision==1"]


def test_an_image_may_pin_nothing(image: Path) -> None:
    assert install(image).returncode == 0
    assert (image / "kept").read_text() == "torch==9.0+vendor\n"


def test_another_torch_is_an_error(image: Path) -> None:
    (image / "replaces").touch()
    done = install(image)
    assert done.returncode == 1
    assert "torch was replaced: 9.0+vendor 13.4" in done.stderr
