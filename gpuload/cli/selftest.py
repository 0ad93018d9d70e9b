"""Does an engine work here? Each of its stages once over the shipped prompts, timed and held against the tokenizer.

The steps are the same for every engine, through the `Engine` protocol alone.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import torch

from gpuload.arrays import Ragged
from gpuload.cli.demo import demo_files
from gpuload.engines.protocol import Engine
from gpuload.errors import MismatchError
from gpuload.load import open_sources
from gpuload.options import Options
from gpuload.reference.reference import Reference

STAGES = ("prepare", "read", "render", "encode", "batch")
"""Preparing loads and compiles the tokenizer; the others are those of a load."""

Build = Callable[[Options, Reference], Engine]

_OPTIONS = Options(max_prompt_length=512)
_COMPARED = 16  # rows whose text and ids the tokenizer makes too
_BATCH = 256


@dataclass
class Outcome:
    """What became of one engine.

    Attributes:
        description: what renders and what encodes.
        notes: why something faster was passed over.
        seconds: of each stage that worked, in their order, with what is done only once (kernels are compiled).
        failure: the stage that failed, and how; None where all worked and every answer was right.
    """

    description: str = ""
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    failure: tuple[str, str] | None = None


def try_out(build: Build) -> Outcome:
    """Runs an engine's stages up to the first that fails. Whatever an engine raises is its outcome."""
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


def _steps(build: Build, outcome: Outcome) -> Iterator[None]:
    """One of `STAGES` for each `next`."""
    file, folder = demo_files()
    reference = Reference(folder)
    engine = build(_OPTIONS, reference)
    outcome.description, outcome.notes = engine.description, engine.notes
    yield

    with engine.loading():
        (source,) = open_sources(file, _OPTIONS)
        parts = list(engine.read(source, _OPTIONS.prompt_key, True))
        yield

        rows = np.linspace(0, source.num_rows - 1, _COMPARED).astype(int)
        column = pa.concat_tables([table for table, _ in parts]).column(_OPTIONS.prompt_key)
        prompts = column.take(pa.array(rows)).to_pylist()
        rendered = [engine.render(part) for _, part in parts]
        texts = pa.chunked_array([part.text for part in rendered]).take(pa.array(rows)).to_pylist()
        _expect("texts", texts, [reference.render(prompt) for prompt in prompts])
        yield

        store = engine.store([engine.keep(engine.encode(part)[0], None) for part in rendered], None)
        tokens = store.to_host()
        _expect("ids", tokens.take(rows).to_lists(), [reference.ids(prompt) for prompt in prompts])
        del parts, rendered  # before the load's memory is given back
        yield

    limit, pad_id = _OPTIONS.max_prompt_length, reference.pad_token_id
    numbers = np.arange(_BATCH)
    taken = tokens.take(numbers)
    batch = engine.batches(store, limit, "left", pad_id)(numbers, taken, limit)
    _expect("batches", {key: values.cpu().tolist() for key, values in batch.items()}, _padded(taken, limit, pad_id))
    yield


def _padded(rows: Ragged, width: int, pad_id: int) -> dict[str, list[list[int]]]:
    """The batch of these rows as it is defined."""
    ids = rows.to_lists()
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    return {
        "input_ids": [[pad_id] * (width - len(row)) + row for row in ids],
        "attention_mask": mask.tolist(),
        "position_ids": (mask.cumsum(1) - 1).clip(min=0).tolist(),
    }


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise MismatchError(f"{what} of the shipped prompts are not the tokenizer's: do not use this engine here")
