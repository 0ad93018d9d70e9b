"""What comes first in a GPU record: compute-sanitizer, the tests marked `gpu`, and the ladder of `gpuload doctor`."""

import re
import shutil
import sys
import time
from typing import Any

from bench import environment
from bench.gpu import every_kernel
from bench.gpu.rig import absent, open_rig
from bench.gpu.section import Facts, MissingError, Task, WrongError
from bench.process import run_command
from gpuload.cli import ladder
from gpuload.engines.device import verdict

TOOLS = ("memcheck", "initcheck", "synccheck", "racecheck")


def sanitizer(task: Task, facts: Facts) -> None:
    """Run the known answers of all kernels under each tool of compute-sanitizer; in a rehearsal without."""
    if task.rehearsal:
        facts("known answers", output=every_kernel.run(open_rig(task).kernels))
        return
    for tool in TOOLS:
        facts(tool, **sanitized(tool, facts.seconds_left))
    if wrong := [tool for tool, cells in facts.rows.items() if not cells["clean"]]:
        raise WrongError(f"compute-sanitizer: {', '.join(wrong)}: {facts.rows[wrong[0]]['output']}")


def sanitized(tool: str, seconds: float) -> dict[str, Any]:
    """Run `bench.gpu.every_kernel` under a tool and return cells.

    Raises:
        MissingError: compute-sanitizer is not installed or does not support the machine.
    """
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        raise MissingError("compute-sanitizer is not on the PATH")
    command = [program, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9"]
    started = time.perf_counter()
    done = run_command([*command, sys.executable, "-m", "bench.gpu.every_kernel"], seconds)
    return judged(done.returncode, done.stdout + done.stderr) | {"seconds": time.perf_counter() - started}


def judged(code: int, output: str) -> dict[str, Any]:
    """Return cells about the output of compute-sanitizer: clean only if the run came to its end."""
    ended = re.search(r"^\d+ cases are right$", output, re.MULTILINE)
    if not ended and "not supported" in output:
        raise MissingError(f"compute-sanitizer does not work here: {output[-300:]}")
    clean = bool(ended) and not code
    return {"clean": clean} | ({} if clean else {"output": output[-1500:]})


def tests(task: Task, facts: Facts) -> None:
    """Run the tests marked `gpu`; in a rehearsal only collect them."""
    if why := absent(["pytest", "hypothesis"]):
        raise MissingError(why)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "bench/tests/test_gpu.py"]
    command += ["--collect-only"] if task.rehearsal else ["-rs"]
    done = run_command(command, facts.seconds_left)
    output = done.stdout[-3000:]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", output)}
    if task.rehearsal:
        counts = {"collected": len(re.findall(r"^bench/tests/test_gpu.py::", done.stdout, re.MULTILINE))}
    facts("tests marked gpu", **counts, exit_code=done.returncode)
    if done.returncode:
        raise WrongError(output)
    if not counts.get("collected" if task.rehearsal else "passed"):
        raise MissingError(f"no test ran: {output}")


def climb(task: Task, facts: Facts) -> None:
    """Record the steps of `gpuload doctor --gpu`, with the seconds of compilation; in a rehearsal their names."""
    facts("machine", **environment.machine())
    facts("packages", **environment.versions())
    for name, (_, limit) in ladder.STEPS.items():
        if task.rehearsal:
            facts(name, limit=limit)
            continue
        started = time.perf_counter()
        done = verdict.run_step(name, 0, min(limit, facts.seconds_left))
        output = " · ".join(done.output.splitlines())
        facts(f"doctor: {name}", works=not done.failure, seconds=time.perf_counter() - started, output=output)
        if done.failure:
            raise WrongError(f"{name}: {done.failure}")
    if not task.rehearsal:  # last: in exclusive-process mode, the steps need the GPU for themselves
        facts("GPU", **environment.gpu(open_rig(task).device))
