"""The stages of a load for SFT on the host: rendered text, ids, and which of them have loss."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuload.core.arrays import Array, Ragged, appended, common_prefixes, stretches
from gpuload.core.arrow import fill_null
from gpuload.core.marks import LOSS, with_loss
from gpuload.engines.host.prompts import render_rows
from gpuload.engines.host.render import HostText
from gpuload.kinds.chats.reference import ChatReference
from gpuload.kinds.training_engine import TextSequences, TrainingEngine
from gpuload.kinds.training_reference import messages_in
from gpuload.sources.types import as_json


class ChatEngine(TrainingEngine):
    """The `Engine` of a load for SFT. For the arguments see `TrainingEngine`."""

    _reference: ChatReference

    def _given(self, row: Any) -> list[str]:
        return [messages_in(row)]

    def _of_form(self, form: str, rows: list[Any], plain: bool) -> HostText:
        if form == "messages" and not self._reference.uses_template:  # conversations in a column of texts
            return render_rows(as_json(rows), self._reference, self.program, why="there is no chat template")
        return super()._of_form(form, rows, plain)

    @property
    def marks_completions(self) -> bool:
        return self._reference.loss_on == "completion"

    def sequences(self, lengths: Sequence[Array], common: Callable[[int, int], Array]) -> TextSequences:
        return TextSequences([common(0, 1)], lengths[0])

    def tokens(self, start: Ragged | None, ids: list[Ragged], text: HostText) -> Ragged:
        """A completion has loss from where its ids first differ from those of the prompt alone; answers where they are
        in the text; other texts everywhere."""
        whole, *alone = ids
        prompt = common_prefixes(whole, alone[0]) if alone else None
        if start is not None:
            whole, prompt = appended(start, whole), start.lengths + prompt
        answers = text.by_template and self.program.answers is not None
        if self._reference.loss_on == "all" or (prompt is None and not answers):
            return with_loss(whole, np.ones(len(whole.values), bool))
        bits = np.full(len(whole.values), LOSS)
        if answers:
            if text.answers is None:
                return whole
            bits = self.spans.bits(fill_null(text.text, ""), whole, *text.answers)
        if prompt is not None:
            bits = bits * stretches(prompt, whole.lengths - prompt)
        return Ragged(whole.values | bits, whole.offsets)
