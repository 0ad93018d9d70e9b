"""How long training waits for its batches: steps of 50 ms on the device, as with `loss.item()` at the end of each."""

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from bench.gpu.data import generated_file
from bench.gpu.rig import Rig, open_rig, tokenizer_of
from bench.gpu.section import Facts, Task

STEP = 0.050
"""Seconds of a training step."""

_ROWS, _LIMIT, _STEPS, _SIDE = 256, 1024, 40, 4096


def waits(task: Task, facts: Facts) -> None:
    """Draw batches between steps: with ids in device and in host memory, tensors only and with all other values."""
    rig, file, tokenizer = open_rig(task), generated_file(task, min(task.rows)), tokenizer_of(task.tokenizers[0])
    step = _step(rig)
    for tokens_on in ("device", "host"):
        options = {"max_prompt_length": _LIMIT, "progress": False, "tokens_on": tokens_on}
        prompts = rig.load(file, tokenizer, **options)
        loader = prompts.loader(min(_ROWS, len(prompts) // 4), shuffle=True, seed=0)
        for values, read in (("tensors", _tensors), ("all values", dict)):
            facts(f"ids in {tokens_on} memory, {values}", **_waits(rig, iter(loader), read, step))


def _waits(
    rig: Rig, batches: Iterator[Any], read: Callable[[Any], Any], step: Callable[[torch.Tensor], Any]
) -> dict[str, Any]:
    """Take steps. The wait of a step is the time from the end of the one before until the device begins with it."""
    step(next(batches)["input_ids"])
    rig.kernels.synchronize()
    found, ended = [], time.perf_counter()
    for batch in islice(batches, _STEPS):
        read(batch)
        rig.kernels.synchronize()  # the batch is on the device
        found.append(time.perf_counter() - ended)
        step(batch["input_ids"])
        rig.kernels.synchronize()
        ended = time.perf_counter()
    if rig.rehearsal:
        return {"steps": len(found)}
    wait = statistics.median(found)
    return {"steps": len(found), "wait_seconds": wait, "longest_seconds": max(found), "share_of_step": wait / STEP}


def _tensors(batch: Any) -> None:
    """Reads no value but tensors, which exist from the start."""


def _step(rig: Rig) -> Callable[[torch.Tensor], Any]:
    """Work on the device that takes `STEP` and reads the batch; in a rehearsal, only the latter."""
    if rig.rehearsal:
        return torch.sum
    one = torch.randn(_SIDE, _SIDE, device=rig.device, dtype=torch.bfloat16)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(one, one)

    each = rig.timed(lambda: multiply(10))["seconds"] / 10
    times = round(STEP / each)

    def step(ids: torch.Tensor) -> None:
        ids.sum()
        multiply(times)

    return step
