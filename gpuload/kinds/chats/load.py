"""load_chats(): data for SFT, by the stages of `load`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Unpack, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import Array, Ragged, RowNumbers, array_module, on_host
from gpuload.core.errors import DataError, GpuloadError, OptionError
from gpuload.core.keywords import ChatKeywords, takes
from gpuload.core.marks import loss_tokens
from gpuload.core.options import LossOn, Options, nearest
from gpuload.dataset.arrow import INT32_LIST
from gpuload.dataset.report import Report
from gpuload.dataset.rows import Loaded
from gpuload.engines.choose import choose_engine
from gpuload.engines.protocol import Engine
from gpuload.kinds.chats.dataset import LAYOUT, ChatDataset
from gpuload.kinds.chats.device import DeviceChatEngine
from gpuload.kinds.chats.formats import FORMATS, LABELS, Format, as_prompts, find_format, is_plain, one_format
from gpuload.kinds.chats.reference import ChatReference
from gpuload.kinds.training_options import TrainingDefaults, training_options
from gpuload.pipeline.kind import Kind
from gpuload.pipeline.run import load_given
from gpuload.sources.read import Source
from gpuload.template.marks import UnknownAnswersError
from gpuload.template.turns import unknown

_CHOICES: dict[str, tuple[LossOn, ...]] = {
    **dict.fromkeys(("messages", "sharegpt", "alpaca"), ("assistant", "last", "all")),
    "prompt-completion": ("completion", "assistant", "all"),
    "text": ("all",),
}
"""What can have loss in data of each format; the first is the default."""

_LABELED = ("messages", "sharegpt", "prompt-completion")
"""Formats that data for KTO may have, too."""


@dataclass(frozen=True)
class ChatKind(Kind[ChatDataset]):
    """Conversations and other texts to train on, with a loss mask.

    Attributes:
        format, messages_key, loss_on: as for `load_chats`; after `resolve`, what was found and chosen.
    """

    name = "chats"
    format: str | None = None
    messages_key: str | None = None
    loss_on: LossOn | None = None

    fields: ClassVar[tuple[pa.Field, ...]] = (pa.field("input_ids", INT32_LIST), pa.field("labels", INT32_LIST))

    def __post_init__(self) -> None:
        names = [each.name for each in FORMATS]
        if self.format is not None and self.format not in names:
            raise OptionError(f"format={self.format!r}{nearest(str(self.format), set(names))}")
        if self.messages_key is not None and (not isinstance(self.messages_key, str) or not self.messages_key):
            raise OptionError(f"messages_key={self.messages_key!r}: expected the name of a column, or None")
        choices = get_args(LossOn)
        if self.loss_on is not None and self.loss_on not in choices:
            raise OptionError(f"loss_on={self.loss_on!r}: expected one of {', '.join(map(repr, choices))}, or None")

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> tuple["ChatKind", Options]:
        names = ("format", "messages_key", "loss_on")
        kind = cls(**{name: given[name] for name in names if name in given})
        return kind, training_options(given, kind.messages_key or "messages", names)

    def resolve(self, sources: Sequence[Source], options: Options) -> tuple["ChatKind", list[Source], Options]:
        filled = [source for source in sources if source.num_rows]
        found = self._format_of(filled)
        if all(is_plain(found, source.schema) for source in filled):
            options = replace(options, chat_template=None)
        wanted = self.loss_on or _CHOICES[found][0]
        if wanted not in _CHOICES[found]:
            choices = ", ".join(map(repr, _CHOICES[found]))
            raise OptionError(f"loss_on={wanted!r}: data in the format {found} has no such part: use one of {choices}")
        return replace(self, format=found, loss_on=wanted), filled, options

    def _format_of(self, sources: Sequence[Source]) -> str:
        """The name of the format that all sources have, each of which has rows."""
        for source in sources:
            if self.format is None and {"chosen", "rejected"} <= set(source.schema.names):
                raise DataError(
                    f"{source.name}: preference data, with columns chosen and rejected: use load_pairs, or pass "
                    "format= to train on the other columns as they are"
                )
        name = one_format({source.name: self._found_in(source).name for source in sources})
        for source in sources:
            if self.format is None and name in _LABELED and (label := _label_of(source)):
                raise DataError(
                    f"{source.name}: column {label!r} says which answers are good ones, as in data for KTO: use "
                    f"load_pairs, or pass format={name!r} to train on all answers, also on bad ones"
                )
        return name

    def _found_in(self, source: Source) -> Format:
        return find_format(source.schema, source.name, self.format, self.messages_key)

    def reference(self, tokenizer: Any, options: Options) -> ChatReference:
        assert self.loss_on is not None
        return ChatReference(tokenizer, self.loss_on, **options.of_tokenizer())

    def column(self, source: Source, options: Options, reference: Any) -> Source:
        return as_prompts(source, self._found_in(source), options.prompt_key, reference)

    def engine(self, options: Options, reference: Any, exact_only: bool) -> Engine:
        return choose_engine(options, reference, exact_only, DeviceChatEngine)

    def sizes(self, tokens: Ragged) -> Array:
        """(2, n): tokens of each row, and those that have loss."""
        return array_module(tokens.values).stack([tokens.lengths, loss_tokens(tokens)])

    def useless(self, sizes: RowNumbers, tokens: Ragged, options: Options) -> dict[int, str]:
        """The rows of which no token would be learned."""
        reasons = {}
        limit = options.max_prompt_length
        if not options.filter_overlong_prompts and np.any(sizes[0] > limit):
            kept = on_host(loss_tokens(tokens, limit, options.truncation))
            why = f"no token with loss is within max_length={limit}"
            reasons = dict.fromkeys(np.flatnonzero(kept == 0).tolist(), why)
        why = "no token has loss: there is no answer of an assistant"
        return reasons | dict.fromkeys(np.flatnonzero(sizes[1] == 0).tolist(), why)

    def nothing_left(self, report: Report) -> GpuloadError | None:
        reasons = list(report.rejected)
        if reasons and all(reason.startswith(UnknownAnswersError.__name__) for reason in reasons):
            return unknown(reasons[0].partition(": ")[2])
        return None

    def dataset(self, loaded: Loaded) -> ChatDataset:
        loaded.report.notes.insert(0, f"format: {self.format}, loss on {self.loss_on}")
        return ChatDataset(loaded, LAYOUT)


@takes(ChatKeywords, Options, TrainingDefaults, ChatKind)
def load_chats(files: Any, tokenizer: Any = None, /, **options: Unpack[ChatKeywords]) -> ChatDataset:
    """Loads data for SFT as exact tokens, with a loss mask.

    The ids of a conversation are those of `tokenizer.apply_chat_template(messages)`. For a template with
    `{% generation %}` blocks the mask is that of `return_assistant_tokens_mask=True`; for other templates it has the
    answers of assistants, see `gpuload.template.answers`.

    Args:
        files: as for `load`.
        tokenizer: as for `load`.
        **options: see `ChatKeywords`.

    Returns:
        The rows that were kept, with tokens, loss mask and all other columns.

    Raises:
        OptionError: an unknown option or an invalid value.
        SourceError: a file that cannot be found, downloaded or read.
        DataError: a file with another format, or no rows left.
        TokenizerError: as for `load`; or it is unknown where an answer begins in what the template renders.
        DeviceError: the device is not available, or has too little memory.
        HostMemoryError: the host has too little memory.
        StoreError: the store on disk cannot be written.
        MismatchError: with `strict=True`, a token or its loss differs from the tokenizer's.
    """
    return load_given(ChatKind, files, tokenizer, options)


def _label_of(source: Source) -> str | None:
    """The column that says whether the answer of a row is a good one; None if there is none.

    A column `label` of integers may mean something else: it counts if the first rows have 0 and 1, and nothing else.
    """
    name = next((each for each in LABELS if each in source.schema.names), None)
    if name is None:
        return None
    kind = source.schema.field(name).type
    if name != "label" or pa.types.is_boolean(kind):
        return name
    if not pa.types.is_integer(kind):
        return None
    first = next(iter(source.batches()), None)
    values = set() if first is None else set(pc.unique(first.column(name).drop_null()).to_pylist())
    return name if values == {0, 1} else None
