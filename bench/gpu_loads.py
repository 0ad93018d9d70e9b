"""Parquet to the first batch: the device's engine, the CPU's, and the ways that trainers have."""

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
from bench.gpu_data import made_file
from bench.gpu_exact import differing
from bench.gpu_rig import Rig, absent, name_of, open_rig, program_of, rates, tokenizer_of
from bench.gpu_run import Note, Task, WrongError
from bench.gpu_tokens import ENCODERS
from bench.inputs import VERL_PYTHON
from bench.launch import WorkerError, run_worker
from gpuload.dataset import PromptDataset

_LIMIT = 1024
_SAMPLE_SECONDS = 8.0
_SHARE = 64  # rows that a process takes at a time
_MOST_ROWS = 12_000  # for each process: more than it does in that time


def first_batch(task: Task, note: Note) -> None:
    """A made file of each size: load, filter, and the first batch of 256; by the device twice, and by the CPU."""
    rig, folder = open_rig(task), task.tokenizers[0]
    for rows in task.rows:
        path = made_file(task, rows)
        by_device = None
        for name, device in (("device, first time", True), ("device, again", True), ("CPU", False)):
            label = f"{rows:,} rows, {name}"
            if note.seconds_left < 20:
                note(label, why="not reached")
                continue
            cells, prompts = _first_batch(rig, path, folder, on_device=device)
            note(label, **cells)
            if device:
                by_device = prompts.tokens
            elif by_device is not None:
                note(label, differing=differing(by_device, prompts.tokens))
    if any(cells.get("differing") for cells in note.facts.values()):
        raise WrongError("the two engines give different ids")


def _first_batch(rig: Rig, path: str, folder: str, on_device: bool) -> tuple[dict[str, Any], PromptDataset]:
    rows = pq.read_metadata(path).num_rows
    tokenizer = tokenizer_of(folder)
    options: dict[str, Any] = {"max_prompt_length": _LIMIT, "progress": False, "token_cache": False}
    started = time.perf_counter()
    load = rig.load if on_device else partial(gpuload.load, device="cpu")
    prompts = load(path, tokenizer, **options)
    batch = next(iter(prompts.loader(min(256, len(prompts)), shuffle=True, seed=0)))
    int(batch["input_ids"][0, -1])  # waits for the device
    took = time.perf_counter() - started
    report = prompts.report
    cells: dict[str, Any] = {"rows": rows, "kept": len(prompts), "ids": len(prompts.tokens.values)}
    cells |= {
        "text_bytes": report.text_bytes,
        "left": report.rows_left,
        "compared": report.check.rows,
        "engine": report.engine,
    }
    if rig.rehearsal:
        return cells, prompts
    stages = {f"{stage}_seconds": seconds for stage, seconds in report.seconds.items() if stage != "total"}
    return cells | rates(took, 0, rows) | stages, prompts


def others(task: Task, note: Note) -> None:
    """The same, without a device: verl 0.9.1, the row-wise way, and gigatoken alone on the rendered text."""
    path, cores = made_file(task, min(task.rows)), len(os.sched_getaffinity(0))
    rows = pq.read_metadata(path).num_rows
    _by_rows(task, path, cores, rows, note)
    _by_gigatoken(task, path, note)
    _by_verl(task, path, cores, rows, note)


def _by_rows(task: Task, path: str, cores: int, rows: int, note: Note) -> None:
    """transformers' template and tokenizer for every row, in a process per core, on as many rows as time allows."""
    _shares.extend(_some(path, 40 if task.rehearsal else _MOST_ROWS * cores))
    done = 0
    with multiprocessing.get_context("fork").Pool(cores, _start, (task.tokenizers[0],)) as pool:
        pool.map(len, [[]] * cores)  # all processes are up
        started = time.perf_counter()
        for count in pool.imap_unordered(_filtered, range(len(_shares))):
            done += count
            if time.perf_counter() - started > _SAMPLE_SECONDS:
                break
        took = time.perf_counter() - started
        pool.terminate()
    _shares.clear()
    label = f"row by row through transformers, {cores} processes"
    note(label, sample_rows=done, tokenizer=name_of(task.tokenizers[0]))
    if task.rehearsal:
        return
    note(label, **rates(took, 0, done))
    if done < rows:
        note(label, extrapolated_to_rows=rows, extrapolated_seconds=took / done * rows)


def _some(path: str, rows: int) -> Iterator[list[Any]]:
    for batch in pq.ParquetFile(path).iter_batches(_SHARE, columns=["prompt"]):
        if rows <= 0:
            return
        yield batch.column(0).slice(0, rows).to_pylist()
        rows -= batch.num_rows


_shares: list[list[Any]] = []  # forked processes find the rows here, and are sent numbers only
_tokenizer: Any = None


def _start(folder: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = tokenizer_of(folder)


def _filtered(share: int) -> int:
    """verl 0.1's filter on some rows; how many there were."""
    for prompt in _shares[share]:
        ids = _tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        _ = len(ids) <= _LIMIT
    return len(_shares[share])


def _by_gigatoken(task: Task, path: str, note: Note) -> None:
    label = "gigatoken alone, rendered text to ids, all cores"
    if why := absent(["gigatoken", "awkward"]):
        note(label, why=why)
        return
    folder = task.tokenizers[0]
    column = pq.read_table(path, columns=["prompt"])["prompt"]
    text = pc.fill_null(program_of(folder).render(column).text, "")
    run, _ = ENCODERS["gigatoken"](tokenizer_of(folder).backend_tokenizer, text)
    run()
    size = int(pc.sum(pc.binary_length(text)).as_py())
    note(label, bytes=size, rows=len(text))
    if not task.rehearsal:
        started = time.perf_counter()
        run()
        note(label, **rates(time.perf_counter() - started, size, len(text)))


def _by_verl(task: Task, path: str, cores: int, rows: int, note: Note) -> None:
    label = f"verl 0.9.1, {cores} workers"
    python = str(VERL_PYTHON) if VERL_PYTHON.exists() else sys.executable
    if task.rehearsal:
        note(label, why="not in a rehearsal")
    elif python == sys.executable and (why := absent(["verl", "omegaconf", "datasets"])):
        note(label, why=f"missing: {why}, and no .venv-verl; the row-wise way stands for it")
    else:
        job = {"files": [path], "rows": rows, "tokenizer": task.tokenizers[0], "limit": _LIMIT, "workers": cores}
        try:
            answer = run_worker("load_verl", job, Path(task.scratch) / "verl", python)
        except WorkerError as error:
            note(label, why=str(error)[-400:])
        else:
            note(label, rows=rows, kept=answer["rows_kept"], **rates(answer["seconds"], 0, rows))
