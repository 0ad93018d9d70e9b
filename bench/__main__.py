"""`python -m bench`: measures on the CPU, and writes a record and its tables.

python -m bench                       all sections: some hours on two cores
python -m bench --only headline       the numbers of the project's README: about 22 minutes on two cores
python -m bench --only load,memory    some sections
python -m bench --only tables         no measurement: writes the page of an existing record again
python -m bench --quick               a smoke run: 300 rows of each file, one repeat

A record is one run on one machine: each run replaces the record of its name. On a busy machine, all tables are marked.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import ROOT, documents, environment, report
from bench.cpu import headline
from bench.cpu.chats import measure_chats, measure_pairs
from bench.cpu.cores import measure_cores
from bench.cpu.load import measure_load
from bench.cpu.packing import measure_packing
from bench.cpu.page import page
from bench.cpu.sections import measure_memory
from bench.data import JOINT, Plan, find_datasets, find_tokenizer, samples
from bench.process import ContenderError, without_directories
from bench.verl.epochs import measure_epochs

SECTIONS = {
    "load": measure_load,
    "memory": measure_memory,
    "cores": measure_cores,
    "packing": measure_packing,
    "chats": measure_chats,
    "pairs": measure_pairs,
    "epochs": measure_epochs,
}
_QUICK_ROWS = 300


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", metavar="DIR", help="directory of parquet files in verl's format")
    parser.add_argument("--datasets", metavar="NAMES", help=f"measure only these, comma-separated; {JOINT}: all in one")
    parser.add_argument("--tokenizer", metavar="DIR", help="transformers tokenizer (default: Qwen2.5)")
    parser.add_argument("--limit", type=int, help="maximum prompt length in tokens (default: 1024; quick: 200)")
    parser.add_argument("--repeats", type=int, default=5, help="processes per measurement (default: %(default)s)")
    parser.add_argument("--only", metavar="SECTIONS", help=f"of {','.join(SECTIONS)}; or headline; or tables")
    parser.add_argument("--name", help="name of the record (default: cpu, or headline)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: bench/results; quick: build/bench")
    parser.add_argument("--quick", action="store_true", help="smoke run")
    chosen = parser.parse_args(arguments)
    chosen.headline = chosen.only == "headline"
    names = [] if chosen.only == "tables" else chosen.only.split(",") if chosen.only else list(SECTIONS)
    chosen.sections = list(headline.SECTIONS) if chosen.headline else names
    if unknown := set(chosen.sections) - set(SECTIONS):
        parser.error(
            f"--only: unknown section {', '.join(sorted(unknown))}: use {', '.join(SECTIONS)}, headline, tables"
        )
    if chosen.quick:
        chosen.repeats = 1
    # In a quick run the limit is so low that the filter drops some rows.
    chosen.limit = chosen.limit or (200 if chosen.quick else 1024)
    chosen.name = chosen.name or ("headline" if chosen.headline else "cpu")
    chosen.output = chosen.output or ROOT / ("build/bench" if chosen.quick else "bench/results")
    chosen.command = without_directories(shlex.join(["python", "-m", "bench", *(arguments or sys.argv[1:])]))
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure section by section, and write the record after each."""
    chosen = parse(arguments)
    file = chosen.output / f"{chosen.name}.json"
    chosen.output.mkdir(parents=True, exist_ok=True)
    if chosen.sections:
        with tempfile.TemporaryDirectory(prefix="gpuload-bench-") as scratch:
            record = measure(chosen, file, Path(scratch))
    else:
        record = json.loads(file.read_text())
    text = headline.headline_page(record) if file.name == headline.RECORD.name else page(record, file.name)
    report.save(record, file, chosen.output / "README.md", text)
    if file.name == headline.RECORD.name:
        text = headline.headline_table(record)
        headline.plot(record, file.with_suffix(".svg"))
        headline.plot(record, file.with_name(f"{file.stem}-dark.svg"), dark=True)
    written = documents.write(file)
    print(f"\n{text}\n\nwritten to {', '.join([str(chosen.output), *written])}")
    return 0


def measure(chosen: argparse.Namespace, file: Path, scratch: Path) -> dict[str, Any]:
    """Measure the chosen sections and return the record, which is written after each."""
    tokenizer, datasets = find_tokenizer(chosen.tokenizer), find_datasets(chosen.data)
    if chosen.datasets:
        datasets = tuple(dataset for dataset in datasets if dataset.name in chosen.datasets.split(","))
        if not datasets:
            raise SystemExit(f"--datasets: no dataset is named {chosen.datasets}")
    if chosen.quick:
        datasets = samples(datasets, _QUICK_ROWS, scratch / "samples")
    if chosen.quick or chosen.headline:
        datasets = datasets[-1:]
    plan = Plan(datasets, tokenizer, chosen.limit, chosen.repeats, scratch)
    of_data = {dataset.name: dataset.facts() for dataset in datasets}
    about = environment.about(chosen.command, tokenizer, plan.repeats, chosen.quick, limit=plan.limit, datasets=of_data)
    if mark := report.busy(about):
        print(f"{mark}: the tables will say so", flush=True)
    record: dict[str, Any] = {"about": about}
    for name in (name for name in SECTIONS if name in chosen.sections):
        print(name, flush=True)
        try:
            runs = SECTIONS[name](plan)
        except ContenderError as error:
            raise SystemExit(f"{name}: {error}") from error
        if runs:
            record[name] = runs
            file.write_text(json.dumps(record, indent=1) + "\n")
    return record


if __name__ == "__main__":
    raise SystemExit(main())
