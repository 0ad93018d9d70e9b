"""Checks of prompts: empty ones, duplicates, and those that another file has, too."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import mask_of
from gpuload.core.arrow import as_numpy, as_scalar
from gpuload.inspect.checks.findings import RowMask
from gpuload.inspect.checks.messages import PROMPT_PART, TEXT_PART, FlatMessages
from gpuload.inspect.checks.overlap import Grams, Ints, digests, overlapping
from gpuload.inspect.checks.rows import CheckedRows, Hit


@dataclass(eq=False)
class PromptTable:
    """The prompts of a data set as numbers."""

    prompts: bool  # their rows are prompts, which have no answers
    grams: bool  # 8-grams are wanted, too
    # Digests of each row: of what the user says, of everything in front of the answer that a template could print, with
    # roles and tools, and of everything that it could print.
    question: list[Ints] = field(default_factory=list)
    prompt: list[Ints] = field(default_factory=list)
    whole: list[Ints] = field(default_factory=list)
    file: list[Ints] = field(default_factory=list)  # the number of the file of each row
    parts: list[Grams] = field(default_factory=list)  # the 8-grams of what users say

    def add(self, messages: FlatMessages, file: int, excluded: RowMask | None = None) -> None:
        """Adds rows of file number `file`. `excluded` (n,) ones are not compared, such as those with images."""
        ours = ~messages.is_answer(self.prompts)
        every = np.ones(len(messages), np.bool_)
        asked = ours & ~messages.has_role("system", "developer", "assistant", "tool", "function")
        questions = messages.texts_of(asked)
        self.question.append(_marked(digests(questions), questions, excluded))
        self.prompt.append(_marked(digests(messages.all_of(ours)), questions, excluded))
        self.whole.append(_marked(digests(messages.all_of(every)), questions, excluded))
        self.file.append(np.full(messages.count, file))
        if self.grams:
            grams = Grams.of(questions)
            self.parts.append(grams if excluded is None else grams.select(~excluded))


_NOTHING = 0  # the digest of rows that are not compared


def _marked(numbers: Ints, texts: pa.LargeStringArray, excluded: RowMask | None) -> Ints:
    empty = _blank(texts)
    return np.where(empty if excluded is None else empty | excluded, _NOTHING, numbers)


def _blank(texts: pa.LargeStringArray) -> RowMask:
    return as_numpy(pc.equal(pc.utf8_trim_whitespace(texts), as_scalar("", texts.type)))


def empty_prompts(rows: CheckedRows, prompts: bool) -> Hit:
    """Rows that are not dropped, and whose prompt has no text, image or anything else. Rows that are `prompts` have no
    answers."""
    messages = rows.messages
    ours = ~messages.is_answer(prompts)
    said = ours & ~messages.has_role("system", "developer")
    written = said & (~_blank(messages.text) | messages.media.any(axis=1))
    has = mask_of(messages.row, messages.count) & ~mask_of(rows.rejected, messages.count)
    plain = messages.rows_of(messages.part == TEXT_PART) if not prompts else np.zeros(messages.count, np.bool_)
    alone = messages.rows_of(messages.part == PROMPT_PART)
    starts = ~messages.rows_of(said) & ~alone & ~plain  # an answer without a question
    empty = has & ~messages.rows_of(written)
    return Hit("empty prompts", empty, lambda row: "no message before the answer" if starts[row] else "")


def duplicates(table: PromptTable, place: Callable[[int], str]) -> Iterator[Hit]:
    """Rows and prompts that an earlier row has, too. `place` is from `run.places_of`."""
    prompt, whole = np.concatenate(table.prompt), np.concatenate(table.whole)
    same, first = _repeated(prompt)
    if table.prompts:
        yield Hit("duplicate prompts", same, lambda row: f"as {place(int(first[row]))}")
        return
    equal, before = _repeated(whole)
    yield Hit("duplicate rows", equal, lambda row: f"as {place(int(before[row]))}")
    others = same & ~equal
    yield Hit("duplicate prompts", others, lambda row: f"as {place(int(first[row]))}, with another answer", "info")


def _repeated(numbers: Ints) -> tuple[RowMask, Ints]:
    """(n,) which numbers an earlier row has, and the first row with each."""
    _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    before = first[inverse]
    return (before < np.arange(len(numbers))) & (numbers != _NOTHING), before


def elsewhere(ours: PromptTable, others: PromptTable | None, place: Callable[[int], str]) -> Iterator[Hit]:
    """Prompts that another file has, too, or of which half is in a prompt of another file.

    Without `others`, the files of ours are compared with each other. `place` is from `run.places_of`, for the others.
    """
    question, file = np.concatenate(ours.question), np.concatenate(ours.file)
    grams = Grams.joined(ours.parts)
    if others is not None:
        yield from _in_others(question, np.concatenate(others.question), grams, Grams.joined(others.parts), place)
        return
    found, near = np.zeros((2, len(question)), np.bool_)
    details: tuple[dict[int, Callable[[int], str]], ...] = ({}, {})  # row → what was found in it
    for number in np.unique(file)[1:].tolist():  # each with those before it
        mine, before = file == number, file < number
        theirs = np.where(before, question, _NOTHING)
        hits = _in_others(np.where(mine, question, _NOTHING), theirs, grams.select(mine), grams.select(before), place)
        for hit, rows, known in zip(hits, (found, near), details, strict=True):
            rows |= hit.rows
            known.update(dict.fromkeys(np.flatnonzero(hit.rows).tolist(), hit.detail))
    yield Hit("also elsewhere", found, lambda row: details[0][row](row))
    yield Hit("overlap elsewhere", near, lambda row: details[1][row](row))


def _in_others(
    question: Ints, theirs: Ints, grams: Grams, their_grams: Grams, place: Callable[[int], str]
) -> Iterator[Hit]:
    order = np.argsort(theirs, kind="stable")
    at = np.minimum(np.searchsorted(theirs[order], question), max(len(theirs) - 1, 0))
    match = order[at]
    same = (theirs[match] == question) & (question != _NOTHING)
    yield Hit("also elsewhere", same, lambda row: f"as {place(int(match[row]))}")
    prompt, other, share = overlapping(grams.select(~same).distinctive(), their_grams.distinctive())
    near = mask_of(prompt, len(question))

    def detail(row: int) -> str:
        number = int(np.searchsorted(prompt, row))
        return f"{share[number]:.0%} of its 8-grams are in {place(int(other[number]))}"

    yield Hit("overlap elsewhere", near, detail)
