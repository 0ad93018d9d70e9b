"""Memory of a load, and what one long document does to its rate: `python -m bench.memory`.

Real prompts, each with its number at the end so that no two are alike, until they have as many bytes as asked for.
Each load is a process of its own, in which ids and columns stay in memory and nothing is cached. What counts is the
anonymous memory of the process above what it has after the imports. Loads with the document and without it alternate.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench import ROOT
from bench.data import SHARED, find_tokenizer
from bench.environment import commit, machine, versions
from bench.process import run_command
from bench.startup import prompts_of
from bench.store import AnonymousMemory
from gpuload.demo_data import demo_files

_GROUP_ROWS = 50_000


def write_prompts(file: Path, nbytes: int, long: int = 0) -> None:
    """Write prompts to a parquet file.

    Args:
        file: The file.
        nbytes: Bytes of their texts.
        long: Bytes of a further prompt, which is half-way between the others; 0 for none.
    """
    given = sorted((SHARED / "datasets" / "wild").glob("*.parquet")) or [Path(demo_files()[0])]
    column = prompts_of(given)["prompt"].combine_chunks()
    texts = itertools.cycle(["\n\n".join(message["content"] for message in row) for row in column.to_pylist() if row])
    rows: list[str] = []
    for number, text in enumerate(texts):
        rows.append(f"{text}\n({number})")
        nbytes -= len(rows[-1].encode())
        if nbytes <= 0:
            break
    if long:
        rows.insert(len(rows) // 2, "\n".join(rows)[:long])
    prompts = pa.array([[{"role": "user", "content": text}] for text in rows], column.type)
    pq.write_table(pa.table({"prompt": prompts}), file, row_group_size=_GROUP_ROWS)


def measure(file: str, tokenizer: str) -> dict[str, Any]:
    """One load in this process."""
    import pandas  # noqa: F401
    import torch  # noqa: F401
    from transformers import AutoTokenizer

    import gpuload

    opened, load = AutoTokenizer.from_pretrained(tokenizer), gpuload.load
    options: dict[str, Any] = {"max_prompt_length": 1 << 30, "token_cache": False, "store": "memory", "device": "cpu"}
    with AnonymousMemory() as memory:
        started, cpu = time.perf_counter(), time.process_time()
        found = load(file, opened, progress=False, **options)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    return {
        "rows": len(found),
        "text_bytes": found.report.text_bytes,
        "id_bytes": found.tokens.values.nbytes,
        "peak_anon_bytes": memory.most - memory.before,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "engine": found.report.engine,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=500, help="of text")
    parser.add_argument("--long", type=int, default=8, help="megabytes of the long document, among eight times as many")
    parser.add_argument("--repeats", type=int, default=3, help="of the loads with the long document, and without it")
    parser.add_argument("--tokenizer", help="directory or name; Qwen2.5 by default")
    parser.add_argument("--task", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        print(json.dumps(measure(*given.task)))
        return
    record: dict[str, Any] = {"machine": machine(), "commit": commit(), "versions": versions()}
    long = given.long * 1_000_000
    with tempfile.TemporaryDirectory() as directory:

        def run(nbytes: int, long: int = 0) -> dict[str, Any]:
            file = Path(directory) / f"{nbytes}-{long}.parquet"
            if not file.exists():
                write_prompts(file, nbytes, long)
            command = [sys.executable, "-m", "bench.memory", "--task", str(file), find_tokenizer(given.tokenizer)]
            done = run_command(command)
            if done.returncode:
                raise SystemExit(done.stderr[-4000:])
            return dict(json.loads(done.stdout.splitlines()[-1]))

        record["memory"] = run(given.megabytes * 1_000_000)
        runs = [(run(8 * long), run(8 * long, long)) for _ in range(given.repeats)]
    record["without_long"], record["with_long"] = map(list, zip(*runs, strict=True))
    target = ROOT / "bench" / "results" / "scale" / "memory.json"
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
