"""`gpuload prepare`: fills the token cache before a run, or writes tokenized data for a trainer."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpuload.cli.arguments import TRAINING, template_kwargs, template_of
from gpuload.cli.output import printable
from gpuload.core.errors import GpuloadError, OptionError
from gpuload.dataset.trainer_columns import CHATS, PAIRS
from gpuload.export import check_destination, check_split_names, save_to_disk
from gpuload.inspect.data import open_data
from gpuload.kinds.load_chats import load_chats
from gpuload.kinds.load_pairs import load_pairs
from gpuload.kinds.served.options import OF_SERVED
from gpuload.pipeline.run import run as run_job
from gpuload.sources.urls import is_url, without_secrets


def run(given: argparse.Namespace) -> int:
    """Tokenizes files of prompts, chats or pairs, unless their tokens are cached already, and prints the report:
    `load`, `load_chats` and `load_pairs` (for DPO) find the tokens. Or a Ray cluster does so; or the rows are
    exported."""
    of_export = {name: getattr(given, name) for name in _EXPORT_ONLY if hasattr(given, name)}
    of_training = {name: getattr(given, name) for name in TRAINING}
    error, stored = given.parser.error, given.store or given.return_raw_chat
    if given.export and given.ray is not None:
        error("--ray is not for --export: read_chats and read_pairs make such rows on a cluster")
    if given.export and stored:
        error("--store and --return-raw-chat are not for --export, which writes all columns")
    if given.export:
        return _export(given, of_export)
    if of_export:
        name = "for" if "trainer" in of_export else next(iter(of_export)).replace("_", "-")
        error(f"--{name} is an argument of --export")
    if not given.files or not given.tokenizer:
        error("files and --tokenizer are required")
    options = {
        "prompt_key": given.prompt_key,
        "chat_template": template_of(given),
        "apply_chat_template_kwargs": template_kwargs(given.template_kwargs),
        "verify": given.verify,
    }
    if given.ray is not None:
        if given.kind not in (None, "prompts") or any(of_training.values()):
            error("--ray is for prompts: read_chats and read_pairs make rows to train on")
        if stored:
            error("--store and --return-raw-chat are not for --ray, which stores token ids")
        if not given.cache_dir:
            error("--ray needs --cache-dir: a directory that all nodes mount, or a URL")
        from gpuload.integrations.ray.fill import check_prepared, prepare

        done = prepare(given.files, given.tokenizer, given.cache_dir, address=given.ray or None, **options)
        print(printable(str(done)))
        check_prepared(done)
        return 0
    if is_url(given.cache_dir or ""):
        place = without_secrets(given.cache_dir)
        raise OptionError(f"--cache-dir {place}: a store at a URL is filled with --ray, also on a single machine")
    options |= {"kind": given.kind, "store": given.store or "auto", "return_raw_chat": given.return_raw_chat}
    options |= {"cache_dir": given.cache_dir, **of_training}
    report = run_job(open_data(given.files, given.tokenizer, trains=True, **options)).report
    print(printable(str(report)))
    kept = {*report.from_cache, *report.into_cache}
    if missing := [name for name in report.files if name not in kept]:
        reasons = [note for note in report.notes if "not cached" in note]
        raise GpuloadError(f"{len(missing)} of {len(report.files)} files are not in the cache: {'; '.join(reasons)}")
    return 0


_EXPORT_ONLY = ("trainer", "split", "max_length", "overlong", *OF_SERVED, "columns", "overwrite")

KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any], Sequence[str]]] = {
    "sft": (load_chats, {}, list(CHATS)),
    "packed": (load_chats, {"packing": "bfd"}, ["trl", "megatron"]),
    "rm": (partial(load_pairs, objective="rm"), {}, ["trl"]),
    "dpo": (partial(load_pairs, objective="dpo"), {}, PAIRS),
}
"""Kind → what loads the files, how the rows are written, and for which trainers."""


def _export(given: argparse.Namespace, more: dict[str, Any]) -> int:
    """Tokenizes the files of each split, prints a report for it, and writes the rows. `more` are the arguments of
    --export that were given."""
    error = given.parser.error
    kind, directory = given.export
    if kind not in KINDS:
        error(f"--export {kind}: expected one of {', '.join(KINDS)}")
    if given.no_template or given.prompt_key != "prompt":
        error("--no-template and --prompt-key are not for --export")
    trainer = more.pop("trainer", "trl")
    if trainer not in KINDS[kind][2]:
        error(f"--for {trainer}: --export {kind} is for {', '.join(KINDS[kind][2])}")
    if trainer != "trl" and "columns" in more:
        error(f"--columns is for --for trl: {trainer} reads no other columns")
    if given.kind is not None:
        error("--as is not for --export, whose KIND says what the files hold")
    more |= {name: value for name in (*TRAINING, "chat_template") if (value := getattr(given, name))}
    if kind in ("rm", "dpo") and {"loss_on", "messages_key", *OF_SERVED} & more.keys():
        error("--loss-on, --messages-key and --turns are for sft and packed")
    splits = {"train": given.files} if given.files else {}
    for split in more.pop("split", []):
        name, equals, files = split.partition("=")
        if not equals or not name or not files:
            error(f"--split {split}: expected NAME=FILES")
        splits[name] = [*splits.get(name, []), files]
    if not splits or not given.tokenizer:
        error("files and --tokenizer are required")
    check_split_names(splits)
    overwrite = more.pop("overwrite", False)
    check_destination(directory, overwrite)  # before the work
    load, writing, _ = KINDS[kind]
    if "columns" in more:
        writing = writing | {"columns": [name for name in more.pop("columns").split(",") if name]}
    more |= {"apply_chat_template_kwargs": template_kwargs(given.template_kwargs), "verify": given.verify}
    more |= {"cache_dir": given.cache_dir}
    datasets = {name: load(files, given.tokenizer, **more) for name, files in splits.items()}
    for name, dataset in datasets.items():
        print(printable(f"{name}: {dataset.report}"))
    save_to_disk(datasets, directory, overwrite=overwrite, trainer=trainer, **writing)
    print(printable(f"written to {Path(directory).resolve()}"))
    return 0
