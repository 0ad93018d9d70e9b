"""`python -m bench.gpu_record`: exactness and speed on a GPU, in one record.

python -m bench.gpu_record              sections in order, for at most nine minutes; again, those that the record lacks
python -m bench.gpu_record --only encode,waits    some sections; the record of the same day keeps the others
python -m bench.gpu_record --rehearse   all sections without a GPU, on tiny data: tests the command

Each section runs in a process of its own (section.py), and the record is written after each. A section that fails,
hangs or lacks something is recorded as such, and the next one runs: the record is worth keeping all the same.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import ROOT, environment, report
from bench.data import first_rows
from bench.gpu import checks, loads, stages, tokens
from bench.gpu.rig import tokenizer_of
from bench.gpu.section import Section, Task, cuda_is_initialized, run_section
from gpuload.demo_data import demo_files

SECTIONS = {
    "sanitizer": Section(checks.sanitizer, 240, "compute-sanitizer"),
    "tests": Section(checks.tests, 250, "Tests marked gpu"),
    "ladder": Section(checks.climb, 400, "The steps of gpuload doctor --gpu"),
    "first_batch": Section(loads.first_batch, 240, "Data to the first batch"),
    "encode": Section(tokens.encode, 270, "Text to ids"),
    "batches": Section(stages.batches, 60, "Filter and batches"),
    "kernels": Section(loads.kernels, 120, "Kernels of whole loads"),
    "waits": Section(loads.waits, 60, "What a training step waits for its batch"),
    "others": Section(loads.others, 120, "Other loaders"),
}
_LEAST = 5.0  # seconds that must be left to start a section
_REHEARSAL_ROWS = 120
_GOOD = ("done", "missing")


def parse(arguments: Sequence[str] | None, names: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_record", description="gpuload on a GPU, in one record.")
    parser.add_argument("--data", type=Path, metavar="DIR", help="parquet files in verl's format, subdirectories too")
    parser.add_argument("--tokenizers", type=Path, metavar="DIR", help="directory of transformers tokenizers")
    parser.add_argument("--seconds", type=float, default=540, help="for this call (default: %(default)s)")
    parser.add_argument("--only", metavar="SECTIONS", help=f"of {','.join(names)}")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: bench/records")
    parser.add_argument("--commit", help="commit of this code, if this is not a checkout")
    parser.add_argument("--rehearse", action="store_true", help="run kernels on the host, on tiny data; no rates")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.only.split(",") if chosen.only else ()) - set(names):
        parser.error(f"--only: unknown section {', '.join(sorted(unknown))}: use {', '.join(names)}")
    for directory in (chosen.data, chosen.tokenizers):
        if directory is not None and not directory.is_dir():
            parser.error(f"{directory} is not a directory")
    if chosen.rehearse:
        chosen.output = (chosen.output or Path(tempfile.mkdtemp(prefix="gpuload-rehearsal-"))).resolve()
        if chosen.output.is_relative_to(ROOT):
            parser.error("--rehearse: its output must not be written to the repository: omit --output")
    chosen.output = chosen.output or ROOT / "bench" / "records"
    return chosen


def main(arguments: Sequence[str] | None = None, sections: Mapping[str, Section] = SECTIONS) -> int:
    """Make the record, section by section, or go on with that of the same day.

    Returns:
        0, or 1 if a section of it failed, found something wrong, or is missing.
    """
    chosen = parse(arguments, list(sections))
    end = time.monotonic() + chosen.seconds
    gpu = "rehearsal" if chosen.rehearse else environment.nvidia_smi("name")
    if gpu is None:
        raise SystemExit("nvidia-smi finds no GPU: --rehearse runs all sections without one, and records nothing")
    chosen.output.mkdir(parents=True, exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    file = chosen.output / f"{datetime.date.today()}-{slug}.json"
    record: dict[str, Any] = {"rehearsal": chosen.rehearse, "gpu": gpu, "sections": {}}
    if file.exists():
        record = json.loads(file.read_text())
    begun = {name for name, section in record["sections"].items() if section["status"] != "not begun"}
    wanted = chosen.only.split(",") if chosen.only else [name for name in sections if name not in begun]
    with tempfile.TemporaryDirectory(prefix="gpuload-record-") as scratch:
        task = prepare(chosen, Path(scratch))
        _import_before_forks(task)
        for name in (name for name in sections if name in wanted):
            left = end - time.monotonic()
            about = {"at": environment.now(), "commit": chosen.commit or environment.commit()}
            about["title"] = sections[name].title or name
            if left < min(_LEAST if chosen.only or name == wanted[0] else sections[name].most / 2, sections[name].most):
                outcome: dict[str, Any] = {"status": "not begun", "why": "run the command again", "facts": {}}
            else:
                outcome = run_section(name, sections[name], task, left)
            found = record["sections"] | {name: about | outcome}
            record["sections"] = {key: found[key] for key in sections if key in found}
            report.save(record, file, file.with_suffix(".md"), report.gpu_page(record, file.name))
            print(f"{name:12} {outcome['status']:9} {str(outcome.get('why', '')).strip()[-200:]}", flush=True)
    print(f"written to {file}")
    return int(any(record["sections"].get(name, {}).get("status") not in _GOOD for name in wanted))


def prepare(chosen: argparse.Namespace, scratch: Path) -> Task:
    """Find data and tokenizers: the shipped ones, then those of the given directories.

    A rehearsal gets the first rows of each file, and the shipped tokenizer only.
    """
    file, shipped = demo_files()
    files = [file, *(str(path) for path in sorted(chosen.data.glob("**/*.parquet")))] if chosen.data else [file]
    found = sorted(chosen.tokenizers.glob("*/tokenizer*.json")) if chosen.tokenizers else []
    tokenizers = [shipped, *dict.fromkeys(str(path.parent) for path in found)]
    if not chosen.rehearse:
        return Task(False, tuple(files), tuple(tokenizers), str(scratch))
    targets = ((path, scratch / Path(path).parent.name / Path(path).name) for path in files)
    samples = tuple(str(first_rows(path, _REHEARSAL_ROWS, target)) for path, target in targets)
    return Task(True, samples, (shipped,), str(scratch), (130,), 20_000, (8, 64))


def _import_before_forks(task: Task) -> None:
    """Import what all sections need, and open the tokenizers, once.

    Nothing is encoded here: `tokenizers` uses no threads in a process whose parent has encoded. The environment
    variable makes torch look for a GPU without initializing CUDA.
    """
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    for directory in task.tokenizers:
        with contextlib.suppress(Exception):  # the sections report why
            tokenizer_of(directory)
    if cuda_is_initialized():
        raise SystemExit("an import has initialized CUDA, which forked processes cannot use then")


if __name__ == "__main__":
    raise SystemExit(main())
