"""The footer of a parquet file, and the pages of one column as they are in the file."""

import hashlib
from collections.abc import Iterable
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from gpuload.sources.local import LocalFile
from gpuload.sources.types import is_list

_SLACK = 128  # old writers understate a column chunk's size by up to this many bytes, its dictionary's header


def check_names(fields: Iterable[pa.Field], footer: bytes) -> None:
    """Checks what a footer, which has no checksum, tells twice: each name is in the schema and in each row group. They
    are counted in its bytes, because pyarrow aborts the process when asked for the chunks of a damaged row group.

    Raises:
        ArrowInvalid: a name is there once only.
    """
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


def column_digest(file: LocalFile, name: str) -> bytes:
    """Digest of the footer and of the raw pages of one column. Anything less may stay the same when a value is changed
    in place: the size, the times, the footer's statistics."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open() as raw:
        digest.update(read_footer(raw)[1])
        metadata = pq.read_metadata(raw)
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            for number in range(row_group.num_columns):
                chunk = row_group.column(number)
                if (chunk.path_in_schema + ".").startswith(name + "."):
                    start = min(chunk.data_page_offset, chunk.dictionary_page_offset or chunk.data_page_offset)
                    raw.seek(start)
                    left = chunk.total_compressed_size + _SLACK
                    while left and (block := raw.read(min(left, 1 << 20))):
                        digest.update(block)
                        left -= len(block)
    return digest.digest()
