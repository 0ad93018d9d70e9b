"""The output of a template, and which parts of it are `{% generation %}` blocks."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpuload.template.rope import Rope, join


class Output(NamedTuple):
    """What a template printed."""

    parts: tuple[str | Rope, ...]  # texts and ropes, to be joined; cut where a generation block begins or ends
    # The parts [first, end) of each generation block, in order of their ends. None if a block is not printed where it
    # stands, for example because it is in a macro whose result is printed later.
    generated: tuple[tuple[int, int], ...] | None


def output_of(printed: Sequence[Any], blocks: Sequence[tuple[int, Any]]) -> Output:
    """Joins what was printed between the ends of blocks: how many parts were printed before each, and its text."""
    if any(at >= len(printed) or printed[at] is not text for at, text in blocks):
        return Output((join(printed),), None)
    cuts = sorted({0, len(printed), *(cut for at, _ in blocks for cut in (at, at + 1))})
    number = {cut: part for part, cut in enumerate(cuts)}
    parts = tuple(join(printed[low:high]) for low, high in itertools.pairwise(cuts))
    return Output(parts, tuple((number[at], number[at + 1]) for at, _ in blocks))
