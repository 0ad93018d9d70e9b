"""How a chat template writes the turns of an assistant: the literals with which answers begin and end.

All of it is found by rendering short conversations whose texts are marks. `answers.py` has the rule and uses it.
"""

import hashlib
import itertools
import re
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gpuload.core.arrays import common_prefix
from gpuload.core.errors import TokenizerError
from gpuload.reference.template_call import TemplateCall
from gpuload.template.probes import Probe, between, probes

_THINKING = re.compile(r"<think")
_BRACKETS = re.compile(r".*[\]>]", re.DOTALL)  # up to the last special token, such as [/INST]
_SPECIAL = re.compile(r"<[^<>\s]+>")  # if no added token of the tokenizer is there
_TOKEN_LIKE = r"<[^<>\s]+>|\[/?[A-Z_]+\]"

_INSIDE = ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<|start|>assistant")  # DeepSeek, twice; gpt-oss
_RESULT = "<|tool_response>"  # Gemma 4 prints it behind a call in any case; TRL counts it as part of the result
_SHORTER_HEADERS = {"5682170caef7abbc": "<|im_start|>assistant"}  # Qwen2.5: a newline is the beginning of the answer


@dataclass(frozen=True)
class End:
    """A literal that ends an answer."""

    text: str  # the last part of the answer
    next: str = ""  # what must follow it


@dataclass(frozen=True)
class Around:
    """How answers begin and end next to messages of one role, where neither header nor ends of `Turns` are there."""

    headers: tuple[str, ...] = ()  # literals after which an answer begins
    ends: tuple[End, ...] = ()  # literals that end one
    starts: tuple[str, ...] = ()  # literals with which one begins right behind a text: there is no header


class Turns:
    """How a template writes the turn of an assistant: the literal that begins it (`header`), and those that end it,
    longest first (`ends`): in the middle of a conversation (`ends_within`), and at its end.

    Raises:
        TokenizerError: the template does not write an assistant's turn in this way.
    """

    def __init__(self, call: TemplateCall) -> None:
        self._call = call
        self.cuts: dict[tuple[Any, ...], list[int]] = {}  # found in literals so far, see `answers.with_answers`
        self._around: dict[str, Around] = {}
        self._speaks: dict[str, bool] = {}
        user, assistant, more = (f"{role} {secrets.token_hex(8)}" for role in ("user", "assistant", "again"))
        before, with_header, once, again = self._short_conversations((user, assistant, more))
        if any(text.count(assistant) > 1 for text in (once, again)) or again.index(assistant) > again.index(more):
            raise unknown("it prints an answer twice, or behind a later message")
        middle, last = between(again, assistant, more), once.partition(assistant)[2]
        gaps = [between(text, user, assistant) for text in (once, again)]
        self.header = self._header(_ending(before, with_header), gaps, middle)
        last = last.rstrip(" ")  # a space belongs to the first token of the next turn
        self._has_end, within = bool(last), last
        ending = before.partition(user)[2]
        prompts = before == with_header or (bool(ending) and last.endswith(ending) and gaps[0].startswith(ending))
        self._prompts_always = prompts and not middle.startswith(last)
        ends = {last}
        if self._prompts_always:
            within = self._before_prompt(middle, last)
            ends = {within} - {""}
        elif not last or not middle.startswith(last):
            # The marker differs in the middle; or there is none, and the next turn's header serves as one.
            within = self._first_marker(middle, spaces=bool(last))
            ends = {last, within} - {""}
        if not self.header.strip() or not ends:
            raise unknown(f"nothing {'ends' if self.header.strip() else 'begins'} an assistant's turn")
        self.ends = tuple(End(text) for text in sorted(ends, key=len, reverse=True))
        self.ends_within = (End(within),) if within else self.ends

    def _short_conversations(self, marks: Sequence[str]) -> tuple[str, str, str, str]:
        """What the template makes of a user's message alone, with generation prompt, with an answer, and with another
        message of the user after that."""
        plain, prompting = self._call, replace(self._call, add_generation_prompt=True)
        as_parts = [[{"type": "text", "text": mark}] for mark in marks]
        reason = "it does not print the texts of messages"
        for contents in (marks, as_parts):
            roles = ("user", "assistant", "user")
            user, answer, more = (
                {"role": role, "content": content} for role, content in zip(roles, contents, strict=True)
            )
            try:
                before, with_header = plain.render([user]), prompting.render([user])
                once, again = plain.render([user, answer]), plain.render([user, answer, more])
            except Exception as error:
                reason = f"it does not render a short conversation ({error!s:.160})"
                continue
            if all(mark in again for mark in marks):
                return before, with_header, once, again
        raise unknown(reason)

    def _header(self, prompt: str, gaps: Sequence[str], other: str) -> str:
        """The literal that begins an assistant's turn: it is in the generation prompt, and in what is between a user's
        text and an answer, but not in the `other` text, between an answer and a user's text."""
        if known := _SHORTER_HEADERS.get(digest(self._call.text())):
            return known
        header = _THINKING.split(prompt)[0]
        if header.strip() and not all(header in gap for gap in gaps):
            # The prompt goes on with what an answer need not have, such as an empty thinking block, or the template
            # prints other white space before it.
            header = self._common_start(header.lstrip(), gaps)
            if header in other:
                header = ""
        if header.strip():
            return header
        # There is no generation prompt: the marker at the end of the user's turn is the header.
        marker = _BRACKETS.match(gaps[-1])
        return marker[0] if marker and all(marker[0] in gap for gap in gaps) else ""

    def _common_start(self, header: str, gaps: Sequence[str]) -> str:
        """The longest start of a header that is in all gaps; it does not end within a special token."""
        inside = {k for token in self.specials.finditer(header) for k in range(token.start() + 1, token.end())}
        sizes = (size for size in range(len(header), 0, -1) if size not in inside)
        size = next((size for size in sizes if all(header[:size] in gap for gap in gaps)), 0)
        return header[:size]

    def _first_marker(self, text: str, spaces: bool) -> str:
        """`text` up to the end of its first special token, and of the white space after it if there is to be any."""
        found = re.search("|".join(map(re.escape, self._added)), text) if self._added else None
        found = found or _SPECIAL.search(text)
        if found is None:
            return ""
        rest = text[found.end() :]
        return text[: found.end() + (len(rest) - len(rest.lstrip()) if spaces else 0)]

    def _before_prompt(self, middle: str, last: str) -> str:
        """The marker at the end of an answer, in a template that always prints a generation prompt behind it."""
        same = middle[: common_prefix(middle, last)]
        stop = str(self._call.tokenizer.eos_token or "")
        if stop and stop in same:
            return same[: same.index(stop) + len(stop)]
        return self._first_marker(same, spaces=False)

    @cached_property
    def _added(self) -> list[str]:
        return sorted(filter(str.strip, map(str, self._call.tokenizer.get_added_vocab())), key=len, reverse=True)

    @cached_property
    def specials(self) -> re.Pattern[str]:
        """Finds special tokens, and what looks like one."""
        return re.compile("|".join([*map(re.escape, self._added), _TOKEN_LIKE]))

    def literals(self) -> Iterator[str]:
        """All that is known to begin or end an answer."""
        yield self.header
        yield from (end.text for end in self.ends)
        for around in list(self._around.values()):
            yield from around.headers
            yield from (end.text + end.next for end in around.ends)
            yield from around.starts

    def is_answer(self, role: str | None) -> bool:
        """Whether messages of this role are answers: those of an assistant, whatever the template calls it."""
        if role in ("assistant", "user", "system", "tool", "developer", None):
            return role == "assistant"
        if role not in self._speaks:
            mark = f"text {secrets.token_hex(8)}"
            user, own = {"role": "user", "content": "q"}, {"role": "assistant", "content": mark}
            try:
                self._speaks[role] = self._call.render([user, own]) == self._call.render([user, own | {"role": role}])
            except Exception:
                self._speaks[role] = False
        return self._speaks[role]

    # -- next to messages of other roles -------------------------------------------------------------------------------

    def around(self, role: str) -> Around:
        """How answers begin after messages of a role and end before them; learned when it is first asked for."""
        if role not in self._around:
            self._around[role] = self._learned(role)
        return self._around[role]

    def headers_near(self, roles: Collection[str]) -> re.Pattern[str]:
        """Finds the literals with which answers begin next to messages of some roles."""
        headers = {self.header, *(header for role in roles for header in self.around(role).headers)}
        return re.compile("|".join(map(re.escape, sorted(headers, key=len, reverse=True))))

    def _learned(self, role: str) -> Around:
        headers: dict[str, None] = {}
        ends: dict[End, None] = {}
        starts: dict[str, None] = {}

        def begins(gap: str) -> bool:
            return any(header in gap for header in (self.header, *headers)) or gap.startswith(tuple(starts))

        for call, messages in probes(self._call, role):
            try:
                whole = call.render([message.given for message in messages])
            except Exception:  # not every template takes every conversation
                continue
            marks = [mark for message in messages for mark in message.marks]
            for k, (one, other) in enumerate(itertools.pairwise(messages), 1):
                gap = one.until(other, whole) or ""
                if any(mark in gap for mark in marks):  # of a message that is printed elsewhere
                    continue
                if one.given["role"] == role and other.is_answer and not begins(gap):
                    header, start = self._beginning(call, messages[:k], gap)
                    headers |= dict.fromkeys(header)
                    starts |= dict.fromkeys(start)
                if one.is_answer and other.given["role"] == role:
                    if not any(end.text + end.next in gap for end in (*self.ends, *ends)):
                        ends |= dict.fromkeys(self._end(call, messages[:k], gap))
                    # A template may print results between the calls of tools and the content of the same message.
                    gap = other.until(Probe(one.given, one.marks[:1]), whole) or ""
                    headers |= {} if begins(gap) else dict.fromkeys(self._short(gap))
        return Around(tuple(headers), tuple(ends), tuple(starts))

    def _beginning(self, call: TemplateCall, before: Sequence[Probe], gap: str) -> tuple[list[str], list[str]]:
        """The literal that begins the message behind some others, as a header; `gap` is between its text and that of
        the message before. It is what the template prints without it as well, with or without generation prompt. If
        that is nothing, the beginning of the message's own literals."""
        begin, prompted, start, bare = 0, 0, "", False
        for prompt in (False, True):
            try:
                alone = replace(call, add_generation_prompt=prompt).render([each.given for each in before])
            except Exception:  # some templates want a message of a user, or an answer, at the end
                continue
            tail = before[-1].rest(alone) or ""
            if prompt:
                prompted, start = common_prefix(tail, gap), self._common_start(tail.lstrip(), [gap]).rstrip()
            else:
                begin, bare = common_prefix(tail, gap), alone.endswith(tuple(before[-1].marks))
        if prompted > begin:
            begin += len(_THINKING.split(gap[begin:prompted])[0])
        for token in self.specials.finditer(gap):
            if token.start() < begin < token.end():
                begin = token.start()
        header = self._short(gap[:begin]) or ([start] if start else [])
        first = self.specials.search(gap)
        return header, [gap[: first.end()]] if bare and first and not header else []

    def _short(self, literal: str) -> list[str]:
        """A literal from its last special token on, with the name of the role if that stands before it."""
        tokens = list(self.specials.finditer(literal))
        if not tokens:
            return [literal] if literal.strip() else []
        start = tokens[-1].start()
        if len(tokens) > 1 and re.search(r"\w", literal[tokens[-2].end() : start]):
            start = tokens[-2].start()
        return [literal[start:]]

    def _end(self, call: TemplateCall, messages: Sequence[Probe], gap: str) -> list[End]:
        """The literal that ends the last of some messages; `gap` is between its text and that of the next message."""
        try:
            tail = messages[-1].rest(call.render([message.given for message in messages]))
        except Exception:  # as above
            return []
        own = (tail or "").rstrip().removesuffix(_RESULT)
        if self._prompts_always:
            own = self._before_prompt(gap, own)
        if not own or not gap.startswith(own):
            return []
        tokens = list(self.specials.finditer(own))
        last = tokens[-1][0] if tokens and tokens[-1].end() == len(own) else ""
        found = self.specials.search(gap, len(own))
        # Between them may be the name of a function, which other rows have not.
        follows = gap[len(own) : found.end()] if found and not gap[len(own) : found.start()].strip() else ""
        if follows and not self._has_end:  # the beginning of the next turn ends an answer
            return [End(follows)]
        return [End(last, follows)] if last or follows else []


def unknown(why: str) -> TokenizerError:
    """The error for a template whose answers cannot be found."""
    return TokenizerError(
        "the answers of an assistant cannot be found in this chat template: it has no {% generation %} blocks, and "
        f"{why}: pass a chat_template with such blocks, or loss_on='all'"
    )


def is_inside(header: str) -> bool:
    """Whether a header is a part of the answer."""
    return header.startswith(_INSIDE)


def digest(template: str) -> str:
    """Identifies the text of a template."""
    return hashlib.blake2b(template.encode(), digest_size=8).hexdigest()


def _ending(before: str, after: str) -> str:
    """What `after` has at its end instead of `before`. A special token that is only partly the same is a part of it."""
    same = common_prefix(before, after)
    opened = after.rfind("<", 0, same)
    return after[opened if opened > after.rfind(">", 0, same) else same :]
