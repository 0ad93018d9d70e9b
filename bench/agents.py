"""Conversations with tools and of many shapes, compared with the tokenizer row by row: `python -m bench.agents`.

Each contender loads each dataset in a process of its own, after imports and with the tokenizer open. Row by row means
`apply_chat_template` with a mask for each row; gpuload is measured in its first load and in a second one. Where
GPULOAD_TOKENIZERS1 is set (make tokenizers1-test), rows that `tokenizers` 1.0 encodes one by one are measured as well.
"""

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import documents
from bench.agents_table import RECORD, agents_table
from bench.data import SHARED
from bench.environment import commit, machine, versions
from bench.process import run_command
from bench.report import BY_ROW, BY_ROW_1
from gpuload.demo_data import demo_files

_ROWS, _MORE_ROWS = 5_000, 40_000
_WORDS = (
    "the flight was booked for two passengers and the refund is to be made within seven days of the request".split()
)


def text(draw: random.Random, words: int) -> str:
    """Some words."""
    return " ".join(draw.choices(_WORDS, k=words))


def with_tools(draw: random.Random) -> dict[str, Any]:
    """A short conversation with tools of its own, calls and results: about 1 KB, nearly all of another shape."""
    names = draw.sample(["status", "book", "refund", "search"], draw.randint(1, 3))
    tools = [
        {"type": "function", "function": {"name": name, "description": text(draw, 6), "parameters": {"type": "object"}}}
        for name in names
    ]
    messages: list[dict[str, Any]] = []
    for _ in range(draw.randint(1, 3)):
        messages.append({"role": "user", "content": text(draw, draw.randint(3, 20))})
        for _ in range(draw.randint(0, 2)):
            arguments = {
                key: text(draw, 2) for key in draw.sample(["flight", "day", "name", "seat"], draw.randint(0, 3))
            }
            function = {"name": draw.choice(names), "arguments": arguments}
            messages.append(
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
            )
            messages.append({"role": "tool", "content": text(draw, draw.randint(1, 15))})
        messages.append({"role": "assistant", "content": text(draw, draw.randint(3, 25))})
    return {"messages": messages, "tools": tools}


def of_random_shape(draw: random.Random) -> dict[str, Any]:
    """A conversation of 1 to 60 messages without tools."""
    roles = ["system"] * draw.randint(0, 1) + [draw.choice(["user", "assistant"]) for _ in range(draw.randint(1, 59))]
    return {"messages": [{"role": role, "content": text(draw, draw.randint(1, 30))} for role in [*roles, "assistant"]]}


def write_datasets(directory: Path) -> dict[str, Path]:
    """Write the datasets; real trajectories, which are long, only where they are next to the repository."""
    made: dict[str, list[str]] = {}
    for name, make in (("with tools, 1 KB", with_tools), ("random shapes", of_random_shape)):
        draw = random.Random(0)
        lines = [json.dumps(make(draw)) for _ in range(_MORE_ROWS)]
        for count in (_ROWS, _MORE_ROWS):
            made[f"{name}, {count:,} rows"] = lines[:count]
    real = SHARED / "datasets" / "agent_trajectories" / "tau_airline.jsonl"
    if real.exists():
        rows = [json.dumps({"messages": json.loads(line)["messages"]}) for line in real.read_text().splitlines()]
        made[f"real trajectories, 16 KB, {_ROWS:,} rows"] = (rows * (_ROWS // len(rows) + 1))[:_ROWS]
    files: dict[str, Path] = {}
    for name, lines in made.items():
        files[name] = directory / f"{len(files)}.jsonl"
        files[name].write_text("\n".join(lines))
    return files


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """One contender on one dataset."""
    import trl
    from transformers import AutoTokenizer

    import gpuload

    tokenizer = AutoTokenizer.from_pretrained(demo_files()[1])
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5_training.jinja").read_text()
    tokenizer("x")
    if task["contender"] == "gpuload":
        seconds = []
        for _ in range(2):
            started = time.perf_counter()
            found = gpuload.load_chats(
                task["file"], tokenizer, max_length=1_000_000, token_cache=False, progress=False, device="cpu"
            )
            seconds.append(time.perf_counter() - started)
        report = found.report
        counts = {"compiled": report.rows_compiled, "read": report.rows_read, "tokens": int(found.lengths.sum())}
        assert not report.check.mismatches
        return {"seconds": seconds, "rows": len(found), **counts}
    count = by_row(tokenizer) if task["contender"] == BY_ROW else by_row_1(tokenizer)
    started, rows, tokens = time.perf_counter(), 0, 0
    with open(task["file"]) as lines:  # no more of it: the seconds are multiplied by the number of rows
        for line in itertools.islice(lines, task["rows"]):
            rows, tokens = rows + 1, tokens + count(json.loads(line))
    return {"seconds": [time.perf_counter() - started], "rows": rows, "tokens": tokens}


def by_row(tokenizer: Any) -> Callable[[dict[str, Any]], int]:
    """How many ids a row has; its mask is made, too."""
    options = {"return_dict": True, "return_assistant_tokens_mask": True}
    return lambda row: len(
        tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), **options)["input_ids"]
    )


def by_row_1(tokenizer: Any) -> Callable[[dict[str, Any]], int]:
    """The same with `tokenizers` 1.0, whose release candidates have no offsets: answers are found in the text, and
    masks are not made."""
    from transformers.utils.chat_template_utils import render_jinja_template

    from gpuload.tokenizer.tokenizers1 import opened

    encode = opened(tokenizer.backend_tokenizer.to_str()).encode
    options = {"chat_template": tokenizer.chat_template, "return_assistant_tokens_mask": True}
    options |= tokenizer.special_tokens_map

    def count(row: dict[str, Any]) -> int:
        (text,), _ = render_jinja_template([row["messages"]], tools=row.get("tools"), **options)
        return len(encode(text, add_special_tokens=False).ids)

    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows-by-row", type=int, default=1_000, help="measured row by row")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        print(json.dumps(measure(json.loads(given.task))))
        return
    record: dict[str, Any] = {
        "machine": machine(),
        "commit": commit(),
        "versions": versions(),
        "repeats": given.repeats,
    }
    record |= {"rows_by_row": given.rows_by_row, "datasets": {}}
    with tempfile.TemporaryDirectory() as directory:
        for name, file in write_datasets(Path(directory)).items():
            found: dict[str, list[Any]] = {BY_ROW: [], "gpuload": []}
            found |= {BY_ROW_1: []} if os.environ.get("GPULOAD_TOKENIZERS1") else {}
            for _ in range(given.repeats):
                for contender, runs in found.items():
                    task = {"contender": contender, "file": str(file), "rows": given.rows_by_row}
                    done = run_command([sys.executable, "-m", "bench.agents", "--task", json.dumps(task)])
                    if done.returncode:
                        raise SystemExit(done.stderr[-4000:])
                    runs.append(json.loads(done.stdout.splitlines()[-1]))
            assert (
                len({run["tokens"] for contender in found if contender != "gpuload" for run in found[contender]}) == 1
            )
            record["datasets"][name] = found
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    documents.write(RECORD)
    print(agents_table(record))


if __name__ == "__main__":
    main()
