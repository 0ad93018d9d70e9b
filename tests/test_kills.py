"""Processes that are killed while they fill the token cache: the next load is right, and nothing unfinished remains."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import gpuload

# Children are forked from a process that has imported everything and loaded nothing: a kill costs a second.
KILLER = """
import json, os, random, signal, sys, time, traceback
from pathlib import Path
import gpuload
import gpuload.cache.store
from transformers import AutoTokenizer

gpuload.cache.store.LEAST_BYTES = 0  # the files are small
tokenizer, kills, *files = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(tokenizer)
cache = Path(os.environ["GPULOAD_CACHE"])
tokens = cache / "tokens"


def load(**options):
    prompts = gpuload.load(files, tokenizer, device="cpu", verify="off", **options)
    return [prompts.fingerprint["tokens"], prompts.fingerprint["columns"]]


def start(work):
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, os.fdopen(read)
    try:
        result = work()
        os.write(write, json.dumps(result).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def finish(work):
    child, out = start(work)
    with out:
        result = json.load(out)
    os.waitpid(child, 0)
    return result


def unfinished():
    return [file for file in tokens.glob("*.partial/*") if file.name != "lock"]


def cold():
    return finish(lambda: load(token_cache=False))


expected = cold()
began = time.perf_counter()
cold()
seconds = time.perf_counter() - began
random.seed(0)
counts = {"kills": 0, "while writing": 0, "unfinished bytes": 0, "wrong": 0, "orphans": 0, "too late": 0}
while counts["kills"] < int(kills):
    for entry in tokens.glob("*.arrow"):
        if random.random() < 0.7:
            entry.unlink()
    child, out = start(load)
    # Every second kill hits a writer, whenever it begins; the others come at random times.
    writing = counts["kills"] % 2 == 0
    until = time.perf_counter() + (3 if writing else random.uniform(0.0, 1.2)) * seconds
    while time.perf_counter() < until and not (writing and unfinished()):
        if os.waitpid(child, os.WNOHANG)[0]:
            child = 0
            break
        time.sleep(0.001)
    if writing and child:
        time.sleep(random.uniform(0.0, 0.02) * seconds)
    if child:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    counts["kills" if child else "too late"] += 1
    left = [file.stat().st_size for file in unfinished()]
    counts["while writing"] += bool(left)
    counts["unfinished bytes"] += sum(left)
    counts["wrong"] += finish(load) != expected
    counts["orphans"] += len(list(cache.glob("**/*.partial")))
    print(json.dumps(counts), flush=True)
"""


def kill(kills: int, gsm8k: str, qwen_folder: str, directory: Path) -> dict[str, Any]:
    """Kills loads at random times.

    Returns:
        How many were killed, how many of them left unfinished files, and after the next load: how many results were
        wrong and how many unfinished files remained.
    """
    files = [str(directory / f"{number}.parquet") for number in range(4)]
    table = pq.read_table(gsm8k)
    for number, file in enumerate(files):
        pq.write_table(table.slice(number * 1800, 1800), file, row_group_size=300)
    env = os.environ | {
        "PYTHONPATH": str(Path(gpuload.__file__).parents[1]),
        "GPULOAD_CACHE": str(directory / "cache"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, "-c", KILLER, qwen_folder, str(kills), *files]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60 + 30 * kills)
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-3000:]
    counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(counts)
    assert counts["kills"] == kills
    assert (counts["wrong"], counts["orphans"]) == (0, 0)
    return counts


def test_a_few_kills(gsm8k: str, qwen_folder: str, tmp_path: Path) -> None:
    kill(2, gsm8k, qwen_folder, tmp_path)


@pytest.mark.damage
def test_100_kills(gsm8k: str, qwen_folder: str, tmp_path: Path) -> None:
    assert kill(100, gsm8k, qwen_folder, tmp_path)["while writing"] > 20
