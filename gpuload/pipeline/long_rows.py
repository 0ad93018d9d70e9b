"""Rows that `tokenizers` cannot encode in the memory that is free: dropped with a reason, and the others are loaded.

Which row it is, an encoder does not know: it gets texts that engines have joined, cut and selected. So the few long
rows of such a batch are tried one by one. That costs seconds, where the load would have ended.
"""

import numpy as np
import pyarrow as pa

from gpuload.core.arrays import Ragged
from gpuload.core.memory import LONG_TEXT, NoRoomError
from gpuload.engines.host.render import HostText, MixedText
from gpuload.engines.protocol import Engine, Prompts, RenderedText


def rows_without_room(engine: Engine, prompts: Prompts, text: RenderedText) -> dict[int, NoRoomError]:
    """The rows of a batch that cannot be encoded, and why.

    Args:
        text: the same rows, rendered.
    """
    found = {}
    for row in np.flatnonzero(text.sizes > LONG_TEXT).tolist():
        try:
            engine.encode(engine.render(prompts.take(np.array([row]))))
        except NoRoomError as error:
            found[row] = error
    return found


def rendered_without(engine: Engine, prompts: Prompts, rejected: dict[int, str]) -> HostText:
    """A batch rendered once more, without some rows, which are rejected.

    Args:
        engine: of the host.
        rejected: row → why.
    """
    others = np.setdiff1d(np.arange(len(prompts)), list(rejected))
    rest = engine.render(prompts.take(others))
    assert isinstance(rest, HostText)
    nothing = HostText(
        text=pa.nulls(len(rejected), pa.large_string()),
        ids=Ragged.from_lists([[]] * len(rejected)),
        rejected=dict(enumerate(rejected.values())),
    )
    return MixedText.of([(others.tolist(), rest), (list(rejected), nothing)])
