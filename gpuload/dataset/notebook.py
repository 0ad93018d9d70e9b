"""Datasets, batches and reports as notebooks show them: small tables, in which everything from the data is escaped."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from gpuload.core.lazy import Later
from gpuload.tokenizer.visible import shown, visible_text

_MOST = 200  # characters of a value
_WIDTH = 78  # of a line of tokens
_LEFT, _CODE = 'style="text-align:left"', 'style="text-align:left;white-space:pre-wrap"'


def table_html(caption: str, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table with a caption above it; without the names of columns, it has no header."""
    head = "".join(f"<th {_LEFT}>{_cell(name)}</th>" for name in columns)
    lines = ["".join(f"<td {_CODE}>{_cell(value)}</td>" for value in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    start = f"<thead><tr>{head}</tr></thead>" if columns else ""
    return f"<div><b>{_cell(caption)}</b><table>{start}<tbody>{body}</tbody></table></div>"


def lines_html(text: str) -> str:
    """A report: a line of what it says first, then lines that begin with a name of up to ten characters."""
    first, *lines = text.split("\n")
    rows: list[list[str]] = []
    for line in lines:
        name, rest = line[:12].strip(), line[12:].strip()
        if name and line[12:13] == " ":
            rows.append([name, rest])
        elif rows:
            rows[-1][1] += f"\n{line.strip()}"
        else:
            rows.append(["", line.strip()])
    return table_html(first, (), rows)


def batch_html(batch: Mapping[str, Any], caption: str) -> str:
    """The keys of a batch with shapes and types. Values that nobody has read are not made for it."""
    rows = []
    for name, value in batch.items():
        if isinstance(value, Later):
            about, first = "not read yet", ""
        elif hasattr(value, "shape"):
            place = f" on {value.device}" if str(getattr(value, "device", "cpu")) != "cpu" else ""
            about = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{place}"
            first = str(value.tolist()[0]) if value.ndim and len(value) else ""
        else:
            about, first = type(value).__name__, str(value)
        rows.append((name, about, first[:_MOST]))
    return table_html(caption, ("key", "shape and type", "first value"), rows)


def token_lines(pieces: Sequence[bytes], loss: "np.ndarray[Any, Any] | None") -> Iterator[str]:
    """Tokens in brackets, in lines of a terminal; where some have loss, tokens with and without it are apart."""
    learned = [None] * len(pieces) if loss is None else loss.tolist()
    for has_loss, run in groupby(zip(learned, pieces, strict=True), itemgetter(0)):
        if has_loss is not None:
            yield "loss" if has_loss else "no loss"
        yield from boxes((piece for _, piece in run), "  ", _WIDTH)


def boxes(pieces: Iterable[bytes], start: str, width: int) -> list[str]:
    """Tokens in brackets, in lines that begin with `start` and, if one token fits, are not longer than `width`."""
    lines: list[str] = []
    for piece in pieces:
        box = f"[{visible_text(piece)}]"
        if not lines or len(lines[-1]) + len(box) > width:
            lines.append(start)
        lines[-1] += box
    return lines


def _cell(value: Any) -> str:
    text = str(value)
    from html import escape  # a list of all entities comes with it

    return escape(shown(text if len(text) <= _MOST * 4 else f"{text[: _MOST * 4]}…"))
