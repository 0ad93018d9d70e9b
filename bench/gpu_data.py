"""The data of a GPU record: what is at hand, and larger files and texts made of it by repetition and variation."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench.gpu_run import MissingError, Task

KINDS = {
    "short": "single messages of less than 2,000 bytes",
    "long": "the same texts joined to documents of about 64 KiB",
    "multilingual": "messages of which a tenth of the bytes and more is not the first of its character",
}
_SHORT, _LONG = 2000, 64 << 10


def conversations(file: str) -> pa.ListArray | None:
    """A file's prompts as list<struct<role, content>>; None where they are of another type, or some are null."""
    schema = pq.read_schema(file)
    kind = schema.field("prompt").type if "prompt" in schema.names else pa.null()
    if not pa.types.is_list(kind) or not pa.types.is_struct(kind.value_type):
        return None
    prompts = pq.read_table(file, columns=["prompt"])["prompt"].combine_chunks()
    structs, names = prompts.flatten(), [field.name for field in kind.value_type]
    if sorted(names) != ["content", "role"] or prompts.null_count or structs.null_count:
        return None
    role, content = (structs.field(names.index(name)).cast(pa.string()) for name in ("role", "content"))
    if role.null_count or content.null_count or not len(prompts):
        return None
    offsets = pc.subtract(prompts.offsets, prompts.offsets[0])
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays([role, content], ["role", "content"]))


def at_hand(task: Task) -> dict[str, pa.ListArray]:
    """File → its prompts, of the files whose prompts can be varied.

    Raises:
        MissingError: there is none.
    """
    read = {file: conversations(file) for file in task.files}
    found = {file: prompts for file, prompts in read.items() if prompts is not None}
    if not found:
        raise MissingError("no file with prompts of list<struct<role, content>>: pass --data")
    return found


def made_file(task: Task, rows: int) -> str:
    """A parquet file in verl's format with so many rows, made once: the prompts at hand, over and over, each time with
    another ending to every message. A row group is one round of one file."""
    path = Path(task.scratch) / f"made-{rows}.parquet"
    if path.exists():
        return str(path)
    partly, left, writer = path.with_suffix(".part"), rows, None
    parts = at_hand(task)
    for number in itertools.count():
        for file, prompts in parts.items():
            table = _in_verls_format(_varied(prompts, number)[:left], Path(file).stem, rows - left)
            writer = writer or pq.ParquetWriter(partly, table.schema)
            writer.write_table(table)
            left -= table.num_rows
            if not left:
                writer.close()
                partly.rename(path)
                return str(path)
    raise AssertionError


def texts(task: Task, kind: str, nbytes: int) -> pa.LargeStringArray:
    """Texts of one of the `KINDS`, about so many bytes in all, as one array without nulls.

    Raises:
        MissingError: the data at hand has no such texts.
    """
    some = _of_kind(task, kind)
    if not len(some):
        raise MissingError(f"the data at hand has no such texts ({KINDS[kind]}): pass --data")
    rounds = -(-nbytes // max(1, _size(some)))
    suffixes = ["", *(f" {number}" for number in range(1, rounds))]
    whole = pa.concat_arrays([_with_ending(some, suffix) for suffix in suffixes])
    ends = np.cumsum(np.asarray(pc.binary_length(whole), np.int64))
    whole = whole[: int(np.searchsorted(ends, nbytes)) + 1]
    return _joined(whole) if kind == "long" else whole


def messages(file: str) -> pa.LargeStringArray:
    """The texts of all messages of a file; none where `conversations` takes it not."""
    prompts = conversations(file)
    if prompts is None:
        return pa.array([], pa.large_string())
    return prompts.flatten().field("content").cast(pa.large_string())


def flat(text: pa.LargeStringArray) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Texts as kernels take them: uint8 characters, (n + 1,) int64 offsets from 0; views where that is possible."""
    _, offsets, data = text.buffers()
    bounds = np.frombuffer(offsets, np.int64)[text.offset : text.offset + len(text) + 1] if len(text) else np.zeros(1)
    bounds = bounds.astype(np.int64)
    return np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]], bounds - bounds[0]


def in_parts(text: pa.LargeStringArray, rows: int = 8192) -> Iterator[pa.LargeStringArray]:
    for start in range(0, len(text), rows):
        yield text.slice(start, rows)


def _size(text: pa.LargeStringArray) -> int:
    return int(pc.sum(pc.binary_length(text)).as_py() or 0)


def _of_kind(task: Task, kind: str) -> pa.LargeStringArray:
    whole = pa.concat_arrays([messages(file) for file in task.files])
    size, characters = pc.binary_length(whole), pc.utf8_length(whole)
    foreign = pc.greater_equal(pc.multiply(pc.subtract(size, characters.cast(size.type)), 10), size)
    foreign = pc.and_(foreign, pc.greater(size, 0))
    if kind == "multilingual":
        return whole.filter(foreign)
    return whole.filter(pc.and_(pc.invert(foreign), pc.and_(pc.less(size, _SHORT), pc.greater(size, 0))))


def _joined(text: pa.LargeStringArray) -> pa.LargeStringArray:
    """The texts with blank lines between them, cut into documents only where one ends."""
    data, offsets = flat(_with_ending(text, "\n\n"))
    cuts = np.unique(np.searchsorted(offsets, np.arange(0, offsets[-1], _LONG)))
    bounds = np.unique(np.concatenate([offsets[cuts], offsets[-1:]]))
    return pa.LargeStringArray.from_buffers(len(bounds) - 1, pa.py_buffer(bounds), pa.py_buffer(data))


def _varied(prompts: pa.ListArray, number: int) -> pa.ListArray:
    structs = prompts.flatten()
    content = structs.field("content")
    if number:
        content = _with_ending(content, f" [{number}]")
    values = pa.StructArray.from_arrays([structs.field("role"), content], ["role", "content"])
    return pa.ListArray.from_arrays(prompts.offsets, values)


def _with_ending(text: pa.Array, ending: str) -> pa.Array:
    return pc.binary_join_element_wise(text, pa.scalar(ending, text.type), pa.scalar("", text.type))


def _in_verls_format(prompts: pa.ListArray, name: str, first: int) -> pa.Table:
    rows = len(prompts)
    index = pa.array(np.arange(first, first + rows))
    answer = pa.StructArray.from_arrays([index.cast(pa.string()), pa.repeat("rule", rows)], ["ground_truth", "style"])
    columns = {"data_source": pa.repeat(name, rows), "prompt": prompts, "ability": pa.repeat("text", rows)}
    extra = pa.StructArray.from_arrays([index, pa.repeat("train", rows)], ["index", "split"])
    return pa.table(columns | {"reward_model": answer, "extra_info": extra})
