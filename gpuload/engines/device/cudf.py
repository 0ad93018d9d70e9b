"""Parquet straight into a GPU's memory: cuDF, by its low-level half pylibcudf, reads the prompt column and no other;
and columns of cuDF's that lie there already.

What cuDF decoded is used as it lies: offsets, characters and masks become arrays through `__cuda_array_interface__`,
with no copy. Only numbers are made anew: offsets as starts and lengths of 64 bits, masks as one byte a value.

Everything runs on the legacy default stream, cuDF's own default and that of every thread of a load, so nothing here
waits for anything.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gpuload.arrays import Array, Ragged
from gpuload.engines.device.conversations import (
    EMPTY,
    NULL,
    OTHER,
    TEXTS,
    Conversations,
    Field,
    is_text,
    of_texts,
    word_for,
)
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.texts import TextColumn
from gpuload.errors import DeviceError

if TYPE_CHECKING:
    import pylibcudf as plc

_LEAST_CHUNK = 8 << 20


def can_read(kind: pa.DataType) -> bool:
    """Whether a prompt column of this type is for cuDF: texts, or lists of messages."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_text(kind) or bool(is_list and pa.types.is_struct(kind.value_type))


def chunks(kernels: Kernels, path: str, column: str, kind: pa.DataType, nbytes: int) -> Iterator[Conversations]:
    """The prompt column of a file, chunk by chunk.

    Args:
        path: a local parquet file.
        column: its name there.
        kind: Arrow's type of it.
        nbytes: a chunk is about so large once decoded. It is halved where memory runs out.

    Raises:
        DeviceError: there is not even memory for a small chunk, or cuDF sees other fields than Arrow.
    """
    from pylibcudf.io import parquet
    from pylibcudf.io.types import SourceInfo

    done = 0
    while True:
        options = parquet.ParquetReaderOptions.builder(SourceInfo([path])).build()
        options.set_column_names([column])  # which the builder of cuDF 26.6 does not know
        if done:
            options.set_skip_rows(done)
        try:
            # The second limit bounds what is decompressed at a time.
            reader = parquet.ChunkedParquetReader(options, chunk_read_limit=nbytes, pass_read_limit=2 * nbytes)
            more = reader.has_next()
        except MemoryError:
            nbytes = _smaller(nbytes)
            continue
        while more:
            try:
                part = reader.read_chunk()
                more = reader.has_next()
            except MemoryError:
                break
            done += part.tbl.num_rows()
            if part.tbl.num_rows():
                found = of_cudf(kernels, part.columns[0], kind, part.child_names.get(column, {}))
                del part  # a chunk that its user is done with is gone before the next one is read
                yield found
                del found
        else:
            return
        del reader  # and what it holds, before there is another one
        nbytes = _smaller(nbytes)


def slices(kernels: Kernels, series: Any, kind: pa.DataType, nbytes: int) -> Iterator[Conversations]:
    """A prompt column that lies in device memory already, some rows at a time, with no copy.

    Args:
        series: a `cudf.Series`.
        kind: Arrow's type of it.
        nbytes: a part is about so large.
    """
    column, _ = series.to_pylibcudf()
    rows = column.size()
    step = max(1, rows * nbytes // max(1, column.device_buffer_size()))
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    names: dict[str, Any] = {"element": {field.name: {} for field in kind.value_type}} if is_list else {}
    for low in range(0, rows, step):
        yield of_cudf(kernels, _sliced(kernels, column, low, min(rows, low + step)), kind, names)


def _sliced(kernels: Kernels, column: "plc.Column", low: int, high: int) -> "plc.Column":
    import pylibcudf as plc

    start, size = column.offset() + low, high - low
    nulls = int(kernels.xp.count_nonzero(~_valid(kernels, column, start, size)))
    return plc.Column(column.type(), size, column.data(), column.null_mask(), nulls, start, column.children())


def frame_of(columns: pa.Table, tokens: Ragged) -> Any:
    """A `cudf.DataFrame` of columns and rows of ids.

    Args:
        columns: n rows, copied to the device.
        tokens: n rows; used as they lie where that is the device.

    Returns:
        The columns and `raw_prompt_ids`, a list of int32 a row.

    Raises:
        DeviceError: cuDF is not installed, or there are more ids than a column of lists can have.
    """
    try:
        import cudf
        import cupy
        import pylibcudf as plc
    except ImportError as error:
        raise DeviceError(f"to_cudf needs cuDF ({error}): pip install 'gpuload[cudf-cu13]'") from error
    if len(tokens.values) > np.iinfo(np.int32).max:
        raise DeviceError(f"{len(tokens.values):,} ids are more than a cuDF column of lists can have: take fewer rows")
    made = plc.Column.from_cuda_array_interface
    with tokens.values.device if isinstance(tokens.values, cupy.ndarray) else nullcontext():
        children = [made(cupy.asarray(tokens.offsets).astype(np.int32)), made(cupy.asarray(tokens.values))]
        ids = plc.Column(plc.DataType(plc.TypeId.LIST), len(tokens), None, None, 0, 0, children)
        frame = cudf.DataFrame.from_arrow(columns)
        frame["raw_prompt_ids"] = cudf.Series.from_pylibcudf(ids)
    return frame


def _smaller(nbytes: int) -> int:
    if nbytes <= _LEAST_CHUNK:
        raise DeviceError("out of GPU memory while reading: raise gpu_memory_limit, free memory, or use device='cpu'")
    return nbytes // 2


def of_cudf(kernels: Kernels, column: "plc.Column", kind: pa.DataType, child_names: Mapping[str, Any]) -> Conversations:
    """A column of cuDF's (`pylibcudf.Column`) as conversations, with no copy of text.

    Args:
        kind: Arrow's type of the column in the file.
        child_names: cuDF's names of its children.

    Raises:
        DeviceError: cuDF sees other fields than Arrow.
    """
    xp = kernels.xp
    valid = _valid(kernels, column, column.offset(), column.size())

    def fetch(rows: list[int]) -> pa.Array:
        return _to_arrow(kernels, column, kind, rows)

    if is_text(kind):
        return of_texts(kernels, _texts(kernels, column, 0, column.size(), valid), valid, fetch)
    low, size = column.offset(), column.size()
    offsets = _numbers(kernels, column.list_view().offsets())[low : low + size + 1].astype(np.int64)
    structs = column.list_view().child()
    names = _field_names(child_names, [field.name for field in kind.value_type])
    there = _valid(kernels, structs, structs.offset(), structs.size())
    fields = []
    for i, name in enumerate(names):
        word = word_for(kind.value_type.field(name).type)
        fields.append(_field(kernels, name, word, structs.child(i), structs.offset(), structs.size(), there))
    return Conversations(kernels, valid, offsets[:-1], xp.diff(offsets), there, fields, fetch)


def _field_names(child_names: Mapping[str, Any], expected: list[str]) -> list[str]:
    """The struct's fields in cuDF's order. A list's children are its offsets and its values, whatever it calls them."""
    for children in child_names.values():
        if sorted(children) == sorted(expected):
            return list(children)
    raise DeviceError(f"cuDF and Arrow see different fields of messages ({child_names}, {expected}): use device='cpu'")


def _field(kernels: Kernels, name: str, word: str, values: "plc.Column", shift: int, size: int, there: Array) -> Field:
    """One field of all messages: `size` values of a column from its number `shift` on."""
    import pylibcudf as plc

    xp, kind = kernels.xp, values.type().id()
    valid = there & _valid(kernels, values, shift + values.offset(), size)
    if kind == plc.TypeId.STRING:
        return Field(name, xp.where(valid, TEXTS, NULL), _texts(kernels, values, shift, size, valid))
    kinds = xp.where(valid, OTHER, NULL)
    if kind == plc.TypeId.LIST:
        low = shift + values.offset()
        lengths = xp.diff(_numbers(kernels, values.list_view().offsets())[low : low + size + 1])
        kinds = xp.where(valid & (lengths == 0), EMPTY, kinds)
    return Field(name, kinds, None, word)


def _texts(kernels: Kernels, column: "plc.Column", shift: int, size: int, valid: Array) -> TextColumn:
    """`size` texts of a string column from number `shift` on; a null is an empty one."""
    xp, chars = kernels.xp, column.data()
    data = xp.zeros(0, np.uint8) if chars is None else kernels.view(chars)
    if not size:
        return TextColumn(data, xp.zeros(0, np.int64), xp.zeros(0, np.int64))
    low = column.offset() + shift
    offsets = _numbers(kernels, column.child(0))[low : low + size + 1].astype(np.int64)
    return TextColumn(data, offsets[:-1], xp.where(valid, xp.diff(offsets), 0))


def _numbers(kernels: Kernels, column: "plc.Column") -> Array:
    """A column of offsets as it lies: INT32, or INT64 where there are more than 2 GB of characters."""
    import pylibcudf as plc

    dtype = np.int64 if column.type().id() == plc.TypeId.INT64 else np.int32
    buffer = column.data()
    if buffer is None:
        return kernels.xp.zeros(1, dtype)
    return kernels.view(buffer).view(dtype)[column.offset() : column.offset() + column.size()]


def _valid(kernels: Kernels, column: "plc.Column", low: int, size: int) -> Array:
    """(size,) bool from Arrow's mask: a bit a value, 1 where it is not null, the lowest bit first."""
    xp, mask = kernels.xp, column.null_mask()
    if mask is None or not size:
        return xp.ones(size, bool)
    first = low // 8
    bits = xp.unpackbits(kernels.view(mask)[first : (low + size + 7) // 8], bitorder="little")
    return bits[low - 8 * first : low - 8 * first + size].astype(bool)


def _to_arrow(kernels: Kernels, column: "plc.Column", kind: pa.DataType, rows: list[int]) -> pa.Array:
    """Some rows of a column, copied to the host."""
    import pylibcudf as plc

    with kernels.current():
        numbers = plc.Column.from_cuda_array_interface(kernels.xp.asarray(np.array(rows, np.int32)))
        policy = plc.copying.OutOfBoundsPolicy.DONT_CHECK
        taken = plc.copying.gather(plc.Table([column]), numbers, policy).columns()[0]
        return pa.array(taken.to_arrow(_metadata("", kind)))


def _metadata(name: str, kind: pa.DataType) -> Any:
    """Names for a column and its children, which cuDF's columns do not have themselves."""
    from pylibcudf.interop import ColumnMetadata

    children: list[Any] = []
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        children = [ColumnMetadata("offsets"), _metadata("element", kind.value_type)]
    elif pa.types.is_struct(kind):
        children = [_metadata(field.name, field.type) for field in kind]
    return ColumnMetadata(name=name, children_meta=children)
