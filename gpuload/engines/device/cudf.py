"""Parquet straight into GPU memory: cuDF, through its low-level library pylibcudf, reads the prompt column and no
other. Also columns of a `cudf.DataFrame`, which are in GPU memory already.

What cuDF decoded is used zero-copy: offsets, characters and masks become arrays through `__cuda_array_interface__`.
Only numbers are computed: 64-bit starts and lengths from the offsets, one byte per value from the masks.

cuDF works on the thread's current stream, as kernels do. Its own default would be the legacy default stream.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Array
from gpuload.core.errors import DeviceError
from gpuload.engines.conversations import EMPTY, NULL, OTHER, TEXTS, Conversations, Field, from_texts, type_name
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.store import DeviceStore
from gpuload.engines.device.texts import DeviceTexts
from gpuload.engines.protocol import TextColumn, TokenStore
from gpuload.sources.types import is_list, is_messages, is_plain, is_text

if TYPE_CHECKING:
    import pylibcudf as plc

_LEAST_CHUNK = 8 << 20


def can_read(kind: pa.DataType) -> bool:
    """Whether cuDF can read a prompt column of this type: strings, or lists of messages that are plain data. Of other
    values it makes other Python objects than Arrow does: durations of times, texts of bytes."""
    return is_text(kind) or (is_messages(kind) and is_plain(kind))


def chunks(
    kernels: Kernels, path: str, column: str, kind: pa.DataType, nbytes: int, first: int | None = None
) -> Iterator[Conversations]:
    """The prompt column of a local parquet file, chunk by chunk, all of them on the same stream.

    Args:
        nbytes: about how large a decoded chunk is. Halved where memory runs out.
        first: the same for the first chunk; None for `nbytes`.

    Raises:
        DeviceError: there is no memory even for a small chunk.
        RuntimeError: cuDF and Arrow disagree on the fields of messages.
    """
    from pylibcudf.io import parquet
    from pylibcudf.io.types import SourceInfo

    done, limit = 0, first or nbytes
    part: Any = None
    while True:
        # Otherwise cuDF would decode the index columns of pandas, too.
        options = parquet.ParquetReaderOptions.builder(SourceInfo([path])).use_pandas_metadata(False).build()
        options.set_column_names([column])  # the builder of cuDF 26.6 has no such method
        if done:
            options.set_skip_rows(done)
        try:
            # The second limit bounds how much is decompressed at a time.
            reader = parquet.ChunkedParquetReader(
                options, stream=kernels.stream(), chunk_read_limit=limit, pass_read_limit=2 * limit
            )
            more = reader.has_next()
        except MemoryError:
            nbytes = limit = _smaller(limit)
            continue
        while more:
            try:
                part = reader.read_chunk()
                more = reader.has_next()
            except MemoryError:
                part = None  # read again, in smaller chunks
                nbytes = _smaller(limit)
                break
            done += part.tbl.num_rows()
            if part.tbl.num_rows():
                found = of_cudf(kernels, part.columns[0], kind, part.child_names.get(column, {}))
                del part  # so that a chunk its consumer has finished with is freed before the next is read
                yield found
                del found
            if more and limit < nbytes:  # that was the first chunk
                break
        else:
            return
        del reader  # and its buffers, before the next one allocates
        limit = nbytes


def slices(kernels: Kernels, series: Any, kind: pa.DataType, nbytes: int) -> Iterator[Conversations]:
    """The prompt column of a `cudf.Series`, which is in device memory already: parts of about `nbytes`, zero-copy."""
    column, _ = series.to_pylibcudf()
    rows = column.size()
    step = max(1, rows * nbytes // max(1, column.device_buffer_size()))
    names: dict[str, Any] = {}
    if is_list(kind):
        names = {"element": {field.name: {} for field in kind.value_type}}
    for low in range(0, rows, step):
        yield of_cudf(kernels, _sliced(kernels, column, low, min(rows, low + step)), kind, names)


def _sliced(kernels: Kernels, column: "plc.Column", low: int, high: int) -> "plc.Column":
    import pylibcudf as plc

    start, size = column.offset() + low, high - low
    nulls = int(kernels.xp.count_nonzero(~_valid(kernels, column, start, size)))
    return plc.Column(column.type(), size, column.data(), column.null_mask(), nulls, start, column.children())


def frame_of(columns: pa.Table, store: TokenStore | None = None) -> Any:
    """A `cudf.DataFrame` of n rows of columns, and of ids if there are any: `raw_prompt_ids`, a list of int32 per row.
    Both are copied to the device, or on it.

    Raises:
        DeviceError: cuDF is not installed, or there are more ids than a cuDF column of lists can hold.
    """
    try:
        import cudf
        import cupy
        import pylibcudf as plc
    except ImportError as error:
        raise DeviceError(f"to_cudf needs cuDF ({error}): pip install 'gpuload[cudf-cu13]'") from error
    if store is None:
        return cudf.DataFrame.from_arrow(columns)
    if (count := int(store.lengths.sum())) > np.iinfo(np.int32).max:
        raise DeviceError(
            f"to_cudf: {count:,} ids exceed the limit of a cuDF column of lists, "
            f"{np.iinfo(np.int32).max:,}: load fewer rows"
        )
    tokens = store.joined() if isinstance(store, DeviceStore) else store.to_host()
    made = plc.Column.from_cuda_array_interface
    with tokens.values.device if isinstance(tokens.values, cupy.ndarray) else nullcontext():
        children = [made(cupy.asarray(tokens.offsets).astype(np.int32)), made(cupy.asarray(tokens.values))]
        ids = plc.Column(plc.DataType(plc.TypeId.LIST), len(tokens), None, None, 0, 0, children)
        frame = cudf.DataFrame.from_arrow(columns)
        frame["raw_prompt_ids"] = cudf.Series.from_pylibcudf(ids)
    return frame


def _smaller(nbytes: int) -> int:
    if nbytes <= _LEAST_CHUNK:
        raise DeviceError(
            "out of GPU memory while reading: raise gpu_memory_limit, free GPU memory, or use device='cpu'"
        )
    return nbytes // 2


def of_cudf(kernels: Kernels, column: "plc.Column", kind: pa.DataType, child_names: Mapping[str, Any]) -> Conversations:
    """A `pylibcudf.Column`, of this Arrow type in the file, as conversations, without copying text; a `RuntimeError` if
    cuDF and Arrow disagree on the fields of messages: Arrow should read them."""
    xp, ops = kernels.xp, DeviceTexts(kernels)
    valid = _valid(kernels, column, column.offset(), column.size())

    def fetch(rows: np.ndarray[Any, Any]) -> pa.Array:
        return _to_arrow(kernels, column, kind, rows)

    if is_text(kind):
        return from_texts(ops, _texts(kernels, column, 0, column.size(), valid), valid, fetch)
    low, size = column.offset(), column.size()
    offsets = _numbers(kernels, column.list_view().offsets())[low : low + size + 1].astype(np.int64)
    structs = column.list_view().child()
    names = _field_names(child_names, [field.name for field in kind.value_type])
    there = _valid(kernels, structs, structs.offset(), structs.size())
    fields = []
    for i, name in enumerate(names):
        word = type_name(kind.value_type.field(name).type)
        fields.append(_field(kernels, name, word, structs.child(i), structs.offset(), structs.size(), there))
    return Conversations(ops, valid, offsets[:-1], xp.diff(offsets), there, fields, fetch)


def _field_names(child_names: Mapping[str, Any], expected: list[str]) -> list[str]:
    """The struct's fields in cuDF's order. A list has two children, its offsets and its values, with names that differ
    between versions of cuDF: the one with the expected fields is the values."""
    for children in child_names.values():
        if sorted(children) == sorted(expected):
            return list(children)
    raise RuntimeError(f"cuDF and Arrow disagree on the fields of messages ({child_names} and {expected})")


def _field(kernels: Kernels, name: str, word: str, values: "plc.Column", shift: int, size: int, there: Array) -> Field:
    """One field of all messages: `size` values of a column, starting at number `shift`."""
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
    """`size` texts of a string column, starting at number `shift`; a null is empty."""
    xp, chars = kernels.xp, column.data()
    data = xp.zeros(0, np.uint8) if chars is None else kernels.view(chars)
    if not size:
        return TextColumn(data, xp.zeros(0, np.int64), xp.zeros(0, np.int64))
    low = column.offset() + shift
    offsets = _numbers(kernels, column.child(0))[low : low + size + 1].astype(np.int64)
    return TextColumn(data, offsets[:-1], xp.where(valid, xp.diff(offsets), 0))


def _numbers(kernels: Kernels, column: "plc.Column") -> Array:
    """A column of offsets, zero-copy: INT32, or INT64 where there are more than 2 GB of characters."""
    import pylibcudf as plc

    dtype = np.int64 if column.type().id() == plc.TypeId.INT64 else np.int32
    buffer = column.data()
    if buffer is None:
        return kernels.xp.zeros(1, dtype)
    return kernels.view(buffer).view(dtype)[column.offset() : column.offset() + column.size()]


def _valid(kernels: Kernels, column: "plc.Column", low: int, size: int) -> Array:
    """(size,) bool from Arrow's validity mask: one bit per value, 1 where it is not null, lowest bit first."""
    xp, mask = kernels.xp, column.null_mask()
    if mask is None or not size:
        return xp.ones(size, bool)
    first = low // 8  # unpack whole bytes, then drop the bits before `low`
    bits = xp.unpackbits(kernels.view(mask)[first : (low + size + 7) // 8], bitorder="little")
    return bits[low - 8 * first : low - 8 * first + size].astype(bool)


def _to_arrow(kernels: Kernels, column: "plc.Column", kind: pa.DataType, rows: np.ndarray[Any, Any]) -> pa.Array:
    """Some rows of a column, copied to the host."""
    import pylibcudf as plc

    with kernels.current():
        numbers = plc.Column.from_cuda_array_interface(kernels.xp.asarray(np.asarray(rows, np.int32)))
        policy = plc.copying.OutOfBoundsPolicy.DONT_CHECK
        stream = kernels.stream()
        taken = plc.copying.gather(plc.Table([column]), numbers, policy, stream=stream).columns()[0]
        return pa.array(taken.to_arrow(_metadata("", kind), stream=stream))


def _metadata(name: str, kind: pa.DataType) -> Any:
    """Names for a column and its children: a pylibcudf column has none."""
    from pylibcudf.interop import ColumnMetadata

    children: list[Any] = []
    if is_list(kind):
        children = [ColumnMetadata("offsets"), _metadata("element", kind.value_type)]
    elif pa.types.is_struct(kind):
        children = [_metadata(field.name, field.type) for field in kind]
    return ColumnMetadata(name=name, children_meta=children)
