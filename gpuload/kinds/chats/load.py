"""The kind of `load_chats`: data for SFT, by the stages of `load`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.cache.known_tokenizer import open_known
from gpuload.core.arrays import Array, Ragged, RowNumbers, array_module, on_host
from gpuload.core.errors import DataError, GpuloadError, OptionError
from gpuload.core.marks import loss_bits, loss_tokens, with_loss
from gpuload.core.options import BOOLEAN, COLUMN, LossOn, Options, Verify, check_fields, check_format, or_none
from gpuload.dataset.arrow import ragged
from gpuload.dataset.report import Report
from gpuload.dataset.rows import Loaded
from gpuload.dataset.trainer_columns import MASKS, columns_of, fields
from gpuload.engines.host.packs import IGNORED
from gpuload.engines.protocol import Engine
from gpuload.kinds.chats.dataset import LAYOUT, ChatDataset
from gpuload.kinds.chats.engine import ChatEngine
from gpuload.kinds.chats.formats import FORMATS, find_format, is_plain, with_marks
from gpuload.kinds.chats.marked import marks_in, weights_in
from gpuload.kinds.chats.reference import ChatReference
from gpuload.kinds.formats import LABELS, Format, as_prompts, one_format
from gpuload.kinds.served.engine import ServedEngine
from gpuload.kinds.served.options import LOSS_ON, OF_SERVED, ServedOptions, check_limits
from gpuload.kinds.served.reference import ServedReference
from gpuload.kinds.served.rewrites import RewriteFinder
from gpuload.kinds.served.rows import not_learned, served_rows, useless_conversations
from gpuload.kinds.served.stored import Headers, served_sizes
from gpuload.kinds.training_options import (
    OF_MESSAGES,
    MessageOptions,
    check_template,
    training_engine,
    training_options,
)
from gpuload.pipeline.kind import Finder, Kind, warn_of_replaced
from gpuload.reference.reference import Reference
from gpuload.sources.columns import to_python
from gpuload.sources.read import Source, one_column
from gpuload.template.answers import has_blocks
from gpuload.template.marks import UnknownAnswersError
from gpuload.template.turns import unknown

_CHOICES: dict[str, tuple[LossOn, ...]] = {
    **dict.fromkeys(("messages", "sharegpt"), ("assistant", "last", "all", "marked")),
    "alpaca": ("assistant", "last", "all"),
    "prompt-completion": ("completion", "assistant", "all", "marked"),
    "text": ("all",),
}
"""What can have loss in data of each format; the first is the default."""

LABELED = ("messages", "sharegpt", "prompt-completion", "alpaca")
"""Formats that data for KTO may have, too."""

_GOOD, _BAD = (1, "1", "1.0", "true"), (0, "0", "0.0", "false")
"""Labels of good and of bad answers, in any form in which people write truth values."""


@dataclass(frozen=True)
class ChatKind(MessageOptions, ServedOptions, Kind[ChatDataset]):
    """Conversations and other texts to train on, with a loss mask. With `turns="served"`, a row of the load is a
    conversation with all of its rows (`kinds/served/stored.py`), which become rows at its end. For the fields see
    `load_chats`."""

    name = "chats"
    hidden: ClassVar[frozenset[str]] = MASKS | {*LAYOUT.planes}
    format: str | None = None  # after `resolve`, what was found
    messages_key: str | None = None
    loss_on: LossOn | None = None  # after `resolve`, what was chosen
    marks: tuple[str, ...] = ()  # the keys of messages for which `resolve` has chosen "marked"
    weights: tuple[float, ...] = ()  # of the loss, other than 0 and 1, that `resolve` has found; ascending

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        return tuple(fields(columns_of("trl", weighted=bool(self.weights))))

    def __post_init__(self) -> None:
        check_format(self.format, [each.name for each in FORMATS])
        check_fields(self, {"messages_key": or_none(COLUMN), "drop_nulls": BOOLEAN})
        self.check_turns()

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> tuple["ChatKind", Options]:
        names = ("format", "messages_key", "loss_on", *OF_MESSAGES, *OF_SERVED)
        kind = cls(**{name: given[name] for name in names if name in given})
        options = training_options(given, kind.messages_key or "messages", names)
        if kind.as_served:
            check_limits(options)
        return kind, options

    def resolve(self, sources: Sequence[Source], options: Options) -> tuple["ChatKind", list[Source], Options]:
        filled = [source for source in sources if source.num_rows]
        found = self._format_of(filled)
        if all(is_plain(found, source.schema) for source in filled):
            options = replace(options, chat_template=None)
        else:
            check_template(options, found)
        if self.as_served and (found not in LOSS_ON or options.chat_template is None):
            raise OptionError(
                f"turns='served' is for conversations: data in the format {found} is text that no template renders"
            )
        possible = (LOSS_ON if self.as_served else _CHOICES)[found]
        marks = () if self.loss_on or "marked" not in possible else self._marks_in(filled)
        wanted = self.loss_on or ("marked" if marks else possible[0])
        if wanted not in possible:
            if wanted in LOSS_ON.get(found, ()):
                raise OptionError(f"loss_on={wanted!r} is for turns='served': pass that too")
            choices = ", ".join(map(repr, possible))
            raise OptionError(f"loss_on={wanted!r}: data in the format {found} has no such part: use one of {choices}")
        columns = [(source, name) for source in filled for name in self._found_in(source).columns]
        weights = weights_in(columns) if wanted == "marked" else ()
        warn_of_replaced((source.schema for source in filled), self.hidden | ({"loss_weight"} if weights else set()))
        return replace(self, format=found, loss_on=wanted, marks=marks, weights=weights), filled, options

    def _marks_in(self, sources: Sequence[Source]) -> tuple[str, ...]:
        """The keys that say which answers have loss, in the first part of the data that has any."""
        found = (marks_in(source, self._found_in(source).columns[-1]) for source in sources)
        return next(filter(None, found), ())

    def _format_of(self, sources: Sequence[Source]) -> str:
        """The name of the format that all sources have, each of which has rows."""
        for source in sources:
            if self.format is None and {"chosen", "rejected"} <= set(source.schema.names):
                raise DataError(
                    f"{source.name}: preference data, with columns chosen and rejected: use load_pairs, or pass "
                    "format= to train on the other columns as they are"
                )
        name = one_format({source.name: self._found_in(source).name for source in sources})
        if self.format is None and name in LABELED and (found := label_of(sources)):
            source, label = found
            kind = source.schema.field(label).type
            steps = ["make columns prompt and completion"] if name == "alpaca" else []
            if not pa.types.is_boolean(kind) and not pa.types.is_integer(kind):
                steps.append(f"convert {label!r} to booleans")
            steps.append("use load_pairs")
            remedy = ", then ".join(steps)
            raise DataError(
                f"{source.name}: column {label!r} says which answers are good ones, as in data for KTO: {remedy}, or "
                f"pass format={name!r} to train on all answers, also on bad ones"
            )
        return name

    def _found_in(self, source: Source) -> Format:
        return find_format(source.schema, source.name, self.format, self.messages_key)

    def reference(self, tokenizer: Any, options: Options) -> Reference:
        own = {"loss_on": self.loss_on, "weights": self.weights, **self.of_messages()}
        if self.as_served:
            return open_known(tokenizer, options, ServedReference, **own, **self.of_turns())
        return open_known(tokenizer, options, ChatReference, **own)

    def column(self, source: Source, options: Options, reference: Any) -> Source:
        found = self._found_in(source)
        found = with_marks(found) if self.loss_on == "marked" else found
        return as_prompts(source, found, options.prompt_key, reference)

    def engine(self, options: Options, reference: Any, exact_only: bool) -> Engine:
        if self.as_served:
            return ServedEngine(reference, exact_only)
        return training_engine(options, reference, exact_only, ChatEngine)

    def sizes(self, tokens: Ragged) -> Array:
        """(2, n): tokens of each row, and those that have loss; of conversations see `served_sizes`."""
        if self.as_served:
            return served_sizes(tokens)
        return array_module(tokens.values).stack([tokens.lengths, loss_tokens(tokens)])

    def limited(self, sizes: RowNumbers) -> RowNumbers:
        """(n,) tokens of each row; those of the shortest row of a conversation, whose others are dropped later."""
        tokens: RowNumbers = sizes[2 if self.as_served else 0]
        return tokens

    def useless(self, sizes: RowNumbers, tokens: Ragged, options: Options) -> dict[int, str]:
        """The rows of which no token would be learned."""
        if self.as_served:
            return useless_conversations(tokens, options)
        reasons = {}
        limit = options.max_prompt_length
        if not options.filter_overlong_prompts and np.any(sizes[0] > limit):
            kept = on_host(loss_tokens(tokens, limit, options.truncation))
            why = f"no token with loss is within max_length={limit}"
            reasons = dict.fromkeys(np.flatnonzero(kept == 0).tolist(), why)
        marked = " that is marked to have loss" if self.loss_on == "marked" else ""
        why = f"no token has loss: there is no answer of an assistant{marked}"
        return reasons | dict.fromkeys(np.flatnonzero(sizes[1] == 0).tolist(), why)

    def counts_of_dropped(self, tokens: Ragged, keep: Any) -> Mapping[str, int]:
        return not_learned(Headers.of(tokens.filter(~keep))) if self.as_served and not keep.all() else {}

    def finders(self, mode: Verify, reference: Any, rows: int) -> Sequence[Finder]:
        return () if self.as_served else (RewriteFinder(mode, reference, rows),)

    def nothing_left(self, report: Report, template: str) -> GpuloadError | None:
        if has_blocks(template):
            return None
        # Of rows without messages, nothing is known about the template.
        reasons = [reason for reason in report.rejected if not reason.endswith(("is null", "is an empty list"))]
        if reasons and all(reason.startswith(UnknownAnswersError.subject) for reason in reasons):
            return unknown(reasons[0].partition(": ")[2])
        return None

    def from_arrow(self, table: pa.Table) -> Ragged:
        tokens = with_loss(ragged(table, "input_ids"), ragged(table, "labels").values != IGNORED)
        if not self.weights:
            return tokens
        weights = ragged(table, "loss_weight").values
        number = np.searchsorted(self.weights, weights) + 1  # 0 and 1 are not among them
        bits = loss_bits(np.where((weights == 0) | (weights == 1), 0, number).astype(np.int32))
        return Ragged(tokens.values | np.where(weights == 0, 0, bits), tokens.offsets)

    def dataset(self, loaded: Loaded) -> ChatDataset:
        loaded.report.notes[:0] = [f"format: {self.format}, loss on {self.loss_on}", *self.changes()]
        if self.marks:
            keys = ", ".join(self.marks)
            loaded.report.notes.insert(1, f"messages say which answers have loss ({keys}): loss_on='assistant' for all")
        if self.weights:
            some = ", ".join(f"{weight:g}" for weight in self.weights[:8]) + ", ..." * (len(self.weights) > 8)
            loaded.report.notes.append(f"the loss of answers has weights ({some}): batches have a loss_weight")
        if self.as_served:
            loaded = served_rows(loaded)
        return self.rows(loaded, (1.0, *self.weights) if self.weights else ())

    def rows(self, loaded: Loaded, weights: tuple[float, ...]) -> ChatDataset:
        """The dataset, whose batches have these weights of the loss."""
        return ChatDataset(loaded, replace(LAYOUT, weights=weights))


def label_of(sources: Sequence[Source]) -> tuple[Source, str] | None:
    """The first source with a column that says whether the answer of a row is a good one, and the column.

    `kto_tag` has no other meaning, and a boolean `label` hardly any. A `label` of another type may as well be the
    number or the name of a class: it counts if, in all rows of all sources, it has both truth values and nothing else.
    Ones alone do not: they may be the class of all rows, and if not, all answers are good ones.
    """
    unclear = []
    for source in sources:
        name = next((each for each in reversed(LABELS) if each in source.schema.names), None)
        if name is not None and (name != "label" or pa.types.is_boolean(source.schema.field(name).type)):
            return source, name
        unclear += [(source, name)] if name else []
    seen: set[bool | None] = set()
    for source, name in unclear:
        for column in one_column(source, name):
            seen |= set(map(is_good, _distinct(column)))
            if None in seen:
                return None
    return unclear[0] if seen == {True, False} else None


def _distinct(column: pa.ChunkedArray) -> list[Any]:
    """The different values of a column, without null; those of a nested type are not compared."""
    values = column.combine_chunks()
    if isinstance(values, pa.ExtensionArray):  # JSON of mixed shapes
        return to_python(type(values).from_storage(values.type, pc.unique(values.storage.drop_null())))
    if pa.types.is_nested(values.type):
        return to_python(values.drop_null()[:1])
    return list(to_python(pc.unique(values.drop_null())))


def is_good(value: Any) -> bool | None:
    """The truth value that a label stands for; None if it is something else."""
    value = value.lower() if isinstance(value, str) else value
    return True if value in _GOOD else False if value in _BAD else None
