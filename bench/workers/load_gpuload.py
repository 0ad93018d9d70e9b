"""gpuload.load: read, render, encode, filter, check a sample against the reference."""

# Imported by the first load otherwise (pandas by Arrow, where it is installed): no contender's imports are counted.
import awkward  # noqa: F401
import gigatoken  # noqa: F401
import numpy as np
import pandas  # noqa: F401
import pyarrow.parquet as pq
from transformers import AutoTokenizer

import gpuload
from bench.workers.common import Meter, answer, job, rows_digest, tokens_digest
from gpuload.dataset import PromptDataset


def row_numbers(prompts: PromptDataset, files: list[str]) -> np.ndarray:
    """(n,) the kept rows, numbered over all files."""
    counts = [pq.ParquetFile(file).metadata.num_rows for file in files]
    starts = dict(zip(files, np.cumsum([0, *counts]), strict=False))
    origins = [prompts.origin(row) for row in range(len(prompts))]
    return np.array([starts[file] + row for file, row in origins])


def main() -> None:
    """One measured load."""
    task = job()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    options = {"max_prompt_length": task["limit"], "cache_dir": task["cache"]} | task.get("options", {})
    gpuload.load  # noqa: B018  (the package imports its parts when they are first named)
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
