"""save_to_disk(): tokenized data as Hugging Face `datasets` stores it, and as parquet.

    DIR/dataset_dict.json, DIR/train/...   what `datasets.load_from_disk(DIR)` opens
    DIR/train.parquet                      the same rows
    DIR/gpuload.json                       the fingerprint, options and report of each split

or for Megatron-core, its indexed datasets (`dataset/indexed.py`) and `gpuload.json`.

Record batches are written before more are made, so memory is bounded: to the store one by one, to parquet as many as
make a row group. Everything is written into a temporary directory next to DIR, which is renamed at the end. One that is
overwritten is removed after that.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from gpuload._version import __version__
from gpuload.core.arrow import without_rows
from gpuload.core.errors import DataError, ExportError, GpuloadError, OptionError
from gpuload.core.files import PartialDirectory, exchanged
from gpuload.dataset.indexed import write_packs, write_rows
from gpuload.kinds.chats.dataset import ChatDataset
from gpuload.kinds.pairs.dataset import PairDataset
from gpuload.packing import pack
from gpuload.packing.packs import Packing
from gpuload.sources.footer import LEAST_GROUP_BYTES, rows_of_group
from gpuload.sources.frames import no_bars_of_datasets
from gpuload.sources.types import with_types
from gpuload.sources.urls import is_url, without_secrets

_ABOUT = "gpuload.json"
_PAGE_BYTES = 1 << 20


def save_to_disk(
    splits: Mapping[str, ChatDataset | PairDataset],
    directory: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    progress: bool | None = None,
    **options: Any,
) -> None:
    """Write datasets to a directory that `datasets.load_from_disk` opens, with a parquet file for each split.

    The directory appears as a whole, or not at all. It also has a file `gpuload.json` with the fingerprint, the options
    and the report of each split.

    Examples:
        >>> import gpuload, pyarrow as pa, tempfile
        >>> from gpuload.demo_data import demo_files
        >>> _, tokenizer = demo_files()
        >>> chats = gpuload.load_chats(pa.table({"text": ["one two", "three"]}), tokenizer)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     gpuload.save_to_disk({"train": chats}, f"{folder}/sft")
        ...     sorted(path.name for path in Path(folder, "sft").iterdir())
        ['dataset_dict.json', 'gpuload.json', 'train', 'train.parquet']

    Args:
        splits: Name → dataset.
        directory: Where to write.
        overwrite: Replace the directory, if it was written by this function.
        progress: Show a progress bar; None shows it in a terminal.
        **options: Of the datasets' `to_arrow`: `trainer`, whose columns the rows have (`"trl"`, `"llamafactory"`,
            `"axolotl"`, `"skyrl"` or `"areal"`); `columns`; `packing` and `pack_length`, of a `ChatDataset`.
            `trainer="megatron"` writes Megatron-core's indexed datasets instead: for each split `NAME.bin` and
            `NAME.idx`, int32 ids, and `NAME-loss-mask.*`, uint8; with `packing` also `NAME-packs.idx`, where a document
            is a pack of sequences in the same `NAME.bin`, and its masks.

    Raises:
        OptionError: A value is invalid, or the directory exists.
        DataError: A column has a type that `datasets` does not have, or a split for Megatron-core has no tokens.
        ExportError: The directory cannot be written; no file of it remains.
        GpuloadError: The package `datasets` is not installed.
    """
    if splits is not None and not isinstance(splits, Mapping):
        raise OptionError(f"splits is a {type(splits).__name__}: pass datasets by name, such as {{'train': dataset}}")
    datasets = check_destination(directory, overwrite)
    place = Path(os.path.expanduser(directory)).resolve()
    if not splits:
        raise OptionError("splits: no dataset given")
    for name, split in splits.items():
        if not isinstance(split, ChatDataset | PairDataset):
            raise OptionError(
                f"split {name!r} is a {type(split).__name__}: expected what load_chats or load_pairs returns"
            )
        if hasattr(split, "images"):  # trainers would learn ids of images without any
            raise OptionError(
                f"split {name!r} has images, which a directory of tokens cannot have: use its loader, and load with "
                "store='disk' to keep its rows for later loads"
            )
    check_split_names(splits)
    pairs = [name for name, split in splits.items() if isinstance(split, PairDataset)]
    if 0 < len(pairs) < len(splits):
        raise OptionError("splits: some have conversations and others pairs: write them into two directories")
    packs = [name for name in ("packing", "pack_length") if options.get(name) is not None]
    if pairs and packs:
        raise OptionError(f"{packs[0]}={options[packs[0]]!r}: split {pairs[0]!r} has pairs, which are not packed")
    try:
        partial = PartialDirectory(place.parent)
        try:
            made = partial.path / "made"
            made.mkdir()
            if options.get("trainer") == "megatron":
                about = _write_indexed(splits, made, progress, **options)
            else:
                about = _write(splits, made, datasets, progress, options)
            content = {"gpuload": __version__, "options": dict(options), "splits": about}
            (made / _ABOUT).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            _put(made, place, overwrite)
        finally:
            partial.remove()
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # made by another process while this one was writing
            error.strerror = "it exists now"
        full = "free disk space, or " * (error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
        raise ExportError(f"cannot write {place}: {error.strerror or error}: {full}choose another directory") from error


def check_split_names(names: Iterable[Any]) -> None:
    """Checks the names of splits; an `OptionError` if one can be none, or two would be the same file."""
    names = list(names)
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"\w+(\.\w+)*", name):
            raise OptionError(f"split {name!r}: expected letters, digits, underscores and single dots")
        if f"{name}.parquet" in names:
            raise OptionError(f"split {name + '.parquet'!r} is the file of split {name!r}: rename one of them")


def check_destination(directory: str | os.PathLike[str], overwrite: bool) -> Any:
    """Checks that a directory may be written, and returns the module `datasets`.

    Raises:
        OptionError: it exists, and may not be overwritten.
        GpuloadError: `datasets` is not installed.
    """
    if not isinstance(directory, str | os.PathLike):
        raise OptionError(f"directory={directory!r:.80}: expected a path")
    if is_url(os.fspath(directory)):
        raise OptionError(
            f"directory={without_secrets(os.fspath(directory))!r:.80}: a URL: write into a local directory, and copy it"
        )
    try:
        place = Path(os.path.expanduser(directory)).resolve()
        if place.is_symlink():  # a loop of links, for which Python 3.13 raises nothing
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        above = next((each for each in place.parents if each.exists()), place)
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{above} is a file")
        if not os.access(above, os.W_OK):
            raise PermissionError(errno.EACCES, f"{above} cannot be written")
        there = place.exists() and not (place.is_dir() and not any(place.iterdir()))
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, a loop of links, a closed directory
        reason = getattr(error, "strerror", None) or error
        raise OptionError(
            f"directory={os.fspath(directory)!r:.80}: cannot be used: {reason}: choose another"
        ) from error
    if there:
        if not (place / _ABOUT).is_file():
            raise OptionError(f"{place} exists and was not written by gpuload: choose another directory")
        if not overwrite:
            raise OptionError(f"{place} exists: choose another directory, or overwrite it (overwrite=True)")
    try:
        import datasets
    except ImportError as error:
        raise GpuloadError("writing datasets needs the package datasets: pip install 'gpuload[export]'") from error
    return datasets


def _put(made: Path, place: Path, overwrite: bool) -> None:
    """Renames a directory to its place. At each moment, a complete one is there.

    What is there is replaced with `overwrite`, and is then at `made` or nowhere; otherwise only an empty directory may
    be there.
    """
    if not overwrite or not place.exists():
        os.replace(made, place)
        return
    if exchanged(made, place):
        return
    # Where it takes two steps, a killed process leaves the old directory under a name that nothing removes.
    aside = place.with_name(f"{place.name}.replaced-{uuid.uuid4().hex[:8]}")
    try:
        os.replace(place, aside)
        os.replace(made, place)
    except BaseException:
        if aside.exists() and not place.exists():
            os.replace(aside, place)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _write(
    splits: Mapping[str, ChatDataset | PairDataset],
    made: Path,
    datasets: Any,
    progress: bool | None,
    options: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    readers = {name: dataset.to_arrow(**options) for name, dataset in splits.items()}
    schemas = {name: features_of(reader.schema, datasets).arrow_schema for name, reader in readers.items()}
    made_of = {name: json.dumps((split.fingerprint, options)).encode() for name, split in splits.items()}
    digests = {name: hashlib.blake2b(each, digest_size=8).hexdigest() for name, each in made_of.items()}
    _save_empty(schemas, digests, made, datasets)
    about = {}
    for name, reader in readers.items():
        (file,) = (made / name).glob("*.arrow")
        rows = _write_rows(reader, schemas[name], file, made / f"{name}.parquet", progress)
        about[name] = _about(splits[name], rows)
    return about


def _write_indexed(
    splits: Mapping[str, ChatDataset | PairDataset],
    made: Path,
    progress: bool | None,
    packing: Packing | None = None,
    pack_length: int | None = None,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    if packing is None and pack_length is not None:
        options["pack_length"] = pack_length  # which is an error
    readers = {name: dataset.to_arrow(**options) for name, dataset in splits.items()}
    about = {}
    for name, reader in readers.items():
        with _bar(name, progress) as bar:
            lengths = write_rows(reader, made / name, bar.update)
        about[name] = _about(splits[name], len(lengths))
        if packing is not None:
            size = splits[name].options.max_prompt_length if pack_length is None else pack_length
            plan = pack(lengths, size, packing)
            write_packs(made / name, lengths, plan)
            about[name] |= {"packs": len(plan), "pack_length": size}
    return about


def _about(dataset: ChatDataset | PairDataset, rows: int) -> dict[str, Any]:
    return {"rows": rows, "fingerprint": dataset.fingerprint, "report": asdict(dataset.report)}


def _bar(name: str, progress: bool | None) -> Any:
    disable = None if progress is None else not progress  # None: unless standard error is a terminal
    return tqdm(desc=f"writing {name}", unit=" rows", unit_scale=True, disable=disable, leave=False)


def features_of(schema: pa.Schema, datasets: Any) -> Any:
    """The types of `datasets` for some columns. JSON becomes text."""
    features: dict[str, Any] = {}
    for field in schema:
        kind = field.type.storage_type if isinstance(field.type, pa.BaseExtensionType) else field.type
        try:
            if _has_empty_struct(kind):
                raise NotImplementedError("parquet has no objects without keys")
            features |= datasets.Features.from_arrow_schema(pa.schema([field.with_type(kind)]))
        except (ValueError, NotImplementedError) as error:
            raise DataError(
                f"column {field.name!r} of type {field.type!s:.60} cannot be stored by datasets ({error}): leave it "
                "out with columns="
            ) from error
    return datasets.Features(features)


def _has_empty_struct(kind: pa.DataType) -> bool:
    """Whether a type is an object without any keys, or has one in it."""
    children = [kind.field(k).type for k in range(kind.num_fields)]
    return (pa.types.is_struct(kind) and not children) or any(map(_has_empty_struct, children))


def _save_empty(schemas: Mapping[str, pa.Schema], digests: Mapping[str, str], made: Path, datasets: Any) -> None:
    """Lets `datasets` write what it needs to know of each split, with one file without rows.

    `datasets` caches what is made of a dataset under its fingerprint: `digests` of the rows.
    """
    empty = {
        name: datasets.Dataset(without_rows(schema), fingerprint=digests[name]) for name, schema in schemas.items()
    }
    with no_bars_of_datasets():
        datasets.DatasetDict(empty).save_to_disk(str(made), num_shards=dict.fromkeys(empty, 1))


def _write_rows(
    reader: pa.RecordBatchReader, schema: pa.Schema, store: Path, parquet: Path, progress: bool | None
) -> int:
    """Writes the rows of a split into two files, and returns how many there are."""
    written = 0
    with ExitStack() as stack:
        file = stack.enter_context(open(store, "wb"))
        stream = stack.enter_context(pa.ipc.new_stream(file, schema))
        groups = stack.enter_context(pq.ParquetWriter(parquet, schema, compression="zstd", data_page_size=_PAGE_BYTES))
        bar = stack.enter_context(_bar(parquet.name, progress))
        waiting: list[pa.Table] = []
        for batch in reader:
            waiting.append(with_types(pa.Table.from_batches([batch]), schema))
            stream.write_table(waiting[-1])
            written += batch.num_rows
            bar.update(batch.num_rows)
            if sum(table.nbytes for table in waiting) >= LEAST_GROUP_BYTES:
                _write_groups(groups, waiting)
        _write_groups(groups, waiting)
    return written


def _write_groups(writer: pq.ParquetWriter, waiting: list[pa.Table]) -> None:
    """Writes some tables as one row group, or, if they are larger than one should be, as several, and forgets them."""
    if waiting:
        table = pa.concat_tables(waiting)
        waiting.clear()
        writer.write_table(table, rows_of_group(table.num_rows, table.nbytes))
