"""`gpuload prepare --export`: tokenized data for a trainer, in a directory."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpuload.cli.output import printable
from gpuload.dataset.trainer_columns import CHATS, PAIRS
from gpuload.export import check_destination, save_to_disk
from gpuload.kinds.load_chats import load_chats
from gpuload.kinds.load_pairs import load_pairs

KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any], Sequence[str]]] = {
    "sft": (load_chats, {}, list(CHATS)),
    "packed": (load_chats, {"packing": "bfd"}, ["trl", "megatron"]),
    "rm": (partial(load_pairs, objective="rm"), {}, ["trl"]),
    "dpo": (partial(load_pairs, objective="dpo"), {}, PAIRS),
}
"""Kind → what loads the files, how the rows are written, and for which trainers."""


def export_files(
    kind: str,
    directory: str,
    splits: Mapping[str, Sequence[str]],
    tokenizer: Any,
    *,
    trainer: str = "trl",
    columns: Sequence[str] | None = None,
    overwrite: bool = False,
    **options: Any,
) -> None:
    """Tokenizes the files of each split, prints a report for it, and writes the rows. `kind` is one of `KINDS`,
    `trainer` one of its own; `columns` and `overwrite` are those of `save_to_disk`, and the other options those of the
    load.

    Raises:
        GpuloadError: the files cannot be loaded, or the directory cannot be written.
    """
    check_destination(directory, overwrite)  # before the work
    load, more, _ = KINDS[kind]
    datasets = {name: load(list(files), tokenizer, **options) for name, files in splits.items()}
    for name, dataset in datasets.items():
        print(printable(f"{name}: {dataset.report}"))
    more = more if columns is None else more | {"columns": list(columns)}
    save_to_disk(datasets, directory, overwrite=overwrite, trainer=trainer, **more)
    print(printable(f"written to {Path(directory).resolve()}"))
