"""Datasets and tokenizers that are measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from bench import ROOT
from gpuload.demo_data import demo_files

Row = TypeVar("Row")

SHARED = ROOT.parent / "shared"
"""Optional directory next to the repository with real datasets and tokenizers."""

_DATASETS = {
    "xquad_12lang": "questions on a paragraph, 12 languages, a system message",
    "code_prompts": "programming tasks in English",
    "gsm8k": "school mathematics in English",
    "sgd_multiturn": "dialogues of 18 turns on average, in English",
}
JOINT = "joint"
"""Name of the dataset that has the files of all others."""


@dataclass(frozen=True)
class Dataset:
    """Parquet files in verl's format that are loaded together.

    Attributes:
        name: Name in tables.
        files: Paths.
        rows: Rows of all files.
    """

    name: str
    files: tuple[str, ...]
    rows: int

    def facts(self) -> dict[str, Any]:
        """Return a description for the record, without directories."""
        sizes = [Path(file).stat().st_size for file in self.files]
        about = "all files in one load" if self.name == JOINT else _DATASETS.get(self.name, "")
        names = [Path(file).name for file in self.files]
        return {"about": about, "files": names, "rows": self.rows, "file_bytes": sum(sizes)}


@dataclass(frozen=True)
class Plan:
    """Parameters of a run on the CPU.

    Attributes:
        datasets: Smallest first; the last one is the joint dataset, if there is more than one.
        tokenizer: Directory or name of a transformers tokenizer.
        limit: Maximum prompt length in tokens.
        repeats: Processes per measurement.
        scratch: Temporary directory.
    """

    datasets: tuple[Dataset, ...]
    tokenizer: str
    limit: int
    repeats: int
    scratch: Path

    def task(self, dataset: Dataset, **more: Any) -> dict[str, Any]:
        """Return the task that a contender gets."""
        return {"files": dataset.files, "rows": dataset.rows, "tokenizer": self.tokenizer, "limit": self.limit} | more


def find_datasets(directory: str | None) -> tuple[Dataset, ...]:
    """Return the datasets of a directory, followed by the joint dataset.

    Args:
        directory: None for the one next to the repository, or, if there is none, the shipped dataset.
    """
    place = Path(directory).resolve() if directory else SHARED / "datasets"
    files = [place / f"{name}.parquet" for name in _DATASETS]
    found = [file for file in files if file.exists()]
    if directory and not found:
        raise SystemExit(f"{directory} contains none of {', '.join(file.name for file in files)}")
    return _with_joint([_dataset(file) for file in found or [Path(demo_files()[0])]])


def samples(datasets: tuple[Dataset, ...], rows: int, directory: Path) -> tuple[Dataset, ...]:
    """Write the first rows of each dataset to a directory and return the smaller datasets."""
    files = dict.fromkeys(file for dataset in datasets for file in dataset.files)
    return _with_joint([_dataset(first_rows(file, rows, directory / Path(file).name)) for file in files])


def first_rows(file: str | Path, rows: int, target: Path) -> Path:
    """Write the first rows of a parquet file to another one and return its path."""
    target.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_batches([next(pq.ParquetFile(file).iter_batches(rows))]), target)
    return target


def spread_over(dataset: Dataset, rows: int, directory: Path) -> Dataset:
    """Write rows that are spread evenly over each file of a dataset, and return the smaller dataset."""
    files = []
    for file in dataset.files:
        table = pq.read_table(file)
        count = max(1, rows * len(table) // dataset.rows)
        files.append(directory / str(rows) / Path(file).name)
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.take([k * len(table) // count for k in range(count)]), files[-1])
    total = sum(pq.ParquetFile(file).metadata.num_rows for file in files)
    return Dataset(dataset.name, tuple(map(str, files)), total)


def two_sizes(rows: int, most: int) -> tuple[int, int]:
    """Return two numbers of rows for a line through both: the larger one is `most`, or half of all if that is less."""
    large = min(most, rows // 2)
    return max(1, large // 4), large


def conversations(files: Sequence[str]) -> list[list[dict[str, str]]]:
    """Read the conversations of parquet files in verl's format, each ending with an answer."""
    rows = []
    for path in files:
        for messages in pq.read_table(path, columns=["prompt"])["prompt"].to_pylist():
            messages = [{"role": each["role"], "content": each["content"]} for each in messages]
            if messages[-1]["role"] != "assistant":  # only a question: it is answered by itself
                messages = [*messages, {"role": "assistant", "content": messages[-1]["content"]}]
            rows.append(messages)
    return rows


def pair_columns(rows: list[Any]) -> dict[str, list[Any]]:
    """Return pairs of conversations that end with an answer; the rejected one has its words in reverse."""
    rejected = [[row[-1] | {"content": " ".join(reversed(row[-1]["content"].split(" ")))}] for row in rows]
    return {"prompt": [row[:-1] for row in rows], "chosen": [row[-1:] for row in rows], "rejected": rejected}


def chosen_evenly(rows: Sequence[Row], count: int) -> list[Row]:
    """Return some of the rows, spread evenly over all, in their order; rows are repeated if there are too few."""
    if count > len(rows):
        return [rows[k % len(rows)] for k in range(count)]
    return [rows[k * len(rows) // count] for k in range(count)]


def find_tokenizer(given: str | None) -> str:
    """Return the given tokenizer, the one next to the repository, or the shipped one (Qwen2.5)."""
    if given:
        return str(Path(given).resolve()) if Path(given).exists() else given
    found = SHARED / "tokenizers" / "qwen2.5-instruct"
    return str(found) if found.exists() else demo_files()[1]


def _dataset(file: Path) -> Dataset:
    return Dataset(file.stem, (str(file),), pq.ParquetFile(file).metadata.num_rows)


def _with_joint(parts: list[Dataset]) -> tuple[Dataset, ...]:
    if len(parts) < 2:
        return tuple(parts)
    files = tuple(file for part in parts for file in part.files)
    return (*parts, Dataset(JOINT, files, sum(part.rows for part in parts)))
