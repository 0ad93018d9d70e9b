"""Of how many tokens the parts of pairs are, and which rows are of no use for that reason."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from gpuload.core.arrays import Array, Ragged, RowNumbers, array_module, count_in_rows, offsets_of, ranges
from gpuload.core.marks import CHOSEN, IDS, LOSS, REJECTED
from gpuload.core.options import Objective, Options
from gpuload.packing.plan import Plan, whole_rows


@dataclass(frozen=True, eq=False)
class PairSizes:
    """Of how many tokens the parts of n rows are, see `gpuload.core.marks`; (n,) int64 arrays.

    A row that is not a pair has no tokens that only one sequence has: it counts as its chosen sequence.
    """

    all: Array  # those of each row
    chosen: Array  # those that only the chosen sequence has
    rejected: Array  # those that only the rejected one has
    chosen_loss: Array  # those of the chosen sequence that have loss
    rejected_loss: Array  # those of the rejected one
    equal: Array  # 1 for pairs of two equal sequences

    @classmethod
    def of(cls, tokens: Ragged) -> Self:
        """Counts the tokens of rows, in host or device memory, which is where the arrays are."""
        chosen, rejected = (count_in_rows((tokens.values & bit) != 0, tokens.offsets) for bit in (CHOSEN, REJECTED))
        loss, other = (
            count_in_rows((tokens.values & (LOSS | bit)) == LOSS, tokens.offsets) for bit in (REJECTED, CHOSEN)
        )
        return cls(tokens.lengths, chosen, rejected, loss, other, _equal(tokens, chosen, rejected))

    def array(self) -> Array:
        """(6, n): the attributes in their order."""
        return array_module(self.all).stack([getattr(self, name) for name in self.__dataclass_fields__])

    @property
    def longer(self) -> Array:
        """Tokens of the longer of the two sequences of each row; those of the row itself if it is not a pair."""
        return self.all - np.minimum(self.chosen, self.rejected)

    @property
    def shorter(self) -> Array:
        """The same of the shorter one."""
        return self.all - np.maximum(self.chosen, self.rejected)

    def plans(self, pairs: RowNumbers) -> tuple[Plan, Plan]:
        """Of which pieces of a row the chosen and the rejected sequence of each of B pairs consist."""
        end = (self.all - self.rejected)[pairs]
        shared, rest = whole_rows(pairs, end - self.chosen[pairs]), whole_rows(pairs, self.rejected[pairs], end)
        return whole_rows(pairs, end), Plan.joined(shared, rest)


def _equal(tokens: Ragged, chosen: Array, rejected: Array) -> Array:
    """(n,) int64: 1 for pairs whose two sequences are equal."""
    xp = array_module(tokens.values)
    same = xp.flatnonzero(chosen == rejected)
    size, end = chosen[same], tokens.offsets[1:][same]
    bounds = offsets_of(size)
    one, other = (tokens.values[ranges(end - k * size, size, bounds)] & IDS for k in (2, 1))
    equal = xp.zeros(len(tokens), np.int64)
    equal[same] = count_in_rows(one != other, bounds) == 0
    return equal


def useless_sequences(
    length: RowNumbers, learned: RowNumbers, objective: Objective, options: Options
) -> dict[int, str]:
    """The sequences (n,) of which no token would be learned: row → why. They have `length` tokens, of which those of
    the completion are `learned`."""
    learned, limit = length if objective == "rm" else learned, options.max_prompt_length
    reasons = {}
    if options.truncation == "right" and objective != "rm":
        why = f"the prompt alone fills max_length={limit}"
        reasons = dict.fromkeys(np.flatnonzero(length - learned >= limit).tolist(), why)
    return reasons | dict.fromkeys(np.flatnonzero(learned == 0).tolist(), "a completion has no tokens")
