"""The engine of a device: rendering, encoding and batches by kernels, on NumPy or CuPy arrays.

Texts and ids stay in device memory. Where a tokenizer cannot be compiled for the device, and for single rows that the
kernels do not support, text goes to the host's encoder and its ids come back; the report says so. Everything here
except reading (`cuda.py`) runs on any machine: the tests use kernels compiled for the host.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from gpuload.core.arrays import Array, Ragged, on_host
from gpuload.core.errors import DeviceError
from gpuload.core.options import TokensOn
from gpuload.engines.batches import BatchLayout
from gpuload.engines.conversations import Conversations, from_arrow, messages_of_users
from gpuload.engines.device.batches import DeviceBatches
from gpuload.engines.device.encode import LEAST_CHUNK, DeviceEncoder
from gpuload.engines.device.kernels import Kernels
from gpuload.engines.device.parts import MOST_JOINED, arrow_prompts, is_small, zip_with_tables
from gpuload.engines.device.render import DeviceText, render
from gpuload.engines.device.spans import DeviceTokenSpans, spans_table
from gpuload.engines.device.store import DeviceStore, Segments, host_store, in_order, to_device
from gpuload.engines.device.texts import DeviceTexts, gather_rows, replaced
from gpuload.engines.failures import out_of_memory
from gpuload.engines.host.engine import HostEngine, arrow_parts
from gpuload.engines.host.render import HostText
from gpuload.engines.host.sanitize import can_be_marked, mark_column, unplain
from gpuload.engines.protocol import ArrowPrompts, Prompts, Tokenized
from gpuload.reference.control_tokens import END, START
from gpuload.reference.reference import Reference
from gpuload.sources.later import LaterTable
from gpuload.sources.read import Source
from gpuload.sources.types import is_messages, is_text
from gpuload.template.compiler import ChatProgram
from gpuload.tokenizer.compiled import CompiledTokenizer, compile_tokenizer

_Made = TypeVar("_Made")

Reader = Callable[[Source, str], Iterator[Prompts] | None]
"""The prompts of a source, some rows at a time; None where Arrow should read them."""


class DeviceEngine:
    """The `Engine` of a device.

    Args:
        exact_only: render and encode with the tokenizer object itself, prompt by prompt; only batches are made on the
            device.
        reader: reads prompts into device memory. None: Arrow reads, and the prompt column is copied over once.
        tokens_on: where the store of ids is.
        host_engine: the class of `host`.
        notes: for the report; the reader may add to it.
    """

    name = "cuda"

    def __init__(
        self,
        kernels: Kernels,
        device: torch.device,
        reference: Reference,
        exact_only: bool = False,
        reader: Reader | None = None,
        tokens_on: TokensOn = "auto",
        host_engine: type[HostEngine] = HostEngine,
        notes: Sequence[str] = (),
    ):
        self.device = device
        self._kernels, self._reader, self._tokens_on, self._read_notes = kernels, reader, tokens_on, notes
        self._on_device = tokens_on != "host"  # as long as ids fit
        self._segments: Segments | None = None
        self._nbytes: int | None = None
        self._lock = threading.Lock()
        self._compiling: Future[CompiledTokenizer | str] | None = None
        self._ops = DeviceTexts(kernels)
        self.host = host_engine(reference, exact_only)
        self._reference = reference

    @cached_property
    def _by_kernels(self) -> bool:
        return not self.host.by_prompt and self._reference.uses_template

    @property
    def _compiled(self) -> CompiledTokenizer | str:
        """The tokenizer's tables, or why there are none. Made when first needed: ids from the cache need none."""
        return self._begin().result()

    def _begin(self) -> Future[CompiledTokenizer | str]:
        """The tokenizer takes a tenth of a second to read: in a thread of its own, while the first rows are read."""
        with self._lock:
            if self._compiling is None:
                thread = ThreadPoolExecutor(1, "tokenizer")
                self._compiling = thread.submit(self._compile)
                thread.shutdown(wait=False)
            return self._compiling

    def _compile(self) -> CompiledTokenizer | str:
        if not self._by_kernels:
            return ""
        if self._reference.backend is None:
            return f"{type(self._reference.tokenizer).__name__} is not a fast tokenizer"
        json = self._reference.model_json
        return self._kernels.shared.get(self._digest, "compiled", lambda: compile_tokenizer(json))

    @cached_property
    def _digest(self) -> bytes:
        """Of all that decides the tables of the tokenizer."""
        return hashlib.sha256(self._reference.model_json.encode(errors="surrogatepass")).digest()

    @cached_property
    def _encoder(self) -> DeviceEncoder | None:
        """Made when first needed, during a load."""
        compiled, kernels = self._compiled, self._kernels
        if not isinstance(compiled, CompiledTokenizer):
            return None
        return self._shared("encoder", lambda: DeviceEncoder(kernels, compiled)).again(kernels)

    @cached_property
    def _spans(self) -> DeviceTokenSpans:
        """Made when first needed, as the encoder is."""
        host, kernels = self.host.spans, self._kernels
        if (table := host.table) is None:
            return DeviceTokenSpans(kernels, host, None)
        return DeviceTokenSpans(kernels, host, self._shared("spans", lambda: spans_table(kernels, table)))

    def _shared(self, what: str, make: Callable[[], _Made]) -> _Made:
        """What the loads of this process share, in memory that outlives this one; if there is too little, in that of
        the load, for the load."""

        def made() -> _Made:
            with self._kernels.lasting():
                found = make()
            self._kernels.synchronize()  # threads that get it next have other streams
            return found

        try:
            return self._kernels.shared.get(self._digest, what, made)
        except DeviceError:
            return make()

    def describe(self, compiled: bool = True) -> str:
        if not self._by_kernels:
            return f"{self.host.describe(compiled)}; batches on {self.device}"
        by_rows, rendering = not compiled or self.host.program.not_compilable is not None, self.host.rendering(compiled)
        if isinstance(self._compiled, CompiledTokenizer):
            return f"{self.device}: {rendering}, {'' if by_rows else 'rendered and '}encoded by kernels"
        rendering += "" if by_rows else ", rendered by kernels"
        return f"{self.device}: {rendering}; encoded by {self.host.encoder.name} on the host"

    @property
    def notes(self) -> tuple[str, ...]:
        if not self._by_kernels:
            return self.host.notes
        read = ("control tokens are marked on the host: sanitize_control_tokens is set",)
        first = (*self._read_notes, *(read if self._reference.sanitizes else ()))
        if isinstance(self._compiled, CompiledTokenizer):
            return first
        return (*first, f"text is copied to the host, and its ids back: {self._compiled}", *self.host.notes)

    @property
    def counts(self) -> dict[str, int]:
        return self.host.counts

    def lost(self) -> str | None:
        return self._kernels.lost()

    @property
    def by_tokenizer(self) -> bool:
        return False

    @property
    def part_bytes(self) -> int:
        return min(self._kernels.chunk_bytes, MOST_JOINED) if self._by_kernels else 0

    @contextmanager
    def loading(self, nbytes: int | None = None, rows: int | None = None) -> Iterator[None]:
        self._nbytes = nbytes
        with ExitStack() as stack:
            stack.enter_context(self._kernels.loading())
            self._tables = ThreadPoolExecutor(1, "pass-through")
            stack.callback(self._tables.shutdown, wait=False, cancel_futures=True)  # also of a load that has failed
            yield

    def read(
        self, source: Source, prompt_key: str, keep_prompts: bool
    ) -> Iterator[tuple[pa.Table | LaterTable, Prompts]]:
        if not self._by_kernels:
            return self.host.read(source, prompt_key, keep_prompts)
        self._begin()
        prompts: Iterator[Prompts] | None = None
        on_host = self._reference.sanitizes  # control tokens are marked there
        if self._reader is not None and not on_host and not is_small(source, prompt_key, self._nbytes):
            prompts = self._reader(source, prompt_key)
        if prompts is None and (source.only is None or source.without is None):  # all columns are read at once
            return arrow_parts(source, prompt_key)
        prompts = prompts or arrow_prompts(source, prompt_key)
        return zip_with_tables(prompts, source, prompt_key, keep_prompts, self._tables)

    # -- render --------------------------------------------------------------------------------------------------------

    def render(self, prompts: Prompts) -> HostText | DeviceText:
        if isinstance(prompts, Conversations):
            with self._kernels.current():
                return self._render(prompts, self.host.program)
        assert isinstance(prompts, ArrowPrompts)
        column = prompts.column
        if not self._by_kernels or not (is_messages(column.type) or is_text(column.type)):
            return self.host.render(prompts)
        if is_text(column.type):
            column = messages_of_users(column.cast(pa.large_string()))
        if self._reference.sanitizes:
            return self._render_sanitized(column)
        with self._kernels.current():
            return self._render(from_arrow(self._ops, column), self.host.program)

    def _render_sanitized(self, column: pa.Array) -> HostText | DeviceText:
        control = self._reference.call.control
        if not can_be_marked(column.type):
            return self.host.render(ArrowPrompts(column))
        with self._kernels.current():
            text = self._render(from_arrow(self._ops, mark_column(column, control)), self.host.program)
            rows = on_host(self._marked(text)).tolist()
            marked = [raw.decode() for raw in self._ops.bytes_at(text.column, rows)]
        text.rejected.update((rows[i], why) for i, why in unplain(marked, control).items())
        return text

    def _marked(self, text: DeviceText) -> Array:
        """(k,) the rows that have marks."""
        return self._ops.xp.flatnonzero(self._ops.contains_any(text.column, (START, END)))

    def _render(self, column: Conversations, program: ChatProgram) -> DeviceText:
        """Renders a column; in halves, and halves of those, where memory runs out."""
        try:
            return render(self._kernels, program, column)
        except MemoryError as error:
            if len(column) < 2:
                raise DeviceError(out_of_memory("rendering")) from error
        middle = len(column) // 2
        halves = [self._render(column.take(part), program) for part in np.split(np.arange(len(column)), [middle])]
        return DeviceText.concatenate(halves)

    # -- encode --------------------------------------------------------------------------------------------------------

    def encode(self, text: HostText | DeviceText) -> Tokenized:
        with self._kernels.current():
            if isinstance(text, HostText):
                made = self.host.encode(text)
                made.ids, made.text_sizes = to_device(self._kernels, made.ids), self._ops.xp.asarray(made.text_sizes)
                return made
            ids, fallback = self._ids(text)
            made = text.tokenized(ids, len(fallback))
            if text.answers is not None:
                self._mark(text, made.ids, 0, len(text))
            return made

    def _ids(self, text: DeviceText) -> tuple[Ragged, Array]:
        """The ids of all rows; and (k,) the rows that fell back to the host's encoder although there is one of the
        device."""
        if self._encoder is not None:
            return self._encode(self._encoder, text)
        ids = self.host.ids(pc.fill_null(text.text, "") if text.rejected else text.text)
        return to_device(self._kernels, ids), self._kernels.xp.zeros(0, np.int64)

    def _encode(self, encoder: DeviceEncoder, text: DeviceText) -> tuple[Ragged, Array]:
        """All rows by kernels, except those that fall back to the host's encoder, in their places; and which did."""
        kernels, xp = self._kernels, self._kernels.xp
        try:
            ids, fallback = encoder.encode(text.data, text.offsets)
            if self._reference.sanitizes:
                fallback[self._marked(text)] = True
            at = xp.flatnonzero(fallback)
            if not len(at):
                return ids, at
            texts = [one.decode() for one in self._ops.bytes_at(text.column, on_host(at).tolist())]
            others = to_device(kernels, self.host.ids(pa.array(texts, pa.large_string())))
            return replaced(kernels, ids, at, others), at
        except MemoryError as error:
            if encoder.chunk_bytes <= LEAST_CHUNK:
                raise DeviceError(out_of_memory("encoding")) from error
        encoder.chunk_bytes //= 2
        return self._encode(encoder, text)

    def _mark(self, text: DeviceText, ids: Ragged, low: int, high: int) -> None:
        """Marks the tokens of answers in some rows; in halves, and halves of those, where memory runs out."""
        try:
            self._spans.mark(text, ids, low, high)
            return
        except MemoryError as error:
            if high - low < 2:
                raise DeviceError(out_of_memory("marking answers")) from error
        middle = (low + high) // 2
        self._mark(text, ids, low, middle)
        self._mark(text, ids, middle, high)

    # -- store ---------------------------------------------------------------------------------------------------------

    def fetch(self, ids: Ragged, rows: np.ndarray[Any, Any]) -> Ragged:
        with self._kernels.current():
            return take(self._kernels, ids, self._kernels.xp.asarray(rows)).to_host()

    def keep(self, ids: Ragged, rows: np.ndarray[Any, Any] | None) -> Ragged | DeviceStore:
        if (kept := self._keep_on_device(ids, rows)) is not None:
            return kept
        self._on_device = False  # nor will later rows fit
        if rows is None or isinstance(ids.values, np.ndarray):
            return self.host.keep(ids.to_host(), rows)
        return self.fetch(ids, rows)

    def _keep_on_device(self, ids: Ragged, rows: np.ndarray[Any, Any] | None) -> DeviceStore | None:
        """Some rows in device memory that outlives the load; None if the store is to be in host memory."""
        if not self._on_device:
            return None
        by_limit = self._tokens_on == "auto"
        if self._segments is None:
            self._segments = Segments(self._kernels, self._kernels.ids_limit if by_limit else None)
        try:
            with self._kernels.current():
                return self._segments.add(ids, rows)
        except DeviceError:
            if by_limit:
                return None
            raise

    def store(self, parts: list[Ragged | DeviceStore], order: np.ndarray[Any, Any] | None) -> Ragged | DeviceStore:
        self._segments = None
        on_device = [part for part in parts if isinstance(part, DeviceStore)]
        if len(on_device) == len(parts):
            parts.clear()
            return in_order(on_device, order)
        on_host = [part.to_host() for part in parts]
        parts.clear()
        return host_store(on_host, order)

    def batches(self, store: Any, layout: BatchLayout, pad_id: int) -> DeviceBatches:
        return DeviceBatches(self._kernels, store, layout, pad_id)


def take(kernels: Kernels, ids: Ragged, rows: Array) -> Ragged:
    """`Ragged.take` by one kernel; the numbers of rows are (m,) int64, in device memory."""
    address, length = kernels.address(ids.values) + 4 * ids.offsets[rows], ids.lengths[rows]
    return gather_rows(kernels, address, length)
