"""Construction of TRL's SFTTrainer and DPOTrainer, and batches, stock against gpuload's.

    python -m bench.trainers.trl

Imports, the tokenizer and reading the file into `datasets` are not counted. The prepared ids of the same rows are
compared, and their batches.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.data import pair_columns
from bench.trainers import common


def write(case: str, rows: list[Any], folder: Path) -> Path:
    """Write conversations, or pairs."""
    columns = pair_columns(rows) if case == "DPOTrainer" else {"messages": rows}
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return folder / "rows.parquet"


def main() -> None:
    """Measure, print the tables, and write a record."""
    processes = {"type": int, "help": "TRL's dataset_num_proc (default: its own)"}
    given = common.arguments(__doc__ or "", "trl", rows=50_000, processes=processes)
    cases = {name: {"trainer": name} for name in ("SFTTrainer", "DPOTrainer")}
    libraries = {common.OURS: {"processes": None}, "TRL": {"processes": given.processes}}
    common.compare(given, "trl_trainers", cases, libraries, write)


if __name__ == "__main__":
    main()
