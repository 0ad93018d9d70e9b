"""What another tokenizer, or another template, makes of the same rows: token by token.

Tokens of two vocabularies are the same if they have the same bytes, and both are added tokens or neither is. So the ids
of one are translated into those of the other, and rows are compared as columns of numbers. Loss is compared, too.
"""

import difflib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpuload.core.arrays import Ragged, common_prefixes, mask_of
from gpuload.core.errors import OptionError
from gpuload.core.marks import CHOSEN, IDS, LOSS, REJECTED, sequence
from gpuload.engines.protocol import ArrowPrompts
from gpuload.inspect.tokens import TokenReader
from gpuload.pipeline.run import Job
from gpuload.reference.reference import Reference
from gpuload.sources.read import check_unchanged, with_prompts

Side = Literal["same", "removed", "added"]

_CONTEXT = 8  # equal tokens that are shown before and after a difference
_MOST_TOKENS = 4000  # of a sequence that are compared one by one where they are shown


@dataclass(frozen=True)
class DiffPiece:
    """Consecutive tokens of a row."""

    side: Side  # whether both have them, or only one
    tokens: Sequence[bytes]  # their bytes
    loss: bool | None  # whether they have loss; None where no token has
    omitted: int = 0  # equal tokens that are not shown before these


@dataclass(frozen=True)
class ChangedRow:
    """A row of which the two make different tokens."""

    place: str  # its file and its number there
    number: int  # counted over all files
    reasons: tuple[str | None, str | None]  # why one of the two drops the row, if it does; for both
    lengths: tuple[int, int]  # tokens of each, of both
    sequences: Sequence[tuple[str, Sequence[DiffPiece]]]  # name and pieces of each sequence that differs


@dataclass(eq=False)
class Difference:
    """What two tokenizers or templates make of the same rows."""

    rows: int = 0  # that were compared
    changed: list[int] = field(default_factory=list)  # numbers of those that differ, counted over all files
    loss_only: int = 0  # how many of these differ in their loss only
    dropped: list[int] = field(default_factory=lambda: [0, 0])  # rows that only the first one drops, and only the other
    tokens: list[int] = field(default_factory=lambda: [0, 0])  # of all rows, of both
    renumbered: int = 0  # tokens with another id in the other vocabulary
    shown: list[ChangedRow] = field(default_factory=list)  # the first changed rows

    def to_dict(self) -> dict[str, Any]:
        """The counts and the numbers of the rows."""
        names = ("rows", "changed", "loss_only", "dropped", "tokens", "renumbered")
        return {name: getattr(self, name) for name in names}


def difference(job: Job[Any], other: Job[Any], most: int) -> Difference:
    """Compares what two jobs, opened with the same files and not yet run, make of them; `most` changed rows are shown.

    Raises:
        OptionError: the two see different kinds of data in the files.
    """
    if job.kind.name != other.kind.name:
        raise OptionError(
            f"the files have {job.kind.name} for one tokenizer and {other.kind.name} for the other: pass --as"
        )
    found = Difference()
    translate = _translation(job.reference, other.reference)
    readers = TokenReader(job.reference), TokenReader(other.reference)
    engines = [each.kind.engine(replace(each.options, device="cpu"), each.reference, False) for each in (job, other)]
    with ExitStack() as stack:
        for each, engine in zip((job, other), engines, strict=True):
            stack.enter_context(engine.loading())
            stack.enter_context(each.reference.clock_stopped())
        for one, second in zip(job.sources, other.sources, strict=True):
            row = 0
            batches = zip(
                with_prompts(one, job.options.prompt_key), with_prompts(second, other.options.prompt_key), strict=True
            )
            for (_, column), (_, again) in batches:
                made = [e.encode(e.render(ArrowPrompts(c))) for e, c in zip(engines, (column, again), strict=True)]
                _compare(found, job.kind.name, made, translate, readers, f"{one.name} row", row, most)
                row += len(column)
    check_unchanged(job.sources)
    return found


def _compare(
    found: Difference,
    kind: str,
    made: Sequence[Any],
    translate: npt.NDArray[np.int32] | None,
    readers: Sequence[TokenReader],
    place: str,
    row: int,
    most: int,
) -> None:
    """Adds what both have `made` of n rows, the first of which is number `row` of its file."""
    pairs = [_sequences(kind, each.ids) for each in made]
    count = len(made[0])
    rejected = np.stack([mask_of(each.rejected, count) for each in made])
    changed = rejected[0] != rejected[1]
    for side in range(2):
        found.dropped[side] += int((rejected[side] & ~rejected[1 - side]).sum())
    loss_only = np.ones(count, np.bool_)
    for (_, ours), (_, theirs) in zip(*pairs, strict=True):
        found.tokens[0] += len(ours.values)
        found.tokens[1] += len(theirs.values)
        same = Ragged(_translated(theirs.values, translate), theirs.offsets)
        found.renumbered += int(((same.values & IDS) != (theirs.values & IDS)).sum()) if translate is not None else 0
        changed |= ~_equal(ours, same)
        plain = [Ragged(each.values & IDS, each.offsets) for each in (ours, same)]
        loss_only &= _equal(*plain)
    changed &= ~(rejected[0] & rejected[1])
    found.loss_only += int((changed & loss_only & ~rejected.any(axis=0)).sum())
    for at in np.flatnonzero(changed).tolist():
        if len(found.shown) < most:
            reasons = made[0].rejected.get(at), made[1].rejected.get(at)
            sequences = [
                (name, list(_pieces(ours[at], theirs[at], translate, readers, kind != "prompts")))
                for (name, ours), (_, theirs) in zip(*pairs, strict=True)
            ]
            lengths = [sum(len(each[at]) for _, each in pairs[side]) for side in range(2)]
            differ = [each for each in sequences if any(piece.side != "same" for piece in each[1])]
            shown = [] if any(reasons) else differ
            found.shown.append(
                ChangedRow(f"{place} {row + at}", found.rows + at, reasons, (lengths[0], lengths[1]), shown)
            )
    found.changed += (np.flatnonzero(changed) + found.rows).tolist()
    found.rows += count


def _sequences(kind: str, ids: Ragged) -> list[tuple[str, Ragged]]:
    if kind == "pairs":
        return [("chosen", sequence(ids, REJECTED)), ("rejected", sequence(ids, CHOSEN))]
    return [("", Ragged(ids.values & (IDS | LOSS), ids.offsets))]


def _equal(one: Ragged, other: Ragged) -> npt.NDArray[np.bool_]:
    """(n,) which rows are equal."""
    equal: npt.NDArray[np.bool_] = (one.lengths == other.lengths) & (common_prefixes(one, other) == one.lengths)
    return equal


# -- vocabularies ----------------------------------------------------------------------------------------------------


def _translation(one: Reference, other: Reference) -> npt.NDArray[np.int32] | None:
    """(ids of the other,) the id of the same token in the first vocabulary, or one that it does not have; None if both
    vocabularies are equal."""
    if one.tokenizer.get_vocab() == other.tokenizer.get_vocab():
        return None
    ours, theirs = {key: token for token, key in _keys(one)}, dict(_keys(other))
    made = np.arange(max(len(other.tokenizer), *theirs) + 1, dtype=np.int32)
    free = len(one.tokenizer) + 1
    for token, key in theirs.items():
        made[token] = ours.get(key, min(free + token, int(IDS)))
    return made


def _keys(reference: Reference) -> Iterator[tuple[int, tuple[bytes, bool]]]:
    reader = TokenReader(reference)
    added = set(reference.tokenizer.get_added_vocab().values())
    for token in reference.tokenizer.get_vocab().values():
        yield token, (reader.piece(token), token in added)


def _translated(tokens: npt.NDArray[np.int32], translate: npt.NDArray[np.int32] | None) -> npt.NDArray[np.int32]:
    return tokens if translate is None else (translate[tokens & IDS] | (tokens & LOSS))


# -- what is shown ---------------------------------------------------------------------------------------------------


def _pieces(
    ours: npt.NDArray[np.int32],
    theirs: npt.NDArray[np.int32],
    translate: npt.NDArray[np.int32] | None,
    readers: Sequence[TokenReader],
    with_loss: bool,
) -> Iterator[DiffPiece]:
    """The differences of two rows, with some equal tokens around them."""
    ours, theirs = ours[:_MOST_TOKENS], theirs[:_MOST_TOKENS]
    both = ours.tolist(), _translated(theirs, translate).tolist()
    steps = difflib.SequenceMatcher(None, *both, autojunk=False).get_opcodes()
    for number, (what, low, high, start, end) in enumerate(steps):
        if what != "equal":
            yield from _runs("removed", ours[low:high], readers[0], with_loss)
            yield from _runs("added", theirs[start:end], readers[1], with_loss)
            continue
        head = low + _CONTEXT * (number > 0)  # up to here, and from `tail` on, equal tokens are shown
        tail = high - _CONTEXT * (number + 1 < len(steps))
        omitted = max(0, tail - head)
        yield from _runs("same", ours[low : head if omitted else high], readers[0], with_loss)
        if omitted and tail < high:
            yield from _runs("same", ours[tail:high], readers[0], with_loss, omitted)
        elif omitted:
            yield DiffPiece("same", [], None, omitted)


def _runs(
    side: Side, tokens: npt.NDArray[np.int32], reader: TokenReader, with_loss: bool, omitted: int = 0
) -> Iterator[DiffPiece]:
    """Tokens, in runs that have loss or not."""
    bounds = np.flatnonzero(np.diff((tokens & LOSS) != 0)) + 1 if with_loss else np.zeros(0, np.int64)
    for part in np.split(tokens, bounds):
        if len(part):
            loss = bool(part[0] & LOSS) if with_loss else None
            yield DiffPiece(side, [reader.piece(int(token)) for token in (part & IDS)], loss, omitted)
            omitted = 0
