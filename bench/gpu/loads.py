"""Parquet to the first batch: the device engine, the CPU engine, and other loaders."""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

import gpuload
from bench import VERL_PYTHON
from bench.gpu.data import generated_file
from bench.gpu.exact import differing
from bench.gpu.rig import Rig, absent, name_of, open_rig, program_of, rates, tokenizer_of
from bench.gpu.section import Facts, Task, WrongError
from bench.gpu.tokens import ENCODERS
from bench.process import ContenderError, run_contender
from gpuload.engines.host.render import render
from gpuload.kinds.prompts import PromptDataset

_LIMIT = 1024
_SAMPLE_SECONDS = 8.0
_SHARE = 64  # rows per task of a process
_MOST_ROWS = 12_000  # per process: more than it filters in that time


def first_batch(task: Task, facts: Facts) -> None:
    """Load a generated file of each size and draw the first batch of 256: twice on the device, once on the CPU."""
    rig, directory = open_rig(task), task.tokenizers[0]
    for rows in task.rows:
        path = generated_file(task, rows)
        by_device = None
        for name, device in (("device, first time", True), ("device, again", True), ("CPU", False)):
            label = f"{rows:,} rows, {name}"
            if facts.seconds_left < 20:
                facts(label, why="not reached")
                continue
            cells, prompts = _first_batch(rig, path, directory, to_device=device)
            facts(label, **cells)
            if device:
                by_device = prompts.tokens
            elif by_device is not None:
                facts(label, differing=differing(by_device, prompts.tokens))
    if any(cells.get("differing") for cells in facts.rows.values()):
        raise WrongError("the two engines make different ids")


def _first_batch(rig: Rig, path: str, directory: str, to_device: bool) -> tuple[dict[str, Any], PromptDataset]:
    rows = pq.read_metadata(path).num_rows
    tokenizer = tokenizer_of(directory)
    options: dict[str, Any] = {"max_prompt_length": _LIMIT, "progress": False, "token_cache": False}
    started = time.perf_counter()
    load = rig.load if to_device else partial(gpuload.load, device="cpu")
    prompts = load(path, tokenizer, **options)
    batch = next(iter(prompts.loader(min(256, len(prompts)), shuffle=True, seed=0)))
    int(batch["input_ids"][0, -1])  # synchronizes
    took = time.perf_counter() - started
    report = prompts.report
    cells: dict[str, Any] = {"rows": rows, "kept": len(prompts), "ids": len(prompts.tokens.values)}
    cells |= {
        "text_bytes": report.text_bytes,
        "fallback": report.rows_fallback,
        "compared": report.check.rows,
        "engine": report.engine,
    }
    if rig.rehearsal:
        return cells, prompts
    stages = {f"{stage}_seconds": seconds for stage, seconds in report.seconds.items() if stage != "total"}
    return cells | rates(took, 0, rows) | stages, prompts


def others(task: Task, facts: Facts) -> None:
    """Measure loaders without a GPU: verl 0.9.1, the baseline row by row, and gigatoken alone on rendered text."""
    path, cores = generated_file(task, min(task.rows)), len(os.sched_getaffinity(0))
    rows = pq.read_metadata(path).num_rows
    _by_rows(task, path, cores, rows, facts)
    _by_gigatoken(task, path, facts)
    _by_verl(task, path, cores, rows, facts)


def _by_rows(task: Task, path: str, cores: int, rows: int, facts: Facts) -> None:
    """Baseline: template and tokenizer row by row, one process per core, on as many rows as time allows."""
    _shares.extend(_some(path, 40 if task.rehearsal else _MOST_ROWS * cores))
    done = 0
    with multiprocessing.get_context("fork").Pool(cores, _start, (task.tokenizers[0],)) as pool:
        pool.map(len, [[]] * cores)  # waits until all processes have started
        started = time.perf_counter()
        for count in pool.imap_unordered(_filtered, range(len(_shares))):
            done += count
            if time.perf_counter() - started > _SAMPLE_SECONDS:
                break
        took = time.perf_counter() - started
        pool.terminate()
    _shares.clear()
    label = f"baseline, row by row, {cores} processes"
    facts(label, sample_rows=done, tokenizer=name_of(task.tokenizers[0]))
    if task.rehearsal:
        return
    facts(label, **rates(took, 0, done))
    if done < rows:
        facts(label, extrapolated_to_rows=rows, extrapolated_seconds=took / done * rows)


def _some(path: str, rows: int) -> Iterator[list[Any]]:
    for batch in pq.ParquetFile(path).iter_batches(_SHARE, columns=["prompt"]):
        if rows <= 0:
            return
        yield batch.column(0).slice(0, rows).to_pylist()
        rows -= batch.num_rows


_shares: list[list[Any]] = []  # inherited by forked processes, which are sent indices only
_tokenizer: Any = None


def _start(directory: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = tokenizer_of(directory)


def _filtered(share: int) -> int:
    """Apply verl 0.1's filter to one share of rows and return their number."""
    for prompt in _shares[share]:
        ids = _tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        _ = len(ids) <= _LIMIT
    return len(_shares[share])


def _by_gigatoken(task: Task, path: str, facts: Facts) -> None:
    label = "gigatoken alone, rendered text to ids, all cores"
    if why := absent(["gigatoken", "awkward"]):
        facts(label, why=why)
        return
    directory = task.tokenizers[0]
    column = pq.read_table(path, columns=["prompt"])["prompt"]
    text = pc.fill_null(render(program_of(directory), column).text, "")
    run, _ = ENCODERS["gigatoken"](tokenizer_of(directory).backend_tokenizer, text)
    run()
    size = int(pc.sum(pc.binary_length(text)).as_py())
    facts(label, bytes=size, rows=len(text))
    if not task.rehearsal:
        started = time.perf_counter()
        run()
        facts(label, **rates(time.perf_counter() - started, size, len(text)))


def _by_verl(task: Task, path: str, cores: int, rows: int, facts: Facts) -> None:
    label = f"verl 0.9.1, {cores} workers"
    python = str(VERL_PYTHON) if VERL_PYTHON.exists() else sys.executable
    if task.rehearsal:
        facts(label, why="not measured in a rehearsal")
    elif python == sys.executable and (why := absent(["verl", "omegaconf", "datasets"])):
        facts(label, why=f"{why}, and there is no .venv-verl; see the baseline")
    else:
        job = {"files": [path], "rows": rows, "tokenizer": task.tokenizers[0], "limit": _LIMIT, "workers": cores}
        try:
            answer = run_contender("load_verl", job, Path(task.scratch) / "verl", python)
        except ContenderError as error:
            facts(label, why=str(error)[-400:])
        else:
            facts(label, rows=rows, kept=answer["rows_kept"], **rates(answer["seconds"], 0, rows))
