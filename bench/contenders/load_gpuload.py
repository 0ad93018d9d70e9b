"""`gpuload.load`: read, render, encode, filter, and compare a sample of rows with the reference."""

# The first load imports these lazily (Arrow imports pandas). Imports are not counted for any contender.
import awkward  # noqa: F401
import gigatoken  # noqa: F401
import numpy as np
import pandas  # noqa: F401
import pyarrow.parquet as pq
from transformers import AutoTokenizer

import gpuload
from bench.contenders.common import Meter, answer, rows_digest, task_given, tokens_digest
from gpuload.dataset import PromptDataset


def row_numbers(prompts: PromptDataset, files: list[str]) -> np.ndarray:
    """Return the numbers of the kept rows over all files, (n,) int64."""
    counts = [pq.ParquetFile(file).metadata.num_rows for file in files]
    starts = dict(zip(files, np.cumsum([0, *counts]), strict=False))
    origins = [prompts.origin(row) for row in range(len(prompts))]
    return np.array([starts[file] + row for file, row in origins])


def main() -> None:
    """Measure one load."""
    task = task_given()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    options = {"max_prompt_length": task["limit"], "cache_dir": task["cache"]} | task.get("options", {})
    gpuload.load  # noqa: B018  (imports the pipeline, which the package does on first access)
    meter = Meter()
    prompts = gpuload.load(task["files"], tokenizer, **options)
    measured = meter.stop()
    report = prompts.report
    answer(
        **measured,
        rows_read=report.rows_read,
        rows_kept=len(prompts),
        rows_digest=rows_digest(row_numbers(prompts, task["files"])),
        tokens_digest=tokens_digest(prompts.tokens.values, prompts.tokens.lengths),
        text_bytes=report.text_bytes,
        token_bytes=prompts.tokens.nbytes,
        column_bytes=prompts.columns.nbytes,
        stage_seconds=report.seconds,
        engine=report.engine,
        rows_checked=report.check.rows,
        files_from_cache=len(report.from_cache),
    )


if __name__ == "__main__":
    main()
