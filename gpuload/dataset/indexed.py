"""Rows as the indexed datasets of Megatron-core, `megatron.core.datasets.indexed_dataset`: two files for each.

    PREFIX.bin   the values of all sequences, one after the other, and nothing else
    PREFIX.idx   little-endian, without gaps:
                 9 bytes "MMIDIDX\\0\\0", uint64 1 (the version), uint8 code of the values' type (1: uint8, 4: int32),
                 uint64 number of sequences n, uint64 m + 1 for m documents,
                 int32 (n,) lengths, int64 (n,) where each begins in PREFIX.bin, in bytes,
                 int64 (m + 1,) the first sequence of each document, and n

An index says where each sequence begins. Packs are therefore an index alone, over the values of the rows: a document is
a pack, and its sequences are pieces of rows.
"""

import struct
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import RowNumbers, offsets_of
from gpuload.core.arrow import as_numpy
from gpuload.core.errors import DataError
from gpuload.packing import Plan

_FILES: Mapping[str, tuple[str, np.dtype[Any], int]] = {
    "input_ids": ("", np.dtype("<i4"), 4),
    "loss_mask": ("-loss-mask", np.dtype("u1"), 1),
}
"""Column → what follows the prefix of its files, the type of its values, and the type's code."""


def write_rows(reader: pa.RecordBatchReader, prefix: Path, progress: Callable[[int], object]) -> RowNumbers:
    """Writes rows as `PREFIX.bin`, `PREFIX.idx`, `PREFIX-loss-mask.bin` and `PREFIX-loss-mask.idx`, and returns how
    many tokens each has, (n,) int64.

    The columns `input_ids` and `loss_mask` are equally long lists. `progress` is told how many rows have been written
    since the last call.

    Raises:
        DataError: there is no token: Megatron-core cannot open empty files.
        OSError: the files cannot be written.
    """
    lengths = [np.zeros(0, np.int64)]
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(_sibling(prefix, f"{more}.bin").open("wb")) for name, (more, *_) in _FILES.items()
        }
        for batch in reader:
            for name, (_, kind, _) in _FILES.items():
                files[name].write(as_numpy(batch.column(name).flatten()).astype(kind, copy=False).data)
            lengths.append(as_numpy(batch.column("input_ids").value_lengths()).astype(np.int64))
            progress(batch.num_rows)
    made = np.concatenate(lengths)
    if not made.any():
        raise DataError(f"split {prefix.name!r} has no tokens, and Megatron-core cannot open empty files: leave it out")
    _write_index(prefix, made, offsets_of(made)[:-1], np.arange(len(made) + 1))
    return made


def write_packs(prefix: Path, lengths: RowNumbers, plan: Plan) -> None:
    """Writes packs of rows that `write_rows` has written, of `lengths` (n,) tokens, as an index: `PREFIX-packs.idx` and
    `PREFIX-packs-loss-mask.idx`. The values remain where they are: each `.bin` is a symbolic link."""
    packs = _sibling(prefix, "-packs")
    for more, *_ in _FILES.values():
        _sibling(packs, f"{more}.bin").symlink_to(f"{prefix.name}{more}.bin")
    _write_index(packs, plan.lengths, offsets_of(lengths)[plan.rows] + plan.first, plan.offsets)


def _write_index(prefix: Path, lengths: RowNumbers, begins: RowNumbers, documents: RowNumbers) -> None:
    """Writes the indexes of both columns: `lengths` and `begins` (n,), values of each sequence and those before it in
    the file; `documents` (m + 1,), the first sequence of each document, and n."""
    for more, kind, code in _FILES.values():
        with _sibling(prefix, f"{more}.idx").open("wb") as file:
            file.write(struct.pack("<9sQBQQ", b"MMIDIDX", 1, code, len(lengths), len(documents)))
            file.write(lengths.astype("<i4").data)
            file.write((begins * kind.itemsize).astype("<i8").data)
            file.write(documents.astype("<i8").data)


def _sibling(prefix: Path, more: str) -> Path:
    return prefix.with_name(prefix.name + more)
