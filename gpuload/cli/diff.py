"""`gpuload diff`: what another tokenizer or template makes of the same rows."""

import argparse
import json
import shutil
import sys

from gpuload.cli.arguments import rows_of, template_kwargs
from gpuload.cli.output import printable
from gpuload.cli.show import uses_color
from gpuload.core.errors import GpuloadError, OptionError
from gpuload.core.words import counted
from gpuload.dataset.notebook import boxes
from gpuload.inspect.data import open_data
from gpuload.inspect.diff import ChangedRow, Difference, DiffPiece, difference

_MARKS = {"same": " ", "removed": "-", "added": "+"}
_COLORS = {"removed": 31, "added": 32}
_WIDEST = 120


def run(given: argparse.Namespace) -> int:
    """Prints how the tokens of rows change, or as JSON counts and numbers of rows. Returns the exit status: 1 if a row
    changes."""
    template, kwargs = given.against_template, given.against_template_kwargs
    if not given.files:
        given.parser.error("no files given")
    if given.against_tokenizer is None and template is None and kwargs is None:
        given.parser.error("pass --against-tokenizer, --against-template or --against-template-kwargs")
    if given.no_template and (template or kwargs):
        given.parser.error("--no-template excludes --against-template and --against-template-kwargs")
    ours = rows_of(given)
    theirs = ours | ({} if template is None else {"chat_template": template})
    if kwargs is not None:
        theirs["apply_chat_template_kwargs"] = template_kwargs(kwargs, "--against-template-kwargs")
    if given.rows < 0:
        raise OptionError(f"--rows {given.rows}: expected an integer >= 0")
    job = open_data(given.files, given.tokenizer, **ours)
    try:
        other = open_data(given.files, given.against_tokenizer or given.tokenizer, **theirs)
    except GpuloadError as error:  # the same option has another name on this side
        said = str(error).replace(", or chat_template=None if the prompts are plain strings", "")
        raise type(error)(said.replace("chat_template=", "against_template=")) from error
    found = difference(job, other, 0 if given.as_json else given.rows)
    if given.as_json:
        print(json.dumps(found.to_dict()))
    else:
        width = min(shutil.get_terminal_size().columns, _WIDEST)
        print(difference_as_text(found, width, uses_color(sys.stdout)))
    return int(bool(found.changed))


def difference_as_text(found: Difference, width: int, color: bool = False) -> str:
    """What is printed in so many columns: counts, then the first changed rows."""
    ours, theirs = found.tokens
    share = f" ({(theirs - ours) / ours:+.1%})" if ours and ours != theirs else ""
    lines = [
        f"{len(found.changed):,} of {found.rows:,} rows change, {found.rows - len(found.changed):,} do not",
        f"  tokens       {ours:,} → {theirs:,}{share}",
    ]
    if found.renumbered:
        lines.append(f"  vocabulary   {counted(found.renumbered, 'tokens have')} another id, or none, in the first one")
    if found.loss_only:
        lines.append(f"  loss         {counted(found.loss_only, 'rows change')} in their loss only")
    if any(found.dropped):
        lines.append(
            f"  dropped      {counted(found.dropped[0], 'rows')} by the first only, "
            f"{found.dropped[1]:,} by the other only"
        )
    for row in found.shown:
        lines += ["", *_of_row(row, width, color)]
    if left := len(found.changed) - len(found.shown):
        lines += ["", f"{counted(left, 'more rows change')}: --rows shows more of them, --json lists all"]
    return "\n".join(lines)


def _of_row(row: ChangedRow, width: int, color: bool) -> list[str]:
    if any(row.reasons):
        texts = [f"dropped: {reason}" if reason else "kept" for reason in row.reasons]
        return [printable(row.place), *(printable(f"{mark} {text}") for mark, text in zip("-+", texts, strict=True))]
    lines = [printable(f"{row.place}: {row.lengths[0]:,} → {counted(row.lengths[1], 'tokens')}")]
    for name, pieces in row.sequences:
        lines += [f"{name}:"] * bool(name)
        for piece in pieces:
            lines += _of_piece(piece, width, color)
    return lines


def _of_piece(piece: DiffPiece, width: int, color: bool) -> list[str]:
    lines = [f"  … {counted(piece.omitted, 'equal tokens')} …"] * bool(piece.omitted)
    made = boxes(piece.tokens, f"{_MARKS[piece.side]} {'loss ' if piece.loss else ''}", width)
    if color and piece.side in _COLORS:
        made = [f"\033[{_COLORS[piece.side]}m{each}\033[0m" for each in made]
    return lines + made
