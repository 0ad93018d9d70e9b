"""Batches from gpuload: tensors only, the loader's batches with all columns, `__getitems__`."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from transformers import AutoTokenizer

import gpuload
from bench.contenders.common import answer, rate, shuffled_batches, task_given
from bench.contenders.load_gpuload import row_numbers
from gpuload.dataset import PromptDataset
from gpuload.engines.host.batches import pad


def endless(prompts: PromptDataset, size: int) -> Iterator[dict[str, Any]]:
    """Yield the loader's shuffled batches with all their values, epoch after epoch."""
    loader = prompts.loader(size, shuffle=True, drop_last=True)
    return map(dict, itertools.chain.from_iterable(itertools.repeat(loader)))


def main() -> None:
    """Load, then draw batches for some seconds with each method."""
    task = task_given()
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    options = {"max_prompt_length": task["limit"], "cache_dir": task["cache"]}
    prompts = gpuload.load(task["files"], tokenizer, **options)
    with_chat = gpuload.load(task["files"], tokenizer, return_raw_chat=True, **options)
    batches = shuffled_batches(range(len(prompts)), task["batch"])
    arrays = [np.array(batch) for batch in batches]
    size, seconds = len(batches[0]), task["seconds"]

    def tensors(rows: Any) -> Any:
        return pad(prompts.tokens.take(rows), task["limit"], prompts.pad_token_id)

    drawn, drawn_chat = endless(prompts, size), endless(with_chat, size)
    np.save(task["kept"], row_numbers(prompts, task["files"]))
    answer(
        rows=len(prompts),
        rates={
            "gpuload: tensors only": rate(tensors, arrays, seconds),
            "gpuload: `PromptLoader`, all columns": rate(lambda _: next(drawn), batches, seconds),
            "gpuload: `PromptLoader`, all columns and `raw_prompt`": rate(lambda _: next(drawn_chat), batches, seconds),
            "gpuload: `__getitems__`": rate(prompts.__getitems__, batches, seconds),
            "gpuload: `__getitems__` with `raw_prompt`": rate(with_chat.__getitems__, batches, seconds),
        },
    )


if __name__ == "__main__":
    main()
