"""The kind of `load_pairs`: preference data, by the stages of `load`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from gpuload.cache.known_tokenizer import open_known
from gpuload.core.arrays import Array, Ragged, RowNumbers, appended, mask_of
from gpuload.core.errors import DataError
from gpuload.core.marks import LOSS, paired
from gpuload.core.options import BOOLEAN, COLUMN, POSITIVE, Objective, Options, check_fields, check_format
from gpuload.dataset.arrow import ragged
from gpuload.dataset.pieces import Sequences
from gpuload.dataset.rows import Loaded
from gpuload.dataset.trainer_columns import MASKS
from gpuload.engines.protocol import Engine
from gpuload.kinds.formats import Format, as_prompts, one_format
from gpuload.kinds.pairs.dataset import LABEL, PairDataset, layout_of, pair_fields
from gpuload.kinds.pairs.engine import PairEngine
from gpuload.kinds.pairs.formats import FORMATS, MARGIN, find_pair_format, label_column
from gpuload.kinds.pairs.reference import PairReference
from gpuload.kinds.pairs.sizes import PairSizes, useless_sequences
from gpuload.kinds.training_options import (
    OF_MESSAGES,
    MessageOptions,
    check_template,
    training_engine,
    training_options,
)
from gpuload.packing import Plan
from gpuload.pipeline.kind import Kind, warn_of_replaced
from gpuload.reference.reference import Reference
from gpuload.sources.read import Source
from gpuload.sources.types import is_text

UNPAIRED_ROWS = 1000
"""Pairs that become single completions at a time: their chosen completions, then their rejected ones. As in TRL."""


@dataclass(frozen=True)
class PairKind(MessageOptions, Kind[PairDataset]):
    """Preference data: pairs of completions, or single completions with labels. For the fields see `load_pairs`."""

    name = "pairs"
    hidden: ClassVar[frozenset[str]] = MASKS | {"input_ids"}
    objective: Objective | None = None  # after `resolve`, what was found
    format: str | None = None  # likewise
    prompt_key: str = "prompt"
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    kl_batch_size: int = 8
    paired: bool = True  # whether the files have pairs; found by `resolve`

    def __post_init__(self) -> None:
        check_format(self.format, FORMATS)
        keys = {"prompt_key chosen_key rejected_key": COLUMN}
        check_fields(self, keys | {"kl_batch_size": POSITIVE, "drop_nulls": BOOLEAN})

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> tuple["PairKind", Options]:
        names = ("objective", "format", "prompt_key", "chosen_key", "rejected_key", "kl_batch_size", *OF_MESSAGES)
        own = {name: given[name] for name in names if name in given}
        if own.get("prompt_key") is None:
            own.pop("prompt_key", None)
        kind = cls(**own)
        return kind, training_options(given, kind.prompt_key, names)

    @property
    def keys(self) -> dict[str, str]:
        """Part of a pair → its column."""
        return {"prompt": self.prompt_key, "chosen": self.chosen_key, "rejected": self.rejected_key}

    @property
    def unpairs(self) -> bool:
        """Whether pairs become single completions."""
        return self.paired and self.objective == "kto"

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        return pair_fields(self.objective or "dpo")

    def resolve(self, sources: Sequence[Source], options: Options) -> tuple["PairKind", list[Source], Options]:
        filled = [source for source in sources if source.num_rows]
        objective = self.objective or ("kto" if label_column(filled[0].schema, self.keys) else "dpo")
        kind = replace(self, objective=objective)
        found = [kind._found_in(source) for source in filled]
        name = one_format({source.name: each.name for source, each in zip(filled, found, strict=True)})
        margins = [source.name for source in filled if objective == "rm" and MARGIN in source.schema.names]
        if 0 < len(margins) < len(filled):
            raise DataError(f"column {MARGIN!r} is in some files only, such as {margins[0]}: add it to the others")
        # No template renders data that is all text.
        if all(is_text(source.schema.field(name).type) for source in filled for name in found[0].columns):
            options = replace(options, chat_template=None)
        else:
            check_template(options, name)
        own = {field.name for field in pair_fields(objective)} - {LABEL}  # labels are those of the file
        of_other_rows = [f"KL_{name}" for name in layout_of(objective).planes] if objective == "kto" else []
        warn_of_replaced((source.schema for source in filled), self.hidden | own | {*of_other_rows})
        return replace(kind, format=name, paired=self.chosen_key in found[0].columns), filled, options

    def _found_in(self, source: Source) -> Format:
        return find_pair_format(source.schema, source.name, self._objective, self.format, self.keys)

    @property
    def _objective(self) -> Objective:
        assert self.objective is not None  # after `resolve`
        return self.objective

    def reference(self, tokenizer: Any, options: Options) -> Reference:
        return open_known(tokenizer, options, PairReference, objective=self._objective, **self.of_messages())

    def column(self, source: Source, options: Options, reference: Any) -> Source:
        return as_prompts(source, self._found_in(source), options.prompt_key, reference)

    def engine(self, options: Options, reference: Any, exact_only: bool) -> Engine:
        return training_engine(options, reference, exact_only, PairEngine)

    def sizes(self, tokens: Ragged) -> Array:
        """(6, n): see `PairSizes`."""
        return PairSizes.of(tokens).array()

    def limited(self, sizes: RowNumbers) -> RowNumbers:
        """(n,) tokens of the longer sequence of each pair; of the shorter one if each is a row of its own later."""
        of_rows = PairSizes(*sizes)
        tokens: RowNumbers = of_rows.shorter if self.unpairs else of_rows.longer
        return tokens

    def useless(self, sizes: RowNumbers, tokens: Ragged, options: Options) -> dict[int, str]:
        """The rows from which nothing would be learned."""
        of_rows = PairSizes(*sizes)
        sequences = [(of_rows.all - of_rows.rejected, of_rows.chosen_loss)]
        if self.paired:
            sequences.append((of_rows.all - of_rows.chosen, of_rows.rejected_loss))
        found = [useless_sequences(*each, self._objective, options) for each in sequences]
        if self.unpairs:
            return {row: why for row, why in found[0].items() if row in found[1]}
        return {row: why for each in reversed(found) for row, why in each.items()}

    def from_arrow(self, table: pa.Table) -> Ragged:
        if self.objective == "kto":
            completions = ragged(table, "completion_ids")
            return appended(ragged(table, "prompt_ids"), Ragged(completions.values | LOSS, completions.offsets))
        chosen, rejected = (ragged(table, name) for name in ("chosen_ids", "rejected_ids"))
        if self.objective == "rm":
            return paired(chosen, rejected, np.zeros(len(chosen), np.int64))
        prompts = ragged(table, "prompt_ids")
        chosen, rejected = (appended(prompts, Ragged(i.values | LOSS, i.offsets)) for i in (chosen, rejected))
        return paired(chosen, rejected, prompts.lengths)

    def dataset(self, loaded: Loaded) -> PairDataset:
        report, labels = loaded.report, None
        report.notes[:0] = [f"format: {self.format}, for {self.objective}", *self.changes()]
        if self.paired and (equal := int(PairSizes(*loaded.sizes).equal.sum())):
            report.counts["pairs with equal chosen and rejected sequences"] = equal
        if self.unpairs:
            tokens, sizes, rows, labels = _unpaired(loaded)
            columns, origins = loaded.columns.select(rows), loaded.origins.select(rows)
            loaded = replace(loaded, tokens=tokens, sizes=sizes, columns=columns, origins=origins)
            report.counts["rows with one completion, made from pairs"] = len(tokens)
        options = loaded.about["options"] | {"objective": self.objective, "kl_batch_size": self.kl_batch_size}
        loaded = replace(loaded, about=loaded.about | {"options": options})
        return self.rows(loaded, labels)

    def rows(self, loaded: Loaded, labels: Array | None) -> PairDataset:
        """The dataset, whose single completions that were made from pairs have these labels."""
        return PairDataset(loaded, self._objective, self.kl_batch_size, labels)


def _unpaired(loaded: Loaded) -> tuple[Sequences, RowNumbers, RowNumbers, Array]:
    """The two sequences of each pair as rows of their own: tokens, sizes, number of the pair, label."""
    pairs, options = PairSizes(*loaded.sizes), loaded.options
    number = loaded.origins.numbers  # over all files, before any was dropped
    if np.any(np.diff(number) < 0):  # drawn at random
        number = np.arange(len(number))
    plans, loss, kept = [], [], []
    for plan, learned in zip(
        pairs.plans(np.arange(len(number))), (pairs.chosen_loss, pairs.rejected_loss), strict=True
    ):
        keep = ~mask_of(useless_sequences(plan.tokens, learned, "kto", options), len(number))
        if options.filter_overlong_prompts:
            keep &= plan.tokens <= options.max_prompt_length
        kept.append(np.flatnonzero(keep))
        plans.append(plan.take(kept[-1]))
        loss.append(learned[keep])
    rows, label = np.concatenate(kept), np.repeat([True, False], list(map(len, kept)))
    order = np.lexsort((~label, number[rows] // UNPAIRED_ROWS))
    tokens = Sequences(loaded.tokens, Plan.concatenate(plans).take(order))
    nothing = np.zeros(len(rows), np.int64)
    sizes = PairSizes(tokens.lengths, nothing, nothing, np.concatenate(loss)[order], nothing, nothing)
    return tokens, sizes.array(), rows[order], label[order]
