"""Sections of a GPU record, each in a process of its own, so that a failure in one does not affect the others.

After an illegal memory access every later CUDA call of the process fails, and a kernel that hangs never returns. So
each section runs in a forked child with a time limit, and writes its facts while it works: a child that crashes or is
stopped leaves the facts it had. A fork, because torch and transformers are then imported only once; the parent
therefore initializes neither CUDA nor a thread pool, and does not import gigatoken, which encodes on one core only if
it was imported before a fork.
"""

import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.process import run_forked, without_directories
from gpuload.core.files import replacing


@dataclass(frozen=True)
class Task:
    """Parameters of all sections.

    Attributes:
        rehearsal: Run kernels compiled for the host on tiny data, and count instead of measuring.
        files: Parquet files with real prompts, in verl's format.
        tokenizers: Directories of transformers tokenizers; the first is used where one is enough.
        scratch: Directory for data that sections share.
        rows: Rows of each generated parquet file.
        text_bytes: Bytes of each text for encoders.
        batch: Rows and width of batches.
    """

    rehearsal: bool
    files: tuple[str, ...]
    tokenizers: tuple[str, ...]
    scratch: str
    rows: tuple[int, ...] = (300_000, 1_000_000)
    text_bytes: int = 512 << 20
    batch: tuple[int, int] = (1024, 2048)


class MissingError(Exception):
    """A section needs something that this machine does not have."""


class WrongError(Exception):
    """A check failed; the section's facts have the details."""


class Facts:
    """Table of a section, written to a file whenever a row changes.

    Args:
        file: File to replace at every change; None writes nothing.
        seconds: Time limit of the section.
    """

    def __init__(self, file: Path | None = None, seconds: float = 3600) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.file, self._end = file, time.monotonic() + seconds

    def __call__(self, row: str, **columns: Any) -> None:
        """Add cells to a row: numbers, booleans, or texts, from which directories are removed."""
        cells = {key: without_directories(value) if isinstance(value, str) else value for key, value in columns.items()}
        self.rows.setdefault(row, {}).update(cells)
        self.write({"status": "stopped"})

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def write(self, outcome: dict[str, Any]) -> None:
        """Replace the file atomically: the parent may read it after the child was killed."""
        if self.file is not None:
            with replacing(self.file) as partial:
                partial.write_text(json.dumps(outcome | {"facts": self.rows}, default=lambda number: number.item()))


@dataclass(frozen=True)
class Section:
    """Part of the record.

    Attributes:
        work: Function that adds facts, and raises where it cannot.
        most: Time limit in seconds.
        title: Heading in the page.
    """

    work: Callable[[Task, Facts], None]
    most: float
    title: str = ""


def run_section(name: str, section: Section, task: Task, seconds: float) -> dict[str, Any]:
    """Run one section in a process of its own.

    Args:
        name: Name of the section.
        section: The section.
        task: Its parameters.
        seconds: Time left for the record; the section's own limit may be lower.

    Returns:
        status: "done", or, each with `why`: "missing" (this machine lacks something), "wrong" (a check failed),
            "failed" (an exception), "died" (the process crashed), "stopped" (the time limit was reached).
        facts: All facts, or those found so far.
        took: Wall-clock seconds.
    """
    if "gigatoken" in sys.modules:
        raise RuntimeError("gigatoken is already imported: it would encode on one core only in forked processes")
    limit = min(section.most, seconds)
    found, log = (Path(task.scratch) / f"{name}{ending}" for ending in (".json", ".log"))
    found.unlink(missing_ok=True)
    started = time.monotonic()
    # Programs that a section runs have less time than itself, so that it can record what they have printed.
    code = run_forked(partial(_child, section, task, found, limit - min(2.0, limit / 10)), limit, log)
    outcome: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {"status": "stopped", "facts": {}}
    if outcome["status"] == "stopped" and "why" not in outcome:
        output = without_directories(log.read_text(errors="replace"))
        if code is None:
            outcome["why"] = f"{output}\nnot finished after {limit:.0f} seconds".strip()
        else:
            outcome |= {"status": "died", "why": f"exit code {code}\n{output}"}
    return outcome | {"took": round(time.monotonic() - started, 1)}


def cuda_is_initialized() -> bool:
    """Return whether this process has CUDA's memory device open: its forked children cannot use CUDA then."""
    with contextlib.suppress(OSError):
        return any(os.readlink(file).endswith("nvidia-uvm") for file in Path("/proc/self/fd").iterdir())
    return False


def _child(section: Section, task: Task, found: Path, seconds: float) -> None:
    facts = Facts(found, seconds)
    facts.write({"status": "stopped"})
    faulthandler.enable()
    facts.write(_outcome(section, task, facts))


def _outcome(section: Section, task: Task, facts: Facts) -> dict[str, Any]:
    try:
        section.work(task, facts)
    except MissingError as error:
        return {"status": "missing", "why": without_directories(str(error))}
    except WrongError as error:
        return {"status": "wrong", "why": without_directories(str(error))}
    except subprocess.TimeoutExpired as error:
        output = b"".join(each for each in (error.stdout, error.stderr) if isinstance(each, bytes))
        why = f"{output.decode(errors='replace')}\nnot finished after {error.timeout:.0f} seconds: {error.cmd[:4]}"
        return {"status": "stopped", "why": without_directories(why)}
    except BaseException:
        return {"status": "failed", "why": without_directories(traceback.format_exc())}
    return {"status": "done"}
