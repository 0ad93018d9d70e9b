"""Rows as served, compared with one row per conversation: `python -m bench.served`.

Conversations of 2, 5 and 20 turns, without and with reasoning, with a template that keeps its history (Qwen2.5's, of
the shipped tokenizer) and with Qwen3's, which does not. Each way loads the same file in a process of its own, after
imports and with the tokenizer open, twice: the second load is what is measured, in seconds of CPU and of time.
"""

import argparse
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.agents import text
from bench.environment import commit, machine, versions
from bench.process import run_command
from gpuload.demo_data import demo_files

TURNS = (2, 5, 20)
CASES = ("keeps its history", "Qwen3, no reasoning", "Qwen3, reasoning")


def conversation(draw: random.Random, turns: int, reasoning: bool) -> list[dict[str, str]]:
    """Questions and answers."""
    messages = []
    for _ in range(turns):
        answer = {"role": "assistant", "content": text(draw, draw.randint(20, 120))}
        if reasoning:
            answer["reasoning_content"] = text(draw, draw.randint(20, 200))
        messages += [{"role": "user", "content": text(draw, draw.randint(5, 40))}, answer]
    return messages


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """One way to load one file."""
    import trl
    from transformers import AutoTokenizer

    import gpuload

    tokenizer = AutoTokenizer.from_pretrained(demo_files()[1])
    if task["case"] != CASES[0]:
        tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    tokenizer("x")
    for _ in range(2):
        started, cpu = time.perf_counter(), time.process_time()
        found = gpuload.load_chats(
            task["file"],
            tokenizer,
            max_length=1_000_000,
            token_cache=False,
            progress=False,
            device="cpu",
            turns=task["turns"],
        )
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    assert not found.report.check.mismatches
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "cpu": cpu, "rows": len(found), "tokens": int(found.lengths.sum()), "memory": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--messages", type=int, default=40_000, help="of each file")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        print(json.dumps(measure(json.loads(given.task))))
        return
    print(machine(), commit(), versions(), f"medians of {given.repeats} runs", sep="\n")
    print(
        "| template | turns | conversations | rows | tokens | CPU s, conversation | served | ratio | per token | MB |"
    )
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as directory:
        for case in CASES:
            for turns in TURNS:
                draw, file, rows = random.Random(0), Path(directory) / "x.jsonl", given.messages // (2 * turns)
                lines = [json.dumps({"messages": conversation(draw, turns, case == CASES[2])}) for _ in range(rows)]
                file.write_text("\n".join(lines))
                found: dict[str, list[Any]] = {"conversation": [], "served": []}
                for _ in range(given.repeats):
                    for way, runs in found.items():
                        task = {"case": case, "file": str(file), "turns": way}
                        done = run_command([sys.executable, "-m", "bench.served", "--task", json.dumps(task)])
                        if done.returncode:
                            raise SystemExit(done.stderr[-4000:])
                        runs.append(json.loads(done.stdout.splitlines()[-1]))
                one, other = (statistics.median(run["cpu"] for run in runs) for runs in found.values())
                last = found["served"][-1]
                more = last["tokens"] / found["conversation"][-1]["tokens"]
                memory = " → ".join(f"{runs[-1]['memory']:,.0f}" for runs in found.values())
                sizes = f"{rows:,} | {last['rows']:,} | {last['tokens']:,} ({more:.2f}×)"
                seconds = f"{one:.2f} | {other:.2f} | {other / one:.2f}× | {other / one / more:.2f}×"
                print(f"| {case} | {turns} | {sizes} | {seconds} | {memory} |", flush=True)


if __name__ == "__main__":
    main()
