"""NeMo-RL's datasets for GRPO and for SFT, stock and gpuload's, one after the other in one process.

    NEMO_RL_REPO=<checkout> PYTHONPATH=. .venv-nemo-rl/bin/python -m bench.trainers.nemo_rl [--rows 20000] [--record]

Counted at start-up: NeMo-RL's own setup of a dataset, from the file to a dataset whose rows can be read; for gpuload
also rendering, tokenizing and the sample that NeMo-RL prepares. NeMo-RL's rows are read from `--stock-rows` of them,
because it takes the same time for each. The `datasets` cache is empty at each start.

The table has CPU time of the process, all threads together, so that other processes on the machine do not matter; the
record has both. Rows are read by one thread.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import ROOT
from bench.contenders.chats import conversations
from bench.data import find_datasets, find_tokenizer
from bench.environment import PACKAGES, commit, machine, versions
from bench.report import table

RECORD = ROOT / "bench" / "results" / "trainers" / "nemo_rl.json"
LIMIT = 4096
SETTINGS = {"add_bos": True, "add_eos": True, "add_generation_prompt": False}
COMPARED = 200


def write_rows(chats: Iterable[list[dict[str, str]]], file: Path, prompts: bool) -> str:
    """Write conversations as JSON lines, or their last questions with answers."""
    file.parent.mkdir()
    with file.open("w") as out:
        for chat in chats:
            question = next(each["content"] for each in reversed(chat) if each["role"] == "user")
            row = {"input": question, "output": chat[-1]["content"]} if prompts else {"messages": chat}
            out.write(json.dumps(row) + "\n")
    return str(file)


def set_up(name: str, file: str, tokenizer: str, processor: str) -> Any:
    """Train data, as NeMo-RL's scripts make it of a configuration."""
    from nemo_rl.algorithms.utils import get_tokenizer
    from nemo_rl.data.datasets import AllTaskProcessedDataset, load_response_dataset

    config: dict[str, Any] = {"dataset_name": name, "data_path": file, "processor": processor}
    settings = SETTINGS if processor == "sft_processor" else {}
    if name.startswith("gpuload."):
        config |= {"tokenizer": {"name": tokenizer}, **settings}
    data = load_response_dataset(config)
    processors = {data.task_name: (data.task_spec, partial(data.processor, **settings))}
    section = get_tokenizer({"name": tokenizer})
    return AllTaskProcessedDataset(data.dataset, section, None, processors, max_seq_length=LIMIT)


def reading(dataset: Any, rows: Sequence[int]) -> dict[str, float]:
    """How many rows of a dataset are made in a second, and in a second of CPU time."""
    started, used = time.perf_counter(), time.process_time()
    for row in rows:
        dataset[row]
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - used
    return {"rows_per_s": len(rows) / seconds, "rows_per_cpu_s": len(rows) / cpu_seconds}


def measure(file: str, names: dict[str, str], tokenizer: str, processor: str, stock_rows: int) -> dict[str, Any]:
    """Set up both datasets and read their rows.

    Args:
        names: "NeMo-RL" and "gpuload" → `dataset_name`.
    """
    import datasets

    from gpuload.integrations.nemo_rl.rows import comparable

    found: dict[str, Any] = {}
    made = {}
    for who, name in names.items():
        datasets.config.HF_DATASETS_CACHE = Path(tempfile.mkdtemp(dir=Path(file).parent))
        started, used = time.perf_counter(), time.process_time()
        made[who] = set_up(name, file, tokenizer, processor)
        found[who] = {"start_s": time.perf_counter() - started, "start_cpu_s": time.process_time() - used}
    count = len(made["NeMo-RL"])
    assert len(made["gpuload"]) == count, "gpuload has dropped rows"
    sample = random.Random(1).sample(range(count), stock_rows)
    found["NeMo-RL"] |= reading(made["NeMo-RL"], sample)
    found["gpuload"] |= reading(made["gpuload"], range(count))
    for row in sample[:COMPARED]:
        expected, ours = (comparable(made[who][row]) for who in ("NeMo-RL", "gpuload"))
        assert ours == expected, f"row {row} differs"
    return {"rows": count, "stock_rows": stock_rows} | found


def summary(results: dict[str, Any]) -> str:
    """One table, of CPU time. An epoch is the start and all rows, read once."""
    lines = []
    for what, found in results.items():
        stock, ours = found["NeMo-RL"], found["gpuload"]
        epochs = [each["start_cpu_s"] + found["rows"] / each["rows_per_cpu_s"] for each in (stock, ours)]
        lines.append([
            what, f"{found['rows']:,}", f"{stock['start_cpu_s']:.1f} s", f"{ours['start_cpu_s']:.1f} s",
            f"{stock['rows_per_cpu_s']:,.0f}", f"{ours['rows_per_cpu_s']:,.0f}",
            f"**{ours['rows_per_cpu_s'] / stock['rows_per_cpu_s']:.0f}×**", f"{epochs[0] / epochs[1]:.0f}×",
        ])  # fmt: skip
    head = [
        "", "rows", "start: NeMo-RL", "gpuload", "rows/s: NeMo-RL", "gpuload", "ratio",
        "ratio in the first epoch, with the start",
    ]  # fmt: skip
    return table(head, lines)


def main() -> None:
    """Measure, print one table, and write a record if asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--stock-rows", type=int, default=1_000)
    parser.add_argument("--tokenizer")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.relative_to(ROOT)}")
    given = parser.parse_args()
    sys.path.append(os.environ["NEMO_RL_REPO"])
    import nemo_rl

    about, tokenizer = machine(), find_tokenizer(given.tokenizer)
    whole = conversations({"files": find_datasets(None)[-1].files, "most": None})
    random.Random(0).shuffle(whole)
    chats = [chat for chat in whole if any(each["role"] == "user" for each in chat)][: given.rows]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for what, stock, ours, processor in (
            ("prompts", "ResponseDataset", "PromptDataset", "math_hf_data_processor"),
            ("SFT", "openai_format", "ChatDataset", "sft_processor"),
        ):
            file = write_rows(chats, Path(folder) / what / "train.jsonl", what == "prompts")
            names = {"NeMo-RL": stock, "gpuload": f"gpuload.integrations.nemo_rl.{ours}"}
            results[what] = measure(file, names, tokenizer, processor, given.stock_rows)
    print(summary(results))
    if given.record:
        facts = {
            "machine": about, "versions": versions([*PACKAGES, "ray"]) | {"nemo_rl": nemo_rl.__version__},
            "commit": commit(), "tokenizer": Path(tokenizer).name, "results": results,
        }  # fmt: skip
        RECORD.parent.mkdir(parents=True, exist_ok=True)
        RECORD.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
