"""Rendering and encoding by themselves on one core: gpuload's stages, transformers, `tokenizers`."""

import os

# Before anything starts a pool of threads.
os.environ |= {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import time
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from bench.workers.common import answer, job
from gpuload.engines.cpu import CpuEngine
from gpuload.options import Options
from gpuload.tokenizer.reference import Reference

_ROWS = 4096  # per call, for all


def timed(work: Callable[[Any], Any], parts: list[Any]) -> tuple[float, list[Any]]:
    """Seconds, and what was made of each part."""
    started = time.perf_counter()
    made = [work(part) for part in parts]
    return time.perf_counter() - started, made


def main() -> None:
    """Each stage once over the whole prompt column, given to each contender in the form that it likes best."""
    task = job()
    tokenizer: Any = AutoTokenizer.from_pretrained(task["tokenizer"])
    engine = CpuEngine(Reference(tokenizer, Options()))
    column = pa.concat_tables([pq.read_table(file, columns=["prompt"]) for file in task["files"]])["prompt"]
    prompts = [column.slice(i, _ROWS).combine_chunks() for i in range(0, len(column), _ROWS)]
    messages = [part.to_pylist() for part in prompts]

    def render(part: list[Any]) -> Any:
        return tokenizer.apply_chat_template(part, add_generation_prompt=True, tokenize=False)

    def encode(part: list[str]) -> Any:
        return tokenizer.backend_tokenizer.encode_batch_fast(part, add_special_tokens=False)

    seconds = {}
    seconds["gpuload render"], rendered = timed(engine.render, prompts)
    seconds["gpuload encode"], tokens = timed(engine.encode, rendered)
    seconds["transformers render"], texts = timed(render, messages)
    seconds["tokenizers encode"], encodings = timed(encode, texts)
    for mine, text, ids, encoding in zip(rendered, texts, tokens, encodings, strict=True):
        if mine.text.to_pylist() != text or ids.to_lists() != [row.ids for row in encoding]:
            raise SystemExit("gpuload's texts or ids are not those of transformers and tokenizers")
    nbytes = sum(pc.sum(pc.binary_length(part.text)).as_py() for part in rendered)
    answer(seconds=seconds, text_bytes=nbytes, rows=len(column), engine=engine.description)


if __name__ == "__main__":
    main()
