"""The footer of a parquet file, and the pages of one column as they are in the file."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, BinaryIO, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from gpuload.core.files import open_regular
from gpuload.sources.types import is_list

LEAST_GROUP_BYTES, _MOST_GROUP_BYTES = 64 << 20, 128 << 20
"""Of a row group's values, before they are compressed. Threads, and the blocks of a GPU, decode row groups side
by side, so a file should have several; smaller ones cost more to open and to start than they save (arXiv 2602.17335).
"""

_SLACK = 128  # old writers understate a column chunk's size by up to this many bytes, its dictionary's header


def check_names(fields: Iterable[pa.Field], footer: bytes) -> None:
    """Checks what a footer, which has no checksum, tells twice: each name is in the schema and in each row group; an
    `ArrowInvalid` if one is there once only. They are counted in its bytes, because pyarrow aborts the process when
    asked for the chunks of a damaged row group."""
    for field in fields:
        name, kind = field.name.encode(), field.type
        length = [len(name)] if len(name) < 128 else [len(name) & 127 | 128, len(name) >> 7 & 127]
        if len(name) < 1 << 14 and footer.count(bytes(length) + name) < 2:
            raise pa.ArrowInvalid(f"its footer has the name {field.name!r} only once")
        while is_list(kind) or pa.types.is_fixed_size_list(kind):
            kind = kind.value_type
        if pa.types.is_struct(kind):
            check_names(kind, footer)


def read_footer(raw: BinaryIO) -> tuple[int, bytes]:
    """The size of a parquet file, and its footer: the last 8 bytes are its length and the magic number."""
    size = raw.seek(0, 2)
    raw.seek(max(0, size - 8))
    length = int.from_bytes(raw.read(4), "little")
    raw.seek(max(0, size - 8 - length))
    return size, raw.read()


def decoded_size(metadata: pq.FileMetaData, names: Collection[str] | None) -> int:
    """Bytes of some columns, or with None of all, before they were compressed; more in memory if they are encoded with
    dictionaries."""
    groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
    if names is None:  # without a look at every chunk: each load asks for this
        return sum(group.total_byte_size for group in groups)
    chunks = (group.column(number) for group in groups for number in range(group.num_columns))
    try:
        return sum(chunk.total_uncompressed_size for chunk in chunks if is_of(chunk, names))
    except UnicodeDecodeError:  # of a column chunk's name; reading the rows will raise the proper error
        return 0


def rows_of_group(rows: int, nbytes: int) -> int:
    """How many rows a row group should have, if so many rows have so many bytes: all, or an equal part of them."""
    return max(1, -(-rows // max(1, -(-nbytes // _MOST_GROUP_BYTES))))


def single_group(path: str, name: str) -> str | None:
    """A remark about a large parquet file that is one row group, with the way to rewrite it, and its `name`; None for
    other files."""
    with open_regular(path) as raw:
        metadata = pq.read_metadata(raw)
    size = decoded_size(metadata, None)
    if metadata.num_row_groups != 1 or (rows := rows_of_group(metadata.num_rows, size)) == metadata.num_rows:
        return None
    return (
        f"{name}: one row group of {size / 1e6:,.0f} MB, which a single thread has to decode: rewrite the file with "
        f"several, pq.write_table(pq.read_table({name!r}), 'new.parquet', row_group_size={rows}) with "
        "import pyarrow.parquet as pq"
    )


def is_of(chunk: Any, names: Collection[str]) -> bool:
    """Whether a column chunk is one of some columns, or inside of one."""
    return any((chunk.path_in_schema + ".").startswith(name + ".") for name in names)


class Reopened(Protocol):
    """A file that can be opened for reading: `LocalFile`, or one on a server."""

    def open(self) -> AbstractContextManager[BinaryIO]: ...


def column_digest(file: Reopened, *names: str, groups: range | None = None) -> bytes:
    """Digest of the footer and of the raw pages of some columns, in some row groups or in all. Anything less may stay
    the same when a value is changed in place: the size, the times, the footer's statistics."""
    whole, parts = digests_of_parts(file, names, [] if groups is None else [groups], only_parts=groups is not None)
    return whole if groups is None else parts[0]


def digests_of_parts(
    file: Reopened, names: Collection[str], parts: Sequence[range], only_parts: bool = False
) -> tuple[bytes, list[bytes]]:
    """The digest of some columns of a file, and those of some parts of the file, consecutive row groups, in one pass
    over it. With `only_parts`, others are not read; the digest of the whole is of no use then."""
    whole = hashlib.blake2b(digest_size=16)
    digests = [hashlib.blake2b(digest_size=16) for _ in parts]
    with file.open() as raw:
        footer = read_footer(raw)[1]
        metadata = pq.read_metadata(raw)
        whole.update(footer)
        for digest, groups in zip(digests, parts, strict=True):
            digest.update(footer + repr(groups).encode())
        for group in range(metadata.num_row_groups):
            into = [digest for digest, groups in zip(digests, parts, strict=True) if group in groups]
            if not only_parts:
                into.append(whole)
            for block in _pages(raw, metadata.row_group(group), names) if into else ():
                for digest in into:
                    digest.update(block)
    return whole.digest(), [digest.digest() for digest in digests]


def _pages(raw: BinaryIO, row_group: Any, names: Collection[str]) -> Iterator[bytes]:
    """The raw pages of some columns, and of those inside of them."""
    for number in range(row_group.num_columns):
        chunk = row_group.column(number)
        if is_of(chunk, names):
            raw.seek(min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset))
            left = chunk.total_compressed_size + _SLACK
            while left and (block := raw.read(min(left, 1 << 20))):
                yield block
                left -= len(block)


def damage_of(path: str, error: Exception) -> str:
    """Describes a file that Arrow cannot open. Parquet files begin and end with PAR1."""
    try:
        with open_regular(path) as raw:
            head = raw.read(4)
            raw.seek(-min(4, raw.seek(0, 2)), 2)
            tail = raw.read(4)
    except OSError:
        return f"cannot read the file: {error}"
    if not head:
        return "the file is empty"
    if head != b"PAR1":
        return f"not a parquet file: it starts with {head!r}"
    if tail != b"PAR1":
        return "truncated parquet file, its end is missing: download it again"
    return f"damaged parquet file ({error}): download it again"
