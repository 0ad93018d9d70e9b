"""Damaged parquet files: an error, or the same rows. A changed byte may go unnoticed only without checksums."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiers import exhaustive

import gpuload
from gpuload.core.errors import SourceError

# Loads damaged copies of small files, from the number given to the last, and prints one line per copy. It is a process
# of its own, because a damaged file may crash Arrow.
MUTANTS = """
import json, random, resource, signal, sys, warnings
from datetime import datetime
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
import gpuload
from transformers import AutoTokenizer
from gpuload.engines.host import engine

tokenizer, directory, first, last = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
tokenizer = AutoTokenizer.from_pretrained(tokenizer)
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
encoders, real = [], engine.host_encoder


def host_encoder(reference, nbytes, as_whole):
    if not encoders:
        encoders.append(real(reference, nbytes))
    return encoders[0]


engine.host_encoder = host_encoder
rng = random.Random(0)
words = [str(rng.randrange(10**6)) for _ in range(40)]
chats = [[{"role": "user", "content": f"What is {word} times {word}?"}] for word in words]
TABLE = pa.table({
    "prompt": chats,
    "data_source": ["a", "b"] * 20,
    "reward_model": [{"style": "rule", "ground_truth": word} for word in words],
    "extra_info": [{"index": row, "score": row / 7, "tools": [word] * (row % 3)} for row, word in enumerate(words)],
    "made": [datetime(2026, 1, 1 + row % 28) for row in range(40)],
    "right": [row % 3 == 0 for row in range(40)],
})
PATH = f"{directory}/data.parquet"


def load():
    prompts = gpuload.load(PATH, tokenizer, device="cpu", token_cache=False, verify="off")
    return [prompts.fingerprint["tokens"], prompts.fingerprint["columns"]], prompts.report.rows_rejected


def base(number):
    "One way to write the table, with or without checksums."
    checksums = number % 2 == 0
    pq.write_table(
        TABLE,
        PATH,
        row_group_size=(20, 40)[number // 2 % 2],
        compression=("none", "snappy", "zstd")[number // 4 % 3],
        use_dictionary=bool(number // 12 % 2),
        data_page_version=("1.0", "2.0")[number // 24 % 2],
        write_page_checksum=checksums,
        data_page_size=256,
        store_schema=number % 7 != 0,
    )
    return checksums, open(PATH, "rb").read()


def damage(whole, rng):
    "A damaged copy, and how it was damaged."
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    kind = rng.choice(["bit in pages"] * 4 + ["bit in footer"] * 4 + ["byte", "zeros", "cut", "swapped", "inserted"])
    at = rng.randrange(footer, len(whole)) if kind == "bit in footer" else rng.randrange(4, footer)
    changed = bytearray(whole)
    if kind.startswith("bit"):
        changed[at] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        changed[at] = rng.randrange(256)
    elif kind == "zeros":
        changed[at : at + 512] = bytes(len(changed[at : at + 512]))
    elif kind == "cut":
        del changed[at:]
    elif kind == "swapped":
        other, size = rng.randrange(4, footer), rng.randrange(1, 64)
        changed[at : at + size], changed[other : other + size] = whole[other : other + size], whole[at : at + size]
    else:
        changed[at:at] = rng.randbytes(rng.randrange(1, 9))
    return kind, bytes(changed)


known = {}  # only whether Arrow's schema is stored affects the columns' types
for number in range(first, last):
    rng = random.Random(number)
    checksums, whole = base(number)
    if number % 7 not in known:
        known[number % 7] = load()
    expected = known[number % 7]
    kind, changed = damage(whole, rng)
    with open(PATH, "wb") as file:
        file.write(changed)
    about = [number, kind, checksums]
    print(json.dumps([*about, "crash", ""]), flush=True)  # unless another line for this number follows
    signal.alarm(120)
    try:
        found = load()
        outcome = "equal" if found == expected else "rejected rows" if found[1] else "different"
        (ids, columns), (wanted, values) = found[0], expected[0]
        what = [name for name in {**values, **columns} if columns.get(name) != values.get(name)]
        what += ["ids"] * (ids != wanted)
    except gpuload.GpuloadError as error:
        outcome, what = "error", str(error)
    except BaseException as error:
        outcome, what = "other exception", f"{type(error).__name__}: {error}"
    signal.alarm(0)
    print(json.dumps([*about, outcome, what]), flush=True)
"""


def load_mutants(count: int, qwen_folder: str, directory: Path) -> dict[tuple[bool, str], int]:
    """(whether the file has checksums, outcome) → how many of `count` damaged files."""
    env = os.environ | {"PYTHONPATH": str(Path(gpuload.__file__).parents[1]), "TOKENIZERS_PARALLELISM": "false"}
    found: dict[int, list[Any]] = {}
    while len(found) < count:
        command = [sys.executable, "-c", MUTANTS, qwen_folder, str(directory), str(len(found)), str(count)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        before = len(found)
        found |= {line[0]: line for line in map(json.loads, done.stdout.splitlines())}
        assert len(found) > before, done.stderr[-3000:]
    for number, kind, checksums, outcome, what in found.values():
        if outcome not in ("error", "equal"):
            print(f"{number}: {kind}, {'' if checksums else 'no '}checksums: {outcome}: {what}")
    by_kind = Counter((kind, outcome) for _, kind, _, outcome, _ in found.values())
    print("\n".join(f"{count:5} {kind}: {outcome}" for (kind, outcome), count in sorted(by_kind.items())))
    counts = Counter((checksums, outcome) for _, _, checksums, outcome, _ in found.values())
    print(
        {f"{'with' if checksums else 'without'} checksums: {outcome}": n for (checksums, outcome), n in counts.items()}
    )
    return counts


def check(counts: dict[tuple[bool, str], int]) -> None:
    assert counts.get((True, "different"), 0) == 0
    assert counts[(True, "error")] > 0
    assert counts[(False, "error")] > 0


@pytest.mark.parametrize("cached", [True, False])
def test_the_name_of_a_column_chunk_that_is_not_utf8(tmp_path: Path, qwen: Any, cached: bool) -> None:
    file = tmp_path / "data.parquet"
    pq.write_table(pa.table({"prompt": [[{"role": "user", "content": "a"}]], "answer": ["b"]}), file)
    whole = file.read_bytes()
    at = whole.rindex(b"element")  # the name in the schema comes before that of the column chunk
    file.write_bytes(whole[:at] + b"elemen\xf3" + whole[at + 7 :])
    with pytest.raises(SourceError, match="damaged parquet file"):
        gpuload.load(str(file), qwen, token_cache=cached)


@exhaustive
def test_40_damaged_files(qwen_folder: str, tmp_path: Path) -> None:
    check(load_mutants(40, qwen_folder, tmp_path))


@pytest.mark.damage
def test_1000_damaged_files(qwen_folder: str, tmp_path: Path) -> None:
    check(load_mutants(1000, qwen_folder, tmp_path))
