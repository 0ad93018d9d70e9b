"""`tokenizers` 1.0 compared with the installed version: ids, and seconds of CPU time. `python -m bench.tokenizers1`.

GPULOAD_TOKENIZERS1 names the folder of 1.0 (make tokenizers1-test installs it). Texts are prompts of all real data, and
random Unicode: of code points that are assigned in Python's Unicode (14 in Python 3.11), and of others as well.
"""

import argparse
import os
import random
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tokenizers import Tokenizer

from bench.data import SHARED
from bench.report import table
from gpuload.core.backends import batch_encoder
from gpuload.tokenizer import tokenizers1

_PER_FILE = 400
_RANDOM = 3_000


def real_texts() -> list[str]:
    """Prompts of each file."""
    found = []
    for file in sorted((SHARED / "datasets").glob("*.parquet")):
        if "prompt" in pq.read_schema(file).names:
            prompts = pq.read_table(file, columns=["prompt"])["prompt"].to_pylist()
            step = max(1, len(prompts) // _PER_FILE)
            found += [str(prompt if isinstance(prompt, str) else prompt[-1]["content"]) for prompt in prompts[::step]]
    return found


def random_texts(count: int, newer: bool) -> list[str]:
    """Texts of assigned code points; with `newer`, of others of the first two planes as well."""
    rng = random.Random(0)
    others = [c for c in map(chr, range(0x20000)) if newer and unicodedata.category(c) == "Cn"]
    assigned = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cn", "Cs", "Co")]
    marks = [c for c in assigned if unicodedata.category(c).startswith("M")]
    scripts = [c for c in assigned if not "\u3400" <= c <= "\ud7ff" and c < "\U00020000"]
    kinds = [" ", "\n", "a", "1", "'s", "e\u0301", *"abc.,!?"]

    def one() -> str:
        return "".join(
            rng.choice(rng.choice((assigned, marks, scripts, others or scripts, kinds)))
            for _ in range(rng.randrange(1, 40))
        )

    return [one() for _ in range(count)]


def compare(file: Path, texts: list[list[str]]) -> list[str]:
    """A line of the table."""
    old = Tokenizer.from_file(str(file))
    old.no_truncation()
    old.no_padding()
    model_json = old.to_str()
    try:
        new = tokenizers1.opened(model_json)
    except ValueError as error:
        return [file.parent.name, f"refused: {error!s:.60}", "", "", "", ""]
    encoders = [batch_encoder(each, old.to_str) for each in (old, new)]
    cells, speeds = [], list[str]()
    for number, some in enumerate(texts):
        (ids, before), (others, after) = (timed(encode, some) for encode in encoders)
        cells.append(f"{sum(a != b for a, b in zip(ids, others, strict=True)):,} of {len(some):,}")
        if number == 0:
            size = sum(len(text.encode()) for text in some) / 1e6
            speeds = [f"{size / seconds:.1f}" for seconds in (before, after)]
    return [file.parent.name, *cells, *speeds]


def timed(encode: Callable[[list[str]], Any], texts: list[str]) -> tuple[list[list[int]], float]:
    started = time.process_time()
    ids = encode(texts)
    seconds = time.process_time() - started
    return ids.to_lists(), seconds


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    texts = [real_texts(), random_texts(_RANDOM, False), random_texts(_RANDOM, True)]
    files = sorted((SHARED / "tokenizers").glob("*/tokenizer.json"))
    lines = [compare(file, texts) for file in files]
    print(table(["tokenizer", "real", "random", "with newer code points", "MB/s, installed", "1.0"], lines))
    load = f"load average {os.getloadavg()[0]:.1f}"
    print(f"\n{tokenizers1.tokenizers1_version()}; {load}; MB/s of CPU time, all cores together.")


if __name__ == "__main__":
    main()
