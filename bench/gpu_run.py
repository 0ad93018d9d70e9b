"""The sections of a GPU record, each in a process of its own, so that nothing that goes wrong in one spoils another.

A kernel that reads where it must not makes every later CUDA call of its process fail, and a hang would take all with
it. So each section runs in a forked child with a time limit, and writes what it knows while it goes: a child that dies
or is stopped leaves what it had. Forked, because torch and transformers are then imported once.

A forked child has its parent's locks and none of its threads. The parent therefore starts neither CUDA nor a pool of
threads, and imports no gigatoken, which encodes on one core only where it sees that it was imported before a fork.
Should an import have started CUDA all the same, sections get a new interpreter each, which takes some seconds more.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.inputs import ROOT

_TAIL = 4000  # characters of what a failed section said


@dataclass(frozen=True)
class Task:
    """What all sections are told.

    Attributes:
        rehearsal: run on the host's kernels and tiny data, and count instead of measuring.
        files: parquet files with real prompts, in verl's format.
        tokenizers: folders of transformers tokenizers; the first one is used where one will do.
        scratch: a folder for what sections leave to later ones.
        rows: of the parquet files that are made.
        text_bytes: of each text that is encoded to measure.
        batch: rows and width of the batches that are measured.
        cudf: use cuDF where it is there.
        anew: sections get a new interpreter.
    """

    rehearsal: bool
    files: tuple[str, ...]
    tokenizers: tuple[str, ...]
    scratch: str
    rows: tuple[int, ...] = (300_000, 1_000_000)
    text_bytes: int = 512 << 20
    batch: tuple[int, int] = (1024, 2048)
    cudf: bool = True
    anew: bool = False


class MissingError(Exception):
    """A section cannot be made here: something it needs is not there."""


class WrongError(Exception):
    """A check failed; what differs is among the section's facts."""


class Note:
    """A section's facts: a table, row by row, written as it grows.

    Args:
        file: is replaced at every call; None: the facts are only kept.
        seconds: how long the section has.
    """

    def __init__(self, file: Path | None = None, seconds: float = 3600) -> None:
        self.facts: dict[str, dict[str, Any]] = {}
        self.file, self._end = file, time.monotonic() + seconds

    def __call__(self, row: str, **columns: Any) -> None:
        """Adds cells to a row of the table: numbers, texts (without the folders of this machine), booleans."""
        cells = {key: plain(value) if isinstance(value, str) else value for key, value in columns.items()}
        self.facts.setdefault(row, {}).update(cells)
        self.write({"status": "stopped"})

    @property
    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def write(self, outcome: dict[str, Any]) -> None:
        if self.file is not None:
            partly = self.file.with_suffix(".part")
            partly.write_text(json.dumps(outcome | {"facts": self.facts}, default=lambda number: number.item()))
            partly.replace(self.file)


@dataclass(frozen=True)
class Section:
    """A part of the record.

    Attributes:
        work: makes it: notes its facts, and raises where it cannot.
        most: seconds that it may take.
    """

    work: Callable[[Task, Note], None]
    most: float


def run_section(name: str, section: Section, task: Task, seconds: float) -> dict[str, Any]:
    """One section in a process of its own.

    Args:
        seconds: that are left for it; it may take less.

    Returns:
        status: "done"; "missing" (it cannot be made here), "wrong" (a check failed), "failed", "died" or "stopped" (out
        of time), each of these with `why`.
        facts: what it found, all or so far.
        took: seconds, by the wall clock.
    """
    if "gigatoken" in sys.modules:
        raise RuntimeError("gigatoken is imported already: in forked processes it would encode on one core only")
    limit = min(section.most, seconds)
    found, said = (Path(task.scratch) / f"{name}{ending}" for ending in (".json", ".log"))
    found.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    child = os.fork()
    if not child:
        _child(name, section, task, Note(found, limit), said)
    code = _wait(child, started + limit)
    outcome: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {"status": "stopped", "facts": {}}
    if outcome["status"] == "stopped":
        if code is None:
            outcome["why"] = f"not done after {limit:.0f} seconds"
        else:
            outcome |= {"status": "died", "why": f"exit code {code}\n{plain(said.read_text(errors='replace'))}"}
    return outcome | {"took": round(time.monotonic() - started, 1)}


def cuda_is_started() -> bool:
    """Whether this process has CUDA's memory device open: then its forked children cannot use it."""
    with contextlib.suppress(OSError):
        return any(os.readlink(file).endswith("nvidia-uvm") for file in Path("/proc/self/fd").iterdir())
    return False


def _child(name: str, section: Section, task: Task, note: Note, said: Path) -> None:
    """Never returns."""
    try:
        os.setpgid(0, 0)  # so that a section that is stopped takes its own children with it
        with said.open("w") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())
        note.write({"status": "stopped"})
        if task.anew:
            told = json.dumps(asdict(task) | {"name": name, "file": str(note.file), "seconds": note.seconds_left})
            run_it = "import sys, bench.gpu_record as record; record.section_anew(sys.argv[1])"
            os.execv(sys.executable, [sys.executable, "-c", run_it, told])
        finish(section, task, note)
        os._exit(0)
    finally:
        os._exit(1)


def finish(section: Section, task: Task, note: Note) -> None:
    """Makes a section and writes what became of it."""
    faulthandler.enable()
    note.write(_outcome(section, task, note))
    sys.stdout.flush()


def _outcome(section: Section, task: Task, note: Note) -> dict[str, Any]:
    try:
        section.work(task, note)
    except MissingError as error:
        return {"status": "missing", "why": plain(str(error))}
    except WrongError as error:
        return {"status": "wrong", "why": plain(str(error))}
    except BaseException:
        return {"status": "failed", "why": plain(traceback.format_exc())}
    return {"status": "done"}


def _wait(child: int, end: float) -> int | None:
    """The child's exit code; None where it had to be stopped."""
    with contextlib.suppress(OSError):
        os.setpgid(child, child)  # whoever of the two is first
    try:
        while time.monotonic() < end:
            reaped, status = os.waitpid(child, os.WNOHANG)
            if reaped:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
    except BaseException:
        _stop(child)
        raise
    _stop(child)
    return None


def _stop(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


def plain(text: str) -> str:
    """The end of a text, without the folders of this machine: paths within the repository, of other files the name."""
    return re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", text.replace(f"{ROOT}/", ""))[-_TAIL:]
