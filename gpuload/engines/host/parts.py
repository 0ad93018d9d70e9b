"""Which bytes of rendered texts come from which message, and which tokens have such bytes.

A compiled path lists the segments of a text: literals of the template, and texts of messages. So the bytes of a message
are known exactly, whatever is in them. A token belongs to the first message of which it has a byte; a token without any
is one of the template.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from gpuload.core.arrow import fill_null
from gpuload.engines.conversations import from_arrow, row_messages
from gpuload.engines.host.render import Spans, write
from gpuload.engines.host.texts import Bools, HostTexts, Ints
from gpuload.engines.walk import Walk
from gpuload.template.compiler import ChatProgram
from gpuload.template.program import Ref


@dataclass(frozen=True, eq=False)
class Parts:
    """n texts, and where the texts of messages are in them.

    Attributes:
        text: (n,) large_string, none of them null.
        spans: k parts of these texts; those of one text do not overlap.
        role: (k,) int64, the role of each part, as an index into `roles`.
        roles: the names of roles.
        known: (n,) bool, false for texts whose parts are unknown, because transformers has rendered them.
    """

    text: pa.LargeStringArray
    spans: Spans
    role: Ints
    roles: Sequence[str]
    known: Bools


def message_parts(program: ChatProgram, prompts: pa.Array) -> Parts:
    """Renders conversations, and keeps where the texts of their messages are.

    Args:
        program: the compiled template, of a tokenizer that does not sanitize control tokens.
        prompts: (n,) list<struct<role, content, ...>>, or several such columns that are `joined`.
    """
    walk = Walk(program, from_arrow(HostTexts(), prompts))
    text, bounds, offsets = write(walk)
    known = np.zeros(len(text), np.bool_)
    names: dict[str, int] = {}
    found = [np.zeros((4, 0), np.int64)]  # row, start, end, role
    for path, rows in walk.paths:
        known[rows] = True
        # All rows of a path have the same shape, and a shape has the roles.
        messages = row_messages(walk.prompts.to_arrow(rows[:1])[0].as_py())
        refs = [(number, part.message) for number, part in enumerate(path.segments) if isinstance(part, Ref)]
        if not refs:
            continue
        role = [names.setdefault(str(messages[message]["role"]), len(names)) for _, message in refs]
        segment = bounds[rows][:, None] + [number for number, _ in refs]
        base = offsets[bounds[rows]][:, None]
        columns = (rows[:, None], offsets[segment] - base, offsets[segment + 1] - base, np.array(role)[None, :])
        found.append(np.stack([np.broadcast_to(each, segment.shape).ravel() for each in columns]))
    row, start, end, code = np.concatenate(found, axis=1)
    order = np.lexsort((start, row))
    whole = fill_null(text, "")
    return Parts(whole, Spans(row[order], start[order], end[order]), code[order], tuple(names), known)
