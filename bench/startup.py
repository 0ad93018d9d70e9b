"""The first load of a process by number of rows, compared with the tokenizer row by row: `python -m bench.startup`.

Each run is a new process, which imports torch, transformers, pandas and pyarrow and opens the tokenizer before its
seconds begin. What gpuload imports is in its seconds. Row by row means a frame of pandas, and `apply_chat_template` for
each row, to filter by length. gpuload is measured without anything on disk, not even what it keeps of a tokenizer;
again with that; and with the ids of the same rows cached. No process is forked from one with these imports, as no
trainer's is: what a child touches of its parent's memory is copied, 3,400 pages for the imports alone.

If GPULOAD_TOKENIZERS1 names a folder with `tokenizers` 1.0, the rows are also rendered by transformers and encoded by
1.0, with which transformers 5 does not import: what is left to gain once it does. That is compared by CPU time.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench import documents
from bench.data import SHARED, find_tokenizer
from bench.environment import commit, machine, versions
from bench.process import run_command
from bench.report import BY_ROW, BY_ROW_1
from bench.startup_table import RECORD, startup_table, tokenizers1_table
from gpuload.demo_data import demo_files

_ROWS = (500, 1_000, 2_000, 8_000, 20_000)
_LIMIT = 1_024


def write_datasets(directory: Path, rows: tuple[int, ...], parts: int = 1) -> dict[str, dict[int, Path]]:
    """Write rows of each dataset; all of them where it has fewer than the largest number. A dataset of several parts
    is a folder of so many files."""
    tables = {"school mathematics": prompts_of([Path(demo_files()[0])])}
    if SHARED.exists():
        tables["programming tasks"] = prompts_of([SHARED / "datasets" / "code_prompts.parquet"])
        tables["prompts of many projects"] = prompts_of(sorted((SHARED / "datasets" / "wild").glob("*.parquet")))
    files: dict[str, dict[int, Path]] = {}
    for place, (name, table) in enumerate(tables.items()):
        numbers = sorted({min(number, table.num_rows) for number in rows})
        for number in numbers:
            file = directory / f"{place}-{number}.parquet"
            # In the order of the files, some rows would be of one project only.
            step = table.num_rows / number
            some = table.take(pa.array([int(k * step) for k in range(number)]))
            if parts > 1:
                file = file.with_suffix("")
                file.mkdir()
                ends = [number * k // parts for k in range(parts + 1)]
                for k, (low, high) in enumerate(pairwise(ends)):
                    pq.write_table(some.slice(low, high - low), file / f"{k:05}.parquet")
            else:
                pq.write_table(some, file)
            files.setdefault(name, {})[number] = file
    return files


def prompts_of(files: list[Path]) -> pa.Table:
    """The prompts of files with messages, as one table."""
    kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    found = []
    for file in files:
        if "prompt" not in pq.read_schema(file).names:
            continue
        column = pq.read_table(file, columns=["prompt"])["prompt"]
        if pa.types.is_list(column.type) and {"role", "content"} == {field.name for field in column.type.value_type}:
            found.append(pa.table({"prompt": pa.array(column.to_pylist(), kind)}))
    return pa.concat_tables(found)


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """One contender on one file, in this process."""
    import pandas as pd
    import torch  # noqa: F401
    from transformers import AutoTokenizer

    assert not any(name.startswith(("gpuload.kinds", "gpuload.engines")) for name in sys.modules)
    tokenizer = AutoTokenizer.from_pretrained(task["tokenizer"])
    tokenizer("x")
    path = Path(task["file"])
    files = sorted(map(str, path.iterdir())) if path.is_dir() else [str(path)]
    if task["contender"] in (BY_ROW, BY_ROW_1):
        length_of = _length_of(tokenizer, task["contender"])
        started, cpu = time.perf_counter(), time.process_time()
        frame = pd.concat([pd.read_parquet(file) for file in files])
        lengths = [length_of(prompt) for prompt in frame["prompt"]]
        kept = frame[[length <= _LIMIT for length in lengths]]
        return {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - cpu,
            "rows": len(kept),
            "tokens": sum(length for length in lengths if length <= _LIMIT),
        }
    started, cpu = time.perf_counter(), time.process_time()
    import gpuload

    options = {"max_prompt_length": _LIMIT, "cache_dir": task["cache"], "progress": False, "device": "cpu"}
    found = gpuload.load(files, tokenizer, **options)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    assert not found.report.check.mismatches
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "rows": len(found),
        "tokens": len(found.tokens.values),
        "text_bytes": found.report.text_bytes,
        "engine": found.report.engine,
        "cached": bool(found.report.from_cache),
    }


def _in_process(task: dict[str, Any]) -> dict[str, Any]:
    """`measure` in a new process."""
    # Installed packages are compiled.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "bench.startup", "--task", json.dumps(task)]
    done = run_command(command, env=env | {"GPULOAD_CACHE": task["cache"]})
    if done.returncode:
        raise SystemExit(f"a run of {task['contender']} failed:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _length_of(tokenizer: Any, contender: str) -> Callable[[Any], int]:
    """How many ids a prompt has."""
    if contender == BY_ROW:
        return lambda prompt: len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
    from gpuload.tokenizer.tokenizers1 import opened

    encode = partial(opened(tokenizer.backend_tokenizer.to_str()).encode, add_special_tokens=False)
    return lambda prompt: len(
        encode(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)).ids
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows-by-row", type=int, default=10_000, help="most rows that are measured row by row")
    parser.add_argument("--rows", type=int, nargs="+", default=_ROWS, help="numbers of rows")
    parser.add_argument("--files", type=int, default=1, help="that each dataset is in; no record of more than one")
    parser.add_argument("--quick", action="store_true", help="three numbers of rows, one run, no record")
    parser.add_argument("--tokenizer", help="directory or name; Qwen2.5 by default")
    parser.add_argument("--task", help=argparse.SUPPRESS)  # one run, of this program's own
    given = parser.parse_args()
    if given.task:
        print(json.dumps(measure(json.loads(given.task))))
        return
    repeats, rows = (1, (500, 5_000, 20_000)) if given.quick else (given.repeats, tuple(given.rows))
    name_or_path = find_tokenizer(given.tokenizer)
    record: dict[str, Any] = {
        "machine": machine(),
        "commit": commit(),
        "versions": versions(),
        "repeats": repeats,
        "command": shlex.join(["python", "-m", "bench.startup", *sys.argv[1:]]),
        "tokenizer": Path(name_or_path).name,
        "datasets": {},
    }
    with tempfile.TemporaryDirectory() as directory:
        for name, files in write_datasets(Path(directory), rows, given.files).items():
            record["datasets"][name] = {
                str(number): _runs(str(file), name_or_path, number <= given.rows_by_row, repeats, Path(directory))
                for number, file in files.items()
            }
    if not given.quick and given.files == 1:
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
        documents.write(RECORD)
    print(startup_table(record))
    if os.environ.get("GPULOAD_TOKENIZERS1"):
        print(tokenizers1_table(record))


def _runs(file: str, tokenizer: str, by_row: bool, repeats: int, directory: Path) -> dict[str, list[Any]]:
    """The answers of all contenders for one file, and that they agree."""
    found: dict[str, list[Any]] = {}
    for run in range(repeats):
        caches = directory / f"caches-{Path(file).stem}-{run}"
        # The second load knows the tokenizer; a third one has the ids of the same rows.
        by_rows = (BY_ROW, *([BY_ROW_1] if os.environ.get("GPULOAD_TOKENIZERS1") else []))
        for contender in (*(by_rows if by_row else ()), "first", "known tokenizer", "cached"):
            if contender == "known tokenizer":
                for ids in (caches / "tokens").glob("*"):
                    ids.unlink()
            task = {"contender": contender, "file": file, "tokenizer": tokenizer, "cache": str(caches)}
            found.setdefault(contender, []).append(_in_process(task))
        shutil.rmtree(caches, ignore_errors=True)
    counts = {(run["rows"], run["tokens"]) for runs in found.values() for run in runs}
    assert len(counts) == 1, counts
    return found


if __name__ == "__main__":
    main()
