"""The engine without a GPU: Arrow columns, a compiled tokenizer, NumPy batches."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import torch

from gpuload.core.arrays import Ragged
from gpuload.core.arrow import fill_null
from gpuload.core.memory import garbage_collection_paused
from gpuload.engines.batches import BatchLayout
from gpuload.engines.host import few
from gpuload.engines.host.encode import HostEncoder, host_encoder, needs_itself
from gpuload.engines.host.prompts import BY_PROMPT, render_column, render_rows
from gpuload.engines.host.render import HostText, MixedText
from gpuload.engines.host.sanitize import encode_marked, rows_with_control_tokens
from gpuload.engines.host.store import HostTokens
from gpuload.engines.protocol import ArrowPrompts, Prompts, Tokenized, TokenStore
from gpuload.reference.reference import Reference
from gpuload.sources.read import Source, with_prompts

if TYPE_CHECKING:
    from gpuload.engines.host.batches import HostBatches
    from gpuload.engines.host.spans import TokenSpans
    from gpuload.template.compiler import ChatProgram


def arrow_parts(source: Source, prompt_key: str) -> Iterator[tuple[pa.Table, ArrowPrompts]]:
    """The rows of a source, with their prompts in host memory."""
    return ((table, ArrowPrompts(column)) for table, column in with_prompts(source, prompt_key))


class HostEngine:
    """The `Engine` of the host.

    Args:
        reference: the tokenizer.
        exact_only: render and encode with the tokenizer object itself, prompt by prompt.
        notes: further lines for the report.

    Attributes:
        program: the compiled chat template.
        by_prompt: whether the tokenizer object renders and encodes prompt by prompt, in one step.
        may_be_few: whether transformers renders the rows of a load that has few of them.
    """

    name = "cpu"
    may_be_few: ClassVar[bool] = True
    part_bytes = 0
    device = torch.device("cpu")

    def __init__(self, reference: Reference, exact_only: bool = False, notes: tuple[str, ...] = ()):
        self._reference, self._exact_only, self._notes = reference, exact_only, notes
        self._lock = threading.RLock()  # several threads read, render and encode at once
        self._program: ChatProgram | None = None
        self._by_prompt: bool | None = None
        self._building: Future[HostEncoder] | None = None
        self._nbytes: int | None = None
        self._few = self._lasting = False
        self._spans: TokenSpans | None = None

    @property
    def program(self) -> "ChatProgram":
        """Made when first needed, as all that needs the tokenizer itself: loads from the token cache do without."""
        with self._lock:
            self._program = self._program or self._new_program()
            return self._program

    def _new_program(self) -> "ChatProgram":
        from gpuload.template.compiler import ChatProgram

        return ChatProgram(self._reference.call, self._reference.answers)

    @property
    def by_prompt(self) -> bool:
        if self._by_prompt is None:
            reference = self._reference
            # Pieces of sanitized prompts are encoded by the backend, if the class does nothing else with them.
            own = reference.sanitizes and (needs_itself(reference) or self.program.call.not_compilable_reason())
            self._by_prompt = self._exact_only or not reference.encodes_rendered_text or bool(own)
        return self._by_prompt

    def _begin(self) -> Future[HostEncoder]:
        """The encoder may take a second to build: in a thread of its own, while the first rows are read."""
        with self._lock:
            if self._building is None:
                thread = ThreadPoolExecutor(1, "encoder")
                self._building = thread.submit(host_encoder, self._reference, self._nbytes, self.by_tokenizer)
                thread.shutdown(wait=False)
            return self._building

    @property
    def encoder(self) -> HostEncoder:
        return self._begin().result()

    @property
    def spans(self) -> "TokenSpans":
        from gpuload.engines.host.spans import TokenSpans  # only data to train on needs them

        with self._lock:
            self._spans = self._spans or TokenSpans(self._reference)
            return self._spans

    def describe(self, compiled: bool = True) -> str:
        if self.by_prompt:
            return f"cpu: rendered and encoded by {type(self._reference.tokenizer).__name__}, prompt by prompt"
        return f"cpu: {self.rendering(compiled)}, encoded by {self.encoder.name}"

    def rendering(self, compiled: bool) -> str:
        """For the report: how prompts become text."""
        if not self._reference.uses_template:
            return "prompts are plain text"
        if self.program.not_compilable or not compiled:
            return "chat template rendered by transformers, row by row"
        return "chat template compiled"

    @property
    def notes(self) -> tuple[str, ...]:
        unused = () if self.by_prompt else self.encoder.unused
        return (*(f"not used: {reason}" for reason in unused), *self._notes)

    @property
    def counts(self) -> dict[str, int]:
        return {}

    @property
    def host(self) -> "HostEngine":
        return self

    @property
    def by_tokenizer(self) -> bool:
        return self._few and self._nbytes is not None and self._nbytes <= few.WHOLE_BYTES

    def loading(self, nbytes: int | None = None, rows: int | None = None) -> AbstractContextManager[Any]:
        self._nbytes = nbytes
        if nbytes is None or rows is None:
            self._lasting = True
        else:
            rendered = self.may_be_few and self._reference.uses_template and not self._reference.sanitizes
            few_rows = rendered and not self._lasting and few.are_few(nbytes, rows)
            self._few = few_rows and few.ends_soon(self._reference.template_text)
            if nbytes <= few.FEW_BYTES:  # a collection would take as long as 20 rows
                return garbage_collection_paused()
        return nullcontext()

    def again(self) -> bool:
        """Prepares for another load with the same tokenizer, whose vocabulary may be another one: see `kept.py`.

        Returns:
            Whether that is possible.
        """
        with self._lock:
            if self._spans is not None:
                self._spans.again()
            building = self._building
        if building is None or not building.done() or building.exception() is not None or not building.result().live:
            return False
        tokenizer, calling = self._reference.tokenizer, self._reference.calling
        if calling is not tokenizer:  # its model may be another one, too
            calling.backend_tokenizer.model = tokenizer.backend_tokenizer.model
        building.result().forget()
        return True

    def lost(self) -> None:
        return None

    def read(self, source: Source, prompt_key: str, keep_prompts: bool) -> Iterator[tuple[pa.Table, ArrowPrompts]]:
        if not self.by_prompt:
            self._begin()
        return arrow_parts(source, prompt_key)

    def render(self, prompts: Prompts) -> HostText:
        assert isinstance(prompts, ArrowPrompts)
        text = self._render(prompts)
        if text.with_control is None:
            text.with_control = rows_with_control_tokens(prompts.column, self._reference.call.control)
        return text

    def _render(self, prompts: ArrowPrompts) -> HostText:
        if self.by_prompt:
            return render_rows(prompts.column, self._reference, self.program, with_ids=True, why=BY_PROMPT)
        if self._few:
            return render_rows(prompts.column, self._reference, self.program, why=few.FEW)
        return render_column(prompts.column, self._reference, self.program)

    def encode(self, text: HostText) -> Tokenized:
        if isinstance(text, MixedText):
            ids = Ragged.concatenate([self.encode(part).ids for part in text.parts])
            return text.tokenized(ids.take(text.order))
        if text.ids is not None:
            return text.tokenized(text.ids)
        texts = fill_null(text.text, "") if text.rejected else text.text
        ids = self.ids(texts)
        if text.answers is not None:
            ids = Ragged(ids.values | self.spans.bits(texts, ids, *text.answers), ids.offsets)
        return text.tokenized(ids)

    def ids(self, text: pa.LargeStringArray) -> Ragged:
        """(n,) texts, none of them null → n rows of ids."""
        if self._reference.sanitizes:
            return encode_marked(text, self._reference.call.control, self.encoder.encode)
        return self.encoder.encode(text)

    @staticmethod
    def fetch(ids: Ragged, rows: np.ndarray[Any, Any]) -> Ragged:
        return ids.take(rows)

    @staticmethod
    def keep(ids: Ragged, rows: np.ndarray[Any, Any] | None) -> Ragged:
        if rows is None:  # those of an entry of the token cache are in a mapped file
            return ids if ids.values.flags.writeable else Ragged(ids.values.copy(), ids.offsets)
        kept = np.zeros(len(ids), bool)
        kept[rows] = True
        return ids.filter(kept)

    @staticmethod
    def store(parts: list[Ragged], order: np.ndarray[Any, Any] | None) -> HostTokens:
        return HostTokens(parts, order)

    @staticmethod
    def batches(store: TokenStore, layout: BatchLayout, pad_id: int) -> "HostBatches":
        from gpuload.engines.host.batches import HostBatches

        return HostBatches(layout, pad_id)
