"""Run tests/verl with each supported version of verl, each in an environment of its own, and print a table.

    python tests/verl/matrix.py [version ...]         # all versions: make verl-matrix

An environment is a folder `.venv-verl-<version>`, which is created once. Its packages are those of
`bench/verl/requirements.txt`, except the ones below: verl 0.7 and 0.8 are tested with transformers 4, which vLLM
requires there, and need NumPy 1, which newer releases of pyarrow do not work with.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITH_TRANSFORMERS_4 = {
    "transformers": "==4.57.6",
    "datasets": "==4.8.5",
    "pyarrow": "==21.*",
    "numpy": "<2",
    "pandas": "<3",  # with pandas 3, verl 0.7's SFT dataset aborts the process
}
VERSIONS: dict[str, dict[str, str]] = {
    "0.7.1": WITH_TRANSFORMERS_4,
    "0.8.0": WITH_TRANSFORMERS_4,
    "0.9.0": {},
    "0.9.1": {},
}


def requirements(version: str) -> list[str]:
    """The requirements of an environment."""
    lines = (ROOT / "bench" / "verl" / "requirements.txt").read_text().splitlines()
    own = {"verl": f"=={version}"} | VERSIONS[version]
    given = [line for line in lines if line and not line.startswith("#")]
    kept = [line for line in given if re.split(r"[<=>]", line)[0] not in own]
    return kept + [name + versions for name, versions in own.items()]


def environment(version: str) -> Path:
    """Create the environment of a version, unless it exists, and return its interpreter."""
    folder = ROOT / f".venv-verl-{version}"
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *requirements(version)], check=True)
        (folder / "installed").touch()
    return python


def run_tests(version: str) -> str:
    """The table's row of a version."""
    python = environment(version)
    command = [python, "-m", "pytest", "-q", "-n", "auto", "tests/verl"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True, check=False
    )
    *output, summary = done.stdout.splitlines() or ["no output"]
    if done.returncode:
        print("\n".join(output), summary, sep="\n", file=sys.stderr)
    code = "import transformers; print(transformers.__version__)"
    transformers = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return f"{version:8} {transformers:14} {'failed' if done.returncode else 'passed':8} {summary.strip('= ')}"


def main() -> int:
    rows = [run_tests(version) for version in sys.argv[1:] or VERSIONS]
    print(f"{'verl':8} {'transformers':14} {'result':8} tests", *rows, sep="\n")
    return any(" failed " in row for row in rows)


if __name__ == "__main__":
    sys.exit(main())
