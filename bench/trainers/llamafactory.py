"""Start-up of SFT in LLaMA-Factory, its own preparation against gpuload's: `python -m bench.trainers.llamafactory`.

Each preparation is in a process of its own, with empty caches, from the same JSONL file to the data set that the
trainer gets. For gpuload this is `load_chats`, writing the store and LLaMA-Factory opening it. LLaMA-Factory's imports,
arguments and tokenizer are not counted. The ids of all rows are compared. `make trainers-test` makes the environment.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.contenders.chats import conversations
from bench.data import find_datasets, find_tokenizer
from bench.environment import commit, machine
from bench.process import run_command, run_contender
from bench.report import table

PYTHON = ROOT / ".venv-llamafactory" / "bin" / "python"
RECORD = ROOT / "bench" / "results" / "trainers" / "llamafactory.json"
_CONTENDERS = (("gpuload", 1), ("LLaMA-Factory", 1), ("LLaMA-Factory", 2))
_LIMIT = 1 << 15
_PACKAGES = "gpuload llamafactory transformers tokenizers datasets pyarrow gigatoken".split()


def turns(row: list[dict[str, str]]) -> bool:
    """Return whether user and assistant take turns after the system message: LLaMA-Factory drops other rows."""
    roles = [message["role"] for message in row if message["role"] != "system"]
    return roles == ["user", "assistant"] * (len(roles) // 2)


def measure(most: int, python: Path, scratch: Path) -> dict[str, Any]:
    """Prepare the same rows with each contender."""
    dataset = next((each for each in find_datasets(None) if each.name == "sgd_multiturn"), find_datasets(None)[-1])
    rows = [row for row in conversations({"files": dataset.files, "most": None}) if turns(row)][:most]
    file = scratch / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    code = f"import json, importlib.metadata as m; print(json.dumps({{k: m.version(k) for k in {_PACKAGES[1:]}}}))"
    facts: dict[str, Any] = {
        "commit": commit(), "machine": machine(), "data": dataset.name, "rows": len(rows),
        "versions": json.loads(run_command([str(python), "-c", code]).stdout), "runs": [],
    }  # fmt: skip
    for library, processes in _CONTENDERS:
        task = {
            "library": library, "processes": processes, "file": str(file), "tokenizer": find_tokenizer(None),
            "limit": _LIMIT,
        }  # fmt: skip
        run = run_contender("llamafactory", task, scratch / f"{library}-{processes}", python)
        name = library if library == "gpuload" else f"{library}, {processes} process{'es' * (processes > 1)}"
        facts["runs"].append({"name": name} | run)
        print(f"  {name}: {run['rows']:,} rows in {run['seconds']:.2f} s", flush=True)
    if len({(run["rows"], run["digest"]) for run in facts["runs"]}) > 1:
        raise SystemExit("gpuload and LLaMA-Factory prepare other rows")
    return facts


def summary(facts: dict[str, Any]) -> str:
    """Return the seconds of each, and how much faster gpuload is."""
    ours = facts["runs"][0]["seconds"]
    lines = []
    for run in facts["runs"]:
        ratio = "" if run["name"] == "gpuload" else f"**{run['seconds'] / ours:.1f}×**"
        lines.append([run["name"], f"{run['rows']:,}", f"{run['seconds']:.1f}", ratio])
    return table(["", "rows", "seconds", "gpuload is faster by"], lines, 1)


def main() -> None:
    """Measure, print one table, and write a record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=5_000)
    parser.add_argument("--python", type=Path, default=PYTHON, help="of the environment with LLaMA-Factory")
    parser.add_argument("--record", type=Path, default=RECORD)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        facts = measure(given.rows, given.python.absolute(), Path(scratch))
    given.record.parent.mkdir(parents=True, exist_ok=True)
    given.record.write_text(json.dumps(facts, indent=1) + "\n")
    print(summary(facts))


if __name__ == "__main__":
    main()
