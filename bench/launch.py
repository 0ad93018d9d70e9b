"""One measurement: a worker in a fresh process, with the caches that it is to find."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.inputs import ROOT

_TAIL = 3000  # characters of a failed worker's output


class WorkerError(Exception):
    """A worker failed, or contenders disagree about which rows to keep."""


def run_worker(
    module: str, task: Mapping[str, Any], cache: Path, python: str | Path = sys.executable
) -> dict[str, Any]:
    """Runs a worker and returns its answer.

    Args:
        module: in `bench.workers`.
        task: what it is to do; `cache` is added.
        cache: the folder for whatever the contender wants to keep; `datasets` keeps all there.
        python: of the environment to run in.

    Raises:
        WorkerError: it failed; with the end of what it said.
    """
    cache.mkdir(parents=True, exist_ok=True)
    before = _result_caches(cache)
    given = {"HF_DATASETS_CACHE": str(cache / "datasets"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    # Whether tokenizers may use threads is left to each contender's own defaults.
    env = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"} | given
    command = [str(python), "-m", f"bench.workers.{module}", json.dumps({**task, "cache": str(cache)})]
    started = time.perf_counter()
    done = subprocess.run(command, cwd=cache, env=env, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = (done.stdout + done.stderr)[-_TAIL:]
        raise WorkerError(f"bench.workers.{module} failed with {done.returncode}:\n{said}")
    answer = dict(json.loads(lines[-1]))
    answer["process_seconds"] = time.perf_counter() - started
    answer["new_result_caches"] = len(_result_caches(cache) - before)
    return answer


def forget(cache: Path, files: Sequence[str]) -> None:
    """Makes the next run a cold one: the contender's cache is emptied, the files leave the page cache if they can."""
    shutil.rmtree(cache, ignore_errors=True)
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are yet to be written cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _result_caches(cache: Path) -> set[Path]:
    """The results of map and filter that `datasets` has kept."""
    return set(cache.rglob("cache-*.arrow"))
