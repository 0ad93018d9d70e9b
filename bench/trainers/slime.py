"""slime's data source and SFT rollout, stock and gpuload's.

    SLIME_REPO=<checkout> python -m bench.trainers.slime

The start is the construction of the data source: reading, rendering, tokenizing and filtering, with the construction
of the tokenizer. A step draws 32 prompts with 8 samples each, or 32 conversations, with ids. Tokenizations are calls of
the tokenizer by slime's own functions in 4 steps. Imports are not counted, and ray is replaced by an empty module.
`make slime-test` makes the environment.
"""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.trainers import common


def write(case: str, rows: list[Any], folder: Path) -> Path:
    """Write conversations that end with an answer, or prompts with labels."""
    prompts = rows if case == "SFT" else [row[:-1] for row in rows]
    labels = [str(number) for number in range(len(rows))]
    pq.write_table(pa.table({"prompt": prompts, "label": labels}), folder / "rows.parquet")
    return folder / "rows.parquet"


def main() -> None:
    """Measure, print the tables, and write a record."""
    given = common.arguments(__doc__ or "", "slime", rows=50_000)
    cases = {"prompts": {"sft": False}, "SFT": {"sft": True}}
    common.compare(given, "slime", cases, {common.OURS: {}, "slime": {}}, write, lambda row: len(row) > 1)


if __name__ == "__main__":
    main()
