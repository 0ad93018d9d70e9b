"""Batches out of gpuload: tensors alone, the loader's full batches, `__getitems__`."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from transformers import AutoTokenizer

import gpuload
from bench.workers.common import answer, job, rate, shuffled_batches
from bench.workers.load_gpuload import row_numbers
from gpuload.dataset import PromptDataset
from gpuload.engines.host.engine import CpuEngine


def endless(prompts: PromptDataset, size: int) -> Iterator[dict[str, Any]]:
    """The loader's shuffled batches, epoch after epoch."""
    loader = prompts.loader(size, shuffle=True, drop_last=True)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def main() -> None:
    """Loads once, then draws in each of the ways for some seconds."""
    task = job()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    options = {"max_prompt_length": task["limit"], "cache_dir": task["cache"]}
    prompts = gpuload.load(task["files"], tokenizer, **options)
    with_chat = gpuload.load(task["files"], tokenizer, return_raw_chat=True, **options)
    batches = shuffled_batches(range(len(prompts)), task["batch"])
    arrays = [np.array(batch) for batch in batches]
    size, seconds = len(batches[0]), task["seconds"]

    def tensors(rows: Any) -> Any:
        return CpuEngine.pad(prompts.tokens.take(rows), task["limit"], prompts.pad_token_id)

    drawn, drawn_chat = endless(prompts, size), endless(with_chat, size)
    np.save(task["kept"], row_numbers(prompts, task["files"]))
    answer(
        rows=len(prompts),
        rates={
            "tensors": rate(tensors, arrays, seconds),
            "loader": rate(lambda _: next(drawn), batches, seconds),
            "loader, raw_prompt": rate(lambda _: next(drawn_chat), batches, seconds),
            "getitems": rate(prompts.__getitems__, batches, seconds),
            "getitems, raw_prompt": rate(with_chat.__getitems__, batches, seconds),
        },
    )


if __name__ == "__main__":
    main()
