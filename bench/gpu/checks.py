"""Checks on a GPU: memory is released, no host copies, zero-copy batches, no invalid accesses.

The tests marked `gpu` use the same functions.
"""

import gc
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import VERL_PYTHON, environment
from bench.gpu import every_kernel
from bench.gpu.data import generated_file
from bench.gpu.rig import Rig, absent, cudf_missing, open_rig, tokenizer_of
from bench.gpu.section import Facts, MissingError, Task, WrongError
from bench.process import run_command
from gpuload.core.arrays import Ragged
from gpuload.engines.device import cuda
from gpuload.engines.device.batches import DeviceBatches
from gpuload.engines.device.store import Segments
from gpuload.kinds.prompts import LAYOUT, PromptDataset
from gpuload.packing.plan import whole_rows

SLACK = 64 << 20
"""Bytes that CUDA may keep: code of kernels, partly used pages."""

PER_BATCH = 256
"""Bytes that a batch may move between host and device in addition to its plan."""

_BATCHES, _ROWS, _LIMIT = 16, 64, 512
_SANITIZER_SECONDS = 150.0
_TEST_SECONDS = 240.0


def machine(task: Task, facts: Facts) -> None:
    """Describe the machine, and check that a kernel runs."""
    facts("machine", **environment.machine())
    facts("packages", **environment.versions())
    reasons = {
        "cuDF": cudf_missing(),
        "gigatoken": absent(["gigatoken", "awkward"]),
        "fastokens": absent(["fastokens"]),
        "verl": None if VERL_PYTHON.exists() else absent(["verl"]),
        "compute-sanitizer": None if shutil.which("compute-sanitizer") else "not on the PATH",
    }
    facts("missing", **{name: why for name, why in reasons.items() if why})
    rig = open_rig(task)
    if not rig.rehearsal:
        facts("GPU", **environment.gpu(rig.device))
    cuda.self_test(rig.kernels)
    facts("kernels", right=True)


def memory(task: Task, facts: Facts) -> None:
    """Compare free device memory before and after a load: the difference must be the store of ids."""
    rig = open_rig(task)
    if not (rig.rehearsal or rig.cudf):
        raise MissingError("without rmm a load has no memory pool of its own to release")
    facts("a load", **kept_memory(rig, generated_file(task, min(task.rows)), tokenizer_of(task.tokenizers[0])))
    if facts.rows["a load"].get("kept_bytes", 0) > facts.rows["a load"]["store_bytes"] + SLACK:
        raise WrongError("a load keeps more device memory than its store of ids")


def kept_memory(rig: Rig, file: str, tokenizer: Any, **options: Any) -> dict[str, int]:
    """Return cells about the device memory that a load keeps.

    Another load runs before, for memory that is allocated once per process.
    """
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


def host_copies(task: Task, facts: Facts) -> None:
    """Record the copies between host and device while batches are drawn, as CUDA reports them."""
    rig = open_rig(task)
    prompts = rig.load(task.files[0], tokenizer_of(task.tokenizers[0]), max_prompt_length=_LIMIT, progress=False)
    rows = min(_ROWS, len(prompts) // 2)
    if rig.rehearsal:
        with rig.launches() as recorded:
            drawn = draw(prompts, rows)
        facts("batches", batches=drawn, rows=rows, launches=len(recorded))
        return
    copies = copied(prompts, rows, Path(task.scratch) / "trace.json")
    facts("batches", batches=copies.pop("batches"), rows=rows)
    for direction, cells in copies.items():
        facts(direction, **cells)
    if why := too_much(copies, facts.rows["batches"]["batches"], rows):
        raise WrongError(why)


def draw(prompts: PromptDataset, rows: int) -> int:
    """Draw some batches and return their number."""
    chance = np.random.default_rng(0)
    for _ in range(_BATCHES):
        prompts.batch(chance.integers(0, len(prompts), rows))
    return _BATCHES


def copied(prompts: PromptDataset, rows: int, trace: Path) -> dict[str, Any]:
    """Return the copies of each direction while batches are drawn, and the number of batches.

    Raises:
        MissingError: The profiler does not see the GPU, not even the kernel that makes batches.
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
    """Return the copies of each direction ("HtoD", "DtoH", "DtoD") in a profiler's trace."""
    kernels = sum(event.get("cat") == "kernel" and event["name"] == "pad" for event in events)
    if kernels != batches:
        raise MissingError(
            f"the profiler saw {kernels} kernels for {batches} batches, so its copies are not complete either"
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
    """Return a sentence on unnecessary copies, or None. Necessary is the plan of
    a batch, four numbers for each row: where it begins in the batch and in the store, its number and its piece."""
    for direction, allowed in (("HtoD", batches * (32 * rows + PER_BATCH)), ("DtoH", batches * PER_BATCH)):
        if (size := copies.get(direction, {}).get("bytes", 0)) > allowed:
            return f"{direction}: {size:,} bytes for {batches} batches of {rows} rows, {allowed:,} allowed"
    return None


def dlpack(task: Task, facts: Facts) -> None:
    """Check that torch's tensors share the memory that the kernel wrote."""
    for tensor, (written, given) in pointers(open_rig(task)).items():
        facts(tensor, same_memory=written == given)
    if not all(cells["same_memory"] for cells in facts.rows.values()):
        raise WrongError("torch's tensors are copies of the batch")


def pointers(rig: Rig) -> dict[str, tuple[int, int]]:
    """Return, for each tensor of a batch, the address that the kernel wrote to and torch's `data_ptr`."""
    on_host = Ragged.from_lists([list(range(1 + number % 50)) for number in range(1000)])
    with rig.kernels.current():
        store = Segments(rig.kernels).add(on_host)
    assert store is not None
    made = DeviceBatches(rig.kernels, store, LAYOUT, 0)
    with rig.launches() as recorded:
        batch = made(whole_rows(np.arange(100), on_host.lengths[:100]), lambda: on_host, 64)
    (launch,) = recorded
    plane = 8 * 100 * 64  # the kernel writes the three tensors one after the other
    return {
        key: (launch.arrays["out"] + number * plane, tensor.data_ptr())
        for number, (key, tensor) in enumerate(batch.items())
    }


def sanitizer(task: Task, facts: Facts) -> None:
    """Run all kernels under NVIDIA's compute-sanitizer; in a rehearsal without it."""
    if task.rehearsal:
        facts("memcheck", **_counts(every_kernel.run(open_rig(task))))
        return
    facts("memcheck", **sanitized())
    if not facts.rows["memcheck"]["clean"]:
        raise WrongError(f"compute-sanitizer: {facts.rows['memcheck']['output']}")


def sanitized() -> dict[str, Any]:
    """Run `bench.gpu.every_kernel` under compute-sanitizer and return cells.

    Raises:
        MissingError: The tool is not installed or does not support the machine.
    """
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        raise MissingError("compute-sanitizer is not on the PATH")
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    command += [sys.executable, "-m", "bench.gpu.every_kernel"]
    done = run_command(command, _SANITIZER_SECONDS)
    return verdict(done.returncode, done.stdout + done.stderr)


def verdict(code: int, output: str) -> dict[str, Any]:
    """Return cells about the output of compute-sanitizer: clean only if the run came to its end."""
    ran = _counts(output)
    if not ran and "not supported" in output:
        raise MissingError(f"compute-sanitizer does not work here: {output[-300:]}")
    clean = bool(ran) and not code
    return ran | {"clean": clean} | ({} if clean else {"output": output[-1500:]})


def _counts(output: str) -> dict[str, Any]:
    found = re.search(r"^(\d+) cases, (\d+) launches of (\d+) kernels$", output, re.MULTILINE)
    return dict(zip(("cases", "launches", "kernels"), map(int, found.groups()), strict=True)) if found else {}


def tests(task: Task, facts: Facts) -> None:
    """Run the tests marked `gpu`; in a rehearsal only collect them."""
    if why := absent(["pytest", "hypothesis"]):
        raise MissingError(why)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "bench/tests/test_gpu.py"]
    command += ["--collect-only"] if task.rehearsal else ["-rs"]
    done = run_command(command, _TEST_SECONDS)
    output = done.stdout[-3000:]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", output)}
    if task.rehearsal:
        counts = {"collected": len(re.findall(r"^bench/tests/test_gpu.py::", done.stdout, re.MULTILINE))}
    facts("tests marked gpu", **counts, exit_code=done.returncode)
    if done.returncode:
        raise WrongError(output)
    if not counts.get("collected" if task.rehearsal else "passed"):
        raise MissingError(f"no test ran: {output}")
