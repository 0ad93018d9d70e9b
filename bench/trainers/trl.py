"""Construction of TRL's SFTTrainer and DPOTrainer, stock against gpuload's: `python -m bench.trainers.trl`.

Each trainer is constructed in a process of its own, with empty caches, on the same file. Imports, the tokenizer and
reading the file into `datasets` are not counted. Stock may prepare fewer rows: its seconds are then multiplied, and the
table says so. Times are CPU times of the process, all threads together but without other processes (`--processes`), so
that what else the machine does matters little; the record also has the seconds of the start. The prepared ids of the
first rows are compared, and all batches if the rows are the same.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench import ROOT
from bench.contenders.chats import conversations
from bench.contenders.pairs import pair_columns
from bench.data import find_datasets, find_tokenizer
from bench.environment import commit, machine, versions
from bench.process import run_contender
from bench.report import table

RECORD = ROOT / "bench" / "results" / "trainers" / "trl.json"
_COMPARED = 1_000
_DRAWN = 5_000


def write_rows(trainer: str, rows: list[Any], file: Path) -> str:
    """Write conversations, or pairs whose rejected answer has the words of the chosen one in reverse."""
    columns = pair_columns(rows) if trainer == "DPOTrainer" else {"messages": rows}
    pq.write_table(pa.table(columns), file)
    return str(file)


def measure(rows: int, stock_rows: int, processes: int, scratch: Path) -> dict[str, Any]:
    """Construct each trainer by both libraries."""
    dataset, tokenizer = find_datasets(None)[-1], find_tokenizer(None)
    distinct = conversations({"files": dataset.files, "most": rows})
    # Fewer rows than asked for are repeated; a part of them is spread over all, so that it is like them.
    whole = [distinct[k % len(distinct)] for k in range(rows)]
    part = [whole[k * rows // stock_rows] for k in range(stock_rows)]
    facts: dict[str, Any] = {
        "commit": commit(), "machine": machine(), "rows": rows, "distinct": len(distinct), "processes": processes,
        "tokenizer": Path(tokenizer).name, "versions": versions([*versions(), "trl", "accelerate"]), "runs": [],
    }  # fmt: skip
    for trainer in ("SFTTrainer", "DPOTrainer"):
        files = {
            "gpuload": write_rows(trainer, whole, scratch / f"{trainer}.parquet"),
            "TRL": write_rows(trainer, part, scratch / f"{trainer}-part.parquet"),
        }
        if stock_rows < rows:
            files["gpuload, same rows"] = files["TRL"]
        found = {}
        for name, file in files.items():
            task = {
                "library": name.split(",")[0], "trainer": trainer, "file": file, "tokenizer": tokenizer,
                "processes": processes if name == "TRL" else None, "compared": _COMPARED,
                "drawn": min(_DRAWN, stock_rows // 2),
            }  # fmt: skip
            run = found[name] = run_contender("trl_trainers", task, scratch / f"{trainer}-{name}")
            facts["runs"].append({"trainer": trainer, "name": name} | run)
            print(f"  {trainer} {name}: {run['rows']:,} rows in {run['seconds']:.2f} s", flush=True)
        same = found.get("gpuload, same rows", found["gpuload"])
        for key in ("kept", "digest", "batches_digest"):
            if same[key] != found["TRL"][key]:
                raise SystemExit(f"{trainer}: gpuload and TRL differ in {key}: {same[key]} and {found['TRL'][key]}")
    return facts


def summary(facts: dict[str, Any]) -> str:
    """Return CPU time to construct each trainer and per batch, and the ratios."""
    lines = []
    for trainer in ("SFTTrainer", "DPOTrainer"):
        runs = {run["name"]: run for run in facts["runs"] if run["trainer"] == trainer}
        ours, stock = runs["gpuload"], runs["TRL"]
        scale = ours["rows"] / stock["rows"]
        note = "" if scale == 1 else f" ({stock['cpu_seconds']:.1f} s for {stock['rows']:,} rows)"
        each = {name: runs[name]["batches_seconds"] / runs[name]["batches"] * 1000 for name in ("gpuload", "TRL")}
        lines.append([
            trainer, f"{ours['rows']:,}", f"{stock['cpu_seconds'] * scale:.1f} s{note}", f"{ours['cpu_seconds']:.2f} s",
            f"**{stock['cpu_seconds'] * scale / ours['cpu_seconds']:.0f}×**",
            f"{each['TRL']:.2f} ms", f"{each['gpuload']:.2f} ms", f"**{each['TRL'] / each['gpuload']:.0f}×**",
        ])  # fmt: skip
    head = ["", "rows", "TRL", "gpuload", "ratio", "a batch of 8: TRL", "gpuload", "ratio"]
    return f"{table(head, lines, 1)}\n\n{_of_rows(facts)}"


def _of_rows(facts: dict[str, Any]) -> str:
    """Return CPU time to collate and to read some rows, and of the starts."""
    lines = []
    for run in facts["runs"]:
        seconds = [f"{each:.2f} s" for each in (*run["seconds_of_rows"].values(), run["cpu_seconds"])]
        lines.append([run["trainer"], run["name"], f"{run['rows']:,}", *seconds])
    count = facts["runs"][0]["collated_rows"]
    head = [f"{count:,} rows: {name}" for name in facts["runs"][0]["seconds_of_rows"]]
    return table(["", "", "rows", *head, "the start"], lines, 2)


def main() -> None:
    """Measure, print one table, and write a record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--stock-rows", type=int, help="rows that TRL prepares (default: all)")
    parser.add_argument("--processes", type=int, help="TRL's dataset_num_proc (default: its own)")
    parser.add_argument("--record", type=Path, default=RECORD)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        facts = measure(given.rows, given.stock_rows or given.rows, given.processes, Path(scratch))
    given.record.parent.mkdir(parents=True, exist_ok=True)
    given.record.write_text(json.dumps(facts, indent=1) + "\n")
    print(summary(facts))


if __name__ == "__main__":
    main()
