"""Whole loads: data of each kind to the first batch, their kernels, the wait of a training step, and other loaders."""

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from bench import VERL_PYTHON
from bench.data import first_rows
from bench.gpu.data import agent_rows, answered, generated_file, paired
from bench.gpu.rig import DEFAULTS, LOADS, Rig, by_kernel, name_of, open_rig, rates, tokenizer_of
from bench.gpu.section import Facts, Task, WrongError
from bench.process import ContenderError, run_contender
from gpuload.demo_data import demo_files

STEP = 0.050
"""Seconds of a training step."""

_LIMIT = 1024
_STEPS, _SIDE = 40, 4096
_SAMPLE = 4_000  # rows of the loader that goes row by row


def _data(task: Task) -> Iterator[tuple[str, str, Any]]:
    """Yield name, kind and data of each load."""
    for rows in task.rows:
        yield f"prompts, {rows:,} rows", "prompts", generated_file(task, rows)
    rows = min(task.rows)
    prompts = pq.read_table(generated_file(task, rows), columns=["prompt"])["prompt"].combine_chunks()
    yield f"chats, {rows:,} rows", "chats", pa.table({"messages": answered(prompts)})
    yield f"pairs, {rows:,} rows", "pairs", paired(prompts)
    yield f"rows of agents, {min(rows, 20_000):,} rows", "chats", agent_rows(task, min(rows, 20_000))


def first_batch(task: Task, facts: Facts) -> None:
    """Load each kind of data and draw its first batch: twice on the device, once on the CPU. Compilation is apart."""
    rig, tokenizer = open_rig(task), tokenizer_of(task.tokenizers[0])

    def shipped() -> Any:
        return next(iter(rig.load(demo_files()[0], tokenizer, max_prompt_length=_LIMIT).loader(16)))

    facts("the shipped data: tables, template, CuPy's own kernels", **rig.timed(shipped, repeats=1, warm_up=False))
    for name, kind, data in _data(task):
        prints = set()
        for how in ("device", "device, again", "CPU"):
            if facts.seconds_left < 20:
                facts(f"{name}, {how}", why="not reached")
                continue
            cells, loaded = _first_batch(rig, kind, data, tokenizer, how != "CPU")
            facts(f"{name}, {how}", **cells)
            prints.add(str(loaded.fingerprint))
            del loaded
        if len(prints) > 1:
            facts(name, same=False)
    if wrong := [row for row, cells in facts.rows.items() if cells.get("same") is False]:
        raise WrongError(f"the two engines make different ids: {', '.join(wrong)}")


def _first_batch(rig: Rig, kind: str, data: Any, tokenizer: Any, to_device: bool) -> tuple[dict[str, Any], Any]:
    options: dict[str, Any] = {"verify": "sample"} | ({"max_prompt_length": _LIMIT} if kind == "prompts" else {})
    started = time.perf_counter()
    if to_device:
        loaded = rig.load(data, tokenizer, kind, **options)
    else:
        loaded = LOADS[kind](data, tokenizer, device="cpu", **DEFAULTS | options)
    batch = next(iter(loaded.loader(min(256, len(loaded)), shuffle=True, seed=0)))
    int(next(value for value in batch.values() if isinstance(value, torch.Tensor)).flatten()[-1])  # synchronizes
    took, report = time.perf_counter() - started, loaded.report
    cells = {"rows": report.rows_read, "kept": len(loaded), "text_bytes": report.text_bytes}
    cells |= {"fallback": report.rows_fallback, "compared": report.check.rows, "engine": report.engine}
    if rig.rehearsal:
        return cells, loaded
    stages = {f"{stage}_seconds": seconds for stage, seconds in report.seconds.items() if stage != "total"}
    return cells | rates(took, report.text_bytes, report.rows_read) | stages, loaded


def kernels(task: Task, facts: Facts) -> None:
    """Record each kernel of a load of each kind, which Arrow reads."""
    rig, tokenizer = open_rig(task), tokenizer_of(task.tokenizers[0])
    for name, kind, data in list(_data(task))[1:] if len(task.rows) > 1 else _data(task):
        options = {"max_prompt_length": _LIMIT} if kind == "prompts" else {}
        with rig.launches() as recorded:
            rig.load_here(data, tokenizer, kind, **options).batch(range(16))
        for kernel, cells in by_kernel(recorded).items():
            facts(f"{name}: {kernel}", **cells)


def waits(task: Task, facts: Facts) -> None:
    """Draw batches between steps of 50 ms: with ids in device and in host memory, tensors only and all values."""
    rig, file, tokenizer = open_rig(task), generated_file(task, min(task.rows)), tokenizer_of(task.tokenizers[0])
    step = _step(rig)
    for tokens_on in ("device", "host"):
        prompts = rig.load(file, tokenizer, max_prompt_length=_LIMIT, tokens_on=tokens_on)
        loader = prompts.loader(min(256, len(prompts) // 4), shuffle=True, seed=0)
        for values, read in (("tensors", len), ("all values", dict)):
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


def _step(rig: Rig) -> Callable[[torch.Tensor], Any]:
    """Work on the device that takes `STEP` and reads the batch; in a rehearsal, only the latter."""
    if rig.rehearsal:
        return torch.sum
    one = torch.randn(_SIDE, _SIDE, device=rig.device, dtype=torch.bfloat16)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(one, one)

    times = round(STEP / (rig.timed(lambda: multiply(10))["seconds"] / 10))

    def step(ids: torch.Tensor) -> None:
        ids.sum()
        multiply(times)

    return step


def others(task: Task, facts: Facts) -> None:
    """Measure loaders without a GPU on this machine: verl 0.9.1, and template and tokenizer row by row on some rows."""
    path = generated_file(task, min(task.rows))
    few = str(first_rows(path, _SAMPLE, Path(task.scratch) / "few" / "few.parquet"))
    for label, module, file, python in (
        ("row by row, one process", "load_rowwise", few, None),
        ("verl 0.9.1, 16 workers", "load_verl", path, str(VERL_PYTHON)),
    ):
        if task.rehearsal or (python and not VERL_PYTHON.exists()):
            facts(label, why="not measured in a rehearsal" if task.rehearsal else "there is no .venv-verl")
            continue
        rows = pq.read_metadata(file).num_rows
        job = {"files": [file], "rows": rows, "tokenizer": task.tokenizers[0], "limit": _LIMIT, "workers": 16}
        try:
            answer = run_contender(module, job, Path(task.scratch) / module, *([python] if python else []))
        except ContenderError as error:
            facts(label, why=str(error)[-400:])
        else:
            facts(label, kept=answer["rows_kept"], data=name_of(file), rows=rows, **rates(answer["seconds"], 0, rows))
