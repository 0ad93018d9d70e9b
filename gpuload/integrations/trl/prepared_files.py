"""Prepared datasets in files, so that ranks share one and the next start maps it.

They are next to the dataset's own files in the cache of `datasets`, as the results of its `map`: all ranks of a machine
map the same pages, and `cleanup_cache_files` removes them. A dataset that is in memory stays there, as in TRL.
"""

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import trl
from datasets.fingerprint import Hasher
from datasets.table import MemoryMappedTable

from gpuload.cache.key import decides_ids, uncacheable_reason
from gpuload.core.files import replacing
from gpuload.core.options import Options
from gpuload.integrations.known_code import digest
from gpuload.reference.reference import Reference

_BATCH = 10_000  # rows of a record batch: `datasets` looks for a row among these


def file_of(call: Any, dataset: Any) -> Path | None:
    """The file of what a call of `_prepare_dataset` makes of a dataset with explicit prompts; None if the dataset is in
    memory, nothing is to be cached, or nothing identifies what is made."""
    files = dataset.cache_files
    if not files or not datasets.is_caching_enabled() or (key := _key(call, dataset)) is None:
        return None
    return Path(files[0]["filename"]).parent / f"cache-gpuload-{key}.arrow"


def _key(call: Any, dataset: Any) -> str | None:
    trainer, args = call.trainer, call.args
    reference = Reference(call.tokenizer, chat_template=call.chat_template)
    with reference.clock_stopped() as clock:
        code = digest(call.stock)
        if code is None or uncacheable_reason(reference, clock):
            return None
        ids = decides_ids(reference, Options(), clock)
    names = ("max_length", "truncation_mode", "assistant_only_loss", "dataset_text_field")
    settings = [getattr(args, name, None) for name in names]
    settings += [call.given.get("packing"), getattr(trainer, "completion_only_loss", None)]
    if getattr(trainer, "calculate_KL", False):  # then rows depend on the others of their batch
        settings += [args.per_device_train_batch_size, args.dataset_num_proc]
    about = [code, trl.__version__, datasets.__version__, type(call.processor).__qualname__]
    return str(Hasher.hash([about, dataset._fingerprint, ids, settings]))


def read(file: Path, schema: pa.Schema) -> Any | None:
    """The mapped table of `datasets`; None if there is none with these columns, or it is damaged."""
    try:
        table = MemoryMappedTable.from_file(str(file))
        return table if table.schema.remove_metadata() == schema.remove_metadata() else None
    except (OSError, pa.ArrowException):
        return None


def write(table: pa.Table, file: Path) -> None:
    """Writes a table, or raises an `OSError`. Nobody sees an unfinished file, and of several writers, one wins."""
    with replacing(file) as made, pa.OSFile(str(made), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table, _BATCH)
