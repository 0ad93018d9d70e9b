"""The engine of a device: rendering, encoding and batches by kernels, on NumPy or CuPy arrays.

Text and ids stay where they are made. Where a tokenizer has no tables for the device, and for single rows that its
kernels leave, text goes to the host's encoder and ids come back; the report says so. Everything here but the reading
(`cuda.py`) runs on any machine: the tests give it kernels that were compiled for the host.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from gpuload.arrays import Array, Ragged, on_host
from gpuload.engines.device.batches import DeviceBatches
from gpuload.engines.device.conversations import Conversations, of_arrow
from gpuload.engines.device.encode import LEAST_CHUNK, DeviceEncoder
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.render import DeviceText, render
from gpuload.engines.device.texts import copied, texts_at
from gpuload.engines.host.engine import CpuEngine
from gpuload.engines.host.prompts import one_user_message
from gpuload.engines.host.rendered import Rendered
from gpuload.errors import DeviceError
from gpuload.options import TokensOn, Truncation
from gpuload.reference.reference import Reference
from gpuload.sources.read import Source, with_prompts
from gpuload.tokenizer.compiled import CompiledTokenizer, compile_tokenizer

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
        tokens_on: where the store of ids stays.
    """

    name = "cuda"

    def __init__(
        self,
        kernels: Kernels,
        device: torch.device,
        reference: Reference,
        exact_only: bool = False,
        reader: Reader | None = None,
        tokens_on: TokensOn = "device",
    ):
        self.device = device
        self._kernels, self._reader, self._tokens_on = kernels, reader, tokens_on
        self._host = CpuEngine(reference, exact_only)
        self._by_kernels = not self._host.by_prompt and reference.uses_template
        self._reference = reference

    @cached_property
    def _twin(self) -> CompiledTokenizer | str:
        """Made when it is first needed: tokens from the cache need none."""
        if not self._by_kernels:
            return ""
        if self._reference.backend is None:
            return f"{type(self._reference.tokenizer).__name__} is not a fast tokenizer"
        return compile_tokenizer(self._reference.model_json)

    @property
    def description(self) -> str:
        if not self._by_kernels:
            return f"{self._host.description}; batches on {self.device}"
        if isinstance(self._twin, CompiledTokenizer):
            return f"{self.device}: chat template compiled, rendered and encoded by kernels"
        how = self._host.description.removeprefix("cpu: chat template compiled, ")
        return f"{self.device}: chat template compiled, rendered by kernels; {how} on the host"

    @property
    def notes(self) -> tuple[str, ...]:
        if not self._by_kernels:
            return self._host.notes
        if isinstance(self._twin, CompiledTokenizer):
            return ()
        return (f"text goes to the host once, and its ids back once: {self._twin}", *self._host.notes)

    @cached_property
    def _encoder(self) -> DeviceEncoder | None:
        """Made when it is first needed, while a load runs: its tables are given back with everything else."""
        return DeviceEncoder(self._kernels, self._twin) if isinstance(self._twin, CompiledTokenizer) else None

    def loading(self) -> AbstractContextManager[Any]:
        return self._kernels.loading()

    def read(self, source: Source, prompt_key: str, keep_prompts: bool) -> Iterator[tuple[pa.Table, pa.Array]]:
        if self._reader is None or not self._by_kernels:
            return with_prompts(source, prompt_key)
        return self._reader(source, prompt_key, keep_prompts)

    def render(self, prompts: pa.Array) -> Rendered | DeviceText:
        if not isinstance(prompts, Conversations):
            if not self._by_kernels or not _is_column(prompts.type):
                return self._host.render(prompts)
            if not pa.types.is_list(prompts.type) and not pa.types.is_large_list(prompts.type):
                prompts = one_user_message(prompts.cast(pa.large_string()))
        program = self._host.program
        with self._kernels.current(), program.lock:
            column = prompts if isinstance(prompts, Conversations) else of_arrow(self._kernels, prompts)
            return self._rendered(column)

    def _rendered(self, column: Conversations) -> DeviceText:
        try:
            return render(self._kernels, self._host.program, column)
        except MemoryError as error:
            if len(column) < 2:
                raise DeviceError(
                    "out of GPU memory while rendering: raise gpu_memory_limit, free memory, or use device='cpu'"
                ) from error
        middle = len(column) // 2
        halves = [self._rendered(column.take(part)) for part in np.split(np.arange(len(column)), [middle])]
        return DeviceText.joined(halves)

    def encode(self, text: Rendered | DeviceText) -> tuple[Ragged, int]:
        with self._kernels.current():
            if isinstance(text, Rendered):
                ids, left = self._host.encode(text)
                return on_device(self._kernels, ids), left
            if self._encoder is None:
                ids = self._host.ids(pc.fill_null(text.text, "") if text.rejected else text.text)
                return on_device(self._kernels, ids), 0
            return self._encoded(self._encoder, text)

    def _encoded(self, encoder: DeviceEncoder, text: DeviceText) -> tuple[Ragged, int]:
        """All rows by kernels, and those that are left by the host's encoder, in their places."""
        kernels, xp = self._kernels, self._kernels.xp
        try:
            ids, left = encoder.encode(text.data, text.offsets)
            at = xp.flatnonzero(left)
            if not len(at):
                return ids, 0
            texts = [one.decode() for one in texts_at(kernels, text.column, on_host(at).tolist())]
            others = on_device(kernels, self._host.ids(pa.array(texts, pa.large_string())))
            address, length = kernels.address(ids.values) + 4 * ids.offsets[:-1], ids.lengths
            address[at] = kernels.address(others.values) + 4 * others.offsets[:-1]
            length[at] = others.lengths
            return _gathered(kernels, address, length), len(at)
        except MemoryError as error:
            if encoder.chunk_bytes <= LEAST_CHUNK:
                raise DeviceError(
                    "out of GPU memory while encoding: raise gpu_memory_limit, free memory, or use device='cpu'"
                ) from error
        encoder.chunk_bytes //= 2
        return self._encoded(encoder, text)

    def keep(self, tokens: Ragged, rows: np.ndarray[Any, Any] | None) -> Ragged:
        xp = self._kernels.xp
        with self._kernels.current():
            at = xp.arange(len(tokens)) if rows is None else xp.asarray(rows)
            if self._tokens_on == "host":
                return take(self._kernels, tokens, at).to_host()
            return take(self._kernels, tokens, at, lasting=True)

    def store(self, parts: list[Ragged], order: np.ndarray[Any, Any] | None) -> Ragged:
        kernels = self._kernels
        if self._tokens_on == "host":
            return self._host.store(parts, order)
        with kernels.current():
            with kernels.lasting():
                whole = Ragged.concatenate(parts)
            return whole if order is None else take(kernels, whole, kernels.xp.asarray(order), lasting=True)

    def batches(self, store: Ragged, limit: int, keep: Truncation, pad_id: int) -> DeviceBatches:
        return DeviceBatches(self._kernels, store, limit, keep, pad_id, pinned=self._tokens_on == "host")


def on_device(kernels: Kernels, rows: Ragged) -> Ragged:
    """Rows of the host, copied over; rows that are there already as they are."""
    return Ragged(kernels.xp.asarray(rows.values), kernels.xp.asarray(rows.offsets))


def take(kernels: Kernels, tokens: Ragged, rows: Array, lasting: bool = False) -> Ragged:
    """`Ragged.take` by one kernel.

    Args:
        rows: (m,) row numbers in device memory.
        lasting: into memory that stays when the load is over.
    """
    address, length = kernels.address(tokens.values) + 4 * tokens.offsets[rows], tokens.lengths[rows]
    return _gathered(kernels, address, length, lasting)


def _gathered(kernels: Kernels, address: Array, length: Array, lasting: bool = False) -> Ragged:
    """Rows of ids from anywhere in the device's memory: where each begins, and how many ids it has."""
    size = 4 * length
    with kernels.lasting() if lasting else nullcontext():  # what is only passing through is made outside
        offsets, data = copied(kernels, address, size)
    offsets //= 4
    return Ragged(data.view(np.int32), offsets)


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
