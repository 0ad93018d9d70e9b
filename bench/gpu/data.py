"""Data of a GPU record: real prompts, and larger files and texts generated from them by repetition and variation."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bench import agents
from bench.gpu.section import MissingError, Task
from gpuload.core.arrays import offsets_of
from gpuload.core.files import replacing

KINDS = {
    "short": "single messages of less than 2,000 bytes",
    "long": "the same texts joined into documents of about 64 KiB",
    "multilingual": "messages in which at least a tenth of the bytes are UTF-8 continuation bytes",
}
_SHORT, _LONG = 2000, 64 << 10


def conversations(file: str) -> pa.ListArray | None:
    """Return a file's prompts as list<struct<role, content>>, or None if they have another type or nulls."""
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


def supported_prompts(task: Task) -> dict[str, pa.ListArray]:
    """Return the prompts of each file that `conversations` supports.

    Raises:
        MissingError: There is no such file.
    """
    read = {file: conversations(file) for file in task.files}
    found = {file: prompts for file, prompts in read.items() if prompts is not None}
    if not found:
        raise MissingError("no file with prompts of list<struct<role, content>>: pass --data")
    return found


def answered(prompts: pa.ListArray) -> pa.ListArray:
    """Return prompts as conversations: user and assistant take turns, and the last message is repeated as an answer."""
    content = prompts.flatten().field("content")
    lengths = np.diff(np.asarray(prompts.offsets))
    bounds, starts = offsets_of(lengths), offsets_of(lengths + 1)
    turn = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths + 1)
    message = np.repeat(bounds[:-1], lengths + 1) + np.minimum(turn, np.repeat(lengths - 1, lengths + 1))
    is_answer = (turn + np.repeat(lengths, lengths + 1)) % 2 == 0
    roles = pa.array(["user", "assistant"]).take(pa.array(is_answer.astype(np.int8)))
    structs = pa.StructArray.from_arrays([roles, content.take(pa.array(message))], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array(starts, pa.int32()), structs)


def paired(prompts: pa.ListArray) -> pa.Table:
    """Return prompts as preference data: the last message is the good answer, that of another row the bad one."""
    content, last = prompts.flatten().field("content"), np.asarray(prompts.offsets)[1:] - 1
    role, each = pa.repeat("assistant", len(last)), pa.array(np.arange(len(last) + 1), pa.int32())
    chosen, rejected = (
        pa.ListArray.from_arrays(
            each, pa.StructArray.from_arrays([role, content.take(pa.array(at))], ["role", "content"])
        )
        for at in (last, np.roll(last, 1))
    )
    return pa.table({"prompt": prompts, "chosen": chosen, "rejected": rejected})


def agent_rows(task: Task, count: int) -> str:
    """Write conversations with tools, calls and results, nearly all of another shape; return the file."""
    draw, file = random.Random(0), Path(task.scratch) / f"agents-{count}.jsonl"
    file.write_text("".join(json.dumps(agents.with_tools(draw)) + "\n" for _ in range(count)))
    return str(file)


def generated_file(task: Task, rows: int) -> str:
    """Generate a parquet file in verl's format, once per record.

    It repeats the real prompts, in each round with another ending of every message. A row group is one round of one
    file.

    Args:
        task: Parameters of the record.
        rows: Number of rows.
    """
    path = Path(task.scratch) / f"generated-{rows}.parquet"
    if path.exists():
        return str(path)
    parts = supported_prompts(task)
    left, writer = rows, None
    rounds = ((number, *part) for number in itertools.count() for part in parts.items())
    with replacing(path) as partial:
        while left:
            number, file, prompts = next(rounds)
            table = _in_verls_format(_varied(prompts, number)[:left], Path(file).stem, rows - left)
            writer = writer or pq.ParquetWriter(partial, table.schema)
            writer.write_table(table)
            left -= table.num_rows
        if writer:
            writer.close()
    return str(path)


def texts(task: Task, kind: str, nbytes: int) -> pa.LargeStringArray:
    """Return about `nbytes` bytes of texts of one of the `KINDS`, as one array without nulls.

    Raises:
        MissingError: The files have no such texts.
    """
    some = _of_kind(task, kind)
    if not len(some):
        raise MissingError(f"no file has {KINDS[kind]}: pass --data")
    rounds = -(-nbytes // max(1, _size(some)))
    suffixes = ["", *(f" {number}" for number in range(1, rounds))]
    whole = pa.concat_arrays([_with_ending(some, suffix) for suffix in suffixes])
    ends = np.cumsum(np.asarray(pc.binary_length(whole), np.int64))
    whole = whole[: int(np.searchsorted(ends, nbytes)) + 1]
    return _joined(whole) if kind == "long" else whole


def messages(file: str) -> pa.LargeStringArray:
    """Return the texts of all messages of a file; none if `conversations` does not support it."""
    prompts = conversations(file)
    if prompts is None:
        return pa.array([], pa.large_string())
    return prompts.flatten().field("content").cast(pa.large_string())


def flat(text: pa.LargeStringArray) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the bytes of texts, uint8, as a view, and their offsets from 0, (n + 1,) int64."""
    _, offsets, data = text.buffers()
    bounds = np.frombuffer(offsets, np.int64)[text.offset : text.offset + len(text) + 1] if len(text) else np.zeros(1)
    bounds = bounds.astype(np.int64)
    return np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]], bounds - bounds[0]


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
    """Join texts with blank lines into documents; a document ends where a text ends."""
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
