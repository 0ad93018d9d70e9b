"""`python -m bench`: measures, and writes a record, tables and a plot.

python -m bench                       everything: about an hour on two cores
python -m bench --quick               a few hundred rows of each file, once: does it run?
python -m bench --only load,memory    some sections; the others stay as they are in the record
python -m bench --only tables         no measurements: the tables and the plot anew from the record
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from bench import load, sections
from bench.inputs import ROOT, DataSet, find_data_sets, find_tokenizer, find_tokenizers, samples
from bench.launch import WorkerError
from bench.machine import circumstances
from bench.plot import draw
from bench.tables import write
from bench.verl import measure_verl

SECTIONS = ("load", "batches", "memory", "stages", "verl")
_QUICK_ROWS = 300


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="gpuload beside what there is.")
    parser.add_argument("--data", metavar="FOLDER", help="parquet files in verl's format")
    parser.add_argument("--data-sets", metavar="NAMES", help="some of them only, comma-separated; joint: all in one")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="a transformers tokenizer (default: Qwen2.5's)")
    parser.add_argument("--limit", type=int, help="of prompts, in tokens (default: 1024; 200 when quick)")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes per number (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="per way to draw batches (default: %(default)s)")
    parser.add_argument("--only", metavar="SECTIONS", help=f"of {','.join(SECTIONS)}; tables: measure nothing")
    parser.add_argument("--name", default="cpu", help="of the record (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: bench/results; build/bench when quick")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_ROWS} rows per data set, one repeat")
    chosen = parser.parse_args()
    chosen.sections = tuple(chosen.only.split(",")) if chosen.only else SECTIONS
    if unknown := set(chosen.sections) - {*SECTIONS, "tables"}:
        parser.error(f"--only: no section {', '.join(sorted(unknown))}: there are {', '.join(SECTIONS)}, tables")
    if chosen.quick:
        chosen.repeats, chosen.seconds = 1, 0.5
    # Quick: so low that the filter has something to drop.
    chosen.limit = chosen.limit or (200 if chosen.quick else 1024)
    chosen.output = chosen.output or ROOT / ("build/bench" if chosen.quick else "bench/results")
    return chosen


def measure(section: str, data_sets: list[DataSet], tokenizer: str, chosen: argparse.Namespace, scratch: Path) -> Any:
    """The runs of one section."""
    if section == "load":
        return load.measure(data_sets, tokenizer, chosen.limit, chosen.repeats, scratch)
    if section == "batches":
        largest = data_sets[-1]
        return sections.measure_batches(largest, tokenizer, chosen.limit, chosen.repeats, chosen.seconds, scratch)
    if section == "memory":
        return sections.measure_memory(data_sets, tokenizer, chosen.limit, chosen.repeats, scratch)
    if section == "verl":
        return measure_verl(data_sets, tokenizer, chosen.limit, chosen.repeats, chosen.seconds, scratch)
    parts = [data_set for data_set in data_sets if data_set.name != "joint"] or data_sets
    return sections.measure_stages(parts, find_tokenizers(tokenizer), chosen.repeats, scratch)


def main() -> int:
    """Measures section by section; the record is written after each."""
    chosen = parse()
    tokenizer = find_tokenizer(chosen.tokenizer)
    data_sets = find_data_sets(chosen.data)
    if chosen.data_sets:
        data_sets = [data_set for data_set in data_sets if data_set.name in chosen.data_sets.split(",")]
        if not data_sets:
            raise SystemExit(f"no data set {chosen.data_sets}")
    record_file = chosen.output / f"{chosen.name}.json"
    record: dict[str, Any] = json.loads(record_file.read_text()) if record_file.exists() else {}
    chosen.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpuload-bench-") as folder:
        scratch = Path(folder)
        if chosen.quick:
            data_sets = samples(data_sets, _QUICK_ROWS, scratch)[-1:]
        for section in SECTIONS:
            if section not in chosen.sections:
                continue
            print(section, flush=True)
            about = circumstances() | {
                "tokenizer": Path(tokenizer).name,
                "limit": chosen.limit,
                "repeats": chosen.repeats,
                "quick": chosen.quick,
                "data_sets": {data_set.name: data_set.facts() for data_set in data_sets},
            }
            try:
                runs = measure(section, data_sets, tokenizer, chosen, scratch)
            except WorkerError as error:
                raise SystemExit(f"{section}: {error}") from error
            if not runs:
                continue
            record[section] = {"about": about, "runs": runs}
            record_file.write_text(json.dumps(record, indent=1) + "\n")
    text = write(record, chosen.output / "README.md", record_file.name)
    if "load" in record:
        draw(record["load"], chosen.output / "load.png")
    print(f"\n{text}\nwritten: {chosen.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
