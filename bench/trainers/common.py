"""What the scripts of trainers share: the command line, the runs and one record; `table.py` has its tables.

A script has cases (what is prepared), and libraries that prepare each of them: gpuload, and the trainer itself, perhaps
with several processes. `bench/contenders/` has the measured programs. Each run is a process of its own, with empty
caches. There are two numbers of rows: a part of the time is the same for any number, so the seconds are fitted by a
line.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import ROOT, documents, environment
from bench.data import JOINT, chosen_evenly, conversations, find_datasets, find_tokenizer
from bench.process import ContenderError, run_contender, without_directories
from bench.report import busy
from bench.trainers.table import BY_ROWS, RESULTS, trainer_table
from bench.trainers.table import OURS as OURS

Write = Callable[[str, list[Any], Path], Path]
"""Case, conversations, folder: writes what is prepared, and returns the file."""


def arguments(doc: str, name: str, rows: int, compares: bool = True, **more: Any) -> argparse.Namespace:
    """Parse the command line of a script.

    Args:
        doc: Docstring of the script.
        name: Name of its record.
        rows: Default of `--rows`.
        compares: It calls `compare`, which needs a trainer's environment, two sizes and repeats.
        more: Further options: name → what `add_argument` takes.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", type=int, default=rows, help="rows that gpuload prepares (default: %(default)s)")
    if compares:
        python = ROOT / f".venv-{name.replace('_', '-')}" / "bin" / "python"
        add("--stock-rows", type=int, nargs=2, metavar=("FEW", "MANY"), default=(500, 3_000), help="rows that the "
            "trainer prepares; gpuload also prepares MANY (default: 500 3000)")  # fmt: skip
        add("--repeats", type=int, default=5, help="runs of each (default: %(default)s)")
        add("--python", type=Path, default=python if python.exists() else Path(sys.executable),
            help="of the trainer's environment (default: %(default)s)")  # fmt: skip
    add("--tokenizer", help="transformers tokenizer (default: Qwen2.5)")
    add("--record", type=Path, help="file to write (default: the record in bench/results/trainers)")
    add("--quick", action="store_true", help="a smoke run: 120 rows, one repeat, into build/bench")
    for option, settings in more.items():
        add(f"--{option}", **settings)
    given = parser.parse_args()
    if given.quick:
        given.rows, given.stock_rows, given.repeats = 120, (15, 60), 1
    given.record = given.record or (ROOT / "build" / "bench" if given.quick else RESULTS) / f"{name}.json"
    given.tokenizer = find_tokenizer(given.tokenizer)
    given.command = without_directories(shlex.join(["python", "-m", f"bench.trainers.{name}", *sys.argv[1:]]))
    return given


def about(given: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Describe a run at its start."""
    repeats = getattr(given, "repeats", 1)
    return environment.about(given.command, given.tokenizer, repeats, given.quick, rows=given.rows, **more)


def save(given: argparse.Namespace, record: Mapping[str, Any]) -> None:
    """Write a record."""
    given.record.parent.mkdir(parents=True, exist_ok=True)
    given.record.write_text(json.dumps(record, indent=1) + "\n")


def write_messages(case: str, rows: list[Any], folder: Path) -> Path:
    """Write conversations as JSON lines."""
    file = folder / "train.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return file


def compare(
    given: argparse.Namespace,
    contender: str,
    cases: Mapping[str, Mapping[str, Any]],
    libraries: Mapping[str, Mapping[str, Any]],
    write: Write,
    keep: Callable[[list[dict[str, str]]], bool] = lambda _: True,
    data: str = JOINT,
) -> None:
    """Measure each case with each library, print the tables, and write record and documentation.

    Args:
        given: The command line.
        contender: Module in `bench.contenders`. Its answer has `seconds` and `cpu_seconds` by name of what was
            measured, `counts`, and a digest of what was prepared, which is equal for all libraries.
        cases: Case → its part of the task.
        libraries: Library → its part of the task; gpuload is the first.
        write: Writes the rows of a case to a folder, and returns the file.
        keep: Which conversations are used.
        data: Name of their dataset, if it is found.
    """
    described = about(given, stock_rows=list(given.stock_rows))
    if mark := busy(described):
        print(f"{mark}: the tables will say so", flush=True)
    datasets = {dataset.name: dataset for dataset in find_datasets(None)}
    dataset = datasets.get(data) or list(datasets.values())[-1]
    whole = [row for row in conversations(dataset.files) if keep(row)]
    described |= {"data": dataset.name, "distinct_rows": len(whole)}
    record: dict[str, Any] = {"about": described, "runs": []}
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for case, of_case in cases.items():
            files = {}
            for size in {*given.stock_rows, given.rows}:
                folder = scratch / f"rows-{case}-{size}".replace(" ", "-")
                folder.mkdir()
                files[size] = write(case, chosen_evenly(whole, size), folder)
            for repeat in range(given.repeats):
                for library, of_library in libraries.items():
                    sizes = {given.stock_rows[1], given.rows} if library == OURS else set(given.stock_rows)
                    for size in sorted(sizes):
                        task = {
                            "library": library.split(",")[0], "file": str(files[size]), "rows": size,
                            "tokenizer": given.tokenizer, "compared": size == given.stock_rows[1],
                            **of_case, **of_library,
                        }  # fmt: skip
                        cache = scratch / f"{case}-{library}-{size}-{repeat}".replace(" ", "-")
                        run = run_contender(contender, task, cache, given.python.absolute())
                        if {"start", "an epoch"} <= set(run["seconds"]):
                            for clock in ("seconds", "cpu_seconds"):
                                run[clock][BY_ROWS[-1]] = run[clock]["start"] + run[clock]["an epoch"]
                        facts = {"case": case, "library": library, "rows": size, "repeat": repeat}
                        record["runs"].append(facts | run)
                        took = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in run["seconds"].items())
                        print(f"  {case}, {library}, {size:,} rows, {repeat + 1}/{given.repeats}: {took}", flush=True)
            _check(case, [run for run in record["runs"] if run["case"] == case and run["digest"]])
            save(given, record)
    print(f"\n{trainer_table(record)}\n\nwritten to {', '.join([str(given.record), *documents.write(given.record)])}")


def _check(case: str, runs: Sequence[Mapping[str, Any]]) -> None:
    """All libraries have prepared the same."""
    if len({run["digest"] for run in runs}) > 1 or not runs:
        found = {run["library"]: run["digest"] for run in runs}
        raise ContenderError(f"{case}: gpuload and the trainer have prepared other rows: {found}")
