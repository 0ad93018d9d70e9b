"""Checks of prompts: empty ones, duplicates, and those that another file has, too, or in large part.

Prompts are compared by digests, and by 8-grams of their words. A word is a run of letters and digits, in lower case; a
character of Chinese, Japanese or Korean is a word by itself. 8-grams are numbers, and prompts are compared by sorting
and joining these. 8-grams that many prompts of a data set have are its instructions, not its questions, and do not
count.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpuload.core.arrays import mask_of, offsets_of, ranges
from gpuload.core.arrow import as_numpy, as_scalar
from gpuload.inspect.checks.findings import RowMask
from gpuload.inspect.checks.messages import PROMPT_PART, TEXT_PART, FlatMessages, Ints
from gpuload.inspect.checks.rows import CheckedRows, Hit

GRAM = 8
SHARE = 0.5  # of a prompt's 8-grams that are in one other prompt
COMMON = 16  # 8-grams that more prompts of a data set have do not count
Hashes = npt.NDArray[np.uint64]

_BLOCK = 1 << 22  # bytes of text that are split into words at a time

# Punctuation of U+2000 to U+203F and U+3000 to U+303F, and full-width signs, separate words, too.
_BETWEEN = r"[^a-z0-9\x{80}-\x{1FFF}\x{2040}-\x{2FFF}\x{3040}-\x{FEFF}\x{FF10}-\x{10FFFF}]+"
_ALONE = r"[\x{3040}-\x{D7FF}]"  # scripts without spaces between words


# -- digests and 8-grams ---------------------------------------------------------------------------------------------


def digests(texts: pa.LargeStringArray) -> Ints:
    """(n,) a number for each text, without the white space around it."""
    return _numbers(pc.utf8_trim_whitespace(texts))


def _numbers(texts: pa.LargeStringArray) -> Ints:
    bytes_of_texts = texts.cast(pa.large_binary()).to_pylist()
    return np.frombuffer(b"".join(hashlib.blake2b(each, digest_size=8).digest() for each in bytes_of_texts), np.int64)


@dataclass(frozen=True, eq=False)
class Grams:
    """The 8-grams of n prompts, each once for a prompt."""

    grams: Hashes  # (g,) uint64
    prompts: Ints  # (g,) int64, the prompt of each
    count: int  # n

    @staticmethod
    def of(texts: pa.LargeStringArray) -> "Grams":
        """The 8-grams of (n,) texts."""
        return Grams.joined([_grams(part) for part in _blocks(pc.utf8_lower(texts))])

    @staticmethod
    def joined(parts: list["Grams"]) -> "Grams":
        """The prompts of all parts, one after the other."""
        starts = np.cumsum([0, *(each.count for each in parts)])
        return Grams(
            np.concatenate([np.zeros(0, np.uint64), *(each.grams for each in parts)]),
            np.concatenate([np.zeros(0, np.int64), *(e.prompts + s for e, s in zip(parts, starts, strict=False))]),
            sum(each.count for each in parts),
        )

    def distinctive(self) -> "Grams":
        """Without 8-grams that many prompts have."""
        ordered = np.sort(self.grams)
        common = np.unique(ordered[COMMON:][ordered[COMMON:] == ordered[: max(0, len(ordered) - COMMON)]])
        if not len(common):
            return self
        keep = common[np.minimum(np.searchsorted(common, self.grams), len(common) - 1)] != self.grams
        return Grams(self.grams[keep], self.prompts[keep], self.count)

    def select(self, prompts: npt.NDArray[np.bool_]) -> "Grams":
        """Those of some prompts, with the same numbers, by a mask (n,)."""
        keep = prompts[self.prompts]
        return Grams(self.grams[keep], self.prompts[keep], self.count)


def overlapping(ours: Grams, others: Grams) -> tuple[Ints, Ints, npt.NDArray[np.float64]]:
    """Prompts of which a large part is in one other prompt. Both come without common 8-grams.

    Returns:
        (k,) the numbers of these prompts, ascending; of each, the other prompt that has most of it; and the share of
        its 8-grams that this one has.
    """
    order, mine = np.argsort(others.grams, kind="stable"), np.argsort(ours.grams, kind="stable")
    wanted, given = ours.grams[mine], others.grams[order]  # both sorted: neighbours in memory are looked up in turn
    low = np.searchsorted(given, wanted, side="left")
    count = np.searchsorted(given, wanted, side="right") - low
    prompt = np.repeat(ours.prompts[mine], count)
    other = others.prompts[order[ranges(low, count, offsets_of(count))]]
    pairs, shared = np.unique(prompt * max(others.count, 1) + other, return_counts=True)
    prompt, other = np.divmod(pairs, max(others.count, 1))
    share = shared / np.bincount(ours.prompts, minlength=ours.count)[prompt]
    kept = np.flatnonzero(share >= SHARE)
    kept = kept[np.lexsort((-share[kept], prompt[kept]))]
    kept = kept[np.unique(prompt[kept], return_index=True)[1]]
    return prompt[kept], other[kept], share[kept]


def _blocks(texts: pa.LargeStringArray) -> list[pa.LargeStringArray]:
    block = np.cumsum(as_numpy(pc.binary_length(texts))) // _BLOCK
    bounds = [0, *(np.flatnonzero(np.diff(block)) + 1).tolist(), len(texts)]
    return [texts.slice(low, high - low) for low, high in itertools.pairwise(bounds)]


def _grams(texts: pa.LargeStringArray) -> Grams:
    """The 8-grams of some texts in lower case."""
    lists = pc.split_pattern_regex(pc.replace_substring_regex(texts, _ALONE, r" \0 "), _BETWEEN)
    words, prompt = lists.flatten(), as_numpy(pc.list_parent_indices(lists))
    some = pc.not_equal(words, as_scalar("", words.type))
    words, prompt = words.filter(some).dictionary_encode(), prompt[as_numpy(some)]
    hashes = _numbers(words.dictionary).view(np.uint64)[as_numpy(words.indices)]
    grams = np.zeros(max(0, len(hashes) - GRAM + 1), np.uint64)
    for place in range(GRAM):
        grams = _mixed(grams + hashes[place : place + len(grams)])
    inside = prompt[: len(grams)] == prompt[GRAM - 1 :]
    prompt, grams = prompt[: len(grams)][inside], grams[inside]
    _, first = np.unique(grams ^ _mixed(prompt.astype(np.uint64)), return_index=True)
    return Grams(grams[first], prompt[first], len(texts))


def _mixed(values: Hashes) -> Hashes:
    """Numbers whose bits all depend on all bits of the given ones (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


# -- checks ------------------------------------------------------------------------------------------------------------


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

    def add(self, messages: FlatMessages, file: int, excluded: RowMask) -> None:
        """Adds rows of file number `file`. `excluded` (n,) ones are not compared, such as those with images."""
        ours = ~messages.is_answer(self.prompts)
        every = np.ones(len(messages), np.bool_)
        asked = ours & ~messages.has_role("system", "developer", "assistant", "tool", "function")
        questions = messages.texts_of(asked)
        skipped = excluded | _blank(questions)
        texts = (questions, messages.all_of(ours), messages.all_of(every))
        for digested, each in zip((self.question, self.prompt, self.whole), texts, strict=True):
            digested.append(np.where(skipped, _NOTHING, digests(each)))
        self.file.append(np.full(messages.count, file))
        if self.grams:
            self.parts.append(Grams.of(questions).select(~excluded))


_NOTHING = 0  # the digest of rows that are not compared


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
