"""The engine of a device: rendering and batches by kernels, on NumPy or CuPy arrays.

Tokens are still made on the host: the rendered text goes there once, ids come back once, when all of them are known.
The report says so. Everything here but the reading (`cuda.py`) runs on any machine: the tests give it kernels that were
compiled for the host.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from gpuload.arrays import Array, Ragged
from gpuload.engines.conversations import Conversations, of_arrow
from gpuload.engines.cpu import CpuEngine, HostBatches
from gpuload.engines.launch import Kernels
from gpuload.engines.render import render
from gpuload.errors import DeviceError
from gpuload.options import Truncation
from gpuload.read import Source, with_prompts
from gpuload.template import Rendered
from gpuload.template.prompts import one_user_message
from gpuload.tokenizer.reference import Reference

Reader = Callable[[Source, str, bool], Iterator[tuple[pa.Table, pa.Array]]]


class DeviceEngine:
    """The `Engine` of a device.

    Args:
        kernels: for the device.
        device: torch's name of it.
        reference: the tokenizer.
        exact_only: render and encode with the tokenizer object itself, prompt by prompt; then only batches are the
            device's.
        reader: reads into the device's memory; None: Arrow reads, and the prompt column is copied over once.
    """

    name = "cuda"

    def __init__(
        self,
        kernels: Kernels,
        device: torch.device,
        reference: Reference,
        exact_only: bool = False,
        reader: Reader | None = None,
    ):
        self.device = device
        self._kernels, self._reader = kernels, reader
        self._host = CpuEngine(reference, exact_only)
        self._by_kernels = not self._host.by_prompt and reference.uses_template
        self.notes = self._host.notes
        if self._by_kernels:
            how = self._host.description.removeprefix("cpu: chat template compiled, ")
            self.description = f"{device}: chat template compiled, rendered by kernels; {how} on the host"
            self.notes += ("text is copied to the host once, and its ids back once: there is no device tokenizer yet",)
        else:
            self.description = f"{self._host.description}; batches on {device}"

    def loading(self) -> AbstractContextManager[Any]:
        return self._kernels.loading()

    def read(self, source: Source, prompt_key: str, keep_prompts: bool) -> Iterator[tuple[pa.Table, pa.Array]]:
        if self._reader is None or not self._by_kernels:
            return with_prompts(source, prompt_key)
        return self._reader(source, prompt_key, keep_prompts)

    def render(self, prompts: pa.Array) -> Rendered:
        if not isinstance(prompts, Conversations):
            if not self._by_kernels or not _is_column(prompts.type):
                return self._host.render(prompts)
            if not pa.types.is_list(prompts.type) and not pa.types.is_large_list(prompts.type):
                prompts = one_user_message(prompts.cast(pa.large_string()))
        program = self._host.program
        with self._kernels.current(), program.lock:
            column = prompts if isinstance(prompts, Conversations) else of_arrow(self._kernels, prompts)
            return self._rendered(column)

    def _rendered(self, column: Conversations) -> Rendered:
        try:
            return render(self._kernels, self._host.program, column).to_host()
        except MemoryError as error:
            if len(column) < 2:
                raise DeviceError(
                    "out of GPU memory while rendering: raise gpu_memory_limit, free memory, or use device='cpu'"
                ) from error
        middle = len(column) // 2
        return joined([self._rendered(column.take(part)) for part in np.split(np.arange(len(column)), [middle])])

    def encode(self, rendered: Rendered) -> Ragged:
        return self._host.encode(rendered)

    def batches(self, store: Ragged, limit: int, keep: Truncation, pad_id: int) -> "DeviceBatches":
        return DeviceBatches(self._kernels, store, limit, keep, pad_id)


def joined(parts: list[Rendered]) -> Rendered:
    """The rows of all parts, one after the other."""
    whole, rows, reasons = Rendered(pa.concat_arrays([part.text for part in parts])), 0, Counter[str]()
    for part in parts:
        whole.refused |= {rows + row: reason for row, reason in part.refused.items()}
        whole.compiled_rows += part.compiled_rows
        whole.reference_rows += part.reference_rows
        reasons.update(part.reasons)
        rows += len(part.text)
    whole.reasons = dict(reasons.most_common())
    return whole


def side_by_side(
    chunks: Iterator[Conversations], source: Source, prompt_key: str, keep_prompts: bool
) -> Iterator[tuple[pa.Table, Conversations]]:
    """Two readings of one file, each in parts of its own sizes: every chunk of the prompt column with the table of its
    rows, which has that column only where it must."""
    if keep_prompts or source.without is None or len(source.schema) == 1:  # a table of no columns forgets its rows
        tables = source.batches()
    else:
        tables = source.without(prompt_key)
    waiting: list[pa.Table] = []
    rows = 0
    for chunk in chunks:
        while rows < len(chunk):
            waiting.append(next(tables))
            rows += waiting[-1].num_rows
        table = pa.concat_tables(waiting)
        yield table.slice(0, len(chunk)), chunk
        waiting = [table.slice(len(chunk))]
        rows -= len(chunk)


def _is_column(kind: pa.DataType) -> bool:
    """Whether these are conversations or texts, rather than JSON or nothing but nulls."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return bool(pa.types.is_struct(kind.value_type))
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


class DeviceBatches:
    """The `Batches` of a device, over a copy of the store in its memory: 4 bytes a token.

    In another process, forked or spawned, it makes host tensors: no process may use the CUDA of another.
    """

    def __init__(self, kernels: Kernels, store: Ragged, limit: int, keep: Truncation, pad_id: int):
        self._kernels, self._limit, self._keep, self._pad_id = kernels, limit, keep, pad_id
        self._process = os.getpid()
        with kernels.current():
            self._store = Ragged(kernels.xp.asarray(store.values), kernels.xp.asarray(store.offsets))
            kernels.synchronize()  # batches may be asked for in another stream

    def __call__(self, numbers: np.ndarray[Any, Any], rows: Ragged, width: int) -> dict[str, torch.Tensor]:
        if os.getpid() != self._process:
            return CpuEngine.pad(rows, width, self._pad_id)
        with self._kernels.current():
            at = self._kernels.xp.asarray(numbers)
            return pad(self._kernels, self._store, at, width, self._limit, self._keep, self._pad_id)

    def __reduce__(self) -> tuple[type[HostBatches], tuple[int]]:
        return HostBatches, (self._pad_id,)


def pad(
    kernels: Kernels, store: Ragged, rows: Array, width: int, limit: int, keep: Truncation, pad_id: int
) -> dict[str, torch.Tensor]:
    """A batch, taken from the store, truncated and padded by one kernel.

    Args:
        store: all ids, in device memory; int32.
        rows: (B,) int64 row numbers, in device memory.
        width: of the batch, at least as much as the longest row keeps.
        limit: a row keeps at most so many ids.
        keep: which part goes, as in `Ragged.truncate`; "error" is for rows that are not too long.
        pad_id: fills rows up at the left.

    Returns:
        `input_ids`, `attention_mask`, `position_ids`: int64 (B, width), the memory that the kernel wrote (DLPack),
        ordered behind it in the current stream.
    """
    xp, count = kernels.xp, len(rows)
    head = {"error": 0, "left": 0, "right": limit, "middle": limit // 2}[keep]
    outs = {name: xp.empty((count, width), np.int64) for name in ("input_ids", "attention_mask", "position_ids")}
    kernels.run(
        "pad", kernels.blocks(count), count, rows, store.values, store.offsets, width, limit, head, pad_id,
        *outs.values(),
    )  # fmt: skip
    return {name: from_dlpack(out) for name, out in outs.items()}
