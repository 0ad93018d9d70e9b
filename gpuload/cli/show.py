"""`gpuload show`: one row of a dataset, token by token."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import pyarrow as pa

from gpuload.cli.arguments import data_of
from gpuload.cli.output import printable
from gpuload.core.arrays import Ragged
from gpuload.core.marks import LOSS
from gpuload.core.options import Options
from gpuload.core.words import counted
from gpuload.inspect.data import encode_row, find_row, one_row, open_data
from gpuload.inspect.roles import RoleFinder
from gpuload.inspect.tokens import SampleRow, Token, TokenReader, TokenSequence, pair_of, shown, visible, visible_text
from gpuload.pipeline.run import Job
from gpuload.sources.columns import to_python
from gpuload.sources.open import open_all

_COLORS: Mapping[str | None, int] = {
    None: 39, "template": 90, "system": 35, "user": 34, "prompt": 34, "text": 34, "assistant": 32, "completion": 32,
}  # fmt: skip
_OTHER_ROLE = 33
_MOST_VALUE = 2000  # characters of a column's value


def run(given: argparse.Namespace) -> int:
    """Prints a row: its tokens, or its columns if there is no tokenizer. A negative number counts from the end."""
    options = data_of(given)
    if given.tokenizer is None:
        opened = open_all(given.file, Options())
        source, number = find_row([source for source in opened if source.num_rows], given.row)
        print(printable(f"{source.name} row {number}"))
        for name, column in zip(source.schema.names, one_row(source.batches(), number).columns, strict=True):
            value = to_python(column.combine_chunks())[0]
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2, default=str)
            print(f"\n{printable(name)}\n{_indented(text)}")
        return 0
    job = open_data(given.file, given.tokenizer, **options)
    source, number = find_row(job.sources, given.row)
    column, ids, dropped = encode_row(job, source, number)
    sequences = _sequences(job, column, ids) if ids else []
    print(in_terminal(SampleRow("", source.name, number, sequences, dropped), uses_color(sys.stdout)))
    return 0


def _sequences(job: Job[Any], column: pa.Array, marked: list[int]) -> list[TokenSequence]:
    """The tokens of one row, of which `encode_row` has made both arguments."""
    reader = TokenReader(job.reference)
    if job.kind.name == "pairs":
        return pair_of(reader, marked, most=None)
    chats, finder = job.kind.name == "chats", RoleFinder(job.reference)
    ids = Ragged.from_lists([[token & ~int(LOSS) for token in marked]])
    codes = finder.codes(column, ids)
    return [reader.sequence("conversation" if chats else "prompt", marked, codes, finder.names, chats, most=None)]


def uses_color(stream: TextIO) -> bool:
    """Whether to print colors: to a terminal, unless NO_COLOR is set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def in_terminal(row: SampleRow, color: bool) -> str:
    """A row as text. In color, tokens have the color of their role, and those with loss are underlined. Otherwise there
    is a line for each run of tokens of one role, and of tokens with or without loss."""
    lines = [printable(f"{row.file} row {row.number}")]
    if row.dropped is not None:
        lines.append(printable(f"dropped: {row.dropped}"))
    for sequence in row.sequences:
        tokens = sequence.tokens
        with_loss = sum(bool(token.loss) for token in tokens)
        loss = f", {with_loss:,} with loss" if tokens[0].loss is not None else ""
        lines += ["", f"{sequence.name}: {counted(sequence.length, 'tokens')}{loss}", ""]
        lines += [_colored(tokens), "", _legend(tokens)] if color else _plain(tokens)
    if len(row.sequences) == 2:
        at = row.difference
        lines += ["", "both are equal" if at is None else f"both begin with the same {counted(at, 'tokens')}"]
    return "\n".join(lines)


def _plain(tokens: list[Token]) -> list[str]:
    lines: list[str] = []
    before: tuple[str | None, bool | None] | None = None
    for token in tokens:
        run = (token.role, token.loss)
        if run != before:
            lines.append(printable(f"{token.role or 'unknown role'}{', loss' if token.loss else ''}"))
            lines.append("  ")
        elif len(lines[-1]) > 100:
            lines.append("  ")
        lines[-1] += f"[{visible_text(token.piece)}]"
        before = run
    return lines


def _colored(tokens: list[Token]) -> str:
    parts = []
    for number, token in enumerate(tokens):
        styles = [f"{_COLORS.get(token.role, _OTHER_ROLE)}", *["4"] * bool(token.loss), *["1"] * token.special]
        # Every second token is in reverse, so that the borders of tokens can be seen on any background.
        styles += ["7"] * (number % 2)
        start = f"\033[{';'.join(styles)}m"
        text = "".join(
            f"\033[2m{part}\033[22m" + "\033[1m" * token.special if mark else part
            for part, mark in visible(token.piece)
        )
        parts.append(f"{start}{text}\033[0m" + "\n" * token.piece.endswith(b"\n"))
    return "".join(parts)


def _legend(tokens: list[Token]) -> str:
    roles = dict.fromkeys(token.role for token in tokens)
    words = [f"\033[{_COLORS.get(role, _OTHER_ROLE)}m{printable(role or 'unknown role')}\033[0m" for role in roles]
    return "  ".join([*words, "\033[4mloss\033[0m", "\033[1mspecial token\033[0m"])


def _indented(text: str) -> str:
    more = len(text) - _MOST_VALUE
    cut = text if more <= 0 else f"{text[:_MOST_VALUE]}… ({counted(more, 'more characters')})"
    return "\n".join(f"  {line}" for line in shown(cut).split("\n"))
