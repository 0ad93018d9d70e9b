"""What must hold on a GPU beside the numbers: memory given back, no host copies, batches that are the kernels' own
memory, kernels that touch nothing else. The tests marked `gpu` ask for the same by the same functions."""

import gc
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import gpu_small
from bench.gpu_data import made_file
from bench.gpu_rig import Rig, absent, open_rig, tokenizer_of
from bench.gpu_run import MissingError, Note, Task, WrongError
from bench.inputs import ROOT
from gpuload.arrays import Ragged
from gpuload.dataset import PromptDataset
from gpuload.engines.device.batches import DeviceBatches
from gpuload.engines.device.engine import on_device

SLACK = 64 << 20
"""Bytes that CUDA may keep for itself: code of kernels, pages that are partly used."""

PER_BATCH = 256
"""Bytes that a batch may move between host and device beyond the numbers of its rows."""

_BATCHES, _ROWS, _LIMIT = 16, 64, 512
_SMALL_SECONDS = 150.0
_TEST_SECONDS = 240.0


def memory(task: Task, note: Note) -> None:
    """The device's memory before a load and after it: what is gone is the store of ids."""
    rig = open_rig(task)
    if not (rig.rehearsal or rig.cudf):
        raise MissingError("without rmm a load has no pool of its own that could be given back")
    note("a load", **kept_memory(rig, made_file(task, min(task.rows)), tokenizer_of(task.tokenizers[0])))
    if note.facts["a load"].get("kept_bytes", 0) > note.facts["a load"]["store_bytes"] + SLACK:
        raise WrongError("a load keeps more of the device's memory than its store")


def kept_memory(rig: Rig, file: str, tokenizer: Any, **options: Any) -> dict[str, int]:
    """Cells about what a load keeps of the device's memory. One load goes before, for what is kept once for all."""
    options = {"max_prompt_length": _LIMIT, "progress": False} | options
    warm = rig.load(file, tokenizer, **options)
    del warm
    before = _free(rig)
    prompts = rig.load(file, tokenizer, **options)
    after = _free(rig)
    cells = {"store_bytes": prompts.tokens.nbytes, "rows": len(prompts)}
    return cells if rig.rehearsal else cells | {"kept_bytes": before - after, "free_bytes": after}


def _free(rig: Rig) -> int:
    if rig.rehearsal:
        return 0
    gc.collect()
    torch.cuda.synchronize()
    rig.kernels.xp.get_default_memory_pool().free_all_blocks()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(rig.device)[0])


def host_copies(task: Task, note: Note) -> None:
    """Copies between host and device while batches are drawn, as CUDA itself reports them."""
    rig = open_rig(task)
    prompts = rig.load(task.files[0], tokenizer_of(task.tokenizers[0]), max_prompt_length=_LIMIT, progress=False)
    rows = min(_ROWS, len(prompts) // 2)
    if rig.rehearsal:
        with rig.launches() as noted:
            drawn = draw(prompts, rows)
        note("batches", batches=drawn, rows=rows, launches=len(noted))
        return
    copies = copied(prompts, rows, Path(task.scratch) / "trace.json")
    note("batches", batches=copies.pop("batches"), rows=rows)
    for direction, cells in copies.items():
        note(direction, **cells)
    if why := too_much(copies, note.facts["batches"]["batches"], rows):
        raise WrongError(why)


def draw(prompts: PromptDataset, rows: int) -> int:
    """Draws some batches; how many it was."""
    chance = np.random.default_rng(0)
    for _ in range(_BATCHES):
        prompts.batch(chance.integers(0, len(prompts), rows))
    return _BATCHES


def copied(prompts: PromptDataset, rows: int, trace: Path) -> dict[str, Any]:
    """Direction → copies, their bytes and the largest one, while batches are drawn; and how many batches that were.

    Raises:
        MissingError: the profiler sees nothing of the GPU here, not even the kernel that makes batches.
    """
    draw(prompts, rows)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        drawn = draw(prompts, rows)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(trace))
    return {"batches": drawn} | copies_of(json.loads(trace.read_text())["traceEvents"], drawn)


def copies_of(events: list[dict[str, Any]], batches: int) -> dict[str, dict[str, int]]:
    """The copies among the events of a profiler's trace, by direction ("HtoD", "DtoH", "DtoD")."""
    kernels = sum(event.get("cat") == "kernel" and event["name"] == "pad" for event in events)
    if kernels != batches:
        raise MissingError(
            f"the profiler saw {kernels} kernels for {batches} batches: what it says of copies means nothing"
        )
    found: dict[str, dict[str, int]] = {}
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            direction = (re.search(r"[HD]to[HD]", event["name"]) or [event["name"]])[0]
            size = int(event["args"]["bytes"])
            cells = found.setdefault(direction, {"copies": 0, "bytes": 0, "largest": 0})
            cells["copies"] += 1
            cells["bytes"] += size
            cells["largest"] = max(cells["largest"], size)
    return found


def too_much(copies: dict[str, Any], batches: int, rows: int) -> str | None:
    """What was copied that need not be: to the device go 8 bytes a row, which row it is; nothing comes back."""
    for direction, allowed in (("HtoD", batches * (8 * rows + PER_BATCH)), ("DtoH", batches * PER_BATCH)):
        if (size := copies.get(direction, {}).get("bytes", 0)) > allowed:
            return f"{direction}: {size:,} bytes for {batches} batches of {rows} rows, {allowed:,} allowed"
    return None


def dlpack(task: Task, note: Note) -> None:
    """Whether batches in torch are the memory that the kernel wrote."""
    for tensor, (written, given) in pointers(open_rig(task)).items():
        note(tensor, same_memory=written == given)
    if not all(cells["same_memory"] for cells in note.facts.values()):
        raise WrongError("a batch was copied on its way into torch")


def pointers(rig: Rig) -> dict[str, tuple[int, int]]:
    """Tensor of a batch → where the kernel wrote, and torch's `data_ptr`."""
    on_host = Ragged.from_lists([list(range(1 + number % 50)) for number in range(1000)])
    with rig.kernels.current():
        store = on_device(rig.kernels, on_host)
    made = DeviceBatches(rig.kernels, store, 64, "left", 0)
    with rig.launches() as noted:
        batch = made(np.arange(100), on_host, 64)
    (launch,) = noted
    names = {"input_ids": "ids", "attention_mask": "mask", "position_ids": "positions"}
    return {key: (launch.arrays[names[key]], tensor.data_ptr()) for key, tensor in batch.items()}


def sanitizer(task: Task, note: Note) -> None:
    """NVIDIA's compute-sanitizer over a small run of all kernels; in a rehearsal the run alone."""
    if task.rehearsal:
        note("memcheck", **_what_ran(gpu_small.run(open_rig(task))))
        return
    note("memcheck", **sanitized())
    if not note.facts["memcheck"]["clean"]:
        raise WrongError(f"compute-sanitizer: {note.facts['memcheck']['said']}")


def sanitized() -> dict[str, Any]:
    """Cells about a run of `bench.gpu_small` under compute-sanitizer.

    Raises:
        MissingError: the tool is not here, or rejects the machine.
    """
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        raise MissingError("compute-sanitizer is not on the PATH")
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    command += [sys.executable, "-m", "bench.gpu_small"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_SMALL_SECONDS, check=False)
    return verdict(done.returncode, done.stdout + done.stderr)


def verdict(code: int, said: str) -> dict[str, Any]:
    """Cells about what compute-sanitizer said: clean only where the run came to its end."""
    ran = _what_ran(said)
    if not ran and "not supported" in said:
        raise MissingError(f"compute-sanitizer does not work here: {said[-300:]}")
    clean = bool(ran) and not code
    return ran | {"clean": clean} | ({} if clean else {"said": said[-1500:]})


def _what_ran(said: str) -> dict[str, Any]:
    found = re.search(r"^(\d+) rows, (\d+) launches of (\d+) kernels$", said, re.MULTILINE)
    return dict(zip(("rows", "launches", "kernels"), map(int, found.groups()), strict=True)) if found else {}


def tests(task: Task, note: Note) -> None:
    """The tests marked `gpu`; in a rehearsal they are only collected."""
    if why := absent(["pytest", "hypothesis"]):
        raise MissingError(why)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/test_gpu.py"]
    command += ["--collect-only"] if task.rehearsal else ["-rs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TEST_SECONDS, check=False)
    said = done.stdout[-3000:]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", said)}
    if task.rehearsal:
        counts = {"collected": len(re.findall(r"^tests/test_gpu.py::", done.stdout, re.MULTILINE))}
    note("tests marked gpu", **counts, exit_code=done.returncode)
    if done.returncode:
        raise WrongError(said)
    if not counts.get("collected" if task.rehearsal else "passed"):
        raise MissingError(f"none of them ran: {said}")
