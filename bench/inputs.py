"""Which files are measured, with which tokenizer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parent.parent
VERL_PYTHON = ROOT / ".venv-verl" / "bin" / "python"
_SHARED = ROOT.parent / "shared"
_NAMES = ("xquad_12lang", "code_prompts", "gsm8k", "sgd_multiturn")
_ABOUT = {
    "xquad_12lang": "questions on a paragraph, 12 languages, a system message",
    "code_prompts": "programming tasks in English",
    "gsm8k": "school mathematics in English",
    "sgd_multiturn": "dialogues of 18 turns on average, in English",
    "joint": "all of these files in one load",
}


@dataclass(frozen=True)
class DataSet:
    """Some parquet files in verl's format that are loaded together.

    Attributes:
        name: for tables.
        files: their paths.
        rows: in all of them.
    """

    name: str
    files: tuple[str, ...]
    rows: int

    def facts(self) -> dict[str, Any]:
        """For the record: no paths, only names."""
        sizes = [Path(file).stat().st_size for file in self.files]
        names = [Path(file).name for file in self.files]
        return {"about": _ABOUT.get(self.name, ""), "files": names, "rows": self.rows, "file_bytes": sum(sizes)}


def find_data_sets(folder: str | None) -> list[DataSet]:
    """The data sets of a folder, and all of them together ("joint"); the one that is shipped where there is no folder.

    Args:
        folder: None for the one beside the repository, where there is one.
    """
    place = Path(folder).resolve() if folder else _SHARED / "datasets"
    files = [place / f"{name}.parquet" for name in _NAMES]
    found = [file for file in files if file.exists()]
    if folder and not found:
        raise SystemExit(f"{folder} has none of {', '.join(file.name for file in files)}")
    if not found:
        found = [ROOT / "gpuload" / "demo_data" / "gsm8k.parquet"]
    return _with_joint([_data_set(file) for file in found])


def samples(data_sets: list[DataSet], rows: int, folder: Path) -> list[DataSet]:
    """The same data sets with only their first rows, written to a folder."""
    cut = []
    for file in dict.fromkeys(file for data_set in data_sets for file in data_set.files):
        first = pa.Table.from_batches([next(pq.ParquetFile(file).iter_batches(rows))])
        path = folder / Path(file).name
        pq.write_table(first, path)
        cut.append(_data_set(path))
    return _with_joint(cut)


def find_tokenizer(given: str | None) -> str:
    """A tokenizer's folder: the one given, the one beside the repository, or the one that is shipped (Qwen2.5's)."""
    if given:
        return str(Path(given).resolve()) if Path(given).exists() else given
    beside = _SHARED / "tokenizers" / "qwen2.5-instruct"
    if beside.exists():
        return str(beside)
    from gpuload.demo_data import demo_files

    return demo_files()[1]


def find_tokenizers(first: str) -> list[str]:
    """That tokenizer, and those of other families beside the repository."""
    others = [_SHARED / "tokenizers" / name for name in ("qwen3", "llama3.1-instruct")]
    return [first, *(str(folder) for folder in others if folder.exists())]


def _data_set(file: Path) -> DataSet:
    return DataSet(file.stem, (str(file),), pq.ParquetFile(file).metadata.num_rows)


def _with_joint(parts: list[DataSet]) -> list[DataSet]:
    if len(parts) < 2:
        return parts
    files = tuple(file for part in parts for file in part.files)
    return [*parts, DataSet("joint", files, sum(part.rows for part in parts))]
