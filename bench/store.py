"""A store on disk for more data than memory: how long a load and an epoch take, and how much memory.

    python -m bench.store --rows 20000000 --directory DIR

Files of a million rows are drawn from the real rows next to the repository with a fixed seed. In a process of its own
each: a load that tokenizes, a load that finds the store, and an epoch in random order with all keys. What counts is
anonymous memory: pages of mapped files belong to the page cache, which the system takes back when memory is short.
"""

import argparse
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench import ROOT
from bench.data import SHARED, find_tokenizer
from bench.environment import commit, machine, versions
from bench.process import run_command
from gpuload.demo_data import demo_files

_FILE_ROWS, _GROUP_ROWS = 1_000_000, 50_000
_DATASETS = ("gsm8k", "deepscaler_math_aime", "math_eval_suites", "mgsm_tata", "xquad_12lang")


def write_files(rows: int, directory: Path) -> dict[str, Any]:
    """Draw rows at random and write them to parquet files, unless an earlier run has. Returns facts about them."""
    about = directory / "facts.txt"
    if about.exists() and (known := dict(json.loads(about.read_text())))["rows"] == rows:
        return known
    found = [SHARED / "datasets" / f"{name}.parquet" for name in _DATASETS]
    sources = [str(file) for file in found if file.exists()] or [demo_files()[0]]
    real = pa.concat_tables([pq.read_table(file) for file in sources], promote_options="permissive").combine_chunks()
    rng = np.random.default_rng(0)
    prompts = real["prompt"].combine_chunks()
    ends = prompts.offsets.to_numpy()
    nbytes = np.concatenate([[0], np.cumsum(pc.binary_length(prompts.values.field("content")).to_numpy())])
    text = nbytes[ends[1:]] - nbytes[ends[:-1]]
    written, total = 0, 0
    directory.mkdir(parents=True, exist_ok=True)
    while written < rows:
        count = min(_FILE_ROWS, rows - written)
        with pq.ParquetWriter(directory / f"{written // _FILE_ROWS:04}.parquet", real.schema) as writer:
            for start in range(0, count, _GROUP_ROWS):
                drawn = rng.integers(0, len(real), min(_GROUP_ROWS, count - start))
                total += int(text[drawn].sum())
                writer.write_table(real.take(pa.array(drawn)))
        written += count
    size = sum(file.stat().st_size for file in directory.glob("*.parquet"))
    names = [Path(file).name for file in sources]
    facts = {"rows": rows, "drawn_from": names, "text_bytes": total, "file_bytes": size}
    about.write_text(json.dumps(facts))
    return facts


class AnonymousMemory:
    """The largest anonymous resident memory of this process while the block runs, in bytes; sampled every 20 ms."""

    def __enter__(self) -> "AnonymousMemory":
        self.before = self.most = _anonymous()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.most = max(self.most, _anonymous())


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """One load, and with `epoch` all of its batches."""
    import torch  # noqa: F401  its import is not part of a load

    import gpuload

    facts: dict[str, Any] = {"imports_anon_bytes": _anonymous()}
    with AnonymousMemory() as memory:
        started, cpu = time.perf_counter(), time.process_time()
        prompts = gpuload.load(task["files"], task["tokenizer"], store="disk", cache_dir=task["cache"], progress=False)
        facts |= {"load_seconds": time.perf_counter() - started, "load_cpu_seconds": time.process_time() - cpu}
        facts |= {"peak_anon_bytes": memory.most, "rows": len(prompts), "tokens": int(prompts.lengths.sum())}
        facts |= {"transformers_imported": "transformers" in sys.modules, "seconds": prompts.report.seconds}
    if not task["epoch"]:
        return facts
    with AnonymousMemory() as memory:
        started, rows = time.perf_counter(), 0
        for batch in prompts.loader(512, shuffle=True, seed=0, padding="longest"):
            rows += len(dict(batch)["input_ids"])
        facts |= {"epoch_seconds": time.perf_counter() - started, "epoch_rows": rows}
        facts |= {"epoch_peak_anon_bytes": memory.most}
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--directory", type=Path, required=True, help="for files and store; needs about 1.5 KB per row")
    parser.add_argument("--tokenizer", help="a directory or a name")
    parser.add_argument("--name", default="store", help="of the record in bench/results/scale")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        print(json.dumps(measure(json.loads(given.task))))
        return
    data, cache = given.directory / "data", given.directory / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    facts = write_files(given.rows, data)
    files = sorted(map(str, data.glob("*.parquet")))
    task = {"files": files, "tokenizer": find_tokenizer(given.tokenizer), "cache": str(cache)}
    time.sleep(11)  # digests are remembered of files that have not changed for ten seconds

    def run(epoch: bool) -> dict[str, Any]:
        command = [sys.executable, "-m", "bench.store", "--directory", str(given.directory)]
        done = run_command(
            [*command, "--task", json.dumps(task | {"epoch": epoch})], env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        return dict(json.loads(done.stdout.splitlines()[-1]))

    record = {"machine": machine(), "commit": commit(), "versions": versions(), "data": facts}
    record |= {"cold": run(False), "warm": run(False), "warm_again_and_epoch": run(True)}
    record["store_bytes"] = sum(file.stat().st_size for file in (cache / "store").iterdir())
    target = ROOT / "bench" / "results" / "scale" / f"{given.name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
