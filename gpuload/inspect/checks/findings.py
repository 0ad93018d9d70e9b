"""What `gpuload check` finds, and from which share of the rows it is a warning or an error."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from gpuload.core.words import counted

Level = Literal["error", "warning", "info"]

LEVELS: tuple[Level, ...] = ("error", "warning", "info")

RowMask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class CheckRule:
    """One check."""

    about: str  # what it finds
    remedy: str  # what to do
    # The share of the rows from which a finding has this level, 0 for a single row; None: never. Below both, an info.
    error: float | None = None
    warning: float | None = 0.0

    def level(self, count: int, rows: int) -> Level:
        """The level of a finding in `count` of so many rows."""
        share = count / max(rows, 1)
        if self.error is not None and share >= self.error:
            return "error"
        return "warning" if self.warning is not None and share >= self.warning else "info"


RULES: Mapping[str, CheckRule] = {
    "no loss": CheckRule(
        "rows of which no token is learned",
        "remove these rows, or end each conversation with an answer; loss_on= chooses which messages are learned",
        error=0.01,
    ),
    "all loss": CheckRule(
        "conversations of which every token is learned, prompts included",
        "put {% generation %} only around answers in the chat template, or choose the learned part with loss_on=",
        error=0.01,
    ),
    "answer cut": CheckRule(
        "answers with no end token behind them: cut by the limit, or by a template that writes none",
        "raise the limit, or use a template that ends each answer with a special token: the model learns to stop there",
        error=0.5,
    ),
    "end not learned": CheckRule(
        "answers whose end token has no loss: the model does not learn to stop",
        "put the end token inside of {% generation %}, or use a template without such blocks",
        error=0.5,
    ),
    "inserted text learned": CheckRule(
        "text with loss that the template inserts in front of an answer, such as an empty thinking block",
        "use a template that does not insert it, add the reasoning to the data, or leave the text out of "
        "{% generation %}",
    ),
    "reasoning dropped": CheckRule(
        "reasoning of a last answer that the template does not print; an info for reasoning of earlier turns alone",
        "use a template that prints reasoning_content, or write the reasoning into the content as the template expects",
    ),
    "text dropped": CheckRule(
        "texts of answers that the template does not print",
        "use another template; some print the text or the calls of an answer, and take an empty list for calls, which "
        "normalize_messages='auto' removes",
    ),
    "calls dropped": CheckRule(
        "answers with tool calls that the template does not print: the model learns to end its turn instead",
        "use a template with tools; some print calls only where the content is null",
        error=0.01,
    ),
    "turns not learned": CheckRule(
        "conversations with answers that turns='served' does not learn, because nothing is known about their prompt",
        "the reasons are on the page on rows as served, with what to do: docs/served.md",
        error=0.5,
    ),
    "empty thinking learned": CheckRule(
        "answers whose text has an empty thinking block, in rows as served: it is the data's, and is learned",
        "remove the block from the text of the answers, so that missing_reasoning= says what becomes of them",
        warning=None,
    ),
    "answers rewritten": CheckRule(
        "conversations with answers that inference would not have behind the same prompt, because the template "
        "rewrites history; looked up in a sample",
        "turns='served' makes rows in which each answer is behind the prompt that inference would have",
        warning=None,
    ),
    "double BOS": CheckRule(
        "rows that begin with two BOS tokens",
        "remove the BOS token from the texts or from the template: the tokenizer adds one",
        error=0.0,
    ),
    "control tokens": CheckRule(
        "messages with the text of a special token, which becomes that token",
        "remove the text; for prompts, sanitize_control_tokens in apply_chat_template_kwargs encodes it as plain text",
    ),
    "arguments as text": CheckRule(
        "tool calls with arguments as JSON text, where the template prints objects: they are quoted twice",
        "normalize_messages='auto' makes objects of them",
        error=0.01,
    ),
    "arguments as objects": CheckRule(
        "tool calls with arguments as objects, where the template takes JSON text: they are printed as Python prints "
        "them",
        "write the arguments with json.dumps, or use another template",
        error=0.01,
    ),
    "null printed": CheckRule(
        "messages without content, or nested fields without a value, that the template prints as None or null",
        "normalize_messages='auto' makes empty texts of missing contents, and drop_nulls=True removes nested nulls",
        error=0.01,
    ),
    "unknown roles": CheckRule(
        "messages with a role other than system, developer, user, assistant, tool and function",
        "rename the roles to those of the template: what it makes of others is not known",
    ),
    "KTO labels": CheckRule(
        "answers that a column labels as bad, in data for SFT: they would be learned as good ones",
        'use gpuload.load_pairs(..., objective="kto") in Python and a trainer for KTO, or remove the rows',
        error=0.0,
    ),
    "media": CheckRule(
        "rows that have another number of placeholders than of images, videos or audios",
        "write one placeholder for each, or one part of the content",
        error=0.0,
    ),
    "rows dropped": CheckRule(
        "rows of which the template or the format makes nothing",
        "correct these rows, or use a template that takes them",
        error=0.2,
    ),
    "tokens differ": CheckRule(
        "rows whose tokens differ from the tokenizer's: a load would use the tokenizer itself",
        "report the tokenizer; gpuload falls back to it, which is slow",
        error=0.0,
    ),
    "empty prompts": CheckRule("rows whose prompt is empty", "remove these rows"),
    "duplicate rows": CheckRule(
        "rows with the prompt and the answers of an earlier row",
        "remove the duplicates: they count several times",
        warning=0.02,
    ),
    "duplicate prompts": CheckRule(
        "prompts that an earlier row has, too; only an info for rows with other answers",
        "remove the duplicates: they count several times",
        warning=0.02,
    ),
    "equal pairs": CheckRule("pairs whose chosen answer equals the rejected one", "remove these rows"),
    "over the limit": CheckRule(
        "rows with more tokens than the limit",
        "raise the limit, or shorten the rows: trainers drop or cut them",
        error=0.2,
        warning=0.01,
    ),
    "also elsewhere": CheckRule(
        "prompts that another file has, too: those of --against, or another one of the files",
        "remove the rows from one of the files: a test set that is trained on measures nothing",
        error=0.01,
    ),
    "overlap elsewhere": CheckRule(
        "prompts of which half of the 8-grams are in one prompt of another file",
        "look at both prompts: they may be the same question in other words",
    ),
    "images not counted": CheckRule(
        "files with a column of images, whose tokens are not counted: all lengths are those of the texts",
        "load the files with a processor in the place of the tokenizer; gpuload inspect --images counts the tokens",
    ),
    "one row group": CheckRule(
        "large parquet files that are one row group, which a single thread has to decode",
        "rewrite the file with several row groups",
        warning=None,
    ),
}
"""Name → check, in the order in which findings of one level are shown."""

_OF_FILES = ("one row group", "images not counted")
"""The checks that count files."""


@dataclass(frozen=True)
class Finding:
    """One thing that `gpuload.check` has found.

    Attributes:
        check: its name, see the page on `gpuload check`.
        level: `"error"`, `"warning"` or `"info"`.
        rows: numbers of the rows, counted over all files, as `gpuload show --row` takes them; empty where a finding is
            about files.
        count: in how many rows, or files.
        example: the first place, and what was found there.
        remedy: what to do.
    """

    check: str
    level: Level
    rows: list[int] = field(repr=False)
    count: int
    example: str
    remedy: str

    @property
    def counted(self) -> str:
        """How many rows or files, in words."""
        return counted(self.count, "files" if self.check in _OF_FILES else "rows")

    def to_dict(self) -> dict[str, Any]:
        """The finding as `gpuload check --json` prints it.

        Examples:
            >>> Finding("double BOS", "error", [3], 1, "train.jsonl row 3", "remove one").to_dict()["rows"]
            [3]
        """
        return asdict(self)


def finding(check: str, rows: list[int], count: int, total: int, example: str, level: Level | None = None) -> Finding:
    """What a check has found in so many of all rows, by its rule; `level` instead of that of the rule."""
    rule = RULES[check]
    return Finding(check, level or rule.level(count, total), rows, count, example, rule.remedy)


def in_order(found: list[Finding]) -> list[Finding]:
    """Findings as they are shown: errors first, then in the order of the rules."""
    names = list(RULES)
    return sorted(found, key=lambda each: (LEVELS.index(each.level), names.index(each.check)))
