"""The stages of a load of preference data on the host: rendered texts, ids, and the sequences of each row."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from gpuload.core.arrays import Array, Ragged, appended, array_module, common_prefixes
from gpuload.core.marks import paired, with_loss_from
from gpuload.engines.host.render import HostText
from gpuload.kinds.pairs.reference import PairReference
from gpuload.kinds.training_engine import TextSequences, TrainingEngine


class PairEngine(TrainingEngine):
    """The `Engine` of a load of preference data. For the arguments see `TrainingEngine`."""

    _reference: PairReference

    def __init__(self, reference: Any, exact_only: bool = False, notes: tuple[str, ...] = ()):
        super().__init__(reference, exact_only, notes)
        self.diverging, self._counting = 0, threading.Lock()

    @property
    def counts(self) -> dict[str, int]:
        what = (
            "rows whose prompt alone is encoded otherwise than in front of a completion, which begins where they differ"
        )
        return {what: self.diverging} if self.diverging else {}

    def tokens(self, start: Ragged | None, ids: list[Ragged], text: HostText) -> Ragged:
        """Completions have loss from where their ids first differ from those of the prompt alone; what both sequences
        of a pair begin with is stored once."""
        rows = self.rows_of(ids)
        return rows if start is None else appended(start, rows)

    def rows_of(self, ids: list[Ragged]) -> Ragged:
        """Rows of tokens, of the ids of each column of texts, without what all texts of a row begin with."""
        begins, shared = self.sequences(
            [each.lengths for each in ids], lambda one, other: common_prefixes(ids[one], ids[other])
        )
        marked = [with_loss_from(each, begin) for each, begin in zip(ids, begins, strict=False)]
        return marked[0] if len(marked) == 1 else paired(marked[0], marked[1], shared)

    def sequences(self, lengths: Sequence[Array], common: Callable[[int, int], Array]) -> TextSequences:
        if self._reference.objective == "rm":  # nothing is marked as a completion
            return TextSequences(list(lengths), common(0, 1))
        *whole, alone = range(len(lengths))
        begins = [common(each, alone) for each in whole]
        shared = array_module(lengths[0]).minimum(begins[0], begins[-1])
        with self._counting:
            self.diverging += int((shared < lengths[alone]).sum())
        if len(whole) == 1:
            return TextSequences(begins, lengths[0])
        return TextSequences([shared, shared] if self._reference.objective == "dpo" else begins, shared)
