"""Which parts of a rendered conversation are answers of the assistant: those that a model is trained on.

A template with `{% generation %}` blocks says so itself; the tracer records its blocks (`Path.generated`). For all
other templates the rule is:

    an answer begins after the header of an assistant's turn and ends with the marker that ends the turn

Header and marker are literals of the template. They are found once per template, by rendering three short conversations
whose texts are placeholders:

    user, with generation prompt     the text at the end is the header, up to the first <think>; if there is none,
                                     the marker that ends the user's turn, such as [/INST]
    user, assistant                  what follows the assistant's text is the marker at the end of a conversation
    user, assistant, user            what follows it is the marker, then the header of the next turn

Only literals are searched for them: a user's text cannot open or close an answer. Everything between belongs to the
answer: `<think>` blocks, tool calls, the white space after the marker.

    family      template                                                   answer
    ChatML      <|im_start|>assistant⏎TEXT<|im_end|>⏎                      TEXT<|im_end|>⏎
    Llama 3     <|start_header_id|>assistant<|end_header_id|>⏎⏎TEXT<|eot_id|>   TEXT<|eot_id|>
    Gemma       <start_of_turn>model⏎TEXT<end_of_turn>⏎                    TEXT<end_of_turn>⏎
    Phi         <|assistant|>⏎TEXT<|end|>⏎<|endoftext|>                    TEXT<|end|>⏎<|endoftext|>
    Mistral     [INST] TEXT[/INST] TEXT</s>                                 ⎵TEXT</s>
    Cohere      <|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>TEXT<|END_OF_TURN_TOKEN|>   TEXT<|END_OF_TURN_TOKEN|>

TRL's training templates give the same answers, with four exceptions, where the header counts as part of the answer, or
a part of it does. They are followed here: `_HEADER_INSIDE` and `_SHORTER_HEADERS`.
"""

import copy
import hashlib
import itertools
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuload.errors import TokenizerError
from gpuload.reference.template_call import TemplateCall
from gpuload.template.program import ByReference, Path, Ref, Segment, Shape

_BLOCK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_THINKING = re.compile(r"<think")
_BRACKETS = re.compile(r".*[\]>]", re.DOTALL)  # up to the last special token, such as [/INST]
_SPECIAL = re.compile(r"<[^<>\s]+>")  # if no added token of the tokenizer is there

_HEADER_INSIDE = ("<｜Assistant｜>", "<|start|>assistant")  # DeepSeek; gpt-oss
_SHORTER_HEADERS = {"5682170caef7abbc": "<|im_start|>assistant"}  # Qwen2.5: a newline is the beginning of the answer


class UnknownAnswersError(ValueError):
    """The answers of a conversation are unknown; the message says why."""


@dataclass(frozen=True)
class Turns:
    """How a template writes the turn of an assistant.

    Attributes:
        header: literal that begins it.
        inside: the header is a part of the answer.
        ends: literals that end it, longest first: in the middle of a conversation, and at its end.
    """

    header: str
    inside: bool
    ends: tuple[str, ...]


def has_blocks(template: str) -> bool:
    """Whether a template marks what an assistant generates."""
    return _BLOCK.search(template) is not None


def turns_of(call: TemplateCall) -> Turns:
    """Find header and end markers of a template.

    Args:
        call: tokenizer, template and constants.

    Raises:
        TokenizerError: the template does not write an assistant's turn in this way.
    """
    marks = [f"{role} {secrets.token_hex(8)}" for role in ("user", "assistant", "again")]
    as_text, as_parts = list(marks), [[{"type": "text", "text": mark}] for mark in marks]
    plain, prompting = replace(call, add_generation_prompt=False), replace(call, add_generation_prompt=True)
    reason = "it does not print the texts of messages"
    for contents in (as_text, as_parts):
        user, assistant, more = (
            {"role": role, "content": content}
            for role, content in zip(("user", "assistant", "user"), contents, strict=True)
        )
        try:
            before, with_header = plain.render([user]), prompting.render([user])
            last = plain.render([user, assistant]).partition(marks[1])[2]
            again = plain.render([user, assistant, more])
        except Exception as error:
            reason = f"it does not render a short conversation ({error!s:.160})"
            continue
        if all(mark in again for mark in marks):
            break
    else:
        raise _unknown(reason)
    middle = again.partition(marks[1])[2].partition(marks[2])[0]
    header = _SHORTER_HEADERS.get(digest(call.text()), _THINKING.split(_ending(before, with_header))[0])
    if not header:  # there is no generation prompt: the marker at the end of the user's turn is the header
        between = again.partition(marks[0])[2].partition(marks[1])[0]
        marker = _BRACKETS.match(between)
        header = marker[0] if marker else ""
    last = last.rstrip(" ")  # a space belongs to the first token of the next turn
    ends = {last}
    if not last or not middle.startswith(last):
        # The marker differs in the middle; or there is none, and the next turn's header serves as one.
        ends = {last, _first_marker(call, middle, spaces=bool(last))} - {""}
    if not header.strip() or not ends:
        missing = "nothing begins an assistant's turn" if not header.strip() else "nothing ends an assistant's turn"
        raise _unknown(missing)
    return Turns(header, header.startswith(_HEADER_INSIDE), tuple(sorted(ends, key=len, reverse=True)))


def _unknown(why: str) -> TokenizerError:
    return TokenizerError(
        "the answers of an assistant cannot be found in this chat template: it has no {% generation %} blocks, and "
        f"{why}: pass a chat_template with such blocks, or loss_on='all'"
    )


def _ending(before: str, after: str) -> str:
    """What `after` has at its end instead of `before`. A special token that is only partly the same is a part of it."""
    pairs = enumerate(zip(before, after, strict=False))
    same = next((k for k, (one, other) in pairs if one != other), min(len(before), len(after)))
    opened = after.rfind("<", 0, same)
    return after[opened if opened > after.rfind(">", 0, same) else same :]


def digest(template: str) -> str:
    """Identifies the text of a template."""
    return hashlib.blake2b(template.encode(), digest_size=8).hexdigest()


def _first_marker(call: TemplateCall, text: str, spaces: bool) -> str:
    """`text` up to the end of its first special token, and of the white space after it if there is to be any."""
    added = sorted(filter(str.strip, map(str, call.tokenizer.get_added_vocab())), key=len, reverse=True)
    found = re.search("|".join(map(re.escape, added)), text) if added else None
    found = found or _SPECIAL.search(text)
    if found is None:
        return ""
    rest = text[found.end() :]
    return text[: found.end() + (len(rest) - len(rest.lstrip()) if spaces else 0)]


def with_answers(path: Path, turns: Turns) -> Path:
    """The same path, with its answers as `generated` and literals cut where they begin and end."""
    segments: list[Segment] = []
    generated: list[tuple[int, int]] = []
    begun: int | None = None
    for segment in path.segments:
        if not isinstance(segment, str):
            segments.append(segment)
            continue
        rest = segment
        while rest:
            cut, length = _find(rest, turns, begun is not None)
            if cut < 0:
                segments.append(rest)
                break
            if cut + length:
                segments.append(rest[: cut + length])
                rest = rest[cut + length :]
            if begun is None:
                begun = len(segments)
            else:
                generated.append((begun, len(segments)))
                begun = None
            if begun is not None and turns.inside:  # the header follows the cut; do not find it again
                segments.append(turns.header)
                rest = rest[len(turns.header) :]
    if begun is not None:
        generated.append((begun, len(segments)))
    return Path(tuple(segments), tuple(generated))


def _find(text: str, turns: Turns, inside: bool) -> tuple[int, int]:
    """Where the next header, or inside an answer the next end marker, is in `text`; -1 if nowhere. And how many of its
    bytes belong to what is before the cut."""
    if not inside:
        at = text.find(turns.header)
        return at, 0 if turns.inside else len(turns.header)
    found = [(at, -len(end)) for end in turns.ends if (at := text.find(end)) >= 0]
    at, length = min(found, default=(-1, 0))
    return at, -length


def last_only(path: Path, message: int) -> Path:
    """The same path with only those answers that end behind the beginning of a message's first text.

    Args:
        message: the last one of the assistant.
    """
    spans = path.generated or ()
    first = next((k for k, s in enumerate(path.segments) if not isinstance(s, str) and s.message == message), None)
    kept = spans[-1:] if first is None else tuple(span for span in spans if span[1] > first)
    return replace(path, generated=kept)


class Answers:
    """Finds the parts with loss in what one template renders.

    Args:
        call: tokenizer, template and constants.
        loss_on: "assistant" for all answers, "last" for those of the last message of an assistant.

    Raises:
        TokenizerError: the answers of this template are unknown.
    """

    def __init__(self, call: TemplateCall, loss_on: str) -> None:
        self._call, self._loss_on = call, loss_on
        self._turns = None if has_blocks(call.text()) else turns_of(call)

    def with_call(self, call: TemplateCall) -> "Answers":
        """For the same template with other constants, such as tools."""
        other = copy.copy(self)
        other._call = call
        return other

    def of_path(self, shape: Shape, path: Path) -> Path | ByReference:
        """A path with its parts with loss as `generated`; or why rows cannot take it."""
        if self._turns:
            path = with_answers(path, self._turns)
        if path.generated is None:
            return ByReference("the template prints a {% generation %} block elsewhere than where it stands")
        if self._loss_on == "last":
            path = last_only(path, _last_assistant([dict(message).get("role") for message in shape]))
        return path

    def of_text(self, messages: Sequence[Any], text: str) -> list[tuple[int, int]]:
        """The parts with loss of one conversation that transformers has rendered.

        Args:
            messages: the conversation.
            text: what transformers made of it.

        Returns:
            Start and end of each, in characters.

        Raises:
            UnknownAnswersError: they are unknown.
        """
        if self._turns is None:
            rendered, spans = self._call.blocks(messages)
            if rendered != text:
                raise UnknownAnswersError("the template is not deterministic")
            if self._loss_on == "assistant":
                return spans
        path, texts = taken_apart(self._call, messages, text)
        places = [0, *itertools.accumulate(len(s) if isinstance(s, str) else len(texts[s]) for s in path.segments)]
        if self._turns is not None:
            _check_other_fields(messages, self._turns)
            path = with_answers(path, self._turns)
            places = [0, *itertools.accumulate(len(s) if isinstance(s, str) else len(texts[s]) for s in path.segments)]
            spans = [(places[first], places[end]) for first, end in path.generated or ()]
        if self._loss_on == "assistant":
            return spans
        last = _last_assistant([message.get("role") for message in messages])
        pairs = zip(places, path.segments, strict=False)
        begin = next((place for place, s in pairs if isinstance(s, Ref) and s.message == last), None)
        return spans[-1:] if begin is None else [span for span in spans if span[1] > begin]

    def in_bytes(self, messages: Sequence[Any], text: str) -> list[tuple[int, int]]:
        """As `of_text`, in bytes."""
        return [(len(text[:a].encode()), len(text[:b].encode())) for a, b in self.of_text(messages, text)]


def taken_apart(call: TemplateCall, messages: Sequence[Any], text: str) -> tuple[Path, dict[Ref, str]]:
    """What a text is made of: the texts in the contents of its messages, and literals.

    The conversation is rendered once more with a placeholder for each of these texts. What is between two placeholders
    must be in `text` as well, and between these parts the texts, as they are or stripped.

    Returns:
        Segments, and the text of each that is no literal.

    Raises:
        UnknownAnswersError: it is made of something else.
    """
    marks: dict[str, tuple[int, str]] = {}

    def marked(message: int, content: Any) -> Any:
        if isinstance(content, str) and content:
            mark = f"text {secrets.token_hex(8)}"
            marks[mark] = message, content
            return mark
        if isinstance(content, list):
            return [marked(message, part) for part in content]
        if isinstance(content, dict) and "text" in content:
            return content | {"text": marked(message, content["text"])}
        return content

    rendered = call.render(
        [
            message | {"content": marked(k, message["content"])} if "content" in message else message
            for k, message in enumerate(messages)
        ]
    )
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", rendered) if marks else [rendered]
    segments: list[Segment] = []
    texts: dict[Ref, str] = {}
    at = 0
    for number, part in enumerate(parts):
        if number % 2:
            message, content = marks[part]
            forms = sorted({content, content.strip(), content.rstrip(), content.lstrip()}, key=len, reverse=True)
            form = next((form for form in forms if text.startswith(form, at)), None)
            if form is None:
                raise UnknownAnswersError("the template changes the text of a message")
            segment = Ref(message, f"text {number}")
            texts[segment] = form
            segments.append(segment)
            at += len(form)
        elif not text.startswith(part, at):
            raise UnknownAnswersError("the template changes with the texts of messages")
        elif part:
            segments.append(part)
            at += len(part)
    if at != len(text):
        raise UnknownAnswersError("the template changes with the texts of messages")
    return Path(tuple(segments)), texts


def _check_other_fields(messages: Sequence[Any], turns: Turns) -> None:
    """Checks that what `taken_apart` takes for literals cannot open or close an answer."""
    others = [{name: value for name, value in m.items() if name not in ("role", "content")} for m in messages]
    if any(mark.strip() in repr(others) for mark in (turns.header, *turns.ends)):
        raise UnknownAnswersError("a tool call or another field contains the beginning or the end of a turn")


def _last_assistant(roles: Sequence[Any]) -> int:
    return max((number for number, role in enumerate(roles) if role == "assistant"), default=len(roles))
