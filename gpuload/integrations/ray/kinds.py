"""What rows are made of the files: prompts, conversations or pairs.

A kind is plain data that is sent to workers. It makes a source's rows by `load`'s own stages, and has them as Arrow
batches with the columns that users of this kind expect.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from gpuload.core.options import LossOn, Objective, Options
from gpuload.dataset.arrow import lists, row_reader
from gpuload.dataset.rows import PromptDataset
from gpuload.dataset.training_rows import TrainingDataset
from gpuload.engines.choose import EngineBuilder, choose_engine
from gpuload.engines.protocol import Engine
from gpuload.kinds.chats.device import chat_engine
from gpuload.kinds.chats.formats import Format, as_prompts, find_format
from gpuload.kinds.chats.load import load_opened
from gpuload.kinds.chats.reference import ChatReference
from gpuload.kinds.pairs.device import pair_engine
from gpuload.kinds.pairs.formats import find_pair_format
from gpuload.kinds.pairs.load import PairMaker, load_opened_pairs
from gpuload.kinds.pairs.reference import PairReference
from gpuload.pipeline.run import load_sources, reference_of
from gpuload.reference.reference import Reference
from gpuload.sources.read import Source, check_prompts


class Kind(Protocol):
    """One kind of rows."""

    @property
    def own(self) -> tuple[pa.Field, ...]:
        """The columns that are made of tokens."""

    def reference(self, tokenizer: Any, options: Options) -> Reference:
        """The tokenizer of a worker."""

    def engine(self, options: Options, reference: Any, exact_only: bool) -> Engine:
        """The engine of a worker, as `EngineBuilder`."""

    def prompts_of(self, source: Source, options: Options, reference: Any) -> Source:
        """The rows of a source with the column `options.prompt_key`.

        Args:
            reference: the tokenizer, whose template will render them.
        """

    def load(self, source: Source, reference: Any, options: Options, build_engine: EngineBuilder) -> PromptDataset:
        """Tokenizes a source."""

    def rows(self, dataset: Any) -> Iterator[pa.RecordBatch]:
        """The rows in order, with all columns."""


_INT32_LIST = pa.list_(pa.int32())


@dataclass(frozen=True)
class PromptKind:
    """Prompts, as `load` makes them."""

    own: ClassVar[tuple[pa.Field, ...]] = (pa.field("raw_prompt_ids", _INT32_LIST),)

    def reference(self, tokenizer: Any, options: Options) -> Reference:
        return reference_of(tokenizer, options)

    def engine(self, options: Options, reference: Any, exact_only: bool) -> Engine:
        return choose_engine(options, reference, exact_only)

    def prompts_of(self, source: Source, options: Options, reference: Any = None) -> Source:
        check_prompts(source, options.prompt_key)
        return source

    def load(self, source: Source, reference: Any, options: Options, build_engine: EngineBuilder) -> PromptDataset:
        return load_sources([source], reference, options, build_engine=build_engine)

    def rows(self, dataset: PromptDataset) -> Iterator[pa.RecordBatch]:
        options, ids = dataset.options, dataset.tokens
        if options.truncation != "error":
            ids = ids.truncate(options.max_prompt_length, options.truncation)

        def make(numbers: Any) -> list[pa.Array]:
            these = ids.take(numbers)
            return [lists(these.values, these.offsets)]

        yield from row_reader(ids.lengths, self.own, make, dataset.passed_through, None)


@dataclass(frozen=True)
class ChatKind:
    """Conversations with labels, as `load_chats` makes them.

    Attributes:
        format, messages_key: as for `load_chats`, the format found.
        loss_on: the tokens with loss.
    """

    format: str
    messages_key: str | None
    loss_on: LossOn
    own: ClassVar[tuple[pa.Field, ...]] = (pa.field("input_ids", _INT32_LIST), pa.field("labels", _INT32_LIST))

    def reference(self, tokenizer: Any, options: Options) -> ChatReference:
        return ChatReference(tokenizer, self.loss_on, **options.of_tokenizer())

    def engine(self, options: Options, reference: Any, exact_only: bool) -> Engine:
        return chat_engine(options, reference, exact_only)

    def prompts_of(self, source: Source, options: Options, reference: Any = None) -> Source:
        found = find_format(source.schema, source.name, self.format, self.messages_key)
        return as_prompts(source, found, options.prompt_key, reference)

    def load(self, source: Source, reference: Any, options: Options, build_engine: EngineBuilder) -> PromptDataset:
        return load_opened([source], reference, options, self.format, build_engine=build_engine)

    def rows(self, dataset: TrainingDataset) -> Iterator[pa.RecordBatch]:
        yield from dataset.to_arrow()


@dataclass(frozen=True)
class PairKind:
    """Pairs of completions, as `load_pairs` makes them.

    Attributes:
        objective: "dpo" or "rm".
        format: as for `load_pairs`, the format found.
        keys: "prompt", "chosen" and "rejected" → the column.
        overlong: as for `load_pairs`.
    """

    objective: Objective
    format: str
    keys: dict[str, str]
    overlong: Any

    @property
    def own(self) -> tuple[pa.Field, ...]:
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        return tuple(pa.field(name, _INT32_LIST) for name in names[self.objective == "rm" :])

    def reference(self, tokenizer: Any, options: Options) -> PairReference:
        return PairReference(tokenizer, self.objective, **options.of_tokenizer())

    def engine(self, options: Options, reference: Any, exact_only: bool) -> Engine:
        return pair_engine(options, reference, exact_only)

    def prompts_of(self, source: Source, options: Options, reference: Any = None) -> Source:
        found = find_pair_format(source.schema, source.name, self.objective, self.format, self.keys)
        return as_prompts(source, found, self.keys["prompt"], reference)

    def load(self, source: Source, reference: Any, options: Options, build_engine: EngineBuilder) -> PromptDataset:
        make = PairMaker(self.objective, 1, True)
        found = Format(self.format, ())
        return load_opened_pairs([source], reference, options, found, make, self.overlong, build_engine=build_engine)

    def rows(self, dataset: TrainingDataset) -> Iterator[pa.RecordBatch]:
        yield from dataset.to_arrow()
