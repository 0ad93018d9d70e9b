"""`gpuload.load`: read, render, encode, filter, and compare a sample of rows with the reference."""

import numpy as np
import pyarrow.parquet as pq
from transformers import AutoTokenizer

import gpuload
from bench.contenders.common import Meter, answer, epoch, rows_digest, task_given, tokens_digest
from bench.contenders.imported import import_ahead
from gpuload.kinds.prompts import PromptDataset

TENSORS = ("input_ids", "attention_mask")


def row_numbers(prompts: PromptDataset, files: list[str]) -> np.ndarray:
    """Return the numbers of the kept rows over all files, (n,) int64."""
    counts = [pq.ParquetFile(file).metadata.num_rows for file in files]
    starts = dict(zip(files, np.cumsum([0, *counts]), strict=False))
    origins = [prompts.origin(row) for row in range(len(prompts))]
    return np.array([starts[file] + row for file, row in origins])


def main() -> None:
    """Measure one load, and epochs if asked for."""
    task = task_given()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    options = {"max_prompt_length": task["limit"], "cache_dir": task["cache"]} | task.get("options", {})
    import_ahead(ours=True)
    meter = Meter()
    prompts = gpuload.load(task["files"], tokenizer, **options)
    measured = meter.stop()
    report, epochs = prompts.report, {}
    if task.get("batch"):
        loader = prompts.loader(task["batch"], shuffle=True, seed=0)
        epochs["tensors"] = epoch(loader, TENSORS, task["checked"])
        epochs["all columns"] = epoch(map(dict, loader), TENSORS, False)
    answer(
        **measured,
        epochs=epochs,
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
