"""`python -m bench.gpu_record`: what a GPU does with this, in one record: is it exact, and how fast is it.

python -m bench.gpu_record                        everything, in at most nine minutes
python -m bench.gpu_record --only tokens,encode   some sections; the others stay as they are in the record of the day
python -m bench.gpu_record --rehearse             everything but the GPU, on tiny data: does the command work?

Each section runs in a process of its own (gpu_run.py) and the record is written after each: one that fails, hangs or
finds something missing is recorded as such, and the next one runs.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench import gpu_checks, gpu_exact, gpu_loads, gpu_machine, gpu_stages, gpu_tokens
from bench.gpu_rig import tokenizer_of
from bench.gpu_run import Note, Section, Task, cuda_is_started, finish, run_section
from bench.gpu_tables import markdown
from bench.inputs import ROOT
from gpuload.demo_data import demo_files

SECTIONS = {
    "machine": Section(gpu_machine.machine, 60),
    "loads": Section(gpu_exact.loads, 120),
    "tables": Section(gpu_tokens.tables, 90),
    "tokens": Section(gpu_exact.tokens, 120),
    "batches": Section(gpu_stages.batches, 60),
    "memory": Section(gpu_checks.memory, 60),
    "host_copies": Section(gpu_checks.host_copies, 60),
    "dlpack": Section(gpu_checks.dlpack, 30),
    "read": Section(gpu_stages.read, 90),
    "render": Section(gpu_stages.rendering, 60),
    "encode": Section(gpu_tokens.encode, 180),
    "first_batch": Section(gpu_loads.first_batch, 150),
    "others": Section(gpu_loads.others, 120),
    "sanitizer": Section(gpu_checks.sanitizer, 160),
    "tests": Section(gpu_checks.tests, 250),
}
_LEAST = 5.0  # seconds that a section is begun with
_REHEARSED_ROWS = 120
_GOOD = ("done", "missing")


def parse(arguments: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_record", description="gpuload on a GPU, in one record.")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="parquet files in verl's format, folders in it too")
    parser.add_argument("--tokenizers", type=Path, metavar="FOLDER", help="folders of transformers tokenizers")
    parser.add_argument("--seconds", type=float, default=540, help="for all sections together (default: %(default)s)")
    parser.add_argument("--only", metavar="SECTIONS", help=f"of {','.join(names)}")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: bench/records")
    parser.add_argument("--no-cudf", action="store_true", help="do without cuDF: Arrow reads, prompts are copied over")
    parser.add_argument("--anew", action="store_true", help="a new interpreter for each section, rather than a fork")
    parser.add_argument("--commit", help="of this code, where it lies here without its repository")
    parser.add_argument("--rehearse", action="store_true", help="kernels of the host, tiny data, counts and no rates")
    chosen = parser.parse_args(arguments)
    chosen.sections = chosen.only.split(",") if chosen.only else list(names)
    if unknown := set(chosen.sections) - set(names):
        parser.error(f"--only: no section {', '.join(sorted(unknown))}: there are {', '.join(names)}")
    for folder in (chosen.data, chosen.tokenizers):
        if folder is not None and not folder.is_dir():
            parser.error(f"{folder} is not a folder")
    if chosen.rehearse:
        chosen.output = (chosen.output or Path(tempfile.mkdtemp(prefix="gpuload-rehearsal-"))).resolve()
        if chosen.output.is_relative_to(ROOT):
            parser.error("--rehearse: its record is none, and has no place in the repository: leave --output out")
    chosen.output = chosen.output or ROOT / "bench" / "records"
    return chosen


def main(arguments: Sequence[str] | None = None, sections: Mapping[str, Section] = SECTIONS) -> int:
    """Makes the record, section by section.

    Returns:
        0, or 1 where a section failed or found something wrong.
    """
    chosen = parse(arguments, list(sections))
    end = time.monotonic() + chosen.seconds
    gpu = "rehearsal" if chosen.rehearse else gpu_name()
    if gpu is None:
        raise SystemExit("nvidia-smi finds no GPU here: --rehearse runs all but the GPU, and records nothing")
    chosen.output.mkdir(parents=True, exist_ok=True)
    file = chosen.output / f"{datetime.date.today()}-{_slug(gpu)}.json"
    record: dict[str, Any] = {"rehearsal": chosen.rehearse, "gpu": gpu, "sections": {}}
    if chosen.only and file.exists():
        record = json.loads(file.read_text())
    with tempfile.TemporaryDirectory(prefix="gpuload-record-") as scratch:
        task = prepare(chosen, Path(scratch))
        _before_forks(task)
        task = replace(task, anew=chosen.anew or cuda_is_started())
        for name in sections:
            if name not in chosen.sections:
                continue
            left = end - time.monotonic()
            about = {"at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"), **_commit(chosen)}
            if left < _LEAST:
                outcome: dict[str, Any] = {"status": "not begun", "why": "no time was left", "facts": {}}
            else:
                outcome = run_section(name, sections[name], task, left)
            found = record["sections"] | {name: about | outcome}
            record["sections"] = {key: found[key] for key in sections if key in found}
            file.write_text(json.dumps(record, indent=1) + "\n")
            file.with_suffix(".md").write_text(markdown(record, file.name))
            print(f"{name:12} {outcome['status']:9} {str(outcome.get('why', '')).strip()[-200:]}", flush=True)
    print(f"written: {file}")
    return int(any(record["sections"][name]["status"] not in _GOOD for name in chosen.sections))


def prepare(chosen: argparse.Namespace, scratch: Path) -> Task:
    """Which data and tokenizers: the shipped ones, then those of the folders. A rehearsal has the first rows of each
    file, and the shipped tokenizer alone."""
    file, folder = demo_files()
    files = [file, *(str(path) for path in sorted(chosen.data.glob("**/*.parquet")))] if chosen.data else [file]
    found = sorted(chosen.tokenizers.glob("*/tokenizer*.json")) if chosen.tokenizers else []
    tokenizers = [folder, *dict.fromkeys(str(path.parent) for path in found)]
    if not chosen.rehearse:
        return Task(False, tuple(files), tuple(tokenizers), str(scratch), cudf=not chosen.no_cudf)
    samples = []
    for path in files:
        first = pa.Table.from_batches([next(pq.ParquetFile(path).iter_batches(_REHEARSED_ROWS))])
        samples.append(str(scratch / Path(path).parent.name / Path(path).name))
        Path(samples[-1]).parent.mkdir(exist_ok=True)
        pq.write_table(first, samples[-1])
    return Task(True, tuple(samples), (folder,), str(scratch), (130,), 20_000, (8, 64))


def section_anew(told: str) -> None:
    """One section in this process, which was made for it; see `gpu_run`."""
    about = json.loads(told)
    name, note = about.pop("name"), Note(Path(about.pop("file")), about.pop("seconds"))
    given: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in about.items()}
    finish(SECTIONS[name], Task(**given), note)


def gpu_name() -> str | None:
    """The first GPU's, as the driver's tool tells it: CUDA is not started here."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None


def _before_forks(task: Task) -> None:
    """What every section needs: imports and tokenizers. Nothing is encoded here: `tokenizers` uses no threads in a
    process whose parent has encoded. Whoever asks torch for a GPU meanwhile is answered without CUDA."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    for folder in task.tokenizers:
        with contextlib.suppress(Exception):  # the sections will say why
            tokenizer_of(folder)


def _commit(chosen: argparse.Namespace) -> dict[str, str]:
    from bench.machine import commit

    return {"commit": chosen.commit or commit()}


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    raise SystemExit(main())
