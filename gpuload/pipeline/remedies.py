"""Reasons for rejected rows, with what would make the template accept them."""

from collections.abc import MutableMapping

import numpy as np

from gpuload.engines.protocol import Prompts
from gpuload.reference.reference import Reference
from gpuload.sources.columns import to_python

_MOST_REASONS = 64


def add_remedies(
    reference: Reference, prompts: Prompts, rejected: MutableMapping[int, str], known: dict[str, str]
) -> None:
    """Adds remedies to the reasons of a batch. The first row with a reason decides for all others.

    Args:
        prompts: of the batch.
        rejected: row → reason.
        known: reason → what is added to it; it grows.
    """
    for row, reason in rejected.items():
        if reason not in known and len(known) < _MOST_REASONS:
            try:
                (prompt,) = to_python(prompts.to_arrow(np.array([row])))
                known[reason] = reference.remedy(prompt)
            except Exception:  # a row that Python cannot read, for example
                known[reason] = ""
    rejected.update({row: reason + known[reason] for row, reason in rejected.items() if known.get(reason)})
