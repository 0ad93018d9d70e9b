"""Rendering and encoding on one core: gpuload's stages, transformers, `tokenizers`."""

import os

# Before any import starts a thread pool.
os.environ |= {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from bench.contenders.common import answer, task_given
from gpuload.engines.host.engine import HostEngine
from gpuload.engines.protocol import ArrowPrompts
from gpuload.reference.reference import Reference
from gpuload.sources.batches import BATCH_ROWS

_ROUNDS = 3


def timed(work: Callable[[Any], Any], parts: list[Any]) -> tuple[float, list[Any]]:
    """Return seconds, and the result for each part."""
    started = time.perf_counter()
    made = [work(part) for part in parts]
    return time.perf_counter() - started, made


def main() -> None:
    """Run each stage over the whole prompt column, in turns, each in the form that suits it best."""
    task = task_given()
    tokenizer: Any = AutoTokenizer.from_pretrained(task["tokenizer"])
    engine = HostEngine(Reference(tokenizer))
    engine.encoder  # noqa: B018  (built on first access)
    column = pa.concat_tables([pq.read_table(file, columns=["prompt"]) for file in task["files"]])["prompt"]
    prompts = [column.slice(i, BATCH_ROWS).combine_chunks() for i in range(0, len(column), BATCH_ROWS)]
    messages = [part.to_pylist() for part in prompts]

    def render(part: list[Any]) -> Any:
        return tokenizer.apply_chat_template(part, add_generation_prompt=True, tokenize=False)

    def encode(part: list[str]) -> Any:
        return tokenizer.backend_tokenizer.encode_batch_fast(part, add_special_tokens=False)

    def render_column(part: Any) -> Any:
        return engine.render(ArrowPrompts(part))

    seconds: dict[str, list[float]] = {}

    def run(name: str, work: Callable[[Any], Any], parts: list[Any]) -> list[Any]:
        took, made = timed(work, parts)
        seconds.setdefault(name, []).append(took)
        return made

    run("gpuload first render", render_column, prompts)
    for _ in range(_ROUNDS):
        rendered = run("gpuload render", render_column, prompts)
        texts = run("transformers render", render, messages)
        tokens = run("gpuload encode", engine.encode, rendered)
    encodings = run("tokenizers encode", encode, texts)
    for mine, text, made, encoding in zip(rendered, texts, tokens, encodings, strict=True):
        if mine.text.to_pylist() != text or made.ids.to_lists() != [row.ids for row in encoding]:
            raise SystemExit("gpuload's texts or ids differ from those of transformers and tokenizers")
    answer(
        seconds={name: median(took) for name, took in seconds.items()},
        text_bytes=sum(int(part.sizes.clip(0).sum()) for part in rendered),
        rows=len(column),
        shapes=len(engine.program.trees),
        engine=engine.describe(),
    )


if __name__ == "__main__":
    main()
