"""Few rows, for which the tokenizer itself is the fastest way that is exact.

To compile a template, to compare it with transformers, to accept an encoder and to compare a sample of the rows with
the tokenizer takes as long as some hundred rows do by the tokenizer itself. So transformers renders the rows of a load
that has few of them; and if their text is little, they are encoded as they are, not word by word. Then all ids are the
tokenizer's own, and a few rows are compared with it all the same. Numbers are in docs/caching.md; they are from
`bench.startup`.
"""

import re

FEW_ROWS = 400
"""Rows that transformers renders in the time that it takes to compile a template and to compare it."""

FEW_BYTES = 1 << 20
"""Bytes of their prompts: rows of many messages take longer."""

WHOLE_BYTES = 1 << 17
"""Bytes of prompts that are encoded in the time that it takes to accept an encoder of words and to compare it."""

FEW = "sooner done than compiling the template for so few rows"
"""Why they are rendered by transformers, for the report."""


_LONG = re.compile(r"\b(range|recursive|macro|lipsum|center|indent)\b|\*")


def ends_soon(template: str) -> bool:
    """Whether nothing in a template makes more of a conversation than there is: transformers renders each row without
    a limit of steps, so that a few rows for which a loop does not end would cost the others their time."""
    return _LONG.search(template) is None


def are_few(nbytes: int, rows: int) -> bool:
    """Whether transformers renders the rows of a load.

    Args:
        nbytes: of their prompts.
        rows: how many.
    """
    return rows <= FEW_ROWS and nbytes <= FEW_BYTES
