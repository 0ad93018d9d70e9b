"""What a load on a GPU costs whatever the speed of its kernels: how often the host waits for the device, and how many
operations it launches, per part of a load, and so per gigabyte of prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from simulator import engine_on, load_chats_with, load_pairs_with, load_with
from simulator.host_kernels import COMPILER
from simulator.strict_arrays import StrictKernels

from gpuload.engines.conversations import Conversations, from_arrow
from gpuload.engines.device.parts import MOST_JOINED
from gpuload.engines.device.texts import DeviceTexts
from gpuload.pipeline import run
from gpuload.sources import batches
from gpuload.sources.read import Source, with_prompts

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

PART = 16 << 10
"""Bytes of a part here, instead of `MOST_JOINED`: the numbers per part do not depend on it."""

ROWS = 30  # of about 260 bytes, in a part
OPTIONS: dict[str, Any] = {"verify": "off", "token_cache": False, "progress": False}


def table(rows: int) -> pa.Table:
    prompts = [[{"role": "user", "content": f"{row}: " + "What is it worth? " * 13}] for row in range(rows)]
    answers = [[{"role": "assistant", "content": f"yes, {row}"}] for row in range(rows)]
    return pa.table({
        "prompt": prompts,
        "messages": [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)],
        "chosen": answers,
        "rejected": [[{"role": "assistant", "content": f"no, {row}"}] for row in range(rows)],
        "x": list(range(rows)),
    })  # fmt: skip


def as_frame(data: pa.Table, directory: Path) -> Any:
    return data


def as_parquet(data: pa.Table, directory: Path) -> Any:
    file = directory / f"{data.num_rows}.parquet"
    pq.write_table(data, file, row_group_size=7)
    return str(file)


def as_json(data: pa.Table, directory: Path) -> Any:
    file = directory / f"{data.num_rows}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in data.to_pylist()))
    return str(file)


def by_cudf(kernels: StrictKernels) -> Callable[[Source, str], Iterator[Conversations]]:
    """As cuDF would read: the prompt column is in device memory, in parts of a load's size."""

    def read(source: Source, prompt_key: str) -> Iterator[Conversations]:
        column = pa.concat_arrays([prompts for _, prompts in with_prompts(source, prompt_key)])
        for first in range(0, len(column), ROWS):
            with kernels.current():
                part = from_arrow(DeviceTexts(kernels), column.slice(first, ROWS))
            yield part

    return read


def prompts(kernels: StrictKernels, files: Any, tokenizer: Any) -> Any:
    return load_with(engine_on(kernels), files, tokenizer, max_prompt_length=1000, **OPTIONS)


def prompts_by_cudf(kernels: StrictKernels, files: Any, tokenizer: Any) -> Any:
    return load_with(engine_on(kernels, by_cudf(kernels)), files, tokenizer, max_prompt_length=1000, **OPTIONS)


def chats(kernels: StrictKernels, files: Any, tokenizer: Any) -> Any:
    return load_chats_with(kernels, files, tokenizer, **OPTIONS)


def pairs(kernels: StrictKernels, files: Any, tokenizer: Any) -> Any:
    return load_pairs_with(kernels, files, tokenizer, **OPTIONS)


def as_files(data: pa.Table, directory: Path) -> Any:
    """Small ones, of seven rows each, which is a fourth of a part."""
    made = []
    for number, first in enumerate(range(0, data.num_rows, 7)):
        made.append(directory / f"{data.num_rows}-{number}.jsonl")
        made[-1].write_text("".join(json.dumps(row) + "\n" for row in data.slice(first, 7).to_pylist()))
    return [str(file) for file in made]


def as_chats(data: pa.Table, directory: Path) -> Any:
    return data.select(["messages", "x"])


def as_files_of_chats(data: pa.Table, directory: Path) -> Any:
    return as_files(as_chats(data, directory), directory)


@pytest.mark.parametrize(
    ("load", "form", "waits", "launches"),
    [
        (prompts, as_frame, 40, 150),
        (prompts, as_parquet, 40, 150),
        (prompts, as_json, 40, 150),
        (prompts, as_files, 40, 150),
        (prompts_by_cudf, as_parquet, 40, 150),
        (chats, as_chats, 42, 175),
        (chats, as_files_of_chats, 42, 175),
        (pairs, as_frame, 120, 540),
        (pairs, as_files, 120, 540),
    ],
)
def test_waits_and_launches_of_a_load(
    load: Callable[..., Any],
    form: Callable[[pa.Table, Path], Any],
    waits: int,
    launches: int,
    qwen: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arrow's parts of some rows are joined, so the numbers are those of a part, whatever the data come in."""
    monkeypatch.setattr(batches, "BATCH_ROWS", 3)
    join, parts = run.joined_batches, [0]

    def counting(*arguments: Any) -> Iterator[Any]:
        for part in join(*arguments):
            parts[0] += 1
            yield part

    monkeypatch.setattr(run, "joined_batches", counting)
    counts = []
    for several in (2, 5):
        parts[0], kernels = 0, StrictKernels()
        kernels.chunk_bytes = PART
        assert len(load(kernels, form(table(several * 2 * ROWS), tmp_path), qwen)) == several * 2 * ROWS
        counts.append((parts[0], kernels.xp.waits, kernels.xp.launches))
    more, waited, launched = (b - a for a, b in zip(*counts, strict=True))
    per_gb = 10**9 / MOST_JOINED
    each = waited / more, launched / more
    print(load.__name__, form.__name__, f"{each} per part, {[round(one * per_gb) for one in each]} per GB")
    assert 3 <= more <= 6, "rows are joined to parts"
    assert waited <= waits * more
    assert launched <= launches * more
