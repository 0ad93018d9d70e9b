"""Runner: every measurement, and every section of a GPU record, is a process of its own."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import ROOT

_TAIL = 4000  # characters of a failed process's output


class ContenderError(Exception):
    """A contender failed, or contenders disagree about the rows to keep."""


def run_command(
    command: Sequence[str], seconds: float | None = None, cwd: Path = ROOT, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command and capture its output.

    Raises:
        OSError: The program does not exist.
        subprocess.TimeoutExpired: The command was stopped after `seconds`.
    """
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=seconds, check=False)


def run_contender(
    module: str, task: Mapping[str, Any], cache: Path, python: str | Path = sys.executable
) -> dict[str, Any]:
    """Run a contender in a new process and return its answer.

    Args:
        module: Module in `bench.contenders`.
        task: Task for the contender; `cache` is added.
        cache: Directory for the contender's caches, those of `datasets` included.
        python: Interpreter of the environment to run in.

    Raises:
        ContenderError: The process failed; the message ends with its output.
    """
    cache.mkdir(parents=True, exist_ok=True)
    before = _result_caches(cache)
    # Each contender decides by its own defaults whether `tokenizers` uses threads.
    env = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    env |= {"HF_DATASETS_CACHE": str(cache / "datasets"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    command = [str(python), "-m", f"bench.contenders.{module}", json.dumps({**task, "cache": str(cache)})]
    done = run_command(command, cwd=cache, env=env)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        output = (done.stdout + done.stderr)[-_TAIL:]
        raise ContenderError(f"bench.contenders.{module} failed with exit code {done.returncode}:\n{output}")
    answer = dict(json.loads(lines[-1]))
    answer["process_seconds"] = time.perf_counter() - started
    answer["new_result_caches"] = len(_result_caches(cache) - before)
    return answer


def make_cold(cache: Path, files: Sequence[str]) -> None:
    """Delete a contender's cache, and drop the files from the page cache where the system allows it."""
    shutil.rmtree(cache, ignore_errors=True)
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # dirty pages cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def run_forked(work: Callable[[], None], seconds: float, log: Path) -> int | None:
    """Call a function in a forked process and kill its process group after a time limit.

    Args:
        work: Function to call.
        seconds: Time limit.
        log: File for what the process writes to stderr.

    Returns:
        The exit code (negative: the signal), or None where the limit was reached.
    """
    end = time.monotonic() + seconds
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        try:
            os.setpgid(0, 0)  # so that the child's own children can be killed with it
            with log.open("w") as file:
                os.dup2(file.fileno(), sys.stderr.fileno())
            work()
            sys.stdout.flush()
            os._exit(0)
        finally:
            os._exit(1)
    with contextlib.suppress(OSError):
        os.setpgid(child, child)  # in both processes: either may be the first to need it
    try:
        while time.monotonic() < end:
            reaped, status = os.waitpid(child, os.WNOHANG)
            if reaped:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
    except BaseException:
        _kill(child)
        raise
    _kill(child)
    return None


def without_directories(text: str) -> str:
    """Return the end of a text with paths relative to the repository, and of all other files the name only."""
    return re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text.replace(f"{ROOT}/", ""))[-_TAIL:]


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _result_caches(cache: Path) -> set[Path]:
    """Cached results of `map` and `filter` of `datasets`."""
    return set(cache.rglob("cache-*.arrow"))
