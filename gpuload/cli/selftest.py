"""Tests whether an engine works on this machine: each stage once on the shipped prompts, timed and compared with the
tokenizer. The steps are the same for every engine, and use nothing but the `Engine` protocol.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import torch

from gpuload.core.arrays import Ragged
from gpuload.core.arrow import as_arrow
from gpuload.core.errors import MismatchError
from gpuload.core.options import Options
from gpuload.demo_data import demo_files
from gpuload.engines.protocol import Engine
from gpuload.kinds.prompts import LAYOUT
from gpuload.packing.plan import whole_rows
from gpuload.reference.reference import Reference
from gpuload.sources.later import decoded
from gpuload.sources.open import open_sources

STAGES = ("prepare", "read", "render", "encode", "batch")
"""The stages of a load, after "prepare", which loads and compiles the tokenizer."""


_OPTIONS = Options(max_prompt_length=512)
_COMPARED = 16  # rows whose text and ids are compared with the tokenizer's
_BATCH = 256


@dataclass
class Outcome:
    """The result of testing one engine."""

    description: str = ""  # what renders and what encodes
    notes: tuple[str, ...] = ()  # why a faster way is not used
    # Of each stage that worked, in order, including work that is done only once (compiling kernels).
    seconds: dict[str, float] = field(default_factory=dict)
    failure: tuple[str, str] | None = None  # the stage that failed, and how; None if all results are right


def check_engine(build: Callable[[Reference], Engine]) -> Outcome:
    """Runs an engine's stages up to the first that fails; whatever the engine raises becomes the outcome."""
    outcome = Outcome()
    steps = _steps(build, outcome)
    for stage in STAGES:
        started = time.perf_counter()
        try:
            next(steps)
        except Exception as error:
            first_line, _, _ = str(error).partition("\n")
            outcome.failure = stage, f"{type(error).__name__}: {first_line:.200}".rstrip(": ")
            break
        outcome.seconds[stage] = time.perf_counter() - started
    return outcome


def _steps(build: Callable[[Reference], Engine], outcome: Outcome) -> Iterator[None]:
    """Runs one of `STAGES` for each `next`."""
    file, folder = demo_files()
    reference = Reference(folder)
    engine = build(reference)
    outcome.description, outcome.notes = engine.describe(), engine.notes
    yield

    with engine.loading():
        (source,) = open_sources(file, _OPTIONS)
        parts = list(engine.read(source, _OPTIONS.prompt_key, True))
        yield

        rows = np.linspace(0, source.num_rows - 1, _COMPARED).astype(int)
        column = pa.concat_tables([decoded(table) for table, _ in parts]).column(_OPTIONS.prompt_key)
        prompts = column.take(as_arrow(rows)).to_pylist()
        rendered = [engine.render(part) for _, part in parts]
        texts = pa.chunked_array([part.text for part in rendered]).take(as_arrow(rows)).to_pylist()
        _expect("texts", texts, [reference.render(prompt) for prompt in prompts])
        yield

        store = engine.store([engine.keep(engine.encode(part).ids, None) for part in rendered], None)
        tokens = store.to_host()
        _expect("ids", tokens.take(rows).to_lists(), [reference.ids(prompt) for prompt in prompts])
        del parts, rendered  # before the load's memory is released
        yield

    limit, pad_id = _OPTIONS.max_prompt_length, reference.pad_token_id
    numbers = np.arange(_BATCH)
    taken = tokens.take(numbers)
    plan = whole_rows(numbers, taken.lengths)
    batch = engine.batches(store, LAYOUT, pad_id)(plan, lambda: taken, limit)
    _expect("batches", {key: values.cpu().tolist() for key, values in batch.items()}, _padded(taken, limit, pad_id))
    yield


def _padded(rows: Ragged, width: int, pad_id: int) -> dict[str, list[list[int]]]:
    """The batch of these rows by definition."""
    ids = rows.to_lists()
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    return {
        "input_ids": [[pad_id] * (width - len(row)) + row for row in ids],
        "attention_mask": mask.tolist(),
        "position_ids": (mask.cumsum(1) - 1).clip(min=0).tolist(),
    }


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise MismatchError(f"wrong {what} for the shipped prompts: do not use this engine on this machine")
