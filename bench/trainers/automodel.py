"""An epoch over Automodel's ChatDataset: its own class against gpuload's, one after the other in one process.

    PYTHONPATH=. .venv-automodel/bin/python -m bench.trainers.automodel [--rows 20000] [--template FILE] [--save FILE]

Rows are conversations of several turns, made of the shipped math questions and answers; the tokenizer is the shipped
one. Automodel's class is measured on `--stock-rows` of them, because it takes the same time for each. The table has CPU
time of the process, all threads together, so that other processes on the machine do not matter; rows are read by one
thread.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from nemo_automodel._transformers.auto_tokenizer import NeMoAutoTokenizer
from nemo_automodel.components.datasets.llm.chat_dataset import ChatDataset as Stock

from bench.environment import PACKAGES, commit, machine, versions
from gpuload.demo_data import demo_files
from gpuload.integrations.automodel import ChatDataset


def write_conversations(file: Path, rows: int) -> None:
    """Write rows of one to four turns with a system message in every third, as JSON lines."""
    table = pq.read_table(demo_files()[0], columns=["prompt", "extra_info"])
    pairs = [
        (prompt[-1]["content"], info["answer"])
        for prompt, info in zip(table["prompt"].to_pylist(), table["extra_info"].to_pylist(), strict=True)
    ]
    chosen = random.Random(0)
    with file.open("w") as out:
        for row in range(rows):
            messages = [{"role": "system", "content": "You are a careful teacher."}] if row % 3 == 0 else []
            for question, answer in chosen.sample(pairs, 1 + row % 4):
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"messages": messages}) + "\n")


def epoch(dataset: Any, rows: Iterable[int]) -> float:
    """CPU seconds in which rows are read, once each."""
    started = time.process_time()
    for row in rows:
        dataset[row]
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--stock-rows", type=int, default=1_000)
    parser.add_argument("--template", type=Path, help="a chat template; default: the tokenizer's own")
    parser.add_argument("--save", type=Path, help="where to write the record")
    given = parser.parse_args()
    tokenizer = NeMoAutoTokenizer.from_pretrained(demo_files()[1])
    template = given.template and given.template.read_text()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        write_conversations(file, given.rows)
        started = time.process_time()
        stock = Stock(str(file), tokenizer, chat_template=template)
        opened = time.process_time() - started
        sample = random.Random(1).sample(range(given.rows), given.stock_rows)
        stock_rate = given.stock_rows / epoch(stock, sample)
        started = time.process_time()
        ours = ChatDataset(str(file), tokenizer, chat_template=template)
        prepared = time.process_time() - started
        seconds = epoch(ours, range(given.rows))
        assert all(ours[row] == stock[row] for row in sample[:100])
    ours_rate = given.rows / seconds
    first = given.rows / (seconds + prepared - opened)
    print(f"template {given.template.name if given.template else 'of the tokenizer'}, {given.rows:,} rows")
    print("| | start | rows per CPU second in an epoch | the same in the first epoch, with the additional start |")
    print("|---|---|---|---|")
    print(f"| Automodel | {opened:.1f} s | {stock_rate:,.0f} | {stock_rate:,.0f} |")
    print(f"| gpuload | {prepared:.1f} s | {ours_rate:,.0f} | {first:,.0f} |")
    print(f"| ratio | | {ours_rate / stock_rate:.0f} | {first / stock_rate:.0f} |")
    if given.save:
        record = {
            "machine": machine(),
            "commit": commit(),
            "packages": versions((*PACKAGES, "nemo_automodel")),
            "template": given.template.name if given.template else None,
            "rows": given.rows,
            "stock_rows": given.stock_rows,
            "start_cpu_s": {"automodel": opened, "gpuload": prepared},
            "rows_per_cpu_s": {"automodel": stock_rate, "gpuload": ours_rate, "gpuload_first_epoch": first},
        }
        given.save.parent.mkdir(parents=True, exist_ok=True)
        given.save.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
