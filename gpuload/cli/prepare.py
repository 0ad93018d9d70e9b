"""`gpuload prepare`: fills the token cache before a run, or writes tokenized data for a trainer."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpuload.cli.output import printable
from gpuload.core.errors import GpuloadError, OptionError
from gpuload.dataset.trainer_columns import CHATS, PAIRS
from gpuload.export import check_destination, save_to_disk
from gpuload.inspect.data import open_data
from gpuload.kinds.load_chats import load_chats
from gpuload.kinds.load_pairs import load_pairs
from gpuload.pipeline.run import run
from gpuload.sources.urls import is_url, without_secrets


def template_kwargs(text: str, argument: str = "--template-kwargs") -> Any:
    """`apply_chat_template_kwargs` as JSON, given as an argument. An `OptionError` if it is no JSON object."""
    try:
        given = json.loads(text)
    except ValueError as error:
        raise OptionError(f"{argument} {text!r}: not valid JSON: {error}") from error
    if not isinstance(given, dict):
        raise OptionError(f'{argument} {text!r}: expected a JSON object, such as {{"enable_thinking": false}}')
    return given


def prepare_files(files: Sequence[str], tokenizer: Any, **options: Any) -> None:
    """Tokenizes files of prompts, chats or pairs, unless their tokens are cached already, and prints the report.
    `load`, `load_chats` and `load_pairs` (for DPO) find the tokens. Options are those of `open_data`.

    Raises:
        OptionError: the cache directory is a URL.
        GpuloadError: some files could not be cached; the message says why.
    """
    if is_url(str(options.get("cache_dir") or "")):
        raise OptionError(
            f"--cache-dir {without_secrets(options['cache_dir'])}: a store at a URL is filled with --ray, also on a "
            "single machine"
        )
    report = run(open_data(list(files), tokenizer, trains=True, **options)).report
    print(printable(str(report)))
    kept = {*report.from_cache, *report.into_cache}
    if missing := [name for name in report.files if name not in kept]:
        reasons = [note for note in report.notes if "not cached" in note]
        raise GpuloadError(f"{len(missing)} of {len(report.files)} files are not in the cache: {'; '.join(reasons)}")


def prepare_with_ray(files: Sequence[str], tokenizer: Any, store: str, address: str | None, **options: Any) -> None:
    """Fills a store, a directory or a URL, from a Ray cluster, and prints what was done. See
    `integrations.ray.prepare`.

    Raises:
        GpuloadError: some files are not in the store; the message says why.
    """
    from gpuload.integrations.ray.fill import check_prepared, prepare

    done = prepare(list(files), tokenizer, store, address=address, **options)
    print(printable(str(done)))
    check_prepared(done)


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
