"""Files of Arrow's stream format: what `save_to_disk` of Hugging Face datasets writes."""

import json
from pathlib import Path

import pyarrow as pa

from gpuload.core.errors import SourceError


def saved_files(folder: Path, name: str) -> list[Path] | None:
    """The files of a dataset that was saved to a directory, in order; None if the directory is another one, a
    `SourceError`, which calls it by `name`, if it has several splits or is damaged.

    Such a directory may have further files: results of `map`, cached there under other names.
    """
    splits = folder / "dataset_dict.json"
    state = folder / "state.json"
    if splits.is_file() and not state.exists():
        found = [each.name for each in sorted(folder.iterdir()) if (each / "state.json").is_file()]
        one = Path(name, found[0] if found else "train")
        raise SourceError(f"{name}: a dataset with the splits {', '.join(found)}: pass one of them, such as {one}")
    if not state.is_file() or not (folder / "dataset_info.json").is_file():
        return None
    try:
        files = [folder / part["filename"] for part in json.loads(state.read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{name}: state.json is damaged ({error!r}): save the dataset again") from error
    for file in files:
        if not file.is_file():
            raise SourceError(f"{name}: {file.name} is missing: save the dataset again")
    return files


def mapped_table(path: str) -> pa.Table:
    """All rows of a file, in memory that is mapped to it; a `pa.ArrowException` if it is no such file, or its end is
    missing."""
    with pa.memory_map(path) as raw, pa.ipc.open_stream(raw) as reader:
        return reader.read_all()
